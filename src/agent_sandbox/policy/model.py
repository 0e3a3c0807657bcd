"""The policy: what a run may see, do and use, within which limits and with which guarantees.

Frozen, checked on construction, and identified by its digest. Two presets share the model: `locked` (the SDK: nothing of the machine but
the interpreter and its packages) and `cloned` (the command line: the whole machine except its secrets, every write captured). A field that
no runtime could honour is refused here, never ignored.
"""

from __future__ import annotations

import math

from agent_sandbox._fast.encoding import canonical_form, digest_of_form
from agent_sandbox._fast.functions import cached_property
from agent_sandbox._fast.values import TYPE_CHECKING, Enum, dataclass, fields, replace
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.network import NetworkRules
from agent_sandbox.policy.paths import PathPattern, Tree, ancestors, anchor, matches
from agent_sandbox.policy.programs import LINE_SHELLS, SHELLS, check_name, covers, is_open
from agent_sandbox.policy.secrets import FoundMask, Mask

if TYPE_CHECKING:
    from collections.abc import Iterable

SCRATCH = ("/tmp", "/dev/shm")  # made for each run, empty, and present under every policy
EVERYWHERE: tuple[PathPattern, ...] = (Tree("/"),)

MIB = 1 << 20
# The values of `readers.shell.effects.EffectKind`.
EFFECTS = ("reads", "writes", "destroys", "network", "runs-code", "privilege", "processes", "system", "unknown")
ANOTHER_USER, SECOND_FACTOR = NEEDS = ("another-user", "second-factor")
LIFTABLE = ("programs", "limits", "paths")
ELEVATABLE = (*LIFTABLE, "network")  # the last by a proposal, while a run goes on
_LARGEST = 1 << 60  # far above any machine, far below the overflow of a kernel field


class Guarantee(Enum):
    """A protection that a policy can require and a runtime can enforce. The value is its name in messages, in JSON and on the command line.

    A runtime that cannot give a required guarantee refuses to start and names the missing one. Nothing is silently weaker.
    """

    FILES_CONFINED = "files-confined"  # only the view is reachable, and every write is captured
    NO_NETWORK = "no-network"  # no interface but its own loopback, and nothing accepts a connection from there
    EGRESS_ONLY = "egress-only"  # no interface but its own loopback, where only the egress takes connections outward
    NO_NEW_PROCESSES = "no-new-processes"  # threads are still allowed
    PROGRAMS_CONFINED = "programs-confined"  # only allowed programs can be executed, by any child and under any name
    PROCESSES_INVISIBLE = "processes-invisible"  # sees, signals and traces only its own processes
    SYSCALLS_FILTERED = "syscalls-filtered"  # default-deny seccomp filter
    MEMORY_WATCHED = "memory-watched"  # rlimit and a watcher: may overshoot for an instant
    MEMORY_HARD = "memory-hard"  # cgroup: cannot overshoot
    CPU_LIMITED = "cpu-limited"
    FUEL_LIMITED = "fuel-limited"  # executed instructions are counted, up to a limit
    DISK_LIMITED = "disk-limited"
    NOT_HOST_ROOT = "not-host-root"  # never host uid 0, not even if root started it
    SEPARATE_KERNEL = "separate-kernel"
    USER_SPACE_KERNEL = "user-space-kernel"  # its system calls are answered by a program; few of them reach the machine's kernel
    DETERMINISTIC = "deterministic"  # same input, same output, changes and fuel


@dataclass(frozen=True)
class Limits:
    """Limits on the resources of one run, all enforced from outside the guest. None means no limit of that kind.

    Absurd values are refused on construction, so that later code need not check.

    >>> Limits(wall_seconds=5, memory_bytes=64 * MIB).wall_seconds
    5
    """

    wall_seconds: float | None = 30.0
    cpu_seconds: float | None = None
    memory_bytes: int | None = 256 * MIB
    processes: int | None = 64  # processes and threads together, as the kernel counts them
    open_files: int | None = 1024
    output_bytes: int | None = 100_000  # for each of stdout and stderr; the rest is dropped and the result says so
    disk_bytes: int | None = 256 * MIB
    fuel: int | None = None  # roughly, WebAssembly instructions: the same work always costs the same

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise PolicyError(f"{field.name} must be a number, not {value!r}", hint="use a positive number, or None for no limit")
            if not math.isfinite(value) or value <= 0 or value > _LARGEST:
                raise PolicyError(
                    f"{field.name} must be positive and finite, not {value!r}", hint="use a positive number, or None for no limit"
                )
            if not field.name.endswith("_seconds") and value != int(value):
                raise PolicyError(f"{field.name} must be a whole number, not {value!r}", hint="round it")


