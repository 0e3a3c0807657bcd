"""The one function that a program inside WebAssembly can call out through: bytes in, bytes back.

Every address and length comes from inside and may be anything: each is checked against the memory as it is then, and what does not fit is
answered with a fault and not looked at.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import wasmtime

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
