"""One instance of QuickJS, and the event loop around it: run what promises have left to do, then the next timer, until nothing is left."""

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
_STACK_KIB = 1800  # for its own calls: it is compiled with 2048, and does not notice their end by itself
_EXCEPTION = 6  # the tag of a value that is none, in its upper half
_MOST_ROUNDS = 4096  # of what promises do, before it is looked whether there is more


class Broken(Exception):
    """The interpreter itself has failed, not the program in it; its last words are on stderr."""


def prelude() -> str:
    """What a program finds besides the language, as one module."""
    here = os.path.dirname(__file__)
    texts = []
    for name in _FILES:
        with open(os.path.join(here, name), encoding="utf-8") as file:
            texts.append(file.read())
    return "".join(texts)


class Interpreter(Inside):
    """For one program, once it has been prepared."""

    def __init__(self, store: wasmtime.Store, instance: wasmtime.Instance) -> None:
        super().__init__(store, instance)
        exports = instance.exports(store)
        self._functions = {name: exports[name] for name in (*_STARTS, *EXPORTED)}
        self._context = self._runtime = self._name = self._scratch = 0

    def prepare(self, prelude: str) -> None:
        """Start it, and let it read what every program finds."""
        self._call("_initialize")
        words = [self._text(word) for word in ("qjs", f"--stack-size={_STACK_KIB}", "-m", "-e", prelude)]
        pointers = b"".join(word.to_bytes(4, "little") for word in words) + bytes(4)
        if self._call("qjs_init_argv", len(words), self._put(pointers)):
            raise Broken
        self._context = self._call("qjs_get_context")
        self._runtime = self._call("JS_GetRuntime", self._context)
        self._name, self._scratch = self._text("<host>"), self._put(bytes(4))

    def run(self, path: str, message: Mapping[str, Any]) -> int:
        """Run a program as it was handed over to its end, at which it ends this process; or until it breaks."""
        self._ours("begin", json.dumps({"path": path} | {name: message[name] for name in _GIVEN}, sort_keys=True))
        while True:
            self._keep_promises()
            self._await("checked")
            if not self._ours("turn") & 1:
                self._ours("end")
                return 0

    def _keep_promises(self) -> None:
        """Whatever they have to do. To look whether there is something does one thing; in between as much is done inside as is sensible."""
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
