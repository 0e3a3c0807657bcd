"""Schemathesis against a real daemon: some operations here, all of them by `make conformance-http`. And whether its judge can fail."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.frameworks import Unreachable, ensure
from scripts.http_conformance import SUITE, document, read, run

OPERATIONS = ("/v1/verbs/status", "/v1/state", "/metrics")


@pytest.mark.torture
@pytest.mark.timeout(900)
def test_what_the_interface_describes_is_what_it_does() -> None:
    try:
        ensure(SUITE)
    except (Unreachable, OSError) as why:
        pytest.skip(f"NOT TESTED: schemathesis could not be installed ({why}); try: make conformance-http")
    found = run(OPERATIONS, phases="fuzzing", examples=3)
    assert {name.split()[1] for name in found} == set(OPERATIONS)
    assert {name: each.wrong for name, each in found.items() if each.wrong} == {}
    checks = {name for each in found.values() for name in each.passed}
    assert {"ignored_auth", "negative_data_rejection", "positive_data_acceptance", "response_schema_conformance"} <= checks


def _scenario(status: int, check: str, outcome: str = "success") -> dict[str, Any]:
    recorder = {
        "label": "POST /v1/verbs/run",
        "interactions": {"1": {"response": {"status_code": status} if status else None}},
        "checks": {"1": [{"name": check, "status": check and outcome}]},
    }
    return {"ScenarioFinished": {"status": outcome, "recorder": recorder}}


@pytest.mark.parametrize(
    ("event", "wrong"),
    [
        (_scenario(200, "a"), []),
        (_scenario(200, "a", "failure"), ["a: 1 times"]),
        (_scenario(500, "a"), ["1 answers of 500 and above"]),
        (_scenario(0, "a"), ["1 answers of 500 and above"]),
        ({"ScenarioFinished": {"status": "skip", "recorder": {"label": "x", "interactions": {}, "checks": {}}}}, ["it was not tried"]),
    ],
)
def test_a_check_that_fails_a_server_error_and_no_answer_are_failures(event: dict[str, Any], wrong: list[str]) -> None:
    ((name, operation),) = read([{"Initialize": {}}, event]).items()
    assert operation.wrong == wrong
    assert name in document({name: operation}, "schemathesis 4") and ("–" in document({name: operation}, "x")) == (not wrong)
