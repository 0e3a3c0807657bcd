"""Look for patterns in Bash: by what `policy.commands` understands of it. Starting programs is what the language is for, and no issue."""

from __future__ import annotations

from agent_sandbox.policy.code.model import Findings, Matcher
from agent_sandbox.policy.code.rules import INTRICATE
from agent_sandbox.policy.commands.effects import Effect, Kind, Use
from agent_sandbox.policy.commands.parsing import parse
from agent_sandbox.policy.commands.reading import understand
from agent_sandbox.policy.commands.syntax import Function, Pipeline, Program, Simple, Text
from agent_sandbox.policy.commands.wrappers import SHELLS

_WHOLE_MACHINE = frozenset(
    {"/", "/*", "/.", "~", "~/*", "/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/root", "/sbin", "/usr", "/var"}
)
_UNKNOWN = (
    *(("whose name it computes", "$command"), ("runs a command line", "| sh"), ("runs a text", "| sh"), ("runs what it is fed", "| sh")),
    *(("with the commands in it", "eval"), ("has a command in it", "eval")),
    ("gives a variable another name", ""),  # who is asked about a command should know; scripts do it all the time
)


def look(source: str, wanted: Matcher, found: Findings) -> None:
    """Note what the text asks for. Never raises, whatever the text."""
    known = understand(source)
    if known.unreadable:
        found.add(INTRICATE, 1)
        return
    patterns = {_pattern(use, each): use.tool for use in known.uses for each in use.effects}
    for use in known.uses:
        patterns.setdefault(use.tool, use.tool)  # a tool may be forbidden by its name
    for unknown in known.unknown:
        patterns.setdefault(next((pattern for words, pattern in _UNKNOWN if words in unknown), INTRICATE.pattern), "$")
    if _calls_itself_twice(parse(source)):
        patterns[":(){ :|:& };:"] = ""
    for rule in wanted.rules:
        for name in rule.spelt:
            if name in patterns:
                at = source.find(patterns[name]) if patterns[name] else 0
                found.add(rule, source.count("\n", 0, max(at, 0)) + 1)


def _pattern(use: Use, effect: Effect) -> str:
    """The default pattern that an effect belongs to; nothing for one that is no issue."""
    kind, what = effect.kind, effect.what
    if use.tool == "eval":
        return "eval"
    if kind is Kind.NETWORK:
        return "network"
    if kind is Kind.RUNS_CODE and use.tool in SHELLS and what == "standard input":
        return "| sh"
    if kind is Kind.DESTROYS and what and ((what.rstrip("/") or "/") in _WHOLE_MACHINE or what.startswith("/dev/")):
        return "rm -rf /"
    return ""


def _calls_itself_twice(program: Program) -> bool:
    waiting, defined = list(program), list[tuple[str, Pipeline]]()
    for pipeline in waiting:
        for command in pipeline.commands:
            if isinstance(command, Function):
                defined += [(command.name, inner) for inner in _pipelines(command.body)]
    return any(sum(_named(command, name) for command in inner.commands) > 1 for name, inner in defined)


def _pipelines(program: Program) -> list[Pipeline]:
    found, waiting = list[Pipeline](), list(program)
    while waiting:
        pipeline = waiting.pop()
        found.append(pipeline)
        for command in pipeline.commands:
            waiting += [inner for body in getattr(command, "bodies", ()) for inner in body]
    return found


def _named(command: object, name: str) -> bool:
    return isinstance(command, Simple) and command.words[:1] == ((Text(name),),)
