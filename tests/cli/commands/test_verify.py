"""What follows from a probe with and without a sandbox, and what is said of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from agent_sandbox.cli.commands import verify
from agent_sandbox.cli.main import main
from agent_sandbox.selftest.bench import SCRIPTS, DecoyBench
from agent_sandbox.selftest.boxes import Bare, Found
from agent_sandbox.selftest.probe import BOXES, RUN, SDK, Absent, Probe, Result, judge, look
from agent_sandbox.selftest.probes import PROBES
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
def test_a_forgotten_sandbox_is_a_failure_of_the_whole(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    for name, value in (("AGENT_SANDBOX_STATE", tmp_path / "state"), ("HOME", home), ("TMPDIR", tmp_path)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(project)
    monkeypatch.setattr(verify, "Cloned", Forgotten)
    assert main(["verify", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["held"] is False
    told = {(row["box"], row["probe"]): row for row in document["results"]}
    assert [place for place, row in told.items() if place[0] == RUN and row["status"] == "pass"] == []
    other = {name: row["reached"] for (box, name), row in told.items() if box == SDK and row["status"] == "fail"}
    assert other == {}, "the other is as it was"
    assert told[RUN, "read-by-path"]["reached"], "and what was seen is told"
