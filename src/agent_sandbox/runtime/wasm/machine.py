"""The engine, how it is configured, and an instance of the interpreter in it.

Everything is made in two steps, for fork lies between them: a `Machine` in the zygote (no call of a program has been made there, and no
thread started), an `Instance` of it in each guest. The compiler and the maker of images use the same two.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from typing import TypeVar

import wasmtime

from agent_sandbox._fast.values import dataclass
from agent_sandbox.runtime.wasm.recipe import STACK
from agent_sandbox.runtime.wasm.wasi import abi
from agent_sandbox.runtime.wasm.wasi.abi import GuestMemory, Shim
from agent_sandbox.runtime.wasm.wasi.deterministic import FUNCTIONS, PASSED_ON, Deterministic, Watch
from agent_sandbox.runtime.wasm.wasi.listing import Listings, hand_out

_NOBODY, _FAULT, _DONE = -1, -2, 0  # what the interpreter takes for "there is nobody there", for an error of the host's, and for an answer
_ADDRESS = struct.Struct("<I")
_LARGEST = 1 << 25  # bytes: more than anybody outside would listen to


class Door:
    """Closed until `answer` is set, in the guest and for the program that may use it."""

    def __init__(self) -> None:
        self.answer: Callable[[bytes], bytes] | None = None

    def __call__(self, caller: wasmtime.Caller, at: int, length: int, answer_at: int, length_at: int) -> int:
        """What the interpreter calls: where its question lies, and where to write the address and the length of the answer."""
        if self.answer is None:
            return _NOBODY
        memory, alloc = caller.get("memory"), caller.get("host_alloc")
        if not (isinstance(memory, wasmtime.Memory) and isinstance(alloc, wasmtime.Func)):
            return _FAULT
        at, length, answer_at, length_at = (number & 0xFFFFFFFF for number in (at, length, answer_at, length_at))
        size = memory.data_len(caller)
        if length > _LARGEST or at + length > size or max(answer_at, length_at) + _ADDRESS.size > size:
            return _FAULT
        try:
            answer = self.answer(bytes(memory.read(caller, at, at + length)))
        except (OSError, RuntimeError):  # the host listens no longer
            return _FAULT
        address = alloc(caller, len(answer)) & 0xFFFFFFFF
        size = memory.data_len(caller)  # it may have grown
        if not address or address + len(answer) > size:
            return _FAULT
        memory.write(caller, answer, address)
        memory.write(caller, _ADDRESS.pack(address), answer_at)
        memory.write(caller, _ADDRESS.pack(len(answer)), length_at)
        return _DONE


PAGE = 1 << 16  # of WebAssembly

_TYPES = {"i": wasmtime.ValType.i32(), "l": wasmtime.ValType.i64()}
_FIRST_DIRECTORY = 3  # the descriptor of the first one that a program is given
_NO_END = (1 << 63) - 1  # fuel for whoever may use as much as they like: centuries


def configuration(*, threads: bool = False, counting: bool = False) -> wasmtime.Config:
    """How code is compiled and run. `threads` is for the compiler alone: a zygote must have one. `counting` is of what is executed.

    A change here is one of `recipe.COMPILED_FOR`.
    """
    config = wasmtime.Config()
    config.parallel_compilation = threads
    config.consume_fuel = counting
    # Without a public name. The engine refuses a stack larger than this one, which nothing here uses.
    wasmtime._ffi.wasmtime_config_async_stack_size_set(config.ptr(), STACK)
    config.max_wasm_stack = STACK
    return config


def compiled(module: bytes, *, counting: bool) -> bytearray:
    """Native code for a module, as `Machine.load` takes it."""
    return wasmtime.Module(wasmtime.Engine(configuration(threads=True, counting=counting)), module).serialize()


@dataclass(frozen=True)
class Image:
    """Memory of an interpreter at rest, mapped somewhere in this process."""

    address: int
    size: int


@dataclass(frozen=True)
class Determinism:
    """What a deterministic run begins with. `memory_bytes` is what it may have inside: less than the kernel would let it, so that it is
    refused more at the same moment every time. `watch` is told what it looks into."""

    seed: int
    memory_bytes: int | None
    watch: Watch


_Kind = TypeVar("_Kind", bound="Inside")


class Machine:
    """A loaded module with all it may import. With `counting` it was compiled to count what it executes."""

    def __init__(self, engine: wasmtime.Engine, module: wasmtime.Module, *, counting: bool = False) -> None:
        self._engine = engine
        self.counting = counting
        self.leave: Callable[[int], None] = os._exit  # what is done when the program ends itself, with its exit code
        self._made: Inside
        self._listings: Listings | None = None
        self._deterministic: Deterministic | None = None
        self._listing = Shim(engine, ("fd_readdir",), own_memory=True)
        self._passing = Shim(engine, PASSED_ON)
        linker = wasmtime.Linker(engine)
        linker.define_wasi()
        linker.allow_shadowing = True
        # The engine's own knows no codes above 125. The process is the program's, and ends with it.
        linker.define_func(abi.MODULE, "proc_exit", _function("i", results=""), lambda code: self.leave(code & 0xFF))
        self.door = Door()
        linker.define_func("host", "call", _function("iiii"), self.door, access_caller=True)
        linker.define_func(abi.MODULE, "fd_readdir", _function(abi.SIGNATURES["fd_readdir"]), self._list)
        self._ready = linker.instantiate_pre(module)
        for name in FUNCTIONS:
            linker.define_func(abi.MODULE, name, _function(abi.SIGNATURES[name]), self._answering(name))
        self._ready_to_repeat = linker.instantiate_pre(module)

    @classmethod
    def load(cls, compiled: str, *, counting: bool = False, beside: Machine | None = None) -> Machine:
        """From a file that was compiled here. It is native code that is executed as it is: whoever calls this has checked it.

        `beside` is a machine whose engine it shares.
        """
        engine = beside._engine if beside is not None else wasmtime.Engine(configuration(counting=counting))
        return cls(engine, wasmtime.Module.deserialize_file(engine, compiled), counting=counting)

    def instance(self, directories: Sequence[tuple[str, str]], determinism: Determinism | None = None) -> Instance:
        """A fresh interpreter of Python that sees these directories, each by the name it has inside, which an image remembers."""
        return self.made(Instance, directories, determinism)

    def made(
        self,
        kind: Callable[[wasmtime.Store, wasmtime.Instance], _Kind],
        directories: Sequence[tuple[str, str]],
        determinism: Determinism | None = None,
    ) -> _Kind:
        """A fresh instance, whatever its module exports, that sees these directories.

        One at a time: the system calls of the last one made are answered.
        """
        store = wasmtime.Store(self._engine)
        if self.counting:
            store.set_fuel(_NO_END)
        wasi = wasmtime.WasiConfig()
        wasi.argv = ["python"]
        wasi.inherit_stdin()
        wasi.inherit_stdout()
        wasi.inherit_stderr()
        for real, inside in directories:
            wasi.preopen_dir(real, inside)
        store.set_wasi(wasi)
        self._listings = self._deterministic = None
        if determinism is None:
            self._made = made = kind(store, self._ready.instantiate(store))
            return made
        if determinism.memory_bytes is not None:
            store.set_limits(memory_size=determinism.memory_bytes)
        self._made = made = kind(store, self._ready_to_repeat.instantiate(store))
        given = {_FIRST_DIRECTORY + index: real for index, (real, _) in enumerate(directories)}
        engine, memory = self._passing.instance(store, self._made.exported_memory)
        self._deterministic = Deterministic(determinism.seed, given, engine, memory, self._lists(), determinism.watch)
        return made

    def _lists(self) -> Listings:
        if self._listings is None:
            functions, memory = self._listing.instance(self._made.store, self._made.exported_memory)
            self._listings = Listings(functions["fd_readdir"], memory)
        return self._listings

    def _list(self, fd: int, address: int, length: int, cookie: int, used: int) -> int:
        listings = self._lists()
        entries = listings.kept(fd) if cookie else None
        if entries is None:
            found = listings.read(fd)
            if isinstance(found, int):
                return found
            listings.keep(fd, entries := found)
        return hand_out(self._made.guest_memory, entries, address, length, cookie, used)

    def _answering(self, name: str) -> Callable[..., int]:
        def answer(*arguments: int) -> int:
            assert self._deterministic is not None
            return int(getattr(self._deterministic, name)(*arguments))

        return answer


def _function(parameters: str, *, results: str = "i") -> wasmtime.FuncType:
    return wasmtime.FuncType([_TYPES[each] for each in parameters], [_TYPES[each] for each in results])


class Inside:
    """One instance, as its host knows it."""

    def __init__(self, store: wasmtime.Store, instance: wasmtime.Instance) -> None:
        memory = instance.exports(store)["memory"]
        assert isinstance(memory, wasmtime.Memory)
        self.store, self.exported_memory = store, memory
        self.guest_memory = GuestMemory(store, memory)
        self._fuel = _NO_END

    def give_fuel(self, limit: int | None) -> None:
        """Count from here on, up to this much. Only of a machine that counts."""
        self._fuel = _NO_END if limit is None else limit
        self.store.set_fuel(self._fuel)

    def fuel_used(self) -> int:
        """Since it was given."""
        return self._fuel - self.store.get_fuel()


class Instance(Inside):
    """One interpreter of Python."""

    def __init__(self, store: wasmtime.Store, instance: wasmtime.Instance) -> None:
        super().__init__(store, instance)
        exports = instance.exports(store)
        turn, alloc = exports["turn"], exports["host_alloc"]
        assert isinstance(turn, wasmtime.Func) and isinstance(alloc, wasmtime.Func)
        self._turn, self._alloc = turn, alloc

    def become(self, image: Image) -> None:
        """Take the memory of another interpreter, which was at rest, for one's own. It is moved here: an image serves once."""
        from agent_sandbox.kernel.memory import move_over  # Linux's; who only compiles need not have it

        missing = image.size - self.exported_memory.data_len(self.store)
        if missing > 0:
            self.exported_memory.grow(self.store, missing // PAGE)
        move_over(image.address, image.size, self.exported_memory.get_buffer_ptr(self.store))

    def run(self, code: str) -> int:
        """Run code in it; 0 when it came through. A program that ends itself ends this process. Raises wasmtime.Trap when it breaks."""
        data = code.encode("utf-8", "surrogatepass")
        address = self._alloc(self.store, len(data)) & 0xFFFFFFFF
        self.exported_memory.write(self.store, data, address)
        return int(self._turn(self.store, address, len(data)))

    def memory(self) -> bytes:
        """A copy of all its memory."""
        return bytes(self.exported_memory.read(self.store))
