"""What a policy wants somebody to agree to before it is done, and whose word counts.

Rules only add questions: what is denied stays denied, and without a rule nobody is asked. They see what `readers.shell` understands of a
command, which is no wall: the view and the network are. So they err on the side of asking. Words are looked for anywhere among a program's
arguments, and in code that stands on the command line; where there are rules about commands, one that cannot be understood whole is asked
about, too: a name that is computed, a program that is not known, code that is typed in. What a file, a package or a test suite runs is in
none of this: ask about `runs-code` where that matters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from agent_sandbox._fast.values import TYPE_CHECKING, assert_never, dataclass, replace
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.action import Action, CallTool, Promote, RunCode, RunCommand, Undo
from agent_sandbox.policy.programs import check_name, covers
from agent_sandbox.readers.shell import POSIX_SHELLS

if TYPE_CHECKING:
    from agent_sandbox.readers.shell.effects import Understanding, Use

EFFECTS = (
    "reads",
    "writes",
    "destroys",
    "network",
    "runs-code",
    "privilege",
    "processes",
    "system",
    "unknown",
)  # of `commands.effects.Kind`
ANOTHER_USER, SECOND_FACTOR = NEEDS = ("another-user", "second-factor")
LIFTABLE = ("programs", "limits", "paths")


@dataclass(frozen=True)
class AskRules:
    """What is asked about. `opaque` is on by itself where there are rules about commands, unless it is set.

    `commands` are words: `git push **` is git with `push` among its arguments. `approvers` are the users whose word counts, all where it
    is None; `needs` is what a yes takes besides; `elevate` is which sorts of rules somebody may lift for a time, all where it is None.
    """

    commands: tuple[str, ...] = ()
    effects: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    promotions: bool = False
    protected: bool = False
    opaque: bool | None = None
    approvers: tuple[str, ...] | None = None
    needs: tuple[str, ...] = ()
    elevate: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for each in self.commands:
            check_command(each)
        for each in self.tools:
            check_name(each)
        for chosen, known, name in ((self.effects, EFFECTS, "effect"), (self.needs, NEEDS, "need"), (self.elevate or (), LIFTABLE, "rule")):
            for each in chosen:
                check_one_of(each, known, name)
        object.__setattr__(self, "opaque", self.about_commands if self.opaque is None else self.opaque)

    @property
    def about_commands(self) -> bool:
        """Whether what a command would do has to be understood."""
        return bool(self.commands or self.effects)

    @property
    def asks(self) -> bool:
        """Whether anybody is ever asked."""
        return bool(self.about_commands or self.tools or self.promotions or self.protected or self.opaque)

    def narrowed(self, other: AskRules) -> AskRules:
        """All that either asks about; and only whose word counts with both, with all that either needs."""
        return AskRules(
            _union(self.commands, other.commands),
            _union(self.effects, other.effects),
            _union(self.tools, other.tools),
            self.promotions or other.promotions,
            self.protected or other.protected,
            bool(self.opaque or other.opaque),
            _both(self.approvers, other.approvers),
            _union(self.needs, other.needs),
            _both(self.elevate, other.elevate),
        )


NOBODY_IS_ASKED = AskRules()


@dataclass(frozen=True)
class Word:
    """Who has said something, as the kernel numbers users, and whether they have shown a second factor for it."""

    user: int
    factor: bool = False

    def counts(self, needs: Iterable[str], approvers: Collection[int] | None, *, asker: int) -> bool:
        """Whether it is enough for what `asker` asks for, where that `needs` something and only the word of certain users counts.

        Another user is root, or one of those: with ids of their own for containers, users write files that are not theirs by name.
        """
        if approvers is not None and self.user not in approvers:
            return False
        another = self.user != asker and self.user in (0, *(approvers or ()))
        return (another or ANOTHER_USER not in needs) and (self.factor or SECOND_FACTOR not in needs)


def check_command(text: str) -> None:
    """Raise `PolicyError` for what are no words of a command."""
    words = text.split()
    if not words or words[0] == "**" or "**" in words[:-1] or not text.isprintable():
        raise PolicyError(f"not the words of a command: {text!r}", hint='write "git push **" or "npm publish"')
    check_name(words[0])


def check_one_of(text: str, known: Iterable[str], name: str) -> None:
    """Raise `PolicyError` for a name that is none of those known."""
    if text not in known:
        raise PolicyError(f"there is no {name} {text!r}", hint=f"use one of {', '.join(known)}")


def question_about(rules: AskRules, action: Action) -> tuple[str, str] | None:
    """The first rule that wants somebody asked about an action, and why; None where none does."""
    match action:
        case RunCommand():
            if not (rules.about_commands or rules.opaque):
                return None
            return _first(touched(rules, _understood(action)))
        case RunCode():
            return _code(rules, action)
        case Promote():
            if rules.promotions:
                return "promotions", "it changes real files"
            return (
                ("protected", f"it changes what is protected: {', '.join(action.protected)}")
                if rules.protected and action.protected
                else None
            )
        case Undo():
            return ("promotions", "it changes real files back") if rules.promotions else None
        case CallTool():
            return ("tools", f"it calls the tool {action.tool!r}") if covers(rules.tools, action.tool) else None
        case _:
            assert_never(action)


def _understood(action: RunCommand) -> Understanding:
    """What is understood of a command, and the command itself: what a shell does without a program is in no list of programs."""
    from agent_sandbox.policy.tokens import spellings_of
    from agent_sandbox.readers.shell.analyze import understand_argv  # only where somebody may be asked
    from agent_sandbox.readers.shell.effects import Use

    found = understand_argv(action.argv)
    itself = tuple(Use(words[1].rpartition("/")[2], words[2:], ()) for words in spellings_of(action))
    return replace(found, uses=(*found.uses, *itself))


def touched(rules: AskRules, understood: Understanding) -> tuple[str, ...]:
    """The rules that what was understood of a command falls under, each with its reason after a colon, in the order of the rules."""
    found = [f"commands:it is {pattern}" for pattern in rules.commands if any(_is(pattern.split(), use) for use in understood.uses)]
    if not found:
        named = (pattern for pattern in rules.commands if any(_names(pattern.split(), use) for use in understood.uses))
        found = [f"commands:it names what {pattern} is about" for pattern in named]
    kinds = {kind.value for kind in understood.kinds}
    for effect in rules.effects:
        if effect in kinds:
            what = next((each.what for each in understood.effects if each.kind.value == effect and each.what), "")
            found.append(f"effects:what it does is of the kind {effect}" + (f" ({what[:80]})" if what else ""))
    unclear = understood.unreadable or next(iter(understood.unknown), "") or next(filter(None, map(_typed_in, understood.uses)), "")
    if rules.opaque and (unclear or "unknown" in kinds or any("/" in use.tool for use in understood.uses)):
        found.append(f"opaque:it cannot be understood whole: {unclear or 'what its program does is not known'}")
    return tuple(found)


def _code(rules: AskRules, action: RunCode) -> tuple[str, str] | None:
    """Of a command line in bash as of any other, where somebody has looked; of other code only that it is code."""
    if action.language == "bash" and (rules.about_commands or rules.opaque):
        if action.touches is None:
            return "opaque", "nobody has looked at what it would do"
        if found := _first(action.touches):
            return found
    return ("effects", "what it does is of the kind runs-code") if "runs-code" in rules.effects else None


def _first(found: tuple[str, ...]) -> tuple[str, str] | None:
    if not found:
        return None
    rule, _, why = found[0].partition(":")
    return rule, why


def _is(pattern: list[str], use: Use) -> bool:
    """Whether a program is started with these words among its arguments, in this order, whatever stands between them."""
    name, *words = pattern
    left = iter(use.arguments)
    return covers((name,), use.tool.rpartition("/")[2]) and all(any(_same(word, each) for each in left) for word in words if word != "**")


def _names(pattern: list[str], use: Use) -> bool:
    """Whether a program is handed the one that the words are about: as a file, to be copied, linked or loaded, or within code that it runs,
    with the other words beside it."""
    name, *words = (word for word in pattern if word != "**")
    if any("/" in each and covers((name,), each.rpartition("/")[2]) for each in use.arguments):
        return True
    if not any(effect.kind.value in ("runs-code", "unknown") for effect in use.effects):
        return False
    said = "".join(each if each.isalnum() or each in "_-.+" else " " for each in " ".join(use.arguments)).split()
    return any(covers((name,), each) for each in said) and all(any(_same(word, each) for each in said) for word in words)


def _typed_in(use: Use) -> str:
    """Of a program that runs code which stands on the command line, or comes in, in another language than a shell's: that it does."""
    for effect in use.effects:
        typed = " -" in effect.what or effect.what == "standard input" or use.tool.endswith("=")
        if effect.kind.value == "runs-code" and typed and use.tool not in POSIX_SHELLS:
            return f"{use.tool.rstrip('=')} runs code that is not read"
    return ""


def _same(word: str, argument: str) -> bool:
    return argument.startswith(word[:-1]) if word.endswith("*") else argument == word


def _union(ours: tuple[str, ...], theirs: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*ours, *theirs)))


def _both(ours: tuple[str, ...] | None, theirs: tuple[str, ...] | None) -> tuple[str, ...] | None:
    if ours is None or theirs is None:
        return theirs if ours is None else ours
    return tuple(each for each in ours if each in theirs)
