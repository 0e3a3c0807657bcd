"""`diff`: show the changes in the sandbox, or those that a command would make. The machine itself is never written."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from glob import escape
from shlex import join
from typing import Literal

from agent_sandbox._fast.values import dataclass, replace
from agent_sandbox.assembly import here
from agent_sandbox.cli.caller import EscapedOutput, forwarding
from agent_sandbox.cli.context import current_and_whole, object_runtime, policy_of, working_directory
from agent_sandbox.cli.execute import COULD_NOT_START, code_of, perform, refusal, say_how_it_ended
from agent_sandbox.cli.options import CommandOptions, ShowOptions
from agent_sandbox.cli.parser import UsageError
from agent_sandbox.cli.render import pager
from agent_sandbox.cli.render.changes import ShownChange, check_patterns, choice_of, gather, refuse_on_a_terminal, show
from agent_sandbox.cli.render.colours import Painter
from agent_sandbox.cli.render.messages import Console, remark, shown
from agent_sandbox.cli.render.progress import progress_of
from agent_sandbox.cli.render.protection import path_remarks, remarked
from agent_sandbox.cli.results import OMITTED, Omitted, PathFacts, PathName, PathRemarks, VerbResult
from agent_sandbox.engine.promote import Wanted, with_history
from agent_sandbox.engine.repositories import HistorySource, carry_history
from agent_sandbox.engine.review import Review, reviewed
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.work import Command, Outcome, Work
from agent_sandbox.errors import PolicyError, WorkspaceError
from agent_sandbox.policy.model import Policy
from agent_sandbox.policy.paths import contains
from agent_sandbox.runtime.base import ExitReason
from agent_sandbox.workspace.changes import ChangeSet, Contents
from agent_sandbox.workspace.diff.formats import HEADING, WARNING, Row, ours
from agent_sandbox.workspace.digests import PRINTED
from agent_sandbox.workspace.progress import Progress
from agent_sandbox.workspace.project import Project
from agent_sandbox.workspace.promotion.inspect import Protection, TreeContext, judge_changes, look_at
from agent_sandbox.workspace.protected import CLASSES, DEPENDENCY, GIT, SECRETS, classes_of_all
from agent_sandbox.workspace.reality import Base
from agent_sandbox.workspace.stored_sandbox import Stored

_IN_MEMORY = 8 << 20
_SHELL = frozenset(" \t\n|&;<>()$`\\\"'*?[]#~={}!")  # a word with one of these is a line for the shell
_NAMED = 3  # paths of a protected kind; --json has all
Write = Callable[[bytes], object]


@dataclass(frozen=True)
class DiffRun:
    """The end of the command whose changes a diff shows."""

    exit: int
    reason: ExitReason
    limits_hit: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class DiffResult(VerbResult):
    """The changes in a sandbox, or those that a command would make, with their content.

    `changes` is empty, because the command prints them one by one before it returns this result. `git` are sentences about commits and
    branches. `digest` identifies the shown changes; `no_digest` is the reason if there is none. `protected` are the changes that need an
    approval to be promoted, by protected kind, and `remarks` are sentences about some of them. `problem` is "incomplete" if a patch lacks
    content of the project, and "unlisted" if the changes of a command could not be listed.
    """

    kind = "diff"
    streamed = True

    project: PathName
    sandbox: str | None
    changes: tuple[ShownChange, ...] = ()
    git: tuple[str, ...] = ()
    digest: str | Omitted = OMITTED  # of the changes that a promotion would take
    no_digest: str | Omitted = OMITTED  # the reason why there is none
    protected: dict[str, tuple[PathFacts, ...]] | Omitted = OMITTED
    remarks: tuple[PathRemarks, ...] | Omitted = OMITTED
    run: DiffRun | Omitted = OMITTED
    problem: Literal["incomplete", "unlisted"] | Omitted = OMITTED

    @property
    def code(self) -> int:
        """The exit code: that of the command if it failed, else that of `problem` if there is one, else 0."""
        if not isinstance(self.run, Omitted) and self.run.exit:
            return self.run.exit
        return 0 if isinstance(self.problem, Omitted) else {"incomplete": 1, "unlisted": COULD_NOT_START}[self.problem]

    def text(self, console: Console) -> None:
        """Print nothing: the diff was already printed."""


def diff(options: CommandOptions, console: Console) -> VerbResult:
    """Show the changes in the project's sandbox, or those of a command on a throw-away clone."""
    check_patterns(options.show.only)
    refuse_on_a_terminal(options.show)
    named = _paths_named(options) if options.diff else ()
    if named:
        patterns = tuple(map(escape, named))
        options = replace(options, diff=False, throw_away=False, show=replace(options.show, only=(*options.show.only, *patterns)))
    if options.diff:
        return perform(options, Command(options.command), console, stdin=0)
    sandbox = current_and_whole(options.project, options.policy)
    view, project = options.show, sandbox.project.path
    result = DiffResult(PathName(project), sandbox.state.id)
    wanted = Wanted(choice_of(view.only, project), system=view.everything, caches=view.everything)
    hashed = view.form not in ("name-only", "patch")
    stored, policy = Stored(sandbox.state), policy_of(options.policy, sandbox.project)
    with object_runtime() as runtime, progress_of(console) as progress, ExitStack() as ends:
        review = ends.enter_context(reviewed(stored, policy, replace(wanted, progress=progress), runtime, hashed=hashed))
        material = gather(view, project, review.everything, review.contents, review.former, review.digests, progress)
        if named and not (material.files.project or material.files.elsewhere or material.files.noise):
            console.note(f"no changes in {join(options.words)}; to run it as a command: agent-sandbox diff -- {join(options.words)}")
        protection = judged(ChangeSet(material.files.project), review, project, policy, progress)
        result = replace(result, git=review.words, protected=by_kind(protection), remarks=path_remarks(protection.remarks))
        if sys.stdout.isatty() and view.form != "stat":
            progress.end()
        with pager.output(paged=view.pager) as write:  # a reader who quits early is no failure
            _begin(view, write, result)
            result = result if show(view, material, write, console, review.words) else replace(result, problem="incomplete")
            digest, why_not = review.digest()
            result = replace(result, digest=digest or OMITTED, no_digest=why_not or OMITTED)
            if hashed and view.form != "json":
                for row in _promoting(options, digest, why_not):
                    write(f"{Painter(console.style.colours).line(row)}\n".encode())
                if not view.only and os.isatty(1):  # otherwise a program may be the only reader
                    review.remember()
            _end(view, write, result)
    for name, paths in protection.by_class().items() if console.shows and not console.quiet else ():
        remark(f"{len(paths):,} of the protected kind {name!r}: {CLASSES[name]}{_named(name, paths, protection, project)}")
    return result


