"""`grant`, `revoke` and `capabilities`: what a person permits a sandbox beyond asking each time, for a while, and takes back."""

from __future__ import annotations

import os
import shlex
import time

from agent_sandbox._fast.values import replace
from agent_sandbox.assembly import here
from agent_sandbox.cli.commands.approve import somebody
from agent_sandbox.cli.context import policy_of, project_of
from agent_sandbox.cli.parser import Request, UsageError
from agent_sandbox.cli.render import quantities
from agent_sandbox.cli.render.messages import remark, shown
from agent_sandbox.cli.render.quantities import counted
from agent_sandbox.engine.elevations import Raised
from agent_sandbox.engine.grants import Standing
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.approval_rules import Word
from agent_sandbox.policy.tokens import Pattern, spell
from agent_sandbox.workspace.store import sandbox_id

KINDS = ("run", "code", "promote", "undo", "call")  # the first word of a pattern


def grant(request: Request) -> int:
    """The verb `grant`: prints the token, and nothing else, on standard output."""
    if request.has("--elevate"):
        return _elevate(request)
    for option in ("--allow", "--reveal", "--timeout", "--memory", "--disk", "--processes"):
        if request.has(option):
            raise UsageError(f"{option} lifts a rule, which is an elevation", hint="add --elevate")
    if not request.words:
        raise UsageError("what is to be granted is missing", hint='agent-sandbox grant "run git push **" --for 10m')
    patterns = tuple(_pattern(text) for text in request.words)
    seconds, times = _seconds(request), _times(request)
    sandbox = request.value("--sandbox") or sandbox_id(project_of(request).path)
    token = here().capabilities().grant(sandbox, patterns, seconds=seconds, times=times, by=somebody(), factor=_factor(request))
    if request.has("--json"):
        from agent_sandbox.cli.render.json import print_document

        print_document("grant", {"token": spell(token), "sandbox": sandbox, "seconds": seconds, "times": times})
        return 0
    print(spell(token))
    if not request.has("--quiet"):
        often = f", {counted(times, 'time')} at most" if times is not None else ""
        remark(f"granted to {sandbox} for {seconds:g} s{often}; hand it to a run with --capability, or in AGENT_SANDBOX_CAPABILITY")
    return 0


def _elevate(request: Request) -> int:
    from agent_sandbox.cli import elevation

    if request.words or request.has("--times"):
        raise UsageError("an elevation is of rules, for a time, and takes no pattern", hint="grant --elevate --allow curl --for 10m")
    project, seconds = project_of(request), _seconds(request)
    sandbox, what = request.value("--sandbox") or sandbox_id(project.path), elevation.of_request(request)
    bare = replace(request, given={name: given for name, given in request.given.items() if name == "--project"})
    name = elevation.begin(
        policy_of(bare, project), sandbox, what, seconds=seconds, by=somebody(), word=Word(os.getuid(), _factor(request))
    )
    if request.has("--json"):
        from agent_sandbox.cli.render.json import print_document

        print_document("grant", {"elevation": name, "sandbox": sandbox, "seconds": seconds})
        return 0
    print(name)
    if not request.has("--quiet"):
        remark(f"{sandbox} has more than its policy for {seconds:g} s: {what.describe()}; what runs with it ends with it")
    return 0


def revoke(request: Request) -> int:
    """The verb `revoke`: by name, or all."""
    kept = here().capabilities()
    if bool(request.words) == request.has("--all"):
        raise UsageError("revoke takes the names of capabilities, or --all", hint="see: agent-sandbox capabilities")
    raised = {each.name for each in here().elevations().standing()}
    granted = [each.name for each in kept.standing() if not each.revoked]
    names = [*granted, *raised] if request.has("--all") else list(request.words)
    going_on: dict[int, str] = {}
    for name in names:
        if name in raised:
            here().elevations().end(name, by=somebody())
            remark("a run that began under the elevation goes on until its time; the next one has none of it")
            continue
        kept.revoke(name, by=somebody())
        going_on |= dict.fromkeys(kept.going_on(name), name)
    if request.has("--json"):
        from agent_sandbox.cli.render.json import print_document

        print_document("revoke", {"revoked": names, "going_on": sorted(going_on)})
        return 0
    if not request.has("--quiet"):
        remark(f"revoked {counted(len(names), 'capability', 'capabilities')}: nothing that is asked from now on is allowed by them")
        for pid in sorted(going_on):
            remark(f"process {pid} goes on with what {going_on[pid]} allowed before; what it asks for anew is refused")
    return 0


def capabilities(request: Request) -> int:
    """The verb `capabilities`: what stands."""
    standing, raised = here().capabilities().standing(), here().elevations().standing()
    if request.has("--json"):
        from agent_sandbox.cli.render.json import print_document

        found = {"capabilities": [_document(each) for each in standing], "elevations": [_elevation(each) for each in raised]}
        print_document("capabilities", found)
        return 0
    for each in standing:
        left = "revoked" if each.revoked else f"{max(each.until - time.time(), 0):.0f} s left"
        often = f", used {each.used} of {each.limit}" if each.limit is not None else ""
        what = "; ".join(shlex.join(pattern) for pattern in each.patterns)
        print(shown(f"{each.name}  {left}{often}  {each.sandbox}  by {each.by}: {what}"))
    for lifted in raised:
        print(shown(f"{lifted.name}  {lifted.left:.0f} s left  {lifted.sandbox}  by {lifted.by}: elevated, {lifted.what.describe()}"))
    if not (standing or raised) and not request.has("--quiet"):
        remark("nothing is granted")
    return 0


def _document(standing: Standing) -> dict[str, object]:
    return {
        "name": standing.name,
        "sandbox": standing.sandbox,
        "patterns": [shlex.join(pattern) for pattern in standing.patterns],
        "by": standing.by,
        "granted": standing.granted,
        "until": standing.until,
        "limit": standing.limit,
        "used": standing.used,
        "revoked": standing.revoked,
    }


def _elevation(raised: Raised) -> dict[str, object]:
    what = raised.what
    lifted = {"programs": list(what.programs), "limits": dict(what.limits), "paths": list(what.paths)}
    return {"name": raised.name, "sandbox": raised.sandbox, **lifted, "by": raised.by, "began": raised.began, "left": raised.left}


def _pattern(text: str) -> Pattern:
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"not the words of a pattern: {text!r} ({error})", hint='for example "run git push **"') from None
    if len(words) < 2 or words[0] not in KINDS:
        raise UsageError(
            f"a pattern begins with {', '.join(KINDS[:-1])} or {KINDS[-1]}, not {text!r}", hint='for example "run git push **"'
        )
    return words


def _factor(request: Request) -> bool:
    """Whether who grants has shown a second factor. Raises `PolicyError` for one that is wrong."""
    if (code := request.value("--code")) is None:
        return False
    factor = here().second_factor()
    if not factor.enrolled or not factor.accepts(code):
        raise PolicyError("that is no second factor of yours", hint="give a fresh code; to make one: agent-sandbox approve --enroll")
    return True


def _seconds(request: Request) -> float:
    text = request.value("--for")
    if text is None or (found := quantities.seconds("--for", text)) is None:
        raise UsageError("what is granted has an end", hint="--for 10m")
    return found


def _times(request: Request) -> int | None:
    text = request.value("--times")
    return None if text is None else quantities.count("--times", text)
