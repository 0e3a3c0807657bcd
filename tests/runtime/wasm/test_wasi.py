"""The system calls that are answered here: what a program hands over is believed in nothing, and large directories are listed whole."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import wasmtime

from agent_sandbox.runtime.process.probe import trial
from agent_sandbox.runtime.wasm.machine import DeterministicSettings, WasmMachine, configuration
from agent_sandbox.runtime.wasm.wasi import abi
from agent_sandbox.runtime.wasm.wasi.abi import OutOfBounds
from agent_sandbox.runtime.wasm.wasi.clock import READING_NS, START_NS, Stream, VirtualClock
from agent_sandbox.runtime.wasm.wasi.deterministic import poll
from agent_sandbox.runtime.wasm.wasi.listing import FileTable
from tests import compiled

# A program of one page of memory that makes one call, with whatever numbers the test wants.
PROGRAM = """
(module
  (import "wasi_snapshot_preview1" "{name}" (func $call (param {types}) (result i32)))
  (memory (export "memory") 1)
  (func (export "host_alloc") (param i32) (result i32) i32.const 1024)
  (func (export "turn") (param i32 i32) (result i32) (call $call {arguments})))
"""
FAR, LONG = -16, -1  # addresses and lengths as a program would write them: near the end of 32 bits


def called(name: str, *arguments: int, place: Path) -> int:
    """The answer to one call of a deterministic program that has one directory open, as descriptor 3."""
    types = {"i": "i32", "l": "i64"}
    text = PROGRAM.format(
        name=name,
        types=" ".join(types[each] for each in abi.SIGNATURES[name]),
        arguments=" ".join(f"({types[each]}.const {number})" for each, number in zip(abi.SIGNATURES[name], arguments, strict=True)),
    )
    engine = wasmtime.Engine(configuration())
    machine = WasmMachine(engine, wasmtime.Module(engine, text))
    return machine.instance(((str(place), "/"),), DeterministicSettings(7, None, lambda *_: None)).run("")


GARBAGE = {
    "a clock": ("clock_time_get", (0, 0, FAR)),
    "a resolution": ("clock_res_get", (1, FAR)),
    "randomness": ("random_get", (FAR, LONG)),
    "much randomness": ("random_get", (0, LONG)),
    "a wait": ("poll_oneoff", (FAR, 0, 3, 0)),
    "a large wait": ("poll_oneoff", (0, 0, LONG, 0)),
    "events": ("poll_oneoff", (0, FAR, 1, 0)),
    "input": ("fd_read", (0, FAR, 1, 0)),
    "a listing": ("fd_readdir", (3, FAR, LONG, 0, 0)),
    "where to say how much": ("fd_readdir", (3, 0, 100, 0, FAR)),
}


@pytest.mark.parametrize(("name", "arguments"), GARBAGE.values(), ids=GARBAGE.keys())
def test_an_address_outside_its_memory_ends_the_program(name: str, arguments: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(OutOfBounds):
        called(name, *arguments, place=tmp_path)


REFUSED = {
    "a clock that is not there": ("clock_time_get", (99, 0, 0), abi.INVALID),
    "no wait at all": ("poll_oneoff", (0, 0, 0, 0), abi.INVALID),
    "a listing of what is not open": ("fd_readdir", (77, 0, 100, 0, 200), abi.BAD_FD),
    "a status of what is not open": ("fd_filestat_get", (77, 0), abi.BAD_FD),
    "to close what is not open": ("fd_close", (77,), abi.BAD_FD),
}


@pytest.mark.parametrize(("name", "arguments", "error"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_is_an_error(name: str, arguments: tuple[int, ...], error: int, tmp_path: Path) -> None:
    assert called(name, *arguments, place=tmp_path) == error


THE_ENGINES = {
    "a new directory": ("path_create_directory", (3, FAR, 100)),
    "what to remove": ("path_unlink_file", (3, FAR, 100)),
    "what to ask about": ("path_filestat_get", (3, 0, FAR, 5, 0)),
    "where to answer": ("fd_filestat_get", (3, FAR)),
    "two paths": ("path_rename", (3, FAR, 4, 3, FAR, 4)),
    "room for what is read": ("fd_read", (3, FAR, 1, 0)),
}


@pytest.mark.parametrize(("name", "arguments"), THE_ENGINES.values(), ids=THE_ENGINES.keys())
def test_so_does_one_that_is_passed_on(name: str, arguments: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(wasmtime.WasmtimeError, match="out of bounds"):
        called(name, *arguments, place=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_of_thousands_is_listed_whole_in_an_ordinary_run() -> None:
    runtime = compiled.runtime()
    source = "import os\nfor n in range(4000): os.mkdir(f'/tmp/{n}')\nprint(sorted(map(int, os.listdir('/tmp'))) == [*range(4000)])"
    try:
        with runtime.launch(trial(source)) as guest:
            assert guest.wait().stdout == b"True\n"
    finally:
        runtime.close()


def test_the_clock_moves_by_being_read_and_by_sleeping() -> None:
    clock = VirtualClock()
    assert [clock.read(1), clock.read(1), clock.read(0)] == [READING_NS, 2 * READING_NS, START_NS + 3 * READING_NS]
    clock.pass_by(10**9)
    assert clock.read(1) == 10**9 + 4 * READING_NS
    assert clock.read(2) == 5 * READING_NS, "a sleep takes no processor time"
    assert clock.read(9) is None


def subscription(word: int, body: bytes, kind: int) -> bytes:
    return abi.SUBSCRIBED_TO.pack(word, kind) + body.ljust(32, b"\0")


def test_of_several_sleeps_the_shortest_ends_and_input_is_always_there() -> None:
    clock = VirtualClock()
    sleeps = [subscription(word, abi.TO_CLOCK.pack(1, seconds * 10**9, 0, 0), abi.CLOCK) for word, seconds in ((1, 5), (2, 3))]
    assert [struct.unpack_from("<Q", event)[0] for event in poll(b"".join(sleeps), clock, open_is(True))] == [2]
    assert clock.read(1) == 3 * 10**9 + READING_NS
    readable = subscription(3, abi.TO_FD.pack(0), abi.READABLE)
    assert [struct.unpack_from("<QH", event) for event in poll(readable + sleeps[0], clock, open_is(True))] == [(3, abi.OK)]
    assert [struct.unpack_from("<QH", event) for event in poll(readable, clock, open_is(False))] == [(3, abi.BAD_FD)]


def open_is(answer: bool) -> Callable[[int], bool]:
    return lambda _: answer


def test_the_same_seed_draws_the_same() -> None:
    one, other, third = Stream(7), Stream(7), Stream(8)
    assert [one.take(5), one.take(70_000)] == [other.take(5), other.take(70_000)]
    assert third.take(5) != Stream(7).take(5)


def test_a_file_keeps_its_number_under_another_name_and_a_new_one_gets_another() -> None:
    names = FileTable(VirtualClock())
    first = names.file("/a/x").number
    names.renamed("/a", "/b")
    assert names.file("/b/x").number == first and names.file("/a/x").number != first
    names.linked("/b/x", "/c")
    assert names.file("/c") is names.file("/b/x")
    names.removed("/b/x")
    names.made("/b/x")
    assert names.file("/b/x").number != first and names.file("/c").number == first
    assert names.file("/b/x").modified > START_NS == names.file("/never touched").modified


def test_a_descriptor_goes_where_its_directory_goes() -> None:
    names = FileTable(VirtualClock())
    names.opened(5, "/a/b")
    names.renamed("/a", "/z")
    assert names.open[5].path == "/z/b"
    names.renumbered(5, 6)
    assert 5 not in names.open and names.open[6].path == "/z/b"
