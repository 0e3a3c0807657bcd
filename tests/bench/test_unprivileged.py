"""The benchmark as another user: it reaches what it needs, also in a checkout that others cannot enter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import unprivileged
from bench.unprivileged import Unreachable

NOBODY = 60_704


@pytest.fixture
def top() -> Iterator[Path]:
    """A directory that other users can reach."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        os.chmod(place, 0o755)
        yield Path(place)


@pytest.fixture
def checkout(top: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with a program that is started by its full path, as those of a virtual environment are by their first line."""
    checkout = top / "above/checkout"
    checkout.mkdir(parents=True)
    (checkout / "program").write_text('#!/bin/sh\nid -u; pwd; touch "$0" 2>/dev/null || echo refused\n')
    (checkout / "program").chmod(0o755)
    monkeypatch.setattr(unprivileged, "ROOT", checkout)
    return checkout


@pytest.mark.needs_root
def test_the_programs_of_a_checkout_that_others_cannot_enter_run_by_their_own_paths(checkout: Path, top: Path) -> None:
    program = [str(checkout / "program")]
    checkout.parent.chmod(0o700)
    ran = subprocess.run(unprivileged.as_user(NOBODY, top, program), capture_output=True, text=True, check=False)
    assert ran.stdout.split() == [str(NOBODY), str(checkout), "refused"], ran.stderr
    assert os.listdir(top / "checkout") == [], "nobody else sees the door"
    assert unprivileged.closed_to_others() == checkout.parent
    with pytest.raises(PermissionError):  # the control: without the door
        subprocess.run(program, user=NOBODY, group=NOBODY, extra_groups=(), check=False)


@pytest.mark.needs_root
def test_a_checkout_that_others_can_enter_needs_no_door(checkout: Path, top: Path) -> None:
    assert unprivileged.closed_to_others() is None
    command = unprivileged.as_user(NOBODY, top, [str(checkout / "program")])
    assert subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()[:2] == [str(NOBODY), str(checkout)]
    assert "unshare" not in command


@pytest.mark.needs_root
def test_a_checkout_whose_files_others_cannot_read_is_said_to_be_so(checkout: Path) -> None:
    (checkout / "bench").mkdir()
    (checkout / "bench/run.py").touch(mode=0o600)
    with pytest.raises(Unreachable, match=r"cannot run it: .*Permission denied.*chmod -R go\+rX"):
        unprivileged.run([], lambda _: None, wasi_cache=Path("/nowhere"))


def test_an_interrupt_is_passed_on_once_and_what_is_said_then_is_heard() -> None:
    code = (
        "import os, signal, sys, time\n"
        "def last(*_):\n    os.write(1, b'last words\\n'); sys.exit()\n"
        "signal.signal(signal.SIGTERM, last); os.write(1, b'ready\\n')\nwhile True: time.sleep(0.1)"
    )
    heard: list[str] = []

    def hear(line: str) -> None:
        heard.append(line.strip())
        if heard == ["ready"]:
            os.kill(os.getpid(), signal.SIGINT)

    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True) as user:
        assert unprivileged._listen(user, hear)
    assert heard == ["ready", "last words"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
