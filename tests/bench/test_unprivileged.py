"""The benchmark as another user: it reaches what it needs, also in a checkout that others cannot enter."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import run, unprivileged
from bench.tables import Table

NOBODY = 60_704


@pytest.fixture
def door() -> Iterator[Path]:
    """A directory that other users can reach."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        os.chmod(place, 0o755)
        yield Path(place)


def said_by(place: Path) -> list[str]:
    command = unprivileged.as_user(NOBODY, place, ("sh", "-c", f"id -u; ls {place}"))
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()


@pytest.mark.needs_root
def test_a_checkout_that_others_cannot_enter_is_reached_through_a_door_that_nobody_else_sees(
    door: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inside").touch()  # below a directory of pytest's, which is closed to others
    tmp_path.chmod(0o755)
    monkeypatch.setattr(unprivileged, "ROOT", tmp_path)
    assert not unprivileged.reachable_by(NOBODY)
    assert said_by(door) == [str(NOBODY), "inside"]
    assert os.listdir(door) == []
    assert said_by(tmp_path) == [str(NOBODY)], "the control: without the door there is nothing to be seen"


@pytest.mark.needs_root
def test_a_checkout_that_others_can_enter_needs_no_door(door: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (door / "bench").mkdir()
    (door / "bench/run.py").touch()
    monkeypatch.setattr(unprivileged, "ROOT", door)
    monkeypatch.setattr("sys.executable", "/usr/bin/python3")
    assert unprivileged.reachable_by(NOBODY)
    assert said_by(door) == [str(NOBODY), "bench"]


def test_what_was_measured_before_something_broke_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    done = Table("warm", "print(1)", "ms", (), "us", ())

    def take(*_: object, **__: object) -> Iterator[Table]:
        yield done
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(run, "take", take)
    account = run._measure(run._parser().parse_args([]))
    assert account.tables == (done,) and "STOPPED after 1 of" in account.problems[0] and "Permission denied" in account.problems[0]