def _paths_named(options: CommandOptions) -> tuple[str, ...]:
    """Return the paths that the words of the command line name; none if the words are a command.

    A file is never run because its name was typed: words are paths if each is a file or directory, on the machine or in the sandbox's
    changes. Raises `UsageError` for a word that is neither a path nor a program.
    """
    if not options.words:
        return ()
    paths = [os.path.normpath(os.path.join(working_directory(), word)) for word in options.words]
    unknown = [number for number, path in enumerate(paths) if not os.path.lexists(path)]
    if unknown:  # perhaps in the sandbox alone
        changed: list[str] = []
        with suppress(PolicyError):  # no sandbox can be kept here, in a home directory: then none has changes
            sandbox = current_and_whole(options.project, options.policy)
            changed = [change.path for change in Stored(sandbox.state).changes(policy_of(options.policy, sandbox.project))]
        unknown = [number for number in unknown if not any(contains(paths[number], path) for path in changed)]
    if not unknown:
        return tuple(paths)
    first = options.words[0]
    import shutil  # slow, and a diff of the sandbox needs none

    if (len(options.words) == 1 and set(first) & _SHELL) or shutil.which(first) is not None:
        return ()
    word = options.words[unknown[0]]
    if word.startswith("-"):
        raise UsageError(f"{word} must stand before {first!r}", hint=f"agent-sandbox diff {word} {first}")
    why = f"{word!r} is neither a path here nor a program" if word == first else f"{word!r} is no path here, and {first!r} is no program"
    raise UsageError(why, hint=f"to run it all the same: agent-sandbox diff -- {join(options.words)}")


