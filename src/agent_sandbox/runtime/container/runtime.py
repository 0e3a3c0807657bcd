"""The `container` runtime: a native program on the files of a container image, with the project beside them, as root and rootless.

A container is an image as root, in namespaces of its own, behind a filter. Init builds exactly that for every guest, so this runtime is the
process runtime on another plan: the image is the lowest layer of the root, and the guest has every wall of `process`. No container engine
and no OCI runtime takes part in a run (docs/adr/0039); engines only supply images (`engine.images`).
"""

from __future__ import annotations

import os

from agent_sandbox._fast.values import TYPE_CHECKING, replace
from agent_sandbox.errors import RuntimeUnavailable, SandboxError
from agent_sandbox.kernel.mount_plan import IMAGES, Devices, ImageRoot, Overlay, Proc, quote_target
from agent_sandbox.policy.model import Guarantee, Limits
from agent_sandbox.runtime.base import COMMAND, Argv, Demands, Launch, PythonCode, Script, Support, Traits
from agent_sandbox.runtime.container.images import MACHINES, ImageStore
from agent_sandbox.runtime.process.runtime import GUARANTEES, ProcessRuntime

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent_sandbox.kernel.mount_plan import MountPlan, Step
    from agent_sandbox.runtime.container.images import ContainerImage
    from agent_sandbox.runtime.process.guest_handle import ProcessGuest

# Not PROGRAMS_CONFINED: the rules for programs name files of the machine, and an image has its own.
TRAITS = Traits(
    "container",
    30,
    frozenset({"python", "javascript", "ruby", "bash", COMMAND}),
    GUARANTEES - {Guarantee.PROGRAMS_CONFINED},
    images=True,
)
NO_IMAGE = "no image is named (--image NAME)"
_OF_THE_IMAGE = ("PATH", "HOME")  # variables whose values on the machine mean nothing in an image
_GONE = ("VIRTUAL_ENV", "CONDA_PREFIX", "PYENV_ROOT", "NVM_DIR", "NVM_BIN", "SHELL", "GEM_HOME", "GEM_PATH")


def written_at(image: ContainerImage) -> str:
    """Return the path by which the changes of an image's files are listed: apart from those of the machine, and nowhere on it."""
    return IMAGES + image.root


