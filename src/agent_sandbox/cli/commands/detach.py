"""`run --detach`: start a program in a sandbox that goes on in the background, and print the name of the sandbox."""

from __future__ import annotations

import os
import threading
import time

from agent_sandbox._fast.contexts import ExitStack
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, replace
from agent_sandbox.assembly import here
from agent_sandbox.cli import caller
from agent_sandbox.cli.context import session_for
from agent_sandbox.cli.execute import _leads, _warn_about, directory_of, refusal, say_who_has_it, variables_of
from agent_sandbox.cli.render.messages import Console, remark
from agent_sandbox.cli.results import PathName, VerbResult
from agent_sandbox.engine.work import Code, Command, Outcome, Work
from agent_sandbox.errors import Busy
from agent_sandbox.policy.model import SCRATCH
from agent_sandbox.runtime.process import zygote
from agent_sandbox.server import background
from agent_sandbox.server.detached import DetachedSandbox, Terms
from agent_sandbox.server.detached_places import DetachedPlaces, write_facts
from agent_sandbox.workspace.store import Store, sandbox_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent_sandbox.cli.context import Opening
    from agent_sandbox.cli.detached_options import DetachOptions
    from agent_sandbox.server.places import Place

_INTERRUPTED = 130
_RELATIVE = ("AGENT_SANDBOX_STATE", "AGENT_SANDBOX_KEYS", "AGENT_SANDBOX_SHARED_CACHE")  # directories, which may be relative


@dataclass(frozen=True)
class DetachResult(VerbResult):
    """A sandbox that goes on in the background, by its `name`. `refused` is why its program could not be started: then nothing goes on.

    It ends with its program, after `lifetime_seconds`, or when it was not used for `idle_seconds`.
    """

    kind = "detach"

    name: str | None
    exit: int
    refused: str | None
    project: PathName
    lifetime_seconds: float
    idle_seconds: float | None
    notes: tuple[str, ...]

    def text(self, console: Console) -> None:
        for note in self.notes:
            console.note(note)
        if self.name is None:
            remark(self.refused or "")
            return
        print(self.name)
        console.note(f"it runs on: agent-sandbox exec {self.name} -- PROGRAM · logs {self.name} --follow · stop {self.name}")

    def go_on(self) -> None:
        """Hold the sandbox in this process until it ends."""
        if self.name is not None:
            _held.pop().hold(self.exit)


_held: list[DetachedSandbox] = []  # of this process, which performs one command line, until its result is printed


def detach(options: DetachOptions, console: Console) -> DetachResult:
    """Start a program in a sandbox, and leave it running."""
    background.fork_away()
    zygote.end_ready()  # a fork of a process that will have threads is of no use
    os.environ.pop(caller.CAPABILITY, None)  # its value is a permission, and this process lives long
    for name in _RELATIVE:
        if os.environ.get(name):
            os.environ[name] = os.path.abspath(os.environ[name])
    place, lock = DetachedPlaces(Store.open(here().host.state)).make()
    with ExitStack() as undo:
        undo.callback(os.close, lock)
        undo.callback(place.remove)
        registry = here().command_line_registry(threads=True)
        undo.callback(registry.close)
        opening = session_for(options.run, console, here().runtimes("process", registry, announce=console.note), say_who_has_it)
        sandbox = _sandbox(place, opening, options, console)
        undo.callback(sandbox.close)
        _warn_about(opening)
        outcome = _started(sandbox, options)
        if outcome is not None:
            return _result(options, opening, outcome)
        write_facts(place, _facts(place, opening, options))  # from now on, it is missed if it is gone
        undo.pop_all()
    _held.append(sandbox)
    return _result(options, opening, None, place.id)


def _sandbox(place: Place, opening: Opening, options: DetachOptions, console: Console) -> DetachedSandbox:
    """Return the sandbox, not started yet, under the same policy and gate as a run."""
    session = replace(opening.session, beside=_in_a_thread, asked_ns=None)
    env = caller.guest_environment(os.environ, variables_of(options.run), home=here().host.home)
    cwd = directory_of(options.run, opening.project, session.policy) or SCRATCH[0]
    work = Work(Code("python", ""), env, cwd=cwd, title=_title(options))
    if options.run.policy.publish:
        from agent_sandbox.policy.publications import read_publications  # few sandboxes publish anything

        ports = read_publications(options.run.policy.publish)
        work = replace(work, publish=ports, on_publish=lambda opened: console.note(f"{opened} {_leads(opened)}"))
    terms = Terms(options.lifetime_seconds, options.idle_seconds)
    if opening.lifted is not None:  # an elevation ends, and with it whatever has used it
        console.note(opening.lifted.note)
        if (left := opening.lifted.left()) < options.lifetime_seconds:
            terms = Terms(left, options.idle_seconds, grace_seconds=0.0)
    return DetachedSandbox(place, session, work, terms)


def _started(sandbox: DetachedSandbox, options: DetachOptions) -> Outcome | None:
    try:
        return sandbox.start(options.run.command)
    except KeyboardInterrupt:  # it may wait for the sandbox for ever; what has begun ends with this process
        sandbox.place.remove()
        os._exit(_INTERRUPTED)
    except Busy as busy:
        raise Busy(busy.message, hint="run in it: agent-sandbox exec NAME -- PROGRAM; or wait for it: --wait; or --throw-away") from busy


def _facts(place: Place, opening: Opening, options: DetachOptions) -> dict[str, object]:
    owned = background.owner()
    if owned is not None:
        os.close(owned)
    return {
        "name": place.id,
        "command": _title(options),
        "project": opening.project.path,
        "sandbox": opening.sandbox.state.id if opening.sandbox is not None else sandbox_id(opening.project.path),
        "throw_away": opening.sandbox is None,
        "since": time.time(),
        "lifetime_seconds": options.lifetime_seconds,
        "idle_seconds": options.idle_seconds,
        "pid": os.getpid(),
        "by_daemon": owned is not None,
        "published": list(options.run.policy.publish),
    }


def _title(options: DetachOptions) -> str:
    words = options.run.command
    return words[2] if words[:2] == ("bash", "-c") and len(words) == 3 else " ".join(words)


def _result(options: DetachOptions, opening: Opening, outcome: Outcome | None, name: str | None = None) -> DetachResult:
    refused = refusal(Work(Command(options.run.command), {}), outcome) if outcome is not None else None
    return DetachResult(
        name,
        outcome.exit.code if outcome is not None else 0,
        refused,
        PathName(opening.project.path),
        options.lifetime_seconds,
        options.idle_seconds,
        outcome.notes if outcome is not None else (),
    )


def _in_a_thread(do: Callable[[], None]) -> None:
    threading.Thread(target=do, name="agent-sandbox-names", daemon=True).start()
