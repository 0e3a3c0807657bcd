"""A look at the state of an interpreter: its variables, an expression evaluated in it, and the frames of its last error, or of a line.

It runs in a copy of the interpreter that is thrown away afterwards, so that whatever a `repr` or an expression does changes nothing.
Everything that is returned is bounded.
"""

from __future__ import annotations

import io
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

PREFIX = "\0look\0"  # begins a turn that is a question, followed by its kind and its words
MOST_NAMES, LONGEST_REPR, MOST_COLUMNS, HEAD = 1000, 1000, 50, 5
LARGEST_PIECE = 8 << 20  # bytes of a file in one answer
LARGEST_DIGEST = 64 << 20  # bytes of a value; a larger one is compared by its description
_HIDDEN = ("__builtins__", "ToolError")


def answer(question: str, names: dict[str, Any], error: BaseException | None, frame: FrameType | None = None) -> dict[str, Any]:
    """Answer a question: the value is data. Output of the code that runs meanwhile is dropped. With a frame, its local variables count."""
    _, _, kind, words = question.split("\0", 3)
    out, sys.stdout, sys.stderr = (sys.stdout, sys.stderr), io.StringIO(), io.StringIO()
    try:
        if kind == "variables":
            return {"variables": described(names)}
        if kind == "digests":
            return {"digests": _digests({**names, **_qualified(frame, names)})}
        if kind == "frames":
            return {"frames": _frames(error) if frame is None else _callers(frame)}
        if kind == "read":
            return _piece(*words.split("\0"))
        if kind == "list":
            return {"names": sorted(os.listdir(words))[:10_000]}
        return {"value": description(eval(words, names if frame is None else {**names, **frame.f_locals}))}
    except BaseException as raised:
        return {"raised": f"{type(raised).__name__}: {_text(raised)}"}
    finally:
        sys.stdout, sys.stderr = out


def lines_of(source: str) -> list[str]:
    """Return the lines of a program, with their ends, as the compiler counts them: `splitlines` knows other ends, such as form feeds."""
    return list(io.StringIO(source, newline=""))


def _piece(path: str, start: str) -> dict[str, Any]:
    """Return a piece of a file from a place on, and whether more follows: one message does not hold a large file."""
    with open(path, "rb") as file:
        file.seek(int(start))
        content = file.read(LARGEST_PIECE)
        return {"content": content, "more": len(content) == LARGEST_PIECE and bool(file.read(1))}


def described(names: dict[str, Any]) -> list[dict[str, Any]]:
    """Describe the variables of a program, by name. Modules are left out."""
    shown = _shown(names)
    return [{"name": name, **description(value)} for name, value in shown]


def _shown(names: dict[str, Any], most: int = MOST_NAMES) -> list[tuple[str, Any]]:
    found = [(name, value) for name, value in names.items() if name not in _HIDDEN and type(value).__name__ != "module"]
    return [(name, value) for name, value in found if not (name.startswith("__") and name.endswith("__"))][:most]


def _digests(names: dict[str, Any]) -> dict[str, str]:
    """Return a digest of each value, by which two states of a variable are compared: of what pickle makes of it, or of its description.

    Pickle knows functions and classes by their names only, and not what they do. They are taken apart, and so is what it cannot pickle.
    """
    import copyreg  # only a comparison needs these
    import hashlib
    import pickle
    import types

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, types.FunctionType) and (value.__module__ == "__main__" or "<" in value.__qualname__):
                cells = [each.cell_contents for each in value.__closure__ or () if each != types.CellType()]
                return object, (), (_work(value.__code__), value.__defaults__, value.__kwdefaults__, cells, value.__dict__)
            if isinstance(value, type):
                if value.__module__ != "__main__":
                    return NotImplemented
                kept = {name: each for name, each in vars(value).items() if name not in _OF_A_PLACE}
                return object, (), (value.__qualname__, value.__bases__, kept)
            try:
                reduce: Any = copyreg.dispatch_table.get(type(value))
                return value.__reduce_ex__(5) if reduce is None else reduce(value)
            except Exception:
                return object, (), _inside(value)

    def digest(value: Any) -> str:
        content = io.BytesIO()
        try:
            if _size(value) < LARGEST_DIGEST:
                Pickler(content, 5).dump(value)
        except BaseException:
            content = io.BytesIO()
        return hashlib.sha256(content.getvalue() or repr(description(value)).encode()).hexdigest()[:32]

    return {name: digest(value) for name, value in _shown(names, _MOST_DIGESTS)}


