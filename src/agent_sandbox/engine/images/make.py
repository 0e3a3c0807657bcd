"""Make an image of the store from an archive. The archive is unpacked inside a sandbox, and kept only when everything went well."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.resources import files
from typing import Any

from agent_sandbox.engine.images import unpacker
from agent_sandbox.engine.plan_launch import prepare
from agent_sandbox.engine.retry import on_a_plan_that_holds
from agent_sandbox.errors import SandboxError, WorkspaceError
from agent_sandbox.kernel.ids import FIRST_ID
from agent_sandbox.kernel.mount_plan import Bind, OnDisk, Overlay, SealRoot, quote_target
from agent_sandbox.policy.image_names import canonical_image
from agent_sandbox.policy.model import MIB, Limits, locked
from agent_sandbox.runtime.base import Completed, ExitReason, Launch, PythonCode
from agent_sandbox.runtime.container.images import DESCRIPTION, NEW, ROOT, ContainerImage, ImageStore
from agent_sandbox.runtime.process.runtime import ProcessRuntime
from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.durable import write_atomically
from agent_sandbox.workspace.view.plan import MachineFacts, plan_view

MOST_BYTES = 16 << 30  # of an unpacked image
MOST_SECONDS = 3600.0
ID_DIGITS = 32  # of the archive's digest: the same archive is the same image
_LAYER = quote_target(unpacker.TOP)
_SOURCE = files(unpacker.__package__).joinpath("unpacker.py").read_text(encoding="utf-8")


def make_image(
    store: ImageStore, archive: str, *, names: tuple[str, ...] = (), source: str, most_bytes: int = MOST_BYTES
) -> ContainerImage:
    """Unpack an archive into the store, and return the image. The same image is unpacked once; it gets the new names, too.

    Raises `WorkspaceError` for a file that is not there, or is not the archive of an image, or is too large. Then nothing is left of it.
    """
    wanted = tuple(map(canonical_image, names))
    _check_file(archive)
    with workplace(store) as place:
        said = _unpacked(place, archive, most_bytes)
        config: dict[str, Any] = said["config"]
        with open(archive, "rb") as file:
            identifier = hashlib.file_digest(file, "sha256").hexdigest()[:ID_DIGITS]
        taken = [name for each in _texts(said["names"]) for name in _plain_names(each)]
        os.rename(os.path.join(place, "layers", _LAYER, "upper"), os.path.join(place, ROOT))
        shutil.rmtree(os.path.join(place, "layers"), ignore_errors=True)
        size = _settle(os.path.join(place, ROOT))
        image = ContainerImage(
            identifier,
            wanted or tuple(dict.fromkeys(taken)),
            os.path.join(store.path, identifier, ROOT),
            str(config.get("architecture", "")),
            _environment(config),
            source,
            bytes=size,
            left_out=tuple(f"{count} {what}" for what, count in sorted(said["left_out"].items())),
        )
        with _alone(store):
            present = store.find(identifier)
            if present is not None:
                image = ContainerImage(**{**vars(image), "names": tuple(dict.fromkeys((*present.names, *image.names)))})
                _describe(os.path.join(store.path, identifier), image)
            else:
                _describe(place, image)
                shutil.rmtree(os.path.join(store.path, identifier), ignore_errors=True)  # one whose description is spoilt
                os.rename(place, os.path.join(store.path, identifier))
            _take_names(store, image)  # last: of two images with a name the newer one counts, so that no name is ever lost
            found = store.find(identifier)
    assert found is not None
    return found


def remove_image(store: ImageStore, name: str) -> ContainerImage:
    """Remove an image by its name or id. Raises `WorkspaceError` if it is not there. A run in it keeps the files that it has open."""
    image = store.find(name)
    if image is None:
        raise WorkspaceError(f"there is no image {name!r}", hint="see: agent-sandbox image list")
    going = f"{NEW}{os.urandom(8).hex()}"  # killed from here on, the next maker sweeps it
    with _alone(store), suppress(FileNotFoundError):  # somebody else removes it, too
        os.rename(os.path.join(store.path, image.id), os.path.join(store.path, going))
        _remove(store.path, going)
    return image


@contextmanager
def workplace(store: ImageStore) -> Iterator[str]:
    """Yield a new directory in the store, removed in the end unless it was renamed. First remove those of makers that were killed."""
    os.makedirs(store.path, mode=0o700, exist_ok=True)
    place = os.path.join(store.path, f"{NEW}{os.urandom(8).hex()}")
    with _alone(store):  # nobody sweeps it before it is locked
        _sweep(store)
        os.mkdir(place, 0o700)
        lock = os.open(os.path.join(place, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield place
    finally:
        if os.path.isdir(place):
            _remove(store.path, os.path.basename(place))
        os.close(lock)


@contextmanager
def _alone(store: ImageStore) -> Iterator[None]:
    """Lock the names in the store against other makers, for moments."""
    top = os.open(store.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(top, fcntl.LOCK_EX)
        yield
    finally:
        os.close(top)


def _describe(place: str, image: ContainerImage) -> None:
    """Write the description of an image into its directory."""
    said = {name: value for name, value in vars(image).items() if name not in ("id", "root")}
    said |= {"env": dict(image.env), "created": image.created or time.time()}
    write_atomically(os.path.join(place, DESCRIPTION), json.dumps(said))


def _sweep(store: ImageStore) -> None:
    for name in os.listdir(store.path):
        if not name.startswith(NEW):
            continue
        with suppress(OSError):
            lock = os.open(os.path.join(store.path, name, "lock"), os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(store.path, name)
            finally:
                os.close(lock)


def _remove(store: str, name: str) -> None:
    top = os.open(store, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        beneath.remove_tree(top, name)
    finally:
        os.close(top)


def _unpacked(place: str, archive: str, most_bytes: int) -> dict[str, Any]:
    """Run the unpacker in a sandbox whose layers are in `place`. Return what it says about the image."""
    for name in ("layers", "nothing"):
        os.mkdir(os.path.join(place, name), 0o755 if name == "nothing" else 0o700)
    ready = prepare("python", "", arguments=(), search_path=os.defpath, processes=False)
    layers = OnDisk(os.path.join(place, "layers"))
    policy = locked(limits=Limits(wall_seconds=MOST_SECONDS, memory_bytes=512 * MIB, disk_bytes=most_bytes, output_bytes=8 * MIB))
    runtime = ProcessRuntime()

    def attempt() -> Completed:
        plan = plan_view(policy.files, ready.needs, layers, host=MachineFacts.look(), scratch_bytes=16 * MIB)
        ours = Overlay(os.path.join(place, "nothing"), unpacker.TOP, _LAYER), Bind(os.path.realpath(archive), unpacker.ARCHIVE)
        steps = (*(step for step in plan.steps if not isinstance(step, SealRoot)), *ours, SealRoot())
        root = type(plan)(layers, steps)
        system = os.geteuid() == 0  # the right to give files away, inside
        launch = Launch(PythonCode(_SOURCE), root, "/", {}, policy.limits, policy.requires, processes=False, system=system)
        with runtime.launch(launch) as guest:
            return guest.wait()

    try:
        completed = on_a_plan_that_holds(attempt)
    finally:
        runtime.close()
    if completed.exit.reason is not ExitReason.EXITED or completed.exit.code != 0:
        raise WorkspaceError(f"the image cannot be unpacked: {_why(completed)}", hint="check the archive, and the space on this disk")
    if "output" in completed.exit.limits_hit:
        raise WorkspaceError("the image cannot be unpacked: its configuration is too large", hint="check the archive")
    said: dict[str, Any] = json.loads(completed.stdout)
    if not isinstance(said["config"], dict):
        raise WorkspaceError("the image cannot be unpacked: its configuration is no table", hint="check the archive")
    return said


def _check_file(archive: str) -> None:
    """Raise `WorkspaceError` unless this is a regular file."""
    try:
        regular = stat.S_ISREG(os.stat(archive).st_mode)
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    else:
        why = "" if regular else "is not a file"
    if why:
        raise WorkspaceError(f"the archive {archive!r} {why}", hint="name an archive of podman save or docker save")


def _why(completed: Completed) -> str:
    if completed.exit.reason is not ExitReason.EXITED:
        return f"unpacking ended: {completed.exit.reason.value}"
    if "disk" in completed.exit.limits_hit:
        return "it is too large"
    said = completed.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return "".join(each if each.isprintable() else "?" for each in said)[:400]


def _environment(config: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the variables that the configuration of an image sets. Anything that is no variable is left out."""
    inner = config.get("config")
    listed = _texts(inner.get("Env")) if isinstance(inner, dict) else ()
    pairs = [each.partition("=") for each in listed if "\0" not in each]
    return tuple({name: value for name, equals, value in pairs if equals and name.isascii() and name.isidentifier()}.items())


