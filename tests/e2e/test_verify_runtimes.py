"""`verify` attacks each runtime that is named, and finds a wall that is missing there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.assembly import registry
from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.runtime.gvisor import runtime as gvisor_runtime
from agent_sandbox.runtime.gvisor.bundle import Container, configuration
from agent_sandbox.selftest.bench import DecoyBench, Surroundings, set_up
from agent_sandbox.selftest.differences import DIFFERENCES
from agent_sandbox.selftest.probe import CHOSEN, SDK, judge, look
from agent_sandbox.selftest.probes import PROBES
from agent_sandbox.selftest.sandboxed import OnRuntime
from tests.images import slim

pytestmark = pytest.mark.slow

NAMED = {probe.name: probe for probe in PROBES}
SAMPLE = ("start-processes", "read-by-path", "limit-disk")
# In `make test` the quickest to start; the others need an image, or a machine.
RUNTIMES = ["gvisor", *(pytest.param(name, marks=pytest.mark.torture) for name in CHOSEN if name != "gvisor")]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DecoyBench]:
    monkeypatch.setenv("AGENT_SANDBOX_STATE", str(tmp_path / "state"))
    secret, home = tmp_path / "secret", tmp_path / "home"
    secret.write_text("hidden by the policy\n")
    home.mkdir()
    with set_up([str(tmp_path)], Surroundings((str(secret),), (str(home),)), forget=lambda bench: None) as made:
        yield made


def box(bench: DecoyBench, name: str, **settings: Any) -> OnRuntime:
    """A sandbox of this runtime. Skips, with the reason, where the runtime is not installed."""
    try:
        registry().get(name).absence()
    except RuntimeUnavailable as error:
        pytest.skip(f"{error.message}: {error.hint}")
    return OnRuntime(bench, name, image=slim() if name == "container" else "", **settings)


def statuses(bench: DecoyBench, entered: OnRuntime, *names: str) -> dict[str, str]:
    probes = [NAMED[name] for name in names]
    control, found = look(probes, bench, bench.bare), look(probes, bench, entered)
    return {probe.name: judge(probe, entered.name, control[probe.name], found[probe.name]).status for probe in probes}


@pytest.mark.parametrize("name", RUNTIMES)
def test_a_permission_that_was_given_by_mistake_is_found_and_nothing_else_is_blamed(bench: DecoyBench, name: str) -> None:
    with box(bench, name) as entered:
        assert statuses(bench, entered, *SAMPLE) == dict.fromkeys(SAMPLE, "pass")
    with box(bench, name, allow_subprocess=True) as entered:
        assert statuses(bench, entered, *SAMPLE) == {**dict.fromkeys(SAMPLE, "pass"), "start-processes": "fail"}


def test_a_scratch_directory_without_a_limit_is_found(bench: DecoyBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """`runsc` covers an empty /tmp with an unlimited one of its own, unless it is told to show ours."""

    def covered(container: Container) -> bytes:
        said = json.loads(configuration(container))
        said["mounts"] = [mount for mount in said["mounts"] if mount["destination"] != "/tmp"]
        return json.dumps(said).encode()

    monkeypatch.setattr(gvisor_runtime, "configuration", covered)
    with box(bench, "gvisor") as entered:
        assert statuses(bench, entered, "limit-disk", "read-by-path") == {"limit-disk": "fail", "read-by-path": "pass"}


def test_each_declared_difference_is_one_of_a_probe_that_would_run_there() -> None:
    tried = {probe.name for probe in PROBES if SDK in probe.boxes}
    assert DIFFERENCES.keys() < set(CHOSEN)
    assert {name: set(different) - tried for name, different in DIFFERENCES.items()} == {name: set() for name in DIFFERENCES}
