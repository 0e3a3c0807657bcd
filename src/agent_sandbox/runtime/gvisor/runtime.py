"""The `gvisor` runtime: native programs and Python on a kernel in user space, on the view and behind the walls of `process`."""

from __future__ import annotations

import os
import sys

from agent_sandbox._fast.values import TYPE_CHECKING, replace
from agent_sandbox.errors import LaunchFailed, RuntimeUnavailable
from agent_sandbox.kernel import namespaces, seccomp
from agent_sandbox.kernel.mount_plan import Bind, Devices, Directory, MountPlan, Overlay, Step, Symlink, ThrowAway, Tmpfs, quote_target
from agent_sandbox.kernel.wire import FAREWELL_FD, PAYLOAD_FD, SCRIPTS
from agent_sandbox.policy.model import Guarantee
from agent_sandbox.policy.paths import contains
from agent_sandbox.runtime.base import COMMAND, Argv, Demands, Hosted, Launch, OuterProgram, Traits
from agent_sandbox.runtime.gvisor import runsc
from agent_sandbox.runtime.gvisor.agent_archive import BOOT, archive
from agent_sandbox.runtime.gvisor.bundle import Container, configuration
from agent_sandbox.runtime.gvisor.guest import GvisorGuest
from agent_sandbox.runtime.outer_view import RUN, VIEW, around
from agent_sandbox.runtime.process.guest_request import largest_file
from agent_sandbox.runtime.process.runtime import ProcessRuntime
from agent_sandbox.runtime.process.zygote import ONE_THREAD, packages

if TYPE_CHECKING:
    from agent_sandbox.policy.model import Limits
    from agent_sandbox.runtime.base import Support
    from agent_sandbox.runtime.process.guest_handle import ProcessGuest
    from agent_sandbox.runtime.process.zygote import Zygote

# What every launch enforces by construction. Not PROGRAMS_CONFINED: the user-space kernel maps the files of the view itself, so no mount
# option of the machine's kernel tells code from data. Not SEPARATE_KERNEL: the user-space kernel is a program on the machine's own.
GUARANTEES = frozenset(
    {
        Guarantee.FILES_CONFINED,
        Guarantee.NO_NETWORK,
        Guarantee.EGRESS_ONLY,
        Guarantee.NO_NEW_PROCESSES,
        Guarantee.PROCESSES_INVISIBLE,
        Guarantee.SYSCALLS_FILTERED,
        Guarantee.MEMORY_WATCHED,
        Guarantee.MEMORY_HARD,
        Guarantee.CPU_LIMITED,
        Guarantee.DISK_LIMITED,
        Guarantee.NOT_HOST_ROOT,
        Guarantee.USER_SPACE_KERNEL,
    }
)
TRAITS = Traits("gvisor", 40, frozenset({"python", "javascript", "ruby", "bash", COMMAND}), GUARANTEES)

_AGENT = f"{SCRIPTS}/agent.zip"  # in the guest's view
_RUNSC, _STATE, _BUNDLE, _LOG = "/runsc", f"{RUN}/state", f"{RUN}/bundle", f"{RUN}/log"  # in the view of the outer program
_SHM_BYTES = 64 << 20
_HOSTNAME = "sandbox"
# A process of the guest is several of the machine: threads of the user-space kernel, and stubs that the guest's code runs in. If the
# user-space kernel cannot get another, it ends, and the run with it. So it gets many more than the guest is meant to have.
_TASKS, _TASKS_OF_ONE = 256, 8
_FILES = 16384  # of the user-space kernel, which has several for each file of the guest


