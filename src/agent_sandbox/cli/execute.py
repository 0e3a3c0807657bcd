"""Run work in a sandbox with the caller's streams, terminal and signals: the common part of `run` and `code`."""

from __future__ import annotations

import os
import sys

from agent_sandbox._fast.contexts import ExitStack, contextmanager
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, replace
from agent_sandbox.assembly import here
from agent_sandbox.cli import caller
from agent_sandbox.cli.context import Opening, Pending, pending_in, session_for, sort, working_directory
from agent_sandbox.cli.options import CommandOptions
from agent_sandbox.cli.parser import UsageError
from agent_sandbox.cli.render.messages import Console, counted, remark, shown
from agent_sandbox.cli.results import NOT_APPROVED, OMITTED, Omitted, PathName, VerbResult
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.runtimes import Runtimes
from agent_sandbox.engine.work import Code, Command, Outcome, Work
from agent_sandbox.errors import Busy, Denied, PolicyError
from agent_sandbox.policy.model import Policy
from agent_sandbox.policy.paths import contains
from agent_sandbox.runtime.base import Exit, ExitReason, Guest
from agent_sandbox.runtime.process.zygote import Zygote
from agent_sandbox.workspace.project import Project
from agent_sandbox.workspace.view.plan import PRIVATE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from agent_sandbox.engine.egress_program import EgressProgram
    from agent_sandbox.engine.exchange_records import ExchangeOptions
    from agent_sandbox.policy.publications import Publication

TIMED_OUT, COULD_NOT_START, NOT_EXECUTABLE, NOT_FOUND, OUT_OF_MEMORY = 124, 125, 126, 127, 137
_REFUSED = {"approval": NOT_APPROVED, "denied": NOT_EXECUTABLE, "invalid": 2}  # what a holder tells of a refusal
LARGEST_INPUT = 16 << 20  # bytes of standard input that a record may hold
_ENDED = {
    ExitReason.TIMED_OUT: "the time limit was reached (--timeout TIME)",
    ExitReason.OUT_OF_MEMORY: "the memory limit was reached (--memory SIZE)",
    ExitReason.CPU_LIMIT: "the limit of processor time was reached",
    ExitReason.FUEL_LIMIT: "the limit of instructions was reached (--fuel N)",
    ExitReason.DISK_LIMIT: "the disk limit was reached (--disk SIZE)",
    ExitReason.OUTPUT_LIMIT: "the output limit was reached",
    ExitReason.SHARE_LIMIT: "it held more than a run's share of the machine's open files or closing connections",
}


@dataclass(frozen=True)
class UsageFacts:
    """Resources that a run used."""

    wall_seconds: float
    cpu_seconds: float
    peak_memory_bytes: int
    fuel: int | None


@dataclass(frozen=True)
class PassedOver:
    """A runtime that was not chosen, and the reason why."""

    runtime: str
    why: str


@dataclass(frozen=True)
class RouteFacts:
    """The reason for the chosen runtime. After a retry, `fell_forward` is the error by which the run in the first runtime ended."""

    why: str
    passed_over: tuple[PassedOver, ...]
    notes: tuple[str, ...]
    fell_forward: str | None


@dataclass(frozen=True)
class ObservedFacts:
    """An attempt of a run to use a file, program or connection (`target`), whether it was allowed, and how often it was made."""

    kind: str
    target: PathName
    program: PathName
    allowed: bool
    times: int


@dataclass(frozen=True)
class FlowFacts:
    """A connection of a run, or a query for a name (`how` is dns): with whom, how much, the requests, and why it was refused.

    `findings` are what the search found in it, by action, rule and place; `secrets` are the names of those that were put in.
    """

    target: str
    how: str
    sent: int
    received: int
    requests: tuple[str, ...]
    refused: str | None
    times: int
    findings: tuple[str, ...]
    secrets: tuple[str, ...]


@dataclass(frozen=True)
class PublishedFacts:
    """A port of this machine that led to the port `inner` of the sandbox, and its use: requests, those turned away, and bytes."""

    port: int
    inner: int
    requests: int
    turned_away: int
    received: int
    sent: int


