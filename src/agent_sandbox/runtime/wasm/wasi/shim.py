"""A way for our own code to make the engine's system calls.

They work on the memory that the caller exports, so the caller must be an instance: a tiny one that only passes calls on. One kind lends the
memory of the program, so that its addresses mean what they mean; the other has memory of its own, for what the program is not to see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import wasmtime

from agent_sandbox.runtime.wasm.wasi.abi import MODULE, SIGNATURES
from agent_sandbox.runtime.wasm.wasi.guest_memory import GuestMemory

_TYPES = {"i": "i32", "l": "i64"}
_OWN_PAGES = 16  # of 64 KiB: a listing of many thousand names at once
OWN_BYTES = _OWN_PAGES << 16

Call = Callable[..., int]


class Shim:
    """Compiled once, for these functions, before any fork."""

    def __init__(self, engine: wasmtime.Engine, names: Iterable[str], *, own_memory: bool = False) -> None:
        self._names = tuple(names)
        self._own = own_memory
        self._linker = wasmtime.Linker(engine)
        self._linker.define_wasi()
        self._module = wasmtime.Module(engine, _text(self._names, own_memory))

    def instance(self, store: wasmtime.Store, memory: wasmtime.Memory) -> tuple[dict[str, Call], GuestMemory]:
        """The functions, and the memory that they work on; `memory` is the program's, which an instance with its own does not touch."""
        functions = [self._linker.get(store, MODULE, name) for name in self._names]
        made = wasmtime.Instance(store, self._module, functions if self._own else [*functions, memory]).exports(store)
        lent = made["memory"]
        assert isinstance(lent, wasmtime.Memory)
        return {name: _bound(made[name], store) for name in self._names}, GuestMemory(store, lent)


def _bound(function: object, store: wasmtime.Store) -> Call:
    assert isinstance(function, wasmtime.Func)
    return lambda *arguments: int(function(store, *arguments))


def _text(names: tuple[str, ...], own_memory: bool) -> str:
    lines = []
    for name in names:
        parameters = " ".join(_TYPES[each] for each in SIGNATURES[name])
        lines.append(f'(import "{MODULE}" "{name}" (func ${name} (param {parameters}) (result i32)))')
    lines.append(
        f'(memory (export "memory") {_OWN_PAGES})' if own_memory else '(import "program" "memory" (memory 0)) (export "memory" (memory 0))'
    )
    for name in names:
        parameters = " ".join(_TYPES[each] for each in SIGNATURES[name])
        arguments = " ".join(f"(local.get {index})" for index in range(len(SIGNATURES[name])))
        lines.append(f'(func (export "{name}") (param {parameters}) (result i32) (call ${name} {arguments}))')
    return f"(module {' '.join(lines)})"
