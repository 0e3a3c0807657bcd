"""The usage example of the document "EnterSandBox"."""

from __future__ import annotations

import importlib.util

import pytest

from agentbox import Sandbox, SandboxStatus
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


@pytest.mark.skipif(
    importlib.util.find_spec("pandas") is None, reason="pandas is NOT INSTALLED for this interpreter: the example was not run"
)
def test_the_usage_example_describes_its_data_frame(example: Example, capsys: pytest.CaptureFixture[str]) -> None:
    result = example(USAGE)["result"]
    assert result.status is SandboxStatus.COMPLETED, result.stderr
    assert "mean   2.0" in capsys.readouterr().out


def test_a_package_that_is_not_installed_fails_as_it_would_outside(example: Example) -> None:
    result = example(USAGE.replace("pandas", "a_package_that_nobody_has"))["result"]
    assert result.error == "ModuleNotFoundError: No module named 'a_package_that_nobody_has'"


def test_routing_is_automatic_and_explains_itself() -> None:
    box = Sandbox()
    result = box.run("print(1)")
    assert box.config.runtime == "auto"
    assert result.route is not None and result.route.runtime == "process" and result.route.why
