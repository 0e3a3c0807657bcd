"""The inventory of walls: each protection of the product, with the probes that attack it, or with the reason why none does.

`judge_walls` turns the results of the probes into one verdict per wall. A wall holds if an attack on it was shown to work without it, and
did not get through. A wall that nothing attacks is listed as such, so that `verify` claims no more than it tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from agent_sandbox._fast.values import dataclass
from agent_sandbox.policy.model import Guarantee as G
from agent_sandbox.selftest.probe import Result


@dataclass(frozen=True)
class Wall:
    """One protection. `attacks` are names of probes, or `probe:way` for one way of a probe. Without attacks, `why` gives the reason.

    `guarantees` are the guarantees of a policy that rest on this wall.
    """

    name: str
    says: str
    attacks: tuple[str, ...] = ()
    why: str = ""
    guarantees: tuple[G, ...] = ()


_NAMESPACES = {
    "mount": ("mnt", "Mounts of the machine are out of reach.", G.FILES_CONFINED),
    "process": ("pid", "Processes of the machine have no number inside.", G.PROCESSES_INVISIBLE),
    "network": ("net", "The machine's network is not there.", G.NO_NETWORK),
    "ipc": ("ipc", "Shared memory and queues of the machine are not there.", G.PROCESSES_INVISIBLE),
    "host-name": ("uts", "The machine's name cannot be set.", G.NOT_HOST_ROOT),
    "user": ("user", "Rights inside are none outside.", G.NOT_HOST_ROOT),
    "cgroup": ("cgroup", "The machine's control groups are not seen.", G.PROCESSES_INVISIBLE),
}
_CAPABILITIES = tuple(f"powers:{name}" for name in ("CapPrm", "CapEff", "CapBnd"))

_HOSTS = tuple(f"door:{way}" for way in ("metadata address", "address", "address of IPv6", "loopback"))
_WAYS = tuple(f"door:{way}" for way in ("other port", "datagram", "second resolver", "raw socket"))

ATTACKED: tuple[Wall, ...] = (
    *(
        Wall(f"{name}-namespace", says, (f"own-namespaces:{kind}",), guarantees=(guarantee,))
        for name, (kind, says, guarantee) in _NAMESPACES.items()
    ),
    Wall("new-namespaces", "No namespace can be made inside.", ("new-namespaces",), guarantees=(G.SYSCALLS_FILTERED,)),
    Wall("seccomp", "System calls go through a filter.", ("powers:Seccomp", "system-calls"), guarantees=(G.SYSCALLS_FILTERED,)),
    Wall("seccomp-rules", "Each rule of the filter refuses what it must.", ("seccomp-rules",), guarantees=(G.SYSCALLS_FILTERED,)),
    Wall("seccomp-architecture", "32-bit system calls do not get around the filter.", ("other-architecture",)),
    Wall("socket-kinds", "Only ordinary kinds of sockets can be made.", ("socket-kinds",), guarantees=(G.NO_NETWORK,)),
    Wall("terminal-input", "Nothing can be typed into a terminal.", ("type-into-terminal",)),
    Wall("landlock", "Landlock confines the guest, behind the view.", ("landlock",)),
    Wall("landlock-rules", "Each rule of Landlock refuses what it must.", ("landlock-rules",), guarantees=(G.PROGRAMS_CONFINED,)),
    Wall("no-new-privileges", "No program gives rights.", ("powers:NoNewPrivs",), guarantees=(G.NOT_HOST_ROOT,)),
    Wall("set-user-id", "Setuid programs run as their caller.", ("setuid",), guarantees=(G.NOT_HOST_ROOT,)),
    Wall("capabilities-dropped", "A guest has no capability and can get none.", _CAPABILITIES, guarantees=(G.NOT_HOST_ROOT,)),
    Wall("not-host-root", "As root, too, a guest has ids of its own.", ("powers:Uid",), guarantees=(G.NOT_HOST_ROOT,)),
    Wall("masks", "Secrets are not in the view.", ("read-by-path", "read-through-link"), guarantees=(G.FILES_CONFINED,)),
    Wall("found-secrets", "Secrets that are found by their content are hidden, too.", ("found-secrets",), guarantees=(G.FILES_CONFINED,)),
    Wall("own-proc", "/proc shows the guest's own processes.", ("see-processes", "read-through-proc"), guarantees=(G.PROCESSES_INVISIBLE,)),
    Wall("policy-masks", "What your policy hides is hidden.", ("hidden-places",), guarantees=(G.FILES_CONFINED,)),
    Wall("captured-writes", "Writes go into layers, never to real files.", ("write",), guarantees=(G.FILES_CONFINED,)),
    Wall("devices", "Devices of the machine are not there.", ("devices",), guarantees=(G.FILES_CONFINED,)),
    Wall("kernel-settings", "Settings of the kernel are read-only.", ("kernel-settings",)),
    Wall("private-mounts", "Mounts inside do not appear outside.", ("private-mounts",)),
    Wall("environment", "Variables of the caller are left behind.", ("environment",)),
    Wall("descriptors", "Open files of the caller are left behind.", ("descriptors",)),
    Wall("session", "The guest is in a session of its own.", ("session",)),
    Wall("init-private", "Init keeps its memory to itself.", ("init",)),
    Wall("signals", "Processes of the machine cannot be signalled or traced.", ("harm-processes", "trace-processes")),
    Wall("no-network", "Nothing outside is reached.", ("tcp", "udp", "dns", "route"), guarantees=(G.NO_NETWORK,)),
    Wall("egress-hosts", "With a network, only allowed hosts are reached.", _HOSTS, guarantees=(G.EGRESS_ONLY,)),
    Wall("egress-names", "Nobody is asked for a name that is not allowed.", ("door:name",), guarantees=(G.EGRESS_ONLY,)),
    Wall("egress-routes", "With a network, too, every way ends at the door.", _WAYS, guarantees=(G.EGRESS_ONLY,)),
    Wall("egress-process", "The process behind the door is not seen.", ("door-process",)),
    Wall("unix-sockets", "Sockets of the machine are not reached.", ("unix-names", "unix-files"), guarantees=(G.NO_NETWORK,)),
    Wall("no-new-processes", "Where processes are not allowed, none starts.", ("start-processes",), guarantees=(G.NO_NEW_PROCESSES,)),
    Wall("programs", "Only allowed programs start.", ("start-other-tools",), guarantees=(G.PROGRAMS_CONFINED,)),
    Wall("control-group", "A control group bounds all processes together.", ("control-group",), guarantees=(G.MEMORY_HARD,)),
    Wall("memory-limit", "Memory is limited.", ("limit-memory",), guarantees=(G.MEMORY_WATCHED,)),
    Wall("socket-memory", "Data that waits in sockets counts as memory.", ("limit-socket-buffers",)),
    Wall("shared-counters", "What only the whole machine bounds is not handed out.", ("shared-counters",)),
    Wall("time-limit", "Wall time is limited.", ("limit-wall-time",)),
    Wall("processor-limit", "Processor time is limited.", ("limit-processor-time",), guarantees=(G.CPU_LIMITED,)),
    Wall("process-limit", "Processes are limited.", ("limit-processes",)),
    Wall("open-files-limit", "Open files are limited.", ("limit-open-files",)),
    Wall("output-limit", "Output is limited.", ("limit-output",)),
    Wall("disk-limit", "Disk space is limited.", ("limit-disk",), guarantees=(G.DISK_LIMITED,)),
    Wall("core-dumps", "A crash starts no program of the machine.", ("core-dumps",)),
    Wall("fresh-scratch", "Scratch files do not outlive a run.", ("scratch-files", "throw-away")),
    Wall("fresh-memory", "Shared memory does not outlive a run.", ("shared-memory",)),
    Wall("end-of-run", "Processes do not outlive a run or its supervisor.", ("background", "killed-supervisor")),
    Wall("wasm-engine", "Inside WebAssembly nothing of the machine is reached.", ("wasm-engine",)),
    Wall("wasm-kernel", "Around WebAssembly there is the kernel's wall.", ("wasm-kernel",)),
    Wall("fuel", "Instructions are limited.", ("wasm-fuel",), guarantees=(G.FUEL_LIMITED,)),
    Wall("determinism", "Deterministic runs are the same every time.", ("wasm-deterministic",), guarantees=(G.DETERMINISTIC,)),
    Wall("drift-check", "A file that changed in reality is not overwritten.", ("promote-drift:changed before",)),
    Wall("promotion-race", "Nor one that changes during the promotion.", ("promote-drift:changed meanwhile",)),
    Wall("protected-kinds", "Files that run by themselves need an approval of their own.", ("promote-protected",)),
    Wall("project-scope", "A promotion stays inside the project.", ("promote-outside",)),
    Wall("promotion-journal", "A killed promotion is finished or taken back.", ("promote-crash",)),
    Wall("review-complete", "The diff shows what a promotion writes.", ("review-complete",)),
    Wall("review-visible", "Nothing hides in a review.", ("review-visible",)),
    Wall("review-expected", "--expect promotes what was shown.", ("review-expected",)),
    Wall("gate", "What is denied, or cannot be guaranteed, does not run.", ("policy-denied",)),
    Wall("policy-layers", "A project's policy file cannot widen yours.", ("policy-narrows",)),
    Wall("own-state", "State and keys of the product are hidden.", ("own-state",), guarantees=(G.FILES_CONFINED,)),
    Wall("approvals", "An answer counts for what was asked, once.", ("approvals",)),
    Wall("capabilities", "A token allows what it names.", ("capabilities",)),
    Wall("plans", "A plan is carried out as shown, once.", ("plans",)),
    Wall("ledger-entries", "Every run is recorded.", ("ledger",)),
    Wall("ledger-chain", "A ledger that was altered is found.", ("ledger-altered",)),
)

NOT_ATTACKED: tuple[Wall, ...] = (
    Wall(
        "separate-kernel",
        "The guest has a kernel of its own.",
        why="doctor compares the kernels; verify --runtime microvm attacks the rest",
        guarantees=(G.SEPARATE_KERNEL,),
    ),
    Wall(
        "user-space-kernel",
        "The guest's system calls are answered by a program.",
        why="doctor compares the kernels; verify --runtime gvisor attacks the rest",
        guarantees=(G.USER_SPACE_KERNEL,),
    ),
    Wall(
        "kernel-faults", "A fault of the kernel is not reached.", why="an unknown fault cannot be tried; few system calls reach the kernel"
    ),
    Wall("side-channels", "Timing tells nothing of other programs.", why="it is not promised: processor and caches are shared"),
    Wall("mount-options", "Mounts are nosuid, and nodev where possible.", why="no_new_privs and the filter answer first"),
    Wall("secure-bits", "User 0 inside regains no capability.", why="the empty bounding set, which is attacked, answers first"),
    Wall("idmapped-mounts", "Files of root inside belong to nobody outside.", why="only layers show it, which a guest cannot reach"),
    Wall(
        "sealed-interpreter",
        "A guest cannot change the interpreter it was forked from.",
        why="an attack would change your interpreter if it got through",
    ),
    Wall(
        "kernel-objects",
        "Watches, queues and pending signals of a user are not used up.",
        why="using them up would harm your other programs",
    ),
    Wall("system-profile", "--system gives capabilities over the clone only.", why="it is attacked only if you give --system"),
    Wall("observer", "--observe sees what a run tries.", why="it watches, and is no wall"),
    Wall("tools-and-turns", "Calls from a guest to functions of the caller are checked.", why="they need a program of the caller's"),
    Wall(
        "wasm-javascript",
        "JavaScript inside WebAssembly reaches nothing.",
        why="the engine is the one that wasm-engine attacks; its interpreter is another",
    ),
    Wall(
        "git-history",
        "A repository's new objects are checked before they are taken over.",
        why="it would take a repository of hostile objects",
    ),
    Wall("other-approvers", "Only named users, or another user, may approve.", why="it takes a second account"),
    Wall("second-factor", "An approval needs a one-time code.", why="it takes an authenticator"),
    Wall("elevations", "A relaxed rule ends with its time.", why="grants of the same store are attacked: capabilities"),
    Wall("checkpoints", "A signed checkpoint exposes a rewritten past.", why="it needs the extra sign, and a key kept elsewhere"),
    Wall(
        "power-loss", "What was promoted survives a power cut.", why="the power cannot be cut from here; a kill is tried: promotion-journal"
    ),
    Wall("records", "A record of a deterministic run cannot be forged unnoticed.", why="records hold no secret, and anybody may write one"),
)
WALLS = (*ATTACKED, *NOT_ATTACKED)

Verdict = Literal["held", "broken", "absent", "not shown", "not attacked"]


@dataclass(frozen=True)
class WallVerdict:
    """The verdict on one wall. `why` says why it is not `held`."""

    wall: Wall
    status: Verdict
    why: str = ""


def judge_walls(results: Sequence[Result], walls: Iterable[Wall] = WALLS) -> list[WallVerdict]:
    """Return the verdict on each wall from the results of all probes. Pure."""
    return [_verdict(wall, results) for wall in walls]


def _verdict(wall: Wall, results: Sequence[Result]) -> WallVerdict:
    if not wall.attacks:
        return WallVerdict(wall, "not attacked", wall.why)
    attacks = [
        (result, attack.partition(":")[2]) for attack in wall.attacks for result in results if result.probe.name == attack.partition(":")[0]
    ]
    broken = [
        f"{result.probe.name} ({result.box})" for result, way in attacks if (way in result.reached if way else result.status == "fail")
    ]
    if broken:
        return WallVerdict(wall, "broken", f"got through: {', '.join(broken)}")
    missed = [result for result, _ in attacks if result.status == "inconclusive"]
    if bad := [result for result in missed if not result.excused]:
        return WallVerdict(wall, "not shown", bad[0].why)
    if any(way in result.shown if way else result.status == "pass" for result, way in attacks):
        return WallVerdict(wall, "held")
    if missed:
        return WallVerdict(wall, "absent", missed[0].why)
    return WallVerdict(wall, "absent", "for this user the attack does not succeed without the wall either")