def judged(changes: ChangeSet, review: Review, project: str, policy: Policy, progress: Progress) -> Protection:
    """Return the protected classes of the changes, as a promotion finds them. If the real tree cannot be examined, only names decide."""
    around = TreeContext.of(project, policy.files, here().host.home)
    try:
        judged = judge_changes(changes, look_at(project, changes), review.contents, root=project, around=around, progress=progress)
    except (OSError, WorkspaceError):
        judged = Protection(classes_of_all(changes, project))
    return Protection({**judged.classes, **review.classes}, judged.remarks)


def _named(name: str, paths: tuple[str, ...], protection: Protection, project: str) -> str:
    """Return a list of the first `paths` of the protected kind `name`, with remarks; "" for a kind whose paths are not listed."""
    if name not in (DEPENDENCY, SECRETS, GIT):
        return ""
    lines = [remarked(path.removeprefix(project.rstrip("/") + "/"), protection.remarks.get(path, ())) for path in paths[:_NAMED]]
    return ": " + "; ".join(lines) + (f"; and {len(paths) - _NAMED:,} more" if len(paths) > _NAMED else "")


def by_kind(protection: Protection) -> dict[str, tuple[PathFacts, ...]]:
    """Return the protected paths of changes, by their kind."""
    return {name: tuple(PathFacts(PathName(path)) for path in paths) for name, paths in protection.by_class().items()}


def _promoting(options: CommandOptions, digest: str, why_not: str) -> Iterator[Row]:
    """Yield a row with the command that promotes exactly the shown changes, or with the reason why there is no digest for it."""
    if digest:
        where = ("--project", options.project) if options.project is not None else ()
        only = (word for pattern in options.show.only for word in ("--only", pattern))
        scope = ("--caches", "--system") if options.show.everything else ()
        command = join(("agent-sandbox", "promote", *where, *scope, *only, "--expect", digest[:PRINTED]))
        yield ours(HEADING, f"# Promote exactly this: {command}")
    elif why_not:
        yield ours(WARNING, f"# No digest to promote exactly this: {why_not}")


def diff_of(options: CommandOptions, session: Session, work: Work, project: Project, console: Console) -> DiffResult:
    """Run the work in a throw-away sandbox and show its changes. The output of the work itself goes to standard error.

    The changes are gone when the run ends, so the diff is written to a temporary file before the end, and shown afterwards.
    """
    import tempfile  # slow, and a diff of the sandbox needs none

    shows: list[bool] = []
    said: list[str] = []
    with tempfile.SpooledTemporaryFile(_IN_MEMORY) as spool:

        def keep(changes: ChangeSet, contents: Contents) -> None:
            masks = [mask.path for mask in session.policy.files.masks]
            with object_runtime() as runtime, ExitStack() as ends:
                source = HistorySource(project.path, changes, contents, None, _no_base, masks, runtime)
                history = carry_history(source, lambda change: True, ends)
                said.extend(history.sentences())
                changes, contents = with_history(changes, contents, history)
                shows.append(show(options.show, gather(options.show, project.path, changes, contents), spool.write, console, said))

        with forwarding() as forward:
            output = EscapedOutput(aside=True)
            outcome = session.run(replace(work, on_start=forward.begin, on_output=output.pass_on, on_changes=keep))
            output.finish()
        say_how_it_ended(refusal(work, outcome), outcome.exit.reason, outcome.exit.limits_hit)
        for note in outcome.notes if not console.quiet or not shows else ():
            remark(note)
        result = DiffResult(PathName(project.path), None, git=tuple(said), run=_run(outcome, forward.received))
        if shows != [True]:
            result = replace(result, problem="incomplete" if shows else "unlisted")
        spool.seek(0)
        with pager.output(paged=options.show.pager) as write:
            _begin(options.show, write, result)
            for line in spool:
                write(line)
            _end(options.show, write, result)
    return result


def _no_base(base: Base) -> int:
    raise WorkspaceError(f"{base.path!r} has no base in a throw-away sandbox")


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
