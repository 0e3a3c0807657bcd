"""The usage example of the document "EnterSandBox"."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.assembly import here
from agentbox import Sandbox, SandboxStatus
from tests import compiled
from tests.seeds.conftest import Example

USAGE = '''
from agentbox import Sandbox

# Automatic routing mode
box = Sandbox()

code = """
import pandas as pd
# Automatically selects Tier 2 (MicroVM)
df = pd.DataFrame({"A": [1, 2, 3]})
print(df.describe())
"""

result = box.run(code)
print(result.stdout)
'''


@pytest.fixture
def set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A user who has run `agent-sandbox setup`."""
    compiled.offer(tmp_path / "cache", tmp_path / "state")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("AGENT_SANDBOX_STATE", str(tmp_path / "state"))
    yield
    here().wasm().close()


@pytest.mark.usefixtures("set_up")
def test_the_usage_example_describes_its_data_frame_in_the_lightest_runtime(example: Example, capsys: pytest.CaptureFixture[str]) -> None:
    result = example(USAGE)["result"]
    assert result.status is SandboxStatus.COMPLETED, result.stderr
    assert "mean   2.0" in capsys.readouterr().out
    assert result.route.runtime == "wasm" and "pandas" in result.route.why


@pytest.mark.skipif(
    importlib.util.find_spec("pandas") is None, reason="pandas is NOT INSTALLED for this interpreter: the example was not run"
)
def test_before_it_is_set_up_the_example_runs_all_the_same(example: Example, capsys: pytest.CaptureFixture[str]) -> None:
    result = example(USAGE)["result"]
    assert result.status is SandboxStatus.COMPLETED, result.stderr
    assert "mean   2.0" in capsys.readouterr().out
    assert result.route.runtime == "process" and result.route.passed_over[0][0] == "wasm"


def test_a_package_that_is_not_installed_fails_as_it_would_outside(example: Example) -> None:
    result = example(USAGE.replace("pandas", "a_package_that_nobody_has"))["result"]
    assert result.error == "ModuleNotFoundError: No module named 'a_package_that_nobody_has'"


def test_routing_is_automatic_and_explains_itself() -> None:
    box = Sandbox(validate_code=False)
    assert box.config.runtime == "auto"
    result = box.run("import ctypes; ctypes.CDLL(None)")
    assert result.route is not None and result.route.runtime == "process" and result.route.why and result.route.passed_over