_MOST_DIGESTS = 50_000
_OF_A_PLACE = ("__dict__", "__weakref__", "__firstlineno__")  # of a class: where it is, and not what it does


def _work(code: Any) -> tuple[Any, ...]:
    """Return what a piece of code does, wherever its text stands."""
    constants = [_work(each) if hasattr(each, "co_code") else (type(each).__name__, repr(each)) for each in code.co_consts]
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags, code.co_qualname


def _inside(value: Any) -> tuple[Any, ...]:
    """Return what an object that cannot be pickled holds, as far as it shows."""
    parts: list[Any] = [type(value).__qualname__, _text(value)]
    for name in ("__func__", "__self__", "fget", "fset", "fdel"):
        parts.append(getattr(value, name, None) if type(value).__module__ == "builtins" else None)
    for kind in ("gi", "cr", "ag"):
        if (frame := getattr(value, f"{kind}_frame", None)) is not None:  # of a generator or a coroutine: how far it has come
            parts += [_work(frame.f_code), frame.f_lasti, dict(frame.f_locals)]
    if isinstance(value, io.IOBase) and not value.closed:
        try:
            parts.append(value.tell())
        except Exception:
            parts.append(os.lseek(value.fileno(), 0, os.SEEK_CUR))
    return (*parts, getattr(value, "__dict__", None) if isinstance(getattr(value, "__dict__", None), dict) else None)


def description(value: Any) -> dict[str, Any]:
    """Describe a value: its type, its size, a bounded repr, and of tables and arrays their shape, columns and first rows."""
    kind = type(value)
    about: dict[str, Any] = {
        "type": kind.__name__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    }
    about["bytes"] = _size(value)
    try:
        shape = getattr(value, "shape", None)
        if isinstance(shape, tuple) and all(isinstance(each, int) for each in shape):
            about["shape"] = list(shape)
            columns = getattr(value, "columns", None)
            if columns is not None:
                about["columns"] = [str(each)[:100] for each in list(columns)[:MOST_COLUMNS]]
            if hasattr(value, "head"):
                about["repr"] = _cut(str(value.head(HEAD)))
    except BaseException:
        about.pop("shape", None)
    about.setdefault("repr", _text(value))
    return about


def _size(value: Any) -> int:
    try:
        if isinstance(size := getattr(value, "nbytes", None), int):
            return size
        if hasattr(value, "memory_usage"):
            used = value.memory_usage(deep=False)
            return int(used if isinstance(used, int) else used.sum())
        return sys.getsizeof(value)
    except BaseException:
        return 0


def _text(value: object) -> str:
    """Return a bounded repr. Long built-in containers and texts are cut before they are spelled."""
    import reprlib  # not before somebody looks

    try:
        if isinstance(value, bytes | bytearray):
            value = bytes(value[:LONGEST_REPR])
        short = reprlib.Repr()
        short.maxstring = short.maxother = short.maxlong = LONGEST_REPR
        short.maxlist = short.maxtuple = short.maxset = short.maxfrozenset = short.maxdeque = short.maxarray = short.maxdict = 50
        return _cut(short.repr(value) if not isinstance(value, BaseException) else str(value))
    except BaseException as error:
        return f"<{type(value).__name__} whose repr raised {type(error).__name__}>"


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_REPR else text[:LONGEST_REPR] + "…"


def _frames(error: BaseException | None) -> list[dict[str, Any]]:
    frames, trace = [], error.__traceback__ if error is not None else None
    while trace is not None:
        frames += _described_frame(trace.tb_frame, trace.tb_lineno)
        trace = trace.tb_next
    return frames[-100:]


def _callers(frame: FrameType | None) -> list[dict[str, Any]]:
    """Describe a frame and those that called it, outermost first, up to the turn."""
    frames: list[dict[str, Any]] = []
    while frame is not None and len(frames) < 100 and (described := _described_frame(frame, frame.f_lineno)):
        frames += described
        frame = frame.f_back
    return frames[::-1]


def _described_frame(frame: FrameType, line: int) -> list[dict[str, Any]]:
    """Describe a frame, unless it is one of ours."""
    code = frame.f_code
    if code.co_filename.endswith("runtime/guest/steps.py"):
        return []
    return [{"function": code.co_name, "file": code.co_filename, "line": line, "variables": described(dict(frame.f_locals))}]


def _qualified(frame: FrameType | None, names: dict[str, Any]) -> dict[str, Any]:
    """Return the local variables of a frame, each with the name of its function in front."""
    if frame is None or frame.f_locals is names:
        return {}
    return {f"{frame.f_code.co_name}.{name}": value for name, value in frame.f_locals.items()}
