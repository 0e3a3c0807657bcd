"""The live try of the gvisor runtime: real programs inside, on each platform. What they print shows that they ran there, and how."""

from __future__ import annotations

import os
import time

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, replace
from agent_sandbox.errors import SandboxError
from agent_sandbox.kernel import probes
from agent_sandbox.policy.model import Guarantee
from agent_sandbox.runtime.base import Argv, Support
from agent_sandbox.runtime.gvisor.runsc import PLATFORMS, REMEDY
from agent_sandbox.runtime.gvisor.runtime import GvisorRuntime
from agent_sandbox.runtime.process.probe import trial, why_no_network

if TYPE_CHECKING:
    from agent_sandbox.runtime.base import Completed, Launch

# The guest itself tests what it can see and do. No namespace hides a kernel's version: where it is another, another kernel answers.
_LOOK_AROUND = """
import os, socket
def refused(deed):
    try:
        deed()
    except OSError:
        return True
    return False
shown = {"bin", "dev", "lib", "lib64", "proc", "run", "sys", "tmp", "usr"}
print("files-confined", set(os.listdir("/")) <= shown and refused(lambda: open("/usr/probe", "w")))
only_loopback = [name for _, name in socket.if_nameindex()] == ["lo"]
print("no-network", only_loopback and refused(lambda: socket.create_connection(("192.0.2.1", 80), 2)))
print("no-new-processes", refused(os.fork))
print("processes-invisible", len([name for name in os.listdir("/proc") if name.isdigit()]) <= 3)
print("user-space-kernel", os.uname().version != {machine!r})
print("syscalls-filtered", any(line.split() == ["Seccomp:", "2"] for line in open("/proc/self/status")))
"""


@dataclass(frozen=True)
class PlatformTrial:
    """The outcome of real programs on one platform: the seconds until one was ready and had run, or why it did not work."""

    platform: str
    why: str = ""
    seconds: float = 0.0


def try_platforms(runtime: GvisorRuntime) -> tuple[PlatformTrial, ...]:
    """Run `ls -d /` on every platform. Raises `RuntimeUnavailable` if there is no `runsc` that could be tried."""

    path = runtime.program().path
    trials = []
    for platform in PLATFORMS:
        tried = GvisorRuntime(path=path, platform=platform)
        began = time.monotonic()
        try:
            why = _complaint(_ran(tried, _listing()), b"/\n")
        except (SandboxError, OSError) as error:
            why = error.message if isinstance(error, SandboxError) else str(error)
        finally:
            tried.close()
        trials.append(PlatformTrial(platform, why, time.monotonic() - began))
    return tuple(trials)


def probe(runtime: GvisorRuntime) -> Support:
    """Launch guests that list a directory and test their own confinement, and return the guarantees that hold. Never raises."""
    name = runtime.traits.name
    try:
        if why := _complaint(_ran(runtime, _listing()), b"/\n"):
            return _nothing(name, f"`ls -d /` did not run inside: {why}; {REMEDY}")
        completed = _ran(runtime, trial(_LOOK_AROUND.replace("{machine!r}", repr(os.uname().version))))
    except SandboxError as error:
        return _nothing(name, f"{error.message}; {error.hint}")
    except OSError as error:
        return _nothing(name, str(error))
    if why := _complaint(completed, None):
        return _nothing(name, f"Python did not run inside: {why}; {REMEDY}")
    seen = dict(line.split(" ", 1) for line in completed.stdout.decode(errors="replace").splitlines() if " " in line)
    enforced, reasons = probes.control_group()
    # Init watches memory and processor time, and the layers have a size. The user namespace of the outer program is that of every guest.
    given = {Guarantee.MEMORY_WATCHED, Guarantee.CPU_LIMITED, Guarantee.DISK_LIMITED, Guarantee.NOT_HOST_ROOT}
    given |= {each for each in Guarantee if seen.get(each.value) == "True"}
    missing = {each.value: "a live guest saw that it does not hold" for each in Guarantee if seen.get(each.value, "True") != "True"}
    if why := why_no_network(runtime):
        missing[Guarantee.EGRESS_ONLY.value] = why
    else:
        given.add(Guarantee.EGRESS_ONLY)
    if "memory" in enforced:
        given.add(Guarantee.MEMORY_HARD)
    else:
        missing[Guarantee.MEMORY_HARD.value] = reasons.get("memory", "there is no control group for it")
    missing |= {each.value: "the gvisor runtime cannot give it" for each in Guarantee if each not in runtime.traits.guarantees}
    return Support(name, frozenset(given), missing)


def _listing() -> Launch:
    return replace(trial(""), program=Argv(("/usr/bin/ls", "-d", "/")), processes=True)


def _ran(runtime: GvisorRuntime, launch: Launch) -> Completed:
    with runtime.launch(launch) as guest:
        completed = guest.wait()
        return replace(completed, stderr=completed.stderr or guest.refused.encode())


def _complaint(completed: Completed, expected: bytes | None) -> str:
    """Return why a trial failed; empty if it did not."""
    if completed.exit.code == 0 and (expected is None or completed.stdout == expected):
        return ""
    said = completed.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return f"it ended with {completed.exit.code} ({completed.exit.reason.value}): {said or completed.stdout[:80]!r}"


def _nothing(name: str, why: str) -> Support:
    return Support(name, frozenset(), {Guarantee.FILES_CONFINED.value: why})
