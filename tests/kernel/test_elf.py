"""What program files say of themselves, held against what the loader itself makes of them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from agent_sandbox.kernel import elf

LS = os.path.realpath("/bin/ls")


def linked(program: str) -> set[str]:
    """The libraries that the loader finds for a program."""
    said = subprocess.run(["ldd", program], capture_output=True, check=True).stdout.decode()
    return {line.split(" => ")[0].strip() for line in said.splitlines() if " => " in line}


def test_a_program_names_its_loader_and_what_it_is_linked_with() -> None:
    found = elf.read(LS)
    assert found is not None and found.program and os.path.exists(found.loader)
    assert set(found.needed) <= linked(LS) | {os.path.basename(found.loader)} and "libc.so.6" in found.needed


def test_a_library_is_no_program() -> None:
    cache = elf.cached_libraries(Path(elf.CACHE).read_bytes())
    for name in (b"libz.so.1", b"libm.so.6"):
        found = elf.read(os.fsdecode(cache[name][0]))
        assert found is not None and not found.program and not found.loader


def test_the_cache_of_the_loader_is_read_as_ldconfig_reads_it() -> None:
    said = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, check=True).stdout.decode().splitlines()[1:]
    listed = {(line.split()[0], line.rpartition(" => ")[2]) for line in said if " => " in line}
    found = elf.cached_libraries(Path(elf.CACHE).read_bytes())
    assert {(os.fsdecode(name), os.fsdecode(path)) for name, paths in found.items() for path in paths} == listed


@pytest.mark.parametrize("content", [b"", b"glibc-ld.so.cache1.1", b"glibc-ld.so.cache1.1" + b"\xff" * 200, b"ld.so-1.7.0\0" * 9])
def test_a_broken_cache_knows_nothing(content: bytes) -> None:
    assert elf.cached_libraries(content) == {}


def test_a_program_cut_short_anywhere_says_nothing_or_less(tmp_path: Path) -> None:
    whole = Path(LS).read_bytes()
    for length in (0, 4, 20, 63, 64, 100, 900, 4000, len(whole) // 2):
        (tmp_path / "cut").write_bytes(whole[:length])
        found = elf.read(str(tmp_path / "cut"))
        assert found is None or set(found.needed) <= set(elf.read(LS).needed) | {""}  # type: ignore[union-attr]


def test_what_is_no_file_of_ours_to_read_says_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "missing", tmp_path, tmp_path / "pipe"):
        assert elf.read(str(path)) is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"#!/bin/sh\n", ("/bin/sh",)),
        (b"#! /usr/bin/env -S node --x\nrest", ("/usr/bin/env", "-S", "node", "--x")),
        (b"#!/bin/sh", ("/bin/sh",)),
        (b"", ()),
        (b"\x7fELF", ()),
        (b"#!\n", ()),
    ],
)
def test_a_script_names_its_interpreter_in_its_first_line(tmp_path: Path, line: bytes, words: tuple[str, ...]) -> None:
    (tmp_path / "script").write_bytes(line)
    assert elf.interpreter_of(str(tmp_path / "script")) == words
