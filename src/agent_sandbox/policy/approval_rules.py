"""Approval rules: which actions need approval, and whose approval counts.

A rule can only require approval: a denied action stays denied, and without a rule nothing needs approval. Rules judge a command by the
analysis of `readers.shell`, which is no security boundary (the view and the network are), so they err on the side of asking. Words are
searched among all arguments of a program, and in code on the command line. If there are rules about commands, a command that cannot be
fully understood needs approval too: a computed name, an unknown program, inline code. Code in files, packages and test suites is not
analysed: use `runs-code` where that matters.
"""

from __future__ import annotations

from agent_sandbox._fast.values import TYPE_CHECKING, assert_never, dataclass, replace
from agent_sandbox.policy.action import FILE_READS, Action, CallTool, Connect, OpenNetwork, Promote, RunCode, RunCommand, Undo, UseFile
from agent_sandbox.policy.model import ANOTHER_USER, SECOND_FACTOR, AskRules
from agent_sandbox.policy.programs import covers
from agent_sandbox.readers.shell import POSIX_SHELLS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from agent_sandbox.readers.shell.effects import Understanding, Use


@dataclass(frozen=True)
class Word:
    """The answer of one user to a request for approval: the uid of the user, and whether the user showed a second factor."""

    user: int
    factor: bool = False

    def counts(self, needs: Iterable[str], approvers: Collection[int] | None, *, asker: int) -> bool:
        """Return whether this answer is enough for a request of `asker` with these `needs`. If `approvers` is None, everybody may answer.

        If the answer of another user is needed, only root or a named approver counts as one: a user with subordinate ids for containers can
        write files under other uids.
        """
        if approvers is not None and self.user not in approvers:
            return False
        another = self.user != asker and self.user in (0, *(approvers or ()))
        return (another or ANOTHER_USER not in needs) and (self.factor or SECOND_FACTOR not in needs)


def question_about(rules: AskRules, action: Action) -> tuple[str, str] | None:
    """Return the first rule that requires approval of an action, and the reason; None if no rule does."""
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
                ("protected", f"it changes protected files: {', '.join(action.protected)}")
                if rules.protected and action.protected
                else None
            )
        case Undo():
            return ("promotions", "it changes real files back") if rules.promotions else None
        case CallTool():
            return ("tools", f"it calls the tool {action.tool!r}") if covers(rules.tools, action.tool) else None
        case UseFile():
            return _file(rules, action)
        case OpenNetwork():
            return "network", "it opens the network further"
        case Connect():
            return None  # the network rules say for which hosts somebody is asked
        case _:
            assert_never(action)


def _understood(action: RunCommand) -> Understanding:
    """Analyse a command. The command itself is added to the uses, because the analysis leaves out shell builtins without effects."""
    from agent_sandbox.policy.tokens import spellings_of  # only needed if there are approval rules
    from agent_sandbox.readers.shell.analyze import understand_argv
    from agent_sandbox.readers.shell.effects import Use

    understood = understand_argv(action.argv)
    itself = tuple(Use(words[1].rpartition("/")[2], words[2:], ()) for words in spellings_of(action))
    return replace(understood, uses=(*understood.uses, *itself))


def touched(rules: AskRules, understood: Understanding) -> tuple[str, ...]:
    """Return the approval rules that apply to an analysed command, each as `rule:reason`, in the order of the rules."""
    reasons = [f"commands:it is {pattern}" for pattern in rules.commands if any(_is(pattern.split(), use) for use in understood.uses)]
    if not reasons:
        named = (pattern for pattern in rules.commands if any(_names(pattern.split(), use) for use in understood.uses))
        reasons = [f"commands:it passes the program of {pattern} to another program" for pattern in named]
    kinds = {kind.value for kind in understood.kinds}
    for effect in rules.effects:
        if effect in kinds:
            what = next((each.what for each in understood.effects if each.kind.value == effect and each.what), "")
            reasons.append(f"effects:it has an effect of the kind {effect}" + (f" ({what[:80]})" if what else ""))
    unclear = understood.unreadable or next(iter(understood.unknown), "") or next(filter(None, map(_typed_in, understood.uses)), "")
    if rules.opaque and (unclear or "unknown" in kinds or any("/" in use.tool for use in understood.uses)):
        reasons.append(f"opaque:it cannot be analysed completely: {unclear or 'the effects of its program are unknown'}")
    return tuple(reasons)


def _code(rules: AskRules, action: RunCode) -> tuple[str, str] | None:
    """Return the rule that requires approval of code, and the reason; None if no rule does. Bash is judged as a command line."""
    if action.language == "bash" and (rules.about_commands or rules.opaque):
        if action.touches is None:
            return "opaque", "its effects were not analysed"
        if question := _first(action.touches):
            return question
    return ("effects", "it has an effect of the kind runs-code") if "runs-code" in rules.effects else None


def _file(rules: AskRules, action: UseFile) -> tuple[str, str] | None:
    """Return the rule that requires approval of an operation on a file, and the reason. Removing is writing, too."""
    kinds = ("reads",) if action.operation in FILE_READS else ("destroys", "writes") if action.operation == "remove" else ("writes",)
    kind = next((each for each in kinds if each in rules.effects), None)
    return None if kind is None else ("effects", f"it has an effect of the kind {kind} ({action.path[:80]})")


def _first(reasons: tuple[str, ...]) -> tuple[str, str] | None:
    if not reasons:
        return None
    rule, _, why = reasons[0].partition(":")
    return rule, why


def _is(pattern: list[str], use: Use) -> bool:
    """Return whether the pattern's program is started with the pattern's words among its arguments, in their order."""
    name, *words = pattern
    left = iter(use.arguments)
    return covers((name,), use.tool.rpartition("/")[2]) and all(any(_same(word, each) for each in left) for word in words if word != "**")


def _names(pattern: list[str], use: Use) -> bool:
    """Return whether the arguments of a use mention the program that a pattern is about.

    Either an argument is a path to that program, or the arguments are code that has the program's name and all other words of the pattern.
    """
    name, *words = (word for word in pattern if word != "**")
    if any("/" in each and covers((name,), each.rpartition("/")[2]) for each in use.arguments):
        return True
    if not any(effect.kind.value in ("runs-code", "unknown") for effect in use.effects):
        return False
    code_words = "".join(each if each.isalnum() or each in "_-.+" else " " for each in " ".join(use.arguments)).split()
    return any(covers((name,), each) for each in code_words) and all(any(_same(word, each) for each in code_words) for word in words)


def _typed_in(use: Use) -> str:
    """Return a sentence about code that a program runs from the command line or standard input and that is not analysed.

    Empty if there is no such code. The code of shells is analysed.
    """
    for effect in use.effects:
        typed = " -" in effect.what or effect.what == "standard input" or use.tool.endswith("=")
        if effect.kind.value == "runs-code" and typed and use.tool not in POSIX_SHELLS:
            return f"{use.tool.rstrip('=')} runs code that is not read"
    return ""


def _same(word: str, argument: str) -> bool:
    return argument.startswith(word[:-1]) if word.endswith("*") else argument == word
