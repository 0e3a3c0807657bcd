"""The zygote program of wasm guests: load compiled interpreters and images, then serve as keeper. Every run is forked from here.

No WebAssembly runs in the zygote, not even our own: an engine that has made a call has threads and queues that do not survive a fork.
"""

from __future__ import annotations

import fcntl
import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from agent_sandbox.kernel import keeper, memory, seccomp, wire
from agent_sandbox.kernel.wire import FAREWELL_FD
from agent_sandbox.runtime.process.zygote_program import begin
from agent_sandbox.runtime.wasm.cache import COUNTING, JAVASCRIPT, MODULE, CachedFile, checked
from agent_sandbox.runtime.wasm.recipe import ROOM, STACK


def main() -> None:
    """Load the compiled files, then serve as keeper. Arguments: those of every zygote, then name, path and digest of each file to load."""
    link, supervisor, words = begin()
    files = {name: CachedFile(path, digest) for name, path, digest in zip(*[iter(words)] * 3, strict=True)}
    try:
        # After `begin`, which adds the directories of packages to the search path: the engine is in one of them.
        from agent_sandbox.runtime.wasm.guest import WasmGuest
        from agent_sandbox.runtime.wasm.machine import MemoryImage, WasmMachine

        _allow_stack(STACK + ROOM)
        module = COUNTING if COUNTING in files else MODULE
        machines: dict[str, WasmMachine] = {}
        held: dict[str, int] = {}
        for name in (module, JAVASCRIPT):
            with checked(files.pop(name)) as fd, _low_numbers_taken():
                machines[name] = WasmMachine.load(f"/proc/self/fd/{fd}", counting=module == COUNTING, beside=machines.get(module))
                held[name] = _held(fd)
                fcntl.flock(os.dup(fd), fcntl.LOCK_SH)  # held while we live: an unused file would be removed
        images = {name: [MemoryImage(*place) for place in _mapped(entry)] for name, entry in files.items()}
    except Exception as error:  # the engine may raise anything
        link.send(f"unusable {error}".encode(errors="replace")[:4096])
        return
    seccomp.compile_filter(processes=False, execute=False, system=False)
    gc.collect()
    gc.freeze()
    gc.disable()
    keeper.serve(link, supervisor, WasmGuest(machines[module], images, machines[JAVASCRIPT], held).run)


def _allow_stack(size: int) -> None:
    """Raise the stack limit to `size` if it is lower and the hard limit allows.

    This works even after the process has started: its stack grows on use, and the kernel checks the limit then. 128 MiB are reserved for
    it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if soft != resource.RLIM_INFINITY and soft < size:
        resource.setrlimit(resource.RLIMIT_STACK, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))


@contextmanager
def _low_numbers_taken() -> Iterator[None]:
    """Occupy the low descriptor numbers during the block, so that files opened in it get numbers above `FAREWELL_FD`.

    A guest uses the low numbers itself. Which of them are free depends on the process that started us.
    """
    taken = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)]
    try:
        while taken[-1] <= FAREWELL_FD:
            taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        yield
    finally:
        wire.close_all(taken)


def _held(fd: int) -> int:
    """Return the descriptor under which the engine has opened the file at `fd`. The engine maps parts of it for each new instance."""
    loaded = os.fstat(fd)
    return next(other for other in map(int, os.listdir("/proc/self/fd")) if other != fd and _is_file(other, loaded))


def _is_file(fd: int, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), file)
    except OSError:  # the descriptor of the listing itself, closed by now
        return False


def _mapped(entry: CachedFile) -> list[tuple[int, int]]:
    """Map an image from a sealed copy in memory, so that guests get the checked content even if the file changes.

    Return address and size of three mappings: for the program, for the rehearsal, and one that stays unchanged. Each costs nothing until
    it is read or written.
    """
    copy = os.memfd_create("wasm-image", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(copy, "wb", closefd=False) as file, checked(entry, file.write):
            pass
        wire.seal(copy)
        size = os.fstat(copy).st_size
        return [(memory.map_privately(copy, size), size) for _ in range(3)]
    finally:
        os.close(copy)
