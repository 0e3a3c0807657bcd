"""An instance of QuickJS and its event loop: run the pending promise jobs, then the next timer, until none is left."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

import wasmtime

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.runtime.wasm.javascript.module_patch import EXPORTED
from agent_sandbox.runtime.wasm.machine import Inside

if TYPE_CHECKING:
    from typing import Any

_FILES = ("inspect.js", "console.js", "start.js")
_GIVEN = ("source", "arguments", "env", "cwd", "seed")
_OURS = 'globalThis[Symbol.for("agent-sandbox")]'
_STARTS = ("_initialize", "qjs_init_argv", "qjs_get_context", "malloc", "free")
_STACK_KIB = 1800  # QuickJS's own stack limit: it is compiled with 2048 KiB and does not notice their end by itself
_EXCEPTION = 6  # tag in the upper half of a value: an exception was raised
_MOST_ROUNDS = 4096  # rounds of promise jobs between two checks for more


class Broken(Exception):
    """The interpreter itself failed, not the program that it runs. The error message is on stderr."""


def prelude() -> str:
    """Return the JavaScript source that defines the globals of a program, as one module."""
    here = os.path.dirname(__file__)
    texts = []
    for name in _FILES:
        with open(os.path.join(here, name), encoding="utf-8") as file:
            texts.append(file.read())
    return "".join(texts)


class QuickJS(Inside):
    """A QuickJS interpreter. `prepare` it, then `run` one program."""

    def __init__(self, store: wasmtime.Store, instance: wasmtime.Instance) -> None:
        super().__init__(store, instance)
        exports = instance.exports(store)
        self._functions = {name: exports[name] for name in (*_STARTS, *EXPORTED)}
        self._context = self._runtime = self._name = self._scratch = 0

    def prepare(self, prelude: str) -> None:
        """Start the interpreter and evaluate the prelude. Raises `Broken` if that fails."""
        self._call("_initialize")
        words = [self._text(word) for word in ("qjs", f"--stack-size={_STACK_KIB}", "-m", "-e", prelude)]
        pointers = b"".join(word.to_bytes(4, "little") for word in words) + bytes(4)
        if self._call("qjs_init_argv", len(words), self._put(pointers)):
            raise Broken
        self._context = self._call("qjs_get_context")
        self._runtime = self._call("JS_GetRuntime", self._context)
        self._name, self._scratch = self._text("<host>"), self._put(bytes(4))

    def run(self, path: str, message: Mapping[str, Any]) -> int:
        """Run the program in a guest's message. A program that exits ends this process, too. Raises `Broken` if the interpreter fails."""
        self._ours("begin", json.dumps({"path": path} | {name: message[name] for name in _GIVEN}, sort_keys=True))
        while True:
            self._run_promise_jobs()
            self._await("checked")
            if not self._ours("turn") & 1:
                self._ours("end")
                return 0

    def _run_promise_jobs(self) -> None:
        """Run promise jobs until none is pending.

        Several rounds of jobs run inside before the host checks again; their number doubles each time, up to a limit.
        """
        rounds = 1
        while self._call("JS_ExecutePendingJob", self._runtime, self._scratch) > 0:
            self._await("rounds", rounds)
            rounds = min(2 * rounds, _MOST_ROUNDS)

    def _await(self, name: str, *arguments: str | int) -> None:
        self._value(self._call("js_std_await", self._context, self._ours(name, *arguments)))

    def _ours(self, name: str, *arguments: str | int) -> int:
        text = f"{_OURS}.{name}({', '.join(map(json.dumps, arguments))})".encode()
        address = self._put(text + b"\0")
        try:
            return self._value(self._call("JS_Eval", self._context, address, len(text), self._name, 0))
        finally:
            self._call("free", address)

    def _value(self, value: int) -> int:
        if value >> 32 == _EXCEPTION:
            self._call("js_std_dump_error", self._context)
            raise Broken
        return value

    def _text(self, text: str) -> int:
        return self._put(text.encode() + b"\0")

    def _put(self, data: bytes) -> int:
        address = self._call("malloc", len(data)) & 0xFFFFFFFF
        if address == 0:
            raise Broken
        self.exported_memory.write(self.store, data, address)
        return address

    def _call(self, name: str, *arguments: int) -> int:
        function = self._functions[name]
        assert isinstance(function, wasmtime.Func)
        return int(function(self.store, *arguments) or 0)
