"""The stagehand of a run with checkpoints: a process outside the run that exchanges the upper layers of its view, while the run goes on.

The guest may neither mount nor enter namespaces. The stagehand is forked by the keeper when the view stands and the guest does not exist
yet. It keeps a copy of that mount namespace, in which the layers have names, makes new overlays there, and moves each into the guest's
namespace, beneath the one that is shown, which it then detaches (`MOVE_MOUNT_BENEATH`, Linux 6.5). Paths then lead to the new overlay;
descriptors that were open still lead to the old one, so the guest opens its files again.

It has the keeper's privileges, and takes orders from the supervisor only. It ends when the supervisor closes the link.
"""

from __future__ import annotations

import errno
import marshal
import os
import shutil
import socket
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.kernel import usage
from agent_sandbox.kernel.fork_views import ForkView, fields, mount_id
from agent_sandbox.kernel.frozen_layers import compare_entry, entries_of_both, hiding_entries, layer_entries, merge_layers
from agent_sandbox.kernel.mappings import shared_for_writing
from agent_sandbox.kernel.mount_tools import QUIET, Scene, Site, directory_for, overlay_options

if TYPE_CHECKING:
    from typing import Any, NoReturn

# Orders of the supervisor. ADVANCE: freeze the newest generation if the guest has changed anything and none of its processes still writes
# there, and begin another. SETTLE: say what still writes to the frozen one. SHOW: begin a generation on an earlier one. COVER, UNCOVER:
# show another state for a moment. MEASURE: how much memory the processes have, and the largest of them. MERGE: make one frozen layer of
# two. COMPARE: the files that differ between two states. FORK: give a fork of a state its view. VERIFY: make sure that nothing in the fork
# leads out of it. DISCARD: remove a generation.
ADVANCE, SETTLE, SHOW, COVER, UNCOVER = "advance", "settle", "show", "cover", "uncover"
MEASURE, MERGE, COMPARE, FORK, VERIFY, DISCARD = "measure", "merge", "compare", "fork", "verify", "discard"
_LARGEST_ORDER = 1 << 16
_PIECE = 1 << 16  # bytes of an answer in one message: the kernel takes no message that is larger than the buffer of a socket
_MORE, _LAST = b"+", b"."  # begins a message
MOST_COMPARED = 100_000  # files of one comparison
_PLACE = "n"  # in the staging directory: where a new overlay is mounted for a moment


def serve(link: socket.socket, init: int, *, userxattr: bool) -> NoReturn:
    """Serve one run whose init waits with its view built. First receive the scenes of the view. Never returns, never raises."""
    try:
        sc.prctl(sc.PR_SET_PDEATHSIG, 9)
        scenes = [Scene(*scene) for scene in marshal.loads(link.recv(_LARGEST_ORDER))]
        stage = _Stage(init, scenes, Site(None, 0, userxattr=userxattr, fresh=True))
        _send(link, ("ready", None))
        while order := link.recv(_LARGEST_ORDER):
            try:
                answer = ("done", stage.do(*marshal.loads(order)))
            except OSError as error:
                answer = ("failed", f"{error.strerror or error}")
            _send(link, answer)
    except BaseException as error:
        with suppress(OSError):
            _send(link, ("broken", f"{getattr(error, 'strerror', None) or error}"))
    finally:
        os._exit(0)


def _send(link: socket.socket, answer: tuple[str, Any]) -> None:
    data = marshal.dumps(answer)
    for start in range(0, len(data), _PIECE):
        link.send((_MORE if start + _PIECE < len(data) else _LAST) + data[start : start + _PIECE])


def receive_answer(link: socket.socket) -> tuple[str, Any]:
    """Return the answer of a stagehand: "done", "failed" or "broken", and the value or the reason. Raises OSError, EOFError, ValueError."""
    data, more = b"", _MORE
    while more == _MORE:
        piece = link.recv(_PIECE + 1)
        data, more = data + piece[1:], piece[:1]
    kind, value = marshal.loads(data)
    return kind, value