class GvisorRuntime(ProcessRuntime):
    """The gvisor runtime. Safe to use from many threads, and on both sides of a fork."""

    def __init__(self, *, path: str | None = None, platform: str | None = None, warm: int = 0, single_threaded: bool = False) -> None:
        """Use the `runsc` at `path`, or the first in the search path; and this platform, or the first one that works here."""
        super().__init__(single_threaded=single_threaded, warm=warm, traits=TRAITS, inner_root=VIEW)
        self._path = path
        self._platform = platform  # once a guest has started on it, the one for all

    def probe(self) -> Support:
        """Return the guarantees that a launch enforces on this host, as shown by real launches."""
        from agent_sandbox.runtime.gvisor.probe import probe  # which makes runtimes of this kind

        return probe(self)

    def absence(self) -> str:
        """Return why this runtime cannot be used now; "" if it can be tried. Raises `RuntimeUnavailable` if there is no usable `runsc`."""
        self.program()
        return ""

    def objection(self, demands: Demands) -> str:
        """Return the reason why this runtime supports no launch with these demands; empty if it does."""
        for wanted, name in (
            (demands.terminal, "terminal"),
            (demands.system, "system profile"),
            (demands.inspect, "process that shows which files are read"),
            (demands.observe, "observer: the machine's kernel sees the calls of the user-space kernel, not the program's"),
            (demands.inward, "server that a published port could lead to"),
            (demands.checkpoints, "state that can be kept in a timeline"),
        ):
            if wanted:
                return f"it has no {name}"
        return ""

    def program(self) -> runsc.Runsc:
        """Return the `runsc` that guests run on. Raises `RuntimeUnavailable` if there is none, or if it is too old to be tried."""
        found = runsc.find(self._path)
        if found.lacks:
            raise RuntimeUnavailable(found.lacks, missing=(runsc.NAME,), hint=runsc.REMEDY)
        return found

    def launch(self, launch: Launch) -> ProcessGuest:
        """Start a run. Every required guarantee is in force when this returns, or nothing has run."""
        if why := self.objection(Demands.of(launch)):
            raise RuntimeUnavailable(f"the gvisor runtime cannot do this: {why}", missing=("gvisor",), hint='use runtime="process"')
        if launch.root.code is not None:
            why = "the gvisor runtime cannot give: programs-confined"
            raise RuntimeUnavailable(why, missing=(Guarantee.PROGRAMS_CONFINED.value,), hint='use runtime="process"')
        if not launch.processes and not isinstance(launch.root.layers, ThrowAway):
            # The filter inside is installed by an interpreter of the view, and an earlier run may have changed that one.
            why = "the gvisor runtime cannot keep a stored sandbox from starting processes"
            raise RuntimeUnavailable(
                why, missing=(Guarantee.NO_NEW_PROCESSES.value,), hint='use a throw-away sandbox, or runtime="process"'
            )
        self.program()  # before a zygote is started for it
        return super().launch(launch)

    def _prepared(self, launch: Launch, zygote: Zygote) -> ProcessGuest:
        """Make a guest on the platform that works here: the first that starts one."""
        program = self.program()
        failure: LaunchFailed | None = None
        for platform in (self._platform,) if self._platform else runsc.PLATFORMS:
            guest = GvisorGuest(self._outer(launch, program, platform), zygote, VIEW)
            try:
                guest.prepare()
            except BaseException as error:
                guest.close()
                if not isinstance(error, LaunchFailed):
                    raise
                failure = failure or error
            else:
                self._platform = platform
                return guest
        assert failure is not None
        raise failure

    def _zygote(self, launch: Launch) -> Zygote:
        return super()._zygote(replace(launch, program=Argv(()), preload=()))  # what the guest runs is inside; the zygote only starts runsc

    def _outer(self, launch: Launch, program: runsc.Runsc, platform: str) -> Launch:
        """Return the launch of `runsc`, with the guest's view below a directory, and the agent as the first program inside."""
        sizes = [step.shm_bytes for step in launch.root.steps if isinstance(step, Devices)]
        environment = {"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": "/", **ONE_THREAD}
        limits = launch.limits
        size = sizes[0] if sizes else _SHM_BYTES
        shown = tuple(step.target for step in launch.root.steps if isinstance(step, Tmpfs) and step.target == "/tmp")
        container = Container(VIEW, _agent(launch), environment, _HOSTNAME, size, _inner_limits(limits), shown)
        network = "host" if launch.network else "none"  # the network of the guest's namespace, where only the doors are
        passed = (PAYLOAD_FD, FAREWELL_FD)
        command = program.command(_RUNSC, platform=platform, network=network, state=_STATE, bundle=_BUNDLE, log=_LOG, passed=passed)
        files = ((f"{_BUNDLE}/config.json", configuration(container)), (VIEW + _AGENT, archive()))
        return replace(
            launch,
            program=Argv(command),
            root=_with_runsc(around(_with_interpreter(launch.root)), program.path),
            cwd="/",
            env={"PATH": os.defpath, "HOME": RUN},
            limits=_outer_limits(limits),
            requires=launch.requires - {Guarantee.USER_SPACE_KERNEL},
            talk=None,
            outer=OuterProgram(files, namespaces.OUTER_PROGRAM, agent=True),
        )


def _agent(launch: Launch) -> tuple[str, ...]:
    """Return the command line of the agent."""
    native = not isinstance(launch.program, Hosted)
    code = seccomp.compile_filter(processes=launch.processes, execute=launch.processes or native).code
    words = (_AGENT, "native" if native else "python", sys.executable, sys.prefix, packages(), code.hex(), *launch.preload)
    return (os.path.realpath(sys.executable), "-P", "-S", "-c", BOOT, *words)


def _inner_limits(limits: Limits) -> dict[str, int | None]:
    """Return the limits that the user-space kernel keeps. The agent is one of the processes."""
    processes = None if limits.processes is None else limits.processes + 1
    return {"RLIMIT_NOFILE": limits.open_files, "RLIMIT_NPROC": processes, "RLIMIT_FSIZE": largest_file(limits), "RLIMIT_CORE": 0}


def _outer_limits(limits: Limits) -> Limits:
    tasks = None if limits.processes is None else _TASKS + _TASKS_OF_ONE * limits.processes
    return replace(limits, processes=tasks, open_files=_FILES)


def _with_interpreter(plan: MountPlan) -> MountPlan:
    """Return the plan of a view that also shows our interpreter, its standard library and its loader, read-only: the agent runs on it."""
    binary, library = os.path.realpath(sys.executable), os.path.realpath(os.path.dirname(os.__file__))
    if sys.base_prefix != "/usr":  # its own libraries lie beside the modules
        library = os.path.dirname(library)
    shown = [step.target for step in plan.steps if isinstance(step, Overlay | Bind | Symlink | Directory)]
    added: list[Step] = []
    for link in ("/lib", "/lib64"):
        if os.path.islink(link) and not any(contains(tree, link) for tree in shown):
            added.append(Symlink(link, os.readlink(link)))
    if not any(contains(tree, binary) for tree in shown):
        added.append(Bind(binary, binary))
    if not any(contains(tree, library) for tree in shown):
        added.append(Overlay(library, library, f"agent{quote_target(library)}", writable=False))
    return replace(plan, steps=(*plan.steps[:-1], *added, plan.steps[-1])) if added else plan


def _with_runsc(plan: MountPlan, path: str) -> MountPlan:
    """Return the plan with the program bound into the view of the outer program, which shows no other place where it may lie."""
    return replace(plan, steps=(*plan.steps[:-1], Bind(path, _RUNSC), plan.steps[-1]))
