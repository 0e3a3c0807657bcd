"""`diff`: show the changes in the sandbox, or those that a command would make. The machine itself is never written."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Literal

from agent_sandbox._fast.values import dataclass, replace
from agent_sandbox.assembly import here
from agent_sandbox.cli.caller import EscapedOutput, forwarding
from agent_sandbox.cli.context import current_and_whole, policy_of
from agent_sandbox.cli.execute import COULD_NOT_START, code_of, perform, refusal, say_how_it_ended
from agent_sandbox.cli.options import CommandOptions, ShowOptions
from agent_sandbox.cli.render import pager
from agent_sandbox.cli.render.changes import ShownChange, check_patterns, gather, refuse_on_a_terminal, show
from agent_sandbox.cli.render.messages import Console, remark, shown
from agent_sandbox.cli.render.protection import path_remarks, remarked
from agent_sandbox.cli.results import OMITTED, Omitted, PathFacts, PathName, PathRemarks, VerbResult
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.work import Command, Outcome, Work
from agent_sandbox.errors import WorkspaceError
from agent_sandbox.policy.model import Policy
from agent_sandbox.runtime.base import ExitReason
from agent_sandbox.workspace.changes import ChangeSet, Contents
from agent_sandbox.workspace.diff.compare import Formerly
from agent_sandbox.workspace.project import Project
from agent_sandbox.workspace.promotion.inspect import Protection, TreeContext, judge_changes, look_at
from agent_sandbox.workspace.protected import CLASSES, DEPENDENCY, GIT, SECRETS, classes_of_all
from agent_sandbox.workspace.stored_sandbox import Stored

_IN_MEMORY = 8 << 20
_NAMED = 3  # paths of a protected kind; --json has all
Write = Callable[[bytes], object]


@dataclass(frozen=True)
class DiffRun:
    """The end of the command of a diff."""

    exit: int
    reason: ExitReason
    limits_hit: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class DiffResult(VerbResult):
    """Changes with their content.

    The changes were printed one by one, so `changes` is empty here. `protected` are the changes that a promotion needs an approval for, by
    kind, and `remarks` say more about some. `problem` says that a patch lacks content of the project, or that the changes of a command
    could not be listed.
    """

    kind = "diff"
    streamed = True

    project: PathName
    sandbox: str | None
    changes: tuple[ShownChange, ...] = ()
    protected: dict[str, tuple[PathFacts, ...]] | Omitted = OMITTED
    remarks: tuple[PathRemarks, ...] | Omitted = OMITTED
    run: DiffRun | Omitted = OMITTED
    problem: Literal["incomplete", "unlisted"] | Omitted = OMITTED

    @property
    def code(self) -> int:
        """The exit code of the command, if there is one and it is not 0; else the code for `problem`; else 0, with and without changes."""
        if not isinstance(self.run, Omitted) and self.run.exit:
            return self.run.exit
        return 0 if isinstance(self.problem, Omitted) else {"incomplete": 1, "unlisted": COULD_NOT_START}[self.problem]

    def text(self, console: Console) -> None:
        """Print nothing more."""


def diff(options: CommandOptions, console: Console) -> VerbResult:
    """Show the changes in the project's sandbox, or those of a command on a throw-away clone."""
    check_patterns(options.show.only)
    refuse_on_a_terminal(options.show)
    if options.diff:
        return perform(options, Command(options.command), console, stdin=0)
    sandbox = current_and_whole(options.project, options.policy)
    stored = Stored(sandbox.state)
    result = DiffResult(PathName(sandbox.project.path), sandbox.state.id)
    with stored.opened() as layers:
        policy = policy_of(options.policy, sandbox.project)
        changes = stored.changes_in(layers, policy)
        former = Formerly(bases=stored.bases(), open_base=stored.open_base)
        material = gather(options.show, sandbox.project.path, changes, layers, former)
        protection = _judged(ChangeSet(material.files.project), layers, sandbox.project.path, policy)
        result = replace(result, protected=_by_kind(protection), remarks=path_remarks(protection.remarks))
        with pager.output(paged=options.show.pager) as write:  # a reader who quits early is no failure
            _begin(options.show, write, result)
            result = result if show(options.show, material, write, console) else replace(result, problem="incomplete")
            _end(options.show, write, result)
    for name, paths in protection.by_class().items() if console.shows and not console.quiet else ():
        remark(f"{len(paths):,} of the protected kind {name!r}: {CLASSES[name]}{_named(name, paths, protection, sandbox.project.path)}")
    return result


def _judged(changes: ChangeSet, contents: Contents, project: str, policy: Policy) -> Protection:
    """Judge the changes as a promotion would. A tree that cannot be examined is judged by names alone."""
    around = TreeContext.of(project, policy.files, here().host.home)
    try:
        return judge_changes(changes, look_at(project, changes), contents, root=project, around=around)
    except (OSError, WorkspaceError):
        return Protection(classes_of_all(changes, project))


def _named(name: str, paths: tuple[str, ...], protection: Protection, project: str) -> str:
    """Return the first paths of a kind, with remarks."""
    if name not in (DEPENDENCY, SECRETS, GIT):
        return ""
    lines = [remarked(path.removeprefix(project.rstrip("/") + "/"), protection.remarks.get(path, ())) for path in paths[:_NAMED]]
    return ": " + "; ".join(lines) + (f"; and {len(paths) - _NAMED:,} more" if len(paths) > _NAMED else "")


def _by_kind(protection: Protection) -> dict[str, tuple[PathFacts, ...]]:
    return {name: tuple(PathFacts(PathName(path)) for path in paths) for name, paths in protection.by_class().items()}


def diff_of(options: CommandOptions, session: Session, work: Work, project: Project, console: Console) -> DiffResult:
    """Do the work in a throw-away sandbox and show its changes. The program's own output goes to standard error.

    The layers are removed when the run ends, so the diff is written to a temporary file before that, and shown afterwards.
    """
    shows: list[bool] = []
    with tempfile.SpooledTemporaryFile(_IN_MEMORY) as spool:

        def keep(changes: ChangeSet, contents: Contents) -> None:
            shows.append(show(options.show, gather(options.show, project.path, changes, contents), spool.write, console))

        with forwarding() as forward:
            output = EscapedOutput(aside=True)
            outcome = session.run(replace(work, on_start=forward.begin, on_output=output.pass_on, on_changes=keep))
            output.finish()
        say_how_it_ended(refusal(work, outcome), outcome.exit.reason, outcome.exit.limits_hit)
        for note in outcome.notes if not console.quiet or not shows else ():
            remark(note)
        result = DiffResult(PathName(project.path), None, run=_run(outcome, forward.received))
        if shows != [True]:
            result = replace(result, problem="incomplete" if shows else "unlisted")
        spool.seek(0)
        with pager.output(paged=options.show.pager) as write:
            _begin(options.show, write, result)
            for line in spool:
                write(line)
            _end(options.show, write, result)
    return result


def _begin(options: ShowOptions, write: Write, result: DiffResult) -> None:
    if options.form == "json":
        from agent_sandbox.cli.render.json import begin_document  # only with --json

        begin_document(write, result)


def _end(options: ShowOptions, write: Write, result: DiffResult) -> None:
    if options.form == "json":
        from agent_sandbox.cli.render.json import end_document  # only with --json

        end_document(write, result)


def _run(outcome: Outcome, signals: list[int]) -> DiffRun:
    notes = tuple(shown(note) for note in outcome.notes)
    return DiffRun(code_of(outcome.exit, signals), outcome.exit.reason, outcome.exit.limits_hit, notes)