class BrokenStage(Exception):
    """Raised if a view was exchanged in part. The stagehand then ends, and with it the run."""


class _Stage:
    """The two mount namespaces: the guest's, and our copy with the staging directory."""

    def __init__(self, init: int, scenes: Sequence[Scene], site: Site) -> None:
        self._scenes = scenes
        self._site = site
        namespace, staging = os.open(f"/proc/{init}/ns/mnt", os.O_RDONLY), os.open(f"/proc/{init}/cwd", os.O_PATH)
        sc.setns(namespace, sc.CLONE_NEWNS)
        os.fchdir(staging)
        os.close(staging)
        self._tops: dict[str, int] = {}
        for scene in scenes:
            with directory_for(scene.target) as place:
                self._tops[scene.key] = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._theirs = namespace
        sc.unshare(sc.CLONE_NEWNS)  # the current directory moves into the copy
        self._ours = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        self._staging = os.open(".", os.O_PATH | os.O_DIRECTORY)
        os.mkdir(_PLACE)
        self._site.count = 1 << 20  # links to frozen layers have numbers of their own
        self._generation = "1"
        self._roots = self._looks()
        self._earlier: set[int] = set()  # the numbers of the mounts that were shown before
        self._covers: list[int] = []
        self._cover_generation = ""  # of the layers that cover the others

    def do(self, order: str, *words: Any) -> Any:
        """Carry out an order. Raises OSError."""
        if order == ADVANCE:
            return self._advance(*words)
        if order == SETTLE:
            return self._settle(*words)
        if order == SHOW:
            return self._exchange(*words)
        if order == COVER:
            return self._cover(*words)
        if order == UNCOVER:
            return self._uncover()
        if order == MEASURE:
            return usage.memory_and_largest(_PROC)
        if order == MERGE:
            return self._merge(*words)
        if order == COMPARE:
            return self._compare(*words)
        if order == FORK:
            return self._fork(*words)
        if order == VERIFY:
            return self._view_of(words[0]).verify(words[1])
        if order == DISCARD:
            return self._discard(*words)
        raise OSError(errno.EINVAL, f"unknown order {order}")

    def _looks(self) -> list[tuple[int, int]]:
        """Return when the root of each upper layer was last changed."""
        return [(status.st_ctime_ns, status.st_nlink) for status in map(os.stat, self._uppers())]

    def _uppers(self) -> Iterable[str]:
        return (f"{scene.base}/{self._generation}/{scene.key}/upper" for scene in self._scenes)

    def _advance(self, generation: str, chain: Sequence[str], waiting: Sequence[int]) -> bool | list[str]:
        """Begin a generation on `chain`, newest first, unless nothing has changed since the newest one began. Return whether it has.

        If a process that is not `waiting` could still write to the layers, nothing is done: return in which ways.
        """
        if not any(os.listdir(upper) for upper in self._uppers()) and self._looks() == self._roots:
            return False
        mounts = self._earlier | {mount_id(top) for top in self._tops.values()}
        if ways := [what for pid in _processes(waiting) for what in _writers(pid, mounts)]:
            return ways
        return self._exchange(generation, chain)

    def _exchange(self, generation: str, chain: Sequence[str]) -> bool:
        made = self._make(generation, chain)
        self._earlier |= {mount_id(top) for top in self._tops.values()}
        try:
            with self._in_their_namespace():
                for scene, mount in zip(self._scenes, made, strict=True):
                    top = self._tops[scene.key]
                    sc.move_mount_beneath(mount, top)
                    os.fchdir(top)
                    sc.umount2(".", sc.MNT_DETACH)
                    os.close(top)
                    self._tops[scene.key] = mount
        except OSError as error:  # some are exchanged and some are not: nothing of this run can be trusted any more
            raise BrokenStage(f"the files of this run are of two states: {error.strerror or error}") from error
        self._generation = generation
        self._roots = self._looks()
        return True

    def _make(self, generation: str, chain: Sequence[str]) -> list[int]:
        """Return a detached overlay for each scene, with its upper layer in `generation` over those of `chain`."""
        self._site.uppers, self._site.frozen = f"u/{generation}", tuple(f"u/{each}" for each in chain)
        for base in {scene.base for scene in self._scenes}:
            os.mkdir(f"{base}/{generation}", 0o700)
        made: list[int] = []
        try:
            for scene in self._scenes:
                options = overlay_options(list(scene.lowers), scene.key, scene.target, True, self._site, base=scene.base)
                sc.mount("overlay", _PLACE, "overlay", QUIET, options)
                made.append(sc.open_tree(_PLACE, sc.OPEN_TREE_CLONE))
                sc.umount2(_PLACE, sc.MNT_DETACH)
        except BaseException:
            for mount in made:
                os.close(mount)
            raise
        return made

    def _settle(self, kept: Sequence[int]) -> list[str]:
        """Return what still leads to overlays that were shown before: files open for writing, and shared memory of files.

        Processes in `kept` are checkpoints: they sleep, and open their files again before they go on.
        """
        self._earlier -= {mount_id(top) for top in self._tops.values()}  # the kernel uses numbers of mounts again
        return [what for pid in _processes(kept) for what in _writers(pid, self._earlier)]

    def _cover(self, generation: str, chain: Sequence[str]) -> None:
        self._cover_generation = generation
        made = self._make(generation, chain)
        with self._in_their_namespace():
            for scene, mount in zip(self._scenes, made, strict=True):
                sc.move_mount_onto(mount, self._tops[scene.key])
                self._covers.append(mount)

    def _uncover(self) -> None:
        with self._in_their_namespace():
            while self._covers:
                os.fchdir(self._covers[-1])
                sc.umount2(".", sc.MNT_DETACH)
                os.close(self._covers.pop())
        self._discard(self._cover_generation)

    def _discard(self, generation: str) -> None:
        """Remove the layers of a generation that nobody sees any more: they take no room any more."""
        for base in {scene.base for scene in self._scenes}:
            with suppress(RecursionError):  # a tree that nobody but a hostile program makes: it stays, and takes its own room
                shutil.rmtree(f"{base}/{generation}", ignore_errors=True)

    def _merge(self, newer: str, older: str, merged: str) -> None:
        """Make a layer that has what the older and then the newer one changed. Files are linked: nobody writes to a frozen layer."""
        for scene in self._scenes:
            home = f"{scene.base}/{merged}/{scene.key}"
            os.makedirs(home, mode=0o700)
            above, below = (f"{scene.base}/{each}/{scene.key}/upper" for each in (newer, older))
            merge_layers(above, below, f"{home}/upper", self._site.opaque_attribute)
            for each in (newer, older):
                with suppress(FileNotFoundError, FileExistsError):
                    os.link(f"{scene.base}/{each}/{scene.key}/target", f"{home}/target")

    def _fork(self, pid: int, generation: str, chain: Sequence[str]) -> None:
        """Show a fork the layers of a state, with new ones on top. The session and other forks do not change."""
        made = self._make(generation, chain)
        try:
            self._view_of(pid).dress(_PLACE, [scene.target for scene in self._scenes], made)
        finally:
            for mount in made:
                os.close(mount)

    def _view_of(self, pid: int) -> ForkView:
        return ForkView(pid, root=not self._site.userxattr)

    def _compare(self, old: Sequence[str], new: Sequence[str]) -> dict[str, str]:
        """Return the files that differ between two chains of layers, by path, each with "new", "changed" or "gone"."""
        found: dict[str, str] = {}
        touched = [*({*old} ^ {*new})]
        for scene in self._scenes:
            layers = {layer: {*layer_entries(layer)} for layer in (f"{scene.base}/{each}/{scene.key}/upper" for each in touched)}
            names = {name for entries in layers.values() for name in entries}
            if not names:
                continue
            with self._shown(scene, old) as before, self._shown(scene, new) as after:
                # A directory that was removed and made again hides what was in it, and its layer has no entries of that.
                for layer, entries in layers.items():
                    for name in hiding_entries(layer, entries, self._site.opaque_attribute):
                        names |= entries_of_both(before, after, name)
                if len(names) > MOST_COMPARED:
                    raise OSError(errno.E2BIG, f"more than {MOST_COMPARED} files were touched")
                for name in sorted(names):
                    if difference := compare_entry(before, after, name):
                        found[os.path.join(scene.target, name)] = difference
        return found

    @contextmanager
    def _shown(self, scene: Scene, chain: Sequence[str]) -> Iterator[int]:
        """Yield a directory that shows a scene as it was, read-only."""
        self._site.frozen = tuple(f"u/{each}" for each in chain)
        lowers = list(scene.lowers) if len(scene.lowers) > 1 or chain else [*scene.lowers, "n"]
        sc.mount(
            "overlay",
            _PLACE,
            "overlay",
            QUIET | sc.MS_RDONLY,
            overlay_options(lowers, scene.key, scene.target, False, self._site, base=scene.base),
        )
        try:
            shown = os.open(_PLACE, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        finally:
            sc.umount2(_PLACE, sc.MNT_DETACH)
        try:
            yield shown
        finally:
            os.close(shown)

    def _in_their_namespace(self) -> _Visit:
        return _Visit(self._theirs, self._ours, self._staging)


class _Visit:
    """Enters the guest's mount namespace for a block, and returns to the staging directory of ours."""

    def __init__(self, theirs: int, ours: int, staging: int) -> None:
        self._theirs, self._ours, self._staging = theirs, ours, staging

    def __enter__(self) -> None:
        sc.setns(self._theirs, sc.CLONE_NEWNS)

    def __exit__(self, *_: object) -> None:
        sc.setns(self._ours, sc.CLONE_NEWNS)
        os.fchdir(self._staging)


_PROC = "r/proc"  # the guest's own, in the staging directory
_WRITING = os.O_WRONLY | os.O_RDWR


def _processes(kept: Sequence[int]) -> list[int]:
    return [int(name) for name in os.listdir(_PROC) if name.isdigit() and int(name) not in (1, *kept)]


def _writers(pid: int, mounts: set[int]) -> Iterable[str]:
    """Yield the ways in which a process may still write to these mounts: open files and directories, where it stands, shared memory.

    Descriptors on their way through a socket are such a way, too.
    """
    with suppress(OSError):  # it has just ended
        for name in (*(f"fd/{number}" for number in os.listdir(f"{_PROC}/{pid}/fd")), "cwd", "root"):
            with suppress(OSError):
                if what := _way_in(pid, name, mounts):
                    yield f"process {pid} {what}"
        for name in shared_for_writing(f"{_PROC}/{pid}"):
            if name and not name.startswith(_OF_NO_FILE):
                yield f"process {pid} shares memory with {name}"


_OF_NO_FILE = ("/dev/zero", "/memfd:", "/SYSV")


def _way_in(pid: int, name: str, mounts: set[int]) -> str:
    fd = os.open(f"{_PROC}/{pid}/{name}", os.O_PATH | os.O_CLOEXEC)
    try:
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            # One of them may lead to a frozen layer, and nobody sees where it leads.
            coming = int(fields(f"{_PROC}/{pid}/fdinfo/{name.removeprefix('fd/')}").get("scm_fds", "0"))
            return "has descriptors on their way through a socket" if coming else ""
        if mount_id(fd) not in mounts:
            return ""
        where = os.readlink(f"{_PROC}/{pid}/{name}")
        if not name.startswith("fd/"):
            return f"stands in {where}"
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            return f"has the directory {where} open"
    finally:
        os.close(fd)
    writing = int(fields(f"{_PROC}/{pid}/fdinfo/{name.removeprefix('fd/')}")["flags"], 8) & _WRITING
    return f"has {where} open for writing" if writing else ""
