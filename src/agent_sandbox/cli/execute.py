"""Do a piece of work in a sandbox, with our streams, terminal and signals as its own: what `run` and `code` have in common."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from agent_sandbox._fast.values import replace
from agent_sandbox.assembly import here
from agent_sandbox.cli import streams, terminal
from agent_sandbox.cli.context import Current, session_for, working_directory
from agent_sandbox.cli.environment import guest_environment
from agent_sandbox.cli.parser import Request, UsageError
from agent_sandbox.cli.render.messages import remark, shown
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.runtimes import Runtimes
from agent_sandbox.engine.work import Code, Command, Outcome, Work
from agent_sandbox.errors import Busy, Denied, PolicyError
from agent_sandbox.policy.model import Policy
from agent_sandbox.runtime.base import Exit, ExitReason, Guest
from agent_sandbox.runtime.process.zygote import Zygote
from agent_sandbox.workspace.project import Project
from agent_sandbox.workspace.view.plan import PRIVATE

TIMED_OUT, COULD_NOT_START, NOT_EXECUTABLE, NOT_FOUND, OUT_OF_MEMORY = 124, 125, 126, 127, 137


def perform(request: Request, what: Code | Command, *, stdin: int | bytes, forked: Zygote | None = None) -> int:
    """Do it, and return the exit code of the whole program. `forked` is a zygote for native programs, if there is one already."""
    with _runtimes(request, forked) as runtimes:
        try:
            return _perform(request, what, stdin, runtimes)
        except Denied as refusal:
            if not refusal.verdict.program:
                raise
            from agent_sandbox.cli.elevation import somebody_lifts

            if not somebody_lifts(request, refusal.verdict):
                raise
        return _perform(request, what, stdin, runtimes)


def _perform(request: Request, what: Code | Command, stdin: int | bytes, runtimes: Runtimes) -> int:
    same = _same_every_time(request)
    if request.has("--simulate"):
        from agent_sandbox.cli.commands.sim import refuse_mixtures  # few runs are

        refuse_mixtures(request)
    with ExitStack() as stack:
        opening = session_for(request, runtimes, _say_who_has_it)
        session, found, project = opening.session, opening.found, opening.project
        stack.callback(session.gate.end)
        _warn_about(project, found)
        env = guest_environment(os.environ, request.values("--env"), home=here().host.home, bare=same)
        watch, cwd = request.has("--watch-reads"), directory_of(request, project, session.policy)
        work = Work(what, env, cwd=cwd, stdin=stdin, on_output=streams.pass_on, collect=False, watch_reads=watch)
        if opening.lifted is not None:
            work = replace(work, left=opening.lifted.left)
            stack.callback(lambda: here().elevations().sweep())
            if not request.has("--quiet"):
                remark(opening.lifted.note)
        if request.has("--observe"):
            work = replace(work, observe=True, log_observed=True)
        if same:
            work = repeated(request, work)
        if request.has("--explain"):
            return _explain(session, work)
        if request.has("--simulate"):
            from agent_sandbox.cli.commands.sim import plan_for

            return plan_for(request, session, work, project, _say_who_has_it)
        if request.has("--diff"):
            from agent_sandbox.cli.commands.diff import diff_of  # and with it all that makes a diff

            return diff_of(request, session, work, project)
        if request.has("--json"):
            from agent_sandbox.cli.render.json import run_document  # and with it json: not needed on the common path

            return run_document(session, work, found, project)
        return _streamed(request, session, work, found)


def _same_every_time(request: Request) -> bool:
    """Whether it is to be deterministic. Raises `UsageError` for options that go with that alone."""
    if any(request.has(option) for option in ("--deterministic", "--seed", "--record")):
        check(request)
    return request.has("--deterministic")


def _streamed(request: Request, session: Session, work: Work, found: Current | None) -> int:
    inside = any(request.has(option) for option in ("--deterministic", "--fuel")) or request.value("--runtime") == "wasm"
    with streams.forwarding() as forward:
        outcome = (
            _interactive(session, work, forward)
            if streams.interactive() and isinstance(work.stdin, int) and not inside  # where no program has a terminal
            else _piped(session, work, forward)
        )
    say_how_it_ended(work, outcome)
    if outcome.exit.code in (NOT_FOUND, NOT_EXECUTABLE) and (allowed := session.policy.programs.groups[:1]):
        remark(
            f"only these programs can be started: {', '.join(allowed[0])} (--allow); no file of the project, unless one of them reads it"
        )
    for note in outcome.notes if not request.has("--quiet") else ():
        remark(note)
    if not request.has("--quiet") and sys.stderr.isatty():
        from agent_sandbox.cli.change_list import remark_on_changes

        remark_on_changes(outcome, session.policy, found)
    return code_of(outcome.exit, forward.received)


def _piped(session: Session, work: Work, forward: streams.Forwarding) -> Outcome:
    work = replace(work, on_start=forward.begin)
    if not (os.isatty(1) or os.isatty(2)) or session.route(work).runtime != "wasm":
        return session.run(work)
    from agent_sandbox.cli.render.escaped import Escaped  # only where somebody watches

    escaped = Escaped()
    outcome = session.run(replace(work, on_output=escaped.pass_on))
    escaped.finish()
    return outcome


def _interactive(session: Session, work: Work, forward: streams.Forwarding) -> Outcome:

    with terminal.lent() as loan:

        def begin(guest: Guest) -> None:
            forward.begin(guest)
            loan.begin(guest)

        return session.run(replace(work, on_start=begin, terminal=terminal.size()))


@contextmanager
def _runtimes(request: Request, forked: Zygote | None) -> Iterator[Runtimes]:
    """Those that a command may use, until its end; by default the one that runs everything."""
    registry = here().command_line_registry(forked)
    wish = request.value("--runtime") or ("auto" if request.has("--deterministic") or request.has("--fuel") else "process")
    try:
        if wish not in registry:
            raise UsageError(f"there is no runtime {wish!r}", hint=f"use one of {', '.join(registry.names)}")
        yield here().runtimes(wish, registry)
    finally:
        registry.close(leaving=True)


def directory_of(request: Request, project: Project, policy: Policy | None = None) -> str | None:
    """Where the work begins, by the name it has in the view. It need not exist on the machine: an earlier run may have made it.

    Under a policy that shows no files at all, and without a wish, it is None: the scratch directory.
    """
    named = request.value("--cwd")
    if named is None and policy is not None and not (policy.files.read or policy.files.write):
        return None
    if named == "":
        raise PolicyError("--cwd is empty", hint="name a directory")
    path = os.path.realpath(os.path.join(working_directory() if not (named or "").startswith("/") else "/", named or ""))
    for private in PRIVATE:
        inside = path.startswith(private + "/") and not (path == project.path or path.startswith(project.path.rstrip("/") + "/"))
        if inside and project.path != "/":
            raise PolicyError(
                f"{path!r} is not in the sandbox: each run has a {private} of its own", hint=f"start elsewhere, or: --project {path}"
            )
    return path


def _explain(session: Session, work: Work) -> int:
    from agent_sandbox.runtime.router.route import explain

    route, plan = session.route(work), session.explain(work)
    for line in (*explain(route), *plan.describe(), *(f"note: {note}" for note in plan.notes)):
        print(shown(line))
    return 0


def _say_who_has_it(busy: Busy) -> None:
    remark(f"{busy.message}; waiting for it")


def _warn_about(project: Project, found: Current | None) -> None:
    if project.remote:
        remark(f"the project is on {project.fstype}: what a {project.remote} filesystem answers may differ from what a local one would")
    for leftover in found.leftovers if found else ():
        remark(f"could not be removed: {leftover}")


def say_how_it_ended(work: Work, outcome: Outcome) -> None:
    """What a shell would say, and which limit was reached. To standard error, because it is for people."""
    if outcome.refused:
        remark(refusal(work, outcome))
    elif why := ended_by(outcome.exit):
        remark(why)
    elif "disk" in outcome.exit.limits_hit:
        remark("the sandbox is full: the program could not write more (--disk SIZE)")


def refusal(work: Work, outcome: Outcome) -> str:
    """Why the program could not be started inside, in the words that a shell uses."""
    name = work.what.argv[0] if isinstance(work.what, Command) else f"the {work.what.language} interpreter"
    if outcome.exit.code == NOT_FOUND and "/" not in name:
        return f"{name}: command not found"
    return outcome.refused if outcome.exit.code == COULD_NOT_START else f"{name}: {outcome.refused}"


def ended_by(exit: Exit) -> str:
    """The limit that ended a run, in words; empty when none did."""
    return {
        ExitReason.TIMED_OUT: "it was ended because its time was up (--timeout TIME)",
        ExitReason.OUT_OF_MEMORY: "it was ended because it used more memory than it may (--memory SIZE)",
        ExitReason.CPU_LIMIT: "it was ended because it used more processor time than it may",
        ExitReason.FUEL_LIMIT: "it was ended because it executed more than it may (--fuel N)",
        ExitReason.DISK_LIMIT: "it was ended because it wrote more than it may (--disk SIZE)",
        ExitReason.OUTPUT_LIMIT: "it was ended because its output had no end",
    }.get(exit.reason, "")


def code_of(exit: Exit, signals: list[int]) -> int:
    """Our own exit code for how a run ended."""
    if exit.reason is ExitReason.TIMED_OUT:
        return TIMED_OUT
    if exit.reason is ExitReason.OUT_OF_MEMORY:
        return OUT_OF_MEMORY
    if exit.reason is ExitReason.KILLED and signals:
        return 128 + signals[-1]
    return exit.code


LARGEST_INPUT = 16 << 20  # bytes of standard input that a record may hold


def check(request: Request) -> None:
    """Raise `UsageError` for options that are empty words without another."""
    for option in ("--seed", "--record"):
        if request.has(option) and not request.has("--deterministic"):
            raise UsageError(f"{option} is for deterministic runs", hint="add --deterministic")
    if request.has("--record") and not request.has("--throw-away"):
        raise UsageError(
            "--record is for throw-away runs: what earlier ones left in the sandbox is not in a record", hint="add --throw-away"
        )


def repeated(request: Request, work: Work) -> Work:
    """The same work, to be the same every time. At a terminal it has no input: what somebody would type is not known."""
    stdin = b"" if isinstance(work.stdin, int) and os.isatty(work.stdin) else work.stdin
    if request.has("--record") and isinstance(stdin, int):
        stdin = sys.stdin.buffer.read(LARGEST_INPUT + 1)
        if len(stdin) > LARGEST_INPUT:
            raise PolicyError(f"standard input is larger than the {LARGEST_INPUT >> 20} MiB that a record holds", hint="put it into a file")
    record = request.value("--record")
    return replace(work, seed=_seed(request.value("--seed")), stdin=stdin, record="" if record is None else os.path.abspath(record))


def _seed(text: str | None) -> int:
    if text is None:
        return 0
    if not (text.isascii() and text.isdigit()) or len(text) > 20 or int(text) >= 1 << 64:
        raise UsageError(f"--seed takes a whole number from 0 to 2**64 - 1, not {text!r}", hint="for example --seed 7")
    return int(text)
