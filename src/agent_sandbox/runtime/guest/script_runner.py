"""How a script runs in an interpreter that was there before it: what a fresh one would have had, and an end like a fresh one's.

The process guest imports this. The interpreter inside WebAssembly is given its text, so nothing here may import anything of ours.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
import time
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType
    from typing import NoReturn

_REHEARSAL = """
import sys
def words(count):
    return [f"{number}" for number in range(count)]
try:
    print(*words(0), end="", flush=True)
    {}["nothing"]
except KeyError as error:
    print(end="", file=sys.stderr)
"""


def prepare(path: str) -> None:
    """Whatever does not depend on the script, before anybody waits for it: streams, an empty environment, a first script."""
    os.environ.clear()
    _open_streams()
    rehearse(path)
    gc.enable()


def rehearse(path: str) -> None:
    """Touch what every script will touch, so that this memory is the guest's own by then, and not copied while it runs."""
    before = sys.modules["__main__"]
    _execute(path, _REHEARSAL, {})
    sys.modules["__main__"] = before
    os.write(1, b"")


def rehearse_within(path: str, directory: str) -> None:
    """The same where this interpreter has no process of its own to be prepared in: all that `go` and `give` touch, too."""
    with suppress(OSError):  # a view may have no such place
        go(directory)
    give(path, {"_": ""}, (), directory)
    del os.environ["_"], sys.path[0]
    rehearse(path)


def go(directory: str) -> None:
    """Make it the working directory, which costs nothing where it is."""
    if os.getcwd() != directory:
        os.chdir(directory)


def begin(path: str, environment: Mapping[str, str], arguments: Sequence[str], directory: str, *, seeded: bool) -> None:
    """What comes before the script, in an interpreter that is told what to do in Python."""
    if not seeded:
        reseed()
    go(directory)
    give(path, environment, arguments, directory)


def start(path: str, source: str, environment: Mapping[str, str], arguments: Sequence[str], directory: str, *, seeded: bool) -> NoReturn:
    """All of it in one call."""
    begin(path, environment, arguments, directory, seeded=seeded)
    run(path, source)


def reseed() -> None:
    """Guests that began as copies of one interpreter would all draw the same numbers."""
    for name in ("random", "numpy.random"):
        if name in sys.modules:
            sys.modules[name].seed()


def give(path: str, environment: Mapping[str, str], arguments: Sequence[str], directory: str) -> None:
    """Give this interpreter what a fresh one would have had: its own environment, arguments and search path."""
    os.environ.update(environment)
    if "TZ" in os.environ and hasattr(time, "tzset"):
        time.tzset()
    sys.argv[:] = [path, *arguments]
    sys.path.insert(0, directory)


def run(path: str, source: str, names: Mapping[str, object] | None = None) -> NoReturn:
    """Run it as the main program, which has these names, and end the process with its exit code."""
    end(*_execute(path, source, names or {}))


def _execute(path: str, source: str, names: Mapping[str, object]) -> tuple[ModuleType, int]:
    main = type(sys)("__main__")
    main.__dict__.update(names, __file__=path, __cached__=None, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    code = 0
    try:
        exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)
    except BaseException as error:
        code = ended(error)
    return main, code


def ended(error: BaseException) -> int:
    """The exit code of a program that raised this, which is shown as an interpreter would. Called where the program was."""
    try:
        return _exit_code(error) if isinstance(error, SystemExit) else _show(error)
    except BaseException:  # a hook of its own that failed, or an output it has closed
        sys.__excepthook__(type(error), error, error.__traceback__)
        return 1


def _open_streams() -> None:
    # Line by line even into a pipe: what was printed before a timeout or a kill must not be lost in a buffer.
    for name, fd, mode, errors in (
        ("stdin", 0, "rb", "surrogateescape"),
        ("stdout", 1, "wb", "surrogateescape"),
        ("stderr", 2, "wb", "backslashreplace"),
    ):
        raw = open(fd, mode, closefd=False)  # noqa: SIM115  lives as long as the process
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=fd != 0)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _exit_code(leaving: SystemExit) -> int:
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code & 0xFF
    print(leaving.code, file=sys.stderr)
    return 1


def _show(error: BaseException) -> int:
    """Print the traceback as the interpreter would, without the frame of ours it began in."""
    trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def end(main: ModuleType, code: int) -> NoReturn:
    """End the process, as an interpreter ends that has run this as its main program."""
    os._exit(_finish(main, code))


def _finish(main: ModuleType, code: int) -> int:
    """End as an interpreter ends: threads, exit functions, the script's own objects, streams.

    The rest of an interpreter's teardown is left out: it would touch, and so copy, the memory shared with other guests, and no one could
    tell.
    """
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    main.__dict__.clear()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120  # as the interpreter reports output that could not be written
    return code
