"""Permissions of each kind, and sets of them, which become one policy.

Only added permissions are given, and a denial overrides every permission. A permission that cannot be enforced raises `PolicyError` when it
is added, or `RuntimeUnavailable` when code is run under it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any, Unpack

from agent_sandbox.config import SandboxConfig
from agent_sandbox.errors import PolicyError
from agent_sandbox.options import PathLike, SandboxSettings
from agent_sandbox.policy.code.patterns import CodeGrant, granted
from agent_sandbox.policy.model import Policy, ProgramRules
from agent_sandbox.policy.network import WEB_PORTS, NetworkRules, network_rules
from agent_sandbox.policy.network_presets import opaque_of


class PermissionLevel(IntEnum):
    """Levels of access to files. Each includes those before it."""

    NONE = 0
    READ = 1
    WRITE = 2  # what is read can be changed; changes are captured, never real
    FULL = 3  # hidden names as well


@dataclass(frozen=True)
class FilePermission:
    """Permission for files. Patterns are as in `SandboxConfig.allowed_paths`; without any, it covers the whole machine except secrets."""

    level: PermissionLevel = PermissionLevel.NONE
    allowed_paths: Sequence[PathLike] = ()
    denied_paths: Sequence[PathLike] = ()
    allow_hidden: bool = False

    def __post_init__(self) -> None:
        _check(self)
        if not isinstance(self.level, PermissionLevel):
            raise PolicyError(f"level must be a PermissionLevel, not {self.level!r}", hint="write PermissionLevel.READ")


@dataclass(frozen=True)
class NetworkPermission:
    """Permission to reach hosts and ports, through the egress. Without `allow_outbound`, none.

    `allowed_hosts` are names with wildcards ("*.github.com"); without any, every public host is allowed. `allowed_ports` are by default 80
    and 443. A single host at another port may be sent any bytes, because its protocol is rarely HTTP. A host on a private address is
    allowed if it is named by that address. `denied_hosts` overrides both.

    `allow_localhost` is about the sandbox's own loopback, where its programs always reach one another; that of the machine is never
    reachable. `allow_inbound` permits `SandboxConfig.publish`, which names the ports of this machine that lead into the sandbox. By itself
    it opens none.
    """

    allow_outbound: bool = False
    allow_inbound: bool = False
    allowed_hosts: Sequence[str] = ()
    denied_hosts: Sequence[str] = ()
    allowed_ports: Sequence[int] = ()
    allow_localhost: bool = False

    def __post_init__(self) -> None:
        _check(self)
        self.rules()

    def rules(self) -> NetworkRules:
        """Return the permission as network rules."""
        ports = self.allowed_ports or WEB_PORTS
        return network_rules(
            outbound=self.allow_outbound,
            inbound=self.allow_inbound,
            hosts=self.allowed_hosts or None,
            denied=self.denied_hosts,
            ports=ports,
            opaque=opaque_of(self.allowed_hosts, ports),
            localhost=self.allow_localhost,
        )


@dataclass(frozen=True)
class ProcessPermission:
    """Programs that may be started, by name, with wildcards; without `allowed_commands` all except the denied ones.

    `max_processes` counts processes and threads together, as the kernel does.
    """

    allow_subprocess: bool = False
    allow_shell: bool = False
    allowed_commands: Sequence[str] = ()
    denied_commands: Sequence[str] = ()
    max_processes: int | None = None

    def __post_init__(self) -> None:
        _check(self)
        self.programs()

    def programs(self) -> ProgramRules:
        """Return the permission as program rules."""
        allowed = (tuple(self.allowed_commands),) if self.allowed_commands else ()
        return ProgramRules(allowed, tuple(self.denied_commands), self.allow_shell, lines=self.allow_shell)


Permission = FilePermission | NetworkPermission | ProcessPermission

_DEFAULTS = {field.name: field.default for field in fields(SandboxConfig)}
_SAID_BY_PERMISSIONS = (
    *("allow_file_read", "allow_file_write", "allowed_paths", "denied_paths", "allow_hidden"),
    *("allow_subprocess", "allow_shell", "allowed_commands", "denied_commands", "allow_network", "network"),
)


class PermissionSet:
    """A set of permissions. An empty set permits code to run, and nothing else."""

    def __init__(self, permissions: Iterable[Permission] = ()) -> None:
        self._held: dict[type, Permission] = {}
        for permission in permissions:
            self.add(permission)

    def __repr__(self) -> str:
        return f"PermissionSet({list(self)!r})"

    def __iter__(self) -> Iterator[Permission]:
        return iter(self._held.values())

    def __eq__(self, other: object) -> bool:
        return self._held == other._held if isinstance(other, PermissionSet) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # it changes

    def add(self, permission: Permission) -> PermissionSet:
        """Add a permission, and return the set. If the permissions cannot be enforced together, raise `PolicyError` and change nothing."""
        if not isinstance(permission, Permission):
            raise PolicyError(f"not a permission: {permission!r}", hint="add a FilePermission, NetworkPermission or ProcessPermission")
        kind, before = type(permission), self._held.get(type(permission))
        together = permission if before is None else _together(before, permission)
        SandboxConfig(**_settings({**self._held, kind: together}))  # raises for an invalid path or number
        self._held[kind] = together
        return self

    @property
    def network(self) -> NetworkRules:
        """The network rules of the added permissions."""
        held = self._held.get(NetworkPermission)
        return held.rules() if isinstance(held, NetworkPermission) else NetworkRules()

    @property
    def warnings(self) -> tuple[str, ...]:
        """Messages about permissions that have less effect here than they may seem to."""
        return self.settings().warnings

    @property
    def grants(self) -> frozenset[CodeGrant]:
        """The features that code may use with these permissions, for the check of code before a run."""
        return granted(self.policy())

    def settings(self, **more: Unpack[SandboxSettings]) -> SandboxConfig:
        """Return these permissions, and the settings in `more`, as settings of a sandbox."""
        return self.over(SandboxConfig(**more))

    def over(self, config: SandboxConfig) -> SandboxConfig:
        """Return `config` with these permissions. Raises `PolicyError` if `config` sets a permission itself: the two could contradict."""
        said = _settings(self._held)
        own = [name for name in {**dict.fromkeys(_SAID_BY_PERMISSIONS), **said} if getattr(config, name) != _DEFAULTS[name]]
        if own:
            raise PolicyError(
                f"permissions are given, and {own[0]} as well", hint=f"say it in one place: leave {own[0]} out, or permissions"
            )
        if config.publish and not self.network.inbound:
            hint = "add NetworkPermission(allow_inbound=True)"
            raise PolicyError("publish is given, and the permissions allow no inbound connections", hint=hint)
        return replace(config, **said)

    def policy(self) -> Policy:
        """Return the policy of these permissions, for this user on this machine."""
        return self.settings().policy()


def _settings(held: dict[type, Permission]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    files, processes, network = (held.get(kind) for kind in (FilePermission, ProcessPermission, NetworkPermission))
    if isinstance(network, NetworkPermission):
        settings["network"] = network.rules()
    if isinstance(files, FilePermission):
        settings |= {
            "allow_file_read": files.level >= PermissionLevel.READ,
            "allow_file_write": files.level >= PermissionLevel.WRITE,
            "allowed_paths": files.allowed_paths,
            "denied_paths": files.denied_paths,
            # Level NONE shows no files, so there is nothing to hide, and hiding would cost a copy.
            "allow_hidden": files.allow_hidden or files.level in (PermissionLevel.NONE, PermissionLevel.FULL),
        }
    if isinstance(processes, ProcessPermission):
        settings |= {
            "allow_subprocess": processes.allow_subprocess,
            "allow_shell": processes.allow_shell,
            "allowed_commands": processes.allowed_commands,
            "denied_commands": processes.denied_commands,
        }
        settings |= {} if processes.max_processes is None else {"max_processes": processes.max_processes}
    return settings


def _together(one: Permission, other: Permission) -> Permission:
    """Merge two permissions of one kind. Lists are joined; all other fields must be equal in both.

    If one of two `allowed_…` lists is empty, which allows everything, the merged list is empty, too.
    """
    joined: dict[str, Any] = {}
    for field in fields(one):
        ours, theirs = getattr(one, field.name), getattr(other, field.name)
        if isinstance(ours, tuple):
            unrestricted = field.name.startswith("allowed_") and not (ours and theirs)  # one of the two permissions has no such limit
            joined[field.name] = () if unrestricted else tuple(dict.fromkeys((*ours, *theirs)))
        elif ours != theirs:
            name = type(one).__name__
            why = (
                f"two of {name} differ in {field.name}: {ours!r} and {theirs!r}; it holds for all that they name, so it has to be one value"
            )
            raise PolicyError(why, hint=f"use one value of {field.name}, or two sandboxes")
        else:
            joined[field.name] = ours
    return type(one)(**joined)


def _check(permission: Any) -> None:
    """Turn the lists among a permission's fields into tuples. Raises `PolicyError` for a field of the wrong type."""
    for field in fields(permission):
        value = getattr(permission, field.name)
        if field.type == "bool" and not isinstance(value, bool):
            raise PolicyError(f"{field.name} must be True or False, not {value!r}", hint="it is a permission; say which")
        if str(field.type).startswith("Sequence"):
            if isinstance(value, str | bytes) or not isinstance(value, Iterable):
                raise PolicyError(f"{field.name} must be a list, not {value!r}", hint=f"write {field.name}=[{value!r}]")
            object.__setattr__(permission, field.name, tuple(value))
