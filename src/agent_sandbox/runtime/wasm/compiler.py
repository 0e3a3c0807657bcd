"""The compiler program: compile the interpreters and make images, in a process of its own.

Compiling takes a minute, two gigabytes of memory and every core. One process compiles at a time. A second one waits for the lock, finds
that all files exist, and ends. The engine reports no progress inside a module, so what is told is the step: which file is being made.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.runtime.wasm.cache import COUNTING, MODULE, SCRATCH, Cache, Untrusted, checked, open_regular, sound
from agent_sandbox.runtime.wasm.cache import JAVASCRIPT as JAVASCRIPT_FILE
from agent_sandbox.runtime.wasm.javascript.module_patch import adapted
from agent_sandbox.runtime.wasm.recipe import IMAGES, INTERPRETER, JAVASCRIPT, Package, javascript_stored_as, preparation, stored_as
from agent_sandbox.runtime.wasm.view import LIBRARY_INSIDE

if TYPE_CHECKING:
    from agent_sandbox.runtime.wasm.machine import WasmMachine


def main() -> None:
    """Make the compiled files that are missing or damaged.

    Arguments: the search path of packages, a `Cache` as `encoded`, the wanted module, and the fields of `Package`. The counting module is
    made last, after the files that every run needs.
    """
    cache, modules, package = _parse_arguments(sys.argv[1:])
    if not _missing(cache, package, modules) and not cache.debris():
        return
    with open(_open_lock(cache), "wb", buffering=0) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        make(sys.argv[1:], lock.fileno())


def make(words: list[str], lock: int) -> None:
    """Make the files, as `main` does, for a caller that holds `lock`. The lock file tells others the progress: see `compilation`."""
    cache, modules, package = _parse_arguments(words)
    report(lock, Compilation(os.getpid()))
    cache.clear_debris()
    missing = _missing(cache, package, modules)
    for step, name in enumerate(missing, 1):
        report(lock, Compilation(os.getpid(), step, len(missing), name.partition("-")[0] if name in _images() else name))
        _make(cache, package, name)


@dataclass(frozen=True)
class Compilation:
    """A running compilation: the id of its process, and which of how many files it is making. 0 stands for "not known yet"."""

    pid: int = 0
    step: int = 0
    steps: int = 0
    name: str = ""  # the name of that file in the cache

    @property
    def what(self) -> str:
        """The file that is being made, in words."""
        counting = ", counting instructions" if self.name.startswith(COUNTING) else ""
        if JAVASCRIPT_FILE in self.name:
            return f"the JavaScript interpreter{counting}"
        return f"the Python interpreter{counting}" if self.name in (MODULE, COUNTING) else f"the memory image {self.name!r}"


def report(lock: int, state: Compilation) -> None:
    """Write the progress into the lock file."""
    text = f"{state.pid} {state.step} {state.steps} {state.name}".encode()
    os.pwrite(lock, text.ljust(len(os.pread(lock, 200, 0))), 0)  # in one piece: a reader sees the old text or the new one


def compilation(cache: Cache) -> Compilation | None:
    """Return the compilation that goes on in the directory of new files; None if there is none."""
    try:
        lock = open_regular(f"{cache.directory}/lock")
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return _read_report(os.pread(lock, 200, 0))
    finally:
        os.close(lock)


def _read_report(text: bytes) -> Compilation:
    try:
        pid, step, steps, *name = text.decode("ascii").split()
        return Compilation(int(pid), int(step), int(steps), *name)
    except (ValueError, TypeError):
        return Compilation()


def try_lock(cache: Cache) -> int | None:
    """Take the lock and return its descriptor, or None if another process holds it. Raises OSError and `Untrusted`.

    The lock is held until every copy of the descriptor is closed.
    """
    lock = _open_lock(cache)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    os.ftruncate(lock, 0)  # remove the id of the earlier holder, so that it is not read as ours
    return lock


def encoded(cache: Cache) -> str:
    """Return a cache as one argument of this program."""
    return json.dumps([cache.directory, cache.records, cache.key, cache.others, cache.public])


def _parse_arguments(words: list[str]) -> tuple[Cache, Sequence[str], Package]:
    _, packages, encoded_cache, wanted, *package = words
    sys.path.extend(path for path in packages.split(os.pathsep) if path and path not in sys.path)
    directory, records, key, others, public = json.loads(encoded_cache)
    # A set for all users must be whole in their directory: files in a user's own cache do not count.
    cache = Cache(directory, records, key, () if public else tuple((each, digests) for each, digests in others), public)
    return cache, tuple(dict.fromkeys((MODULE, wanted))), Package(*package)


def _open_lock(cache: Cache) -> int:
    """Open the lock file. Only its owner can: with a lock of its own, another user could stop root from compiling."""
    cache.make_directories()
    return open_regular(f"{cache.directory}/lock", os.O_RDWR | os.O_CREAT)


def _missing(cache: Cache, package: Package, modules: Sequence[str]) -> list[str]:
    """Return the names of the files that are missing or damaged, in the order in which they are made."""
    names: list[str] = []
    for module in modules:
        names += [name for name in (_javascript(package, module), module) if _loaded(cache, name) is None]
        names += [name for name in _images() if name not in names and ((entry := cache.entry(name)) is None or not sound(entry))]
    return names


def _images() -> dict[str, str]:
    """Return the images by their names in the cache."""
    return {stored_as(image): image for image in IMAGES}


def _make(cache: Cache, package: Package, name: str) -> None:
    if image := _images().get(name):
        _make_image(cache, package, image)
    elif name in (MODULE, COUNTING):
        _compile(cache, name, _read(package.module, package.digest, INTERPRETER))
    else:
        _compile(cache, name, adapted(_read(package.javascript, package.javascript_digest, JAVASCRIPT)))


def _javascript(package: Package, module: str) -> str:
    return javascript_stored_as(package.javascript_digest, counting=module == COUNTING)


def _loaded(cache: Cache, name: str) -> WasmMachine | None:
    """Load a compiled module. Return None if it is missing, damaged or for another processor, as in a home that several machines share."""
    from wasmtime import WasmtimeError  # an optional extra, needed only to compile

    from agent_sandbox.runtime.wasm.machine import WasmMachine

    entry = cache.entry(name)
    if entry is None:
        return None
    try:
        with checked(entry) as fd:
            return WasmMachine.load(f"/proc/self/fd/{fd}" if sys.platform == "linux" else entry.path, counting=name.startswith(COUNTING))
    except (Untrusted, WasmtimeError):
        return None


def _read(path: str, digest: str, package: str) -> bytes:
    with open(path, "rb") as file:
        module = file.read()
    if hashlib.sha256(module).hexdigest() != digest:
        raise SystemExit(f"{path} is not what its maker lists; reinstall {package}")
    return module


def _compile(cache: Cache, name: str, module: bytes) -> None:
    from agent_sandbox.runtime.wasm.machine import compiled  # loads wasmtime

    code = compiled(module, counting=name.startswith(COUNTING))
    cache.keep(name, lambda file: file.write(code))


def _make_image(cache: Cache, package: Package, image: str) -> None:
    from agent_sandbox.runtime.wasm.machine import DeterministicSettings  # loads wasmtime

    machine = _loaded(cache, MODULE)
    if machine is None:
        raise SystemExit("the compiled interpreter cannot be loaded")
    with tempfile.TemporaryDirectory(dir=cache.directory, prefix=SCRATCH) as scratch:
        library, view = f"{scratch}/library", f"{scratch}/view"
        os.mkdir(library)
        os.mkdir(view)
        shutil.copyfile(package.library, f"{library}/{package.library_name}")
        # Deterministic: an image must not contain the time and the random numbers of its maker.
        instance = machine.instance(((library, LIBRARY_INSIDE), (view, "/")), DeterministicSettings(0, None, lambda *_: None))
        if instance.run(preparation(image)) != 0:
            raise SystemExit(f"the interpreter could not be prepared for the image {image!r}")
        memory = instance.memory()
        cache.keep(stored_as(image), lambda file: file.write(memory))
