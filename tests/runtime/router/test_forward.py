"""How a run that lacked something is told from one that failed on its own."""

from __future__ import annotations

import pytest

from agent_sandbox.runtime.router.route import lack_in

TRACEBACK = b'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\n'


@pytest.mark.parametrize(
    "last",
    [
        "ModuleNotFoundError: No module named 'torch'",
        "ImportError: cannot import name 'x' from 'y'",
        "AttributeError: module 'os' has no attribute 'fork'",
        "RuntimeError: can't start new thread",
        "OSError: [Errno 58] wasi does not support processes.",
        "OSError: ctypes is unavailable on wasm32-wasi",
        "ReferenceError: require is not defined",
    ],
)
def test_what_was_missing_is_named_in_the_programs_own_words(last: str) -> None:
    assert lack_in(1, TRACEBACK + last.encode() + b"\n") == last


@pytest.mark.parametrize(
    ("code", "stderr"),
    [
        (0, b"ModuleNotFoundError: No module named 'torch'\n"),
        (1, b""),
        (1, TRACEBACK + b"ValueError: no\n"),
        (1, TRACEBACK + b"AttributeError: 'A' object has no attribute 'b'\n"),
        (1, b"ModuleNotFoundError: caught and printed\nsomething else\n"),
        (1, b"\xff\xfe\0" * 5_000),
    ],
)
def test_any_other_end_is_its_own(code: int, stderr: bytes) -> None:
    assert lack_in(code, stderr) is None


def test_the_stack_that_javascript_prints_below_its_error_is_no_hindrance() -> None:
    assert lack_in(1, b"ReferenceError: require is not defined\n    at <eval> (main.js:1:11)\n") == "ReferenceError: require is not defined"


def test_what_a_program_writes_is_shortened_and_made_printable() -> None:
    said = lack_in(1, b"ImportError: \x1b[2J" + b"x" * 3_000)
    assert said is not None
    assert said.isprintable()
    assert len(said) == 200


def test_the_warnings_that_follow_a_broken_event_loop_are_no_hindrance() -> None:
    said = (
        b"OSError: [Errno 58] Not supported\nsys:1: RuntimeWarning: coroutine 'f' was never awaited\nRuntimeWarning: Enable tracemalloc\n"
    )
    assert lack_in(1, TRACEBACK + said) == "OSError: [Errno 58] Not supported"
