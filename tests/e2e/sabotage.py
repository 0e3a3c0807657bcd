"""Sabotage: the product with one wall torn down, for tests of `verify`. Run as a program, it is `agent-sandbox verify` of such a product.

    python -m tests.e2e.sabotage WALL [PROBE…]

Each sabotage replaces functions of the product in the memory of this process, before the command line is imported. So there is no switch in
the product that could be turned. The processes that the product itself starts by `exec` are sabotaged in the same way (`_spread`).

A wall that other walls stand before is torn down together with those: a setuid program, for one, is stopped three times.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from agent_sandbox._fast.values import replace


def module(name: str) -> Any:
    """Import a module of the product, to be changed."""
    return importlib.import_module(f"agent_sandbox.{name}")


sc = module("kernel.syscalls")
cgroups = module("kernel.cgroups")
guest_setup = module("kernel.guest_setup")
ids = module("kernel.ids")
init = module("kernel.init")
keeper = module("kernel.keeper")
landlock = module("kernel.landlock")
mount_steps = module("kernel.mount_steps")
mask_layers = module("kernel.mask_layers")
mount_tools = module("kernel.mount_tools")
namespaces = module("kernel.namespaces")
seccomp = module("kernel.seccomp")
syscall_rules = module("kernel.syscall_rules")
usage = module("kernel.usage")
wire = module("kernel.wire")

module("kernel.setup_helper").load = lambda: None  # the walls torn down here are those of the reference

NOTHING = "nothing"  # in place of a wall: the product as it is
SABOTAGES: dict[str, Callable[[], None]] = {}
ONLY_ROOT: set[str] = set()  # walls that only root has, or without which nobody else can start a sandbox at all


def sabotage(*walls: str, root: bool = False) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a function that tears down these walls."""

    def register(tear_down: Callable[[], None]) -> Callable[[], None]:
        SABOTAGES.update(dict.fromkeys(walls, tear_down))
        ONLY_ROOT.update(walls if root else ())
        return tear_down

    return register


def nothing(*_: Any, **__: Any) -> None:
    """Stand in for a function that returns nothing."""


def without_namespace(flag: int) -> None:
    keeper._NAMESPACES &= ~flag
    unshare = sc.unshare
    sc.unshare = lambda flags: unshare(flags & ~flag) if flags & ~flag else None


def skip_prctl(option: int, value: int | None = None) -> None:
    """Ignore this option of prctl, or give it another value."""
    prctl = sc.prctl

    def skipped(asked: int, *words: int) -> Any:
        if asked != option:
            return prctl(asked, *words)
        return 0 if value is None else prctl(asked, value)

    sc.prctl = skipped


def let(*calls: str) -> None:
    """Let these system calls through the filter, with any arguments."""
    for name in calls:
        syscall_rules.CONDITIONAL.pop(name, None)
    syscall_rules.ALLOWED |= frozenset(calls)
    seccomp._compiled.cache_clear()


