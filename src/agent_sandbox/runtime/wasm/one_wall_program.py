"""The process of a `wasm-one-wall` run: it gives the program inside two directories and its streams, and watches the limits.

The program and its limits come in a file beside the program's directory, out of the program's reach. The report on its end is written
there, too.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from contextlib import suppress

import wasmtime

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.kernel.wire import SCRIPT
from agent_sandbox.runtime.wasm.cache import CachedFile, checked
from agent_sandbox.runtime.wasm.machine import configuration
from agent_sandbox.runtime.wasm.recipe import OURS, preparation

if TYPE_CHECKING:
    from typing import Any, NoReturn

LIBRARY_INSIDE = "/usr/local/lib"  # where the interpreter looks for its library
_LOOK_SECONDS = 0.05
_OUR_FILES = 16  # files that this process has open itself
_ENTRY_BYTES = 1024  # counted at least for every directory entry
_ABORTED, _ENDED = 134, 137  # as a shell reports SIGABRT and SIGKILL
_I32 = wasmtime.ValType.i32()
_START = "__import__('sys').modules.pop({ours}).start({path}, {source}, {env}, {arguments}, {cwd}, seeded=False)"


def main() -> None:
    """Run one program. Arguments: the directory of our package, the search path of other packages, and the file with the request."""
    root, packages, path = sys.argv[1:]
    sys.path.remove(root)
    sys.path.extend(each for each in packages.split(os.pathsep) if each and each not in sys.path)
    with open(path, encoding="ascii") as file:
        request = json.load(file)
    try:
        store, instance = _instantiate(request)
        _limit_files(request["open_files"])
        _turn(store, instance, preparation())
        threading.Thread(target=_watch, args=(request, *_clocks()), daemon=True).start()
        given = {name: request[name] for name in ("cwd", "env", "arguments", "source")} | {"path": SCRIPT, "ours": OURS}
        code = _turn(store, instance, _START.format(**{name: ascii(value) for name, value in given.items()}))
    except (wasmtime.Trap, wasmtime.WasmtimeError) as trap:
        os.write(2, f"the interpreter was ended: {str(trap).strip().rpartition(chr(10))[2].strip()}\n".encode(errors="replace"))
        _leave(request, _ABORTED, "abort")
    _leave(request, code)


def _instantiate(request: dict[str, Any]) -> tuple[wasmtime.Store, wasmtime.Instance]:
    compiled = bytearray()
    with checked(CachedFile(request["module"], request["digest"]), compiled.extend):
        engine = wasmtime.Engine(configuration())
        module = wasmtime.Module.deserialize(engine, compiled)  # the checked bytes, even if the file changes
    linker = wasmtime.Linker(engine)
    linker.define_wasi()
    linker.allow_shadowing = True
    ended = wasmtime.FuncType([_I32], [])
    linker.define_func("wasi_snapshot_preview1", "proc_exit", ended, lambda code: _leave(request, code & 0xFF))
    linker.define_func("host", "call", wasmtime.FuncType([_I32] * 4, [_I32]), lambda *_: -1)  # no host listens
    store = wasmtime.Store(engine)
    if request["memory_bytes"] is not None:
        store.set_limits(memory_size=request["memory_bytes"])
    wasi = wasmtime.WasiConfig()
    wasi.argv = ["python"]
    wasi.inherit_stdin()
    wasi.inherit_stdout()
    wasi.inherit_stderr()
    wasi.preopen_dir(request["library"], LIBRARY_INSIDE, False)
    wasi.preopen_dir(request["root"], "/", True)
    store.set_wasi(wasi)
    return store, linker.instantiate(store, module)


def _turn(store: wasmtime.Store, instance: wasmtime.Instance, code: str) -> int:
    exports = instance.exports(store)
    turn, alloc, memory = exports["turn"], exports["host_alloc"], exports["memory"]
    assert isinstance(turn, wasmtime.Func) and isinstance(alloc, wasmtime.Func) and isinstance(memory, wasmtime.Memory)
    data = code.encode("utf-8", "surrogatepass")
    address = alloc(store, len(data)) & 0xFFFFFFFF
    memory.write(store, data, address)
    return int(turn(store, address, len(data)))


def _limit_files(most: int | None) -> None:
    """Limit the number of open files of this process, which include those of the program inside."""
    if most is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = most + _OUR_FILES
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _clocks() -> tuple[float, float]:
    return time.monotonic(), time.process_time()


def _watch(request: dict[str, Any], began: float, used: float) -> None:
    """End the run when it exceeds a limit. Files that cannot be measured count as exceeding the disk limit."""
    wall, cpu, disk = request["wall_seconds"], request["cpu_seconds"], request["disk_bytes"]
    try:
        while True:
            now, so_far = _clocks()
            if wall is not None and now - began > wall:
                _leave(request, _ENDED, "wall")
            if cpu is not None and so_far - used > cpu:
                _leave(request, _ENDED, "cpu")
            if disk is not None and written(request["root"], disk) > disk:
                break
            time.sleep(_LOOK_SECONDS)
    finally:
        _leave(request, _ENDED, "disk")


def written(root: str, enough: int) -> int:
    """Return the bytes in a tree, or a number above `enough` as soon as that is exceeded. Raises OSError if the tree is too deep."""
    total, waiting = 0, [root]
    while waiting and total <= enough:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(waiting.pop()) as entries:  # the program changes it meanwhile
            for entry in entries:
                total += max(entry.stat(follow_symlinks=False).st_size, _ENTRY_BYTES)
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                if total > enough:
                    break
    return total


def _leave(request: dict[str, Any], code: int, reason: str = "") -> NoReturn:
    with open(request["report"], "w", encoding="ascii") as file:
        json.dump({"reason": reason, "cpu": time.process_time()}, file)
    os._exit(code)
