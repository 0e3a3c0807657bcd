"""`--json`: one document on standard output, with a `schema` field that names its form and version.

Everything is ASCII, so that nothing a guest wrote can act on a terminal. Bytes that are not UTF-8 are never lost: next to the text, in
which they are replaced, stands the same in another spelling (`…_base64`, `…_hex`).
"""

from __future__ import annotations

import json
import os
import sys
from base64 import b64encode
from collections.abc import Mapping
from typing import Any

from agent_sandbox._fast.values import replace
from agent_sandbox.cli import streams
from agent_sandbox.cli.change_list import Pending, stored
from agent_sandbox.cli.context import Current
from agent_sandbox.cli.execute import code_of, refusal
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.work import Outcome, Work
from agent_sandbox.errors import Denied, SandboxError
from agent_sandbox.policy.decide import Deny, granting, lifting
from agent_sandbox.runtime.observe import Observed
from agent_sandbox.runtime.router.model import Route
from agent_sandbox.workspace.changes import Change
from agent_sandbox.workspace.nodes import Node
from agent_sandbox.workspace.project import Project

VERSION = 1


def schema(kind: str) -> str:
    """The name of a kind of document and its version."""
    return f"agent-sandbox/{kind}/{VERSION}"


def print_document(kind: str, content: Mapping[str, Any]) -> None:
    """Print one document of a kind."""
    sys.stdout.write(json.dumps({"schema": schema(kind), **content}, indent=2) + "\n")


def error_document(error: SandboxError, code: int, hint: str) -> None:
    """What went wrong on our side; nothing of the guest has run."""
    said: dict[str, Any] = {"kind": type(error).__name__, "message": _text(error.message), "hint": _text(hint)}
    if isinstance(error, Denied):
        said["refusal"] = _refusal(error.verdict)
    print_document("error", {"error": said, "exit": code})


def _refusal(verdict: Deny) -> dict[str, Any]:
    """For the agent: which rule refused, what is missing, and the line that a person would type to permit it."""
    because = verdict.because
    return {
        "rule": because.rule,
        "why": _text(because.why),
        "remedy": _text(because.remedy),
        "missing_capability": _text(verdict.missing) or None,
        "grant": _text(granting(verdict.missing)) if verdict.missing else None,
        "elevate": _text(lifting(verdict.program)) if verdict.program else None,
    }


def run_document(session: Session, work: Work, found: Current | None, project: Project) -> int:
    """Do the work, print what came of it, and return our exit code. Output is kept up to a limit, which the document names when reached."""
    with streams.forwarding() as forward:
        outcome = session.run(replace(work, on_output=None, on_start=forward.begin, collect=True))
    code = code_of(outcome.exit, forward.received)
    changes = stored(found, session.policy) if found else Pending(outcome.changes)
    print_document(
        "run", {**_run(work, outcome, code), "project": _text(project.path), **_summary(changes, project, kept=found is not None)}
    )
    return code


def _run(work: Work, outcome: Outcome, code: int) -> dict[str, Any]:
    usage = outcome.exit.usage
    return {
        "exit": code,
        "reason": outcome.exit.reason.value,
        "signal": outcome.exit.signal,
        "refused": _text(refusal(work, outcome)) if outcome.refused else None,
        "limits_hit": list(outcome.exit.limits_hit),
        **stream_fields("stdout", outcome.stdout),
        **stream_fields("stderr", outcome.stderr),
        "usage": {
            "wall_seconds": round(usage.wall_seconds, 6),
            "cpu_seconds": round(usage.cpu_seconds, 6),
            "peak_memory_bytes": usage.peak_memory_bytes,
            "fuel": usage.fuel,
        },
        "runtime": outcome.route.runtime,
        "route": _route(outcome.route),
        "notes": [_text(note) for note in outcome.notes],
        **({"observed": [observed_document(each) for each in outcome.observed]} if work.observe else {}),
    }


def observed_document(observed: Observed) -> dict[str, Any]:
    """Something that a run tried."""
    names = {**path_fields("target", observed.target), **path_fields("program", observed.program)}
    return {"kind": observed.kind, **names, "allowed": observed.allowed, "times": observed.times}


def _route(route: Route) -> dict[str, Any]:
    return {
        "why": _text(route.why),
        "passed_over": [{"runtime": name, "why": _text(why)} for name, why in route.passed_over],
        "notes": [_text(note) for note in route.notes],
        "fell_forward": _text(route.fell_forward) or None,
    }


def _summary(pending: Pending, project: Project, *, kept: bool) -> dict[str, Any]:
    kinds = pending.changes.counts()
    counts = {kind.value: number for kind, number in kinds.items()}
    inside = len(pending.changes.within(project.path))
    return {
        "changes": {
            "total": len(pending.changes),
            "in_project": inside,
            "elsewhere": len(pending.changes) - inside,
            "by_kind": counts,
            "kept": kept,
            "problem": _text(pending.problem) or None,
        }
    }


def change_document(change: Change) -> dict[str, Any]:
    """One change."""
    return {
        **path_fields("path", change.path),
        "kind": change.kind.value,
        "before": _node(change.before),
        "after": _node(change.after),
        **(path_fields("renamed_from", change.renamed_from) if change.renamed_from else {}),
        **(path_fields("link_of", change.link_of) if change.link_of else {}),
        "xattrs": [_text(name) for name in change.xattrs],
        "inside": change.inside,
        "masks_real": change.masks_real,
        "unread": change.unread,
    }


def _node(node: Node | None) -> dict[str, Any] | None:
    if node is None:
        return None
    target = path_fields("target", node.target) if node.target else {}
    return {"type": node.type.value, "mode": f"{node.mode:04o}", "uid": node.uid, "gid": node.gid, "size": node.size, **target}


def path_fields(name: str, path: str) -> dict[str, str]:
    """A path as text, and in hexadecimal when it is not UTF-8."""
    raw = os.fsencode(path)
    text = raw.decode(errors="replace")
    return {name: text} if text.encode() == raw else {name: text, f"{name}_hex": raw.hex()}


def stream_fields(name: str, content: bytes) -> dict[str, str]:
    """Bytes as text, and in base64 when they are not UTF-8."""
    text = content.decode(errors="replace")
    return {name: text} if text.encode() == content else {name: text, f"{name}_base64": b64encode(content).decode()}


def _text(text: str) -> str:
    """Without lone surrogates, which other readers of JSON refuse."""
    return text.encode(errors="surrogateescape").decode(errors="replace")
