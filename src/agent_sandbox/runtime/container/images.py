"""The store of container images: for each image its files, unpacked, and a description.

    images/ID/root          the files, with the ids of the image as root has unpacked it; without root all of them belong to the user
    images/ID/image.json    the description
    images/.new.*           an image that is being made; its maker holds a lock on `lock` in it

An image never changes: a run writes to its own layers above it. Images are made by `engine.images`; here they are only looked up.
"""

from __future__ import annotations

import json
import os

from agent_sandbox._fast.contexts import suppress
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.kernel import elf
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.policy.image_names import canonical_image

if TYPE_CHECKING:
    from collections.abc import Iterator

SHORTEST_ID = 12  # digits that stand for an image
ROOT, DESCRIPTION, NEW = "root", "image.json", ".new."
# How images and kernels call the same kind of machine.
MACHINES = {"amd64": "x86_64", "arm64": "aarch64", "x86_64": "x86_64", "aarch64": "aarch64"}


@dataclass(frozen=True)
class ContainerImage:
    """An image that is unpacked on this machine. `left_out` says what of it was not unpacked, and why."""

    id: str
    names: tuple[str, ...]
    root: str
    machine: str
    env: tuple[tuple[str, str], ...] = ()
    source: str = ""
    created: float = 0.0
    bytes: int = 0
    left_out: tuple[str, ...] = ()

    @property
    def search_path(self) -> str:
        """The directories in which the image looks for programs."""
        return dict(self.env).get("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")

    def program(self, name: str) -> tuple[str, ...]:
        """Return the paths, inside, of a program and its loader; empty if the image has no such program. Links end inside the image."""
        directories = [""] if "/" in name else self.search_path.split(os.pathsep)
        for directory in directories:
            if found := self._resolve(os.path.join(directory, name)):
                path, header = found
                loader = self._resolve(header.loader) if header is not None and header.loader else None
                return (path,) if loader is None else (path, loader[0])
        return ()

    def deepest(self, path: str) -> tuple[str, str]:
        """Split a path into its longest part that is a directory of the image, and the rest. A link ends the first part."""
        parts = path.strip("/").split("/")
        for count in range(len(parts), 0, -1):
            with suppress(OSError):
                os.close(self._open("/".join(parts[:count]), os.O_PATH | os.O_DIRECTORY, sc.RESOLVE_NO_SYMLINKS))
                return "/".join(parts[:count]), "/".join(parts[count:])
        return "", "/".join(parts)

    def _resolve(self, path: str) -> tuple[str, elf.Object | None] | None:
        try:
            fd = self._open(path, os.O_PATH, 0)
        except OSError:
            return None
        try:
            real = os.readlink(f"/proc/self/fd/{fd}")
            return real.removeprefix(self.root), elf.read(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)

    def _open(self, path: str, flags: int, resolve: int) -> int:
        root = os.open(self.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return sc.openat2(root, path, flags, resolve=resolve | sc.RESOLVE_IN_ROOT | sc.RESOLVE_NO_MAGICLINKS)
        finally:
            os.close(root)


class ImageStore:
    """The images of this user, in a directory that need not exist. Safe to use from many threads and processes."""

    def __init__(self, path: str) -> None:
        self.path = os.path.realpath(path)

    def __iter__(self) -> Iterator[ContainerImage]:
        try:
            ids = sorted(os.listdir(self.path))
        except FileNotFoundError:
            return
        for name in ids:
            if not name.startswith(".") and (image := self._read(name)) is not None:
                yield image

    def find(self, name: str) -> ContainerImage | None:
        """Return the image of this id, or the beginning of one, or else of this name; None if it is not here.

        Of two images with a name, the newer one counts. An id comes first: the archive of another image may give itself that as a name.
        """
        wanted, images = canonical_image(name), list(self)
        found = [image for image in images if len(name) >= SHORTEST_ID and image.id.startswith(name)]
        found = found or [image for image in images if wanted in image.names]
        return max(found, key=lambda image: image.created, default=None)

    def _read(self, identifier: str) -> ContainerImage | None:
        """Return an image; None for one whose description cannot be read, which is as good as not there."""
        place = os.path.join(self.path, identifier)
        try:
            with open(os.path.join(place, DESCRIPTION), encoding="utf-8") as file:
                said = json.load(file)
            said |= {"env": tuple(said["env"].items()), "names": tuple(said["names"]), "left_out": tuple(said["left_out"])}
            return ContainerImage(id=identifier, root=os.path.join(place, ROOT), **said)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None


def missing(name: str, why: str = "") -> RuntimeUnavailable:
    """Return the error for an image that is not on this machine."""
    return RuntimeUnavailable(
        f"the image {name!r} is not on this machine{f': {why}' if why else ''}",
        missing=("image",),
        hint=f"agent-sandbox image add {name}, image load FILE, or image from-machine {name}; images are never pulled by a run",
    )
