"""What a program inside has of its host: tools to call as functions and, in a session, the turns to take.

The process guest imports this. The interpreter inside WebAssembly is given its text, so nothing here may import anything of ours: `spell`
is `codec.spell`, `ended` is `script_runner.ended`, and `ask` sends a question out and returns its answer.
"""

from __future__ import annotations

import io
import marshal
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import CodeType
    from typing import Any

    Ask = Callable[[bytes], bytes]
    Spell = Callable[[Any], bytes]

MODULE = "host_tools"
_ONLY_AST = 0x400  # ast.PyCF_ONLY_AST, without the module
_LONGEST_REPR = 10_000


class ToolError(Exception):
    """A tool of the host's did not do what it was asked for."""


ToolError.__module__ = "__main__"  # where a program has it, and as a traceback names it


class _Unsaid:
    """Stands for a default that cannot cross. Who leaves it out leaves it to the tool."""

    def __repr__(self) -> str:
        return "..."


_UNSAID = _Unsaid()
_RAISED = {"PermissionError": PermissionError, "TypeError": TypeError, "ToolError": ToolError}


def offered(tools: list[dict[str, Any]], ask: Ask, spell: Spell) -> dict[str, Any]:
    """The tools as functions, by name; they can be imported, too."""
    module = type(sys)(MODULE, "Functions of the host's. What they are given and give back is data.")
    names = {tool["name"]: _function(tool, ask, spell) for tool in tools}
    module.__dict__.update(names, ToolError=ToolError, __all__=[*names, "ToolError"])
    sys.modules[MODULE] = module
    return {"ToolError": ToolError, **names} if names else {}


def _function(tool: dict[str, Any], ask: Ask, spell: Spell) -> Any:
    """A function with the signature of the tool: written down and compiled, so that it is one like any other."""
    name, parameters = tool["name"], tool["parameters"]
    ours = "_" + "_".join(parameter["name"] for parameter in parameters)  # longer than each of them, so none of them

    def call(given: dict[str, Any]) -> tuple[Any, BaseException | None]:
        try:
            arguments = _arguments(parameters, given)
            answer = marshal.loads(ask(spell({"call": name, **arguments})))
        except (TypeError, ValueError) as error:
            return None, type(error)(f"{name}(): {error}").with_traceback(None)
        except OSError as error:
            return None, ToolError(f"{name} cannot be reached: {error}")
        return answer.get("value"), _RAISED[answer["raise"]](answer["text"]) if "raise" in answer else None

    defaults = {f"{ours}{place}": parameter.get("default", _UNSAID) for place, parameter in enumerate(parameters)}
    source = f"def {name}({_signature(parameters, ours)}):\n    {ours}, {ours}_ = {ours}_call(locals())\n"
    source += f"    if {ours}_ is not None:\n        raise {ours}_\n    return {ours}\n"
    space: dict[str, Any] = {f"{ours}_call": call, **defaults, "__name__": MODULE}
    exec(compile(source, f"<{MODULE}>", "exec"), space)
    function = space[name]
    function.__doc__ = tool["doc"]
    function.__annotations__ = dict(tool["annotations"])
    return function


def _signature(parameters: list[dict[str, Any]], ours: str) -> str:
    """The text between the brackets. Kinds are numbered as by `inspect`: 0 by place, 1 either way, 2 *args, 3 by name, 4 **more."""
    parts: list[str] = []
    kinds = [parameter["kind"] for parameter in parameters]
    for place, parameter in enumerate(parameters):
        kind = parameter["kind"]
        if kind == 3 and 2 not in kinds and 3 not in kinds[:place]:
            parts.append("*")
        default = "" if parameter["required"] else f"={ours}{place}"
        parts.append({2: "*", 4: "**"}.get(kind, "") + parameter["name"] + default)
        if kind == 0 and 0 not in kinds[place + 1 :]:
            parts.append("/")
    return ", ".join(parts)


