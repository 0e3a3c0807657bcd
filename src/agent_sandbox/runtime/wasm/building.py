"""The program that compiles the interpreters and makes images, in a process of its own: it takes a minute, two gigabytes and every core.

One at a time: who comes second waits, finds everything there, and is done.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
import tempfile

from agent_sandbox.runtime.wasm.cache import MODULE, Cache, Untrusted, checked, sound
from agent_sandbox.runtime.wasm.javascript.adapting import adapted
from agent_sandbox.runtime.wasm.package import INTERPRETER, JAVASCRIPT, Package
from agent_sandbox.runtime.wasm.recipe import IMAGES, javascript_stored_as, preparation, stored_as
from agent_sandbox.runtime.wasm.view import LIBRARY_INSIDE
from agent_sandbox.values import TYPE_CHECKING

if TYPE_CHECKING:
    from agent_sandbox.runtime.wasm.machine import Machine


def main() -> None:
    """Make whatever is missing or not as it was made. The arguments are where packages are, and the fields of `Cache` and `Package`."""
    _, packages, directory, records, key, *package = sys.argv[1:]
    sys.path.extend(path for path in packages.split(os.pathsep) if path and path not in sys.path)
    cache, found = Cache(directory, records, key), Package(*package)
    if all(_loaded(cache, name) is not None for name in (MODULE, javascript_stored_as(found.javascript_digest))) and not _missing(cache):
        return
    os.makedirs(directory, mode=0o700, exist_ok=True)
    with open(os.open(f"{directory}/lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _build(cache, found)


def _build(cache: Cache, package: Package) -> None:
    javascript = javascript_stored_as(package.javascript_digest)
    if _loaded(cache, javascript) is None:
        _compile(cache, javascript, adapted(_read(package.javascript, package.javascript_digest, JAVASCRIPT)))
    machine = _loaded(cache, MODULE)
    if machine is None:
        _compile(cache, MODULE, _read(package.module, package.digest, INTERPRETER))
        machine = _loaded(cache, MODULE)
        assert machine is not None
    missing = _missing(cache)
    if missing:
        _make_images(cache, machine, package, missing)


def _missing(cache: Cache) -> list[str]:
    return [name for name in IMAGES if (entry := cache.entry(stored_as(name))) is None or not sound(entry)]


def _loaded(cache: Cache, name: str) -> Machine | None:
    """A compiled module, if it is as it was made and for this processor: a home directory may be used on several machines."""
    from wasmtime import WasmtimeError

    from agent_sandbox.runtime.wasm.machine import Machine

    entry = cache.entry(name)
    if entry is None:
        return None
    try:
        with checked(entry) as fd:
            return Machine.load(f"/proc/self/fd/{fd}")
    except (Untrusted, WasmtimeError):
        return None


def _read(path: str, digest: str, package: str) -> bytes:
    with open(path, "rb") as file:
        module = file.read()
    if hashlib.sha256(module).hexdigest() != digest:
        raise SystemExit(f"{path} is not what its maker lists; reinstall {package}")
    return module


def _compile(cache: Cache, name: str, module: bytes) -> None:
    from agent_sandbox.runtime.wasm.machine import compiled

    code = compiled(module)
    cache.keep(name, lambda file: file.write(code))


def _make_images(cache: Cache, machine: Machine, package: Package, names: list[str]) -> None:
    with tempfile.TemporaryDirectory(dir=cache.directory) as scratch:
        library, view = f"{scratch}/library", f"{scratch}/view"
        os.mkdir(library)
        os.mkdir(view)
        shutil.copyfile(package.library, f"{library}/{package.library_name}")
        for name in names:
            instance = machine.instance(((library, LIBRARY_INSIDE), (view, "/")))
            if instance.run(preparation(name)) != 0:
                raise SystemExit(f"the interpreter could not be prepared for the image {name!r}")
            image = instance.memory()
            cache.keep(stored_as(name), lambda file, image=image: file.write(image))  # type: ignore[misc]  # it has no way to say what a default is
