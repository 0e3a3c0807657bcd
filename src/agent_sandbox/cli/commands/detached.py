"""`exec`, `logs`, `stop` and `ps`: sandboxes that go on in the background (`run --detach`)."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.assembly import here
from agent_sandbox.cli import caller
from agent_sandbox.cli.context import current, pending_in, policy_of, project_of
from agent_sandbox.cli.execute import ChangeCounts, change_counts, code_told, say_how_it_ended
from agent_sandbox.cli.options import JSON_OUTPUT_BYTES, PolicyOptions
from agent_sandbox.cli.render.messages import Console, counted, remark, shown
from agent_sandbox.cli.render.timeline import kept_for
from agent_sandbox.cli.results import PathName, VerbResult
from agent_sandbox.errors import PolicyError, SandboxError
from agent_sandbox.runtime.base import ExitReason
from agent_sandbox.server import client, messages
from agent_sandbox.server.detached import GRACE_SECONDS
from agent_sandbox.server.detached_places import DetachedPlaces, DetachedRecord
from agent_sandbox.server.output_log import OutputReader, Piece, newest_lines, read_output
from agent_sandbox.workspace.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any, Literal

    from agent_sandbox.cli.detached_options import ExecOptions, LogsOptions, StopOptions

LARGEST_INPUT = 16 << 20  # bytes of standard input of `exec`
UNANSWERED_SECONDS = 60.0  # for a sandbox to end, once its program has; a holder that takes longer is killed
LOOK_SECONDS = 0.2  # between two looks for more output
_WHAT = "detached sandbox"


@dataclass(frozen=True)
class ExecResult(VerbResult):
    """A program that ran in a detached sandbox beside the others. `stdout` and `stderr` are empty if they were passed on.

    `refused` is why nothing ran; then `reason` is empty.
    """

    kind = "exec"

    name: str
    exit: int
    reason: str
    signal: int | None
    refused: str | None
    limits_hit: tuple[str, ...]
    stdout: bytes
    stderr: bytes
    seconds: float
    notes: tuple[str, ...]

    def text(self, console: Console) -> None:
        if self.refused is not None:
            remark(self.refused)
        elif self.reason:
            say_how_it_ended(None, ExitReason(self.reason), self.limits_hit)
        if "output" in self.limits_hit:
            remark("some of its output was dropped")
        for note in self.notes:
            console.note(note)


@dataclass(frozen=True)
class OutputPiece:
    """Some output of a detached program: when it came, on which stream, and what."""

    at: float
    stream: str
    data: bytes


@dataclass(frozen=True)
class LogsResult(VerbResult):
    """The newest output of a detached program, as far as it is kept."""

    kind = "logs"

    name: str
    running: bool
    output: tuple[OutputPiece, ...]

    def text(self, console: Console) -> None:
        escaped = caller.EscapedOutput()
        _print((Piece(each.at, each.stream, each.data) for each in self.output), escaped)
        escaped.finish()


@dataclass(frozen=True)
class DetachedFacts:
    """A detached sandbox. `state` is running, ended, or lost if the process that held it was killed.

    `exit` is the exit code of its first program, and `why` the reason of its end; null while it runs, or if nobody saw the end. `by_daemon`
    is whether the daemon owned it.
    """

    name: str
    state: Literal["running", "ended", "lost"]
    command: str
    project: PathName
    sandbox: str
    throw_away: bool
    since: float
    lifetime_seconds: float
    idle_seconds: float | None
    pid: int
    by_daemon: bool
    published: tuple[str, ...]
    ended: float | None
    exit: int | None
    reason: str | None
    why: str | None

    @classmethod
    def of(cls, record: DetachedRecord) -> DetachedFacts:
        """Return the facts about one."""
        facts, end = record.facts, record.end or {}
        state: Literal["running", "ended", "lost"] = "running" if record.running else "lost" if record.lost else "ended"
        return cls(
            record.name,
            state,
            str(facts["command"]),
            PathName(facts["project"]),
            str(facts["sandbox"]),
            bool(facts["throw_away"]),
            float(facts["since"]),
            float(facts["lifetime_seconds"]),
            facts["idle_seconds"],
            int(facts["pid"]),
            bool(facts["by_daemon"]),
            tuple(map(str, facts["published"])),
            end.get("at"),
            end.get("exit"),
            end.get("reason") or None,
            end.get("why"),
        )

    @property
    def how(self) -> str:
        """Its state in words."""
        if self.state == "lost":
            return "lost: the process that held it was killed, and its programs with it"
        if self.state == "ended":
            return f"ended{'' if self.exit is None else f' with {self.exit}'}: {self.why}"
        return f"runs{', owned by the daemon' if self.by_daemon else ''}; for at most {kept_for(self.lifetime_seconds)}"


@dataclass(frozen=True)
class PsResult(VerbResult):
    """Detached sandboxes, oldest first: those that run, and those that were lost; with --all also those that have ended."""

    kind = "ps"

    sandboxes: tuple[DetachedFacts, ...]

    def text(self, console: Console) -> None:
        for each in self.sandboxes:
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.since))
            print(f"{each.name}  {since}  {shown(each.command)}  {shown(each.project)}  ({each.how})")
        if not self.sandboxes:
            console.note("nothing runs in the background; begin something: agent-sandbox run --detach COMMAND")


@dataclass(frozen=True)
class StoppedSandbox:
    """A sandbox that has ended: the exit code of its first program, and why. `changes` are those that its project's sandbox now has."""

    name: str
    exit: int | None
    reason: str | None
    why: str
    changes: ChangeCounts | None


