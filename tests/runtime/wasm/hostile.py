"""A hostile WebAssembly module in the interpreter's place: it calls any function of its host with any numbers, with no C library between.

What it calls is a program of records in its memory, so the same module serves for garbage and for well-formed attacks, in our own
`WasmMachine` and in a guest from a cache of its own. `main` is a process that hands garbage to everything that `WasmMachine` offers.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import wasmtime

from agent_sandbox.runtime.wasm import recipe
from agent_sandbox.runtime.wasm.cache import MODULE, Cache
from agent_sandbox.runtime.wasm.machine import PAGE, DeterministicSettings, WasmMachine, compiled, configuration
from agent_sandbox.runtime.wasm.recipe import IMAGES, javascript_stored_as, stored_as
from agent_sandbox.runtime.wasm.runtime import WasmRuntime, cache_for
from agent_sandbox.runtime.wasm.wasi.abi import OutOfBounds
from scripts.compile_wasm import CACHE

PAGES = 4
WORDS = 0x8000  # where the strings of a program lie
FREE = 0xC000  # and where its calls may write
_RECORDS, _RECORD, _ARGUMENTS, _RESULT = 64, 96, 8, 88
_UNTOUCHED = 0xDEAD
WASI = "wasi_snapshot_preview1"


class Function(NamedTuple):
    """One that the interpreter imports: where from, and the letters of its parameters, `i` for 32 bits and `l` for 64."""

    module: str
    name: str
    parameters: str
    answers: bool


def imported(cache: Path = CACHE) -> list[Function]:
    """All that the interpreter imports, read from the compiled one."""
    compiled = next(path for path in cache.glob("*-module"))
    module = wasmtime.Module.deserialize_file(wasmtime.Engine(configuration()), str(compiled))
    found = []
    for each in module.imports:
        assert isinstance(each.type, wasmtime.FuncType) and each.name
        letters = "".join("i" if str(kind) == "i32" else "l" for kind in each.type.params)
        found.append(Function(each.module, each.name, letters, bool(each.type.results)))
    return found


class Call(NamedTuple):
    """A call of a function by its name."""

    name: str
    arguments: tuple[int, ...]


def module(functions: Sequence[Function], memory: bytes) -> bytes:
    """The module, with this memory to begin with."""
    imports, wrappers, names = [], [], []
    for index, each in enumerate(functions):
        kinds = " ".join("i32" if letter == "i" else "i64" for letter in each.parameters)
        answer = "(result i32)" if each.answers else ""
        imports.append(f'(import "{each.module}" "{each.name}" (func $f{index} (param {kinds}) {answer}))')
        loads = [f"(i64.load offset={_ARGUMENTS + 8 * at} (local.get 0))" for at in range(len(each.parameters))]
        given = " ".join(load if letter == "l" else f"(i32.wrap_i64 {load})" for load, letter in zip(loads, each.parameters, strict=True))
        call = f"(call $f{index} {given})"
        body = f"(i64.store offset={_RESULT} (local.get 0) (i64.extend_i32_u {call}))" if each.answers else call
        wrappers.append(f"(func $w{index} (param i32) {body})")
        names.append(f"$w{index}")
    writing = next(index for index, each in enumerate(functions) if each.name == "fd_write")
    text = "".join(f"\\{byte:02x}" for byte in memory.rstrip(b"\0"))
    return bytes(
        wasmtime.wat2wasm(f"""(module (type $call (func (param i32))) {" ".join(imports)}
      (memory (export "memory") {PAGES}) (table {len(names)} funcref) (elem (i32.const 0) {" ".join(names)}) (data (i32.const 0) "{text}")
      {" ".join(wrappers)}
      (func (export "host_alloc") (param i32) (result i32) (i32.const {FREE}))
      (func (export "turn") (param i32 i32) (result i32) (local $at i32) (local $left i32)
        (local.set $at (i32.const {_RECORDS}))
        (local.set $left (i32.load (i32.const 0)))
        (block $done (loop $next
          (br_if $done (i32.eqz (local.get $left)))
          (call_indirect (type $call) (local.get $at) (i32.load (local.get $at)))
          (local.set $at (i32.add (local.get $at) (i32.const {_RECORD})))
          (local.set $left (i32.sub (local.get $left) (i32.const 1)))
          (br $next)))
        (i32.store (i32.const 16) (i32.const 0)) (i32.store (i32.const 20) (i32.const {PAGES * PAGE}))
        (call $f{writing} (i32.const 1) (i32.const 16) (i32.const 1) (i32.const 8))))""")
    )


class Program:
    """Calls to be made one after the other, and the strings they need."""

    def __init__(self, functions: Sequence[Function]) -> None:
        self._functions = [each.name for each in functions]
        self._calls: list[Call] = []
        self._words = b""

    def text(self, text: str) -> tuple[int, int]:
        """Put it into memory; where, and its length."""
        at, data = WORDS + len(self._words), os.fsencode(text)
        self._words += data
        return at, len(data)

    def call(self, name: str, *arguments: int) -> int:
        """Add a call; its number, by which `results` has its answer."""
        self._calls.append(Call(name, arguments))
        return len(self._calls) - 1

    def memory(self) -> bytes:
        """What lies in memory before it runs."""
        image = bytearray(PAGES * PAGE)
        struct.pack_into("<I", image, 0, len(self._calls))
        for number, call in enumerate(self._calls):
            at = _RECORDS + _RECORD * number
            struct.pack_into("<I", image, at, self._functions.index(call.name))
            for index, argument in enumerate(call.arguments):
                struct.pack_into("<Q", image, at + _ARGUMENTS + 8 * index, argument & (2**64 - 1))
            struct.pack_into("<Q", image, at + _RESULT, _UNTOUCHED)
        image[WORDS : WORDS + len(self._words)] = self._words
        return bytes(image)

    def results(self, memory: bytes) -> list[int]:
        """What each call answered, from the memory that it printed at its end."""
        assert len(memory) >= PAGES * PAGE, "it came to its end and printed its memory"
        memory = memory[-PAGES * PAGE :]
        return [struct.unpack_from("<Q", memory, _RECORDS + _RECORD * number + _RESULT)[0] for number in range(len(self._calls))]


_EDGES = (0, 1, 3, 4, -1, 0x7FFFFFFF, 0x80000000, PAGES * PAGE - 1, PAGES * PAGE, PAGES * PAGE - 4, 2**63, 2**64 - 1)


def garbage(function: Function, seed: int, count: int) -> Iterable[tuple[int, ...]]:
    """Arguments that mean nothing: each edge everywhere, then edges in any mixture, a real descriptor in front."""
    draw = random.Random(seed)
    width = len(function.parameters)
    yield from ((edge,) * width for edge in _EDGES)
    if function.name != "poll_oneoff":  # it may well find a clock to wait for
        yield from ((draw.randrange(6), *draw.choices(_EDGES, k=width - 1))[:width] for _ in range(count))


def lend_javascript(cache: Cache, found: recipe.Package) -> None:
    """The real interpreter of JavaScript as it was compiled for this checkout: no zygote comes up without it."""
    name = javascript_stored_as(found.javascript_digest, counting=False)
    lent = next(CACHE.glob(f"*-{name}")).read_bytes()
    cache.keep(name, lambda file: file.write(lent))


@contextmanager
def runtime(directory: Path, module: bytes, memory: bytes = b"") -> Iterator[WasmRuntime]:
    """A runtime whose interpreter is this module, compiled into a cache of its own, with this memory for its images."""
    made = WasmRuntime(str(directory / "cache"), str(directory / "records"))
    made._package = replace(recipe.find_package(), digest=hashlib.sha256(module).hexdigest())
    cache = cache_for(made._package, *made._directories)
    cache.keep(MODULE, lambda file: file.write(compiled(module, counting=False)))
    lend_javascript(cache, made._package)
    for image in IMAGES:
        cache.keep(stored_as(image), lambda file: file.write(memory or bytes(PAGES * PAGE)))
    try:
        yield made
    finally:
        made.close()


def main() -> None:
    """Hand it all to `WasmMachine` in this process, and print how often each function answered, and how often the program was ended for it.

    The arguments are a directory, how many mixtures to try of each function, a seed, whether the run is to be a deterministic one, and the
    directory of the compiled interpreter.
    """
    directory, count, seed, deterministic = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "True"
    functions = imported(Path(sys.argv[5]))
    engine = wasmtime.Engine(configuration())
    noise = random.Random(seed).randbytes(PAGES * PAGE - WORDS)
    told = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    machine = WasmMachine(engine, wasmtime.Module(engine, module(functions, b"")))
    machine.leave = lambda code: None
    machine.door.answer = lambda question: question[:100]
    determinism = DeterministicSettings(seed, 1 << 30, lambda *_: None) if deterministic else None
    found: dict[str, list[int]] = {}
    for index, function in enumerate(functions):
        answered = ended = 0
        for arguments in garbage(function, seed + index, count):
            program = Program(functions)
            program.call(function.name, *arguments)
            instance = machine.instance(((directory, "/"), (directory, "/other")), determinism)
            instance.exported_memory.write(instance.store, program.memory()[:WORDS] + noise, 0)
            try:
                instance.run("")
                answered += 1
            except (wasmtime.Trap, wasmtime.WasmtimeError, OutOfBounds):
                ended += 1
        found[function.name] = [answered, ended]
    os.write(told, json.dumps(found).encode())


if __name__ == "__main__":
    main()
