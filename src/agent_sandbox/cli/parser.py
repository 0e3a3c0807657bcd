"""Parse the command line into a verb, its words and its options.

Written by hand, because the rules are few and a library would take longer to load. Options stand before or after the verb. For `run`,
everything from the first word of the command on belongs to that command. An option that is unknown, or that belongs to another verb, is an
error. So is an empty value, as a script writes it whose variable is not set: it would otherwise count as no wish.
"""

from __future__ import annotations

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, field
from agent_sandbox.cli.grammar import COMMON, OPTIONS, VERBS
from agent_sandbox.errors import SandboxError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NAMED = 4  # verbs in a hint
_MAY_BE_EMPTY = ("--allow",)  # no program at all


class UsageError(SandboxError):
    """The command line cannot be understood."""


@dataclass(frozen=True)
class Request:
    """A parsed command line. `words` are its arguments without verb and options. `cli.options` reads the options of each verb from it."""

    verb: str
    words: tuple[str, ...] = ()
    given: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by the option's long name; a switch has an empty value
    separated: bool = False  # whether the words came after `--`

    def has(self, option: str) -> bool:
        """Whether a switch, or an option with a value, was given."""
        return option in self.given

    def value(self, option: str) -> str | None:
        """Return the value of an option, the last one if there are several; None if it was not given."""
        return self.given[option][-1] if option in self.given else None

    def values(self, option: str) -> tuple[str, ...]:
        """Return all values of an option, in order."""
        return self.given.get(option, ())


def parse(argv: Sequence[str]) -> Request:
    """Parse the words after the program's name. Raises `UsageError`."""
    line = list(argv)
    given: dict[str, list[str]] = {}
    verb = _take_options(line, given, next((word for word in line if word in VERBS), ""))
    if verb is None or verb == "--":
        return _without_verb(given, verb)
    if verb not in VERBS:
        raise unknown_verb(verb)
    words: list[str] = []
    separated = False
    while (word := _take_options(line, given, verb)) is not None:
        if word == "--":
            separated = True
            words += line
            break
        words.append(word)
        if VERBS[verb].command:  # from here on it is the command's own line
            words += line
            break
    request = Request(verb, tuple(words), {name: tuple(values) for name, values in given.items()}, separated)
    _check(request)
    return request


def _take_options(line: list[str], given: dict[str, list[str]], verb: str) -> str | None:
    """Move the leading options of `line` to `given`. Then remove and return the next word; None at the end of the line.

    `verb` is the verb of the line, or probably so; empty if it has none.
    """
    while line:
        word = line.pop(0)
        if word in ("-", "--") or not word.startswith("-"):
            return word
        name, equals, value = word.partition("=")
        option = OPTIONS.get(name)
        if option is None:
            raise _unknown_option(name, verb)
        if option.value and not equals:
            if not line:
                raise UsageError(f"{name} needs a value: {option.name} {option.value}", hint=f"see: agent-sandbox help {verb}".rstrip())
            value = line.pop(0)
        elif equals and not option.value:
            raise UsageError(f"{name} takes no value", hint=f"write {name}")
        if option.value and not value and option.name not in _MAY_BE_EMPTY:
            raise UsageError(f"{name} is empty", hint=f"give it a value ({option.name} {option.value}), or leave it out")
        given.setdefault(option.name, []).append(value)
    return None


def _without_verb(given: Mapping[str, list[str]], verb: str | None) -> Request:
    if "--version" in given:
        return Request("version", given={name: tuple(values) for name, values in given.items()})
    if verb is None and ("--help" in given or not given):
        return Request("help", given={name: tuple(values) for name, values in given.items()})
    raise UsageError("the verb is missing", hint="see: agent-sandbox help")


def _check(request: Request) -> None:
    verb = VERBS[request.verb]
    for name in request.given:
        if name not in verb.every_option:
            others = [each for each in VERBS if name in VERBS[each].options][:_NAMED]
            hint = f"it is one of {', '.join(others)}; " if others else ""
            raise UsageError(f"{name} is not an option of {request.verb!r}", hint=f"{hint}see: agent-sandbox help {request.verb}")
    if request.has("--help"):
        return
    least, most = verb.words
    if not least <= len(request.words) <= most:
        problem = "an argument is missing" if len(request.words) < least else f"too many arguments: {request.words[most]!r}"
        raise UsageError(f"{problem}; usage: agent-sandbox {verb.usage}", hint=verb.too_many if len(request.words) > most else "")


def unknown_verb(verb: str) -> UsageError:
    """Return the error for a verb that does not exist, with the verb that was probably meant."""
    close = _closest(verb, list(VERBS))
    run = f"to run a program: agent-sandbox run -- {verb} …; all verbs: agent-sandbox help"
    return UsageError(f"there is no verb {verb!r}", hint=f"did you mean {close!r}?" if close else run)


def _unknown_option(name: str, verb: str) -> UsageError:
    """Return the error for an option that does not exist. Only options of the verb are suggested."""
    known = VERBS[verb].every_option if verb in VERBS else COMMON
    close = _closest(name, [spelling for each in known for spelling in (each, *OPTIONS[each].short) if spelling.startswith("--")])
    return UsageError(
        f"there is no option {name!r}", hint=f"did you mean {close}?" if close else f"see: agent-sandbox help {verb}".rstrip()
    )


def _closest(word: str, known: Sequence[str]) -> str | None:
    """Return the only known word that begins with `word`, or the one with the fewest slips of the finger; None if all are other words."""
    begun = [each for each in known if each.startswith(word)] if len(word.lstrip("-")) > 2 else []
    if len(begun) == 1:
        return begun[0]
    most = min(2, len(word.lstrip("-")) // 3)  # almost everything is near a word of two letters
    distances = {each: _slips(word, each) for each in known if abs(len(each) - len(word)) <= most}
    best = min(distances, key=lambda each: distances[each], default=None)
    return best if best is not None and distances[best] <= most else None


def _slips(one: str, other: str) -> int:
    """Return how many letters must be added, left out, replaced or swapped with their neighbour to make `other` of `one`.

    >>> _slips("stauts", "status"), _slips("diff", "dif"), _slips("run", "log")
    (1, 1, 3)
    """
    rows = [list(range(len(other) + 1))]
    for i, letter in enumerate(one, 1):
        row = [i]
        for j, against in enumerate(other, 1):
            least = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (letter != against))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == against:
                least = min(least, rows[-2][j - 2] + 1)
            row.append(least)
        rows.append(row)
    return rows[-1][-1]
