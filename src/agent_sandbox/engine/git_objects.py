"""Read the git objects that a sandbox has made, check them, and write them to a real repository.

A parser of packs is easy to attack, so the host unpacks nothing that a guest wrote. A sandboxed program without files, network or children
unpacks the objects. The host then computes the name of each object, checks its syntax, and follows every reference. Missing and malformed
objects are refused. Objects are written before any reference to them: if the process is killed in between, the repository has unused
objects, which git removes in time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from heapq import heappop, heappush

from agent_sandbox._fast.values import TYPE_CHECKING, replace
from agent_sandbox.errors import LaunchFailed, WorkspaceError
from agent_sandbox.policy.model import MIB, Limits
from agent_sandbox.runtime.base import ExitReason, PythonCode, Runtime
from agent_sandbox.workspace.changes import Change, Contents
from agent_sandbox.workspace.git import packs
from agent_sandbox.workspace.git.objects import WIDTHS, Commit, ObjectFiles, as_loose, as_pack, check, hash_name, read_commit, tree_entries
from agent_sandbox.workspace.git.packs import Damaged

if TYPE_CHECKING:
    from typing import IO

_MOST_READ = 1 << 30  # bytes of new packs and objects
_MOST_WRITTEN = 2 << 30  # bytes of what they hold
_LIMITS = Limits(wall_seconds=600, cpu_seconds=600, memory_bytes=4096 * MIB, output_bytes=None, disk_bytes=16 * MIB)
_LOOSE_LIMIT = 100  # objects: git itself makes a pack of more
_PIECE = 1 << 20
_MOST_COMMITS = 20_000  # that are looked at for one reference

RuntimeOf = Callable[[], Runtime]


class GuestObjects:
    """The checked new objects of a sandbox, together with the objects of the real repository. A context manager."""

    def __init__(self, real: ObjectFiles, algorithm: str) -> None:
        import tempfile  # slow, and few changes are commits

        self.real, self.algorithm, self.width = real, algorithm, WIDTHS[algorithm]
        self._spool = tempfile.TemporaryFile()  # noqa: SIM115
        self._places: dict[str, tuple[str, int, int]] = {}
        self._trees: dict[str, dict[str, tuple[str, str]]] = {}

    def __enter__(self) -> GuestObjects:
        return self

    def __exit__(self, *ended: object) -> None:
        self._spool.close()
        self.real.__exit__(None, None, None)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __len__(self) -> int:
        return len(self._places)

    def fill(
        self, wanted: Iterable[str], optional: Iterable[str], files: list[tuple[str, Change]], contents: Contents, runtime: RuntimeOf
    ) -> set[str]:
        """Read the objects named in `wanted` and `optional`, and all objects that they need, from the sandbox's `files`.

        Returns the names in `optional` that cannot be used, because an object that they need is missing. Raises `Damaged` if that happens
        to a name in `wanted`, or if an object is malformed.
        """
        needed, extra = ({name for name in names if not self.real.has(name)} for names in (wanted, optional))
        if not needed and not extra:
            return set()
        for kind, content in _unpacked(sorted(needed | extra), files, contents, self.real, self.width, runtime):
            self._take(kind, content)
        reached = self._needed_by(needed, set())
        missing: set[str] = set()
        for name in extra:
            try:
                reached |= self._needed_by({name}, reached)
            except Damaged:
                missing.add(name)
        self._places = {name: place for name, place in self._places.items() if name in reached}
        return missing

    def _take(self, kind: str, content: bytes) -> None:
        name = hash_name(kind, content, self.algorithm)
        check(kind, content, self.width)
        self._places[name] = kind, self._spool.seek(0, os.SEEK_END), len(content)
        self._spool.write(content)

    def _needed_by(self, names: Iterable[str], known: set[str]) -> set[str]:
        """Return these new objects and all new ones that they need, without those in `known`.

        Raises `Damaged` if one is neither new nor in the real repository.
        """
        reached: set[str] = set()
        todo = list(names)
        while todo:
            name = todo.pop()
            if name in known or name in reached or self.real.has(name):
                continue
            if name not in self._places:
                raise Damaged(f"the object {name} is missing")
            reached.add(name)
            todo += check(*self._own(name), self.width)
        return reached

    def _own(self, name: str) -> tuple[str, bytes]:
        kind, at, size = self._places[name]
        self._spool.seek(at)
        return kind, self._spool.read(size)

    def read(self, name: str) -> tuple[str, bytes]:
        """Return the kind and the content of an object, new or real. Raises `Damaged` if it is missing."""
        found = self._own(name) if name in self._places else self.real.read(name)
        if found is None:
            raise Damaged(f"the object {name} is missing")
        return found

    def commit(self, name: str) -> Commit | None:
        """Return the commit of this name, or the commit that the tag of this name points to; None for another kind of object."""
        kind, content = self.read(self._behind_tags(name))
        return read_commit(content, self.width) if kind == "commit" else None

    def tree(self, name: str) -> dict[str, tuple[str, str]]:
        """Return the entries of a tree object by file name: the mode and the object name of each."""
        if name not in self._trees:
            kind, content = self.read(name)
            if kind != "tree":
                raise Damaged(f"the object {name} is no tree")
            self._trees[name] = {entry: (mode, target) for mode, entry, target in tree_entries(content, self.width)}
        return self._trees[name]

    def size(self, name: str) -> int:
        """Return the size of an object's content."""
        return self._places[name][2] if name in self._places else len(self.read(name)[1])

    def commits_after(self, tip: str, olds: Iterable[str]) -> list[tuple[str, Commit]]:
        """Return the commits that `git log tip --not olds` would list, the newest first.

        Commits are visited by time, as in git, until only ancestors of `olds` are left. The walk also ends after `_MOST_COMMITS` commits,
        and where the history of a shallow clone ends.
        """
        found: dict[str, Commit | None] = {}
        old: set[str] = set()
        waiting: set[str] = set()  # of the queue, those that lead to no old commit as far as is known
        queue: list[tuple[int, str]] = []

        def meet(name: str, is_old: bool) -> None:
            if is_old:
                old.add(name)
                waiting.discard(name)
            elif name not in found:
                waiting.add(name)
            if name not in found:
                try:
                    found[name] = self.commit(name)
                except Damaged:
                    found[name] = None
                heappush(queue, (-(each.time if (each := found[name]) else 0), name))

        tip = self._behind_tags(tip)
        certain = self._new_before(tip)
        meet(tip, is_old=False)
        for name in olds:
            meet(name, is_old=True)
        new: list[str] = []
        while waiting and len(found) < _MOST_COMMITS:
            _, name = heappop(queue)
            waiting.discard(name)
            commit = found[name]
            if name not in old:
                new.append(name)
            for parent in commit.parents if commit is not None else ():
                meet(parent, name in old)
        listed = [(name, commit) for name in new if name not in old and name not in certain and (commit := found[name]) is not None]
        return [*certain.items(), *listed]

    def _new_before(self, tip: str) -> dict[str, Commit]:
        """Return the commits that lead to a tip and that the real repository does not have. Their times may be forged."""
        found: dict[str, Commit] = {}
        todo, seen = [tip], {tip}
        while todo:
            name = todo.pop(0)
            if name not in self._places or self._places[name][0] != "commit":
                continue
            commit = found[name] = read_commit(self._own(name)[1], self.width)
            new = [parent for parent in commit.parents if parent not in seen]
            seen.update(new)
            todo += new
        return found

    def tree_of(self, name: str) -> str | None:
        """Return the tree of a commit or a tag, or the tree itself; None for a file."""
        name = self._behind_tags(name)
        kind, content = self.read(name)
        return read_commit(content, self.width).tree if kind == "commit" else name if kind == "tree" else None

    def _behind_tags(self, name: str) -> str:
        """Return the object that a tag names, however many tags are in between; for any other object its own name."""
        for _ in range(10):
            kind, content = self.read(name)
            if kind != "tag":
                return name
            (name,) = check(kind, content, self.width)
        raise Damaged(f"too many tags lead to {name}")

    def as_files(self) -> Iterator[tuple[str, bytes]]:
        """Yield the files to write below `objects`: one for each object or, for many objects, a pack and its index."""
        if len(self._places) <= _LOOSE_LIMIT:
            for name in sorted(self._places):
                yield f"{name[:2]}/{name[2:]}", as_loose(*self._own(name))
        else:
            name, pack, index = as_pack(((each, *self._own(each)) for each in self._places), self.algorithm)
            yield f"pack/pack-{name}.pack", pack
            yield f"pack/pack-{name}.idx", index

    def write(self, top: int) -> None:
        """Write the new objects to the `objects` directory of a real repository. `top` is its descriptor. Raises OSError.

        Files that exist already are not written again.
        """
        for path, content in self.as_files():
            directory, _, name = path.partition("/")
            _write(top, directory, name, content)


