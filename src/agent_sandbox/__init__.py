"""An execution firewall and sandbox for AI agents.

An agent's action is code or a command. The action is judged, recorded, and run on an instant copy-on-write view of this machine. The caller
gets its output and the changes that it made in the view. Each folder answers one question:

`policy` decides whether an action is allowed, and is pure. `kernel` is how confinement is done on Linux, and the only user of ctypes.
`runtime` is where work runs: a guest forked from a warm process into namespaces of its own. `workspace` plans what a guest sees and reads
back what it changed. `ledger` records every action, before it is performed and when it has ended. `engine` brings these together in the
right order: decide, record, act, record. `cli` is the command line.

Beside them lie the modules that programs import: `sandbox` (`Sandbox`, `create_sandbox`), `session` (Python interpreters that keep their
state between turns), `live` (sandboxes whose programs go on between commands), `workspaces` (`Workspace`, whose changes wait until they are
promoted), `experiments` (`Experiment`, several attempts at once), `live_experiments` (the same
from a state of a session), `tasks` (`Coordinator`, a fresh sandbox for each task), `adapters`
(backends for frameworks), `files` (files in each of these), `config` (every setting, explained), `options` (the same as types), `result`,
`aio` (the same for asyncio), `replays` (run a record again), `timelines` (the steps of a session), `checkpoints` (sessions on disk),
`isolation`, `audit`, and `errors`, the exceptions of this package. A program that fails in a sandbox is a result, not an exception.

A module imports only modules of its own level and of lower levels. From the top, these are: the modules just named, then `engine`, then
`runtime`, `workspace` and `ledger`, then `kernel` and `policy`, then `errors`. Names are loaded when they are first used, because a process
inside the sandbox imports this package too, and must stay small.
"""

from __future__ import annotations

TYPE_CHECKING = False  # see `_fast.values`
if TYPE_CHECKING:
    from agent_sandbox.aio import AsyncFiles, AsyncLiveSandbox, AsyncPastState, AsyncSandbox, AsyncSession, AsyncWorkspace
    from agent_sandbox.audit import AuditEntry, AuditLevel, AuditLog
    from agent_sandbox.checkpoints import SessionCheckpoint, import_checkpoint, list_checkpoints
    from agent_sandbox.config import SandboxConfig
    from agent_sandbox.errors import (
        Busy,
        CheckpointError,
        Conflicted,
        Denied,
        Drift,
        LaunchFailed,
        LedgerBroken,
        LedgerUnavailable,
        PolicyError,
        RecordError,
        RuntimeUnavailable,
        SandboxError,
        SandboxWarning,
        ToolError,
        WorkspaceError,
    )
    from agent_sandbox.executor import CodeExecutor, ExecutionContext, ExecutionResult
    from agent_sandbox.experiments import AttemptOutcome, AttemptSandbox, AttemptWork, Comparison, Experiment
    from agent_sandbox.files import FileEntry, SandboxFiles
    from agent_sandbox.isolation import ContainerIsolation, IsolationBackend, IsolationConfig, ProcessIsolation
    from agent_sandbox.live import LiveSandbox
    from agent_sandbox.live_experiments import LiveExperiment
    from agent_sandbox.options import (
        CreateArguments,
        LiveOptions,
        ResumeOptions,
        RunOptions,
        SandboxArguments,
        SandboxSettings,
        SessionOptions,
        SimulationOptions,
        TurnOptions,
        WorkspaceOptions,
        WorkspaceSimulationOptions,
    )
    from agent_sandbox.permissions import FilePermission, NetworkPermission, PermissionLevel, PermissionSet, ProcessPermission
    from agent_sandbox.policy.bound_secrets import Secret
    from agent_sandbox.policy.intents import NetworkIntent
    from agent_sandbox.policy.model import AskRules
    from agent_sandbox.replays import Replay, replay
    from agent_sandbox.result import SandboxResult, SandboxStatus
    from agent_sandbox.sandbox import Sandbox, create_sandbox, shell
    from agent_sandbox.session import SandboxSession
    from agent_sandbox.tasks import Coordinator, Task, TaskOutcome
    from agent_sandbox.timelines import PastFrame, PastState, PastVariable, Rewound, StateDiff, Step, Timeline
    from agent_sandbox.workspaces import Workspace, WorkspaceDiff

