"""The whole suite in parts: nothing is left out, nothing is run twice, and what fails fails the whole."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from scripts import suite


def files_of(part: suite.Part) -> list[Path]:
    named = [suite.CHECKOUT / word for word in part.command if word.startswith("tests/")]
    return [file for path in named for file in (path.rglob("test_*.py") if path.is_dir() else [path])]


def test_every_file_of_tests_is_in_one_part() -> None:
    counted = Counter(file for part in suite.parts() if not part.name.startswith("user-") for file in files_of(part))
    assert counted == Counter((suite.CHECKOUT / "tests").rglob("test_*.py"))


def test_the_checks_are_a_part_of_it_and_as_root_the_unprivileged_half_too(monkeypatch: pytest.MonkeyPatch) -> None:
    unprivileged = {"user-contract", "user-security", "user-e2e-1", "user-e2e-2", "user-network", "user-only"}
    for root in (True, False):
        monkeypatch.setattr(suite, "ROOT", root)
        assert {part.name for part in suite.parts()} & {"check", *unprivileged} == {"check", *(unprivileged if root else ())}


def chosen(marks: str, *test: str) -> bool:
    """Whether a test with these marks is chosen by an expression."""

    def has(name: str, /, **_: str | int | bool | None) -> bool:
        return name in test

    return Expression.compile(marks).evaluate(has)


def test_whatever_the_unprivileged_half_leaves_out_is_run_unprivileged_by_another_target() -> None:
    as_a_user = suite.MARKS_AS_A_USER
    assert [chosen(as_a_user, *marks) for marks in ((), ("once", "both"), ("once", "needs_user"))] == [True, True, True]
    (torture,) = re.findall(r"MARKS='(.+)' scripts/unprivileged.sh", (suite.CHECKOUT / "Makefile").read_text())
    for marks in (("once",), ("slow",), ("torture",), ("once", "both", "slow")):
        assert not chosen(as_a_user, *marks) and chosen(torture, *marks), marks


def test_the_marks_for_who_runs_a_test_stand_only_where_they_are_heeded() -> None:
    once, both = (f"pytest.mark.{name}" for name in ("once", "both"))
    texts = {file.relative_to(suite.CHECKOUT / "tests"): file.read_text() for file in (suite.CHECKOUT / "tests").rglob("test_*.py")}
    marked = {file for file, text in texts.items() if once in text or both in text}
    assert marked and {file.parts[0] for file in marked} <= suite.AS_A_USER.keys()
    assert [file for file, text in texts.items() if both in text and f"pytestmark = {once}" not in text] == []


def test_what_does_not_wait_for_webassembly_uses_none() -> None:
    using = [file for part in suite.parts() if not part.compiled for file in files_of(part) if "tests import compiled" in file.read_text()]
    assert using == []


@pytest.mark.parametrize(("command", "status", "said"), [("true", 0, "all of it passed"), ("exit 3", 1, "FAILED: one")])
def test_a_part_that_fails_fails_the_whole_and_the_others_are_run(command: str, status: int, said: str) -> None:
    program = f"""
import sys
from scripts import suite
suite.COMPILE = suite.Part("compile", ("true",))
suite.parts = lambda: [suite.Part("one", ("sh", "-c", "echo first; {command}")), suite.Part("two", ("echo", "second"), compiled=True)]
sys.exit(suite.main([]))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=suite.CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == status and said in done.stdout
    assert "first\n" in done.stdout and "second\n" in done.stdout


def test_every_failure_is_named_with_its_part_and_how_to_run_that_again(capsys: pytest.CaptureFixture[str]) -> None:
    twice = "FAILED tests/a/test_one.py::test_x[1 2] - assert 0"
    said = f"{twice}\nnoise\nERROR tests/a/test_one.py::test_y\n{twice}\n"
    assert suite.failures(said) == ["tests/a/test_one.py::test_x[1 2] - assert 0", "tests/a/test_one.py::test_y"]
    left = "== left behind by the tests ==\nmount on /a\nprocess 7: sleep\n\n=== FAILURES ===\nnoise\n"
    theirs = "= 3 passed in 1.00s =\nunprivileged: processes were left behind:\n  9 sleep 600\n"
    assert suite.failures(left + twice) == ["tests/a/test_one.py::test_x[1 2] - assert 0", *suite.failures(left)]
    assert list(suite.summary({"one": suite.failures(said), "two": suite.failures(left), "user-two": suite.failures(theirs)})) == [
        "FAILED in one: tests/a/test_one.py::test_x[1 2] - assert 0",
        "FAILED in one: tests/a/test_one.py::test_y",
        "FAILED in two: left behind: mount on /a",
        "FAILED in two: left behind: process 7: sleep",
        "FAILED in user-two: left behind: 9 sleep 600",
        'to run these parts again: make test PART="one two user-two"',
    ]
    assert list(suite.summary({})) == []
    assert suite.main(["no-such-part"]) == 2 and "there are check, " in capsys.readouterr().err


def test_a_part_that_fails_without_a_failed_test_gives_its_last_lines() -> None:
    said = "\n\n".join(f"line {number}" for number in range(20))
    assert suite.failures(said, 2) == ["exit code 2, and the last lines are:", *(f"    line {number}" for number in range(10, 20))]
    assert suite.failures("", 137) == ["exit code 137, and it said nothing"]


def test_each_part_has_a_place_for_temporary_files_that_goes_with_it(tmp_path: Path) -> None:
    program = f"""
import sys
from scripts import suite
suite.COMPILE = suite.Part("compile", ("true",))
suite.parts = lambda: [suite.Part(name, ("sh", "-c", "at=$PYTEST_DEBUG_TEMPROOT; >$at/x; echo $at >>{tmp_path}/said")) for name in "ab"]
sys.exit(suite.main([]))
"""
    assert subprocess.run([sys.executable, "-c", program], cwd=suite.CHECKOUT, capture_output=True, check=False).returncode == 0
    places = (tmp_path / "said").read_text().split()
    assert len(set(places)) == 2 and not any(map(os.path.exists, places))


def test_who_ends_it_ends_all_of_its_parts(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    program = f"""
import sys
from scripts import suite
suite.COMPILE = suite.Part("compile", ("sh", "-c", "exec 3>{pipe}; echo here >&3; exec sleep 600"))
suite.parts = lambda: []
sys.exit(suite.main([]))
"""
    running = subprocess.Popen([sys.executable, "-c", program], cwd=suite.CHECKOUT)
    with open(pipe, "rb") as told:
        assert told.readline() == b"here\n"
        running.terminate()
        assert running.wait() == 143
        assert told.read() == b"", "whoever had the other end has gone"


@pytest.mark.needs_root
def test_what_one_part_mounts_is_not_there_for_another(tmp_path: Path) -> None:
    place, scratch = tmp_path / "place", tmp_path / "scratch"
    place.mkdir()
    scratch.mkdir()
    look = f"mount -t tmpfs none {place}; touch {place}/inside; ls {place}"
    running = suite.start(suite.Part("mounting", ("sh", "-c", look)), scratch)
    running.process.wait()
    shutil.rmtree(running.temporary)
    assert running.said.read_text() == "inside\n" and os.listdir(place) == []
