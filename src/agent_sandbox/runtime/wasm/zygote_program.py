"""What the zygote of wasm guests runs: load compiled interpreters and images, then be the keeper of runs, each forked from here.

No program has run in it, not even one of ours: an engine that has served a call has threads and queues that a fork does not survive.
"""

from __future__ import annotations

import gc
import os
import resource

from agent_sandbox.kernel import channel, keeper, memory, seccomp
from agent_sandbox.runtime.wasm.cache import MODULE, Entry, checked
from agent_sandbox.runtime.wasm.recipe import JAVASCRIPT, ROOM, STACK
from agent_sandbox.runtime.zygote_program import begin


def main() -> None:
    """The zygote program: first the arguments of every zygote, then a name, a file and a digest for each thing to load."""
    link, supervisor, words = begin()
    files = {name: Entry(path, digest) for name, path, digest in zip(*[iter(words)] * 3, strict=True)}
    try:
        # Not before `begin`: the engine is found where packages are.
        from agent_sandbox.runtime.wasm.guest import Guest, leave
        from agent_sandbox.runtime.wasm.machine import Image, Machine

        _allow_stack(STACK + ROOM)
        held: dict[str, int] = {}
        with checked(files.pop(MODULE)) as fd:
            python = Machine.load(f"/proc/self/fd/{fd}", leave)
            held[MODULE] = _held(fd)
        with checked(files.pop(JAVASCRIPT)) as fd:
            javascript = Machine.load(f"/proc/self/fd/{fd}", leave, beside=python)
            held[JAVASCRIPT] = _held(fd)
        images = {name: Image(*_mapped(entry)) for name, entry in files.items()}
    except Exception as error:  # whatever the engine has against it
        link.send(f"unusable {error}".encode(errors="replace")[:4096])
        return
    seccomp.compile_filter(processes=False, execute=False, system=False)
    gc.collect()
    gc.freeze()
    gc.disable()
    keeper.serve(link, supervisor, Guest(python, images, javascript, held).run)


def _allow_stack(size: int) -> None:
    """The first thread's stack may grow while it is used, up to a limit that is looked at then; the kernel leaves 128 MiB for it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if soft != resource.RLIM_INFINITY and soft < size:
        resource.setrlimit(resource.RLIMIT_STACK, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))


def _held(fd: int) -> int:
    """The engine's own descriptor of the file it has loaded, by its number: it maps parts of it for each new instance."""
    loaded = os.fstat(fd)
    return next(other for other in map(int, os.listdir("/proc/self/fd")) if other != fd and _is(other, loaded))


def _is(fd: int, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), file)
    except OSError:  # the listing's own, closed by now
        return False


def _mapped(entry: Entry) -> tuple[int, int]:
    """Map an image from a sealed copy in memory: what was checked is what guests get, whatever becomes of the file."""
    copy = os.memfd_create("wasm-image", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(copy, "wb", closefd=False) as file, checked(entry, file.write):
            pass
        channel.seal(copy)
        size = os.fstat(copy).st_size
        return memory.map_privately(copy, size), size
    finally:
        os.close(copy)
