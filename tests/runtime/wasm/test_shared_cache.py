"""Compiled files that users share. A file is used only if nobody but root and this user can write to it or to a directory above it."""

from __future__ import annotations

import fcntl
import os
import pty
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import wasmtime

from agent_sandbox.cli.commands import setup
from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.runtime.wasm import compiler
from agent_sandbox.runtime.wasm.cache import MODULE, Cache, Untrusted, sound
from agent_sandbox.runtime.wasm.compiler import Compilation
from agent_sandbox.runtime.wasm.ownership import distrust
from agent_sandbox.runtime.wasm.recipe import stored_as
from agent_sandbox.runtime.wasm.runtime import WasmRuntime
from scripts.compile_wasm import RECORDS
from tests import compiled
from tests.e2e.program import Shell
from tests.runtime.wasm import hostile
from tests.runtime.wasm.test_cache import OBLIGING, bare
from tests.runtime.wasm.test_hostile import run

__all__ = ["bare"]  # a fixture

STRANGER, OTHER = 60_704, 60_703  # ids that nobody has
KEY = "k" * 24


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[WasmRuntime]:
    """A runtime on native code that really runs, in `way/to`, so that there is something to spoil above it."""
    (tmp_path / "way" / "to").mkdir(parents=True)
    for directory in (tmp_path / "way", tmp_path / "way" / "to"):
        directory.chmod(0o755)
    with hostile.runtime(tmp_path / "way" / "to", bytes(wasmtime.wat2wasm(OBLIGING)), bytes(1 << 20)) as made:
        yield made


def _give(path: Path) -> None:
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


def _behind_anothers_link(path: Path) -> None:
    path.rename(path.with_name("real"))
    path.symlink_to("real")
    _give(path)


needs_root = pytest.mark.needs_root
SPOILT: list[object] = [
    pytest.param("way/to/cache", lambda path: path.chmod(0o777), id="the files, for all to write"),
    pytest.param("way/to/records", lambda path: path.chmod(0o777), id="the digests, for all to write"),
    pytest.param("way/to/records", lambda path: path.chmod(0o1777), id="the digests, for all to add to"),
    pytest.param("way/to", lambda path: path.chmod(0o777), id="the directory above, for all to write"),
    pytest.param("way", lambda path: path.chmod(0o777), id="two above, for all to write"),
    pytest.param("way", lambda path: path.chmod(0o770), marks=needs_root, id="two above, for a group to write"),
    pytest.param("way/to/cache", _give, marks=needs_root, id="the files, of somebody else"),
    pytest.param("way/to/records", _give, marks=needs_root, id="the digests, of somebody else"),
    pytest.param("way", _give, marks=needs_root, id="two above, of somebody else"),
    pytest.param("way/to", _behind_anothers_link, marks=needs_root, id="behind a link of somebody else"),
]


@pytest.mark.parametrize(("name", "spoil"), SPOILT)
def test_native_code_that_somebody_else_could_have_put_there_is_never_run(
    runtime: WasmRuntime, tmp_path: Path, name: str, spoil: Callable[[Path], None]
) -> None:
    """Its digest is recorded and right: the control arm runs the same bytes."""
    assert run(runtime).exit.code == 0, "the control arm"
    runtime.close()
    spoil(tmp_path / name)
    assert not runtime.ready
    fresh = WasmRuntime(*runtime._directories)
    fresh._package = runtime._package
    with pytest.raises(RuntimeUnavailable) as refusal:
        run(fresh)
    assert "belongs to somebody else" in str(refusal.value) or "can be written by others" in str(refusal.value)
    with pytest.raises(Untrusted):
        runtime._cache.keep(MODULE, lambda file: file.write(b"new"))


def test_directories_of_our_own_below_a_shared_one_are_trusted(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    (tmp_path / "shared" / "own").mkdir(mode=0o700)
    assert distrust(str(tmp_path / "shared" / "own")) == ""
    assert distrust(str(tmp_path / "shared" / "own" / "missing" / "too")) == ""
    (tmp_path / "shared").chmod(0o777)
    assert "chmod go-w" in distrust(str(tmp_path / "shared" / "own")), "without the sticky bit anybody can replace it"


READ = """
import sys
from agent_sandbox.runtime.wasm.cache import Cache, checked
cache = Cache(sys.argv[1] + "/own", sys.argv[1] + "/own", sys.argv[2], ((sys.argv[3] + "/cache", sys.argv[3] + "/records"),))
entry = cache.entry("module")
content = bytearray()
if entry is not None:
    with checked(entry, content.extend):
        pass
print(content.decode() or "nothing")
"""


@pytest.mark.needs_root
def test_other_users_read_what_root_compiled_and_nobody_elses(reachable_checkout: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:  # pytest's own directories are closed to others
        os.chmod(name, 0o755)
        place = Path(name)
        cache = Cache(str(place / "cache"), str(place / "records"), KEY, public=True)
        before = os.umask(0o077)  # root's own habit must not matter
        try:
            cache.keep("module", lambda file: file.write(b"canary"))
        finally:
            os.umask(before)

        def read() -> str:
            command = [str(reachable_checkout / ".venv/bin/python"), "-c", READ, "/nowhere", KEY, str(place)]
            return subprocess.run(
                command, user=OTHER, group=OTHER, extra_groups=(), env={}, cwd="/", capture_output=True, text=True, check=True
            ).stdout.strip()

        assert read() == "canary"
        _give(place / "cache")
        assert read() == "nothing", "it may have been planted"
        os.chown(place / "cache", 0, 0)
        assert read() == "canary"
        _give(place / "records" / f"{KEY}-module.sha256")
        assert read() == "nothing"


def test_no_other_user_can_hold_up_the_compiler_of_all(tmp_path: Path) -> None:
    cache = Cache(str(tmp_path / "cache"), str(tmp_path / "records"), KEY, public=True)
    lock = compiler.try_lock(cache)
    assert lock is not None
    cache.keep("module", lambda file: file.write(b"compiled"))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "cache").iterdir()}
    assert modes == {"lock": 0o600, f"{KEY}-module": 0o644}, "whoever can open a file can lock it"
    os.close(lock)


