"""What the zygote of wasm guests runs: load compiled interpreters and images, then be the keeper of runs, each forked from here.

No program has run in it, not even one of ours: an engine that has served a call has threads and queues that a fork does not survive.
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
from agent_sandbox.runtime.wasm.cache import COUNTING, JAVASCRIPT, MODULE, Entry, checked
from agent_sandbox.runtime.wasm.recipe import ROOM, STACK


def main() -> None:
    """The zygote program: first the arguments of every zygote, then a name, a file and a digest for each thing to load."""
    link, supervisor, words = begin()
    files = {name: Entry(path, digest) for name, path, digest in zip(*[iter(words)] * 3, strict=True)}
    try:
        # Not before `begin`: the engine is found where packages are.
        from agent_sandbox.runtime.wasm.guest import Guest
        from agent_sandbox.runtime.wasm.machine import Image, Machine

        _allow_stack(STACK + ROOM)
        module = COUNTING if COUNTING in files else MODULE
        machines: dict[str, Machine] = {}
        held: dict[str, int] = {}
        for name in (module, JAVASCRIPT):
            with checked(files.pop(name)) as fd, _low_numbers_taken():
                machines[name] = Machine.load(f"/proc/self/fd/{fd}", counting=module == COUNTING, beside=machines.get(module))
                held[name] = _held(fd)
                fcntl.flock(os.dup(fd), fcntl.LOCK_SH)  # for as long as we live: so that it is not removed as something that nobody uses
        images = {name: [Image(*place) for place in _mapped(entry)] for name, entry in files.items()}
    except Exception as error:  # whatever the engine has against it
        link.send(f"unusable {error}".encode(errors="replace")[:4096])
        return
    seccomp.compile_filter(processes=False, execute=False, system=False)
    gc.collect()
    gc.freeze()
    gc.disable()
    keeper.serve(link, supervisor, Guest(machines[module], images, machines[JAVASCRIPT], held).run)


def _allow_stack(size: int) -> None:
    """The first thread's stack may grow while it is used, up to a limit that is looked at then; the kernel leaves 128 MiB for it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if soft != resource.RLIM_INFINITY and soft < size:
        resource.setrlimit(resource.RLIMIT_STACK, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))


@contextmanager
def _low_numbers_taken() -> Iterator[None]:
    """Have whatever is opened meanwhile get a number that a guest does not use for anything else. Which are free here depends on who
    started us, and how many files they had open."""
    taken = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)]
    try:
        while taken[-1] <= FAREWELL_FD:
            taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        yield
    finally:
        wire.close_all(taken)


def _held(fd: int) -> int:
    """The engine's own descriptor of the file it has loaded, by its number: it maps parts of it for each new instance."""
    loaded = os.fstat(fd)
    return next(other for other in map(int, os.listdir("/proc/self/fd")) if other != fd and _is(other, loaded))


def _is(fd: int, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), file)
    except OSError:  # the listing's own, closed by now
        return False


def _mapped(entry: Entry) -> list[tuple[int, int]]:
    """Map an image from a sealed copy in memory: what was checked is what guests get, whatever becomes of the file.

    Twice: one may be rehearsed on, the other stays as it was made.
    """
    copy = os.memfd_create("wasm-image", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(copy, "wb", closefd=False) as file, checked(entry, file.write):
            pass
        wire.seal(copy)
        size = os.fstat(copy).st_size
        return [(memory.map_privately(copy, size), size) for _ in range(2)]
    finally:
        os.close(copy)
