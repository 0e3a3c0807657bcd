"""`policy`: what the policy files mean here, what they would say to a command, and what is odd about them. Only `learn` runs anything."""

from __future__ import annotations

import json

from agent_sandbox.cli.context import effective_of, layers_for, project_of
from agent_sandbox.cli.options import COMMON
from agent_sandbox.cli.parser import Request, UsageError
from agent_sandbox.cli.render.messages import remark, shown
from agent_sandbox.engine.work import Command
from agent_sandbox.policy.decide import Allow, Ask, Deny
from agent_sandbox.policy.explanation import Tried, explain, lint, try_command
from agent_sandbox.policy.files.layers import Effective
from agent_sandbox.policy.files.settings import json_schema
from agent_sandbox.policy_files import early_look

ASKED, DENIED = 3, 126  # as when it is run


def policy(request: Request) -> int:
    """The verb `policy`."""
    what, *rest = request.words
    if what == "learn" and rest:
        from agent_sandbox.cli.commands.learn import learn  # and with it all that runs something

        return learn(request, tuple(rest))
    for option in request.given:
        if option not in (*COMMON, "--policy"):
            raise UsageError(f"{option} goes with policy learn", hint="help policy")
    match what:
        case "explain" if not rest:
            return _explain(request)
        case "lint" if not rest:
            return _lint(request)
        case "schema" if not rest:
            print(json.dumps(json_schema(), indent=2))
            return 0
        case "test" if len(rest) == 1:
            return _test(request, rest[0])
        case _:
            raise UsageError(
                f"policy takes explain, lint, schema, test and a command, or learn and commands, not {' '.join(request.words)!r}",
                hint="help policy",
            )


def _explain(request: Request) -> int:
    project = project_of(request)
    found, layers = effective_of(request, project), layers_for(request, project)
    if request.has("--json"):
        from agent_sandbox.cli.render.json import print_document

        said = {"name": found.policy.name, "digest": found.policy.digest(), "lines": list(explain(found)), "warnings": list(found.warnings)}
        print_document("policy", {**said, "files": [layer.origin for layer in layers.all]})
        return 0
    for layer in layers.all:
        print(f"from {shown(layer.origin)}")
    for line in explain(found):
        print(shown(line))
    return 0


def _lint(request: Request) -> int:
    """Exits with 1 when there is something to remark on."""
    project = project_of(request)
    layers = layers_for(request, project)
    remarks = lint(layers.all, effective_of(request, project))
    if request.has("--json"):
        from agent_sandbox.cli.render.json import print_document

        print_document("policy-lint", {"remarks": [{"key": each.key, "what": each.what, "remedy": each.remedy} for each in remarks]})
        return 1 if remarks else 0
    for each in remarks:
        print(shown(f"{each.key}: {each.what} ({each.remedy})"))
    if not remarks and not request.has("--quiet"):
        remark(f"nothing is odd about {len(layers.all)} policy files" if layers.all else "there are no policy files")
    return 1 if remarks else 0


def _tried(found: Effective, command: str) -> Tried:
    """What the gate would say, and before it the early look, where a file asks for one."""
    tried, early = try_command(found.policy, command), early_look(found)
    reason = early.against(found.policy, Command(("bash", "-c", command))) if early is not None else None
    return tried if reason is None or isinstance(tried.verdict, Deny) else Tried(Deny(reason), tried.understood)


def _test(request: Request, command: str) -> int:
    """Exits with 0 when it would be allowed, with 3 when somebody would be asked, and with 126 when it is denied, as a run would."""
    tried = _tried(effective_of(request, project_of(request)), command)
    allowed, asked = isinstance(tried.verdict, Allow), isinstance(tried.verdict, Ask)
    code = 0 if allowed else ASKED if asked else DENIED
    if request.has("--json"):
        from agent_sandbox.cli.render.json import print_document

        print_document("policy-test", {**_document(tried, allowed), "asked": asked})
        return code
    print(shown(f"{'allowed' if allowed else 'asked about' if asked else 'denied'}: {tried.verdict.because.why}"))
    if tried.verdict.because.remedy:
        print(shown(f"  {tried.verdict.because.remedy}"))
    understood = tried.understood
    for use in understood.uses:
        effects = ", ".join(f"{effect.kind.value} {effect.what}".rstrip() for effect in use.effects) or "no effect that is known of"
        print(shown(f"  {' '.join((use.tool, *use.arguments))}: {effects}"))
    for unknown in (*understood.unknown, *((understood.unreadable,) if understood.unreadable else ())):
        print(shown(f"  not known: {unknown}"))
    return code


def _document(tried: Tried, allowed: bool) -> dict[str, object]:
    because, understood = tried.verdict.because, tried.understood
    return {
        "allowed": allowed,
        "rule": because.rule,
        "why": because.why,
        "remedy": because.remedy,
        "tools": list(understood.tools),
        "uses": [
            {
                "tool": use.tool,
                "arguments": list(use.arguments),
                "effects": [{"kind": effect.kind.value, "what": effect.what} for effect in use.effects],
            }
            for use in understood.uses
        ],
        "unknown": [*understood.unknown, *((understood.unreadable,) if understood.unreadable else ())],
    }
