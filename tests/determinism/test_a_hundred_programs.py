"""A hundred programs, each twice: from a pool and not, at another time, in a project whose files have other numbers, times and order."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.engine.records import Record, departures, read
from tests import compiled
from tests.determinism.programs import DIFFERING, PROGRAMS
from tests.determinism.running import AS_ANOTHER_USER, make_project, records

USER = 60_700  # nobody's


@pytest.fixture(scope="module")
def project() -> Iterator[Path]:
    """Where another user can reach it as well, by the same name."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        os.chmod(place, 0o711)
        yield Path(place, "project")


@pytest.fixture(scope="module")
def first(project: Path) -> Iterator[dict[str, Record]]:
    make_project(project)
    runtime = compiled.runtime(warm=4)
    yield records(runtime, project, project.parent / "ledger", PROGRAMS)
    runtime.close()


def test_there_are_a_hundred() -> None:
    assert len(PROGRAMS) == 100


def test_each_is_the_same_the_second_time(project: Path, first: dict[str, Record]) -> None:
    make_project(project, backwards=True)
    runtime = compiled.runtime()
    try:
        second = records(runtime, project, project.parent / "ledger", PROGRAMS)
    finally:
        runtime.close()
    differing = {name: [each.message for each in departures(first[name], second[name])] for name in PROGRAMS}
    assert {name: messages for name, messages in differing.items() if messages} == {}
    assert all(record.fuel for record in first.values()), "and each was counted"


def test_without_being_asked_for_it_many_differ(project: Path) -> None:
    make_project(project)
    runtime = compiled.runtime(warm=4)
    try:
        one, other = (records(runtime, project, project.parent / "ledger", DIFFERING, deterministic=False) for _ in range(2))
    finally:
        runtime.close()
    differing = [name for name in sorted(DIFFERING) if departures(one[name], other[name])]
    assert len(differing) >= 20, differing


def test_another_seed_gives_other_numbers_and_the_same_time(project: Path, first: dict[str, Record]) -> None:
    make_project(project)
    drawing = ("random", "shuffle", "secrets", "uuid4", "numpy random", "a temporary name", "monte carlo", "a file of random content")
    timing = ("time of day", "a long sleep", "stat", "a listing")
    runtime = compiled.runtime()
    try:
        other = records(runtime, project, project.parent / "ledger", (*drawing, *timing), seed=8)
    finally:
        runtime.close()
    assert [name for name in drawing if not departures(first[name], other[name])] == []
    assert [name for name in timing if (first[name].stdout, first[name].stderr) != (other[name].stdout, other[name].stderr)] == []


@pytest.mark.needs_root
def test_a_user_without_privileges_gets_what_root_gets(project: Path, first: dict[str, Record], reachable_checkout: Path) -> None:
    make_project(project)
    place = Path(tempfile.mkdtemp(prefix="theirs-", dir=project.parent))
    for directory, _, names in os.walk(project):
        for path in (directory, *(os.path.join(directory, name) for name in names)):
            os.chown(path, USER, USER)
    os.chown(place, USER, USER)
    command = [
        "setpriv",
        f"--reuid={USER}",
        f"--regid={USER}",
        "--clear-groups",
        "--inh-caps=-all",
        str(reachable_checkout / ".venv/bin/python"),
    ]
    environment = {"PATH": os.environ["PATH"], "HOME": str(place), "XDG_STATE_HOME": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([*command, "-m", "tests.determinism.running", project, place], cwd=reachable_checkout, env=environment, check=True)
    theirs = {name: read(str(place / str(number))) for number, name in enumerate(AS_ANOTHER_USER)}
    differing = {name: [each.message for each in departures(first[name], theirs[name])] for name in theirs}
    assert {name: found for name, found in differing.items() if found} == {}
