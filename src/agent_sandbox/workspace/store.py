"""The state directory: the place of sandboxes that outlive a command.

    <state>/format                          the version of the format
    <state>/sandboxes/<id>/meta.json        the project of the sandbox
    <state>/sandboxes/<id>/history.json     its layers and snapshots: see `layers.history`
    <state>/sandboxes/<id>/image            the image of its layers, as root: see `layers.image`
    <state>/sandboxes/<id>/layers/          its layers in a directory, rootless or where no image can be made: see `layers`
    <state>/sandboxes/<id>/bases/           the real entries when a layer first covered their path: see `originals`
    <state>/sandboxes/<id>/names            the names in the project when the clone was made: see `clone_inventory`
    <state>/sandboxes/<id>/reads/           the files that watched runs opened: see `read_tracking`
    <state>/sandboxes/<id>/shown.json       the state that a person was last shown: see `review_mark`
    <state>/sandboxes/<id>/place            the filesystem and mount that held the project at the last run: see `sandbox_inventory`
    <state>/promotions/<id>/                promotions to its project, which outlive a reset: see `promotion`
    <state>/locks/<id>                      its lock and holder; apart, because a reset moves the sandbox away while it is locked
    <state>/plans/                          plans of simulations, for an hour: see `saved_plans`
    <state>/experiments/                    attempts of experiments, for an hour: see `experiment_store`
    <state>/checkpoints/                    saved sessions: see `checkpoint_store`
    <state>/timelines/, <state>/detached/   processes that hold sessions and sandboxes: see `server.places`
    <state>/trash/                          trees being removed; leftovers of a crash are swept at the next start

Only `reset` and `prune` remove layers. Other damage is repaired from known facts, or refused. The state directory may lie inside a
project: the view must hide it there.

This version reads and writes format 2, as every version does that stacks layers. A store of format 1, of earlier versions, is refused and
not changed. `tests/workspace/old_store` holds stores of an earlier version, and a test that opens them.

A lock names its holder. The kernel's lock on the open file is authoritative; it ends with the holder, however the holder ends. The text in
the file only tells a refused process who the holder is, so text left by a dead holder never blocks anyone. Only the holder removes a lock
file, so whoever gets a lock checks that its file is still there.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time

from agent_sandbox._fast.contexts import AbstractContextManager, contextmanager, suppress
from agent_sandbox._fast.encoding import as_json, sha256
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.errors import Busy, ForeignStore, PolicyError, WorkspaceError
from agent_sandbox.workspace.durable import explained, sync_directory, write_atomically
from agent_sandbox.workspace.layers import history as history_file
from agent_sandbox.workspace.layers.history import History, Present

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FORMAT = 2
_PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
_FORMAT_TEXT = f"agent-sandbox store {FORMAT}\n"
# Entries that may exist before the store does: its own half-written file; the ledger of a run without a stored sandbox, with its files,
# questions and grants; the digests of modules that the wasm runtime compiled; what was found by searches for secrets; the place of the
# daemon; and its token, if the user keeps it here.
_NOT_OURS_TO_JUDGE = frozenset(
    {
        *("format.new", "wasm", "approvals", "capabilities", "searches", "daemon", "token"),
        *("ledger.jsonl", "ledger.jsonl.new", "ledger.jsonl.keys", "ledger.closed", "ledger.index", "ledger.index-journal"),
    }
)
_WITHOUT_IMAGE = "this sandbox is kept in a directory, not in an image: its disk limit is only watched, and snapshots copy what changed"


@dataclass(frozen=True)
class Store:
    """An open state directory. `leftovers` describes, for a person, trees that an earlier removal left behind."""

    path: str
    clock: Callable[[], float] = time.time
    leftovers: tuple[str, ...] = ()

    @classmethod
    def open(cls, state_dir: str, *, clock: Callable[[], float] = time.time) -> Store:
        """Open the store, create it if missing, and sweep the leftovers of a crash.

        Raises `ForeignStore` for a store of another version or another user, and `WorkspaceError` when it cannot be created or other users
        can write to it.
        """
        path = os.path.abspath(state_dir)
        with explained(f"use the state directory {path!r}"):
            os.makedirs(path, mode=0o700, exist_ok=True)
            _check_owner(path, os.stat(path))
            _check_format(path)
            for part in ("sandboxes", "locks", "trash"):
                os.makedirs(os.path.join(path, part), mode=0o700, exist_ok=True)
        return cls(path, clock, cls(path, clock).sweep())

    def sandbox_for(self, project: str) -> SandboxState:
        """Return the current sandbox of a project directory, given by its canonical path. Nothing is created yet."""
        if not project.startswith("/"):
            raise PolicyError(f"not an absolute path: {project!r}")
        inside = os.path.realpath(self.path)
        if project == inside or project.startswith(inside + "/"):
            raise PolicyError(f"{project!r} lies in the state directory of this program", hint="use a directory outside it")
        return SandboxState(self, project, sandbox_id(project))

    def sweep(self) -> tuple[str, ...]:
        """Empty the trash. Return descriptions of trees that could not be removed; they never prevent a start."""
        leftovers: list[str] = []
        with explained(f"sweep {self.path!r}"):
            trash = os.open(os.path.join(self.path, "trash"), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                for name in sorted(os.listdir(trash)):
                    try:
                        _remove(trash, name)
                    except (WorkspaceError, OSError) as error:
                        leftovers.append(f"{os.path.join(self.path, 'trash', name)}: {error}")
            finally:
                os.close(trash)
        return tuple(leftovers)

    def move_to_trash(self, path: str) -> str | None:
        """Move a directory of the store to the trash in one step. Return its name there; None if there is no such directory."""
        trash, number = os.path.join(self.path, "trash"), 0
        while True:
            name = f"{os.path.basename(path)}.{number}"
            try:
                os.rename(path, os.path.join(trash, name))
            except FileNotFoundError:
                return None
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                number += 1  # an earlier one is still in the trash, perhaps because it cannot be removed
                continue
            sync_directory(os.path.dirname(path))
            return name

    def remove_from_trash(self, name: str) -> None:
        """Remove a tree from the trash. Raises `WorkspaceError` or OSError; the next start tries again."""
        trash = os.open(os.path.join(self.path, "trash"), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _remove(trash, name)
        finally:
            os.close(trash)


@dataclass(frozen=True)
class PreparedSandbox:
    """The state of a sandbox before a run. `notes` describe repairs and weaker guarantees, for a person."""

    present: Present
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class SandboxState:
    """The stored state of one sandbox."""

    store: Store
    project: str
    id: str

    @property
    def path(self) -> str:
        """The directory of the sandbox."""
        return os.path.join(self.store.path, "sandboxes", self.id)

    @property
    def layers(self) -> str:
        """The directory of the layers, if they are not in an image."""
        return os.path.join(self.path, "layers")

    @property
    def image(self) -> str:
        """The image file of the layers, if they are in an image."""
        return os.path.join(self.path, "image")

    @property
    def stacking(self) -> bool:
        """Whether the layers are in an image, where generations can be stacked."""
        return os.path.exists(self.image)

    @property
    def bases(self) -> str:
        """The directory of originals, the real entries that the layers cover. It does not count towards the sandbox's disk limit."""
        return os.path.join(self.path, "bases")

    @property
    def names(self) -> str:
        """The clone inventory file: the names of the project's entries when the clone was made."""
        return os.path.join(self.path, "names")

    @property
    def reads(self) -> str:
        """The directory with the lists of files that watched runs opened."""
        return os.path.join(self.path, "reads")

    @property
    def place(self) -> str:
        """The file that names the filesystem and the mount of the project."""
        return os.path.join(self.path, "place")

    @property
    def promotions(self) -> str:
        """The directory of promotions to the project. It outlives a reset of the sandbox, so that promotions can still be undone."""
        return os.path.join(self.store.path, "promotions", self.id)

    @property
    def over_a_copy(self) -> bool:
        """Whether the layers lie over a copy of the project instead of the real one: see `experiment_store`."""
        return False

    @property
    def exists(self) -> bool:
        """Whether the sandbox has any stored state."""
        return self.stacking or os.path.isdir(self.layers)

    def lock(self, *, wait: bool = False, command: str = "") -> AbstractContextManager[None]:
        """Hold the lock on this sandbox for the duration of a block. A process that is refused the lock sees `command`; see `hold`."""
        holder = Holder(os.getpid(), command, self.store.clock())
        return hold(os.path.join(self.store.path, "locks", self.id), holder, wait=wait)

    def prepare(self, limit_bytes: int | None = None) -> PreparedSandbox:
        """Create missing files; call it with the lock held. `limit_bytes` is the maximum size of a new image.

        Raises `ForeignStore` when the directory belongs to another project or another version, `WorkspaceError` when its history is damaged
        or the disk is full. Never touches existing layers.
        """
        with explained(f"prepare the sandbox of {self.project!r}"):
            existed = self.exists
            os.makedirs(self.path, mode=0o700, exist_ok=True)
            described = self._is_described() or self._meta() is not None
            present = history_file.glance(self.path) or self._begun()
            notes = () if existed else self._make_layers(present, limit_bytes)
            if existed and os.geteuid() == 0 and not self.stacking:
                notes = (_WITHOUT_IMAGE,)
            if not described:
                write_atomically(os.path.join(self.path, "meta.json"), f"{self._description()}{self.store.clock()}}}\n")
                if existed:
                    notes += (f"the description of the sandbox of {self.project!r} was damaged and has been written anew",)
            self._remember_place()
        return PreparedSandbox(present, notes)

    def _remember_place(self) -> None:
        """Record the filesystem of the project, unless it is recorded. Without a record, the sandbox never counts as abandoned."""
        with suppress(OSError):
            filesystem = f"{os.statvfs(self.project).f_fsid:x} "
            try:
                with open(self.place, "rb") as file:
                    if file.read().startswith(filesystem.encode()):
                        return
            except FileNotFoundError:
                pass
            from agent_sandbox.workspace.sandbox_inventory import mount_point  # once per sandbox

            with open(self.place, "wb") as file:
                file.write(f"{filesystem}{os.fsencode(mount_point(self.project)).hex()}\n".encode())

    def _begun(self) -> Present:
        """Write the history of a new sandbox before its layers exist: layers without a history mean that the history was lost."""
        history = self.history()
        history_file.save(self.path, history)
        return Present.of(history)

    def _make_layers(self, present: Present, limit_bytes: int | None) -> tuple[str, ...]:
        self._refuse_lost_layers(present)
        if os.geteuid() == 0:
            from agent_sandbox.workspace.layers import image  # imported here: needed once per sandbox, and to attach an image

            try:
                image.make(self.image, limit_bytes)
                return ()
            except image.NoImage as error:
                os.makedirs(self.layers, mode=0o700, exist_ok=True)
                return (f"{_WITHOUT_IMAGE}: {error.message}",)
        os.makedirs(self.layers, mode=0o700, exist_ok=True)
        return ()

    def history(self) -> History:
        """Return the history; a new one if nothing has run in the sandbox.

        Raises `WorkspaceError` if the history is damaged or lost, or if it speaks of layers that are lost: no changes are not the same.
        """
        history = history_file.load(self.path)
        if history is None and self.exists:
            raise history_file.damaged(self.path, "is gone, and its layers are there")
        if history is not None and not self.exists:
            self._refuse_lost_layers(Present.of(history))
        return history or History()

    def _refuse_lost_layers(self, present: Present) -> None:
        """Raise `WorkspaceError` if something has run in this sandbox, of which there are no layers."""
        if present.used or present.chain:
            raise WorkspaceError(
                f"the layers of the sandbox of {self.project!r} are gone", hint="put them back, or drop it: agent-sandbox reset"
            )

    def _description(self) -> str:
        """Return the text of `meta.json` up to the creation time, which is the only part not known beforehand."""
        # The path is also stored in hexadecimal: JSON cannot hold names that are not UTF-8.
        raw = os.fsencode(self.project)
        known = {"format": FORMAT, "project": raw.decode(errors="replace"), "project_hex": raw.hex()}
        return as_json(known).removesuffix("}") + ',"created":'

    def _is_described(self) -> bool:
        """Return whether `meta.json` is as this version writes it. Every run calls this, so nothing is parsed."""
        try:
            with open(os.path.join(self.path, "meta.json"), "rb") as file:
                return file.read().startswith(self._description().encode())
        except FileNotFoundError:
            return False

    def created(self) -> float | None:
        """Return the creation time in seconds since the epoch; None if there is no valid `meta.json`."""
        meta = self._meta()
        created = meta.get("created") if meta else None
        return float(created) if isinstance(created, int | float) else None

    def reset(self) -> None:
        """Delete everything of this sandbox. Takes the lock itself, so it raises `Busy` during a run.

        The directory is first moved to the trash in one step: whatever happens then, the sandbox is new, and the next start sweeps the
        rest. Raises `WorkspaceError` when something in the trash could not be removed.
        """
        with self.lock(command="reset"), explained(f"reset the sandbox of {self.project!r}"):
            name = self.store.move_to_trash(self.path)
            if name is not None:
                self.store.remove_from_trash(name)

    def _meta(self) -> dict[str, object] | None:
        from json import loads

        try:
            with open(os.path.join(self.path, "meta.json"), "rb") as file:
                meta = loads(file.read())
        except (FileNotFoundError, ValueError):
            return None
        if not isinstance(meta, dict) or "format" not in meta or "project_hex" not in meta:
            return None
        if meta["format"] != FORMAT or meta["project_hex"] != os.fsencode(self.project).hex():
            raise ForeignStore(
                f"{self.path!r} was written by another version of this program or for another project",
                hint="use that version, or move the directory away",
            )
        return meta


