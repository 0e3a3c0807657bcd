"""A route is taken before every run: what it loads counts."""

from __future__ import annotations

from tests.architecture.test_start_up import SLOW, loaded_by

ROUTE = (
    "from agent_sandbox.runtime.router.route import route; from agent_sandbox.runtime.router.model import Permits, Workload; "
    "from agent_sandbox.runtime.router.model import Candidate; from agent_sandbox.runtime.process.runtime import TRAITS; "
    "route(Workload({!r}, {!r}), frozenset(), Permits(), [Candidate(TRAITS)])"
)


def test_reading_python_loads_nothing_slow() -> None:
    loaded = loaded_by(ROUTE.format("python", "import os; os.fork()"))
    assert "agent_sandbox.runtime.router.needs" in loaded
    assert sorted(loaded & SLOW) == []


def test_a_command_loads_no_reader() -> None:
    loaded = loaded_by(ROUTE.format("command", ""))
    assert "agent_sandbox.runtime.router.route" in loaded
    assert sorted(name for name in loaded if name.endswith((".router.python", ".router.javascript"))) == []
