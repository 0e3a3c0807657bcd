"""The test suites of three real projects, run outside and in every runtime: each of their tests must end alike.

Between them they compute (`toolz`), read and write files and start programs (`python-dotenv`), and lock files among threads and processes
(`fasteners`). Some of their tests fail outside, and must fail inside: `toolz` has a bug, and what others need is not installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import gvisor
from tests.e2e.program import Shell, words
from tests.images import SLIM, slim
from tests.leftovers import remove
from tests.runtime.microvm.machines import runtime_in
from tests.sdists import DOTENV, FASTENERS, TOOLZ, SourceDistribution

pytestmark = [pytest.mark.torture, pytest.mark.timeout(3600)]

NEEDED = ("pytest", "click", "diskcache", "more-itertools")  # pure Python: the image's interpreter can use them, too
MARK = "outcomes: "
# Tells how each test ended. Loaded by name, because a suite may have a conftest.py of its own.
PLUGIN = f"""
import json
outcomes = {{}}
def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        outcomes[report.nodeid] = report.outcome
def pytest_collectreport(report):
    if report.outcome != "passed":
        outcomes[report.nodeid] = report.outcome
def pytest_unconfigure(config):
    print("\\n{MARK}" + json.dumps(outcomes), flush=True)
"""
REPRODUCED = "\n\ndef test_interpose_of_nothing():\n    assert list(interpose('a', [])) == []\n"
PROJECTS = {TOOLZ: "toolz", DOTENV: "tests", FASTENERS: "tests"}
RUNTIMES = ("process", "container", "gvisor", "microvm")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project with the three source distributions, and beside them the packages that their tests import."""
    made = tmp_path_factory.mktemp("suites")
    (made / ".git").mkdir()
    archives = tmp_path_factory.mktemp("archives")
    for each in PROJECTS:
        each.unpack(archives, made)
    with (made / TOOLZ.name / "toolz/tests/test_itertoolz.py").open("a") as tests:
        tests.write(REPRODUCED)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--target", str(made / "needed")]
    done = subprocess.run([*pip, *NEEDED], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{', '.join(NEEDED)} cannot be fetched: {done.stderr.strip().splitlines()[-1:]}")
    (made / "needed" / "telling.py").write_text(PLUGIN)
    yield made
    remove(made)


@pytest.fixture(scope="module")
def outside(place: Path) -> dict[SourceDistribution, dict[str, str]]:
    """How each test ends without a sandbox."""
    return {each: told(_outside(line(place, each), place / each.name)) for each in PROJECTS}


def line(place: Path, project: SourceDistribution) -> list[str]:
    """The same command everywhere, with the same few variables."""
    top = place / project.name
    path = os.pathsep.join(map(str, (place / "needed", top, top / "src")))
    variables = ("PATH=/usr/bin:/bin", "HOME=/tmp", "LANG=C.UTF-8", f"PYTHONPATH={path}", "PYTHONDONTWRITEBYTECODE=1")
    return ["env", "-i", *variables, "python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "telling", PROJECTS[project]]


def _outside(argv: list[str], cwd: Path) -> str:
    return subprocess.run(argv, cwd=cwd, capture_output=True, text=True, check=False).stdout


def told(output: str) -> dict[str, str]:
    """How each test ended, as the suite itself told."""
    said = [each.removeprefix(MARK) for each in output.splitlines() if each.startswith(MARK)]
    assert len(said) == 1, output[-4000:]
    outcomes: dict[str, str] = json.loads(said[0])
    return outcomes


def options(runtime: str, shell: Shell, tmp_path: Path) -> tuple[str, ...]:
    """The options that choose a runtime. Skips, and says what is missing, where it cannot be had."""
    match runtime:
        case "container":
            slim()
            return "--image", SLIM
        case "gvisor":
            gvisor.runtime().close()
        case "microvm":
            runtime_in(tmp_path).close()
            done = shell("setup", "microvm")
            assert done.returncode == 0, words(done)
    return "--runtime", runtime


def test_the_suites_have_passes_and_failures_to_compare(outside: dict[SourceDistribution, dict[str, str]]) -> None:
    """The control arm: a bug of `toolz` and missing packages are failures outside."""
    for each, found in outside.items():
        counts = Counter(found.values())
        assert counts["passed"] > 45 and counts["failed"] >= 1, (each, counts)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("project", PROJECTS, ids=lambda each: each.project)
def test_each_test_of_a_real_suite_ends_inside_as_it_does_outside(
    project: SourceDistribution, runtime: str, place: Path, outside: dict[SourceDistribution, dict[str, str]], tmp_path: Path
) -> None:
    shell = Shell(place / project.name, {"AGENT_SANDBOX_STATE": str(tmp_path / "state")})
    chosen = options(runtime, shell, tmp_path)
    done = shell("run", "--throw-away", "--timeout", "none", *chosen, "--", *line(place, project))
    inside, bare = told(done.stdout.decode()), outside[project]
    print(f"{project.name} {runtime}: {dict(Counter(inside.values()))}")
    different = {name: (bare.get(name), inside.get(name)) for name in bare.keys() | inside.keys() if bare.get(name) != inside.get(name)}
    assert different == {}, done.stdout.decode()[-20000:]
