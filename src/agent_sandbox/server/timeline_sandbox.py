"""The sandbox of a held session: a project and the interpreter, under the policy files that bind the command line there.

A timeline exchanges layers under the running program, which it cannot do for a clone of the whole machine. So the view has the project,
the interpreter with its packages, and the programs of the system, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from agent_sandbox import policy_files
from agent_sandbox.config import SandboxConfig
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.model import CLONED_LIMITS, MIB, SCRATCH, Policy
from agent_sandbox.policy.paths import contains
from agent_sandbox.runtime.base import ScriptFile
from agent_sandbox.sandbox import Sandbox
from agent_sandbox.workspace.store import sandbox_id

OUTPUT_BYTES = 16 << 20  # of each stream of a turn


@dataclass(frozen=True)
class SessionRequest:
    """The settings of a session to be held. A command makes them, and sends them to the holder as data."""

    project: str
    cwd: str
    env: Mapping[str, str] = field(repr=False)  # all variables that the command line passes on
    arguments: tuple[str, ...] = ()
    script: ScriptFile | None = None
    limits: Mapping[str, float | None] = field(default_factory=dict)  # those that were typed, by their names in `Limits`
    denied: tuple[str, ...] = ()
    revealed: tuple[str, ...] = ()
    allowed_commands: tuple[str, ...] = ()
    denied_commands: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()  # presets, and files by their absolute paths
    network: tuple[str, ...] = ()
    allow_network: bool = False

    def message(self) -> dict[str, Any]:
        """Return this as data."""
        return asdict(self)

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> SessionRequest:
        """Read such data."""
        known: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
        script = known.pop("script")
        return cls(**known, script=None if script is None else ScriptFile(**script))


class TimelineSandbox(Sandbox):
    """A sandbox that shows one project, to be changed in the sandbox alone. The policy files of system, user and project bind it."""

    def __init__(self, asked: SessionRequest) -> None:
        """Raises `PolicyError` for what cannot be enforced, and for a project whose files a timeline cannot keep."""
        if scratch := next((each for each in SCRATCH if contains(each, asked.project)), ""):
            why = f"a timeline cannot keep the files of {asked.project!r}: each sandbox has a {scratch} of its own"
            raise PolicyError(why, hint=f"use a project outside of {scratch}: --project DIR")
        self._asked_for = asked
        self._script = asked.script
        limits = replace(CLONED_LIMITS, **asked.limits)  # type: ignore[arg-type]  # as the options were read
        environment = asked.script.environment if asked.script is not None else ""
        super().__init__(
            SandboxConfig(
                timeout_seconds=limits.wall_seconds,
                max_memory_mb=None if limits.memory_bytes is None else limits.memory_bytes / MIB,
                max_disk_mb=None if limits.disk_bytes is None else limits.disk_bytes / MIB,
                max_processes=limits.processes,
                max_open_files=limits.open_files,
                max_output_bytes=OUTPUT_BYTES,
                allow_file_read=True,
                allow_file_write=True,
                allow_subprocess=True,
                allowed_paths=(asked.project, *([environment] if environment and not contains(asked.project, environment) else [])),
                denied_paths=asked.denied,
                reveal=asked.revealed,
                allowed_commands=asked.allowed_commands,
                denied_commands=asked.denied_commands,
                allow_network=asked.allow_network,
                network=asked.network,
                env_vars=asked.env,
                working_dir=asked.cwd,
                validate_code=False,  # as `run` and `code` do: the policy files may ask for it
                enable_audit=False,
            ),
            name=sandbox_id(asked.project),  # capabilities of the project's sandbox hold here, too
        )

    def _new_id(self) -> str:
        """Return an id by which `log` knows the project, as it does for throw-away sandboxes."""
        return f"{sandbox_id(self._asked_for.project)}/timeline"

    def _bound(self, wanted: Policy) -> policy_files.Bound:
        """Return the policy, narrowed by every policy file of the project, as for `agent-sandbox run`."""
        asked = self._asked_for
        layers = replace(policy_files.layers_of(asked.project), chosen=policy_files.chosen(asked.policies))
        if not layers.all:
            return policy_files.Bound(wanted, None)
        typed = wanted.network.outbound
        narrowed = policy_files.under(layers, wanted, asked.limits, typed_network=typed, project=asked.project)
        endless = replace(wanted, limits=replace(wanted.limits, wall_seconds=None))
        most = policy_files.under(policy_files.Layers(layers.system), endless).policy.limits.wall_seconds
        return policy_files.Bound(narrowed.policy, policy_files.early_look(narrowed), narrowed.warnings, most)
