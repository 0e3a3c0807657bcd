"""The guest that tries its own confinement needs nothing of the machine: the verdict is the same wherever the interpreter is installed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent_sandbox.kernel.mount_plan import MountPlan, Overlay
from agent_sandbox.runtime import network_packages
from agent_sandbox.runtime.base import Launch
from agent_sandbox.runtime.process import probe
from agent_sandbox.runtime.process.runtime import ProcessRuntime


def test_the_network_is_offered_where_no_module_of_the_interpreter_is_in_the_view(monkeypatch: pytest.MonkeyPatch) -> None:
    if lacking := network_packages.missing(network_packages.NEEDED):
        pytest.skip(f"packages of the extra `network` are missing: {', '.join(lacking)}")
    runtime, trial = ProcessRuntime(), probe.trial

    def without_usr(code: str) -> Launch:
        """Return the trial as an interpreter that is installed elsewhere has it: without its own modules."""
        launch = trial(code)
        steps = tuple(step for step in launch.root.steps if not isinstance(step, Overlay))
        assert len(steps) < len(launch.root.steps)
        return replace(launch, root=MountPlan(launch.root.layers, steps))

    try:
        assert probe.why_no_network(runtime) == ""  # control arm
        monkeypatch.setattr(probe, "trial", without_usr)
        assert probe.why_no_network(runtime) == ""
        monkeypatch.setattr(probe, "_LOOK_FOR_DOORS", probe._LOOK_FOR_DOORS.replace("connect(81)", "connect(80)"))
        assert "does not hold" in probe.why_no_network(runtime)  # a second way out is still seen
    finally:
        runtime.close()