@dataclass(frozen=True)
class ChangeCounts:
    """The number of changes in the sandbox after a run. `kept` is false for a throw-away sandbox."""

    total: int
    in_project: int
    elsewhere: int
    by_kind: dict[str, int]
    kept: bool
    problem: str | None
    in_caches: int


@dataclass(frozen=True)
class RunResult(VerbResult):
    """A run: how it ended, its output and its changes.

    `stdout` and `stderr` are empty if they were passed on. `changes` is null if changes were not asked for.
    """

    kind = "run"

    exit: int
    reason: ExitReason
    signal: int | None
    refused: str | None  # why the program could not be started
    limits_hit: tuple[str, ...]
    stdout: bytes
    stderr: bytes
    usage: UsageFacts
    runtime: str | None
    route: RouteFacts
    notes: tuple[str, ...]
    observed: tuple[ObservedFacts, ...] | Omitted  # with --observe
    network: tuple[FlowFacts, ...] | Omitted  # of a run with a network
    published: tuple[PublishedFacts, ...] | Omitted  # with --publish
    only_programs: tuple[str, ...] | Omitted  # the programs that may be started, if this one could not be
    project: PathName
    changes: ChangeCounts | None

    @property
    def code(self) -> int:
        """The exit code of the program; or, if a limit or signal ended it, the code that stands for that."""
        return self.exit

    def text(self, console: Console) -> None:
        say_how_it_ended(self.refused, self.reason, self.limits_hit)
        if not isinstance(self.only_programs, Omitted):
            only = ", ".join(self.only_programs)
            remark(f"only these programs can be started: {only} (--allow); no file of the project, unless one of them reads it")
        for note in self.notes:
            console.note(note)
        if self.changes is None:
            return
        counts = self.changes
        if not counts.kept:
            if counts.total:
                remark(f"{counted(counts.total, 'change')} thrown away with the sandbox")
        elif counts.problem:
            remark(counts.problem)
        elif counts.total:
            caches = f" and {counts.in_caches:,} in caches" if counts.in_caches else ""
            remark(f"{counted(counts.total - counts.in_caches, 'change')}{caches} in the sandbox · agent-sandbox diff")


@dataclass(frozen=True)
class ExplainResult(VerbResult):
    """The runtime and view that a command would get, in lines for people. Nothing was run."""

    kind = "explain"

    lines: tuple[str, ...]

    def text(self, console: Console) -> None:
        for line in self.lines:
            print(shown(line))


def perform(
    options: CommandOptions,
    what: Code | Command,
    console: Console,
    *,
    stdin: int | bytes,
    forked: Zygote | None = None,
    egress: EgressProgram | None = None,
) -> VerbResult:
    """Run the work and return its result. `forked` is a zygote for native programs, and `egress` the egress program, if they exist already.

    If the policy refuses a program, a person at the terminal may allow it for a limited time. Then the work is tried again.
    """
    with runtimes_for(options, forked, console, egress) as runtimes:
        try:
            return _perform(options, what, stdin, runtimes, console, forked)
        except Denied as refusal:
            if not refusal.verdict.program:
                raise
            from agent_sandbox.cli.elevation import offer_elevation

            if not offer_elevation(options, refusal.verdict):
                raise
        return _perform(options, what, stdin, runtimes, console)


