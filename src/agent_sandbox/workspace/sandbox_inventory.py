"""All sandboxes of a store: which there are, whether their projects still exist, and how one is removed.

A project is *gone* only if its path is missing on the very filesystem and mount where the project was at the last run. If another
filesystem is there now, a disk may not be mounted; then the project is *unreachable*, and so is one that cannot be looked at, or of which
nothing was recorded. A project that was moved or renamed is gone, too: nobody can tell where it went.

Removing a sandbox takes its lock, moves it to the trash in one step, and then deletes it. After a kill, the next start empties the trash.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from enum import StrEnum
from json import loads

from agent_sandbox._fast.values import dataclass
from agent_sandbox.errors import Busy
from agent_sandbox.kernel import mountinfo, usage
from agent_sandbox.workspace.durable import explained
from agent_sandbox.workspace.layers import history, image
from agent_sandbox.workspace.store import SandboxState, Store, holder_of


class Whereabouts(StrEnum):
    """Whether the project of a sandbox exists."""

    THERE = "there"
    GONE = "gone"
    UNREACHABLE = "unreachable"
    UNKNOWN = "unknown"  # the sandbox does not say which project it is of


@dataclass(frozen=True)
class KnownSandbox:
    """A sandbox of the store. Its project is empty if it is not known. `finished` is false if a crash cut its creation off."""

    state: SandboxState
    project: Whereabouts
    created: float | None
    last_used: float
    size: int
    finished: bool
    in_use: str  # by whom; empty if nobody uses it


def mount_point(path: str) -> str:
    """Return the mount point of the filesystem at a path; empty if it cannot be found."""
    try:
        return mountinfo.containing(mountinfo.visible(mountinfo.read()), path).target
    except (LookupError, OSError):
        return ""


def sandboxes(store: Store) -> Iterator[KnownSandbox]:
    """Yield the sandboxes of a store by name. Takes no lock: any of them may change at any moment."""
    place = os.path.join(store.path, "sandboxes")
    with explained(f"list {place!r}"):
        names = sorted(os.listdir(place))
    for name in names:
        if (known := look_at(store, name)) is not None:
            yield known


def look_at(store: Store, name: str) -> KnownSandbox | None:
    """Return what is known of one sandbox; None if there is none of this name."""
    path = os.path.join(store.path, "sandboxes", name)
    if not os.path.isdir(path) or os.path.islink(path):
        return None
    project, created = _description(path)
    state = SandboxState(store, project, name)
    size = _size(path) + _size(state.promotions)
    return KnownSandbox(state, whereabouts(state), created, _last_used(state), size, _is_finished(state), in_use_by(state))


def _is_finished(state: SandboxState) -> bool:
    """Return whether a sandbox has layers, or had some: a history that is damaged or in use says that they are missing.

    Of a sandbox that cannot be looked into, nobody knows what it holds, so it counts as finished.
    """
    try:
        if state.exists or not os.listdir(state.path):
            return state.exists
        present = history.glance(state.path)
    except OSError:
        return True
    return present.used or bool(present.chain) if present is not None else os.path.exists(os.path.join(state.path, "history.json"))


def _description(path: str) -> tuple[str, float | None]:
    """Return the project in the description of a sandbox, and when it was created. Empty if there is no valid description."""
    try:
        with open(os.path.join(path, "meta.json"), "rb") as file:
            meta = loads(file.read())
        project, created = os.fsdecode(bytes.fromhex(meta["project_hex"])), meta.get("created")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "", None
    return project if project.startswith("/") else "", float(created) if isinstance(created, int | float) else None


def whereabouts(state: SandboxState) -> Whereabouts:
    """Return whether the project of a sandbox exists."""
    if not state.project:
        return Whereabouts.UNKNOWN
    try:
        if os.path.isdir(state.project):
            return Whereabouts.THERE
        os.lstat(state.project)
        return Whereabouts.UNREACHABLE  # something else is there now, or a link that leads nowhere
    except (FileNotFoundError, NotADirectoryError):
        return Whereabouts.GONE if _held_by_what_is_there(state) else Whereabouts.UNREACHABLE
    except OSError:
        return Whereabouts.UNREACHABLE


def _held_by_what_is_there(state: SandboxState) -> bool:
    """Return whether the filesystem and mount that held the project are still where they were."""
    above = os.path.dirname(state.project)
    while above != "/" and not os.path.isdir(above):
        above = os.path.dirname(above)
    try:
        with open(state.place, encoding="ascii") as file:
            filesystem, _, target = file.read().strip().partition(" ")
        return (
            int(filesystem, 16) != 0
            and os.statvfs(above).f_fsid == int(filesystem, 16)
            and os.fsdecode(bytes.fromhex(target)) == mount_point(above) != ""
        )
    except (OSError, ValueError):
        return False


def _last_used(state: SandboxState) -> float:
    """Return when something last ran in a sandbox, or its history changed."""
    times = [os.lstat(state.path).st_mtime] if not os.path.exists(os.path.join(state.path, "history.json")) else []
    places = [os.path.join(state.path, "history.json"), *_entries(state.bases)]
    for place in places:
        with suppress(OSError):
            times.append(os.lstat(place).st_mtime)
    return max(times, default=0.0)


def _entries(directory: str) -> list[str]:
    try:
        return [os.path.join(directory, name) for name in os.listdir(directory)]
    except OSError:
        return []


def _size(path: str) -> int:
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        return usage.disk_bytes(directory)
    finally:
        os.close(directory)


def in_use_by(state: SandboxState) -> str:
    """Return who holds the lock of a sandbox; empty if nobody does. Holds a shared lock for a moment."""
    try:
        descriptor = os.open(os.path.join(state.store.path, "locks", state.id), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return ""
    except BlockingIOError:
        return str(holder_of(descriptor) or "another process")
    finally:
        os.close(descriptor)


def remove(known: KnownSandbox) -> bool:
    """Remove a sandbox, unless it has been used since it was looked at, or its project is no longer gone. Return whether it was removed.

    With a project that is gone, its promotions are removed too: nothing can be undone there. Raises `Busy` if it is in use, and
    `WorkspaceError` or OSError if it cannot be removed. A kill leaves the sandbox as it was, or trees in the trash.
    """
    state, store = known.state, known.state.store
    names: list[str | None] = []
    with state.lock(command="prune"):
        now = look_at(store, state.id)
        if now is None or now.last_used != known.last_used or now.project != known.project:
            return False
        with explained(f"remove the sandbox {state.id!r}"):
            if known.project is Whereabouts.GONE:  # first: after a kill the next prune finds the sandbox, and with it the rest
                names.append(store.move_to_trash(state.promotions))
            names.append(store.move_to_trash(state.path))
            if not os.path.exists(state.promotions):
                os.unlink(os.path.join(store.path, "locks", state.id))
    for name in names:
        if name is not None:
            store.remove_from_trash(name)
    return True


def remove_unused_locks(store: Store) -> int:
    """Remove the lock files of sandboxes that no longer exist. Return how many. Those in use stay."""
    removed = 0
    for path in _entries(os.path.join(store.path, "locks")):
        state = SandboxState(store, "", os.path.basename(path))
        if os.path.exists(state.path) or os.path.exists(state.promotions):
            continue
        with suppress(Busy, OSError), state.lock(command="prune"):
            if not os.path.exists(state.path) and not os.path.exists(state.promotions):
                os.unlink(path)
                removed += 1
    return removed


def return_unused_blocks(store: Store) -> int:
    """Return disk blocks to the disk that killed runs left reserved in images. Return how many bytes. Images in use are left alone."""
    returned = 0
    for name in sorted(os.listdir(os.path.join(store.path, "sandboxes"))):
        state = SandboxState(store, "", name)
        if not state.stacking:
            continue
        with suppress(Busy, OSError), state.lock(command="prune"):
            before = os.stat(state.image).st_blocks
            image.rest(state.image)
            returned += max(0, before - os.stat(state.image).st_blocks) * 512
    return returned
