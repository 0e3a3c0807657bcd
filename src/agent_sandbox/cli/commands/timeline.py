"""`timeline`, `rewind` and `fork`: the steps of sessions that are held, returning to one of them, and forking it."""

from __future__ import annotations

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.assembly import here
from agent_sandbox.cli.context import current
from agent_sandbox.cli.render.messages import Console, counted, remark, shown
from agent_sandbox.cli.render.timeline import session_line, step_title, tree_lines
from agent_sandbox.cli.results import PathName, VerbResult
from agent_sandbox.errors import PolicyError
from agent_sandbox.server import client
from agent_sandbox.server.places import Places
from agent_sandbox.workspace import sandbox_inventory
from agent_sandbox.workspace.store import Store
from agent_sandbox.workspace.stored_sandbox import Stored

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from agent_sandbox.cli.timeline_options import ForkOptions, RewindOptions, TimelineOptions


@dataclass(frozen=True)
class TimelineStep:
    """One step of a session. Its state is the one before its statement.

    `text` is the statement, cut; empty at the end of a turn. `kept` is whether its state can be returned to at once; if not, `why` says the
    reason. `lost` is what the state does not hold, such as pipes. `files` are those that the statement changed, each with "new", "changed"
    or "gone"; empty if they are not known.
    """

    number: int
    parent: int
    turn: int
    line: int
    text: str
    at: float
    kept: bool
    files_changed: bool
    files: tuple[str, ...]
    lost: tuple[str, ...]
    why: str | None
    error: str | None
    present: bool  # whether it led to the present state

    @classmethod
    def of(cls, step: Mapping[str, Any], files: tuple[str, ...] = (), *, present: bool = False, changed: bool = False) -> TimelineStep:
        """Return the facts about a step that a holder told. `changed` is whether its statement changed files."""
        return cls(
            int(step["number"]),
            int(step["parent"]),
            int(step["turn"]),
            int(step["line"]),
            str(step["text"]),
            float(step["at"]),
            bool(step["kept"]),
            changed,
            files,
            tuple(map(str, step["lost"])),
            str(step["why"]) or None,
            str(step["error"]) or None,
            present,
        )


@dataclass(frozen=True)
class HeldFacts:
    """A session that is held: its script, and where it stands. `parent` is the session that it was forked from."""

    id: str
    script: str
    project: PathName
    since: float
    steps: int
    present: int  # the step whose state it is in
    failed: int | None  # the last step that raised
    parent: str | None
    parent_step: int | None
    ended: str | None
    busy: bool
    kept_seconds: float  # after its last use

    @classmethod
    def of(cls, facts: Mapping[str, Any], seconds: float) -> HeldFacts:
        """Return the facts that a holder told."""
        return cls(
            str(facts["id"]),
            str(facts["script"]),
            PathName(facts["project"]),
            float(facts["since"]),
            int(facts["steps"]),
            int(facts["present"]),
            facts["failed"],
            str(facts["parent"]) or None,
            int(facts["parent_step"]) or None,
            str(facts["ended"]) or None,
            bool(facts["busy"]),
            seconds,
        )


@dataclass(frozen=True)
class TimelineResult(VerbResult):
    """The newest 20,000 steps of a held session, oldest first, those of other branches too."""

    kind = "timeline"

    session: HeldFacts
    steps: tuple[TimelineStep, ...]

    def text(self, console: Console) -> None:
        print(console.style.heading(shown(session_line(self.session))))
        for line in tree_lines(self.steps, self.session.present):
            print(shown(line))
        if len(self.steps) < self.session.steps:
            remark(f"{counted(self.session.steps - len(self.steps), 'older step')} not shown")
        given_up = [step.number for step in self.steps if not step.kept]
        if given_up:
            console.note(f"{counted(len(given_up), 'state')} not kept (marked -); rewind may reach one by running its code again")


@dataclass(frozen=True)
class HeldSessionsResult(VerbResult):
    """The sessions that are held, oldest first."""

    kind = "held-sessions"

    sessions: tuple[HeldFacts, ...]

    def text(self, console: Console) -> None:
        for each in self.sessions:
            print(shown(session_line(each)))
        if not self.sessions:
            remark("no session with a timeline is held; begin one: agent-sandbox run --timeline FILE")


@dataclass(frozen=True)
class EndedResult(VerbResult):
    """Sessions that were ended."""

    kind = "sessions-ended"

    ended: tuple[str, ...]

    def text(self, console: Console) -> None:
        console.note(f"ended: {', '.join(self.ended)}" if self.ended else "no session with a timeline is held")