def _perform(
    options: CommandOptions, what: Code | Command, stdin: int | bytes, runtimes: Runtimes, console: Console, forked: Zygote | None = None
) -> VerbResult:
    same = options.policy.deterministic
    exchanges = None
    if options.record_network is not None or options.replay_network is not None:
        options, exchanges = _exchanges(options)
    with ExitStack() as stack:
        opening = session_for(options, console, runtimes, say_who_has_it)
        session, project = opening.session, opening.project
        session.on_layers = None if forked is None else forked.expect
        stack.callback(session.gate.end)
        _warn_about(opening)
        env = caller.guest_environment(os.environ, variables_of(options), home=here().host.home, bare=same)
        cwd = directory_of(options, project, session.policy)
        work = Work(what, env, cwd=cwd, stdin=stdin, on_output=caller.pass_on, collect=False, watch_reads=options.watch_reads)
        if options.policy.publish:
            from agent_sandbox.policy.publications import read_publications  # few runs publish anything

            ports = read_publications(options.policy.publish)
            work = replace(work, publish=ports, on_publish=lambda opened: console.note(f"{opened} {_leads(opened)}"))
        if exchanges is not None:
            if not session.policy.network.outbound:
                raise PolicyError("the run has no network, so there are no requests to record or to answer", hint="add --network HOST")
            work = replace(work, exchanges=exchanges)
        if opening.lifted is not None:
            work = replace(work, left=opening.lifted.left)
            stack.callback(lambda: here().elevations().sweep())
            console.note(opening.lifted.note)
        if options.step:
            work = replace(work, step=True)
        if options.observe:
            work = replace(work, observe=True, log_observed=True)
        if same:
            work = _repeatable(options, work)
        if options.explain:
            return _explain(session, work)
        if options.simulate:
            from agent_sandbox.cli.commands.sim import simulate  # few runs are simulated

            return simulate(options, session, work, project, console, say_who_has_it)
        if options.diff:
            from agent_sandbox.cli.commands.diff import diff_of  # and with it all that makes a diff

            return diff_of(options, session, work, project, console)
        return _run(options, opening, work, console)


def _leads(opened: Publication) -> str:
    return f"is open: it leads to port {opened.inner} of the sandbox while this runs"


def _exchanges(options: CommandOptions) -> tuple[CommandOptions, ExchangeOptions]:
    """Return where exchanges are recorded and what answers them; and the options, which open the hosts of the record that answers.

    Nothing leaves a run that is answered from a record, so the hosts are open to requests that the record answers, and to no others.
    """
    from agent_sandbox.engine.exchange_records import ExchangeOptions, ExchangeRecord  # few runs are recorded

    record, replay = (os.path.abspath(each) if each is not None else "" for each in (options.record_network, options.replay_network))
    if replay and not (options.policy.network or options.policy.allow_network):
        known = ExchangeRecord(replay)
        known.close()
        if not known.hosts:
            raise PolicyError(f"the record {replay!r} holds no exchange", hint="record a run that sends requests")
        from agent_sandbox.policy.hosts import bracketed
        from agent_sandbox.policy.network import WEB_PORTS

        names = ((bracketed(name), port) for name, port in known.hosts)
        hosts = tuple(dict.fromkeys(name if port in WEB_PORTS else f"{name}:{port}" for name, port in names))
        options = replace(options, policy=replace(options.policy, network=hosts))
    return options, ExchangeOptions(record, options.record_bodies, replay)


def variables_of(options: CommandOptions) -> tuple[str, ...]:
    """Return the variables that the caller asks for: those of --env-file, and then those of --env, which override them."""
    if not options.env_files:
        return options.env
    from agent_sandbox.cli.env_file import read_env_files  # few runs have one

    return (*read_env_files(options.env_files), *options.env)


def _run(options: CommandOptions, opening: Opening, work: Work, console: Console) -> RunResult:
    session = opening.session
    with caller.forwarding() as forward:
        if options.collect:
            outcome = session.run(replace(work, on_output=None, on_start=forward.begin, collect=True))
        elif caller.interactive() and isinstance(work.stdin, int) and options.terminal:
            outcome = _interactive(session, work, forward)
        else:
            outcome = _piped(session, work, forward)
    return _result(work, outcome, opening, forward.received, summary=options.collect or (not console.quiet and sys.stderr.isatty()))


def _result(work: Work, outcome: Outcome, opening: Opening, signals: list[int], *, summary: bool) -> RunResult:
    counts = _counts(outcome, opening) if summary else None
    return run_result(work, outcome, opening.session.policy, opening.project.path, code_of(outcome.exit, signals), counts)