@dataclass(frozen=True)
class StopResult(VerbResult):
    """Detached sandboxes that were ended. `failed` are those that could not be."""

    kind = "stop"

    stopped: tuple[StoppedSandbox, ...]
    failed: tuple[str, ...]

    @property
    def code(self) -> int:
        """1 if one could not be ended, else 0."""
        return 1 if self.failed else 0

    def text(self, console: Console) -> None:
        for each in self.stopped:
            total = 0 if each.changes is None else each.changes.total
            changes = f"; {counted(total, 'change')} in the sandbox: agent-sandbox diff" if total else ""
            console.note(f"{each.name} has ended: {each.why}{changes}")
        for why in self.failed:
            remark(why)
        if not self.stopped and not self.failed:
            console.note("nothing runs in the background")


class _RemoteGuest:
    """Stands for the program where signals are forwarded: the holder has it."""

    def __init__(self, link: client.HolderLink) -> None:
        self._link = link

    def wake_on(self, woken: int) -> None:
        """Do nothing: a signal wakes whoever waits for the holder."""

    def interrupt(self, number: int) -> None:
        """Pass a signal on."""
        self._link.interrupt(number)

    def kill(self) -> None:
        """Kill the program: the holder does, when a second signal comes."""
        self._link.interrupt(9)


def places() -> DetachedPlaces:
    """Return the places of this user's detached sandboxes."""
    return DetachedPlaces(Store.open(here().host.state))


