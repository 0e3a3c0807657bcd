"""The compiler program: compile the interpreters and make images, in a process of its own.

Compiling takes a minute, two gigabytes of memory and every core. One process compiles at a time. A second one waits for the lock, finds
that all files exist, and ends.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.runtime.wasm.cache import COUNTING, MODULE, SCRATCH, Cache, Untrusted, checked, open_regular, sound
from agent_sandbox.runtime.wasm.javascript.module_patch import adapted
from agent_sandbox.runtime.wasm.recipe import IMAGES, INTERPRETER, JAVASCRIPT, Package, javascript_stored_as, preparation, stored_as
from agent_sandbox.runtime.wasm.view import LIBRARY_INSIDE

if TYPE_CHECKING:
    from agent_sandbox.runtime.wasm.machine import WasmMachine


def main() -> None:
    """Make the compiled files that are missing or damaged.

    Arguments: the search path of packages, the fields of `Cache`, the wanted module, and the fields of `Package`. The counting module is
    made last, after the files that every run needs.
    """
    cache, modules, package = _parse_arguments(sys.argv[1:])
    names = (name for module in modules for name in (module, _javascript(package, module)))
    if all(_loaded(cache, name) is not None for name in names) and not _missing(cache) and not cache.debris():
        return
    with open(_open_lock(cache), "wb", buffering=0) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        make(sys.argv[1:], lock.fileno())


def make(words: list[str], lock: int) -> None:
    """Make the files, as `main` does, for a caller that holds `lock`."""
    cache, modules, package = _parse_arguments(words)
    os.truncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)  # for `holder`, so that others can see the progress
    cache.clear_debris()
    for module in modules:
        _build(cache, package, module)


def try_lock(cache: Cache) -> int | None:
    """Take the lock and return its descriptor, or None if another process holds it. Raises OSError.

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


def holder(cache: Cache) -> int | None:
    """Return the id of the process that is compiling, 0 if it has not written its id yet, None if there is none."""
    try:
        lock = open_regular(f"{cache.directory}/lock")
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        pid = os.pread(lock, 20, 0)
        return int(pid) if pid.isdigit() else 0
    finally:
        os.close(lock)


def _parse_arguments(words: list[str]) -> tuple[Cache, Sequence[str], Package]:
    _, packages, directory, records, key, wanted, *package = words
    sys.path.extend(path for path in packages.split(os.pathsep) if path and path not in sys.path)
    return Cache(directory, records, key), tuple(dict.fromkeys((MODULE, wanted))), Package(*package)


def _open_lock(cache: Cache) -> int:
    os.makedirs(cache.directory, mode=0o700, exist_ok=True)
    return open_regular(f"{cache.directory}/lock", os.O_RDWR | os.O_CREAT)


def _build(cache: Cache, package: Package, module: str) -> None:
    javascript = _javascript(package, module)
    if _loaded(cache, javascript) is None:
        _compile(cache, javascript, adapted(_read(package.javascript, package.javascript_digest, JAVASCRIPT)))
    machine = _loaded(cache, module)
    if machine is None:
        _compile(cache, module, _read(package.module, package.digest, INTERPRETER))
        machine = _loaded(cache, module)
        assert machine is not None
    missing = _missing(cache)
    if missing:
        _make_images(cache, machine, package, missing)


def _javascript(package: Package, module: str) -> str:
    return javascript_stored_as(package.javascript_digest, counting=module == COUNTING)


def _missing(cache: Cache) -> list[str]:
    return [name for name in IMAGES if (entry := cache.entry(stored_as(name))) is None or not sound(entry)]


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


def _make_images(cache: Cache, machine: WasmMachine, package: Package, names: list[str]) -> None:
    from agent_sandbox.runtime.wasm.machine import DeterministicSettings  # loads wasmtime

    with tempfile.TemporaryDirectory(dir=cache.directory, prefix=SCRATCH) as scratch:
        library, view = f"{scratch}/library", f"{scratch}/view"
        os.mkdir(library)
        os.mkdir(view)
        shutil.copyfile(package.library, f"{library}/{package.library_name}")
        for name in names:
            # Deterministic: an image must not contain the time and the random numbers of its maker.
            instance = machine.instance(((library, LIBRARY_INSIDE), (view, "/")), DeterministicSettings(0, None, lambda *_: None))
            if instance.run(preparation(name)) != 0:
                raise SystemExit(f"the interpreter could not be prepared for the image {name!r}")
            image = instance.memory()
            cache.keep(stored_as(name), lambda file, image=image: file.write(image))  # type: ignore[misc]  # a lambda's default
