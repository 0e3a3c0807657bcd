"""What follows from a probe with and without a sandbox, and what is said of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.cli.commands import doctor, verify
from agent_sandbox.cli.main import main
from agent_sandbox.cli.render.messages import Console
from agent_sandbox.errors import LaunchFailed
from agent_sandbox.selftest.bench import SCRIPTS, DecoyBench
from agent_sandbox.selftest.boxes import Attempt, AttemptResult, Bare, Found
from agent_sandbox.selftest.probe import BOXES, RUN, SDK, Absent, Probe, Result, judge, look, look_inside
from agent_sandbox.selftest.probes import PROBES, counters
from agent_sandbox.selftest.sandboxed import Cloned
from agent_sandbox.selftest.walls import Wall, judge_walls

HELD, BROKEN = Found({}, {"way": "refused", "other": "refused"}), Found({"way": "seen"})


def probe(excuse: str = "") -> Probe:
    return Probe("sample", "A claim.", "tries it", lambda bench, box: HELD, excuse=excuse)


def test_what_succeeds_without_a_sandbox_and_not_in_it_passes() -> None:
    result = judge(probe(), RUN, BROKEN, HELD)
    assert (result.status, result.bad) == ("pass", False)
    assert (result.shown, result.unshown) == (("way",), ("other",)), "and what was refused anyway is not counted as shown"


@pytest.mark.parametrize("control", [BROKEN, HELD, "it could not be tried"])
def test_what_gets_through_is_a_failure_whatever_else_is_known(control: Found | str) -> None:
    result = judge(probe("an excuse"), SDK, control, BROKEN)
    assert (result.status, result.bad, result.reached) == ("fail", True, {"way": "seen"})


def test_what_never_succeeds_proves_nothing_and_counts_unless_the_machine_is_the_reason() -> None:
    without_excuse, excused = judge(probe(), RUN, HELD, HELD), judge(probe("no device here"), RUN, HELD, HELD)
    assert (without_excuse.status, without_excuse.bad) == ("inconclusive", True)
    assert (excused.status, excused.bad, excused.why) == ("inconclusive", False, "no device here")


@pytest.mark.parametrize(("control", "found"), [(BROKEN, "no answer"), ("no answer", HELD), ("no answer", "no answer")])
def test_what_could_not_be_tried_has_not_passed(control: Found | str, found: Found | str) -> None:
    result = judge(probe("an excuse"), RUN, control, found)
    assert (result.status, result.bad) == ("inconclusive", True)
    assert "no answer" in result.why


def test_a_probe_that_breaks_is_told_in_its_place_and_the_others_go_on(tmp_path: Path) -> None:
    def breaks(bench: DecoyBench, box: object) -> Found:
        raise OSError(5, "broken")

    bench = DecoyBench(str(tmp_path), "token")
    seen = look([Probe("first", "A claim.", "tries it", breaks), probe()], bench, bench.bare)
    assert "broken" in str(seen["first"]) and seen["sample"] == HELD


class Fragile(Bare):
    """A sandbox that breaks when it is entered, used or left: `breaks` names the moment."""

    name = RUN

    def __init__(self, bench: DecoyBench, breaks: str) -> None:
        super().__init__(bench.project, f"{bench.project}/{SCRIPTS}")
        self.breaks = breaks

    def _break(self, moment: str) -> None:
        if moment == self.breaks:
            raise TypeError(f"broken when {moment}")

    def __enter__(self) -> Fragile:
        self._break("entered")
        return self

    def __exit__(self, *_: object) -> None:
        self._break("left")

    def run(self, attempt: Attempt) -> AttemptResult:
        self._break("used")
        return AttemptResult()


@pytest.mark.parametrize("moment", ["entered", "used", "left"])
def test_a_sandbox_that_breaks_shows_nothing_and_what_got_through_before_stays(tmp_path: Path, moment: str) -> None:
    bench = DecoyBench(str(tmp_path), "token")
    through = Probe("through", "A claim.", "tries it", lambda bench, box: BROKEN)
    sound = look_inside(Fragile(bench, ""), [probe(), through], bench)
    assert sound == {"sample": HELD, "through": BROKEN}
    seen = look_inside(Fragile(bench, moment), [probe(), through], bench)
    result = judge(probe("an excuse"), RUN, BROKEN, seen["sample"])
    assert (result.status, result.bad) == ("inconclusive", True) and f"TypeError: broken when {moment}" in result.why
    assert (seen["through"] == BROKEN) is (moment == "left"), "an attack that got through is not taken back"


def verdict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, project: Path) -> dict[str, Any]:
    """Run `verify` with the probes of two walls of both sandboxes, and one of the product. Returns its document; it has failed."""
    home = tmp_path / "home"
    home.mkdir()
    for name, value in (("AGENT_SANDBOX_STATE", tmp_path / "state"), ("HOME", home), ("TMPDIR", tmp_path)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(project)
    monkeypatch.setattr(verify, "PROBES", tuple(probe for probe in PROBES if probe.name in ("read-by-path", "powers", "capabilities")))
    assert main(["verify", "--json"]) == 1
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["schema"] == "agent-sandbox/verify/1" and document["held"] is False
    return document


def statuses(document: dict[str, Any]) -> dict[str, str]:
    return {f"{row['probe']} {row['box']}": row["status"] for row in document["results"]}


HELD_BY = dict.fromkeys(("read-by-path run", "read-by-path sdk", "powers run", "powers sdk", "capabilities product"), "pass")


@pytest.mark.slow
def test_a_sandbox_that_cannot_be_made_is_in_the_verdict_and_the_others_are_attacked(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(box: object) -> None:
        raise LaunchFailed("the sandbox could not be built: no", hint="build it")

    monkeypatch.setattr(Cloned, "__enter__", refuse)
    document = verdict(monkeypatch, capsys, tmp_path, project)
    assert statuses(document) == HELD_BY | {"read-by-path run": "inconclusive", "powers run": "inconclusive"}
    walls = {row["wall"]: row for row in document["walls"]}
    assert walls["masks"]["status"] == walls["no-new-privileges"]["status"] == "not shown"
    assert "could not be built: no (build it)" in walls["masks"]["why"] and walls["capabilities"]["status"] == "held"


@pytest.mark.slow
@pytest.mark.parametrize(("box", "lost"), [("bare", ("run", "sdk")), ("sdk", ("sdk",)), ("product", ("product",))])
def test_a_part_of_the_self_test_that_dies_is_in_the_verdict_and_the_others_are_attacked(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], box: str, lost: tuple[str, ...]
) -> None:
    monkeypatch.setitem(verify._ASIDE, box, lambda bench: os.kill(os.getpid(), signal.SIGKILL))
    document = verdict(monkeypatch, capsys, tmp_path, project)
    assert statuses(document) == HELD_BY | {place: "inconclusive" for place in HELD_BY if place.endswith(lost)}


FORK = """
import os, signal
from agent_sandbox.selftest.bench import aside
def end(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGTERM, end)
os.register_at_fork(before=lambda: os.kill(os.getpid(), signal.SIGTERM))
try:
    with aside(lambda: 1):
        print("lost")
