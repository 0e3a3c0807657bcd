"""The settings of a sandbox, checked when they are made, and turned into a policy.

No setting is silently ignored. A value that cannot be enforced, and a permission that this version cannot grant, raise `PolicyError` with
the name of the field. The settings are only a convenient form of the policy: the policy decides, and the kernel enforces it.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from agent_sandbox._calls import check_type
from agent_sandbox.assembly import ONE_WALL, check_system, here, registry
from agent_sandbox.audit import AuditLevel, AuditLog
from agent_sandbox.engine.code_check import EarlyLook
from agent_sandbox.engine.provisions import Provisions
from agent_sandbox.engine.tools import named
from agent_sandbox.errors import PolicyError
from agent_sandbox.options import PathLike
from agent_sandbox.policy.action import LANGUAGES, canonical_language
from agent_sandbox.policy.bound_secrets import Secret
from agent_sandbox.policy.code.patterns import Rule
from agent_sandbox.policy.image_names import canonical_image
from agent_sandbox.policy.intents import NetworkIntent, combined
from agent_sandbox.policy.model import EVERYWHERE, MIB, OFFLINE, AskRules, Limits, Policy, ProgramRules, locked, repeatable
from agent_sandbox.policy.network import NetworkRules
from agent_sandbox.policy.paths import PathPattern, Tree, ancestors, anchor, normalise, parse
from agent_sandbox.policy.publications import Publication
from agent_sandbox.policy.secrets import Mask, reveal
from agent_sandbox.policy.traffic_budgets import read_budget

# Setting, its field in `Limits`, and the factor between their units.
_LIMITS = (
    ("timeout_seconds", "wall_seconds", 1),
    ("max_cpu_seconds", "cpu_seconds", 1),
    ("max_memory_mb", "memory_bytes", MIB),
    ("max_output_bytes", "output_bytes", 1),
    ("max_processes", "processes", 1),
    ("max_open_files", "open_files", 1),
    ("max_disk_mb", "disk_bytes", MIB),
    ("max_fuel", "fuel", 1),
    ("lifetime_seconds", "wall_seconds", 1),
)


@dataclass(frozen=True)
class SandboxConfig:
    """Settings of a sandbox. The default is locked: the interpreter and its packages, and nothing else of the machine.

    Limits, each for one run; `None` is no limit:
        timeout_seconds: wall time.
        max_memory_mb: memory of everything the run starts, in MiB.
        max_output_bytes: bytes of stdout, and of stderr, that a result holds. Further output is dropped, and the result says so.
        max_cpu_seconds: processor time of everything the run starts.
        max_processes: processes and threads together.
        max_open_files: open descriptors of each process.
        max_disk_mb: written to disk, in MiB; the scratch directory /tmp has this size too.
        max_fuel: instructions executed inside WebAssembly, as the engine counts them. The same work always costs the same fuel. Other
            runtimes count no fuel.
        lifetime_seconds: lifetime of the sandbox itself. After this time, running work is ended and no new work is accepted.

    Permissions:
        allow_file_read: show the files of the machine that `allowed_paths` names; without `allowed_paths`, all of them.
        allow_file_write: let the run change what it is shown. The changes are captured (`SandboxResult.changes`), never real. Without
            `allow_file_read` the allowed directories are there, but empty. The scratch directory /tmp is writable in any case.
        allow_network: let the run reach every public host at the ports 80 and 443, through the egress, which reads and records it.
        network: let the run reach these hosts alone, through the egress: "api.example.com", "*.example.com", "db.example.com:5432", or the
            presets "packages", "git-hosts" and "llm-apis". docs/guides/network.md explains each form. Or the rules themselves, as
            `NetworkRules`. Both settings need the extra `network`, and a native runtime.
        secrets: secrets that the run uses and never sees, each for some of the hosts that it can reach, such as
            `Secret("TOKEN", ["api.example.com"])`. The values are read when a sandbox is made.
        dlp: search everything that leaves for secrets and personal data, and refuse it. False does not.
        intents: parts of the network, each `NetworkIntent("install packages", presets=["packages"])`. If there are any, only the one that
            `Sandbox.intent` declares is open.
        publish: ports of this machine's loopback that lead to servers of the run while it goes on: 8000, or "8000:3000" for port 3000 of
            the sandbox. A port that is in use refuses the run, so two runs at once cannot publish the same one. It needs a native runtime.
        budgets: limits of what is exchanged with hosts in one run, such as "api.example.com 10MB 100/min" or "* sent:50MB requests:500".
        allow_subprocess: let the run start processes, and show it the programs of the system. Threads are always possible.
        allow_shell, allowed_commands, denied_commands: which programs, by name and with wildcards ("python*"); without `allowed_commands`
            all of them. Other programs are absent, and files that the run writes or brings along cannot be executed. A runtime that cannot
            enforce this refuses to start. With `allow_shell`, sh and bash are always present.
        allowed_paths: patterns such as "/data", "/data/*", "~/notes/*.md". Without a file permission they have no effect. A path that does
            not exist is no error.
        denied_paths: patterns of paths that are hidden, even if they are also allowed. The interpreter's own files stay.
        allow_hidden: whether names that begin with a dot are shown. Hiding them costs a copy of the allowed directories at every run. It is
            refused if the copy would be large, and impossible for the whole machine.
        reveal: secrets such as "~/.ssh" to show although they are masked by default.

    Code, before it runs:
        validate_code: refuse code that uses more than is permitted; see `agent_sandbox.policy.code`. This is an early warning with a clear
            message: isolation does not depend on it.
        blocked_patterns: patterns to use instead of the default patterns, such as "eval(", "os.system" or "subprocess". A default pattern
            in this list keeps its meaning, and the same permission lifts it. Any other pattern is a name, a dotted name or `name(`.

    The rest:
        env_vars: added to a minimal PATH, HOME and LANG. The run has these variables and no others.
        working_dir: where runs begin; None is the private, empty /tmp. It must be visible to the run.
        preload: modules that Python runs find already imported, such as ("numpy", "pandas"). They must be installed.
        tools: functions of yours that Python code may call: a list, or a dict by the names that the code uses. Arguments and results are
            data: None, bool, int, float, str, bytes, lists, and dicts with text for keys.
        denied_tools: names of tools that are refused.
        enable_audit, audit_level: for the audit log. The ledger does not depend on them: every run is recorded before it starts.
        deterministic: make runs with the same input identical: output, changes and fuel. Time is virtual, randomness comes from
            `seed`, listings are sorted. Only for code inside WebAssembly.
        seed: the seed of the random numbers of deterministic runs.
        runtime: "process", the caller's own interpreter and the machine's programs; "wasm" for code inside WebAssembly, which needs the
            extra `wasm` and `agent-sandbox setup`; "gvisor" for the same as "process" on a kernel in user space, which needs `runsc`;
            "microvm" for a virtual machine with a kernel of its own, which needs QEMU; or "auto" for the cheapest runtime that gives every
            guarantee and has what the code uses. If a run lacks a feature of the other runtime, it is retried there once, and
            `SandboxResult.route` says so. Outside Linux both "wasm" and "auto" are "wasm-one-wall": inside WebAssembly, without isolation
            by the kernel and without files.
        image: a container image, such as "python:3.11-slim", whose programs and files take the place of the machine's. It must be on this
            machine: `agent-sandbox image list`. Its runtime is "container", also where `runtime` is left out. There are no tools, sessions
            or preloaded modules, because the interpreter is the image's.
    """

    timeout_seconds: float | None = 30.0
    max_memory_mb: float | None = 256
    max_output_bytes: int | None = 100_000
    allow_file_read: bool = False
    allow_file_write: bool = False
    allow_network: bool = False
    allow_subprocess: bool = False
    allowed_paths: Sequence[PathLike] = ()
    denied_paths: Sequence[PathLike] = ()
    enable_audit: bool = True
    audit_level: AuditLevel = AuditLevel.INFO
    allow_hidden: bool = True
    reveal: Sequence[PathLike] = ()
    env_vars: Mapping[str, str] = field(default_factory=dict, repr=False)  # values are often secrets
    working_dir: PathLike | None = None
    preload: Sequence[str] = ()
    max_cpu_seconds: float | None = None
    max_processes: int | None = 64
    max_open_files: int | None = 1024
    max_disk_mb: float | None = 256
    lifetime_seconds: float | None = None
    runtime: str = "process"
    allow_shell: bool = True
    allowed_commands: Sequence[str] = ()
    denied_commands: Sequence[str] = ()
    tools: Mapping[str, Callable[..., object]] | Iterable[Callable[..., object]] = field(default=(), repr=False)
    denied_tools: Sequence[str] = ()
    max_fuel: int | None = None
    deterministic: bool = False
    seed: int = 0
    validate_code: bool = True
    blocked_patterns: Sequence[str | Rule] | None = None
    network: Sequence[str] | NetworkRules = ()
    secrets: Sequence[Secret] = ()
    dlp: bool = True
    intents: Sequence[NetworkIntent] = ()
    publish: Sequence[int | str] = ()
    budgets: Sequence[str] = ()
    image: str = ""

    def __post_init__(self) -> None:
        check_system()
        for setting in fields(self):
            value = getattr(self, setting.name)
            if setting.type == "bool" and not isinstance(value, bool):
                raise PolicyError(f"{setting.name} must be True or False, not {value!r}", hint="it is a permission; say which")
            if setting.type.startswith("Sequence") and value is not None and not isinstance(value, NetworkRules):
                object.__setattr__(self, setting.name, _sequence(setting.name, value))
        if not isinstance(self.audit_level, AuditLevel):
            raise PolicyError(f"audit_level must be an AuditLevel, not {self.audit_level!r}", hint="use AuditLevel.INFO")
        check_type("image", self.image, str)
        if self.image:
            object.__setattr__(self, "image", canonical_image(self.image))
            if self.runtime == "process":  # the default, which shows no image
                object.__setattr__(self, "runtime", "container")
        if (self.runtime == "container") != bool(self.image) and self.runtime in ("container", "wasm", ONE_WALL):
            why = "needs an image" if self.runtime == "container" else "runs no image"
            raise PolicyError(f"runtime={self.runtime!r} {why}", hint='write Sandbox(image="python:3.11-slim")')
        if self.image and (self.tools or self.preload):
            raise PolicyError("tools and preload are refused with an image: its interpreter is its own", hint="leave the image out")
        if self.runtime not in registry():
            raise PolicyError(f"there is no runtime {self.runtime!r} in this version", hint=f"use one of {', '.join(registry().names)}")
        if self.runtime in ("wasm", ONE_WALL) and self.allow_subprocess:
            why = f"allow_subprocess=True is refused with runtime={self.runtime!r}: it has no processes"
            raise PolicyError(why, hint='use runtime="process"')
        if self.runtime in ("wasm", ONE_WALL) and (self.allow_network or self.network):
            why = f"a network is refused with runtime={self.runtime!r}: it has none"
            raise PolicyError(why, hint='use runtime="process", or "auto", which chooses it')
        if self.runtime in ("wasm", ONE_WALL) and self.publish:
            why = f"publish is refused with runtime={self.runtime!r}: nothing inside WebAssembly accepts a connection"
            raise PolicyError(why, hint='use runtime="process", or "auto", which chooses it')
        if self.allow_network and isinstance(self.network, NetworkRules):
            raise PolicyError("network is given as rules, and allow_network as well", hint="say it in one place: leave allow_network out")
        for name, given in (("deterministic=True", self.deterministic), ("max_fuel", self.max_fuel is not None)):
            if given and self.runtime in ("process", "container"):
                raise PolicyError(
                    f"{name} is refused with runtime={self.runtime!r}: it cannot be done there", hint='use runtime="wasm" or "auto"'
                )
        check_seed(self.seed)
        for pattern in self.blocked_patterns or ():
            check_pattern(pattern)
        for secret in self.secrets:
            if not isinstance(secret, Secret):
                raise PolicyError("secrets holds what is no Secret", hint='write secrets=[Secret("TOKEN", ["api.example.com"])]')
            if secret.name in self.env_vars:
                raise PolicyError(f"env_vars would show the run the secret {secret.name}", hint="leave it out of env_vars")
        if self.intents:
            if not all(isinstance(each, NetworkIntent) for each in self.intents):
                raise PolicyError(
                    "intents holds what is no NetworkIntent", hint='write intents=[NetworkIntent("read", hosts=["a.example"])]'
                )
            if not (self.allow_network or self.network):
                raise PolicyError("intents are parts of a network, and there is none", hint='add network=["api.example.com"]')
        for name in self.preload:
            if not _is_module(name):
                raise PolicyError(f"preload holds {name!r}, which is not a module name", hint='write preload=["numpy"]')
        object.__setattr__(self, "env_vars", environment(self.env_vars))
        object.__setattr__(self, "tools", {} if self.tools in ((), {}) else named(self.tools))
        _ = self.cwd, self.policy(), self._publications()  # all raise for invalid settings

    @property
    def cwd(self) -> str | None:
        """`working_dir` as an absolute path, or None."""
        return None if self.working_dir is None else normalise(os.fsencode(_path(self.working_dir)))

    def limits(self, *, timeout_seconds: float | None = None) -> Limits:
        """Return the limits of one run. `timeout_seconds` replaces the configured wall time."""
        # Backwards, so that the lifetime, which is checked as a wall time too, is replaced by the timeout.
        values = {theirs: _limit(ours, getattr(self, ours), theirs, unit) for ours, theirs, unit in reversed(_LIMITS)}
        if timeout_seconds is not None:
            values["wall_seconds"] = _limit("timeout", timeout_seconds, "wall_seconds", 1)
        return Limits(**values)  # type: ignore[arg-type]  # whole numbers where Limits wants them: it has just said so

    def policy(self) -> Policy:
        """Return these settings as a policy, for this user on this machine."""
        home = here().host.home
        allowed = tuple(parse(_path(path), home=home) for path in self.allowed_paths)
        denied = tuple(parse(_path(path), home=home) for path in self.denied_paths)
        if self.allow_file_read and not allowed:
            allowed = EVERYWHERE
        policy = locked(
            read=self.allow_file_read,
            write=self.allow_file_write,
            allowed=allowed,
            denied=denied,
            allow_hidden=self.allow_hidden,
            masks=self._masks(allowed, home),
            processes=self.allow_subprocess,
            network=self._network(),
            limits=self.limits(),
            programs=ProgramRules(
                (tuple(self.allowed_commands),) if self.allowed_commands else (),
                tuple(self.denied_commands),
                self.allow_shell,
                lines=self.allow_shell,
            ),
            tools=self._callable_tools(()),
        )
        policy = replace(policy, image=self.image) if self.image else policy
        return repeatable(policy) if self.deterministic else policy

    @property
    def warnings(self) -> tuple[str, ...]:
        """Messages about settings that have less effect here than they may seem to."""
        if not self._opens_packages:
            return ()
        return here().provisions(self.policy(), packages=True).notes

    @property
    def _opens_packages(self) -> bool:
        return not isinstance(self.network, NetworkRules) and "packages" in self.network

    def _network(self) -> NetworkRules:
        rules = OFFLINE
        if isinstance(self.network, NetworkRules):
            rules = self.network
        elif self.network or self.allow_network:
            rules = here().network(self.network, web=self.allow_network)
        if self.intents:
            packages = any("packages" in (each.presets or ()) for each in self.intents)
            indexes = [each.host for each in here().package_indexes(None)] if packages else []
            rules = replace(rules, intents=combined(self.intents, indexes))
        if self.publish:
            rules = replace(rules, inbound=True)
        if self.budgets and rules.outbound:
            rules = replace(rules, budgets=(*rules.budgets, *map(read_budget, self.budgets)))
        return rules if self.dlp or not rules.outbound else replace(rules, search=replace(rules.search, off=True))

    def _publications(self) -> tuple[Publication, ...]:
        """Return the ports that a run publishes. Raises `PolicyError`."""
        if not self.publish:
            return ()
        from agent_sandbox.policy.publications import read_publications  # few sandboxes publish anything

        return read_publications(self.publish)

    def _provisions(self, policy: Policy, project: str | None = None) -> Provisions:
        """Return what the egress of runs under this policy is given. Raises `PolicyError` for a secret that cannot be used."""
        handed = self.env_vars.values()
        return here().provisions(policy, tuple(self.secrets), project=project, handed=handed, packages=self._opens_packages)

    def _early_look(self) -> EarlyLook | None:
        """Return the check of code before it runs; None if `validate_code` is off."""
        rules = self.blocked_patterns
        return EarlyLook(None if rules is None else tuple(rules)) if self.validate_code else None

    def _callable_tools(self, more: Iterable[str]) -> tuple[str, ...]:
        """Return the names of the tools that code may call: the configured tools and `more`, without `denied_tools`."""
        return tuple(sorted({*self._toolbox, *more} - {*self.denied_tools}))

    @property
    def _toolbox(self) -> dict[str, Callable[..., object]]:
        """The configured tools, by name."""
        assert isinstance(self.tools, Mapping), "it was made one"
        return dict(self.tools)

    def _masks(self, allowed: tuple[PathPattern, ...], home: str) -> tuple[Mask, ...]:
        """Return the masks that hide secrets among the files that a run can see.

        In every allowed directory, and in the directory of the interpreter's packages, environment files such as `.env` are hidden. Allowed
        directories are also searched for secrets, except the whole machine and the programs of the system.
        """
        if not (self.allow_file_read or self.allow_file_write):
            allowed = ()
        anchors = sorted({*map(anchor, allowed)})
        masks = here().masks((*anchors, sys.prefix), searched=anchors if allowed else None)
        for secret in self.reveal:
            pattern = parse(_path(secret), home=home)
            if not isinstance(pattern, Tree):
                raise PolicyError(f"reveal takes a path, not the pattern {secret!r}", hint="name the file or directory itself")
            masks = reveal(masks, pattern.path)
        hidden = {mask.path: mask for mask in masks}
        for pattern in allowed:
            for above in ancestors(anchor(pattern)):
                if above in hidden:
                    why = f"allowed_paths names {anchor(pattern)!r}, which is masked: {hidden[above].why}"
                    raise PolicyError(why, hint=f"leave it out, or add reveal=[{above!r}]")
        interpreter = (sys.prefix.rstrip("/") + "/", sys.base_prefix.rstrip("/") + "/")  # all that a run can see then
        return masks if allowed else tuple([mask for mask in masks if mask.path.startswith(interpreter)])


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of environment variables. Raises `PolicyError` that names an invalid variable."""
    given: Iterable[tuple[object, object]] = variables.items()
    for name, value in given:
        if not (isinstance(name, str) and isinstance(value, str)):
            raise PolicyError(f"the environment variable {name!r} must be text with a text value", hint="convert it with str()")
        if not name or "=" in name or "\0" in name:
            raise PolicyError(f"not a name of an environment variable: {name!r}", hint="names are not empty and hold neither '=' nor NUL")
        if "\0" in value:
            raise PolicyError(f"the environment variable {name!r} holds a NUL character", hint="remove it")
    return dict(variables)


