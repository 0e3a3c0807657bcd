"""The pager's side of a terminal: what is its own, from its first moment to its end."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from agent_sandbox.cli.render.pager import _Sink
from tests.patience import until


def test_ctrl_c_is_the_pagers_from_its_first_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody types it as soon as the pager shows anything, which may be before we have come back from starting it."""
    script = tmp_path / "pager"
    script.write_text(
        f"#!/bin/sh\ntrap 'echo x > {tmp_path}/interrupted; exit 0' INT\ntouch {tmp_path}/ready\nwhile :; do sleep 0.1; done\n"
    )
    script.chmod(0o755)
    ours = signal.getsignal(signal.SIGINT)

    class PopenAndCtrlC(subprocess.Popen[bytes]):
        def __init__(self, *args: object, **settings: object) -> None:
            super().__init__(*args, **settings)  # type: ignore[call-overload]
            assert until((tmp_path / "ready").exists)
            os.kill(self.pid, signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", PopenAndCtrlC)
    sink = _Sink([str(script)], 2, 80)
    sink.write(b"line\n" * 10)
    sink.close()
    assert (tmp_path / "interrupted").exists()
    assert signal.getsignal(signal.SIGINT) is ours


def test_a_pager_that_is_not_there_leaves_ctrl_c_to_us(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    ours = signal.getsignal(signal.SIGINT)
    sink = _Sink(["/nonexistent/pager"], 2, 80)
    sink.write(b"line\n" * 10)
    sink.close()
    assert signal.getsignal(signal.SIGINT) is ours