except KeyboardInterrupt:
    print("unwound")
"""


def test_a_signal_in_the_middle_of_a_fork_is_not_lost() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("unwound\n", "")


@pytest.mark.slow
def test_a_doctor_that_breaks_does_not_take_the_verdict_with_it(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ill(situation: object) -> None:
        raise RuntimeError("ill")

    monkeypatch.setattr(Cloned, "__enter__", ill)
    monkeypatch.setattr(doctor, "examine", ill)
    document = verdict(monkeypatch, capsys, tmp_path, project)
    told = {remedy for row in document["results"] for remedy in row["remedies"]}
    assert told == {"doctor could not look for a remedy: ill"}


def test_a_reason_that_many_attacks_share_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    probes = [Probe(name, "A claim.", "tries it", lambda bench, box: HELD) for name in ("read-by-path", "write", "tcp")]
    results = [judge(each, box, BROKEN, "no sandbox") for each in probes for box in (RUN, SDK)]
    facts = verify.VerifyResult(False, {"inconclusive": 6}, 1.0, verify._facts(results, {}), verify._wall_facts(results))
    facts.text(Console())
    said = capsys.readouterr().out
    assert said.count("no sandbox") == 2, "once for the attacks, and once for the walls"
    assert "inconclusive read-by-path, write, tcp (run, sdk): it could not be tried: no sandbox" in said


def test_every_probe_has_a_name_of_its_own_a_sentence_and_a_box() -> None:
    assert len({probe.name for probe in PROBES}) == len(PROBES) > 30
    assert [probe.name for probe in PROBES if not (probe.claim.endswith(".") and probe.tries)] == []
    assert [probe.name for probe in PROBES if not probe.boxes or not set(probe.boxes) <= set(BOXES)] == []


WALL = Wall("sample-wall", "It holds.", ("sample:way",))


def wall_status(*results: Result) -> str:
    (verdict,) = judge_walls(results, [WALL])
    return verdict.status


def test_a_wall_is_judged_by_its_own_way_of_an_attack() -> None:
    broken, held = judge(probe(), RUN, BROKEN, BROKEN), judge(probe(), RUN, BROKEN, HELD)
    other = judge(probe(), RUN, Found({"way": "seen", "other": "seen"}), Found({"other": "seen"}, {"way": "refused"}))
    assert (wall_status(broken), wall_status(held), wall_status(held, broken)) == ("broken", "held", "broken")
    assert (other.status, wall_status(other)) == ("fail", "held"), "another way that got through does not blame this wall"


def test_a_wall_that_is_not_here_is_said_and_not_counted_as_held() -> None:
    absent = judge(probe(), RUN, BROKEN, Absent("this kernel has none"))
    assert (absent.excused, absent.bad, wall_status(absent)) == (True, False, "absent")
    unshown = judge(probe(), RUN, Found({"other": "seen"}), HELD)
    assert wall_status(unshown) == "absent", "the machine refuses this way by itself"
    assert wall_status(judge(probe(), RUN, BROKEN, "no answer")) == "not shown"
    (nobody,) = judge_walls([], [Wall("sample-wall", "It holds.", why="it cannot be tried")])
    assert (nobody.status, nobody.why) == ("not attacked", "it cannot be tried")


# That each of them fails without a sandbox, tests/e2e/test_verify_can_fail.py shows.
SOME = tuple(probe for probe in PROBES if probe.name == "read-by-path" or PROBES.index(probe) % 5 == 0)


class Forgotten(Bare):
    """A product in which somebody has forgotten the sandbox: `run` runs on the machine itself."""

    name = RUN

    def __init__(self, bench: DecoyBench, policy: object, environment: Mapping[str, str], state: object) -> None:
        super().__init__(bench.project, f"{bench.project}/{SCRIPTS}")

    def __enter__(self) -> Forgotten:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("probes", [SOME, pytest.param(PROBES, marks=pytest.mark.torture)], ids=["some", "all"])
def test_a_forgotten_sandbox_is_a_failure_of_the_whole(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], probes: tuple[Probe, ...]
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    for name, value in (("AGENT_SANDBOX_STATE", tmp_path / "state"), ("HOME", home), ("TMPDIR", tmp_path)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(project)
    monkeypatch.setattr(verify, "Cloned", Forgotten)
    monkeypatch.setattr(verify, "PROBES", probes)
    monkeypatch.setattr(counters, "_NOTICED", 1.0)  # nobody will, however long it waits
    assert main(["verify", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["held"] is False
    told = {(row["box"], row["probe"]): row for row in document["results"]}
    assert [place for place, row in told.items() if place[0] == RUN and row["status"] == "pass"] == []
    other = {name: row["reached"] for (box, name), row in told.items() if box == SDK and row["status"] == "fail"}
    assert other == {}, "the other is as it was"
    assert told[RUN, "read-by-path"]["reached"], "and what was seen is told"
