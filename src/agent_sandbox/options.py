"""The keyword arguments of sandboxes, workspaces and runs, as types: an editor completes them, and a type checker finds a wrong one.

`SandboxConfig` explains every setting; a test compares the two.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from agent_sandbox.audit import AuditLevel, AuditLog
    from agent_sandbox.engine.gate import Approver
    from agent_sandbox.permissions import PermissionSet
    from agent_sandbox.policy.action import Action
    from agent_sandbox.policy.bound_secrets import Secret
    from agent_sandbox.policy.code.patterns import Rule
    from agent_sandbox.policy.decide import Ask
    from agent_sandbox.policy.intents import NetworkIntent
    from agent_sandbox.policy.model import AskRules
    from agent_sandbox.policy.network import NetworkRules
    from agent_sandbox.policy.tokens import Token

PathLike = str | bytes | os.PathLike[str]
OnOutput = Callable[[Literal["stdout", "stderr"], str], object]
Steps = Literal["statement", "line"]
Tools = Mapping[str, Callable[..., object]] | Iterable[Callable[..., object]]


class _Settings(TypedDict, total=False):
    """The fields of `SandboxConfig`, except the one that `create_sandbox` calls `timeout`."""

    max_memory_mb: float | None
    max_output_bytes: int | None
    allow_file_read: bool
    allow_file_write: bool
    allow_network: bool
    allow_subprocess: bool
    allowed_paths: Sequence[PathLike]
    denied_paths: Sequence[PathLike]
    enable_audit: bool
    audit_level: AuditLevel
    allow_hidden: bool
    reveal: Sequence[PathLike]
    env_vars: Mapping[str, str]
    working_dir: PathLike | None
    preload: Sequence[str]
    max_cpu_seconds: float | None
    max_processes: int | None
    max_open_files: int | None
    max_disk_mb: float | None
    lifetime_seconds: float | None
    runtime: str
    allow_shell: bool
    allowed_commands: Sequence[str]
    denied_commands: Sequence[str]
    tools: Tools
    denied_tools: Sequence[str]
    max_fuel: int | None
    deterministic: bool
    seed: int
    validate_code: bool
    blocked_patterns: Sequence[str | Rule] | None
    network: Sequence[str] | NetworkRules
    secrets: Sequence[Secret]
    dlp: bool
    intents: Sequence[NetworkIntent]
    publish: Sequence[int | str]
    budgets: Sequence[str]
    image: str


class SandboxSettings(_Settings, total=False):
    """The fields of `SandboxConfig`, as keyword arguments of `Sandbox`."""

    timeout_seconds: float | None


class _Companions(TypedDict, total=False):
    """The other keyword arguments of `Sandbox`."""

    permissions: PermissionSet | None
    audit: AuditLog | None
    asks: AskRules | None
    approver: Approver | Callable[[Action, Ask], bool | str] | None
    capabilities: Iterable[Token | str]
    name: str


class SandboxArguments(SandboxSettings, _Companions, total=False):
    """All keyword arguments of `Sandbox`, for functions that pass them on."""


class CreateArguments(_Settings, _Companions, total=False):
    """The keyword arguments of `create_sandbox` besides `timeout`."""


class RunOptions(TypedDict, total=False):
    """Options of each piece of work.

    stdin: its input, text or bytes; nothing by default.
    env_vars: added to those of the configuration.
    timeout: seconds of wall time, in place of the configuration's.
    args: the arguments of the program.
    tools: functions that Python code may call, beside those of the configuration.
    deterministic, seed: in place of the configuration's.
    record: a file to write the record of a deterministic run to, for `replay`.
    record_network: a file to write the requests of a run with a network and their answers to; with `record_bodies`, their bodies too.
    replay_network: such a file, which answers the requests of this run; then nothing leaves.
    on_output: called with "stdout" or "stderr" and text as it arrives, in the thread that runs the work. An exception in it ends the run.
    """

    stdin: str | bytes
    env_vars: Mapping[str, str]
    timeout: float
    args: Sequence[str]
    tools: Tools
    deterministic: bool
    seed: int
    record: str | os.PathLike[str]
    record_network: str | os.PathLike[str]
    record_bodies: bool
    replay_network: str | os.PathLike[str]
    on_output: OnOutput


class ResumeOptions(TypedDict, total=False):
    """Options of a session that is resumed. They hold for all of its turns; `timeout` limits each turn.

    env_vars: set in addition to the variables that the session had.
    """

    env_vars: Mapping[str, str]
    timeout: float
    tools: Tools
    on_output: OnOutput


class SessionOptions(ResumeOptions, total=False):
    """Options of a session. They hold for all of its turns; `timeout` limits each turn.

    timeline: keep the state before each statement, or each command of a shell, to look at and to return to.
    language: "python" or "shell".
    steps: what is a step of the timeline: each "statement", or also each "line" that one executes in functions of the program.
    overhead: the part of the time that states may cost, such as 0.1. Then not every state is kept: the others are reached by running again.
    """

    args: Sequence[str]
    timeline: bool
    language: str
    steps: Steps
    overhead: float


class TurnOptions(TypedDict, total=False):
    """Options of one turn. `timeout` and `on_output` replace those of the session."""

    stdin: str | bytes
    timeout: float
    on_output: OnOutput


class SimulationOptions(TypedDict, total=False):
    """Options of a simulation by a sandbox. They mean the same as those of a run."""

    stdin: str | bytes
    env_vars: Mapping[str, str]
    timeout: float
    args: Sequence[str]


class WorkspaceSimulationOptions(SimulationOptions, total=False):
    """Options of a simulation in a workspace. `cwd` is where the work starts, from the project on."""

    cwd: PathLike


class WorkspaceOptions(WorkspaceSimulationOptions, total=False):
    """Options of work in a workspace: those of a run, the directory in which the work starts, and `watch_reads`.

    watch_reads: record the files of the project that the work opens, so that `Workspace.drift` can mark them. As root only.
    """

    on_output: OnOutput
    watch_reads: bool


class LiveOptions(WorkspaceSimulationOptions, total=False):
    """Options of a command in a live sandbox: those of a run, and the directory in which it starts, from the working directory on."""

    on_output: OnOutput
