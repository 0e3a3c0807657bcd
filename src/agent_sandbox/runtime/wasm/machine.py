"""The engine, its configuration, and instances of an interpreter in it.

There are two steps, with a fork between them: the zygote makes a `WasmMachine`, which starts no thread and runs no program; each guest
makes an `Instance` of it. The compiler uses the same two classes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import wasmtime

from agent_sandbox._fast.values import dataclass
from agent_sandbox.runtime.wasm.recipe import STACK
from agent_sandbox.runtime.wasm.wasi import abi
from agent_sandbox.runtime.wasm.wasi.abi import Call, GuestMemory, Shim
from agent_sandbox.runtime.wasm.wasi.descriptors import NEEDED, Descriptors
from agent_sandbox.runtime.wasm.wasi.deterministic import FUNCTIONS, PASSED_ON, Deterministic, Watch
from agent_sandbox.runtime.wasm.wasi.listing import Listings, hand_out

PAGE = 1 << 16  # of WebAssembly

_NOBODY, _FAULT, _DONE = -1, -2, 0  # results of `host.call`: no host listens, the host failed, answered
_ADDRESS = struct.Struct("<I")
_LARGEST = 1 << 25  # bytes of a question: more than the supervisor accepts
_TYPES = {"i": wasmtime.ValType.i32(), "l": wasmtime.ValType.i64()}
FIRST_DIRECTORY = 3  # descriptor of a program's first preopened directory
_NO_END = (1 << 63) - 1  # fuel without a limit: lasts for centuries


class Door:
    """The host function with which a program inside asks its host a question. It refuses all questions until `answer` is set."""

    def __init__(self) -> None:
        self.answer: Callable[[bytes], bytes] | None = None
        self.depth = 0  # of the last question: an address in the program's stack

    def __call__(self, caller: wasmtime.Caller, at: int, length: int, answer_at: int, length_at: int) -> int:
        """Answer the question of `length` bytes at address `at`. Write the answer's address to `answer_at`, its length to `length_at`.

        Return `_DONE`, `_NOBODY` if `answer` is not set, or `_FAULT` for bad addresses and a broken connection.
        """
        if self.answer is None:
            return _NOBODY
        memory, alloc = caller.get("memory"), caller.get("host_alloc")
        if not (isinstance(memory, wasmtime.Memory) and isinstance(alloc, wasmtime.Func)):
            return _FAULT
        at, length, answer_at, length_at = (number & 0xFFFFFFFF for number in (at, length, answer_at, length_at))
        size = memory.data_len(caller)
        if length > _LARGEST or at + length > size or max(answer_at, length_at) + _ADDRESS.size > size:
            return _FAULT
        self.depth = answer_at
        try:
            answer = self.answer(bytes(memory.read(caller, at, at + length)))
        except (OSError, RuntimeError):  # the supervisor has closed its end
            return _FAULT
        address = alloc(caller, len(answer)) & 0xFFFFFFFF
        size = memory.data_len(caller)  # it may have grown
        if not address or address + len(answer) > size:
            return _FAULT
        memory.write(caller, answer, address)
        memory.write(caller, _ADDRESS.pack(address), answer_at)
        memory.write(caller, _ADDRESS.pack(len(answer)), length_at)
        return _DONE


def configuration(*, threads: bool = False, counting: bool = False) -> wasmtime.Config:
    """Return the settings under which code is compiled and run.

    `threads` is for the compiler alone: a zygote must have a single thread. `counting` counts executed instructions as fuel. Change
    `recipe.COMPILED_FOR` with these settings.
    """
    config = wasmtime.Config()
    config.parallel_compilation = threads
    config.consume_fuel = counting
    # It has no public name. The engine refuses a `max_wasm_stack` above the async stack, which nothing here uses.
    wasmtime._ffi.wasmtime_config_async_stack_size_set(config.ptr(), STACK)
    config.max_wasm_stack = STACK
    return config


def compiled(module: bytes, *, counting: bool) -> bytearray:
    """Compile a module to native code, in the form that `WasmMachine.load` reads."""
    return wasmtime.Module(wasmtime.Engine(configuration(threads=True, counting=counting)), module).serialize()


@dataclass(frozen=True)
class MemoryImage:
    """The memory of an interpreter that is ready to run a program, mapped in this process."""

    address: int
    size: int


@dataclass(frozen=True)
class DeterministicSettings:
    """The settings of a deterministic run.

    `memory_bytes` limits the memory inside WebAssembly. It is below the kernel's limit, so that an allocation fails at the same moment in
    every run. `watch` is called for each file and directory it opens or lists.
    """

    seed: int
    memory_bytes: int | None
    watch: Watch


_Kind = TypeVar("_Kind", bound="Inside")


class WasmMachine:
    """A loaded module with the host functions that it may import. With `counting` it was compiled to count instructions."""

    def __init__(self, engine: wasmtime.Engine, module: wasmtime.Module, *, counting: bool = False) -> None:
        self._engine = engine
        self.counting = counting
        self.leave: Callable[[int], None] = os._exit  # called with the exit code when the program ends itself
        self._current: Inside
        self._listings: Listings | None = None
        self._apart: tuple[dict[str, Call], GuestMemory] | None = None  # functions of the engine on memory that is not the program's
        self._deterministic: Deterministic | None = None
        self._beside = Shim(engine, ("fd_readdir", *NEEDED), own_memory=True)
        self._passing = Shim(engine, PASSED_ON)
        linker = wasmtime.Linker(engine)
        linker.define_wasi()
        linker.allow_shadowing = True
        # The engine's own `proc_exit` accepts no codes above 125. This process serves one program, and ends with the program.
        linker.define_func(abi.MODULE, "proc_exit", _function("i", results=""), lambda code: self.leave(code & 0xFF))
        self.door = Door()
        linker.define_func("host", "call", _function("iiii"), self.door, access_caller=True)
        linker.define_func(abi.MODULE, "fd_readdir", _function(abi.SIGNATURES["fd_readdir"]), self._list)
        self._ready = linker.instantiate_pre(module)
        for name in FUNCTIONS:
            linker.define_func(abi.MODULE, name, _function(abi.SIGNATURES[name]), self._answering(name))
        self._ready_to_repeat = linker.instantiate_pre(module)

    @classmethod
    def load(cls, compiled: str, *, counting: bool = False, beside: WasmMachine | None = None) -> WasmMachine:
        """Load a file that was compiled here. The engine executes its native code unchecked, so the caller must have checked the file.

        With `beside`, the engine of that machine is shared.
        """
        engine = beside._engine if beside is not None else wasmtime.Engine(configuration(counting=counting))
        return cls(engine, wasmtime.Module.deserialize_file(engine, compiled), counting=counting)

    def instance(self, directories: Sequence[tuple[str, str]], determinism: DeterministicSettings | None = None) -> Instance:
        """Make a Python interpreter that sees these directories, given as (path here, path inside)."""
        return self.made(Instance, directories, determinism)

    def made(
        self,
        kind: Callable[[wasmtime.Store, wasmtime.Instance], _Kind],
        directories: Sequence[tuple[str, str]],
        determinism: DeterministicSettings | None = None,
    ) -> _Kind:
        """Make an instance of this machine, of the class `kind`, that sees these directories.

        Use one instance at a time: only the system calls of the newest instance are answered.
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
        self._listings = self._apart = self._deterministic = None
        if determinism is None:
            self._current = instance = kind(store, self._ready.instantiate(store))
            return instance
        if determinism.memory_bytes is not None:
            store.set_limits(memory_size=determinism.memory_bytes)
        self._current = instance = kind(store, self._ready_to_repeat.instantiate(store))
        given = {FIRST_DIRECTORY + index: real for index, (real, _) in enumerate(directories)}
        engine, memory = self._passing.instance(store, self._current.exported_memory)
        self._deterministic = Deterministic(determinism.seed, given, engine, memory, self._lists(), determinism.watch)
        return instance

    def _lists(self) -> Listings:
        if self._listings is None:
            functions, memory = self._functions_apart()
            self._listings = Listings(functions["fd_readdir"], memory)
        return self._listings

    def _functions_apart(self) -> tuple[dict[str, Call], GuestMemory]:
        if self._apart is None:
            self._apart = self._beside.instance(self._current.store, self._current.exported_memory)
        return self._apart

    @property
    def descriptors(self) -> Descriptors:
        """The open descriptors of the newest instance."""
        return Descriptors(*self._functions_apart())

    def save_calls(self) -> dict[str, Any]:
        """Return, as JSON data, what our own system calls remember of the newest instance: listings, and the state of determinism."""
        saved: dict[str, Any] = {"listings": self._lists().save()}
        return saved if self._deterministic is None else {**saved, "deterministic": self._deterministic.save()}

    def restore_calls(self, saved: dict[str, Any]) -> None:
        """Continue as `save_calls` says. Raises ValueError, KeyError or TypeError for anything else."""
        self._lists().restore(saved["listings"])
        if ("deterministic" in saved) != (self._deterministic is not None):
            raise ValueError("it is deterministic, and the session is not, or the other way round")
        if self._deterministic is not None:
            self._deterministic.restore(saved["deterministic"])

    def _list(self, fd: int, address: int, length: int, cookie: int, used: int) -> int:
        listings = self._lists()
        entries = listings.kept(fd) if cookie else None
        if entries is None:
            listing = listings.read(fd)
            if isinstance(listing, int):
                return listing
            listings.keep(fd, entries := listing)
        return hand_out(self._current.guest_memory, entries, address, length, cookie, used)

    def _answering(self, name: str) -> Callable[..., int]:
        def answer(*arguments: int) -> int:
            assert self._deterministic is not None
            return int(getattr(self._deterministic, name)(*arguments))

        return answer


