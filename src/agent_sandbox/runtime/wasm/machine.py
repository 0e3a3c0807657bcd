"""The engine, how it is configured, and an instance of the interpreter in it.

Everything is made in two steps, for fork lies between them: a `Machine` in the zygote (no call of a program has been made there, and no
thread started), an `Instance` of it in each guest. The compiler and the maker of images use the same two.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import wasmtime

from agent_sandbox.kernel.memory import move_over
from agent_sandbox.runtime.wasm.recipe import STACK
from agent_sandbox.values import dataclass

PAGE = 1 << 16  # of WebAssembly

_I32 = wasmtime.ValType.i32()
_NO_HOST = -1  # what the interpreter takes for "there is nobody there"


def configuration(*, threads: bool = False) -> wasmtime.Config:
    """How code is compiled and run. `threads` is for the compiler alone: a zygote must have one.

    A change here is one of `recipe.COMPILED_FOR`.
    """
    config = wasmtime.Config()
    config.parallel_compilation = threads
    # Without a public name. The engine refuses a stack larger than this one, which nothing here uses.
    wasmtime._ffi.wasmtime_config_async_stack_size_set(config.ptr(), STACK)
    config.max_wasm_stack = STACK
    return config


def compiled(module: bytes) -> bytearray:
    """Native code for a module, as `Machine.load` takes it."""
    return wasmtime.Module(wasmtime.Engine(configuration(threads=True)), module).serialize()


@dataclass(frozen=True)
class Image:
    """Memory of an interpreter at rest, mapped somewhere in this process."""

    address: int
    size: int


class Machine:
    """A loaded module with all it may import."""

    def __init__(self, engine: wasmtime.Engine, module: wasmtime.Module, leave: Callable[[int], object] = os._exit) -> None:
        self._engine = engine
        linker = wasmtime.Linker(engine)
        linker.define_wasi()
        linker.allow_shadowing = True
        # The engine's own knows no codes above 125. The process is the program's, and ends with it.
        linker.define_func("wasi_snapshot_preview1", "proc_exit", wasmtime.FuncType([_I32], []), lambda code: leave(code & 0xFF))
        # Whatever it hands over, pointers included, is not looked at.
        linker.define_func("host", "call", wasmtime.FuncType([_I32] * 4, [_I32]), lambda *_: _NO_HOST)
        self._ready = linker.instantiate_pre(module)

    @classmethod
    def load(cls, compiled: str, leave: Callable[[int], object] = os._exit, beside: Machine | None = None) -> Machine:
        """From a file that was compiled here. It is native code that is executed as it is: whoever calls this has checked it.

        `leave` ends the process with the exit code of a program that has ended itself. `beside` is a machine whose engine it shares.
        """
        engine = beside._engine if beside is not None else wasmtime.Engine(configuration())
        return cls(engine, wasmtime.Module.deserialize_file(engine, compiled), leave)

    def instance(self, directories: Sequence[tuple[str, str]]) -> Instance:
        """A fresh interpreter of Python. It sees these directories, by the names they have inside; an image remembers them by number."""
        return Instance(*self.fresh(directories))

    def fresh(self, directories: Sequence[tuple[str, str]]) -> tuple[wasmtime.Store, wasmtime.Instance]:
        """A fresh instance, whatever its module exports, that sees these directories."""
        store = wasmtime.Store(self._engine)
        wasi = wasmtime.WasiConfig()
        wasi.argv = ["python"]
        wasi.inherit_stdin()
        wasi.inherit_stdout()
        wasi.inherit_stderr()
        for real, inside in directories:
            wasi.preopen_dir(real, inside)
        store.set_wasi(wasi)
        return store, self._ready.instantiate(store)


class Instance:
    """One interpreter of Python."""

    def __init__(self, store: wasmtime.Store, instance: wasmtime.Instance) -> None:
        exports = instance.exports(store)
        turn, alloc, memory = exports["turn"], exports["host_alloc"], exports["memory"]
        assert isinstance(turn, wasmtime.Func) and isinstance(alloc, wasmtime.Func) and isinstance(memory, wasmtime.Memory)
        self._store, self._turn, self._alloc, self._memory = store, turn, alloc, memory

    def become(self, image: Image) -> None:
        """Take the memory of another interpreter, which was at rest, for one's own. It is moved here: an image serves once."""
        missing = image.size - self._memory.data_len(self._store)
        if missing > 0:
            self._memory.grow(self._store, missing // PAGE)
        move_over(image.address, image.size, self._memory.get_buffer_ptr(self._store))

    def run(self, code: str) -> int:
        """Run code in it; 0 when it came through. A program that ends itself ends this process. Raises wasmtime.Trap when it breaks."""
        data = code.encode("utf-8", "surrogatepass")
        address = self._alloc(self._store, len(data)) & 0xFFFFFFFF
        self._memory.write(self._store, data, address)
        return int(self._turn(self._store, address, len(data)))

    def memory(self) -> bytes:
        """A copy of all its memory."""
        return bytes(self._memory.read(self._store))