def run_result(work: Work, outcome: Outcome, policy: Policy, project: str, code: int, counts: ChangeCounts | None) -> RunResult:
    """Return the result of finished work. `code` is the exit code to report."""
    exit, usage, route = outcome.exit, outcome.exit.usage, outcome.route
    allowed, not_started = policy.programs.groups[:1], exit.code in (NOT_FOUND, NOT_EXECUTABLE)
    return RunResult(
        code,
        exit.reason,
        exit.signal,
        refusal(work, outcome) if outcome.refused else None,
        exit.limits_hit,
        outcome.stdout,
        outcome.stderr,
        UsageFacts(round(usage.wall_seconds, 6), round(usage.cpu_seconds, 6), usage.peak_memory_bytes, usage.fuel),
        route.runtime,
        RouteFacts(route.why, tuple(PassedOver(*each) for each in route.passed_over), route.notes, route.fell_forward or None),
        outcome.notes,
        tuple(ObservedFacts(o.kind, PathName(o.target), PathName(o.program), o.allowed, o.times) for o in outcome.observed)
        if work.observe
        else OMITTED,
        tuple(
            FlowFacts(f.target, f.how, f.sent, f.received, f.requests, f.refused or None, f.times, f.findings, f.secrets)
            for f in outcome.network
        )
        if policy.network.outbound
        else OMITTED,
        tuple(PublishedFacts(p.port, p.inner, p.requests, p.turned_away, p.received, p.sent) for p in outcome.published)
        if work.publish
        else OMITTED,
        allowed[0] if allowed and not_started else OMITTED,
        PathName(project),
        counts,
    )


def _counts(outcome: Outcome, opening: Opening) -> ChangeCounts:
    sandbox = opening.sandbox
    pending = pending_in(sandbox, opening.session.policy) if sandbox else Pending(outcome.changes)
    return change_counts(pending, opening.project.path, kept=sandbox is not None)


def change_counts(pending: Pending, project: str, *, kept: bool) -> ChangeCounts:
    """Return the number of changes after a run. `kept` says whether they outlive it."""
    inside, total = len(pending.changes.within(project)), len(pending.changes)
    kinds = {kind.value: number for kind, number in pending.changes.counts().items()}
    noise = len(sort(pending.changes, project).noise) if total else 0
    return ChangeCounts(total, inside, total - inside, kinds, kept, pending.problem or None, noise)


def _piped(session: Session, work: Work, forward: caller.Forwarding) -> Outcome:
    work = replace(work, on_start=forward.begin)
    if not (os.isatty(1) or os.isatty(2)) or session.route(work).runtime != "wasm":
        return session.run(work)
    escaped = caller.EscapedOutput()
    outcome = session.run(replace(work, on_output=escaped.pass_on))
    escaped.finish()
    return outcome


def _interactive(session: Session, work: Work, forward: caller.Forwarding) -> Outcome:
    with caller.lent_terminal() as loan:

        def begin(guest: Guest) -> None:
            forward.begin(guest)
            loan.begin(guest)

        return session.run(replace(work, on_start=begin, terminal=caller.terminal_size()))


@contextmanager
def runtimes_for(
    options: CommandOptions, forked: Zygote | None, console: Console, egress: EgressProgram | None = None
) -> Iterator[Runtimes]:
    """Yield the runtimes for one command, and close them at the end of the block."""
    registry = here().command_line_registry(forked, egress)
    wish = options.isolation
    try:
        if wish not in registry:
            raise UsageError(f"there is no runtime {wish!r}", hint=f"use one of {', '.join(registry.names)}")
        yield here().runtimes(wish, registry, announce=console.note)
    finally:
        registry.close(leaving=True)


def directory_of(options: CommandOptions, project: Project, policy: Policy | None = None) -> str | None:
    """Return the path of the directory to start in. It need not exist on the machine: an earlier run may have made it in the sandbox.

    Without --cwd, and under a policy that shows no files, return None, which stands for the scratch directory. Raises `PolicyError` for a
    directory that the sandbox does not have.
    """
    named = options.cwd
    if named is None and policy is not None and not (policy.files.read or policy.files.write):
        return None
    if named == "":
        raise PolicyError("--cwd is empty", hint="name a directory")
    path = os.path.realpath(os.path.join(working_directory() if not (named or "").startswith("/") else "/", named or ""))
    for private in PRIVATE:
        inside = path.startswith(private + "/") and not contains(project.path, path)
        if inside and project.path != "/":
            raise PolicyError(
                f"{path!r} is not in the sandbox: each run has a {private} of its own", hint=f"start elsewhere, or: --project {path}"
            )
    return path


