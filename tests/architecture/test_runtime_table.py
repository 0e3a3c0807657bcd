"""The table of runtimes in docs/isolation.md says what their traits and objections say."""

from __future__ import annotations

from pathlib import Path

from agent_sandbox.assembly import here
from agent_sandbox.policy.model import Guarantee
from agent_sandbox.runtime.base import Demands, Runtime
from agent_sandbox.runtime.gvisor.runtime import GvisorRuntime
from agent_sandbox.runtime.process.runtime import ProcessRuntime

PAGE = Path(__file__).parents[2] / "docs" / "isolation.md"
DEMANDS = {
    "a terminal (`exec -t`, `run` on a terminal)": Demands(terminal=True),
    "`--system`": Demands(system=True),
    "`--watch-reads`": Demands(inspect=True),
    "`--observe`": Demands(observe=True),
    "published ports": Demands(inward=True),
    "timelines": Demands(checkpoints=True),
}


def runtimes() -> list[Runtime]:
    """The five runtimes, in the order of the columns."""
    return [ProcessRuntime(), here().wasm(warm=0), here().container(), GvisorRuntime(), here().microvm(warm=0)]


def cells(title: str, answers: list[bool]) -> str:
    return f"| {title} | {' | '.join('yes' if each else '–' for each in answers)} |"


def table() -> list[str]:
    """The table as it must stand in the page: a row for each guarantee, each language and each thing that a launch can ask for."""
    five = runtimes()
    rows = ["| | " + " | ".join(f"`{each.traits.name}`" for each in five) + " |", "|---" * (len(five) + 1) + "|"]
    rows += [cells(f"`{each.value}`", [each in runtime.traits.guarantees for runtime in five]) for each in Guarantee]
    languages = sorted({language for runtime in five for language in runtime.traits.languages})
    rows += [cells(f"runs {language}", [language in runtime.traits.languages for runtime in five]) for language in languages]
    rows += [cells("the files of an image", [runtime.traits.images for runtime in five])]
    for title, wanted in DEMANDS.items():
        given = [not runtime.objection(_in_an_image(wanted) if runtime.traits.images else wanted) for runtime in five]
        rows.append(cells(title, given))
    return rows


def _in_an_image(demands: Demands) -> Demands:
    return Demands(**{**vars(demands), "image": "python:3.11-slim"})


def test_the_page_declares_the_differences_between_the_runtimes_as_the_code_does() -> None:
    expected = "\n".join(table())
    assert expected in PAGE.read_text(), f"the table in {PAGE.name} must be:\n{expected}"
