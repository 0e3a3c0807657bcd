"""Work and its outcome, as values, and the parts of both that are judged and recorded."""

from __future__ import annotations

from agent_sandbox._fast.encoding import as_json, sha256
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, field
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.action import Action, RunCode, RunCommand
from agent_sandbox.policy.decide import Allow
from agent_sandbox.policy.paths import normalise
from agent_sandbox.runtime.base import Exit, Interpreter, ScriptFile, Terminal
from agent_sandbox.runtime.router.model import Route
from agent_sandbox.workspace.changes import ChangeSet, Contents

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from agent_sandbox.egress.orders import FlowRecord, RequestMade
    from agent_sandbox.engine.attachments import Attachment
    from agent_sandbox.engine.exchange_records import ExchangeOptions
    from agent_sandbox.engine.publish import PublishedRecord
    from agent_sandbox.engine.stored_run import StoredRun
    from agent_sandbox.engine.timeline.recorder import TimelineRecorder
    from agent_sandbox.policy.publications import Publication
    from agent_sandbox.runtime.base import Completed, Guest
    from agent_sandbox.runtime.observe import Observed


@dataclass(frozen=True)
class Code:
    """Source code in a language, given by its canonical name. `file` is the file that Python code was read from, if there is one."""

    language: str
    source: str
    arguments: tuple[str, ...] = ()
    file: ScriptFile | None = None


@dataclass(frozen=True)
class Command:
    """A program and its arguments."""

    argv: tuple[str, ...]