def _remove(trash: int, name: str) -> None:
    from agent_sandbox.workspace.beneath import remove_tree  # imported here: usually there is nothing to remove

    remove_tree(trash, name)


def sandbox_id(project: str) -> str:
    """Return a file name for a project. A person recognises it, and no other project has the same."""
    slug = "-".join("".join(each if each in _PLAIN else " " for each in os.path.basename(project)).split()).strip("-.")[:40]
    return f"{slug or 'root'}-{sha256(os.fsencode(project)).hexdigest()[:16]}"


def _check_owner(path: str, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise ForeignStore(
            f"the state directory {path!r} belongs to user {status.st_uid}", hint="point XDG_STATE_HOME to a directory of your own"
        )
    if stat.S_IMODE(status.st_mode) & 0o022:
        raise WorkspaceError(
            f"other users can write to the state directory {path!r}", hint=f"look at what is in it, then: chmod 700 {path}"
        )


def _check_format(path: str) -> None:
    file = os.path.join(path, "format")
    try:
        with open(file, "rb") as opened:
            content = opened.read(256)
    except FileNotFoundError:
        if set(os.listdir(path)) - _NOT_OURS_TO_JUDGE:
            raise ForeignStore(
                f"{path!r} is not empty and is no store of this program", hint="point XDG_STATE_HOME elsewhere, or move the directory away"
            ) from None
        write_atomically(file, _FORMAT_TEXT)
        return
    if content != _FORMAT_TEXT.encode():
        version = content.decode(errors="replace").strip()
        if version == "agent-sandbox store 1":
            raise ForeignStore(
                f"the store in {path!r} is of an earlier version, whose layers this one does not read",
                hint="carry over what you need with that version, then move the directory away: a new store is made at the next run",
            )
        raise ForeignStore(
            f"the store in {path!r} has the format {version!r}; this version writes {_FORMAT_TEXT.strip()!r}",
            hint="use the version that wrote it, or move the directory away to start anew",
        )


@dataclass(frozen=True)
class Holder:
    """The holder of a lock: process id, command, and since when (seconds since the epoch)."""

    pid: int
    command: str
    since: float

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} ({self.command or 'no command given'}), since {since}"