@sabotage("mount-namespace", root=True)
def no_view() -> None:
    def build(identity: Any, *_: object) -> tuple[Any, int, list[int]]:
        namespaces.raise_loopback()
        site = mount_tools.Site(identity.userns, identity.shift, userxattr=not identity.root)
        # For the directory of the layers, in which the product makes and removes files, one that is gone: so it can harm no real one.
        gone = tempfile.mkdtemp()
        layers = os.open(gone, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        os.rmdir(gone)
        return site, layers, []

    guest_setup._build_view = build
    if os.geteuid() == 0:  # otherwise the guest's own ids can enter none of our directories
        no_user_namespace()


@sabotage("process-namespace", root=True)
def no_pid_namespace() -> None:
    without_namespace(sc.CLONE_NEWPID)

    def end(guest: int, *, wait: bool) -> int:  # the product's own would kill every process of this user
        try:
            os.kill(guest, signal.SIGKILL)
        except ProcessLookupError:
            return int(signal.SIGKILL)
        return os.waitpid(guest, 0)[1]

    init._end_everything = end


@sabotage("network-namespace", "no-network")
def no_network_namespace() -> None:
    without_namespace(sc.CLONE_NEWNET)
    namespaces.raise_loopback = nothing


@sabotage("egress-hosts", "egress-names")
def every_host() -> None:
    module("policy.network").NetworkRules.objection = lambda rules, name, port=None: ""
    with suppress(ImportError):  # only the egress process has it at hand
        module("egress.addresses").objection = lambda address: ""


@sabotage("egress-routes")
def doors_beside_the_way_out() -> None:
    doors = module("kernel.doors")

    def beside(ports: object, trust: int = -1) -> Any:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.bind(("127.0.0.1", 0))
            return doors.Doors((sock.detach(),), (), trust)

    keeper._NAMESPACES &= ~sc.CLONE_NEWNET  # not `unshare` itself: the attack needs a network namespace of its own
    doors.open_doors = beside


@sabotage("egress-process")
def processes_in_sight() -> None:
    proc_of_the_machine()


@sabotage("ipc-namespace", "fresh-memory")
def no_ipc_namespace() -> None:
    without_namespace(sc.CLONE_NEWIPC)


@sabotage("host-name-namespace")
def no_uts_namespace() -> None:
    without_namespace(sc.CLONE_NEWUTS)
    guest_setup.socket.sethostname = nothing  # the machine keeps its name


@sabotage("user-namespace", "not-host-root", root=True)
def no_user_namespace() -> None:
    def stay(identity: Any, control: Any, ourselves: int, *, as_root: bool) -> None:
        control.send(wire.HERE)
        control.recv(1)
        os.close(ourselves)
        sc.unshare(sc.CLONE_NEWCGROUP)

    identify = keeper._identify
    keeper._identify = lambda: replace(identify(), shift=0, userns=None)  # the view shows the files with their real owners
    guest_setup._give_up_identity = stay
    ids.write_maps = nothing


@sabotage("cgroup-namespace")
def no_cgroup_namespace() -> None:
    without_namespace(sc.CLONE_NEWCGROUP)


@sabotage("new-namespaces")
def namespaces_allowed() -> None:
    let("unshare")


@sabotage("seccomp", "wasm-kernel", "shared-counters")
def no_seccomp() -> None:
    seccomp.install = nothing


@sabotage("seccomp-rules")
def a_rule_is_missing() -> None:
    let("prctl")


@sabotage("seccomp-architecture")
def every_architecture() -> None:
    seccomp._RET_KILL_PROCESS = seccomp._RET_ALLOW


@sabotage("socket-kinds")
def every_socket() -> None:
    let("socket")


@sabotage("terminal-input")
def every_ioctl() -> None:
    let("ioctl")


@sabotage("landlock")
def no_landlock() -> None:
    landlock.enforce = nothing


@sabotage("landlock-rules")
def a_right_is_missing() -> None:
    leave_out("MAKE_DIR")


def leave_out(name: str) -> None:
    """Leave one right or scope out of every set of Landlock rules."""
    plan = landlock.plan

    def lax(**asked: Any) -> Any:
        rules = plan(**asked)
        grants = tuple(replace(each, rights=tuple(right for right in each.rights if right != name)) for each in rules.grants)
        kept = (tuple(each for each in names if each != name) for names in (rules.handled, rules.scoped))
        handled, scoped = kept
        return landlock.Ruleset(handled, tuple(each for each in grants if each.rights), scoped, rules.left_out)

    landlock.plan = lax


@sabotage("no-new-privileges")
def new_privileges() -> None:
    skip_prctl(sc.PR_SET_NO_NEW_PRIVS)  # without it the kernel accepts no filter and no rules
    landlock.enforce = seccomp.install = nothing


@sabotage("set-user-id", root=True)
def setuid() -> None:
    new_privileges()
    sc.MS_NOSUID = sc.MOUNT_ATTR_NOSUID = 0
    mount_tools.QUIET = mount_steps.QUIET = sc.MS_NODEV
    mount_tools.Site.flags = property(lambda site: sc.MS_NODEV)


@sabotage("capabilities-dropped")
def capabilities_kept() -> None:
    namespaces.drop_capabilities = namespaces.assert_capabilities = nothing


@sabotage("masks", "policy-masks", "own-state")
def no_masks() -> None:
    mount_steps.fill_mask_layer = lambda layer, lower, masks, opaque, **more: mask_layers.fill_mask_layer(layer, lower, (), opaque, **more)


@sabotage("found-secrets")
def nothing_is_found() -> None:
    secret_search = module("workspace.secret_search")

    secret_search.hidden_in_project = lambda *_, **__: secret_search.SecretFiles((), frozenset())


@sabotage("own-proc")
def proc_of_the_machine() -> None:
    def bind(step: object, site: object) -> None:
        with mount_tools.directory_for("/proc") as place:
            sc.mount("/proc", place, None, sc.MS_BIND | sc.MS_REC)

    _exchange_step("_proc", bind)


@sabotage("captured-writes")
def real_writes() -> None:
    def bind(lowers: list[str], key: str, target: str, writable: bool, site: Any) -> None:
        with mount_tools.directory_for(target) as place:
            sc.mount(lowers[-1], place, None, sc.MS_BIND)

    clone = mount_tools.clone_of
    mount_tools.clone_of = lambda source, userns, **more: clone(source, userns, **{**more, "writable": True})
    mount_steps.mount_overlay = bind


@sabotage("devices")
def devices_can_be_made() -> None:
    let("mknod", "mknodat")
    landlock.enforce = nothing


@sabotage("kernel-settings", root=True)
def settings_open() -> None:
    no_user_namespace()
    mount_steps.seal_proc = nothing


@sabotage("private-mounts")
def mounts_shared() -> None:
    enter = namespaces.enter_root

    def share() -> None:
        enter()
        sc.mount("", "/", None, sc.MS_REC | (1 << 20))  # MS_SHARED

    namespaces.enter_root = share


@sabotage("environment")
def environment_passed() -> None:
    caller = module("cli.caller")

    caller.guest_environment = lambda ours, asked, **_: dict(ours)


@sabotage("descriptors")
def descriptors_kept() -> None:
    close_others = wire.close_others

    def held() -> set[int]:
        """Return the descriptors of the secret that the self-test holds open. If all were kept, no pipe would ever end."""
        kept = set()
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                kept |= {int(name)} if os.readlink(f"/proc/self/fd/{name}").endswith("id_ed25519") else set()
        return kept

    def close_range(first: int, last: int) -> None:
        for fd in sorted({int(name) for name in os.listdir("/proc/self/fd")} - held()):
            with suppress(OSError):
                if first <= fd <= last:
                    os.close(fd)

    wire.close_others = lambda kept: close_others({*kept, *held()})
    sc.close_range = close_range


@sabotage("session")
def no_session() -> None:
    os.setsid = nothing


@sabotage("init-private")
def init_dumpable() -> None:
    skip_prctl(sc.PR_SET_DUMPABLE, 1)
    landlock.enforce = nothing  # it keeps other processes' memory apart, too


@sabotage("signals", root=True)
def processes_in_reach() -> None:
    no_pid_namespace()
    if os.geteuid() == 0:
        no_user_namespace()
    landlock.enforce = nothing


@sabotage("unix-sockets")
def abstract_names_in_reach() -> None:
    no_network_namespace()
    landlock.enforce = nothing


@sabotage("no-new-processes")
def processes_allowed() -> None:
    compile_filter = seccomp.compile_filter
    seccomp.compile_filter = lambda **asked: compile_filter(**{**asked, "processes": True, "execute": True})


@sabotage("programs")
def every_program() -> None:
    module("policy.model").ProgramRules.restricts = property(lambda rules: False)


@sabotage("control-group")
def no_control_group() -> None:
    cgroups.Cgroup.join = nothing


def limit_lifted(*names: str, value: int | None = None) -> None:
    """Take these limits out of what init is asked, and out of the control group."""
    guest_handle = module("runtime.process.guest_handle")

    request_for, create = guest_handle.request_for, cgroups.create

    def request(*arguments: Any, **more: Any) -> dict[str, Any]:
        return {**request_for(*arguments, **more), **dict.fromkeys(names, value)}

    guest_handle.request_for = request
    cgroups.create = lambda **asked: create(**{**asked, **{name: None for name in names if name in asked}})


@sabotage("memory-limit")
def no_memory_limit() -> None:
    limit_lifted("memory_bytes", "file_bytes")


@sabotage("socket-memory")
def sockets_without_limit() -> None:
    module("selftest.probes.counters")._NOTICED = 1.0  # nobody will, however long it waits
    cgroups._limit_sockets = lambda part, memory: ""
    module("kernel.counters").CounterWatch.look = lambda watch: ""


@sabotage("processor-limit")
def no_processor_limit() -> None:
    limit_lifted("cpu_seconds")
    cgroups.Cgroup.cpu_seconds = lambda group: 0.0


@sabotage("process-limit")
def no_process_limit() -> None:
    limit_lifted("processes")


@sabotage("open-files-limit")
def no_open_files_limit() -> None:
    limit_lifted("open_files", value=4096)


@sabotage("time-limit")
def no_time_limit() -> None:
    ProcessGuest = module("runtime.process.guest_handle").ProcessGuest

    allow = ProcessGuest._allow
    ProcessGuest._allow = lambda guest, wall: allow(guest, 1e6)
    ProcessGuest._deadline = lambda guest, wall: guest._began + 1e6


@sabotage("output-limit")
def no_output_limit() -> None:
    pump = module("runtime.process.pump")

    make = pump.Sink.__init__
    pump.Sink.__init__ = lambda sink, name, fd, limit, launch: make(sink, name, fd, None, launch)


@sabotage("disk-limit")
def no_disk_limit() -> None:
    mount_steps.sized = lambda size: "size=1g"  # the sizes of scratch directories


@sabotage("core-dumps")
def core_dumps() -> None:
    usage.CORE_BYTES = 2


@sabotage("fresh-scratch", root=True)
def scratch_of_the_machine() -> None:
    private = mount_steps._tmpfs

    def bind(step: Any, site: Any) -> None:
        if step.target != "/tmp":
            private(step, site)
            return
        with mount_tools.directory_for("/tmp") as place:
            sc.mount("/tmp", place, None, sc.MS_BIND)

    _exchange_step("_tmpfs", bind)


@sabotage("end-of-run", root=True)
def background_lives_on() -> None:
    no_pid_namespace()
    cgroups.create = lambda **_: cgroups.Cgroup()  # or a keeper of somebody else sweeps what is left, at any moment


@sabotage("wasm-engine")
def engine_open() -> None:
    wasmtime: Any = importlib.import_module("wasmtime")
    preopen = wasmtime.WasiConfig.preopen_dir

    def machine(wasi: Any, real: str, inside: str, *more: Any) -> None:
        preopen(wasi, "/" if inside == "/" else real, inside, *more)

    wasmtime.WasiConfig.preopen_dir = machine


@sabotage("fuel")
def endless_fuel() -> None:
    machine = module("runtime.wasm.machine")

    machine.Instance.give_fuel = lambda instance, limit: instance.store.set_fuel(machine._NO_END)


@sabotage("determinism")
def real_chance() -> None:
    clock = module("runtime.wasm.wasi.clock")

    clock.VirtualClock.read = lambda *_: int.from_bytes(os.urandom(6), "big")


@sabotage("drift-check")
def drift_ignored() -> None:
    promote = module("engine.promote")
    drift = module("workspace.drift")

    promote._refuse_moved = nothing
    promote.judge = lambda changes, *_, **__: {change.path: drift.NotMoved(None) for change in changes}


@sabotage("promotion-race")
def surprises_ignored() -> None:
    exchange = module("workspace.promotion.exchange")

    exchange.surprise = lambda *_: ""


@sabotage("protected-kinds")
def nothing_is_protected() -> None:
    promote = module("engine.promote")

    judged = promote.judge_changes
    promote.judge_changes = lambda *given, **more: replace(judged(*given, **more), classes={})


@sabotage("project-scope")
def scope_ignored() -> None:
    options = module("cli.options").PromoteOptions
    read = options.read

    def everywhere(request: Any) -> Any:
        asked = read(request)
        return replace(asked, policy=replace(asked.policy, system=True))

    options.read = everywhere


@sabotage("promotion-journal")
def nothing_recovered() -> None:
    recover = module("engine.recover")

    recover.recovered = lambda *_, **__: ()


@sabotage("review-complete")
def a_file_is_not_shown() -> None:
    render = module("cli.render.changes")

    gather = render.gather
    render.gather = lambda show, project, changes, *rest, **more: gather(
        show, project, changes.__class__(tuple(each for each in changes if not each.path.endswith("/.dot"))), *rest, **more
    )


@sabotage("review-visible")
def escapes_off() -> None:
    escape = module("workspace.escape")

    escape.escapes = lambda text: [""] * len(text)
    escape.visible = lambda text: text


@sabotage("review-expected")
def expectation_ignored() -> None:
    promote = module("engine.promote")

    promote.refuse_unexpected = nothing


@sabotage("gate")
def everything_allowed() -> None:
    decide = module("policy.decide")

    decide.decide = lambda policy, grants, action, **_: decide.Allow(decide.Reason("sabotage", "everything is allowed"))


@sabotage("policy-layers")
def layers_widen() -> None:
    layers = module("policy.files.layers")

    narrowed, first = layers.narrowed, list[Any]()

    def last_wins(above: Any, layer: Any, **more: Any) -> Any:
        first.append(above)
        return narrowed(first[0], layer, **more)

    layers.narrowed = last_wins


@sabotage("approvals")
def every_seal_is_good() -> None:
    question = module("engine.approvals.question")

    def opened(content: bytes, key: object) -> Any:
        _, digest, decision, by, until, *_ = content.decode().split("\n")
        return question.Answer(digest, question.Decision(decision), by, float(until))

    question.opened = opened


@sabotage("capabilities")
def every_token_is_good() -> None:
    tokens = module("policy.tokens")

    tokens._objection = lambda *_: ""


@sabotage("plans")
def altered_plans_are_read() -> None:
    apply = module("engine.simulation.apply")

    apply._refuse_changed = nothing


@sabotage("ledger-entries")
def nothing_recorded() -> None:
    event, Ledger = module("ledger.event"), module("ledger.writer").Ledger
    record = Ledger.record

    def something_else(ledger: Any, what: Any, **more: Any) -> Any:
        return record(ledger, event.Noted("sabotage", {}) if isinstance(what, event.Intent) else what, **more)

    Ledger.record = something_else


@sabotage("ledger-chain")
def every_chain_is_good() -> None:
    chain = module("ledger.chain")

    chain._misfit = lambda *_: ""


def _exchange_step(name: str, step: Callable[[Any, Any], None]) -> None:
    """Exchange the function that carries out one kind of step of a mount plan."""
    old = getattr(mount_steps, name)
    setattr(mount_steps, name, step)
    for table in (value for value in vars(mount_steps).values() if isinstance(value, dict)):
        for kind, function in table.items():
            if function is old:
                table[kind] = step


def _guard() -> None:
    """Make sure that no sabotage ends processes other than its own: only pid 1 of a namespace may kill everything."""
    kill = os.kill

    def guarded(pid: int, number: int) -> None:
        if pid <= 0 and os.getpid() != 1:
            raise ProcessLookupError(3, "a sabotaged product may not do that")
        kill(pid, number)

    os.kill = guarded


def _spread(wall: str) -> None:
    """Sabotage the zygotes and supervisors that the product starts, too."""
    zygote = module("runtime.process.zygote")
    sandboxed = module("selftest.sandboxed")

    here = os.path.abspath(__file__).removesuffix("/tests/e2e/sabotage.py")
    begin = f"import sys; sys.path.append({here!r}); import tests.e2e.sabotage as s; s.tear_down({wall!r}); "
    zygote._BOOT = zygote._BOOT.replace("from {} import", f"{begin}from {{}} import")
    supervisor = sandboxed.Cloned.supervisor

    def sabotaged(box: Any) -> tuple[str, ...]:
        python, _, _, *words = supervisor(box)
        return (python, "-c", f"{begin}from agent_sandbox.cli.main import program; program()", *words)

    sandboxed.Cloned.supervisor = sabotaged


def tear_down(wall: str) -> None:
    """Tear down a wall in this process, and in those that it starts."""
    _guard()
    if wall != NOTHING:
        SABOTAGES[wall]()


def main() -> None:
    """Run `verify --json` on the sabotaged product. If probes are named, only they run, and `doctor` is not asked for remedies."""
    wall, *probes = sys.argv[1:]
    tear_down(wall)
    _spread(wall)
    command_line = module("cli.main")
    verify = module("cli.commands.verify")

    if probes:
        verify.PROBES = tuple(probe for probe in verify.PROBES if probe.name in probes)
        verify._remedies = lambda results: {}  # it takes longer than the attacks
    os._exit(command_line.main(["--json", "verify"]))


if __name__ == "__main__":
    main()
