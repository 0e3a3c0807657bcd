"""`doctor`: test each feature of this machine that a sandbox needs, and print a remedy for each that fails."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from agent_sandbox._fast.values import replace
from agent_sandbox.assembly import here
from agent_sandbox.cli.remedies import OWN_PROC, CheckRow, DoctorResult, Situation, idmapping_remedy, remedy
from agent_sandbox.cli.render.messages import human_size
from agent_sandbox.container_images import list_images
from agent_sandbox.engine.images.container_engines import ENGINES
from agent_sandbox.engine.plan_launch import NATIVE, tools
from agent_sandbox.engine.retry import on_a_plan_that_holds
from agent_sandbox.errors import SandboxError, pip_install
from agent_sandbox.kernel import landlock, probes, setup_helper
from agent_sandbox.kernel.mount_plan import InImage, Layers, OnDisk, ThrowAway
from agent_sandbox.kernel.probes import Trial
from agent_sandbox.policy.action import LANGUAGES
from agent_sandbox.policy.model import CLONED_LIMITS, MIB, cloned
from agent_sandbox.policy.secrets import default_masks
from agent_sandbox.runtime import network_packages
from agent_sandbox.runtime.base import Argv, Launch
from agent_sandbox.runtime.gvisor.probe import try_platforms
from agent_sandbox.runtime.gvisor.runsc import REMEDY
from agent_sandbox.runtime.gvisor.runtime import GvisorRuntime
from agent_sandbox.runtime.process.guest_handle import ProcessGuest
from agent_sandbox.runtime.process.probe import trial, why_no_network
from agent_sandbox.runtime.process.runtime import ProcessRuntime
from agent_sandbox.workspace.beneath import remove_tree
from agent_sandbox.workspace.layers.image import attach, make
from agent_sandbox.workspace.store import Store
from agent_sandbox.workspace.view.plan import MachineFacts, plan_view

LITTLE_SPACE = 64 * MIB
_WRITTEN = "/var/tmp/agent-sandbox-probe."  # and a name that nobody else can have taken


def throw_away() -> Trial:
    """Test a run on a clone of the whole machine, with its layers in memory."""
    return _launch(ThrowAway(64 * MIB))


def kept() -> Trial:
    """Test a run with its layers on the disk of the state directory. Not every filesystem supports such layers."""
    return _in_a_place_of_its_own(lambda place: _launch(OnDisk(place)))


def image() -> Trial:
    """Test a run with its layers in an image file on the disk of the state directory."""
    return _in_a_place_of_its_own(_in_an_image)


def _in_an_image(place: str) -> Trial:
    path = os.path.join(place, "image")
    make(path, 64 * MIB)
    attached = attach(path)
    try:
        return _launch(InImage(path, attached.loop.device, attached.identity, "1", (), 64 * MIB))
    finally:
        attached.close()


def _in_a_place_of_its_own(attempt: Callable[[str], Trial]) -> Trial:
    """Call `attempt` with a new directory. It is made in the trash, so that it is removed even after a crash."""
    try:
        store = Store.open(here().host.state)
        name = f"probe.{os.getpid()}"
        trash = os.open(os.path.join(store.path, "trash"), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (SandboxError, OSError) as error:
        return Trial(False, str(error))
    try:
        os.mkdir(name, 0o700, dir_fd=trash)
        return attempt(os.path.join(store.path, "trash", name))
    except (SandboxError, OSError) as error:
        return Trial(False, error.message if isinstance(error, SandboxError) else str(error))
    finally:
        with suppress(SandboxError, OSError):
            remove_tree(trash, name)
        os.close(trash)


def _launch(layers: Layers) -> Trial:
    state, keys = os.path.realpath(here().host.state), os.path.realpath(here().host.keys)
    policy = cloned(masks=default_masks(homes=here().host.homes, state_dirs=(state,), keys_dirs=(keys,)))
    runtime = ProcessRuntime(single_threaded=True)
    written = _WRITTEN + os.urandom(8).hex()
    program = Argv(("/bin/sh", "-c", f"echo works; : > {written}"))

    def attempt() -> ProcessGuest:
        plan = plan_view(policy.files, tools(), layers, host=MachineFacts.look(), scratch_bytes=16 * MIB)
        return runtime.launch(Launch(program, plan, "/", {"PATH": os.defpath}, CLONED_LIMITS, policy.requires))

    try:
        with on_a_plan_that_holds(attempt) as guest:
            completed = guest.wait()
    except (SandboxError, OSError) as error:
        return Trial(False, error.message if isinstance(error, SandboxError) else str(error))
    finally:
        runtime.close()
    if completed.exit.code != 0 or completed.stdout != b"works\n":
        said = completed.stderr.decode(errors="replace").strip() or guest.refused
        return Trial(False, f"a shell in it ended with {completed.exit.code}: {said}")
    with suppress(FileNotFoundError):
        os.unlink(written)
        return Trial(False, "a file that a shell wrote in it was on the real disk")
    return Trial(True, f"a shell ran in it in {completed.exit.usage.wall_seconds * 1000:.0f} ms")


def state_directory() -> Trial:
    """Test that the state directory can be used, and report its free space."""
    try:
        path = Store.open(here().host.state).path
        space = os.statvfs(path)
    except (SandboxError, OSError) as error:
        return Trial(False, str(error))
    free = space.f_bavail * space.f_frsize
    return Trial(free >= LITTLE_SPACE, f"{path}, {human_size(free)} free")


def interpreter(language: str) -> tuple[Trial, str]:
    """Look for the interpreter of a language. Returns the outcome, and the package to install if it is missing."""
    if language == "python":
        return Trial(True, f"{os.path.realpath(sys.executable)}, version {sys.version.split()[0]}"), "python3"
    known = NATIVE[language]
    search = os.environ.get("PATH", os.defpath)
    program = next((path for command in known.commands if (path := shutil.which(command, path=search))), None)
    return Trial(program is not None, program or f"no {known.commands[0]} in {search}"), known.package


def network() -> str:
    """Test a guest with a network permission. Returns why there can be none; empty if there can."""
    runtime = ProcessRuntime(single_threaded=True)
    try:
        return why_no_network(runtime)
    finally:
        runtime.close()


def wasm() -> tuple[Trial, str]:
    """Test a line of Python inside WebAssembly. Returns the outcome, and a remedy if it failed."""
    runtime = here().wasm()
    try:
        with runtime.launch(trial("print('works')")) as guest:
            completed = guest.wait()
    except SandboxError as error:
        return Trial(False, error.message), error.hint
    except OSError as error:
        return Trial(False, str(error)), "run: agent-sandbox setup"
    finally:
        runtime.close()
    if completed.stdout != b"works\n":
        said = completed.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return Trial(False, f"its interpreter ended with {completed.exit.code}: {said}"), "please report this"
    counting = "" if runtime.ready_to_count else "; for deterministic runs and limits on fuel, run: agent-sandbox setup"
    if runtime.compilation is not None:
        counting = f"; {runtime.standing}"
    return Trial(True, f"a line of it ran in {completed.exit.usage.wall_seconds * 1000:.0f} ms{counting}"), ""


def gvisor() -> CheckRow:
    """Test real programs on a kernel in user space, on each of its platforms."""
    gives = "a kernel in user space between a program and this machine's"
    runtime = GvisorRuntime()
    try:
        trials = try_platforms(runtime)
        version = runtime.program().version
    except SandboxError as error:
        return CheckRow("gvisor", "missing", gives, error.message, error.hint, False)
    finally:
        runtime.close()
    said = "; ".join(f"{each.platform}: {each.why or f'ls ran inside in {each.seconds * 1000:.0f} ms'}" for each in trials)
    if not any(not each.why for each in trials):
        cure = REMEDY if probes.user_namespace().worked else ""  # no runsc starts without one, and a row above says what to do
        return CheckRow("gvisor", "missing", gives, f"runsc {version}: {said}", cure, False)
    return CheckRow("gvisor", "ok", gives, f"runsc {version}: {said}", "", False)


_FULL_LANDLOCK = 6  # the first ABI with everything that the rules use


def doctor() -> DoctorResult:
    """Run all checks of this machine, and return the result of `doctor`."""
    situation = Situation.look()
    return DoctorResult.of(examine(situation), situation.name)


def examine(here: Situation) -> list[CheckRow]:
    """Run all checks of this machine, and return one row for each."""
    cure = remedy(here, namespaces_work=probes.user_namespace().worked)
    tries: list[tuple[str, Callable[[], Trial], str, str]] = [
        ("user namespaces", probes.user_namespace, "rights of its own, none over the machine", cure),
        ("namespaces", probes.own_namespaces, "own processes, no network", cure),
        ("mount copies", probes.mount_api, "a view made of the machine's own mounts", cure),
        ("overlay", probes.overlay, "every write is captured", cure or "load the module: modprobe overlay"),
        ("own /proc", probes.own_proc, "sees no process but its own", cure),
        ("seccomp", probes.system_call_filter, "few ways into the kernel", "needs CONFIG_SECCOMP_FILTER, on x86_64 or aarch64"),
        ("pidfd", probes.process_handles, "nothing outlives its supervisor", "Linux 5.3 or later is needed"),
        ("openat2", probes.safe_opening, "opens a guest's files without following links out of them", "Linux 5.6 or later is needed"),
        ("a run", throw_away, "all of it together, on a clone of this machine", cure),
        ("state directory", state_directory, "sandboxes that outlive a command", "point XDG_STATE_HOME to a directory of your own"),
        ("a kept run", kept, "layers on that directory's disk", "point XDG_STATE_HOME to a local disk (ext4, xfs, btrfs)"),
    ]
    if here.root:
        tries.insert(5, ("idmapped mounts", probes.idmapped_root, "never the machine's root", idmapping_remedy(here)))
    rows = [_required(name, try_out(), gives, what_to_do) for name, try_out, gives, what_to_do in tries]
    if next(row for row in rows if row.name == "a run").status == "ok":
        rows = [_shared_proc(row) if row.name == "own /proc" else row for row in rows]
    else:  # a kept run fails for the same reason
        rows = [replace(row, remedy=cure) if row.name == "a kept run" and cure and row.status != "ok" else row for row in rows]
    images = [_images(here)] if here.root else []
    interpreters = (_interpreter(language) for language in LANGUAGES)
    return [
        *rows,
        *images,
        _landlock(),
        _control_groups(),
        _socket_buffers(),
        _setup_helper(),
        _network(),
        *interpreters,
        _wasm(),
        _container(),
        gvisor(),
        _microvm(),
    ]


def _setup_helper() -> CheckRow:
    """Return the row about the compiled helper, which no wall depends on."""
    gives = "a quarter to a third less processor time for a fresh sandbox"
    trial = probes.attempt(lambda: "it is compiled, and fits" if setup_helper.load() else "it is not compiled")
    if trial.said.startswith("it is compiled"):
        return CheckRow("setup helper", "ok", gives, trial.said, "", False)
    remedy = "to have it: install a C compiler (apt-get install gcc libc6-dev), then this program again"
    return CheckRow("setup helper", "weaker", gives, f"{trial.said}; sandboxes are the same without it", remedy, False)


def _container() -> CheckRow:
    """Return the row about the container runtime: a program is started in an image, if there is one."""
    gives, images = "programs of an image, beside the project", list_images()
    if not images:
        engines = ", ".join(filter(shutil.which, ENGINES)) or "neither podman nor docker is installed"
        remedy = "agent-sandbox image from-machine python:3.11-slim, or image add NAME (apt-get install podman)"
        return CheckRow("container", "weaker", gives, f"no image yet; engines: {engines}", remedy, False)
    name = images[0].names[0] if images[0].names else images[0].id
    runtime = here().container(ProcessRuntime(single_threaded=True))
    try:
        began = time.monotonic()
        why = runtime.trial(name)
        took = time.monotonic() - began
    finally:
        runtime.close()
    if why:
        return CheckRow("container", "weaker", gives, why, "agent-sandbox image remove, and make it again", False)
    return CheckRow("container", "ok", gives, f"a program started in {name} in {took * 1000:.0f} ms", "", False)


def _required(name: str, trial: Trial, gives: str, what_to_do: str) -> CheckRow:
    return CheckRow(name, "ok" if trial.worked else "missing", gives, trial.said, "" if trial.worked else what_to_do)


def _shared_proc(row: CheckRow) -> CheckRow:
    """Return the row about /proc of a machine on which runs work: without a /proc of their own, they share the one around them."""
    return row if row.status == "ok" else replace(row, status="weaker", remedy=OWN_PROC, required=False)


def _images(here: Situation) -> CheckRow:
    trial = image()
    gives = "a hard disk limit for a kept sandbox, and snapshots at no cost"
    if trial.worked:
        return CheckRow("images", "ok", gives, trial.said, "", False)
    remedy = "kept sandboxes are directories: their limit is watched, snapshots are copies. "
    remedy += "Loop devices are not to be had in this container" if here.container else "Install e2fsprogs, and: modprobe loop"
    return CheckRow("images", "weaker", gives, trial.said, remedy, False)


def _landlock() -> CheckRow:
    trial = probes.landlock_rules()
    gives = "a second wall for devices, writes and signals"
    if trial.worked and landlock.abi() >= _FULL_LANDLOCK:
        return CheckRow("Landlock", "ok", gives, trial.said, "", False)
    cure = "Linux 6.12 has all of it; where it is switched off, put lsm=landlock,… on the kernel's command line. The view stays the wall"
    return CheckRow("Landlock", "weaker", gives, trial.said, cure, False)


def _control_groups() -> CheckRow:
    enforced, missing = probes.control_group()
    gives = "limits that many processes together cannot outrun"
    enforcement = "; ".join(
        [*(f"{name} enforced" for name in sorted(enforced)), *(f"{name}: {why}" for name, why in sorted(missing.items()))]
    )
    if not missing:
        return CheckRow("control groups", "ok", gives, enforcement, "", False)
    what_to_do = "limits are watched instead; for hard ones run as root, or under: systemd-run --user --scope -p Delegate=yes"
    return CheckRow("control groups", "weaker", gives, enforcement, what_to_do, False)


def _socket_buffers() -> CheckRow:
    trial = probes.socket_buffers()
    gives = "data that waits in sockets counts as memory, also where no control group counts it"
    if trial.worked:
        return CheckRow("socket buffers", "ok", gives, trial.said, "", False)
    what_to_do = "load the modules: modprobe -a tcp_diag udp_diag unix_diag. Without them only a control group bounds socket buffers"
    return CheckRow("socket buffers", "weaker", gives, trial.said, what_to_do, False)


def _network() -> CheckRow:
    gives = "hosts that you allow, through one door"
    why = network()
    if lacking := network_packages.missing(network_packages.NEEDED):
        return CheckRow("network", "missing", gives, why, f"install them: {pip_install(' '.join(lacking))}", False)
    if why:
        return CheckRow("network", "missing", gives, why, "please report this, if the row `a run` is ok", False)
    if slower := network_packages.missing(network_packages.FASTER):
        said = f"a guest found its door; without {', '.join(slower)} the search of what leaves is slower"
        return CheckRow("network", "weaker", gives, said, f"where there is one for this platform: {pip_install(' '.join(slower))}", False)
    return CheckRow("network", "ok", gives, "a guest found its door, and no other way", "", False)


def _interpreter(language: str) -> CheckRow:
    trial, package = interpreter(language)
    return CheckRow(
        language,
        "ok" if trial.worked else "missing",
        f"{language} code",
        trial.said,
        "" if trial.worked else f"install it: apt-get install {package}",
        language in ("python", "bash"),
    )


def _wasm() -> CheckRow:
    trial, what_to_do = wasm()
    return CheckRow("wasm", "ok" if trial.worked else "missing", "Python and JavaScript inside WebAssembly", trial.said, what_to_do, False)


def _microvm() -> CheckRow:
    gives = "a kernel of its own, in a virtual machine"
    runtime = here().microvm()
    try:
        recipe = runtime.recipe()
        if runtime.template(recipe) is None:
            return CheckRow("microvm", "missing", gives, "no machine has been made yet", "run: agent-sandbox setup microvm", False)
        began = time.monotonic()
        support = runtime.probe()
        if not support.available:
            return CheckRow("microvm", "missing", gives, next(iter(support.missing.values())), "please report this", False)
    except SandboxError as error:
        return CheckRow("microvm", "missing", gives, error.message, error.hint, False)
    finally:
        runtime.close()
    said = (
        f"a machine with Linux {recipe.kernel.version} ran a line of Python; start to end, with its check, {time.monotonic() - began:.1f} s"
    )
    return CheckRow("microvm", "ok", gives, f"{said}; its processor is emulated, so programs are slow", "", False)