# Generous, not absent: a runaway build ends before the machine does. Output is unlimited because it streams.
CLONED_LIMITS = Limits(
    wall_seconds=None, memory_bytes=8192 * MIB, processes=4096, open_files=4096, output_bytes=None, disk_bytes=8192 * MIB
)


@dataclass(frozen=True)
class FileRules:
    """The files of the machine that are visible, and whether they can be changed.

    `denied` and masked files are absent, whatever `allowed` says. Hidden names (`.git`) are present only with `allow_hidden`, or if the
    fixed part of an allowed pattern spells them. With `write` but not `read`, allowed directories are present but empty. These rules do not
    cover the interpreter's own files or the scratch directories. Writes are always captured: `write` never reaches the real disk.
    """

    read: bool = False
    write: bool = False
    allowed: tuple[PathPattern, ...] = ()
    denied: tuple[PathPattern, ...] = ()
    allow_hidden: bool = False
    masks: tuple[Mask, ...] = ()

    def reaches(self, path: str) -> bool:
        """Return whether the rules make a normalised path visible to the guest."""
        return self._unbarred(path) and any(
            matches(pattern, path) and (self.allow_hidden or not is_hidden(path, pattern)) for pattern in self.allowed
        )

    def leads_to(self, path: str) -> bool:
        """Return whether a normalised path is the directory where an allowed wildcard pattern begins, visible as the way to its files."""
        return self._unbarred(path) and any(not isinstance(pattern, Tree) and anchor(pattern) == path for pattern in self.allowed)

    def _unbarred(self, path: str) -> bool:
        return (self.read or self.write) and not self.bars(path)

    def bars(self, path: str) -> bool:
        """Return whether a normalised path is denied or masked."""
        return any(above in self._masked for above in ancestors(path)) or any(matches(pattern, path) for pattern in self.denied)

    @cached_property
    def _masked(self) -> frozenset[str]:
        return frozenset(mask.path for mask in self.masks)


@dataclass(frozen=True)
class ProgramRules:
    """The programs that may be started, by patterns of their names. The view enforces the rules: it leaves out all other programs.

    Allowed patterns come in groups, one for each policy layer, and a name must match all groups: so layers can only narrow. A denied name
    is denied even if it is also allowed. Without groups, every program that the view shows is allowed, except denied ones.

    Without `shell`, no shell may be started. With `shell`, a shell may read a command line even if no group names the shell: the programs
    that the line starts are judged. With `lines`, bash and sh match every group.
    """

    groups: tuple[tuple[str, ...], ...] = ()
    denied: tuple[str, ...] = ()
    shell: bool = True
    lines: bool = False

    def __post_init__(self) -> None:
        for pattern in (*(name for group in self.groups for name in group), *self.denied):
            check_name(pattern)

    @property
    def restricts(self) -> bool:
        """Whether the rules forbid any program."""
        return bool(self.groups or self.denied) or not self.shell

    def permits(self, program: str) -> bool:
        """Return whether a program of this name may be started."""
        name = program.rpartition("/")[2]
        if not self.shell and name in SHELLS:
            return False
        if covers(self.denied, name):
            return False
        return (self.lines and name in LINE_SHELLS) or all(covers(group, name) for group in self.groups)

    def denies(self, *names: str) -> str:
        """Return the first of these names that is denied, or is a shell while no shell is allowed; empty if there is none."""
        return next((name for name in names if covers(self.denied, name) or (name in SHELLS and not self.shell)), "")

    def narrowed(self, *, allowed: Iterable[str] | None = None, denied: Iterable[str] = (), shell: bool = True) -> ProgramRules:
        """Return rules that permit only what these rules and the given patterns both permit."""
        groups = self.groups if allowed is None else (*self.groups, tuple(allowed))
        return ProgramRules(tuple(dict.fromkeys(groups)), tuple(dict.fromkeys((*self.denied, *denied))), self.shell and shell, self.lines)

    def opens(self) -> tuple[str, ...]:
        """Return the allowed programs that can run other code or programs, in the order written."""
        named = dict.fromkeys(name for group in self.groups for name in group)
        return tuple(name for name in named if self.permits(name) and is_open(name))


EVERY_PROGRAM = ProgramRules()