__all__ = [
    "AskRules",
    "AsyncFiles",
    "AsyncLiveSandbox",
    "AsyncPastState",
    "AsyncSandbox",
    "AsyncSession",
    "AsyncWorkspace",
    "AttemptOutcome",
    "AttemptSandbox",
    "AttemptWork",
    "AuditEntry",
    "AuditLevel",
    "AuditLog",
    "Busy",
    "CheckpointError",
    "CodeExecutor",
    "Comparison",
    "Conflicted",
    "ContainerIsolation",
    "Coordinator",
    "CreateArguments",
    "Denied",
    "Drift",
    "ExecutionContext",
    "ExecutionResult",
    "Experiment",
    "FileEntry",
    "FilePermission",
    "IsolationBackend",
    "IsolationConfig",
    "LaunchFailed",
    "LedgerBroken",
    "LedgerUnavailable",
    "LiveExperiment",
    "LiveOptions",
    "LiveSandbox",
    "NetworkIntent",
    "NetworkPermission",
    "PastFrame",
    "PastState",
    "PastVariable",
    "PermissionLevel",
    "PermissionSet",
    "PolicyError",
    "ProcessIsolation",
    "ProcessPermission",
    "RecordError",
    "Replay",
    "ResumeOptions",
    "Rewound",
    "RunOptions",
    "RuntimeUnavailable",
    "Sandbox",
    "SandboxArguments",
    "SandboxConfig",
    "SandboxError",
    "SandboxFiles",
    "SandboxResult",
    "SandboxSession",
    "SandboxSettings",
    "SandboxStatus",
    "SandboxWarning",
    "Secret",
    "SessionCheckpoint",
    "SessionOptions",
    "SimulationOptions",
    "StateDiff",
    "Step",
    "Task",
    "TaskOutcome",
    "Timeline",
    "ToolError",
    "TurnOptions",
    "Workspace",
    "WorkspaceDiff",
    "WorkspaceError",
    "WorkspaceOptions",
    "WorkspaceSimulationOptions",
    "create_sandbox",
    "import_checkpoint",
    "list_checkpoints",
    "replay",
    "shell",
]

_HOMES = {
    "aio": ("AsyncFiles", "AsyncLiveSandbox", "AsyncPastState", "AsyncSandbox", "AsyncSession", "AsyncWorkspace"),
    "audit": ("AuditEntry", "AuditLevel", "AuditLog"),
    "checkpoints": ("SessionCheckpoint", "import_checkpoint", "list_checkpoints"),
    "config": ("SandboxConfig",),
    "errors": (
        *("Busy", "CheckpointError", "Conflicted", "Denied", "Drift", "LaunchFailed", "LedgerBroken", "LedgerUnavailable", "PolicyError"),
        *("RecordError", "RuntimeUnavailable", "SandboxError", "SandboxWarning", "ToolError", "WorkspaceError"),
    ),
    "executor": ("CodeExecutor", "ExecutionContext", "ExecutionResult"),
    "experiments": ("AttemptOutcome", "AttemptSandbox", "AttemptWork", "Comparison", "Experiment"),
    "live_experiments": ("LiveExperiment",),
    "files": ("FileEntry", "SandboxFiles"),
    "isolation": ("ContainerIsolation", "IsolationBackend", "IsolationConfig", "ProcessIsolation"),
    "options": (
        *("CreateArguments", "LiveOptions", "ResumeOptions", "RunOptions", "SandboxArguments", "SandboxSettings", "SessionOptions"),
        *("SimulationOptions", "TurnOptions", "WorkspaceOptions", "WorkspaceSimulationOptions"),
    ),
    "live": ("LiveSandbox",),
    "policy.bound_secrets": ("Secret",),
    "policy.intents": ("NetworkIntent",),
    "policy.model": ("AskRules",),
    "permissions": ("FilePermission", "NetworkPermission", "PermissionLevel", "PermissionSet", "ProcessPermission"),
    "workspaces": ("Workspace", "WorkspaceDiff"),
    "replays": ("Replay", "replay"),
    "result": ("SandboxResult", "SandboxStatus"),
    "sandbox": ("Sandbox", "create_sandbox", "shell"),
    "session": ("SandboxSession",),
    "tasks": ("Coordinator", "Task", "TaskOutcome"),
    "timelines": ("PastFrame", "PastState", "PastVariable", "Rewound", "StateDiff", "Step", "Timeline"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:  # a type checker knows the public names from the imports above, and must still report unknown names

    def __getattr__(name: str) -> object:
        """Import a public name from its module when it is first used."""
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """Return the public names, including those not imported yet."""
    return sorted({*globals(), *__all__})