def _texts(value: object) -> Iterator[str]:
    """Yield the texts in a list of an archive. Anything else, and text that no file system could hold, is left out."""
    for each in value if isinstance(value, list) else ():
        with suppress(UnicodeEncodeError):
            if isinstance(each, str) and os.fsencode(each):
                yield each


def _plain_names(name: str) -> Iterator[str]:
    """Yield a name that an archive gives itself, unless it names a digest: nobody has checked that the archive has it."""
    with suppress(SandboxError):
        if "@" not in (plain := canonical_image(name)):
            yield plain


def _take_names(store: ImageStore, image: ContainerImage) -> None:
    """Take the names of a new image from the images that had them."""
    for other in store:
        if other.id != image.id and (left := tuple(name for name in other.names if name not in image.names)) != other.names:
            _describe(os.path.join(store.path, other.id), ContainerImage(**{**vars(other), "names": left}))


def _settle(root: str) -> int:
    """Give the files of a new image the ids that the image names, as root, and return their size in bytes.

    The guest wrote them with ids of its own. Nothing runs there any more, and only we can reach it. Setuid bits are gone already, and are
    cleared here once more, because from now on the owner may be the machine's root.
    """
    shift = FIRST_ID if os.geteuid() == 0 else 0
    top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    total = 0
    try:
        for _, directories, names, here in os.fwalk(".", dir_fd=top, follow_symlinks=False):
            for name in (*directories, *names):
                status = os.stat(name, dir_fd=here, follow_symlinks=False)
                total += status.st_blocks * 512
                if shift and status.st_uid >= shift:  # a second link to the same file finds it settled
                    os.chown(name, status.st_uid - shift, max(status.st_gid - shift, 0), dir_fd=here, follow_symlinks=False)
                if not stat.S_ISLNK(status.st_mode) and status.st_mode & 0o6000:
                    os.chmod(name, stat.S_IMODE(status.st_mode) & 0o1777, dir_fd=here)
        os.fchown(top, 0 if shift else -1, 0 if shift else -1)
        os.fchmod(top, 0o755)
    finally:
        os.close(top)
    return total