def check_seed(seed: object) -> None:
    """Raise `PolicyError` if `seed` is not a valid seed."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 64:
        raise PolicyError(f"a seed is a whole number from 0 to 2**64 - 1, not {seed!r}", hint="use seed=7")


def check_pattern(pattern: object) -> None:
    """Raise `PolicyError` if `pattern` cannot be used in `blocked_patterns`."""
    if not isinstance(pattern, str | Rule):
        raise PolicyError(f"blocked_patterns holds {pattern!r}, which is no pattern", hint='write blocked_patterns=["eval(", "subprocess"]')
    if isinstance(pattern, str):
        Rule(pattern, "")  # raises for one that cannot be


def _is_module(name: object) -> bool:
    return isinstance(name, str) and all(part.isidentifier() for part in name.split("."))


def _sequence(name: str, value: Iterable[object]) -> tuple[object, ...]:
    if isinstance(value, str | bytes):  # a string is a sequence of letters: allowed_paths="/data" would allow "/", "d", …
        raise PolicyError(f"{name} must be a list, not {value!r}", hint=f"write {name}=[{value!r}]")
    return tuple(value)


def _path(path: PathLike) -> str | bytes:
    if not isinstance(path, str | bytes | os.PathLike):
        raise PolicyError(f"not a path: {path!r}", hint="use a string or a pathlib.Path")
    return os.fspath(path)


def _limit(ours: str, value: object, theirs: str, unit: int) -> object:
    """Return `value` in the unit that `Limits` has for the field `theirs`. Raises `PolicyError` naming our setting, `ours`."""
    counted = value
    if unit > 1 and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        counted = int(value * unit)
    try:
        Limits(**{theirs: counted})  # type: ignore[arg-type]  # its type is what is being asked
    except PolicyError as error:
        raise PolicyError(f"{ours} cannot be {value!r}: it must be a positive number", hint=error.hint) from None
    return counted


def check_arguments(config: object, permissions: object, audit: object, asks: object, name: object) -> None:
    """Raise TypeError for an argument of `Sandbox` of another type, with what the caller may have meant."""
    if config is not None and not isinstance(config, SandboxConfig):
        meant = "settings by name, as in Sandbox(timeout_seconds=10), or Sandbox(SandboxConfig(…))"
        if isinstance(config, str):
            language = canonical_language(config)
            meant = f"Sandbox().execute(code, {language!r})" if language in LANGUAGES else f"Sandbox(runtime={config!r}), or {meant}"
        elif isinstance(config, Mapping):
            meant = "Sandbox(**settings)"
        check_type("config", config, SandboxConfig, write=meant)
    if permissions is not None:
        from agent_sandbox.permissions import PermissionSet  # few sandboxes are given one

        check_type("permissions", permissions, PermissionSet, write="permissions=PermissionSet(…)")
    if audit is not None:
        check_type("audit", audit, AuditLog, write="audit=AuditLog()")
    if asks is not None:
        check_type("asks", asks, AskRules, write="asks=AskRules(…)")
    check_type("name", name, str, write='name="…"')
