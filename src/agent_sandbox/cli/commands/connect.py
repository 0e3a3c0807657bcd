"""`connect`: change the settings of a coding agent so that it works in the sandbox, or take that back."""

from __future__ import annotations

import os

from agent_sandbox._fast.values import dataclass
from agent_sandbox.assembly import here
from agent_sandbox.cli.context import project_of
from agent_sandbox.cli.parser import Request, UsageError
from agent_sandbox.cli.render.messages import Console, shown
from agent_sandbox.cli.results import NOT_APPROVED, PathName, VerbResult
from agent_sandbox.coding_agents.settings.claude import CLAUDE
from agent_sandbox.coding_agents.settings.codex import CODEX
from agent_sandbox.coding_agents.settings.connection import Connections, FileChange
from agent_sandbox.coding_agents.settings.cursor import CURSOR
from agent_sandbox.coding_agents.settings.gemini import GEMINI
from agent_sandbox.coding_agents.settings.places import SCOPES, Scope, SettingsPlace
from agent_sandbox.coding_agents.settings.vscode import VSCODE
from agent_sandbox.workspace.store import Store

PROGRAMS = {"claude": CLAUDE, "codex": CODEX, "gemini": GEMINI, "cursor": CURSOR, "vscode": VSCODE}
RECORDS = "connections"  # in the state directory


@dataclass(frozen=True)
class ConnectOptions:
    """Options of `connect`."""

    program: str
    scope: Scope
    undo: bool
    dry_run: bool
    yes: bool
    project: str | None

    @classmethod
    def read(cls, request: Request) -> ConnectOptions:
        (program,) = request.words
        if program not in PROGRAMS:
            raise UsageError(f"there is no way to connect {program!r}", hint=f"it may be {', '.join(PROGRAMS)}")
        written = request.value("--scope") or "user"
        scope = next((each for each in SCOPES if each == written), None)
        if scope is None or (scope == "machine" and program != "claude"):
            choices = SCOPES if program == "claude" else SCOPES[:2]
            raise UsageError(f"--scope takes {' or '.join(choices)} for {program}, not {written!r}", hint="see: agent-sandbox help connect")
        return cls(program, scope, request.has("--undo"), request.has("--dry-run"), request.has("--yes"), request.value("--project"))


@dataclass(frozen=True)
class SettingsChange:
    """The change of one settings file, as a unified diff."""

    path: PathName
    diff: str


@dataclass(frozen=True)
class ConnectResult(VerbResult):
    """The change of a program's settings. `made` is false if it was only shown."""

    kind = "connect"

    program: str
    scope: str
    undo: bool
    made: bool
    changes: tuple[SettingsChange, ...]
    notes: tuple[str, ...]
    exit: int

    def text(self, console: Console) -> None:
        if not self.changes:
            console.note(f"{self.program} {'is not connected' if self.undo else 'is connected already'}: nothing to change")
        elif not self.made:
            console.note("not changed: needs --yes" if self.exit else "not changed: this was a dry run")
        else:
            console.note(f"{self.program} is {'as it was before' if self.undo else 'connected; take it back with --undo'}")
            for note in self.notes:
                console.note(note)


def connect(options: ConnectOptions, console: Console) -> VerbResult:
    """Show the change of a program's settings, ask, and make it. Raises `PolicyError` for files that must not be changed."""
    host = here().host
    # Only a project's settings need a project: those of the user may be changed from anywhere.
    project = project_of(options.project).path if options.scope == "project" else ""
    program = PROGRAMS[options.program]
    targets = program.targets(SettingsPlace(options.scope, host.home, project, os.environ))
    connections = Connections(os.path.join(Store.open(host.state).path, RECORDS))
    changes = connections.plan_undo(targets) if options.undo else connections.plan(targets)
    if console.shows:
        _show(changes)
    made = bool(changes) and not options.dry_run and (options.yes or (console.asks and console.says_yes("make this change?")))
    if made:
        connections.make(changes)
    notes = () if options.undo else program.notes(options.scope)
    code = NOT_APPROVED if changes and not made and not options.dry_run else 0
    facts = tuple(SettingsChange(PathName(change.path), change.diff) for change in changes)
    return ConnectResult(options.program, options.scope, options.undo, made, facts, notes, code)


def _show(changes: list[FileChange]) -> None:
    for change in changes:
        for line in change.diff.splitlines():
            print(shown(line))
