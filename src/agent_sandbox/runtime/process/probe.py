"""Probe the `process` runtime: a real launch shows which guarantees it enforces on this host.

The guest itself tests what it can see and do. That a system call to confine it succeeded is no proof.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent_sandbox._fast.values import replace
from agent_sandbox.errors import SandboxError
from agent_sandbox.kernel import landlock, probes
from agent_sandbox.kernel.mount_plan import (
    Devices,
    Directory,
    ExecutableFiles,
    MountPlan,
    Overlay,
    Proc,
    SealRoot,
    SkeletonRoot,
    ThrowAway,
    Tmpfs,
)
from agent_sandbox.policy.model import MIB, Guarantee, Limits
from agent_sandbox.runtime import network_packages
from agent_sandbox.runtime.base import ExitReason, Launch, PythonCode, Support

if TYPE_CHECKING:
    from agent_sandbox.runtime.process.runtime import ProcessRuntime

SIZE = 16 * MIB
LIMITS = Limits(wall_seconds=20, cpu_seconds=20, memory_bytes=512 * MIB, disk_bytes=SIZE)

# The guest needs nothing of the machine for this: an interpreter forked from a zygote is already in memory.
_SETUP = """
import os, socket
def refused(deed):
    try:
        deed()
    except OSError:
        return True
    return False
"""
_LOOK_AROUND = """
print("files-confined", sorted(os.listdir("/")) == ["dev", "proc", "run", "tmp", "usr"] and refused(lambda: open("/usr/probe", "w")))
print("no-network", [name for _, name in socket.if_nameindex()] == ["lo"])
print("no-new-processes", refused(os.fork))
print("processes-invisible", len([name for name in os.listdir("/proc") if name.isdigit()]) <= 2)
print("syscalls-filtered", any(line.split() == ["Seccomp:", "2"] for line in open("/proc/self/status")))
print("not-host-root", int(open("/proc/self/uid_map").read().split()[1]) != 0)
"""
# This part runs in a view where nothing may be executed.
_LOOK_FOR_CODE = """
places = ("/tmp", "/run", "/dev/shm", "/usr", "/proc", "/")
sealed = refused(lambda: open("/proc/self/mem", "r+b")) and refused(lambda: os.memfd_create("probe"))
print("programs-confined", sealed and all(os.statvfs(place).f_flag & os.ST_NOEXEC for place in places))
"""
# This part runs in a guest with one door, at which nobody answers.
# `create_connection` would load the codec of host names, which no view of /usr holds for an interpreter that is installed elsewhere.
_LOOK_FOR_DOORS = """
def connect(port):
    with socket.socket() as link:
        link.settimeout(5)
        link.connect(("192.0.2.1", port))
        return True
only_loopback = [name for _, name in socket.if_nameindex()] == ["lo"]
print("egress-only", only_loopback and connect(80) and refused(lambda: connect(81)))
"""


def probe(runtime: ProcessRuntime) -> Support:
    """Launch a guest that tests its own confinement, and return the guarantees that hold. Never raises."""
    try:
        gated = landlock.abi() >= landlock.FIRST_USABLE
        look = trial(_SETUP + _LOOK_AROUND + (_LOOK_FOR_CODE if gated else ""))
        with runtime.launch(
            replace(look, root=replace(look.root, steps=(*look.root.steps, ExecutableFiles(())))) if gated else look
        ) as guest:
            completed = guest.wait()
    except SandboxError as error:
        return Support(runtime.traits.name, frozenset(), {Guarantee.FILES_CONFINED.value: f"{error.message}; {error.hint}"})
    except OSError as error:
        return Support(runtime.traits.name, frozenset(), {Guarantee.FILES_CONFINED.value: str(error)})
    seen = dict(line.split(" ", 1) for line in completed.stdout.decode(errors="replace").splitlines() if " " in line)
    if completed.exit.reason is not ExitReason.EXITED or completed.exit.code != 0:
        said = completed.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        why = f"the guest that was to look around ended with {completed.exit.code} ({completed.exit.reason.value}): {said}"
        return Support(runtime.traits.name, frozenset(), {Guarantee.FILES_CONFINED.value: why})
    support = _support(runtime.traits.name, seen)
    why = why_no_network(runtime)
    if not why:
        return replace(support, guarantees=support.guarantees | {Guarantee.EGRESS_ONLY})
    return replace(support, missing={**support.missing, Guarantee.EGRESS_ONLY.value: why})


def why_no_network(runtime: ProcessRuntime) -> str:
    """Return why no run can have a network here; empty if one can. Launches a guest that looks for its door."""
    if lacking := network_packages.missing(network_packages.NEEDED):
        return f"packages of the extra `network` are not installed: {', '.join(lacking)}"
    try:
        with runtime.launch(replace(trial(_SETUP + _LOOK_FOR_DOORS), network=(80,))) as guest:
            completed = guest.wait()
    except (SandboxError, OSError) as error:
        return str(error)
    return "" if completed.stdout == b"egress-only True\n" else "a live guest saw that it does not hold"


def trial(code: str) -> Launch:
    """Return a launch that runs this Python code on a minimal view."""
    plan = MountPlan(
        ThrowAway(SIZE),
        (
            SkeletonRoot(),
            Tmpfs("/tmp", SIZE, 0o1777),
            Tmpfs("/run", SIZE),
            Directory("/usr"),
            Overlay("/usr", "/usr", "%2Fusr", writable=False),
            Devices(SIZE),
            Proc(),
            SealRoot(),
        ),
    )
    return Launch(PythonCode(code), plan, "/tmp", {}, LIMITS, frozenset({Guarantee.FILES_CONFINED}), processes=False, writable=False)


def _support(name: str, seen: dict[str, str]) -> Support:
    # Our init watches memory and processor time, and the layers have a size. So every guest that runs has these guarantees.
    given = {Guarantee.MEMORY_WATCHED, Guarantee.CPU_LIMITED, Guarantee.DISK_LIMITED}
    missing: dict[str, str] = {}
    for guarantee in Guarantee:
        if guarantee.value in seen:
            if seen[guarantee.value] == "True":
                given.add(guarantee)
            else:
                why = "a /proc of its own is refused here, so it sees the processes around it"
                other = "a live guest saw that it does not hold"
                missing[guarantee.value] = why if guarantee is Guarantee.PROCESSES_INVISIBLE else other
    if Guarantee.NO_NETWORK in given:  # it has no interface but its own loopback, so only what listens there can take it further
        given.add(Guarantee.EGRESS_ONLY)
    else:
        missing[Guarantee.EGRESS_ONLY.value] = missing[Guarantee.NO_NETWORK.value]
    enforced, reasons = probes.control_group()
    if "memory" in enforced:
        given.add(Guarantee.MEMORY_HARD)
    else:
        missing[Guarantee.MEMORY_HARD.value] = reasons.get("memory", "there is no control group for it")
    if Guarantee.PROGRAMS_CONFINED not in given:
        missing.setdefault(Guarantee.PROGRAMS_CONFINED.value, "it needs a kernel with Landlock, of version 2 or later, switched on")
    for guarantee in (Guarantee.SEPARATE_KERNEL, Guarantee.USER_SPACE_KERNEL, Guarantee.DETERMINISTIC, Guarantee.FUEL_LIMITED):
        missing[guarantee.value] = "no process on a shared kernel can have it"
    return Support(name, frozenset(given), missing)
