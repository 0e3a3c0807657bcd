"""Live tries of the whole: a run on a clone of this machine, a run that is kept, the state directory, the interpreters.

Nothing is recorded in the ledger and nothing is left: these are tries, not actions.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress

from agent_sandbox import places, shared
from agent_sandbox.engine.attempts import on_a_plan_that_holds
from agent_sandbox.engine.languages import NATIVE, tools
from agent_sandbox.errors import SandboxError
from agent_sandbox.kernel.mount_plan import InImage, Layers, OnDisk, ThrowAway
from agent_sandbox.kernel.probes import Trial
from agent_sandbox.policy.limits import MIB
from agent_sandbox.policy.model import CLONED_LIMITS, cloned
from agent_sandbox.policy.secrets import default_masks
from agent_sandbox.runtime.base import Argv, Launch
from agent_sandbox.runtime.process.guest_handle import ProcessGuest
from agent_sandbox.runtime.process.probe import trial
from agent_sandbox.runtime.process.runtime import ProcessRuntime
from agent_sandbox.surfaces.quantities import human_size
from agent_sandbox.workspace.layers.image import attach, make
from agent_sandbox.workspace.removal import remove_tree
from agent_sandbox.workspace.store import Store
from agent_sandbox.workspace.view.draft import Host
from agent_sandbox.workspace.view.plan import plan_view

LITTLE_SPACE = 64 * MIB
_SHELL = ("/bin/sh", "-c", "echo works; : > /var/tmp/agent-sandbox-probe")


def throw_away() -> Trial:
    """Launch a shell on a clone of the whole machine, with layers in memory."""
    return _launch(ThrowAway(64 * MIB))


def kept() -> Trial:
    """The same, with layers on the disk of the state directory: not every filesystem can carry them."""
    return _in_a_place_of_its_own(lambda place: _launch(OnDisk(place)))


def image() -> Trial:
    """The same, with layers in an image on that disk."""
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
    """Try something in a directory that is there for it alone: in the trash, so that a crash leaves it to be swept."""
    try:
        store = Store.open(places.state_dir())
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
    state, keys = os.path.realpath(places.state_dir()), os.path.realpath(places.keys_dir())
    policy = cloned(masks=default_masks(homes=places.own_homes(), state_dir=state, keys_dir=keys))
    runtime = ProcessRuntime(single_threaded=True)

    def attempt() -> ProcessGuest:
        plan = plan_view(policy.files, tools(), layers, host=Host.look(), scratch_bytes=16 * MIB)
        return runtime.launch(Launch(Argv(_SHELL), plan, "/", {"PATH": os.defpath}, CLONED_LIMITS, policy.requires))

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
    return Trial(True, f"a shell ran in it in {completed.exit.usage.wall_seconds * 1000:.0f} ms")


def state_directory() -> Trial:
    """Make or open the store, write to it, and see how much room there is."""
    try:
        path = Store.open(places.state_dir()).path
        space = os.statvfs(path)
    except (SandboxError, OSError) as error:
        return Trial(False, str(error))
    free = space.f_bavail * space.f_frsize
    return Trial(free >= LITTLE_SPACE, f"{path}, {human_size(free)} free")


def interpreter(language: str) -> tuple[Trial, str]:
    """Whether there is a program for the language, and the package that has it."""
    if language == "python":
        import sys

        return Trial(True, f"{os.path.realpath(sys.executable)}, version {sys.version.split()[0]}"), "python3"
    known = NATIVE[language]
    search = os.environ.get("PATH", os.defpath)
    found = next((path for command in known.commands if (path := shutil.which(command, path=search))), None)
    return Trial(found is not None, found or f"no {known.commands[0]} in {search}"), known.package


def wasm() -> tuple[Trial, str]:
    """Run a line of Python inside WebAssembly; and what to do where that fails."""
    runtime = shared.wasm()
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
    return Trial(True, f"a line of it ran in {completed.exit.usage.wall_seconds * 1000:.0f} ms"), ""
