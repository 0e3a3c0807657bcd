"""CPython's own tests inside WebAssembly: a sample of them, and that the comparison of all of them blames whom it must."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from agent_sandbox.runtime.wasm.runtime import WasmRuntime
from scripts.conformance import driver, running, sources
from scripts.conformance.comparing import ABSENT, Difference, compared
from scripts.conformance.report import Versions, document
from scripts.conformance.running import Outcome
from tests import compiled

PASSED, FAILED, SKIPPED = Outcome("passed", ""), Outcome("failed", "it broke"), Outcome("skipped", "no threads")


@pytest.fixture(scope="module")
def runtime() -> Iterator[WasmRuntime]:
    made = compiled.runtime()
    yield made
    made.close()


@pytest.mark.parametrize("module", ["test_bisect", "test_string", "test_dataclasses"])
def test_what_passes_natively_passes_inside_or_is_of_another_version(module: str, runtime: WasmRuntime) -> None:
    try:
        package = sources.package()
    except sources.Missing as missing:
        pytest.skip(str(missing))
    natively = running.run(running.natively(sources.running().path), package, module)
    inside = running.run(running.inside(runtime, package), package, module)
    assert sum(outcome == PASSED for outcome in natively.values()) > 30
    differences = compared(module, natively, inside, inside, None).differences
    assert not [each for each in differences if each.inside.how == "crashed"]
    assert len(differences) <= (10 if module == "test_dataclasses" else 0), differences


SAID = [["begins", "a"], ["ended", "a", "passed", ""], ["begins", "b"]]


def test_a_test_that_takes_its_interpreter_down_has_crashed_and_the_others_still_run() -> None:
    asked = []

    def start(words: str) -> running.Ran:
        asked.append(json.loads(words)["done"])
        lines = SAID if len(asked) == 1 else [["begins", "c"], ["ended", "c", "skipped", "no"], ["finished"]]
        return "".join(f"noise\n{driver.MARK}{json.dumps(line)}\n" for line in lines).encode(), "signalled 134: call stack exhausted"

    found = running.run(start, running.CHECKOUT, "test_x")
    assert found == {"a": PASSED, "b": Outcome("crashed", "signalled 134: call stack exhausted"), "c": Outcome("skipped", "no")}
    assert asked == [[], ["a", "b"]]


@pytest.mark.parametrize(
    ("inside", "elsewhere", "newer", "ours", "reason"),
    [
        (FAILED, PASSED, PASSED, True, "OURS"),
        (SKIPPED, PASSED, PASSED, True, "OURS"),
        (FAILED, FAILED, FAILED, False, "older Python"),
        (FAILED, FAILED, None, False, "not explained"),
        (FAILED, FAILED, PASSED, False, "not explained"),
        (SKIPPED, SKIPPED, PASSED, False, "no threads"),
        (ABSENT, ABSENT, None, False, "not made inside"),
        (Outcome("crashed", "trap"), FAILED, None, True, "OURS"),
    ],
)
def test_a_difference_is_ours_unless_it_is_there_without_us(
    inside: Outcome, elsewhere: Outcome, newer: Outcome | None, ours: bool, reason: str
) -> None:
    difference = Difference("test.test_x.T.test_y", inside, elsewhere, newer)
    assert difference.ours is ours and reason in difference.reason


def test_the_document_names_every_difference_and_adds_up() -> None:
    natively = {"a": PASSED, "b": PASSED, "c": PASSED, "d": SKIPPED}
    text = document(
        Versions("3.11.2", "3.15.0", None),
        [compared("test_x", natively, {"a": PASSED, "b": FAILED, "c": SKIPPED}, {"b": FAILED, "c": SKIPPED}, None)],
    )
    assert "| x | 4 | 3 | 1 | 1 | 0 | 1 | 0 | 0 |" in text and "| **all** | 4 | 3 | 1 | 1 | 0 | 1 | 0 | 0 |" in text
    assert "| b | not explained" in text and "| 1 | no threads |" in text
