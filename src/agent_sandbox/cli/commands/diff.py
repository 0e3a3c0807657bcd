"""`diff`: what the sandbox would change, or with a command what that would. The machine itself is never written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

from agent_sandbox._fast.values import replace
from agent_sandbox.cli import streams
from agent_sandbox.cli.change_list import current_and_whole
from agent_sandbox.cli.context import policy_of
from agent_sandbox.cli.execute import COULD_NOT_START, code_of, perform, say_how_it_ended
from agent_sandbox.cli.parser import Request
from agent_sandbox.cli.render import pager
from agent_sandbox.cli.render.changes import Material, check, gather, patch, refuse_on_a_terminal, rows
from agent_sandbox.cli.render.colours import Painter, Style
from agent_sandbox.cli.render.messages import remark, shown
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.work import Command, Outcome, Work
from agent_sandbox.workspace.changes import ChangeSet, Contents
from agent_sandbox.workspace.diff.compare import Formerly
from agent_sandbox.workspace.project import Project
from agent_sandbox.workspace.stored_sandbox import Stored

_COLUMNS = 120  # where there is no terminal to ask
_IN_MEMORY = 8 << 20
Write = Callable[[bytes], object]


def diff(request: Request) -> int:
    """The verb `diff`. Without a command it exits with 0, whether there are changes or not."""
    check(request)
    refuse_on_a_terminal(request)
    if request.words:
        words = request.words if request.separated or len(request.words) > 1 else ("bash", "-c", request.words[0])
        without_trace = {**request.given, "--throw-away": ("",), "--diff": ("",)}
        return perform(replace(request, given=without_trace), Command(words), stdin=0)
    found = current_and_whole(request)
    stored = Stored(found.state)
    with stored.opened() as layers:
        changes = stored.changes_in(layers, policy_of(request, found.project))
        former = Formerly(bases=stored.bases(), open_base=stored.open_base)
        material = gather(request, found.project.path, changes, layers, former)
        code = 0  # also when the reader has seen enough before the end
        with pager.output(paged=paged(request)) as write:
            _begin(request, write, found.project, found.state.id)
            code = show(request, material, write)
            _end(request, write, {})
        return code


def diff_of(request: Request, session: Session, work: Work, project: Project) -> int:
    """Do the work in a throw-away sandbox and show what it changed there. The program's own output goes to standard error.

    It exits as the program does. The layers are gone when the run is over, so the diff is made before and shown after.
    """
    codes: list[int] = []
    with tempfile.SpooledTemporaryFile(_IN_MEMORY) as spool:

        def keep(changes: ChangeSet, contents: Contents) -> None:
            codes.append(show(request, gather(request, project.path, changes, contents), spool.write))

        with streams.forwarding() as forward:
            outcome = session.run(replace(work, on_start=forward.begin, on_output=aside, on_changes=keep))
        code = code_of(outcome.exit, forward.received)
        say_how_it_ended(work, outcome)
        for note in outcome.notes if not request.has("--quiet") or not codes else ():
            remark(note)
        spool.seek(0)
        with pager.output(paged=paged(request)) as write:
            _begin(request, write, project, None)
            for line in spool:
                write(line)
            _end(request, write, {"run": _run(outcome, code)})
    return code or (codes[0] if codes else COULD_NOT_START)


def show(request: Request, material: Material, write: Write) -> int:
    """Write what the request asks for, in its form."""
    if request.has("--json"):
        from agent_sandbox.cli.render import diff_document

        diff_document.changes(write, material)
        return 0
    if request.has("--patch"):
        return patch(material, write, quiet=request.has("--quiet"))
    painter = Painter(Style.of_stdout().colours)
    for row in rows(request, material, columns=columns(), words=painter.colours):
        write(f"{painter.line(row)}\n".encode())
    return 0


def _begin(request: Request, write: Write, project: Project, sandbox: str | None) -> None:
    if request.has("--json"):
        from agent_sandbox.cli.render import diff_document
        from agent_sandbox.cli.render.json import path_fields

        diff_document.begin(write, {**path_fields("project", project.path), "sandbox": sandbox})


def _end(request: Request, write: Write, after: dict[str, object]) -> None:
    if request.has("--json"):
        from agent_sandbox.cli.render import diff_document

        diff_document.end(write, after)


def _run(outcome: Outcome, code: int) -> dict[str, object]:
    notes = [shown(note) for note in outcome.notes]
    return {"exit": code, "reason": outcome.exit.reason.value, "limits_hit": list(outcome.exit.limits_hit), "notes": notes}


def aside(name: str, data: bytes) -> None:
    """Output of a program whose changes are what standard output is for."""
    streams.write_all(2, data)


def paged(request: Request) -> bool:
    """Whether what is shown goes through a pager, on a terminal."""
    return not request.has("--no-pager") and not request.has("--json") and not request.has("--patch")


def columns() -> int:
    """As wide as the terminal, or as the shell says."""
    try:
        return os.get_terminal_size(1).columns or _COLUMNS
    except OSError:
        given = os.environ.get("COLUMNS", "")
        return int(given) if given.isdigit() and len(given) < 5 and int(given) else _COLUMNS
