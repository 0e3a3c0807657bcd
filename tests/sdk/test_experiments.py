"""Experiments as a program uses them: attempts that do not see one another, a base that does not move, and a winner that is promoted."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from agent_sandbox import (
    AttemptOutcome,
    AttemptSandbox,
    AttemptWork,
    Busy,
    Denied,
    Drift,
    Experiment,
    PolicyError,
    RuntimeUnavailable,
    SandboxError,
    Workspace,
    WorkspaceError,
    shell,
)
from agent_sandbox import experiments as module
from agent_sandbox.assembly import here
from agent_sandbox.engine.experiment import conduct
from agent_sandbox.workspace import frozen_tree

CHECK = shell("grep -q two greeting.txt")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("AGENT_SANDBOX_STATE", str(tmp_path / "state"))
    yield tmp_path / "state"
    left = [name for name in os.listdir(tmp_path / "state" / "experiments") if not name.startswith(".")]
    assert left == [], "an experiment leaves nothing in the state directory"
    assert os.listdir(tmp_path / "state" / "trash") == []


def test_attempts_run_apart_and_the_winner_alone_becomes_real(project: Path) -> None:
    with Experiment(project, check=CHECK) as experiment:
        experiment.attempt("large", shell("echo two > greeting.txt; echo more > extra"))
        experiment.attempt("small", ["sed", "-i", "s/hello/two/", "greeting.txt"])
        experiment.attempt("wrong", "open('greeting.txt', 'w').write('three')")
        experiment.attempt("broken", ["no-such-program"])
        comparison = experiment.run()
        assert [each.name for each in comparison.results] == ["small", "large", "broken", "wrong"], comparison
        assert comparison.winner == "small" and comparison["wrong"].why == "its check exited with 1"
        assert comparison["broken"].state == "failed" and "could not be started" in comparison["broken"].why
        assert comparison["large"].diff.files == 2 and comparison["small"].diff.lines == 2
        assert (project / "greeting.txt").read_text() == "hello\n", "nothing is real before it is promoted"
        assert "+two" in experiment.diff() and "extra" in experiment.side_by_side("large", "small")
        assert [each.path for each in experiment.changes("wrong")] == [str(project / "greeting.txt")]
        assert experiment.promote() is not None
    assert (project / "greeting.txt").read_text() == "two\n" and not (project / "extra").exists()
    Workspace.over(project).undo()
    assert (project / "greeting.txt").read_text() == "hello\n"


def test_all_attempts_see_the_same_frozen_project_whatever_happens_to_the_real_one(project: Path) -> None:
    seen: dict[str, str] = {}

    def look(sandbox: AttemptSandbox) -> None:
        seen[sandbox.name] = sandbox.run(shell("cat greeting.txt src/app.py; ls . src")).stdout
        (project / "greeting.txt").write_text(f"moved on after {sandbox.name}\n")
        (project / "src" / f"new-{sandbox.name}").write_text("")
        sandbox.files.write(f"by-{sandbox.name}", "x")

    with Experiment(project, at_once=1) as experiment:
        for name in ("a", "b", "c"):
            experiment.attempt(name, look)
        assert experiment.run().winner == "a"
    assert len(set(seen.values())) == 1 and seen["a"].startswith("hello\n"), seen
    seen.clear()
    with Experiment(project, at_once=1, live="all") as experiment:
        for name in ("a", "b"):
            experiment.attempt(name, look)
        experiment.run()
    assert seen["a"] != seen["b"], "the control: live files differ"


def test_what_changed_in_reality_since_the_project_was_frozen_is_drift_and_its_neighbour_is_not(project: Path) -> None:
    def change(sandbox: AttemptSandbox) -> None:
        (project / "greeting.txt").write_text("an edit of somebody\n")
        (project / "src" / "other.py").write_text("")  # beside the file that is changed
        sandbox.run(shell("echo two > src/app.py"))
        sandbox.run(shell("echo two > greeting.txt"))  # first touched in a later run

    with Experiment(project) as experiment:
        experiment.attempt("a", change)
        experiment.run()
        with pytest.raises(Drift) as drift:
            experiment.promote()
        assert drift.value.paths == (str(project / "greeting.txt"),)
        assert (project / "src" / "app.py").read_text() == 'print("hello")\n'
        assert experiment.promote(only="src") is not None
    assert (project / "greeting.txt").read_text() == "an edit of somebody\n" and (project / "src" / "app.py").read_text() == "two\n"


def test_attempts_begin_with_the_changes_that_wait_in_the_projects_sandbox(project: Path) -> None:
    work = Workspace.over(project)
    work.run(shell("echo waiting > greeting.txt; rm src/app.py; echo new > src/new.py"))
    with Experiment(project) as experiment:
        experiment.attempt("a", shell("cat greeting.txt; ls src; echo more >> greeting.txt"))
        outcome = experiment.run()["a"]
        assert outcome.run is not None and outcome.run.output == b"waiting\nnew.py\n"
        assert outcome.diff.files == 3
        experiment.promote()
    assert (project / "greeting.txt").read_text() == "waiting\nmore\n" and os.listdir(project / "src") == ["new.py"]
    assert work.run(shell("cat greeting.txt")).stdout == "waiting\n", "the sandbox itself was not touched"


def test_a_large_store_is_shown_and_changed_like_the_rest(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen_tree, "LARGE_ENTRIES", 0)
    for name in (".venv/lib/mod.py", "node_modules/a/index.js", "web/node_modules/b/index.js"):
        (project / name).parent.mkdir(parents=True)
        (project / name).write_text("old\n")
    (project / ".venv" / "pyvenv.cfg").write_text("")
    waiting = "echo waiting >> node_modules/a/index.js; rm .venv/lib/mod.py; echo w > greeting.txt"
    waiting += "; rm -r web/node_modules; mkdir -p web/node_modules/c"
    assert Workspace.over(project).run(shell(waiting)).success
    with Experiment(project, check=shell("test -e .venv/lib/new.py")) as experiment:
        look = "cat node_modules/a/index.js greeting.txt; ls .venv/lib web/node_modules; echo new > .venv/lib/new.py"
        experiment.attempt("a", shell(look))
        experiment.attempt("remove", shell("rm -r node_modules"))
        comparison = experiment.run()
        outcome = comparison["a"]
        assert outcome.run is not None and outcome.passed, outcome
        assert outcome.run.output == b"old\nwaiting\nw\n.venv/lib:\n\nweb/node_modules:\nc\n", "what was replaced is not shown again"
        assert any("node_modules is large and was shown live" in note for note in comparison.notes)
        refused = comparison["remove"].run
        assert refused is not None and b"busy" in refused.errors, "its mount point cannot be removed, and the note says so"
        assert experiment.promote("a") is not None
    assert os.listdir(project / ".venv" / "lib") == ["new.py"] and (project / "node_modules/a/index.js").read_text() == "old\nwaiting\n"
    assert os.listdir(project / "web" / "node_modules") == ["c"]


def test_a_check_works_on_a_copy_and_what_it_writes_is_not_promoted(project: Path) -> None:
    with Experiment(project, check=shell("touch by-product; echo three > greeting.txt; echo '3 passed in 0.1s'")) as experiment:
        experiment.attempt("a", shell("echo two > greeting.txt"))
        outcome = experiment.run()["a"]
        assert outcome.passed and outcome.tests is not None and (outcome.tests.passed, outcome.tests.form) == (3, "pytest")
        experiment.promote()
    assert (project / "greeting.txt").read_text() == "two\n" and not (project / "by-product").exists()


def test_a_check_and_a_score_may_be_functions_and_a_report_a_file(project: Path) -> None:
    def check(sandbox: AttemptSandbox) -> None:
        assert sandbox.files.read("greeting.txt") == "two\n", "not two"

    def score(outcome: AttemptOutcome) -> float:
        return outcome.diff.files

    with Experiment(project, check=check, score=score) as experiment:
        experiment.attempt("a", shell("echo two > greeting.txt"))
        experiment.attempt("b", shell("echo two > greeting.txt; echo x > extra"))
        experiment.attempt("c", lambda sandbox: None)
        comparison = experiment.run()
        assert comparison.winner == "b" and comparison["b"].score == 2.0
        assert "its check raised AssertionError: not two" in comparison["c"].why
    report = "mkdir -p out; echo '<testsuite><testcase/><testcase><failure/></testcase></testsuite>' > out/r.xml"
    with Experiment(project, check=shell(report), report="out/r.xml") as experiment:
        experiment.attempt("a", shell("true"))
        tests = experiment.run()["a"].tests
        assert tests is not None and (tests.passed, tests.failed, tests.form) == (1, 1, "JUnit XML")


def test_the_first_to_pass_ends_the_others(project: Path) -> None:
    with Experiment(project, check=CHECK, first=True) as experiment:
        experiment.attempt("quick", shell("echo two > greeting.txt; echo x > extra"))  # first, for a machine with one processor
        experiment.attempt("slow", shell("echo two > greeting.txt; sleep 3600"))
        comparison = experiment.run()
        assert comparison.winner == "quick"
        assert (comparison["slow"].state, comparison["slow"].why) == ("cancelled", "another attempt passed first")


def test_attempts_that_never_end_are_ended_by_their_time_or_the_whole_time(project: Path) -> None:
    with Experiment(project, timeout=0.5) as experiment:
        experiment.attempt("a", shell("sleep 3600"))
        comparison = experiment.run()
        assert (comparison["a"].state, comparison.winner) == ("timed-out", None)
    with Experiment(project, total_timeout=0.5, at_once=1) as experiment:
        experiment.attempt("a", shell("sleep 3600"))
        experiment.attempt("b", shell("echo b"))
        comparison = experiment.run()
        assert [each.state for each in comparison.results] == ["timed-out", "cancelled"] and comparison.winner is None
        assert "time limit of the experiment" in comparison.ended
        with pytest.raises(PolicyError, match="no winner"):
            experiment.promote()


def test_a_function_that_does_not_return_is_left_behind_without_its_sandbox(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conduct, "FUNCTION_SECONDS", 0.1)
    stop, errors = threading.Event(), []

    def forever(sandbox: AttemptSandbox) -> None:
        stop.wait(60)
        try:
            sandbox.run(shell("echo canary > greeting.txt"))
        except BaseException as error:
            errors.append(error)

    with Experiment(project, timeout=0.2) as experiment:
        experiment.attempt("a", forever)
        outcome = experiment.run()["a"]
        assert outcome.state == "timed-out" and "goes on" in outcome.why
    with Experiment(project, first=True) as experiment:
        experiment.attempt("quick", shell("true"))
        experiment.attempt("a", forever)
        assert experiment.run().winner == "quick"
    begun = sum(thread.name == "attempt-a" for thread in threading.enumerate())
    assert begun >= 1, "the second one begins only where there are processors for both"
    stop.set()
    for thread in threading.enumerate():
        if thread.name == "attempt-a":
            thread.join()
    assert len(errors) == begun, "its sandbox takes no more work"


def test_an_experiment_can_be_cancelled_and_a_sandbox_is_over_with_its_attempt(project: Path) -> None:
    kept: list[AttemptSandbox] = []
    with Experiment(project, at_once=1) as experiment:
        experiment.attempt("a", lambda sandbox: kept.append(sandbox))
        experiment.attempt("b", shell("sleep 3600"))

        def stop(progress: object) -> None:
            if (getattr(progress, "name", ""), getattr(progress, "step", "")) == ("b", "running"):
                with pytest.raises(SandboxError, match="cancel"):
                    experiment.close()
                experiment.cancel()

        comparison = experiment.run(stop)
        assert comparison["b"].state == "cancelled" and comparison.ended == "the experiment was cancelled" and comparison.winner == "a"
        with pytest.raises(SandboxError, match="has ended"):
            kept[0].run(shell("echo canary > greeting.txt"))
        assert len(experiment.changes("a")) == 0


def test_costs_end_an_experiment_and_processor_time_is_shared(project: Path) -> None:
    def spend(sandbox: AttemptSandbox) -> None:
        for _ in range(1000):
            sandbox.spend(1)
            threading.Event().wait(0.01)

    with Experiment(project, max_cost=5) as experiment:
        experiment.attempt("a", spend)
        comparison = experiment.run()
        assert comparison["a"].state == "cancelled" and "cost limit" in comparison.ended and 5 < comparison["a"].cost < 1000
    with Experiment(project, max_cpu_seconds=2) as experiment:
        experiment.attempt("busy", shell("while :; do :; done"))
        experiment.attempt("idle", shell("true"))
        comparison = experiment.run()
        assert comparison.winner == "idle" and comparison["busy"].state == "failed" and "processor time" in comparison["busy"].why


def test_work_can_be_sent_elsewhere_as_data_and_a_function_cannot(project: Path) -> None:
    with Experiment(project) as experiment:
        first = experiment.attempt("a", shell("echo $WORD > greeting.txt"), env_vars={"WORD": "two"}, cwd="src")
        assert first.portable and isinstance(first.work, AttemptWork)
        data = json.loads(json.dumps(first.work.to_data()))
        assert not experiment.attempt("f", lambda sandbox: None).portable
        with pytest.raises(PolicyError, match="its own runs"):
            experiment.attempt("g", lambda sandbox: None, cwd="src")
    with Experiment(project) as experiment:
        experiment.attempt("again", AttemptWork.from_data(data))
        assert experiment.run()["again"].portable
        experiment.promote()
    assert (project / "src" / "greeting.txt").read_text() == "two\n"


def test_bad_input_is_refused_before_anything_runs(project: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Experiment(project) as experiment:
        with pytest.raises(PolicyError, match="no attempts"):
            experiment.run()
        experiment.attempt("a", shell("true"))
        with pytest.raises(PolicyError, match="two attempts"):
            experiment.attempt("A", shell("true"))
        with pytest.raises(PolicyError, match="cannot be the name"):
            experiment.attempt("../a", shell("true"))
        with pytest.raises(TypeError):
            experiment.attempt("b", 7)  # type: ignore[arg-type]
        with pytest.raises(SandboxError, match="has not run"):
            experiment.promote()
        monkeypatch.setattr(module, "available_memory", lambda: 1 << 20)
        with pytest.raises(RuntimeUnavailable, match="memory is short"):
            experiment.run()
        monkeypatch.undo()
        monkeypatch.setenv("AGENT_SANDBOX_STATE", str(state))
        monkeypatch.setattr(frozen_tree, "SPARED_BYTES", 1 << 60)
        with pytest.raises(WorkspaceError, match="too little room"):
            experiment.run()
        monkeypatch.undo()
        monkeypatch.setenv("AGENT_SANDBOX_STATE", str(state))
        assert experiment.run().winner == "a", "the control"
        with pytest.raises(SandboxError, match="has run"):
            experiment.run()
        with pytest.raises(PolicyError, match="no attempt 'x'"):
            experiment.diff("x")
    with pytest.raises(PolicyError, match="above 0"):
        Experiment(project, timeout=0)
    with pytest.raises(PolicyError, match="not a path in the project"):
        Experiment(project, report="../x")


def test_protected_kinds_need_the_same_approval_as_in_every_promotion(project: Path) -> None:
    with Experiment(project) as experiment:
        experiment.attempt("a", shell("mkdir -p .github/workflows; echo on: push > .github/workflows/ci.yml"))
        experiment.run()
        with pytest.raises(Denied):
            experiment.promote()
        assert not (project / ".github").exists()
        assert experiment.promote(review=lambda proposal: False) is None
        assert experiment.promote(approve="ci") is not None
    assert (project / ".github" / "workflows" / "ci.yml").exists()


def test_of_two_experiments_that_promote_the_same_file_the_second_is_refused(project: Path) -> None:
    with Experiment(project) as first, Experiment(project) as second:
        for experiment, word in ((first, "one"), (second, "two")):
            experiment.attempt("a", shell(f"echo {word} > greeting.txt"))
            experiment.run()
        with here_locked(project), pytest.raises(Busy, match="in use by"):
            first.promote()
        assert first.promote() is not None
        with pytest.raises(Drift):
            second.promote()
    assert (project / "greeting.txt").read_text() == "one\n"


def here_locked(project: Path) -> AbstractContextManager[None]:
    return Workspace.over(project)._stored.state.lock(command="try")


def test_an_interrupt_in_the_middle_leaves_nothing_running(project: Path) -> None:
    def interrupt(progress: object) -> None:
        if getattr(progress, "step", "") == "running":
            raise KeyboardInterrupt

    with Experiment(project) as experiment:
        experiment.attempt("a", shell("sleep 3600"))
        with pytest.raises(KeyboardInterrupt):
            experiment.run(interrupt)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("attempt-")]


def test_everything_is_in_the_ledger(project: Path) -> None:
    with Experiment(project, check=CHECK) as experiment:
        experiment.attempt("a", shell("echo two > greeting.txt"))
        experiment.run()
        experiment.promote()
    entries = [json.loads(line) for line in Path(here().host.state, "ledger.jsonl").read_text().splitlines()]
    text = json.dumps(entries)
    assert text.count("/try-a") >= 4, "intent and outcome of the attempt and of its check"
    assert "experiment.begun" in text and "experiment.ended" in text and "Promote" in text
