"""Parse the command line into a verb, its words and its options.

Written by hand, because the rules are few and a library would take longer to load. Options stand before or after the verb. For `run`,
everything from the first word of the command on belongs to that command. An option that is unknown, or that belongs to another verb, is an
error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agent_sandbox._fast.values import dataclass, field
from agent_sandbox.cli.grammar import COMMON, OPTIONS, VERBS
from agent_sandbox.errors import SandboxError


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
    verb = _take_options(line, given)
    if verb is None or verb == "--":
        return _without_verb(given, verb)
    if verb not in VERBS:
        raise _unknown_verb(verb)
    words: list[str] = []
    separated = False
    while (word := _take_options(line, given)) is not None:
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


def _take_options(line: list[str], given: dict[str, list[str]]) -> str | None:
    """Move the leading options of `line` to `given`. Then remove and return the next word; None at the end of the line."""
    while line:
        word = line.pop(0)
        if word in ("-", "--") or not word.startswith("-"):
            return word
        name, equals, value = word.partition("=")
        option = OPTIONS.get(name)
        if option is None:
            raise _unknown_option(name)
        if option.later:
            raise UsageError(f"{option.name} is not there yet: it arrives with {option.later}", hint="run without it")
        if option.value and not equals:
            if not line:
                raise UsageError(f"{name} needs a value: {option.name} {option.value}", hint="see: agent-sandbox help")
            value = line.pop(0)
        elif equals and not option.value:
            raise UsageError(f"{name} takes no value", hint=f"write {name}")
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
    if verb.later:
        raise UsageError(f"{request.verb!r} is not there yet: it arrives with {verb.later}", hint="see: agent-sandbox help")
    for name in request.given:
        if name not in verb.options and name not in COMMON:
            raise UsageError(f"{name} is not an option of {request.verb!r}", hint=f"see: agent-sandbox help {request.verb}")
    if request.has("--help"):
        return
    least, most = verb.words
    if not least <= len(request.words) <= most:
        problem = "an argument is missing" if len(request.words) < least else f"too many arguments: {request.words[most]!r}"
        raise UsageError(f"{problem}; usage: agent-sandbox {verb.usage}", hint=verb.too_many if len(request.words) > most else "")


def _unknown_verb(verb: str) -> UsageError:
    close = _closest(verb, [name for name in VERBS if not VERBS[name].later])
    run = f"to run a program: agent-sandbox run -- {verb} …"
    return UsageError(f"there is no verb {verb!r}", hint=f"did you mean {close!r}?" if close else run)


def _unknown_option(name: str) -> UsageError:
    close = _closest(name, [each.name for each in OPTIONS.values() if not each.later])
    return UsageError(f"there is no option {name!r}", hint=f"did you mean {close}?" if close else "see: agent-sandbox help")


def _closest(word: str, known: Sequence[str]) -> str | None:
    from difflib import get_close_matches  # only on the way to an error message

    return next(iter(get_close_matches(word, known, 1)), None)