@dataclass(frozen=True)
class AskRules:
    """The actions that need approval.

    `commands` are words: `git push **` is git with `push` among its arguments. `opaque` is for commands that cannot be fully analysed; it
    defaults to true if there are rules about commands. `approvers` are the users whose approval counts; None means all. `needs` are further
    conditions on an approval. `elevate` are the kinds of rules that may be lifted for a time; None means all.
    """

    commands: tuple[str, ...] = ()
    effects: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    promotions: bool = False
    protected: bool = False
    opaque: bool | None = None
    approvers: tuple[str, ...] | None = None
    needs: tuple[str, ...] = ()
    elevate: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for each in self.commands:
            check_command(each)
        for each in self.tools:
            check_name(each)
        for chosen, known, name in (
            (self.effects, EFFECTS, "effect"),
            (self.needs, NEEDS, "need"),
            (self.elevate or (), ELEVATABLE, "rule"),
        ):
            for each in chosen:
                check_one_of(each, known, name)
        object.__setattr__(self, "opaque", self.about_commands if self.opaque is None else self.opaque)

    @property
    def about_commands(self) -> bool:
        """Whether there are rules about commands, so that the effects of a command must be analysed."""
        return bool(self.commands or self.effects)

    @property
    def asks(self) -> bool:
        """Whether any action needs approval."""
        return bool(self.about_commands or self.tools or self.promotions or self.protected or self.opaque)

    def narrowed(self, other: AskRules) -> AskRules:
        """Return rules that ask whenever one of the two asks, with the needs of both, and only the approvers and elevations of both."""
        return AskRules(
            _union(self.commands, other.commands),
            _union(self.effects, other.effects),
            _union(self.tools, other.tools),
            self.promotions or other.promotions,
            self.protected or other.protected,
            bool(self.opaque or other.opaque),
            _both(self.approvers, other.approvers),
            _union(self.needs, other.needs),
            _both(self.elevate, other.elevate),
        )


NOBODY_IS_ASKED = AskRules()
OFFLINE = NetworkRules()


@dataclass(frozen=True)
class Policy:
    """The permissions of a run: what it may see, do and use, and the guarantees without which it must not start."""

    name: str
    files: FileRules
    processes: bool
    limits: Limits
    requires: frozenset[Guarantee]
    network: NetworkRules = OFFLINE
    system: bool = False  # namespaced capabilities for package managers
    tools: tuple[str, ...] = ()  # functions of the caller that a program may call, sorted
    programs: ProgramRules = EVERY_PROGRAM
    asks: AskRules = NOBODY_IS_ASKED
    image: str = ""  # a container image whose files take the place of the machine's; empty for the machine itself

    def __post_init__(self) -> None:
        object.__setattr__(self, "network", self.network.grounded())
        if self.network.outbound and Guarantee.NO_NETWORK in self.requires:
            raise PolicyError(f"the policy {self.name!r} requires no-network, and allows the network", hint="choose one of them")
        if self.system and not self.processes:
            raise PolicyError("system=True is for package managers, which start processes", hint="allow processes too")
        if missing := implied(self.processes, self.limits, self.programs, self.network) - self.requires:
            names = ", ".join(sorted(guarantee.value for guarantee in missing))
            raise PolicyError(f"the policy {self.name!r} promises more than it requires: {names}", hint="add them to requires")

    @property
    def asks_somebody(self) -> bool:
        """Whether a run under this policy may lead to a question."""
        return self.asks.asks or self.network.questions

    def digest(self) -> str:
        """Return the digest that identifies this policy: equal policies have equal digests, on every machine.

        Masks that were found on the disk do not count: they say what is there, not what is permitted. A policy without a network, or
        without an image, has the digest that it had before policies could have one, so that approvals and records of then still fit.
        """
        masks = tuple(mask for mask in self.files.masks if not isinstance(mask, FoundMask))
        form = canonical_form(self if len(masks) == len(self.files.masks) else replace(self, files=replace(self.files, masks=masks)))
        if not self.image:
            del form["image"]
        return digest_of_form(form if self.network.asks else form | {"network": False})


def implied(
    processes: bool, limits: Limits, programs: ProgramRules = EVERY_PROGRAM, network: NetworkRules = OFFLINE
) -> frozenset[Guarantee]:
    """Return the guarantees that the other fields of a policy rely on: without them, those fields would promise nothing."""
    conditional = {
        Guarantee.NO_NETWORK: not network.outbound,
        Guarantee.EGRESS_ONLY: network.outbound,
        Guarantee.NO_NEW_PROCESSES: not processes,
        Guarantee.PROGRAMS_CONFINED: processes and programs.restricts,
        Guarantee.MEMORY_WATCHED: limits.memory_bytes is not None,
        Guarantee.CPU_LIMITED: limits.cpu_seconds is not None,
        Guarantee.FUEL_LIMITED: limits.fuel is not None,
        Guarantee.DISK_LIMITED: limits.disk_bytes is not None,
    }
    return frozenset({Guarantee.FILES_CONFINED} | {guarantee for guarantee, holds in conditional.items() if holds})