class ContainerRuntime:
    """Runs programs in images of a store. `fetch` gets an image that is not in it from a container engine of this machine, or raises."""

    traits = TRAITS

    def __init__(self, store: ImageStore, fetch: Callable[[str], ContainerImage], *, guests: ProcessRuntime | None = None) -> None:
        self._store = store
        self._fetch = fetch
        self._guests = guests or ProcessRuntime()

    def absence(self) -> str:
        """Return "": whether an image is there shows at the launch, which names the image."""
        return ""

    def prepare(self, announce: Callable[[str], None]) -> str:
        """Return "": always ready."""
        return ""

    def objection(self, demands: Demands) -> str:
        """Return the reason why this runtime supports no launch with these demands; "" if it does."""
        if not demands.image:
            return NO_IMAGE
        if demands.checkpoints or demands.preload:
            return "it has no interpreter of ours inside, and so no timelines and no preloaded modules"
        return "it cannot watch what is read" if demands.inspect else ""

    @property
    def identity(self) -> dict[str, str]:
        """Raise `RuntimeUnavailable`: native programs are not deterministic."""
        raise RuntimeUnavailable("a container has no deterministic runs", missing=("deterministic",), hint='use runtime="wasm"')

    def image(self, name: str) -> ContainerImage:
        """Return the image of this name, from an engine of this machine if the store lacks it. Raises `RuntimeUnavailable`."""
        image = self._store.find(name) or self._fetch(name)
        if MACHINES.get(image.machine) != os.uname().machine:
            why = f"the image {name!r} is for {image.machine}, and this machine is {os.uname().machine}"
            raise RuntimeUnavailable(why, missing=("image",), hint="use an image for this kind of machine")
        return image

    def probe(self) -> Support:
        """Return the guarantees that a launch enforces, shown by a real one in each image until one works. Never raises."""
        why = "there is no image; agent-sandbox image from-machine python:3.11-slim makes one"
        for image in self._store:
            if not (why := self.trial(image.names[0] if image.names else image.id)):
                support = self._guests.probe()
                return Support("container", support.guarantees & self.traits.guarantees, support.missing)
        return Support("container", frozenset(), {Guarantee.FILES_CONFINED.value: why})

    def trial(self, name: str) -> str:
        """Start a program in an image. Return why that fails; "" if it starts. An image without the program `true` starts, too."""
        from agent_sandbox.runtime.process.probe import trial  # only for a probe

        plan = trial("").root
        steps = (ImageRoot(name, writable=False), *(step for step in plan.steps if isinstance(step, Devices | Proc)))
        try:
            with self.launch(
                Launch(
                    Argv(("true",)), replace(plan, steps=steps), "/", {}, Limits(), frozenset({Guarantee.FILES_CONFINED}), writable=False
                )
            ) as guest:
                guest.wait()
        except SandboxError as error:
            return error.message
        except OSError as error:
            return str(error)
        return ""

    def launch(self, launch: Launch) -> ProcessGuest:
        """Start a run in the image that the plan names. Every required guarantee is in force when this returns, or nothing has run."""
        if lacking := launch.requires - self.traits.guarantees:
            names = tuple(sorted(guarantee.value for guarantee in lacking))
            why = f"the container runtime cannot give: {', '.join(names)}"
            raise RuntimeUnavailable(why, missing=names, hint="see: agent-sandbox doctor")
        if launch.talk is not None or launch.checkpoints or launch.preload or isinstance(launch.program, PythonCode):
            why = "tools, sessions and timelines need our interpreter, and an image brings its own"
            raise RuntimeUnavailable(why, missing=("interpreter",), hint='use runtime="process"')
        step = next((step for step in launch.root.steps if isinstance(step, ImageRoot)), None)
        if step is None:
            raise RuntimeUnavailable(f"the container runtime needs an image: {NO_IMAGE}", missing=("image",), hint="--image NAME")
        image = self.image(step.image)
        return self._guests.launch(
            replace(
                launch,
                root=replace(launch.root, steps=tuple(self._placed(launch.root, step, image))),
                env=environment(image, dict(launch.env)),
                executables=_executables(launch, image),
            )
        )

    def _placed(self, plan: MountPlan, root: ImageRoot, image: ContainerImage) -> list[Step]:
        """Return the steps of a plan with the image as its root, in which every place to mount something exists."""
        stand_ins, places = dict[str, None](), dict[str, None]()
        for step in plan.steps:
            target = "/dev" if isinstance(step, Devices) else "/proc" if isinstance(step, Proc) else getattr(step, "target", "/")
            if target != "/":
                there, rest = image.deepest(target)
                if there:
                    stand_ins[there] = None
                if rest:
                    places[target.strip("/")] = None
        overlay = Overlay(
            image.root,
            "/",
            quote_target(written_at(image)),
            places=tuple(places),
            stand_ins=tuple(stand_ins),
            writable=root.writable,
        )
        return [overlay if step is root else step for step in plan.steps]

    def close(self, *, leaving: bool = False) -> None:
        """End the waiting guests and the zygotes. Running guests go on."""
        self._guests.close(leaving=leaving)


def environment(image: ContainerImage, given: dict[str, str]) -> dict[str, str]:
    """Return the variables of a run in an image: the image's, then those that were given, except those that name places of the machine."""
    own = dict(image.env)
    defaults = {"PATH": image.search_path, "HOME": own.get("HOME", "/root")}
    kept = {name: value for name, value in given.items() if name not in (*_OF_THE_IMAGE, *_GONE)}
    return {**own, **kept, **defaults}


def _executables(launch: Launch, image: ContainerImage) -> tuple[str, ...]:
    """Return the files that a run without processes may execute: its interpreter, and the loader of that. Raises `RuntimeUnavailable`."""
    if launch.processes or not isinstance(launch.program, Script):
        return ()
    command = launch.program.words[0]
    found = image.program(command)
    if not found:
        raise RuntimeUnavailable(
            f"the image has no {command} in {image.search_path}", missing=(command,), hint="use an image with the interpreter of the code"
        )
    return found