def _arguments(parameters: list[dict[str, Any]], given: dict[str, Any]) -> dict[str, Any]:
    """What was given: by place until something is left to the tool, then by name."""
    places: list[Any] = []
    names: dict[str, Any] = {}
    left_out = ""
    for parameter in parameters:
        name, kind = parameter["name"], parameter["kind"]
        value = given[name]
        if kind == 4:
            names.update(value)
        elif kind == 2:
            if value and left_out:
                raise TypeError(f"{left_out!r} must be given when further arguments follow it")
            places.extend(value)
        elif value is _UNSAID:
            left_out = left_out or (name if kind < 2 else "")
        elif kind == 3 or left_out:
            names[name] = value
        else:
            places.append(value)
    return {"args": places, "kwargs": names}


class Turns:
    """An interpreter that is given its program in turns. What one turn leaves, the next finds."""

    def __init__(self, names: Mapping[str, Any], ask: Ask, spell: Spell, ended: Callable[[BaseException], int]) -> None:
        self._lines = _Lines()
        self._ask = ask
        self._spell = spell
        self._ended = ended
        self._process = os.getpid()
        self.main = type(sys)("__main__")
        self.main.__dict__.update(names, __builtins__=__builtins__)
        sys.modules["__main__"] = self.main
        sys.excepthook = _print_exception

    def take(self) -> int:
        """Take turns until there are no more; the exit code for an end like any program's."""
        done: dict[str, Any] = {}
        number = 0
        while True:
            try:
                turn = marshal.loads(self._ask(self._reported(done)))
            except BaseException as error:  # an alarm of its own, or nobody is there: it has asked, and cannot ask twice
                return self._ended(error)
            if turn is None:
                return 0
            number += 1
            done = self._turn(f"<turn {number}>", turn["source"], turn["stdin"])
            if os.getpid() != self._process:
                return int(done["code"])  # a fork that did not end with its work: it is not the one who is asked

    def _reported(self, done: dict[str, Any]) -> bytes:
        try:
            return self._spell({"turn": done})
        except Exception:  # too large, or something that only looks like data
            return self._spell({"turn": {**done, "value": None, "repr": _described(done["value"])}})

    def _turn(self, name: str, source: str, stdin: bytes) -> dict[str, Any]:
        sys.stdin = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8", errors="surrogateescape")
        self._lines.kept[name] = (len(source), None, source.splitlines(keepends=True), name)
        code, value = 0, None
        try:
            body, last = _parts(source, name)
            exec(body, self.main.__dict__)
            if last is not None:
                value = eval(last, self.main.__dict__)
        except BaseException as error:
            code = self._ended(error)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BaseException:  # it may be anything by now, or nothing
                code = code or 120  # as an interpreter reports output that could not be written
        return {"code": code, "value": value}


class _Lines:
    """The lines of turns, which have no files, for whoever looks for them in `linecache`. That module is slow to load, and most sessions
    never show a line: so they wait here until somebody imports it."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}
        self._loader: Any = None
        if "linecache" in sys.modules:
            self.kept = sys.modules["linecache"].cache
        else:
            sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Where it is, with us in front of its loader."""
        if name != "linecache":
            return None
        sys.meta_path.remove(self)
        spec: Any = next(found for finder in sys.meta_path if (found := finder.find_spec(name, path, target)) is not None)
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: Any) -> Any:
        """As its own loader would."""
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        """Load it, and put the lines where it looks."""
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        module.cache.update(self.kept)
        self.kept = module.cache


def _parts(source: str, name: str) -> tuple[CodeType, CodeType | None]:
    """The program, and apart from it the expression that it ends with, whose value is wanted."""
    tree: Any = compile(source, name, "exec", _ONLY_AST, dont_inherit=True)
    last: Any = tree.body[-1] if tree.body else None
    if type(last).__name__ != "Expr":
        return compile(tree, name, "exec", dont_inherit=True), None
    import _ast

    del tree.body[-1]
    return compile(tree, name, "exec", dont_inherit=True), compile(_ast.Expression(last.value), name, "eval", dont_inherit=True)


def _described(value: object) -> str:
    try:
        text = repr(value)
    except BaseException as error:
        text = f"<{type(value).__name__} whose repr raised {type(error).__name__}>"
    return text[:_LONGEST_REPR]


def _print_exception(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """What `sys.excepthook` does in later versions of Python: it looks for lines where turns have theirs."""
    import traceback

    traceback.print_exception(kind, error, trace)