def execute_in(options: ExecOptions) -> ExecResult:
    """Run a program in a detached sandbox."""
    record = places().record(options.name)
    if not record.running:
        raise SandboxError(
            f"{record.name} does not run: {DetachedFacts.of(record).how}", hint=f"its output: agent-sandbox logs {record.name}"
        )
    request = {
        "do": "exec",
        "words": list(options.command),
        "cwd": options.cwd,
        "env": _variables(options),
        "seconds": options.seconds,
        "stdin": messages.packed(_input() if options.stdin else b""),
    }
    if options.terminal:
        return _at_terminal(record, request, options)
    collected = {"stdout": bytearray(), "stderr": bytearray()}
    dropped = False
    escaped = caller.EscapedOutput()

    def collect(stream: str, data: bytes) -> None:
        nonlocal dropped
        kept = data[: max(0, JSON_OUTPUT_BYTES - len(collected[stream]))]
        dropped = dropped or len(kept) < len(data)
        collected[stream] += kept

    with client.opened(record.place, _WHAT) as link, caller.forwarding() as forward:
        forward.begin(_RemoteGuest(link))  # type: ignore[arg-type]  # it is asked for nothing else
        told = link.ask(request, collect if options.collect else escaped.pass_on)
    if not options.collect:
        escaped.finish()
        sys.stdout.flush()
    output = bytes(collected["stdout"]), bytes(collected["stderr"])
    hit = (*map(str, told["limits_hit"]), *(("output",) if dropped and "output" not in told["limits_hit"] else ()))
    return _exec_result(record, options, told, forward, hit, output)


def _at_terminal(record: DetachedRecord, request: dict[str, Any], options: ExecOptions) -> ExecResult:
    """Run a program on a terminal of its own inside, and lend it ours: every key goes there, and everything that it prints comes here."""
    if not caller.interactive():
        raise PolicyError("-t needs a terminal, and standard input or output is none", hint="leave -t out; -i passes standard input")
    size = caller.terminal_size()
    request |= {"terminal": [size.rows, size.columns], "env": {**_terminal_kind(), **request["env"]}}
    with client.opened(record.place, _WHAT) as link, caller.forwarding() as forward:

        def resize(*_: object) -> None:
            now = caller.terminal_size()
            link.resize(now.rows, now.columns)

        forward.begin(_RemoteGuest(link))  # type: ignore[arg-type]  # it is asked for nothing else
        with caller.terminal_kept(resize):
            caller.make_raw()
            told = link.ask(request, caller.pass_on, keys=0)
    return _exec_result(record, options, told, forward, tuple(map(str, told["limits_hit"])), (b"", b""))


def _terminal_kind() -> dict[str, str]:
    """Return the variables that say what our terminal can do. The sandbox may have been started at another one."""
    return {name: os.environ[name] for name in ("TERM", "COLORTERM") if name in os.environ}


def _exec_result(
    record: DetachedRecord,
    options: ExecOptions,
    told: Mapping[str, Any],
    forward: caller.Forwarding,
    hit: tuple[str, ...],
    output: tuple[bytes, bytes],
) -> ExecResult:
    return ExecResult(
        record.name,
        code_told(told, forward.received),
        str(told["reason"]),
        told["signal"],
        _refusal(told, options.command[0]),
        hit,
        *output,
        float(told["seconds"]),
        tuple(map(str, told["notes"])),
    )


def _variables(options: ExecOptions) -> dict[str, str]:
    """Return the variables that the caller adds to those of the sandbox."""
    asked = options.env
    if options.env_files:
        from agent_sandbox.cli.env_file import read_env_files  # few commands have one

        asked = (*read_env_files(options.env_files), *asked)
    if not asked:
        return {}
    names = {each.partition("=")[0] for each in asked}
    every = caller.guest_environment(os.environ, asked, home=here().host.home, bare=True)
    return {name: value for name, value in every.items() if name in names}


def _input() -> bytes:
    data = sys.stdin.buffer.read(LARGEST_INPUT + 1)
    if len(data) > LARGEST_INPUT:
        raise PolicyError(f"standard input is larger than {LARGEST_INPUT >> 20} MiB", hint="write it into a file of the sandbox")
    return data


def _refusal(told: Mapping[str, Any], program: str) -> str | None:
    if told["refused"]:
        return str(told["error"])
    if not told["not_started"]:
        return None
    return f"{program}: command not found" if told["exit"] == 127 and "/" not in program else str(told["not_started"])