@contextmanager
def hold(path: str, holder: Holder, *, wait: bool, what: str = "this sandbox") -> Iterator[None]:
    """Hold the lock at `path` for the duration of the block. If another process holds it, wait, or without `wait` raise `Busy`.

    `Busy` names the holder. The descriptor is closed on exec. A child forked without exec has a copy; it does not keep the lock after the
    block, but if this process is killed in the block, the lock is held until the child closes it.
    """
    descriptor = _locked(path, wait=wait, what=what)
    try:
        with suppress(OSError):  # on a full disk the lock is held all the same
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, as_json(vars(holder)).encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)
            # Not only closed: on a busy machine a child may still have its copy, and the next command must not find the lock taken.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _locked(path: str, *, wait: bool, what: str) -> int:
    """Return a descriptor with the lock. If the file was removed meanwhile by an earlier holder, lock the new one."""
    while True:
        with explained(f"open the lock {path!r}"):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with explained(f"take the lock {path!r}"):
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                except BlockingIOError:
                    holder = holder_of(descriptor) or "another run"
                    raise Busy(f"{what} is in use by {holder}", hint="wait for it, or end that process") from None
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def holder_of(descriptor: int) -> Holder | None:
    """Read the holder from a lock file; None if that process is dead. For a moment, the file may still name the previous holder."""
    from json import loads  # imported here: needed only when the lock is refused

    try:
        fields = loads(os.pread(descriptor, 1 << 16, 0))
        holder = Holder(int(fields["pid"]), str(fields["command"]), float(fields["since"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return holder if os.path.exists(f"/proc/{holder.pid}") else None