@dataclass(frozen=True)
class Work:
    """A piece of work with all of its input.

    `env` is the complete environment. `on_start` receives the running guest, so that another thread can signal or kill it. `on_changes`
    receives the changes of a throw-away run while their contents can be read; it is not called if they cannot be listed. With `watch_reads`
    the sandbox stores which files of the project were opened.
    """

    what: Code | Command
    env: Mapping[str, str]
    cwd: str | None = None
    stdin: bytes | int = b""
    terminal: Terminal | None = None
    preload: tuple[str, ...] = ()
    on_output: Callable[[str, bytes], None] | None = None
    on_start: Callable[[Any], None] | None = None
    on_changes: Callable[[ChangeSet, Contents], None] | None = None
    collect: bool = True
    watch_reads: bool = False
    tools: Mapping[str, Callable[..., object]] = field(default_factory=dict)  # that Python code may call; see `engine.tools`
    seed: int = 0  # used if the policy requires a deterministic run
    observe: bool = False  # fill `Outcome.observed` with the attempts of the run
    log_observed: bool = False  # also record the attempts in the ledger
    record: str = ""  # of a deterministic run: the file to write its record to
    exchanges: ExchangeOptions | None = None  # of a run with a network: where its exchanges are recorded, and what answers them
    ends: float | None = None  # the latest end by the monotonic clock, including time that the run waits for the host
    left: Callable[[], float] | None = None  # a further limit on wall time: called when the run starts, returns seconds; 0 if none are left
    publish: tuple[
        Publication, ...
    ] = ()  # ports of the machine that lead to servers of the run; the policy must permit inbound connections
    on_publish: Callable[[Publication], None] | None = None  # called when such a port is open
    shell: bool = False  # of a session: its turns are bash code, which an interpreter of ours passes to bash
    step: bool = False  # keep the state of the stored sandbox before it, as a step of its timeline
    timeline: TimelineRecorder | None = None  # records the steps of a session, and keeps its states
    attachments: tuple[Attachment, ...] = ()  # further attachments, besides those that the fields above need
    title: str = ""  # what others see while it uses a sandbox, if not its own words

    def text(self) -> str:
        """Return the details of this work as text for an approver. The action itself holds no source, and only the names of variables.

        Variables and input matter as much as the source. Variables that name programs or paths are shown with their values. The others may
        be secret, so the text has a digest of them all, which differs for other values. Input from a terminal or a pipe is not known yet.
        """
        from agent_sandbox.policy.variables import shown_variables  # few runs are asked about
        from agent_sandbox.workspace.escape import visible

        lines = [self.what.source, *map(repr, self.what.arguments)] if isinstance(self.what, Code) else []
        if isinstance(self.what, Code) and self.what.file is not None:  # whose modules it can import
            lines += [
                f"given: the file {visible(self.what.file.path)}, packages of {visible(self.what.file.environment) or 'this program'}"
            ]
        # Escaped here: a line end in a value must not begin a line that looks like ours.
        named = [f"  {visible(name)}={visible(value)}" for name, value in shown_variables(self.env)]
        if named:
            lines += [f"given: {len(named):,} of {len(self.env):,} variables, which name programs or paths:", *named]
        given = as_json([sorted(self.env.items()), self.stdin.hex() if isinstance(self.stdin, bytes) else ""])
        return "\n".join((*lines, f"given: variables and input with the digest {sha256(given.encode('ascii')).hexdigest()}"))


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run. `refused` is the reason why the program could not start (not found, not executable), or empty."""

    exit: Exit
    stdout: bytes
    stderr: bytes
    changes: ChangeSet
    route: Route
    verdict: Allow
    seconds: float
    refused: str = ""
    notes: tuple[str, ...] = field(default=())
    tool_errors: tuple[Exception, ...] = ()  # raised by its tools; for the caller, not for the program
    inputs: bytes = b""  # see `Completed`
    observed: tuple[Observed, ...] = ()  # its attempts, each once, in the order of first appearance
    network: tuple[FlowRecord, ...] = ()  # its connections and queries, in the order in which they ended
    published: tuple[PublishedRecord, ...] = ()  # how its published ports were used
    requests: tuple[RequestMade, ...] = ()  # of an observed run with a network: those that the policy allowed, each once
    untold: int = 0  # how many more there were
    listed: bool = False  # whether `changes` are known: those of a kept sandbox are not looked for after each run

    @classmethod
    def of(cls, completed: Completed, guest: Guest, route: Route, verdict: Allow, notes: tuple[str, ...]) -> Outcome:
        """Return the outcome of a guest that has ended. The caller adds its changes."""
        return cls(
            exit=completed.exit,
            stdout=completed.stdout,
            stderr=completed.stderr,
            changes=ChangeSet(),
            route=route,
            verdict=verdict,
            seconds=completed.exit.usage.wall_seconds,
            refused=guest.refused,
            notes=notes,
            inputs=completed.inputs,
        )


@dataclass(frozen=True)
class Opened:
    """A started interpreter that takes turns, and the route to its runtime. `stored` cares for the layers of a stored sandbox."""

    guest: Interpreter
    route: Route
    notes: tuple[str, ...]
    stored: StoredRun | None = None


def action_of(work: Work) -> Action:
    """Return the action of a piece of work, to be judged and recorded. Raises `PolicyError` for work that no sandbox can run."""
    for name, value in work.env.items():
        if "\0" in value:
            raise PolicyError(f"the environment variable {name!r} holds a NUL character", hint="remove it")
    if work.cwd is not None:
        normalise(work.cwd)
    if isinstance(work.what, Code):
        if "\0" in work.what.source:
            raise PolicyError("the code holds a NUL character", hint="remove it, or spell it as an escape")
        try:
            source = work.what.source.encode()
        except UnicodeEncodeError as error:
            raise PolicyError("the code holds a lone surrogate, which is not text", hint="spell it as an escape") from error
        return RunCode.of(work.what.language, source, cwd=work.cwd, environment=work.env)
    return RunCommand.of(work.what.argv, cwd=work.cwd, environment=work.env)


def title(work: Work) -> str:
    """Return the short name of this work that other processes see while it uses a sandbox."""
    if work.title:
        return work.title[:200]
    if isinstance(work.what, Code):
        return f"{work.what.language} code"
    argv = work.what.argv
    return (argv[2] if len(argv) == 3 and argv[:2] == ("bash", "-c") else " ".join(argv))[:200]


def facts(outcome: Outcome) -> dict[str, str | int | float]:
    """Return the facts of an outcome for the ledger. Output is left out, because it may hold anything."""
    return {
        "exit_code": outcome.exit.code,
        "reason": outcome.exit.reason.value,
        "limits_hit": ",".join(outcome.exit.limits_hit),
        "seconds": round(outcome.seconds, 6),
        **({"changes": len(outcome.changes)} if outcome.listed else {}),
        **({"fuel": outcome.exit.usage.fuel} if outcome.exit.usage.fuel is not None else {}),
        "runtime": outcome.route.runtime or "",
        # The kind of error that ended the first try, which is one of a few; what follows it is the program's own text.
        **({"fell_forward": outcome.route.fell_forward.partition(":")[0]} if outcome.route.fell_forward else {}),
    }
