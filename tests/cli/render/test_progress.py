"""Progress is one line for a person who waits, and nothing for anybody else."""

from __future__ import annotations

import os
import pty

import pytest

from agent_sandbox.cli.render import progress as module
from agent_sandbox.cli.render.messages import Console
from agent_sandbox.cli.render.progress import ProgressLine, progress_of
from agent_sandbox.workspace.progress import NO_PROGRESS


class Screen:
    def __init__(self) -> None:
        self.now = 0.0
        self.written: list[str] = []
        self.line = ProgressLine(self.written.append, 60, lambda: self.now)


def test_a_long_action_says_what_it_does_and_how_far_it_is_and_is_gone_at_the_end() -> None:
    screen = Screen()
    screen.line.begin("copying", 3, 64 << 20)
    screen.line.advance(1, 16 << 20)
    assert not screen.written  # nobody waits yet
    screen.now = 1.0
    screen.line.advance(1, 16 << 20)
    assert screen.written == ["\r\x1b[Kagent-sandbox: copying: 2 of 3 files, 32 MiB of 64 MiB"]
    screen.line.advance(1)
    assert len(screen.written) == 1  # not for every file
    screen.line.end()
    screen.line.end()
    assert screen.written[1:] == ["\r\x1b[K"]


def test_a_line_never_wraps() -> None:
    screen = Screen()
    screen.line.begin("x" * 200, at_once=True)
    assert len(screen.written[0].removeprefix("\r\x1b[K")) == 59


def test_only_a_terminal_sees_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    read, write = os.pipe()
    real = os.dup(2)
    try:
        os.dup2(write, 2)
        with progress_of(Console()) as line:
            assert line is NO_PROGRESS
        os.dup2(theirs, 2)
        for console in (Console(quiet=True), Console(shows=False)):
            with progress_of(console) as line:
                assert line is NO_PROGRESS
        with pytest.raises(KeyboardInterrupt), progress_of(Console()) as line:
            line.begin("copying", at_once=True)
            raise KeyboardInterrupt
        expected = b"\r\x1b[Kagent-sandbox: copying \xe2\x80\xa6\r\x1b[K"
        shown = b""
        while len(shown) < len(expected):
            shown += os.read(ours, 1000)
        assert shown == expected
    finally:
        os.dup2(real, 2)
        for fd in (ours, theirs, read, write, real):
            os.close(fd)


def test_a_terminal_that_has_gone_does_not_stop_the_action(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(fd: int, data: bytes) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "write", gone)
    module._write("copying")