def test_a_file_of_ones_own_is_used_before_a_shared_one_and_a_damaged_one_is_replaced_by_ones_own(
    bare: WasmRuntime, tmp_path: Path
) -> None:
    subprocess.run(bare.building(), check=True)
    user = WasmRuntime(str(tmp_path / "own"), str(tmp_path / "digests"), others=(bare._directories,))
    user._package = bare._package
    assert user.ready and run(user).exit.code == 0, "compiled by another, used at once"
    subprocess.run(user.building(), check=True)
    assert not (tmp_path / "own").exists(), "nothing was compiled twice"
    shared = user._cache.entry(MODULE)
    assert shared is not None
    os.truncate(shared.path, 1000)
    with pytest.raises(RuntimeUnavailable):
        fresh = replace_runtime(user)
        run(fresh)
    subprocess.run(user.building(), check=True)
    own = user._cache.entry(MODULE)
    assert own is not None and own.path.startswith(str(tmp_path / "own")) and sound(own)
    fresh = replace_runtime(user)
    assert run(fresh).exit.code == 0
    fresh.close()
    user.close()


def replace_runtime(runtime: WasmRuntime) -> WasmRuntime:
    """Another one on the same directories, as another process would have it."""
    fresh = WasmRuntime(*runtime._directories, others=runtime._others)
    fresh._package = runtime._package
    return fresh


def test_makers_at_the_same_time_make_one_whole_set(bare: WasmRuntime) -> None:
    makers = [subprocess.Popen(bare.building()) for _ in range(3)]
    assert [maker.wait() for maker in makers] == [0, 0, 0]
    assert bare.ready and run(bare).exit.code == 0
    bare.close()


def test_the_installed_command_uses_what_was_compiled_for_all(project: Path, tmp_path: Path) -> None:
    compiled.offer_to_all(tmp_path / "shared")
    bare_home = {"AGENT_SANDBOX_STATE": str(tmp_path / "state"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    shell = Shell(project, {**bare_home, "AGENT_SANDBOX_SHARED_CACHE": str(tmp_path / "shared")})
    line = ("code", "-", "-l", "python", "--runtime", "wasm")
    assert shell(*line, stdin=b"print(6 * 7)").stdout == b"42\n"
    assert not (tmp_path / "cache").exists()
    without = replace(shell, env={**bare_home, "AGENT_SANDBOX_SHARED_CACHE": str(tmp_path / "elsewhere")})
    assert without(*line, stdin=b"print(6 * 7)").returncode == 125, "the control arm"
    plant = f"mkdir -p {tmp_path}/shared/wasm/records && echo planted > {tmp_path}/shared/wasm/records/digest"
    assert shell("run", f"ls {tmp_path}/shared || {plant}").returncode == 0, "a guest does not see it, and writes into its own layer"
    assert not list(RECORDS.glob("digest"))


def test_the_progress_is_the_file_that_is_being_made(bare: WasmRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Compilation] = []
    real = compiler.report

    def report(lock: int, state: Compilation) -> None:
        told.append(state)
        real(lock, state)

    monkeypatch.setattr(compiler, "report", report)
    lock = compiler.try_lock(bare._cache)
    assert lock is not None
    words = bare._compiler_arguments(MODULE)
    compiler.make(["", *words], lock)
    assert [(each.step, each.steps, each.name) for each in told] == [(0, 0, ""), (1, 3, MODULE), (2, 3, "plain"), (3, 3, "pandas")]
    assert compiler.compilation(bare._cache) == told[-1], "others can read it"
    os.unlink(f"{bare._cache.directory}/{bare._cache.key}-{stored_as('plain')}")
    told.clear()
    compiler.make(["", *words], lock)
    assert [(each.step, each.steps, each.name) for each in told][1:] == [(1, 1, "plain")], "only what is missing is counted"
    os.close(lock)
    fcntl.flock(os.open(f"{bare._cache.directory}/lock", os.O_RDONLY), fcntl.LOCK_EX)


def test_progress_is_shown_on_a_terminal_and_nowhere_else(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    state = Compilation(os.getpid(), 2, 6, MODULE)
    setup._show(state, 12.0)
    assert capsys.readouterr().err == "", "not into a pipe or a file"
    ours, theirs = pty.openpty()
    with open(theirs, "w") as terminal, open(ours, "rb", buffering=0) as seen:
        monkeypatch.setattr(sys, "stderr", terminal)
        setup._show(None, 11.0)
        setup._show(state, 12.0)
        assert b"2 of 6: the Python interpreter (12 s, " in seen.read(200)
