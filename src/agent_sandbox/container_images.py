"""Container images on this machine: list, add, load, make and remove them. Runs name one with `image=` or `--image`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from agent_sandbox.assembly import here
from agent_sandbox.runtime.container.images import ContainerImage, ImageStore
from agent_sandbox.runtime.container.runtime import ContainerRuntime
from agent_sandbox.runtime.process.runtime import ProcessRuntime
from agent_sandbox.workspace.store import Store

__all__ = ["ContainerImage", "add_image", "image_from_machine", "list_images", "load_image", "remove_image"]

_DIRECTORY = "images"


def _store(state: str | None = None) -> ImageStore:
    return ImageStore(os.path.join(state or here().host.state, _DIRECTORY))


def _open_store() -> ImageStore:
    """Return the store of images, for a new one. Raises `WorkspaceError` if the state directory cannot be used."""
    return _store(Store.open(here().host.state).path)


def runtime_in(state: str, guests: ProcessRuntime) -> ContainerRuntime:
    """Return the container runtime on the images of a state directory. `guests` makes its guests."""
    store = _store(state)

    def fetch(name: str) -> ContainerImage:
        from agent_sandbox.engine.images import container_engines  # a run finds its image in the store, and needs nothing that makes one

        Store.open(state)
        return container_engines.fetch_image(store, name)

    return ContainerRuntime(store, fetch, guests=guests)


def list_images() -> tuple[ContainerImage, ...]:
    """Return the images of this user, newest first."""
    return tuple(sorted(_store(), key=lambda image: -image.created))


def add_image(name: str, *, pull: bool = False, announce: Callable[[str], None] = lambda _: None) -> ContainerImage:
    """Copy an image from podman or docker. With `pull`, they may get it from their registry first.

    Raises `RuntimeUnavailable` if neither has it.
    """
    from agent_sandbox.engine.images import container_engines  # see `runtime_in`

    return container_engines.fetch_image(_open_store(), name, pull=pull, announce=announce)


def load_image(path: str, *, name: str = "") -> ContainerImage:
    """Unpack an image from an archive of `podman save` or `docker save`. Raises `WorkspaceError` for anything else."""
    from agent_sandbox.engine.images import make  # see `runtime_in`

    return make.make_image(_open_store(), path, names=(name,) if name else (), source=f"the archive {os.path.basename(path)}")


def image_from_machine(name: str, packages: Iterable[str] = ("python3",)) -> ContainerImage:
    """Make an image from packages of this machine, and what they depend on. Raises `RuntimeUnavailable` if one is not installed."""
    from agent_sandbox.engine.images import machine_packages  # see `runtime_in`

    return machine_packages.image_from_machine(_open_store(), name, tuple(packages))


def remove_image(name: str) -> ContainerImage:
    """Remove an image by its name or id, and return what it was. Raises `WorkspaceError` if it is not there."""
    from agent_sandbox.engine.images import make  # see `runtime_in`

    return make.remove_image(_store(), name)
