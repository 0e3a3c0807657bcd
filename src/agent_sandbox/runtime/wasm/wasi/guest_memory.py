"""The memory of the program inside, as its system calls are given it: every address and length is the program's own word."""

from __future__ import annotations

import wasmtime

from agent_sandbox.runtime.wasm.wasi.abi import WORD, unsigned


class OutOfBounds(Exception):
    """It points outside its own memory. Not caught: the run ends there, as it would in the engine."""


class GuestMemory:
    """Reads and writes within bounds, or raises `OutOfBounds`."""

    def __init__(self, store: wasmtime.Store, memory: wasmtime.Memory) -> None:
        self._store, self._memory = store, memory

    def read(self, address: int, length: int) -> bytes:
        """Exactly so many bytes."""
        start, size = unsigned(address), unsigned(length)
        self._check(start, size)
        return bytes(self._memory.read(self._store, start, start + size)) if size else b""

    def write(self, address: int, data: bytes) -> None:
        """All of it."""
        start = unsigned(address)
        self._check(start, len(data))
        if data:
            self._memory.write(self._store, data, start)

    def write_word(self, address: int, value: int) -> None:
        """One 32-bit number."""
        self.write(address, WORD.pack(value))

    def _check(self, start: int, size: int) -> None:
        if start + size > self._memory.data_len(self._store):
            raise OutOfBounds(f"{size} bytes at {start:#x}")
