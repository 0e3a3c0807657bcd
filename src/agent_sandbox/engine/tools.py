"""Tools: functions of the caller that a sandboxed program may call. Each call passes the gate; arguments and results are data.

Requests of the program may be hostile. A request can name only the tools of this run, and its arguments are decoded to data first. The
program learns that a tool failed. It sees the message only if the tool raises `ToolError`; the caller receives every exception.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Mapping

from agent_sandbox._fast.values import TYPE_CHECKING, replace
from agent_sandbox.engine.attachments import Attachment
from agent_sandbox.engine.gate import Gate
from agent_sandbox.errors import Denied, PolicyError, ToolError
from agent_sandbox.policy.action import CallTool
from agent_sandbox.runtime.base import Clock, Nonsense, PythonCode, Talk
from agent_sandbox.runtime.guest_rpc import codec

if TYPE_CHECKING:
    from typing import Any

    from agent_sandbox.engine.work import Outcome
    from agent_sandbox.runtime.base import Completed, Guest, Launch

Tool = Callable[..., object]
MOST_CALLS = 1000  # calls in one run or one turn: each call is recorded before it is done
LONGEST_NAME = 200
KEPT_ERRORS = 100  # errors of a run that the caller receives: a program can make a tool fail very often
_DUNDER = "__"


def named(tools: object) -> dict[str, Tool]:
    """Return tools by name, given as a mapping or as functions with names. Raises `PolicyError` for anything else."""
    import builtins

    pairs = tools.items() if isinstance(tools, Mapping) else [(getattr(tool, "__name__", None), tool) for tool in _listed(tools)]
    by_name: dict[str, Tool] = {}
    for name, tool in pairs:
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or name.startswith(_DUNDER):
            raise PolicyError(f"{name!r} cannot be the name of a tool", hint='hand it over as {"name": function}, with a name like lookup')
        if hasattr(builtins, name) or name == "ToolError":
            raise PolicyError(f"a tool cannot be called {name!r}: it is a builtin of Python", hint="choose another name")
        if name in by_name:
            raise PolicyError(f"two tools are called {name!r}", hint='hand them over as {"name": function, "other": function}')
        if not callable(tool):
            raise PolicyError(f"the tool {name!r} is no function, but {type(tool).__name__}", hint="hand over the function itself")
        by_name[name] = tool
        described(name, tool)
    return by_name


def _listed(tools: object) -> list[Any]:
    if isinstance(tools, str | bytes) or not hasattr(tools, "__iter__"):
        raise PolicyError(f"tools are functions in a list, or in a dict by name, not {type(tools).__name__}", hint="write tools=[function]")
    return list(tools)


def described(name: str, tool: Tool) -> dict[str, Any]:
    """Describe a tool for the sandboxed program: its signature and docstring. Defaults that are not data are left out."""
    import inspect  # slow to load, and few runs have tools

    try:
        signature = inspect.signature(tool)
    except (TypeError, ValueError):  # some functions written in C have none
        signature = inspect.signature(lambda *args, **kwargs: None)
    parameters, annotations = [], {}
    for parameter in signature.parameters.values():
        about: dict[str, Any] = {"name": parameter.name, "kind": int(parameter.kind)}
        about["required"] = parameter.default is parameter.empty
        if not about["required"]:
            try:
                about["default"] = codec.plain(parameter.default)
            except (TypeError, ValueError):
                if parameter.kind is parameter.POSITIONAL_ONLY:
                    why = f"the default of {parameter.name!r} of the tool {name!r} is not data, and the parameter is positional-only"
                    raise PolicyError(why, hint="make it a parameter that has a name") from None
        parameters.append(about)
        if parameter.annotation is not parameter.empty:
            annotations[parameter.name] = parameter.annotation
    if signature.return_annotation is not signature.empty:
        annotations["return"] = signature.return_annotation
    annotations = {where: what if isinstance(what, str) else inspect.formatannotation(what) for where, what in annotations.items()}
    return {"name": name, "doc": inspect.getdoc(tool), "parameters": parameters, "annotations": annotations}


class ToolCalls(Attachment):
    """Answers the calls of one sandboxed program to its caller's tools. `errors` are exceptions of tools, for the caller only."""

    def __init__(
        self, gate: Gate, tools: Mapping[str, Tool], *, most_calls: int = MOST_CALLS, ends: float | None = None, turns: bool = False
    ) -> None:
        """`most_calls` is the limit on calls in a run or turn. `ends` is the latest end of the run, by the monotonic clock.

        Raises `PolicyError` if a tool is a coroutine function.
        """
        from inspect import iscoroutinefunction

        if coroutines := sorted(name for name, tool in tools.items() if iscoroutinefunction(tool)):
            why = f"these tools are coroutines, and nobody would await them: {', '.join(coroutines)}"
            raise PolicyError(why, hint="use AsyncSandbox, or give plain functions")
        self.errors: list[Exception] = []
        self._gate = gate
        self._tools = tools
        self._most_calls = most_calls
        self._calls = 0
        self._turns = turns
        self._clock = Clock(patient=bool(gate.policy.asks.tools), ends=ends)

    def before(self, launch: Launch) -> Launch:
        """Attach the tools to a launch of Python code. Other programs have no tools."""
        return replace(launch, talk=self.talk()) if isinstance(launch.program, PythonCode) else launch

    def ended(self, guest: Guest, completed: Completed, outcome: Outcome) -> Outcome:
        """Add the exceptions of the tools to the outcome, and reset for the next turn."""
        if self.errors:
            outcome = replace(outcome, tool_errors=tuple(self.errors))
        self.renew()
        return outcome

    def renew(self) -> None:
        """Forget the calls and errors so far, before another turn."""
        self._calls, self.errors = 0, []

    def talk(self) -> Talk:
        """Return the tool conversation for a launch: the tools on offer, and the function that answers requests."""
        offer = {"turns": self._turns, "tools": [described(name, tool) for name, tool in self._tools.items()]}
        return Talk(self.hear, offer, self._clock)

    def hear(self, words: bytes) -> bytes:
        """Answer a request of the program. Raises `Nonsense` if it is malformed, and what the gate raises if it cannot record the call."""
        try:
            match codec.understood(words):
                case {"call": str(name), "args": list(args), "kwargs": dict(kwargs)} if len(name) <= LONGEST_NAME:
                    pass
                case _:
                    raise ValueError("no such request")
        except ValueError as error:
            raise Nonsense(f"it sent a malformed request: {error}") from None
        self._calls += 1
        if self._calls > self._most_calls:
            return _raised("ToolError", f"{name}: no more than {self._most_calls} calls are answered")
        # The exact bytes identify the action: the same call in another encoding is another action.
        return self._called(CallTool.of(name, words), args, kwargs)

    def _called(self, action: CallTool, args: list[Any], kwargs: dict[str, Any]) -> bytes:
        name = action.tool
        try:
            return self._gate.perform(
                action,
                lambda _: self._result(name, args, kwargs),
                describe=lambda result: {"result_bytes": len(result)},
                details=lambda: f"{name}(*{args!r}, **{kwargs!r})",
            )
        except Denied as refusal:
            return _raised("PermissionError", str(refusal))
        except _Failed as failure:
            error = failure.error
            if len(self.errors) < KEPT_ERRORS:
                error.add_note(f"in the tool {name!r}, called from inside the sandbox")
                self.errors.append(error)
            return _raised("ToolError", _cut(str(error)) if isinstance(error, ToolError) else failure.shown)

    def _result(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> bytes:
        self._clock.resume()  # the time of a tool counts as time of the program
        try:
            value = self._tools[name](*args, **kwargs)
        except Exception as error:
            raise _Failed(error, f"{name} failed") from error
        finally:
            self._clock.stop()
        try:
            return codec.packed({"value": codec.plain(value)})
        except (TypeError, ValueError, RecursionError) as error:
            raise _Failed(error, f"{name} failed: what it returned is not data") from error


class _Failed(Exception):
    """Wraps an exception of a tool. The ledger records only the name of this class, nothing of the exception."""

    def __init__(self, error: Exception, shown: str) -> None:
        super().__init__(shown)
        self.error = error
        self.shown = shown


def _raised(kind: str, text: str) -> bytes:
    return codec.packed({"raise": kind, "text": text})


def _cut(text: str) -> str:
    return text[:10_000]
