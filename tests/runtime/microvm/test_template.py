"""Templates are complete or absent, made once, and recognised when they are damaged or of another version."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent_sandbox._fast.values import replace
from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.runtime.microvm import template
from agent_sandbox.runtime.microvm.kernel_package import Kernel
from agent_sandbox.runtime.microvm.template import FACTS, RAM, STATE, Recipe, Shelf, Unusable

MIB = 1 << 20
KEY = "k" * 24


def build(directory: str) -> None:
    """Make a template as the builder does, from a memory of 1 MiB with two pages in use."""
    memory = os.memfd_create("memory")
    os.truncate(memory, MIB)
    os.pwrite(memory, b"kernel" * 100, 4096)
    os.pwrite(memory, b"agent" * 100, 80 * 4096)
    os.pwrite(memory, bytes(4096), 40 * 4096)  # in use, and empty
    checksum = template.pack_ram(memory, os.path.join(directory, RAM))
    Path(directory, STATE).write_bytes(b"devices")
    facts = {
        "memory_mib": 1,
        "accelerator": "tcg",
        "ram_checksum": checksum,
        "state_checksum": template.checksum_of(os.path.join(directory, STATE)),
        "state_bytes": 7,
        "libraries": [],
    }
    Path(directory, FACTS).write_text(json.dumps(facts))
    os.close(memory)


def test_a_template_is_loaded_as_it_was_saved_and_nobody_can_write_to_the_copy(tmp_path: Path) -> None:
    made = Shelf(str(tmp_path)).make(KEY, build)
    ram, state = made.load()
    assert os.pread(ram, 6, 4096) == b"kernel" and os.pread(ram, 5, 80 * 4096) == b"agent" and os.pread(state, 100, 0) == b"devices"
    assert os.fstat(ram).st_size == MIB
    assert os.stat(tmp_path / KEY / RAM).st_blocks * 512 < 64 * 1024, "empty pages take no room on disk"
    for fd in (ram, state):
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        os.close(fd)


@pytest.mark.parametrize("name", [RAM, STATE])
@pytest.mark.parametrize("damage", ["truncated", "overwritten", "removed"])
def test_a_damaged_template_is_recognised_and_made_again(tmp_path: Path, name: str, damage: str) -> None:
    shelf = Shelf(str(tmp_path))
    file = Path(shelf.make(KEY, build).directory, name)
    if damage == "truncated":
        os.truncate(file, file.stat().st_size // 2)
    elif damage == "overwritten":
        with open(file, "r+b") as content:
            content.seek(4096 if name == RAM else 0)
            content.write(b"other")
    else:
        file.unlink()
    found = shelf.find(KEY)
    assert found is not None
    with pytest.raises(Unusable):
        found.load()
    shelf.discard(KEY)
    for fd in shelf.make(KEY, build).load():
        os.close(fd)


@pytest.mark.parametrize("facts", ["", "{", "[]", '{"memory_mib": 1}', '{"libraries": [], "a": 1}'])
def test_a_template_whose_facts_cannot_be_read_is_made_again(tmp_path: Path, facts: str) -> None:
    shelf = Shelf(str(tmp_path))
    Path(shelf.make(KEY, build).directory, FACTS).write_text(facts)
    with pytest.raises(Unusable):
        shelf.find(KEY)
    assert shelf.make(KEY, build).memory_mib == 1


def test_a_full_disk_leaves_nothing_behind_and_says_where(tmp_path: Path) -> None:
    def fill(directory: str) -> None:
        Path(directory, "half").write_bytes(b"x")
        with open("/dev/full", "wb", buffering=0) as full:
            full.write(b"x")

    with pytest.raises(RuntimeUnavailable) as refused:
        Shelf(str(tmp_path)).make(KEY, fill)
    assert os.strerror(errno.ENOSPC) in refused.value.message and str(tmp_path) in refused.value.message
    assert [name for name in os.listdir(tmp_path) if not name.endswith(".lock")] == []


def test_what_a_killed_builder_left_is_cleared_and_not_used(tmp_path: Path) -> None:
    left = tmp_path / f"{KEY}.abc.new"
    left.mkdir()
    (left / RAM).write_bytes(b"half")
    shelf = Shelf(str(tmp_path))
    assert shelf.find(KEY) is None
    shelf.make(KEY, build)
    assert not left.exists()


def test_a_template_that_nobody_uses_any_more_is_removed_when_another_is_made(tmp_path: Path) -> None:
    shelf = Shelf(str(tmp_path))
    old, used = (shelf.make(letter * 24, build) for letter in "ou")
    for each in (old, used):
        os.utime(os.path.join(each.directory, FACTS), (0, 0))
    for fd in used.load():
        os.close(fd)
    shelf.make(KEY, build)
    assert shelf.find("o" * 24) is None and shelf.find("u" * 24) is not None


def test_two_processes_that_make_one_template_make_it_once(tmp_path: Path) -> None:
    code = """
import os, sys
from tests.runtime.microvm import test_template as here
def build(directory):
    os.close(os.open(os.path.join(sys.argv[1], "built"), os.O_CREAT | os.O_EXCL))
    sys.stdout.write("b"); sys.stdout.flush(); sys.stdin.read(1)
    here.build(directory)
print(here.Shelf(os.path.join(sys.argv[1], "shelf")).make(here.KEY, build).memory_mib)
"""
    pipe = subprocess.PIPE
    both = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=pipe, stdout=pipe, stderr=pipe) for _ in range(2)]
    outputs = []
    for process in both:
        assert process.stdin is not None
        process.stdin.write(b"x")
        process.stdin.flush()
    for process in both:
        out, err = process.communicate()
        assert process.returncode == 0, err.decode()
        outputs.append(out)
    assert sorted(outputs) == [b"1\n", b"b1\n"], "one of them built, and the other waited and used it"


def test_everything_that_a_template_is_made_from_changes_its_key(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("qemu", "vmlinuz", "other")]
    for file in files:
        file.write_bytes(b"x")
    kernel = Kernel("6.1", str(files[1]), ())
    recipe = Recipe(str(files[0]), kernel, 1024)
    others = [
        replace(recipe, qemu=str(files[2])),
        replace(recipe, kernel=replace(kernel, version="6.2")),
        replace(recipe, memory_mib=4096),
        replace(recipe, preload=("json",)),
        replace(recipe, accelerator="kvm"),
    ]
    keys = {each.key for each in (recipe, *others)}
    assert len(keys) == len(others) + 1 and recipe.key == Recipe(str(files[0]), kernel, 1024).key
    before = recipe.key
    files[1].write_bytes(b"newer")
    assert recipe.key != before, "a kernel that was replaced has another template"