def required(
    processes: bool, limits: Limits, programs: ProgramRules = EVERY_PROGRAM, network: NetworkRules = OFFLINE
) -> frozenset[Guarantee]:
    """Return the guarantees that the presets require.

    These are the implied ones, and that the guest runs under a seccomp filter and is never the host's root. Not that other processes are
    invisible: where the machine refuses a /proc of its own, as in a default Podman container, a run says so, and a policy may require it.
    """
    return implied(processes, limits, programs, network) | {Guarantee.SYSCALLS_FILTERED, Guarantee.NOT_HOST_ROOT}


def locked(
    *,
    read: bool = False,
    write: bool = False,
    allowed: Iterable[PathPattern] = (),
    denied: Iterable[PathPattern] = (),
    allow_hidden: bool = False,
    masks: Iterable[Mask] = (),
    processes: bool = False,
    network: NetworkRules = OFFLINE,
    limits: Limits | None = None,
    tools: Iterable[str] = (),
    programs: ProgramRules = EVERY_PROGRAM,
) -> Policy:
    """Return the preset of the SDK: everything is off until it is named.

    `allowed=EVERYWHERE` is the whole machine except the masks and `denied`.
    """
    limits = limits or Limits()
    files = FileRules(read, write, tuple(allowed), tuple(denied), allow_hidden, tuple(masks))
    needs = required(processes, limits, programs, network)
    return Policy("locked", files, processes, limits, needs, network, tools=tuple(sorted(tools)), programs=programs)


def cloned(
    *,
    masks: Iterable[Mask],
    denied: Iterable[PathPattern] = (),
    network: NetworkRules = OFFLINE,
    limits: Limits | None = None,
    system: bool = False,
    programs: ProgramRules = EVERY_PROGRAM,
) -> Policy:
    """Return the preset of the command line: the whole machine except the masks, every write captured, and the network that is given."""
    limits = limits or CLONED_LIMITS
    files = FileRules(read=True, write=True, allowed=EVERYWHERE, denied=tuple(denied), allow_hidden=True, masks=tuple(masks))
    return Policy("cloned", files, True, limits, required(True, limits, programs, network), network, system, programs=programs)


def with_network(policy: Policy, network: NetworkRules) -> Policy:
    """Return the same policy with other network rules, and with the guarantee that goes with them."""
    requires = policy.requires - {Guarantee.NO_NETWORK, Guarantee.EGRESS_ONLY}
    needs = implied(policy.processes, policy.limits, policy.programs, network)
    return replace(policy, network=network, requires=requires | needs)


def limited(policy: Policy, limits: Limits) -> Policy:
    """Return the same policy with other limits, and with the guarantees that go with them."""
    requires = policy.requires | implied(policy.processes, limits, policy.programs, policy.network)
    return replace(policy, limits=limits, requires=requires)


def repeatable(policy: Policy) -> Policy:
    """Return the same policy, with deterministic runs required."""
    return replace(policy, requires=policy.requires | {Guarantee.DETERMINISTIC})


def is_hidden(path: str, pattern: PathPattern) -> bool:
    """Return whether a path that a pattern covers has a hidden name beyond the fixed part of the pattern."""
    return "/." in path[len(anchor(pattern).rstrip("/")) :]


def check_command(text: str) -> None:
    """Raise `PolicyError` unless the text is a valid pattern of a command, such as `git push **`."""
    words = text.split()
    if not words or words[0] == "**" or "**" in words[:-1] or not text.isprintable():
        raise PolicyError(f"not the words of a command: {text!r}", hint='write "git push **" or "npm publish"')
    check_name(words[0])


def check_one_of(text: str, known: Iterable[str], name: str) -> None:
    """Raise `PolicyError` unless the text is in `known`. `name` is the kind of thing that the text names, for the message."""
    if text not in known:
        raise PolicyError(f"there is no {name} {text!r}", hint=f"use one of {', '.join(known)}")


def _union(ours: tuple[str, ...], theirs: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*ours, *theirs)))


def _both(ours: tuple[str, ...] | None, theirs: tuple[str, ...] | None) -> tuple[str, ...] | None:
    if ours is None or theirs is None:
        return theirs if ours is None else ours
    return tuple(each for each in ours if each in theirs)
