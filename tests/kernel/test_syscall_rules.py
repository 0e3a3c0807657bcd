"""The table is written by hand, so it is held against the kernel's own headers where they are installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agent_sandbox.kernel import syscall_rules

HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),  # aarch64 has the generic numbers
}
# Placeholders, and calls of 32-bit machines: no names of a system call of ours.
NOT_CALLS = re.compile(r"arch_specific_syscall|syscalls|.*time64|sync_file_range2")


@pytest.mark.parametrize("machine", syscall_rules.MACHINES)
def test_the_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    header = HEADERS[machine]
    if not header.exists():
        pytest.skip(f"{header} is not installed (linux-libc-dev)")
    defined = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)$", header.read_text(), re.MULTILINE)}
    defined["newfstatat"] = defined.pop("fstatat", defined.get("newfstatat", -1))
    theirs = {name: number for name, number in defined.items() if not NOT_CALLS.fullmatch(name)}
    ours = syscall_rules.numbers(machine)
    assert len(theirs) > 300
    assert {name: ours.get(name) for name in theirs} == theirs


@pytest.mark.parametrize("machine", syscall_rules.MACHINES)
def test_no_number_has_two_names(machine: str) -> None:
    numbers = syscall_rules.numbers(machine)
    assert len(set(numbers.values())) == len(numbers)
