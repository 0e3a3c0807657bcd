"""The profiler that follows an action, on made-up code that claims to be ours, and the limits. No sandbox is started here."""

from __future__ import annotations

import argparse
import sys

import pytest

from scripts import walk

CODE = """
def act(): return [helper() for _ in range(2)]
def helper(): return (lambda: runtime.launch())()
class Unused:
    def method(self): ...
def on_import(): ...
on_import()
"""


def follow(code: str, runtime: str, *, file: str) -> walk.Profiler:
    """Call `act` of this code and return what the profiler has seen; also of the import."""
    profiler, names = walk.Profiler(), {"runtime": argparse.Namespace(launch=_defined(runtime, f"{walk.RUNTIMES}made_up.py")["launch"])}
    sys.setprofile(profiler)
    try:
        exec(compile(code, file, "exec"), names)
        names["act"]()  # type: ignore[operator]
    finally:
        sys.setprofile(None)
    return profiler


def _defined(code: str, file: str) -> dict[str, object]:
    names: dict[str, object] = {}
    exec(compile(code, file, "exec"), names)
    return names


def test_functions_that_were_called_are_counted_once_with_the_depth_of_the_launch() -> None:
    profiler = follow(CODE, "def launch(): ...", file=f"{walk.OURS}made_up.py")
    called = {name: depth for (_, _, name), depth in profiler.calls.items()}
    assert called == {"act": 1, "helper": 2, "helper.<locals>.<lambda>": 3, "launch": 4}
    assert profiler.launch == [
        *("made_up.py:2 act", "made_up.py:3 helper", "made_up.py:3 helper.<locals>.<lambda>", "runtime/made_up.py:1 launch")
    ]


def test_code_of_others_is_not_counted() -> None:
    profiler = follow(CODE, "def launch(): ...", file="/elsewhere/made_up.py")
    assert [name for _, _, name in profiler.calls] == ["launch"]


def test_a_limit_is_of_files_unless_it_names_a_column() -> None:
    assert walk.parse_limit("run=60") == ("run", "files", 60)
    assert walk.parse_limit("promote.functions=500") == ("promote", "functions", 500)
    for text in ("run", "run=", "run=many", "walk=60", "run.lines=60"):
        with pytest.raises(argparse.ArgumentTypeError):
            walk.parse_limit(text)


def test_what_exceeds_its_limit_or_was_not_measured_is_told() -> None:
    walks = {"run": walk.Walk([walk.Call("a.py", 1, "f", 1), walk.Call("a.py", 2, "g", 1)], [])}
    assert [*walk.exceeded(walks, [("run", "files", 1), ("run", "functions", 2)])] == []
    assert [*walk.exceeded(walks, [("run", "files", 0), ("run", "functions", 1)])] == [
        "run: 1 files, more than 0",
        "run: 2 functions, more than 1",
    ]
    assert len([*walk.exceeded(walks, [("run", "depth", 9), ("promote", "files", 9)])]) == 2
