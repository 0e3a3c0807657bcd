"""What is answered here must be what the engine would have answered, but for numbers, times and order: a program that does things to files
at random gets the same results and the same errors in a deterministic run as in an ordinary one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from agent_sandbox.runtime.process.probe import trial
from agent_sandbox.runtime.wasm.runtime import WasmRuntime
from tests import compiled

# What is drawn does not come from the system, and what is printed holds no number, time or order of the system's.
DOINGS = """
import os, random, shutil, stat
draw = random.Random({seed})
os.mkdir("/tmp/w")
os.chdir("/tmp/w")
NAMES = ["a", "b", "c", "d/e", "d/f", "d", "g", "g/h", ".", "..", "a/", "d/../a", "link", "d/link", "t", "u/e",
         "x" * 300, "\\udcff\\udcfe", "nul\\0", ""]
open_files = []

def kind(path):
    found = os.lstat(path)
    return stat.S_IFMT(found.st_mode), None if stat.S_ISDIR(found.st_mode) else found.st_size

def listed(path):
    return [(entry.name, entry.is_symlink(), entry.is_dir()) for entry in sorted(os.scandir(path), key=lambda entry: entry.name)]

def written(path, mode):
    with open(path, mode) as file:
        return file.write("text" * draw.randrange(4))

def kept_open(path):
    open_files.append(os.open(path, os.O_RDONLY))

def asked(fd):
    found = os.fstat(fd)
    return stat.S_IFMT(found.st_mode), None if stat.S_ISDIR(found.st_mode) else found.st_size

def through(fd, path):
    return sorted(os.listdir(fd)), os.open(path, os.O_RDONLY, dir_fd=fd) >= 0

def copied(tree):  # and removed again; neither copies of copies nor what holds the copy itself: they would grow without end
    if os.path.islink(tree):
        return None
    try:
        shutil.copytree(tree, "copy", symlinks=True)
        return sorted((name, sorted(files)) for name, _, files in os.walk("copy"))
    finally:
        shutil.rmtree("copy", ignore_errors=True)

def stamped(path):
    os.utime(path, (5, 7))
    return os.stat(path).st_mtime, os.stat(path).st_atime

def one():
    path, other, tree = draw.choice(NAMES), draw.choice(NAMES), draw.choice("dg")
    fd = draw.choice(open_files) if open_files else 99
    doing = draw.choice([
        lambda: os.mkdir(path), lambda: os.rmdir(path), lambda: os.unlink(path), lambda: written(path, "w"), lambda: written(path, "a"),
        lambda: written(path, "x"), lambda: open(path).read(), lambda: os.rename(path, other), lambda: os.replace(path, other),
        lambda: os.link(path, other), lambda: os.symlink(other, path), lambda: os.readlink(path), lambda: kind(path),
        lambda: os.path.samefile(path, other), lambda: listed(path), lambda: kept_open(path), lambda: asked(fd), lambda: os.close(fd),
        lambda: through(fd, path), lambda: stamped(path), lambda: os.truncate(path, 3), lambda: sorted(os.listdir(path)),
        lambda: os.makedirs(path), lambda: shutil.rmtree(tree), lambda: os.path.exists(path),
        lambda: copied(tree),
        lambda: sorted(map(sorted, next(os.walk(path))[1:])), lambda: os.path.realpath(path), lambda: shutil.copy(path, other),
    ])
    try:
        return doing()
    except Exception as error:
        return type(error).__name__, getattr(error, "errno", None)

for _ in range({count}):
    print(ascii(one()))
for directory, directories, files in sorted(os.walk(".")):
    print(ascii((directory, sorted(directories), sorted(files))))
"""


@pytest.fixture(scope="module")
def runtime() -> Iterator[WasmRuntime]:
    made = compiled.runtime()
    yield made
    made.close()


def done(runtime: WasmRuntime, seed: int, count: int, *, deterministic: bool) -> list[str]:
    launch = trial(DOINGS.format(seed=seed, count=count))
    launch = replace(launch, limits=replace(launch.limits, output_bytes=None, wall_seconds=600))
    with runtime.launch(replace(launch, deterministic=seed if deterministic else None)) as guest:
        ran = guest.wait()
    assert ran.exit.code == 0, ran
    return ran.stdout.decode().splitlines()


@pytest.mark.parametrize("seed", range(3))
def test_files_behave_as_ever(runtime: WasmRuntime, seed: int) -> None:
    ordinary, deterministic = (done(runtime, seed, 600, deterministic=each) for each in (False, True))
    assert deterministic == ordinary
    assert len(set(ordinary)) > 40, "much was done"


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(100, 120))
def test_files_behave_as_ever_for_longer(runtime: WasmRuntime, seed: int) -> None:
    assert done(runtime, seed, 2000, deterministic=True) == done(runtime, seed, 2000, deterministic=False)