def _explain(session: Session, work: Work) -> ExplainResult:
    from agent_sandbox.runtime.router.route import explain

    route, plan = session.route(work), session.explain(work)
    return ExplainResult((*explain(route), *plan.describe(), *(f"note: {note}" for note in plan.notes)))


def say_who_has_it(busy: Busy) -> None:
    """Tell that a run waits, and for whom."""
    remark(f"{busy.message}; waiting for it")


def _foreign(project: str) -> str:
    """Return a warning if root runs the sandbox in another user's project; "" if not. Root in a sandbox has no power over others' files."""
    status = os.stat(project)
    by_group = status.st_gid == 0 and status.st_mode & 0o020
    if os.geteuid() != 0 or status.st_uid == 0 or by_group or status.st_mode & 0o002:
        return ""
    return (
        f"the project belongs to user {status.st_uid}, and root in a sandbox cannot write it; run this as that user: "
        f"sudo -u '#{status.st_uid}' agent-sandbox …, or give the project to root: chown -R 0 {project}"
    )


def _warn_about(opening: Opening) -> None:
    project = opening.project
    if project.remote:
        remark(f"the project is on {project.fstype}: a {project.remote} filesystem may behave differently from a local one")
    for leftover in opening.sandbox.leftovers if opening.sandbox else ():
        remark(f"could not be removed: {leftover}")
    if foreign := _foreign(project.path):
        remark(foreign)


def say_how_it_ended(refused: str | None, reason: ExitReason, limits_hit: tuple[str, ...]) -> None:
    """Print, as a shell would, why a program could not be started, or which limit ended it."""
    if refused:
        remark(refused)
    elif reason in _ENDED:
        remark(f"ended: {_ENDED[reason]}")
    elif "disk" in limits_hit:
        remark("the sandbox is full: the program could not write more (--disk SIZE)")


def refusal(work: Work, outcome: Outcome) -> str:
    """Return why the program could not be started in the sandbox, worded as by a shell; empty if it was started."""
    name = work.what.argv[0] if isinstance(work.what, Command) else f"the {work.what.language} interpreter"
    if not outcome.refused:
        return ""
    if outcome.exit.code == NOT_FOUND and "/" not in name:
        return f"{name}: command not found"
    return outcome.refused if outcome.exit.code == COULD_NOT_START else f"{name}: {outcome.refused}"


def code_of(exit: Exit, signals: list[int]) -> int:
    """Return the exit code of our own program for the end of a run. `signals` are the signals that we received."""
    return _code_of(exit.reason, exit.code, signals)


def code_told(told: Mapping[str, Any], signals: list[int], *, interrupted: int | None = None) -> int:
    """Return the same for the end of a program that a holder tells of. `interrupted` is its exit code if our signal interrupted it."""
    if told["refused"]:
        return _REFUSED[str(told["refused"])]
    return _code_of(ExitReason(told["reason"]), int(told["exit"]), signals, interrupted)


def _code_of(reason: ExitReason, code: int, signals: list[int], interrupted: int | None = None) -> int:
    if reason is ExitReason.TIMED_OUT:
        return TIMED_OUT
    if reason is ExitReason.OUT_OF_MEMORY:
        return OUT_OF_MEMORY
    if signals and (reason is ExitReason.KILLED or code == interrupted):
        return 128 + signals[-1]
    return code


def _repeatable(options: CommandOptions, work: Work) -> Work:
    """Return the work as a deterministic run. Input from a terminal is replaced by no input, because typing differs each time."""
    stdin = b"" if isinstance(work.stdin, int) and os.isatty(work.stdin) else work.stdin
    if options.record is not None and isinstance(stdin, int):
        stdin = sys.stdin.buffer.read(LARGEST_INPUT + 1)
        if len(stdin) > LARGEST_INPUT:
            raise PolicyError(f"standard input is larger than the {LARGEST_INPUT >> 20} MiB that a record holds", hint="put it into a file")
    return replace(work, seed=options.seed, stdin=stdin, record="" if options.record is None else os.path.abspath(options.record))
