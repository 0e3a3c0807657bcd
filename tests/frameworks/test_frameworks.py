"""The suites of the frameworks that we have adapters for, against our adapters. Light ones run here; `make frameworks` runs all of them.

An environment of a light one is made in 3 to 8 seconds where the index can be reached, and kept. Where it cannot, the test is skipped, and
the summary of pytest says what is missing.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tomllib
from collections.abc import Callable

import pytest

from scripts.frameworks import CHECKOUT, FRAMEWORKS, Framework, Outcome, Unreachable, document, ensure, run, unexplained
from tests.frameworks.reasons import REASONS

EACH = [pytest.param(each, marks=() if each.light else pytest.mark.torture, id=each.name) for each in FRAMEWORKS]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("framework", EACH)
def test_the_suite_of_a_framework_passes(framework: Framework, record_property: Callable[[str, object], None]) -> None:
    try:
        ensure(framework)
    except (Unreachable, OSError) as why:
        pytest.skip(f"NOT TESTED: {framework.name} could not be installed ({why}); try: make frameworks")
    outcomes = run(framework)
    record_property(f"outcomes of {framework.name}", json.dumps({name: [each.state, each.why] for name, each in outcomes.items()}))
    reasons = {key: why for key, why in REASONS.items() if not why.startswith(f"as {'a user' if os.geteuid() == 0 else 'root'}")}
    assert unexplained(framework, outcomes, reasons) == []


def test_a_failure_without_a_reason_and_a_reason_without_a_failure_are_reported() -> None:
    """The control: the judge of the suites can fail."""
    framework = FRAMEWORKS[0]
    found = {"Suite.test_a": Outcome("passed"), "Suite.test_b": Outcome("failed", "why"), "Suite.test_c": Outcome("skipped")}
    assert unexplained(framework, {"Suite.test_a": Outcome("passed")}, {}) == []
    assert len(unexplained(framework, found, {})) == 2
    reasons = {(framework.name, name): "it has another user" for name in ("test_a", "test_b", "test_c")}
    assert unexplained(framework, found, reasons) == ["Suite.test_a: passes, so it needs no reason"]
    plain = {**found, "TestPlain.test_b": Outcome("passed")}
    assert any("this is ours" in line for line in unexplained(framework, plain, reasons))
    assert unexplained(framework, {}, {}) == ["no test ran"]


PACKAGES = {"openai-agents": "agents"}  # what is imported, where it is not the name


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.name)
def test_an_adapter_without_its_framework_says_what_to_install(framework: Framework, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"agent_sandbox.adapters.{framework.module}"
    monkeypatch.setitem(sys.modules, PACKAGES.get(framework.name, framework.module), None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install '{framework.name}"):
        importlib.import_module(module)
    extras = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert extras[framework.name][0] == framework.packages[0], "the extra asks for the version that is tested"


def test_every_reason_names_a_framework_that_is_tested() -> None:
    assert {name for name, _ in REASONS} <= {each.name for each in FRAMEWORKS}
    assert callable(document)
