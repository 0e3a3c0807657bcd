"""Templates: machines that were booted once, saved, and are restored for each run.

A template is a directory of three files: `ram` (the memory, without its empty pages), `state` (the devices) and `facts`, which is written
last. Its name is a digest of everything that it was made from, so a template of another kernel, QEMU, interpreter, set of modules or
version of ours has another name. One that is being made has another name until it is complete.

A template that was truncated or overwritten is recognised by its checksums, removed and made again. The checksums protect against
accidents only: only this user and root can write here, and what a template holds runs inside the machine, behind the walls.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator

from agent_sandbox._fast.values import dataclass
from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.kernel import wire
from agent_sandbox.runtime.microvm import machine
from agent_sandbox.runtime.microvm.kernel_package import Kernel
from agent_sandbox.runtime.wasm.ownership import distrust

FORMAT = 1  # of the files of a template
RAM, STATE, FACTS = "ram", "state", "facts"
UNUSED_SECONDS = 14 * 86400.0  # after which an unused template is removed
_PAGE = 4096
_CHUNK = 1 << 20
_EMPTY = bytes(_PAGE)


class Unusable(Exception):
    """A template is damaged. The message says how."""


@dataclass(frozen=True)
class Recipe:
    """Everything that a template is made from."""

    qemu: str
    kernel: Kernel
    memory_mib: int
    preload: tuple[str, ...] = ()
    accelerator: str = machine.EMULATION

    @property
    def key(self) -> str:
        """A digest of the recipe: equal for equal templates."""
        parts = (
            str(FORMAT),
            _fingerprint(self.qemu),
            self.kernel.identity,
            _fingerprint(os.path.realpath(sys.executable)),
            sys.executable,
            sys.version,
            _our_text(),
            str(self.memory_mib),
            self.accelerator,
            *self.preload,
        )
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _fingerprint(path: str) -> str:
    facts = os.stat(path)
    return f"{path} {facts.st_size} {facts.st_mtime_ns}"


def _our_text() -> str:
    """Return a digest of our own modules that run inside a machine: a template holds them loaded."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    digest = hashlib.sha256()
    for folder in ("_fast", "kernel", "runtime/guest", "runtime/guest_rpc", "runtime/microvm"):
        directory = os.path.join(root, folder)
        for name in sorted(os.listdir(directory)):
            if name.endswith(".py"):
                digest.update(_fingerprint(os.path.join(directory, name)).encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class Template:
    """A complete template. `libraries` are the files that QEMU maps or reads when it starts."""

    directory: str
    memory_mib: int
    accelerator: str
    ram_checksum: int
    state_checksum: int
    state_bytes: int
    libraries: tuple[str, ...]

    def load(self) -> tuple[int, int]:
        """Return sealed copies in memory of the machine's memory and state. Raises `Unusable` if the template is damaged.

        A copy, because QEMU opens the memory's file for writing, although it maps it copy-on-write. Nobody can write to a sealed one.
        """
        ram = os.memfd_create("microvm-ram", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        state = os.memfd_create("microvm-state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.truncate(ram, self.memory_mib << 20)
            checks = ((RAM, ram, self.memory_mib << 20, self.ram_checksum), (STATE, state, self.state_bytes, self.state_checksum))
            for name, copy, size, checksum in checks:
                try:
                    with open(os.path.join(self.directory, name), "rb", buffering=0) as file:
                        if os.fstat(file.fileno()).st_size != size:
                            raise Unusable(f"{name} does not have its size")
                        if _copied(file.fileno(), copy) != checksum:
                            raise Unusable(f"{name} has changed")
                except OSError as error:
                    raise Unusable(f"{name}: {error.strerror}") from error
                wire.seal(copy)
            with contextlib.suppress(OSError):  # root's, or on a disk that is read-only
                os.utime(os.path.join(self.directory, FACTS))  # it was used
        except BaseException:
            wire.close_all([ram, state])
            raise
        return ram, state


def read(directory: str) -> Template | None:
    """Return the template in this directory; None if there is none. Raises `Unusable` for one that cannot be read."""
    try:
        with open(os.path.join(directory, FACTS)) as file:
            facts = json.loads(file.read(1 << 20))
        return Template(directory=directory, libraries=tuple(facts.pop("libraries")), **facts)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise Unusable(f"{FACTS}: {error}") from error


def _data(fd: int) -> Iterator[tuple[int, bytes]]:
    """Yield the parts of a sparse file that hold data, with their offsets."""
    at, end = 0, os.fstat(fd).st_size
    while at < end:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # the rest is a hole
                return
            raise
        hole = os.lseek(fd, at, os.SEEK_HOLE)
        while at < hole:
            data = os.pread(fd, min(_CHUNK, hole - at), at)
            if not data:
                return
            yield at, data
            at += len(data)


def _copied(source: int, copy: int) -> int:
    """Copy a sparse file, and return its checksum. Empty pages count for nothing, whether they are holes or not."""
    checksum = 0
    for at, data in _data(source):
        checksum = zlib.crc32(data, checksum) ^ (at >> 12)
        os.pwrite(copy, data, at)
    return checksum


def pack_ram(source: int, target: str) -> int:
    """Write a machine's memory to a new sparse file, without its empty pages. Return the checksum that `_copied` computes."""
    with open(target, "xb", buffering=0) as file:
        os.truncate(file.fileno(), os.fstat(source).st_size)
        for at, data in _data(source):
            for offset in range(0, len(data), _PAGE):
                page = data[offset : offset + _PAGE]
                if page != _EMPTY:
                    os.pwrite(file.fileno(), page, at + offset)
        os.fsync(file.fileno())
    return checksum_of(target)


def checksum_of(path: str) -> int:
    """Return the checksum of a file of a template."""
    checksum = 0
    with open(path, "rb", buffering=0) as file:
        for at, data in _data(file.fileno()):
            checksum = zlib.crc32(data, checksum) ^ (at >> 12)
    return checksum


class Shelf:
    """The directories of templates. New ones go to `own`; `others` are only read: what root has made, all users of the machine use."""

    def __init__(self, own: str, others: tuple[str, ...] = (), *, public: bool = False) -> None:
        self.own, self._others, self._public = own, others, public

    def find(self, key: str) -> Template | None:
        """Return the template of this key; None if there is none. Raises `Unusable` for one of ours that cannot be read.

        One in a directory to which somebody else could write does not count.
        """
        for directory in (self.own, *self._others):
            try:
                found = None if distrust(directory) else read(os.path.join(directory, key))
            except Unusable:
                if directory == self.own:
                    raise
                continue
            except OSError:  # no directory, or one that we may not look at: it holds nothing for us
                continue
            if found is not None:
                return found
        return None

    def discard(self, key: str) -> None:
        """Remove a damaged template of ours, so that it is made again."""
        shutil.rmtree(os.path.join(self.own, key), ignore_errors=True)

    def make(self, key: str, build: Callable[[str], None], *, only_own: bool = False) -> Template:
        """Return the template of this key, made by `build` in a new directory if it is missing. One process at a time makes it.

        It appears complete or not at all. With `only_own`, one in another directory does not count: it is damaged, and not ours to remove.
        Raises `RuntimeUnavailable` if it cannot be made, with the reason.
        """
        directory = os.path.join(self.own, key)
        try:
            os.makedirs(self.own, mode=0o755 if self._public else 0o700, exist_ok=True)
            if why := distrust(self.own):
                raise RuntimeUnavailable(f"no template can be kept: {why}", missing=("template",), hint="point XDG_CACHE_HOME elsewhere")
            with self._locked(key):
                try:
                    if (found := read(directory) if only_own else self.find(key)) is not None:
                        return found
                except Unusable:
                    self.discard(key)
                self._clear(key)
                new = tempfile.mkdtemp(prefix=f"{key}.", suffix=".new", dir=self.own)
                try:
                    build(new)
                    if self._public:
                        os.chmod(new, 0o755)
                    os.rename(new, directory)
                finally:
                    shutil.rmtree(new, ignore_errors=True)
                made = read(directory)
        except OSError as error:
            why = f"the machine's template cannot be stored in {self.own}: {error.strerror or error}"
            raise RuntimeUnavailable(why, missing=("template",), hint="make room there, and run: agent-sandbox setup microvm") from error
        assert made is not None
        return made

    def _clear(self, key: str) -> None:
        """Remove what a killed process left behind, and templates that nobody has used for long: of an older kernel, or version of ours.

        The caller holds the lock, so nobody is making this template now. A run that has one of the others open goes on with its copy.
        """
        for name in os.listdir(self.own):
            path = os.path.join(self.own, name)
            left = name.startswith(f"{key}.") and name.endswith(".new")
            try:
                if left or (name != key and time.time() - os.stat(os.path.join(path, FACTS)).st_mtime > UNUSED_SECONDS):
                    shutil.rmtree(path, ignore_errors=True)
            except (FileNotFoundError, NotADirectoryError):  # a lock, or one that is being made
                continue

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        fd = os.open(os.path.join(self.own, f"{key}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)