@dataclass(frozen=True)
class RewindResult(VerbResult):
    """A return to the state before a step. `ran_again` is the code that had to run again, because that state was given up."""

    kind = "rewind"

    session: str
    step: TimelineStep
    ran_again: str | None

    def text(self, console: Console) -> None:
        if self.ran_again is not None:
            remark(f"this state was not kept: {counted(len(self.ran_again.splitlines()), 'line')} of code ran again to reach it")
        console.note(f"{self.session} is before {step_title(self.step)}")
        console.note(f"look: agent-sandbox inspect {self.session} · go on: agent-sandbox run --in {self.session} FILE")


@dataclass(frozen=True)
class ForkResult(VerbResult):
    """New sessions with the state before a step. Each is held like the one that they were forked from."""

    kind = "fork"

    session: str
    step: int
    forks: tuple[str, ...]

    def text(self, console: Console) -> None:
        for name in self.forks:
            print(name)
        console.note(f"forked from {self.session} before step {self.step}; go on: agent-sandbox run --in {self.forks[0]} FILE")


def sandbox_of(name: str | None) -> Stored | None:
    """Return the stored sandbox that is named, by its own name or by the directory of its project; None if it is the name of a session."""
    if name is None:
        return None
    if "/" in name or name in (".", ".."):
        return Stored(current(None if name == "." else name).state)
    known = sandbox_inventory.look_at(Store.open(here().host.state), name)
    return None if known is None else Stored(known.state)


def places() -> Places:
    """Return the places of this user's holders."""
    return Places(Store.open(here().host.state))


def found(name: str | None, console: Console) -> client.FoundSession:
    """Return the held session that is named, or else the newest; then, if there are several, say which was taken."""
    taken, count = client.session(places(), name)
    if name is None and count > 1:
        console.note(f"using {taken.id}, the newest of {count} sessions: agent-sandbox timeline --all")
    return taken


def timeline(options: TimelineOptions, console: Console) -> VerbResult:
    """Show the steps of a session or the runs of a sandbox; list or end sessions."""
    if (stored := sandbox_of(options.session)) is not None:
        from agent_sandbox.cli.commands.run_timeline import show_runs  # which imports this module

        return show_runs(stored, end=options.end or options.keep)
    if options.everything:
        known = client.sessions(places())
        if options.end:
            return EndedResult(tuple(_end(each) for each in known))
        return HeldSessionsResult(tuple(HeldFacts.of(each.facts, each.idle_seconds) for each in known))
    taken = found(options.session, console)
    if options.end:
        return EndedResult((_end(taken),))
    if options.keep:
        from agent_sandbox.cli.commands.session_files import keep_files  # few sessions are kept

        return keep_files(taken)
    with client.opened(taken.place) as link:
        told = link.ask({"do": "timeline", "session": taken.id})
    return timeline_result(told, taken.idle_seconds)


def timeline_result(told: Mapping[str, Any], seconds: float) -> TimelineResult:
    """Return the timeline that a holder told. A statement changed files if the state of the step after it has others."""
    line, files, after = set(told["line"]), told["files"], set[int]()
    changing = set[int]()
    for step in told["step_list"]:
        if step["parent"] not in after and step["files_changed"]:
            changing.add(int(step["parent"]))
        after.add(int(step["parent"]))
    steps = tuple(
        TimelineStep.of(
            step,
            tuple(map(str, files.get(str(step["number"]), ()))),
            present=step["number"] in line,
            changed=step["number"] in changing,
        )
        for step in told["step_list"]
    )
    return TimelineResult(HeldFacts.of(told, seconds), steps)


def _end(taken: client.FoundSession) -> str:
    with client.opened(taken.place) as link:
        link.ask({"do": "end", "session": taken.id})
    return taken.id


def rewind(options: RewindOptions, console: Console) -> VerbResult:
    """Return a session, or the files of a sandbox, to the state before a step."""
    if (stored := sandbox_of(options.session)) is not None:
        from agent_sandbox.cli.commands.run_timeline import rewind_runs  # which imports this module

        return rewind_runs(stored, options.step)
    taken = found(options.session, console)
    with client.opened(taken.place) as link:
        told = link.ask({"do": "rewind", "session": taken.id, "step": options.step})
    return RewindResult(taken.id, TimelineStep.of(told["step"]), str(told["ran_again"]) or None)


def fork(options: ForkOptions, console: Console) -> ForkResult:
    """Make sessions from the state before a step."""
    if sandbox_of(options.session) is not None:
        why = "a stored sandbox has no memory to fork"
        raise PolicyError(why, hint='try several commands on its files at once: agent-sandbox try a="…" b="…" --check "…"')
    taken = found(options.session, console)
    with client.opened(taken.place) as link:
        told = link.ask({"do": "fork", "session": taken.id, "step": options.step, "count": options.count})
    return ForkResult(taken.id, int(told["step"]), tuple(map(str, told["forks"])))