def _function(parameters: str, *, results: str = "i") -> wasmtime.FuncType:
    return wasmtime.FuncType([_TYPES[each] for each in parameters], [_TYPES[each] for each in results])


class Inside:
    """An instance of a module, as seen by the host: its store, its memory and its fuel."""

    def __init__(self, store: wasmtime.Store, instance: wasmtime.Instance) -> None:
        memory = instance.exports(store)["memory"]
        assert isinstance(memory, wasmtime.Memory)
        self.store, self.exported_memory = store, memory
        self.guest_memory = GuestMemory(store, memory)
        self._fuel = _NO_END

    def give_fuel(self, limit: int | None) -> None:
        """Count fuel from here on, up to `limit`. Only for a machine that counts."""
        self._fuel = _NO_END if limit is None else limit
        self.store.set_fuel(self._fuel)

    def fuel_used(self) -> int:
        """Return the fuel used since `give_fuel`."""
        return self._fuel - self.store.get_fuel()


class Instance(Inside):
    """An instance of the Python interpreter."""

    def __init__(self, store: wasmtime.Store, instance: wasmtime.Instance) -> None:
        super().__init__(store, instance)
        exports = instance.exports(store)
        turn, alloc = exports["turn"], exports["host_alloc"]
        assert isinstance(turn, wasmtime.Func) and isinstance(alloc, wasmtime.Func)
        self._turn, self._alloc = turn, alloc

    def grow(self, size: int) -> None:
        """Make the memory `size` bytes large; it never shrinks. Raises wasmtime.WasmtimeError at its limit."""
        missing = size - self.exported_memory.data_len(self.store)
        if missing > 0:
            self.exported_memory.grow(self.store, missing // PAGE)

    def become(self, image: MemoryImage) -> None:
        """Replace this interpreter's memory by an image. The mapping is moved: an image can be used once."""
        from agent_sandbox.kernel.memory import move_over  # needs Linux; the compiler does not

        self.grow(image.size)
        move_over(image.address, image.size, self.exported_memory.get_buffer_ptr(self.store))

    def run(self, code: str) -> int:
        """Run code and return 0 if it succeeded. A program that ends itself ends this process. Raises wasmtime.Trap on a trap."""
        data = code.encode("utf-8", "surrogatepass")
        address = self._alloc(self.store, len(data)) & 0xFFFFFFFF
        self.exported_memory.write(self.store, data, address)
        return int(self._turn(self.store, address, len(data)))

    def memory(self) -> bytes:
        """Return a copy of the whole memory."""
        return bytes(self.exported_memory.read(self.store))
