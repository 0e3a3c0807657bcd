"""`timeline`, `rewind` and `inspect` of a stored sandbox: the runs that were steps, and the files before each of them."""

from __future__ import annotations

import os
import time

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.assembly import here
from agent_sandbox.cli.commands.inspect import RAISED, DirectoryResult, FileResult, StateDiffResult
from agent_sandbox.cli.commands.snapshots import SandboxFacts, SnapshotFacts, snapshot_facts
from agent_sandbox.cli.commands.timeline import TimelineStep
from agent_sandbox.cli.context import policy_of
from agent_sandbox.cli.options import PolicyOptions
from agent_sandbox.cli.render.messages import Console, counted, remark, shown
from agent_sandbox.cli.render.timeline import step_title, tree_lines
from agent_sandbox.cli.results import ErrorFacts, ErrorResult, PathName, VerbResult
from agent_sandbox.cli.timeline_options import ERROR
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.model import Policy, cloned
from agent_sandbox.workspace.project import Project
from agent_sandbox.workspace.run_steps import RunStep, RunTimeline, opened

if TYPE_CHECKING:
    from agent_sandbox.cli.timeline_options import InspectOptions
    from agent_sandbox.workspace.stored_sandbox import Stored

MOST_NAMED = 5  # files of one run


@dataclass(frozen=True)
class RunTimelineResult(VerbResult):
    """The runs of a stored sandbox that were steps, oldest first, those of other branches too.

    `present` is the step before which the sandbox was put back; 0 if something ran since. Their states hold files, and no memory.
    """

    kind = "timeline-runs"

    about: SandboxFacts
    since: float
    present: int
    steps: tuple[TimelineStep, ...]

    def text(self, console: Console) -> None:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        heading = f"{self.about.sandbox}  {self.about.project} · {counted(len(self.steps), 'run')} · since {began} · files only"
        print(console.style.heading(shown(heading)))
        for line in tree_lines(self.steps, self.present):
            print(shown(line))


@dataclass(frozen=True)
class SandboxRewindResult(VerbResult):
    """A return of a stored sandbox to the files before a run. `kept` is the snapshot of the state that it left; null if nothing had run."""

    kind = "rewind-runs"

    about: SandboxFacts
    step: TimelineStep
    kept: SnapshotFacts | None

    def text(self, console: Console) -> None:
        saved = f"; the state that it left is snapshot {self.kept.id}" if self.kept else ""
        console.note(f"the files of the sandbox are as before {step_title(self.step)}{saved}")
        remark("a stored sandbox has files and no memory: no program goes on from here")


def show_runs(stored: Stored, *, end: bool) -> RunTimelineResult:
    """Show the runs of a sandbox."""
    if end:
        raise PolicyError("a stored sandbox is not a session to be ended", hint="forget its changes: agent-sandbox reset")
    with opened(stored, _policy(stored)) as timeline:
        steps = timeline.steps()
        since = steps[0].at
        return RunTimelineResult(_about(stored), since, timeline.present, tuple(_step(each, stored, since) for each in steps))


def rewind_runs(stored: Stored, step: int | str) -> SandboxRewindResult:
    """Put the files of a sandbox back to those before a run. The present state becomes a snapshot."""
    with opened(stored, _policy(stored)) as timeline:
        shown_step = _chosen(timeline, step, stored)
    done = stored.rollback(shown_step.number)
    return SandboxRewindResult(_about(stored), shown_step, snapshot_facts(done.kept) if done.kept else None)


def inspect_runs(stored: Stored, options: InspectOptions) -> VerbResult:
    """Look at the files before a run."""
    name = stored.state.id
    if options.question in ("variables", "value"):
        why = "a stored sandbox keeps files before each run, and no variables"
        raise PolicyError(why, hint="ask for a file (--file PATH), a directory (--list PATH) or what changed (--diff)")
    if options.step is None:
        raise PolicyError("name the step whose files are meant", hint="see the steps: agent-sandbox timeline .")
    with opened(stored, _policy(stored)) as timeline:
        step = _chosen(timeline, options.step, stored)
        if options.question == "diff":
            files = timeline.differences(step.number, options.other)
            return StateDiffResult(name, step.number, options.other or 0, {}, {_short(path, stored): kind for path, kind in files.items()})
        path = os.path.normpath(os.path.join(stored.state.project, options.words))
        try:
            if options.question == "read":
                return FileResult(name, step, PathName(options.words), timeline.read(step.number, path))
            return DirectoryResult(name, step, PathName(options.words), timeline.names(step.number, path))
        except OSError as error:
            what = f"{options.words!r} could not be read: {error.strerror or error}"
            return ErrorResult(ErrorFacts("Raised", what, f"it was asked before {step_title(step)}"), RAISED)


def _chosen(timeline: RunTimeline, step: int | str, stored: Stored) -> TimelineStep:
    steps = timeline.steps()
    if step == ERROR:
        failed = [each for each in steps if each.error]
        if not failed:
            raise PolicyError("no run of this sandbox has failed", hint="see: agent-sandbox timeline .")
        return _step(failed[-1], stored, steps[0].at)
    timeline.find(int(step))
    return _step(next(each for each in steps if each.number == int(step)), stored, steps[0].at)


def _step(step: RunStep, stored: Stored, since: float) -> TimelineStep:
    files = [f"{_short(path, stored)} {kind}" for path, kind in (step.files or {}).items()]
    named = (*files[:MOST_NAMED], *([f"{len(files) - MOST_NAMED} more"] if len(files) > MOST_NAMED else []))
    return TimelineStep(
        step.number,
        step.parent,
        step.number,
        0,
        step.command,
        round(step.at - since, 3),
        True,
        bool(files),
        named,
        (),
        None,
        step.error or None,
        step.led_here,
    )


def _short(path: str, stored: Stored) -> str:
    return path.removeprefix(f"{stored.state.project}/")


def _about(stored: Stored) -> SandboxFacts:
    return SandboxFacts(PathName(stored.state.project), stored.state.id)


def _policy(stored: Stored) -> Policy:
    """Return the policy of the project, which says what is hidden from its sandbox; that of a clone, if the project is gone."""
    project = stored.state.project
    if os.path.isdir(project):
        return policy_of(PolicyOptions(), Project(project))
    return cloned(masks=here().masks((project or "/",), searched=None))