def _write(top: int, directory: str, name: str, content: bytes) -> None:
    """Write a file to a directory in `objects` (`top`), unless it exists. The file gets its name once its content is on the disk."""
    above = os.fstat(top)
    owner = above.st_uid, above.st_gid
    with suppress(FileExistsError):
        os.mkdir(directory, above.st_mode & 0o7777, dir_fd=top)
        with suppress(PermissionError):
            os.chown(directory, *owner, dir_fd=top, follow_symlinks=False)
    place = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
    try:
        with suppress(FileNotFoundError):
            os.stat(name, dir_fd=place, follow_symlinks=False)
            return
        new = f"tmp_obj_{os.urandom(6).hex()}"  # git removes such files, if we are killed here
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o444, dir_fd=place)
        try:
            with open(fd, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                with suppress(PermissionError):
                    os.fchown(file.fileno(), *owner)
            os.rename(new, name, src_dir_fd=place, dst_dir_fd=place)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(new, dir_fd=place)
            raise
        os.fsync(place)
    finally:
        os.close(place)
    os.fsync(top)


def _unpacked(
    wanted: list[str], files: list[tuple[str, Change]], contents: Contents, real: ObjectFiles, width: int, runtime: RuntimeOf
) -> Iterator[tuple[str, bytes]]:
    """Unpack the objects in a sandbox, and yield the kind and the content of each. The caller must not trust them."""
    import tempfile  # slow, and few changes are commits

    with tempfile.TemporaryFile() as order, tempfile.TemporaryFile() as output:
        packed = any(name.endswith(".pack") for name, _ in files)
        held = real.packed_names() if packed else b""
        sizes = [change.after.size if change.after else 0 for _, change in files]
        if sum(sizes) > _MOST_READ:
            raise Damaged(f"the sandbox has more than {_MOST_READ >> 20:,} MiB of new packs")
        listed = [(name, size) for (name, _), size in zip(files, sizes, strict=True)]
        order.write(json.dumps({"width": width, "wanted": wanted, "held": len(held), "files": listed}).encode() + b"\n")
        order.write(held)
        for (_, change), size in zip(files, sizes, strict=True):
            _copy(contents.open_file(change), order, size, change.path)
        order.seek(0)
        _run(order.fileno(), output.write, runtime())
        output.seek(0)
        yield from _objects(output)


def _copy(source: int, target: IO[bytes], size: int, path: str) -> None:
    with open(source, "rb") as file:
        left = size
        while left:
            piece = file.read(min(left, _PIECE))
            if not piece:
                raise Damaged(f"{path!r} has changed while it was read")
            target.write(piece)
            left -= len(piece)


def _run(order: int, write: Callable[[bytes], object], runtime: Runtime) -> None:
    with open(packs.__file__, encoding="utf-8") as file:
        source = file.read()

    said: list[bytes] = []
    written = 0

    def keep(stream: str, piece: bytes) -> None:
        if stream == "stdout":
            nonlocal written
            written += len(piece)
            if written > _MOST_WRITTEN:
                raise Damaged(f"the new objects are larger than {_MOST_WRITTEN >> 20:,} MiB")
            write(piece)
        else:
            said.append(piece[:1000])

    from agent_sandbox.runtime.process.probe import trial  # brings much along, and few changes are commits

    launch = replace(trial(source), program=PythonCode(source), limits=_LIMITS, stdin=order, on_output=keep, collect=False)
    try:
        with runtime.launch(launch) as guest:  # type: ignore[attr-defined]
            end = guest.wait().exit
    except LaunchFailed as error:
        raise WorkspaceError(f"the new commits cannot be read in a sandbox: {error.message}", hint=error.hint) from error
    if end.reason is not ExitReason.EXITED or end.code:
        why = b"".join(said)[-300:].decode(errors="replace").strip().rpartition("\n")[2]
        raise Damaged(f"its objects cannot be read: {end.reason.value}{f': {why}' if why else ''}")


def _objects(output: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    while (line := output.readline(200)) != b"end\n":
        words = line.decode("ascii", "replace").split()
        if len(words) != 3 or words[1] not in packs.KINDS.values() or not words[2].isdecimal() or len(words[2]) > 12:
            raise Damaged("its objects cannot be read")
        content = output.read(int(words[2]))
        if len(content) != int(words[2]):
            raise Damaged("its objects cannot be read")
        yield words[1], content
