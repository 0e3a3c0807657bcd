"""`run --timeline`: run a file of Python code statement by statement in a session that is held afterwards; and `--in`: go on in one."""

from __future__ import annotations

import os
import sys

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.assembly import here
from agent_sandbox.cli import caller
from agent_sandbox.cli.commands.code import language_of, read_source, script_file
from agent_sandbox.cli.commands.timeline import TimelineStep, found, places
from agent_sandbox.cli.context import project_of, working_directory
from agent_sandbox.cli.execute import code_told, directory_of, say_how_it_ended, variables_of
from agent_sandbox.cli.options import JSON_OUTPUT_BYTES
from agent_sandbox.cli.parser import UsageError
from agent_sandbox.cli.render.messages import Console, remark
from agent_sandbox.cli.render.timeline import kept_for
from agent_sandbox.cli.results import VerbResult
from agent_sandbox.cli.timeline_options import NEWEST, TimelineRunOptions
from agent_sandbox.errors import SandboxError
from agent_sandbox.policy.files.presets import PRESETS
from agent_sandbox.runtime.base import ExitReason
from agent_sandbox.server import client
from agent_sandbox.server.timeline_sandbox import SessionRequest

if TYPE_CHECKING:
    from collections.abc import Callable

_INTERRUPTED = 130


@dataclass(frozen=True)
class TimelineRunResult(VerbResult):
    """A run in a session with a timeline: how it ended, and what is kept.

    `stdout` and `stderr` are empty if they were passed on. `failed` is the step that raised. `ended` is why the session has ended; then
    nothing is kept.
    """

    kind = "timeline-run"

    session: str
    exit: int
    reason: str
    signal: int | None
    refused: str | None  # why nothing ran
    limits_hit: tuple[str, ...]
    stdout: bytes
    stderr: bytes
    seconds: float
    steps: int
    failed: TimelineStep | None
    ended: str | None
    kept_seconds: float
    notes: tuple[str, ...]
    others: int  # further sessions that are held

    def text(self, console: Console) -> None:
        if self.refused is not None:
            remark(f"error: {self.refused}")
            return
        if self.reason:
            say_how_it_ended(None, ExitReason(self.reason), self.limits_hit)
        if "output" in self.limits_hit:
            remark(f"its output was cut at {JSON_OUTPUT_BYTES >> 20} MiB")
        for note in self.notes:
            console.note(note)
        name = f" {self.session}" if self.others else ""
        if self.ended is not None:
            remark(f"nothing is kept: the session has ended: {self.ended}")
        elif self.failed is not None and self.failed.kept:
            console.note(
                f"the state before step {self.failed.number} is kept for {kept_for(self.kept_seconds)}: agent-sandbox inspect{name}"
            )
        elif self.failed is not None:
            remark(f"the state before step {self.failed.number} is not kept: {self.failed.why}; see: agent-sandbox timeline{name}")
        else:
            console.note(f"{self.session} is kept for {kept_for(self.kept_seconds)} after its last use: agent-sandbox timeline{name}")


class _RemoteGuest:
    """Stands for the guest where signals are forwarded: the holder has it."""

    def __init__(self, link: client.HolderLink) -> None:
        self._link = link

    def wake_on(self, woken: int) -> None:
        """Do nothing: a signal wakes whoever waits for the holder."""

    def interrupt(self, number: int) -> None:
        """End the turn, as Ctrl-C does."""
        self._link.interrupt()

    def kill(self) -> None:
        """End the session: the holder kills a program that is interrupted twice."""
        self._link.interrupt()


def run_with_timeline(options: TimelineRunOptions, console: Console) -> VerbResult:
    """Run code in a new session with a timeline, or in one that is held. The session is kept afterwards."""
    if options.session is None and options.file.isidentifier() and not os.path.exists(options.file):
        hint = f"a command follows --: agent-sandbox run --timeline -- {options.file}"
        raise UsageError(f"{options.file!r} is no file of Python code", hint=hint)
    source = read_source(options.file)
    language = "python" if options.file == "-" and options.language is None else language_of(options.language, options.file, source)
    if language != "python":
        raise UsageError(f"a timeline is for Python code, and {options.file!r} is {language}", hint="leave out --timeline")
    if options.session is not None:
        taken = found(None if options.session == NEWEST else options.session, console)
        with client.opened(taken.place) as link:
            return _turn(link, taken.id, source, options.run.collect, taken.idle_seconds)
    link, name = client.start(places(), _request(options, console), options.kept_seconds, os.environ)
    try:
        result = _turn(link, name, source, options.run.collect, options.kept_seconds)
        if result.refused is not None:
            _end(link, name)
        return result
    except SandboxError:  # it could not begin
        _end(link, name)
        raise
    finally:
        link.close()


def _request(options: TimelineRunOptions, console: Console) -> SessionRequest:
    """Return the session that the options ask for."""
    run = options.run
    project = project_of(run.project)
    asked = variables_of(run)
    env = caller.guest_environment(os.environ, asked, home=here().host.home)
    if not any(each.partition("=")[0] == "HOME" for each in asked):
        del env["HOME"]  # the sandbox does not have that directory
    limits = dict(run.policy.limits)
    limits.pop("output_bytes", None)
    return SessionRequest(
        project.path,
        directory_of(run, project) or project.path,
        env,
        options.arguments,
        script_file(options.file, console),
        limits,
        tuple(
            each if each.startswith(("/", "~", "**/")) else f"{working_directory()}/{each.removeprefix('./')}" for each in run.policy.deny
        ),
        tuple(map(os.path.abspath, run.policy.reveal)),
        run.policy.allow or (),
        run.policy.deny_commands,
        tuple(each if each in PRESETS else os.path.abspath(each) for each in run.policy.files),
        run.policy.network,
        run.policy.allow_network,
    )


def _turn(link: client.HolderLink, name: str, source: str, collect: bool, kept_seconds: float) -> TimelineRunResult:
    output: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
    escaped = caller.EscapedOutput()
    take: Callable[[str, bytes], None] = (lambda stream, data: output[stream].append(data)) if collect else escaped.pass_on
    with caller.forwarding() as forward:
        forward.begin(_RemoteGuest(link))  # type: ignore[arg-type]  # it is asked for nothing else
        told = link.ask({"do": "run", "session": name, "source": source}, take)
    if not collect:
        escaped.finish()
        sys.stdout.flush()
    if told["ended"]:
        _end(link, name)
    others = len(client.sessions(places())) - (0 if told["ended"] else 1)
    failed = told["failed"]
    return TimelineRunResult(
        name,
        code_told(told, forward.received, interrupted=_INTERRUPTED),
        str(told["reason"]),
        told["signal"],
        str(told["error"]) if told["refused"] else None,
        tuple(told["limits_hit"]),
        b"".join(output["stdout"]),
        b"".join(output["stderr"]),
        float(told["seconds"]),
        int(told["steps"]),
        TimelineStep.of(failed) if failed is not None else None,
        str(told["ended"]) or None,
        kept_seconds,
        tuple(map(str, told["notes"])),
        max(others, 0),
    )


def _end(link: client.HolderLink, name: str) -> None:
    """End a session that is of no more use."""
    try:
        link.ask({"do": "end", "session": name})
    except SandboxError:  # it has ended by itself
        return
