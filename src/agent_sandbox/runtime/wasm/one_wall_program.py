"""What a run with one wall runs in: a process that lends the program inside two directories and its streams, and watches what it uses.

The program and what it may use come in a file that lies beside its directory, out of its reach, and how it ended is left there too.
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
from agent_sandbox.runtime.wasm.cache import Entry, checked
from agent_sandbox.runtime.wasm.machine import configuration
from agent_sandbox.runtime.wasm.recipe import OURS, preparation

if TYPE_CHECKING:
    from typing import Any, NoReturn

LIBRARY_INSIDE = "/usr/local/lib"  # where the interpreter looks for it
_LOOK_SECONDS = 0.05
_OUR_FILES = 16  # that this process has open itself
_ENTRY_BYTES = 1024  # what each takes at least
_ABORTED, _ENDED = 134, 137  # as a shell reports SIGABRT and SIGKILL
_I32 = wasmtime.ValType.i32()
_START = "__import__('sys').modules.pop({ours}).start({path}, {source}, {env}, {arguments}, {cwd}, seeded=False)"


def main() -> None:
    """The arguments are our root, where packages are, and the file that says what to do."""
    root, packages, path = sys.argv[1:]
    sys.path.remove(root)
    sys.path.extend(each for each in packages.split(os.pathsep) if each and each not in sys.path)
    with open(path, encoding="ascii") as file:
        told = json.load(file)
    try:
        store, instance = _made(told)
        _limit_files(told["open_files"])
        _turn(store, instance, preparation())
        threading.Thread(target=_watch, args=(told, *_clocks()), daemon=True).start()
        given = {name: told[name] for name in ("cwd", "env", "arguments", "source")} | {"path": SCRIPT, "ours": OURS}
        code = _turn(store, instance, _START.format(**{name: ascii(value) for name, value in given.items()}))
    except (wasmtime.Trap, wasmtime.WasmtimeError) as trap:
        os.write(2, f"the interpreter was ended: {str(trap).strip().rpartition(chr(10))[2].strip()}\n".encode(errors="replace"))
        _leave(told, _ABORTED, "abort")
    _leave(told, code)


def _made(told: dict[str, Any]) -> tuple[wasmtime.Store, wasmtime.Instance]:
    compiled = bytearray()
    with checked(Entry(told["module"], told["digest"]), compiled.extend):
        engine = wasmtime.Engine(configuration())
        module = wasmtime.Module.deserialize(engine, compiled)  # what was checked, whatever becomes of the file
    linker = wasmtime.Linker(engine)
    linker.define_wasi()
    linker.allow_shadowing = True
    ended = wasmtime.FuncType([_I32], [])
    linker.define_func("wasi_snapshot_preview1", "proc_exit", ended, lambda code: _leave(told, code & 0xFF))
    linker.define_func("host", "call", wasmtime.FuncType([_I32] * 4, [_I32]), lambda *_: -1)  # there is nobody there
    store = wasmtime.Store(engine)
    if told["memory_bytes"] is not None:
        store.set_limits(memory_size=told["memory_bytes"])
    wasi = wasmtime.WasiConfig()
    wasi.argv = ["python"]
    wasi.inherit_stdin()
    wasi.inherit_stdout()
    wasi.inherit_stderr()
    wasi.preopen_dir(told["library"], LIBRARY_INSIDE, False)
    wasi.preopen_dir(told["root"], "/", True)
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
    """What a program inside opens is opened by this process."""
    if most is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = most + _OUR_FILES
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _clocks() -> tuple[float, float]:
    return time.monotonic(), time.process_time()


def _watch(told: dict[str, Any], began: float, used: float) -> None:
    """End the run when it has used more than it may. What cannot be counted is too much."""
    wall, cpu, disk = told["wall_seconds"], told["cpu_seconds"], told["disk_bytes"]
    try:
        while True:
            now, so_far = _clocks()
            if wall is not None and now - began > wall:
                _leave(told, _ENDED, "wall")
            if cpu is not None and so_far - used > cpu:
                _leave(told, _ENDED, "cpu")
            if disk is not None and written(told["root"], disk) > disk:
                break
            time.sleep(_LOOK_SECONDS)
    finally:
        _leave(told, _ENDED, "disk")


def written(root: str, enough: int) -> int:
    """Bytes in a tree, or more than `enough` as soon as that is clear. Raises OSError for what is too deep to be looked at."""
    total, waiting = 0, [root]
    while waiting and total <= enough:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(waiting.pop()) as entries:  # it goes on meanwhile
            for entry in entries:
                total += max(entry.stat(follow_symlinks=False).st_size, _ENTRY_BYTES)
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                if total > enough:
                    break
    return total


def _leave(told: dict[str, Any], code: int, reason: str = "") -> NoReturn:
    with open(told["report"], "w", encoding="ascii") as file:
        json.dump({"reason": reason, "cpu": time.process_time()}, file)
    os._exit(code)