def logs(options: LogsOptions) -> LogsResult:
    """Return what the first program of a detached sandbox has printed; with --follow, print it until the sandbox has ended."""
    record = places().record(options.name)
    if options.follow:
        return _follow(record, options)
    pieces = read_output(record.place.path)
    if record.running:
        _watch(record)
    kept = pieces if options.most is None else newest_lines(pieces, options.most)
    return LogsResult(record.name, record.running, tuple(OutputPiece(each.at, each.stream, each.data) for each in kept))


def _watch(record: DetachedRecord) -> None:
    """Let the sandbox know that somebody looks at it."""
    try:
        with client.opened(record.place, _WHAT) as link:
            link.ask({"do": "watch"})
    except SandboxError:  # it ends just now
        return


def _follow(record: DetachedRecord, options: LogsOptions) -> LogsResult:
    reader, escaped = OutputReader(record.place.path), caller.EscapedOutput()
    first = tuple(reader.pieces())
    _print(first if options.most is None else newest_lines(first, options.most), escaped)
    try:
        with client.opened(record.place, _WHAT) as link:
            link.ask({"do": "watch"})
            while not link.has_gone(LOOK_SECONDS):
                _print(reader.pieces(), escaped)
    except SandboxError:  # it has ended, or ends just now
        pass
    _print(reader.pieces(), escaped)
    escaped.finish()
    reader.close()
    return LogsResult(record.name, False, ())


def _print(pieces: Iterable[Piece], escaped: caller.EscapedOutput) -> None:
    for piece in pieces:
        escaped.pass_on(piece.stream, piece.data)


def stop(options: StopOptions) -> StopResult:
    """End detached sandboxes: ask the first program of each to end, then end the rest. The changes stay in their projects' sandboxes."""
    known = places()
    records = [each for each in known.records() if each.running] if options.everything else [known.record(name) for name in options.names]
    stopped: list[StoppedSandbox] = []
    failed: list[str] = []
    for record in records:
        if not record.running:
            facts = DetachedFacts.of(record)
            stopped.append(StoppedSandbox(record.name, facts.exit, facts.reason, facts.why or facts.how, None))
            continue
        try:
            with client.opened(record.place, _WHAT) as link:
                grace = GRACE_SECONDS if options.seconds is None else options.seconds
                told = link.ask({"do": "stop", "seconds": grace}, seconds=grace + UNANSWERED_SECONDS)
        except SandboxError as error:
            if _kill(record):  # or it ended by itself meanwhile
                ended = DetachedFacts.of(known.record(record.name))
                stopped.append(StoppedSandbox(record.name, ended.exit, ended.reason, ended.why or ended.how, _changes(record)))
            else:
                failed.append(f"{record.name} could not be ended: {error.message}")
            continue
        stopped.append(StoppedSandbox(record.name, told["exit"], told["reason"] or None, str(told["why"]), _changes(record)))
    return StopResult(tuple(stopped), tuple(failed))


def _kill(record: DetachedRecord) -> bool:
    """Kill the process that holds a sandbox and does not answer, if it lives. Return whether it has ended."""
    with suppress(OSError):
        process = os.pidfd_open(int(record.facts["pid"]))
        try:
            if record.place.is_held:  # so the process with this number is the holder
                signal.pidfd_send_signal(process, signal.SIGKILL)
            select.select([process], [], [], UNANSWERED_SECONDS)
        finally:
            os.close(process)
    return not record.place.is_held


def _changes(record: DetachedRecord) -> ChangeCounts | None:
    """Return the number of changes in the sandbox of the project; None of a throw-away sandbox, or if they cannot be read."""
    if record.facts["throw_away"]:
        return None
    try:
        path = str(record.facts["project"])
        return change_counts(pending_in(current(path), policy_of(PolicyOptions(), project_of(path))), path, kept=True)
    except (SandboxError, OSError):
        return None


def ps(*, everything: bool) -> PsResult:
    """List the detached sandboxes."""
    return PsResult(tuple(DetachedFacts.of(each) for each in places().records() if everything or each.running or each.lost))
