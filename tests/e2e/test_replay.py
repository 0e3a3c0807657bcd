"""Deterministic runs from the command line: the same every time, recorded, replayed, and told apart when something has changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import compiled
from tests.e2e.program import Shell, words

pytestmark = pytest.mark.once

PROGRAM = """
import random, sys, time, uuid
print(time.time(), random.random(), uuid.uuid4(), open("greeting.txt").read(), sys.argv[1:], sys.stdin.read())
open("made.txt", "w").write(str(random.random()))
"""


@pytest.fixture
def shell(project: Path, tmp_path: Path) -> Shell:
    """Somebody in a project with a program in it, who has run `agent-sandbox setup`."""
    compiled.offer(tmp_path / "cache", tmp_path / "state")
    (project / "program.py").write_text(PROGRAM)
    return Shell(project, {"AGENT_SANDBOX_STATE": str(tmp_path / "state"), "XDG_CACHE_HOME": str(tmp_path / "cache")})


@pytest.mark.both
def test_a_run_is_recorded_and_replayed(shell: Shell, tmp_path: Path) -> None:
    record = str(tmp_path / "run.json")
    line = ("code", "--deterministic", "--seed", "3", "--throw-away", "--record", record, "program.py", "--", "word")
    first = shell(*line, stdin=b"given")
    assert first.returncode == 0 and first.stdout.startswith(b"1767225600.") and b"['word'] given" in first.stdout, first
    assert shell(*line, stdin=b"given").stdout == first.stdout
    same = shell("replay", record)
    assert (same.returncode, same.stdout) == (0, b"") and "the same" in words(same)
    (shell.cwd / "greeting.txt").write_text("hullo\n")
    document = shell.json("replay", record)
    assert (document["schema"], document["same"], document["exit"]) == ("agent-sandbox/replay/1", False, 1)
    first_two = [(each["what"], each["message"]) for each in document["departures"][:2]]
    assert first_two[0] == ("input", f"the file {shell.cwd}/greeting.txt has changed since the record was made")
    assert first_two[1][0] == "stdout" and "differs at byte" in first_two[1][1]


def test_fuel_is_limited_and_told(shell: Shell) -> None:
    (shell.cwd / "endless.py").write_text("while True: pass")
    ended = shell("code", "--fuel", "20000000", "--throw-away", "endless.py")
    assert ended.returncode == 137 and "--fuel" in words(ended)
    document = shell.json("code", "--fuel", "1000000000", "--throw-away", "program.py")
    assert document["exit"] == 0 and 0 < document["usage"]["fuel"] < 10**9


REFUSED = {
    "a seed for nothing": (("code", "--seed", "3", "program.py"), 2, "--deterministic"),
    "a seed that is none": (("code", "--deterministic", "--seed", "x", "program.py"), 2, "--seed"),
    "a record of an ordinary run": (("code", "--record", "r", "program.py"), 2, "--deterministic"),
    "a record of a run that is kept": (("code", "--deterministic", "--record", "r", "program.py"), 2, "--throw-away"),
    "a native program": (("run", "--deterministic", "true"), 125, "deterministic"),
    "the wrong runtime": (("code", "--deterministic", "--runtime", "process", "program.py"), 125, "deterministic"),
    "no record": (("replay", "greeting.txt"), 125, "record"),
}


@pytest.mark.parametrize(("line", "code", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_is_refused(shell: Shell, line: tuple[str, ...], code: int, said: str) -> None:
    done = shell(*line)
    assert done.returncode == code and said in words(done) and done.stdout == b"", done
