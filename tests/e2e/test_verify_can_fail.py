"""The self-test is no theatre: every probe fails where there is no sandbox, and each finds the wall that is missing and no other."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from agent_sandbox.policy.model import Policy, cloned
from agent_sandbox.selftest.bench import SCRIPTS, DecoyBench, Surroundings, set_up
from agent_sandbox.selftest.boxes import Attempt, Bare, Box, Found
from agent_sandbox.selftest.probe import Probe, judge, look
from agent_sandbox.selftest.probes import PROBES
from agent_sandbox.selftest.sandboxed import Cloned, Locked
from agent_sandbox.workspace.store import SandboxState, Store

# The probes are the same for everybody; that each can fail is shown as root in `make test`, and for others too in `make torture`.
pytestmark = pytest.mark.torture if os.geteuid() else pytest.mark.slow

NAMED = {probe.name: probe for probe in PROBES}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DecoyBench]:
    monkeypatch.setenv("AGENT_SANDBOX_STATE", str(tmp_path / "state"))
    secret, home = tmp_path / "secret", tmp_path / "home"
    secret.write_text("hidden by the policy\n")
    home.mkdir()
    with set_up([str(tmp_path)], Surroundings((str(secret),), (str(home),)), forget=lambda bench: None) as made:
        yield made


class NoSandbox(Bare):
    """The bare machine under the name of a sandbox."""

    def __init__(self, bench: DecoyBench, name: str) -> None:
        super().__init__(bench.project, f"{bench.project}/{SCRIPTS}")
        self.name = name


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_it_fails_where_there_is_no_sandbox(bench: DecoyBench, probe: Probe) -> None:
    box = NoSandbox(bench, probe.boxes[-1])
    control, found = look([probe], bench, bench.bare)[probe.name], look([probe], bench, box)[probe.name]
    result = judge(probe, box.name, control, found)
    if result.excused:
        pytest.skip(f"this machine refuses it without a sandbox too: {result.why}")
    assert (result.status, result.bad) == ("fail", True), result
    assert result.reached, "and what was seen is told"


def statuses(bench: DecoyBench, box: Cloned | Locked, *names: str) -> dict[str, str]:
    probes = [NAMED[name] for name in names]
    control, found = look(probes, bench, bench.bare), look(probes, bench, box)
    return {probe.name: judge(probe, box.name, control[probe.name], found[probe.name]).status for probe in probes}


class Forgetful(Cloned):
    """A sandbox that hides nothing of what was planted."""

    def __init__(self, bench: DecoyBench, policy: Policy, environment: Mapping[str, str], state: SandboxState) -> None:
        super().__init__(bench, policy, environment, state)
        self.policy = policy


def test_a_policy_that_forgets_to_hide_is_found_and_nothing_else_is_blamed(bench: DecoyBench, tmp_path: Path) -> None:
    state = Store.open(str(tmp_path / "state")).sandbox_for(bench.project)
    reading, others = ("read-by-path", "read-through-link", "read-through-proc"), ("write", "tcp", "powers")
    told = []
    for kind in (Cloned, Forgetful):
        with kind(bench, cloned(masks=()), {"PATH": os.defpath, "HOME": bench.home}, state) as box:
            told.append(statuses(bench, box, *reading, *others))
    held, forgot = told
    assert held == dict.fromkeys((*reading, *others), "pass")
    assert forgot == {**dict.fromkeys(reading, "fail"), **dict.fromkeys(others, "pass")}


def test_a_permission_that_was_given_by_mistake_is_found_and_nothing_else_is_blamed(bench: DecoyBench) -> None:
    names = ("start-processes", "read-by-path", "see-processes")
    with Locked(bench) as box:
        assert statuses(bench, box, *names) == dict.fromkeys(names, "pass")
    with Locked(bench, allow_subprocess=True) as box:
        assert statuses(bench, box, *names) == {**dict.fromkeys(names, "pass"), "start-processes": "fail"}


def test_an_attempt_that_says_nothing_is_not_believed(bench: DecoyBench) -> None:
    def silent(bench: DecoyBench, box: Box) -> Found:
        return Found(box.run(Attempt("files", "no_such_function")).reached)

    found = look([Probe("silent", "A claim.", "says nothing", silent)], bench, bench.bare)["silent"]
    assert isinstance(found, str) and "gave no answer" in found
