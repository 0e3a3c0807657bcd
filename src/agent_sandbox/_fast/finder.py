"""Load the modules of this package with as little work as the interpreter allows. For programs that start, do one thing and end.

The interpreter asks every finder about every module, lists directories, and looks at each file three times. For the modules of this package
one `stat` and one read are enough. The rules stay those of the interpreter: the compiled file counts only if it names the time and size of
its source. Anything else, such as a missing compiled file, is left to the interpreter.
"""

from __future__ import annotations

import _imp
import gc
import marshal
import os
import sys
from _frozen_importlib import ModuleSpec
from _frozen_importlib_external import MAGIC_NUMBER, SourceFileLoader

from agent_sandbox._fast.values import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType, ModuleType

_PACKAGE = "agent_sandbox."
_BY_TIME = MAGIC_NUMBER + bytes(4)  # how a compiled file begins that is valid for one time and size of its source
_OBJECTS = 100_000  # new objects between two collections of garbage: a run makes fewer


def load_quickly() -> None:
    """Make loading quicker in this process, and collect garbage less often. For the first lines of a program."""
    gc.set_threshold(_OBJECTS)
    usual = sys.pycache_prefix is None and not sys.flags.optimize  # otherwise compiled files lie elsewhere or have other names
    if usual and sys.platform == "linux" and Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)


class Finder:
    """Finds the modules of this package, in the directory that the interpreter has found for it. Does not know other modules."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return where a module of this package is; None if the interpreter has to look."""
        if not name.startswith(_PACKAGE) or path is None or len(path) != 1:
            return None
        top, last = path[0], name.rpartition(".")[2]
        source, compiled = f"{top}/{last}.py", f"{top}/__pycache__/{last}.{sys.implementation.cache_tag}.pyc"
        places = None
        try:
            status = os.stat(source)
        except OSError:
            places = [f"{top}/{last}"]
            source, compiled = f"{top}/{last}/__init__.py", f"{top}/{last}/__pycache__/__init__.{sys.implementation.cache_tag}.pyc"
            try:
                status = os.stat(source)
            except OSError:
                return None
        spec = ModuleSpec(name, _Loader(name, source, compiled, status), origin=source, is_package=places is not None)
        spec.submodule_search_locations, spec.cached, spec.has_location = places, compiled, True
        return spec


class _Loader(SourceFileLoader):
    """Loads a module from its compiled file, if that is of the source as it is now."""

    def __init__(self, name: str, source: str, compiled: str, status: os.stat_result) -> None:
        super().__init__(name, source)
        self._compiled = compiled
        self._valid = _BY_TIME + _four_bytes(int(status.st_mtime)) + _four_bytes(status.st_size)

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of the module."""
        try:
            file = os.open(self._compiled, os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = os.read(file, os.fstat(file).st_size)
            finally:
                os.close(file)
        except OSError:  # not compiled yet, or not for us to read
            data = b""
        if not data.startswith(self._valid):
            return super().get_code(fullname)
        code: CodeType = marshal.loads(memoryview(data)[len(self._valid) :])
        # For tracebacks: the package may have been moved since it was compiled.
        _imp._fix_co_filename(code, self.path)  # type: ignore[attr-defined]
        return code


def _four_bytes(number: int) -> bytes:
    return (number & 0xFFFFFFFF).to_bytes(4, "little")
