"""The suites of the frameworks that we have adapters for, and real runs of those that have no suite, each in an environment of its own.

`make test` runs the light ones: an environment of theirs is made in some seconds. `make frameworks` runs all, as root also as a user, and
writes docs/framework-conformance.md. Environments are kept below .venv, and made again if what they need changes.

Usage: python -m scripts.frameworks [--install]   with --install, only the environments are made
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts import reachable

CHECKOUT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = CHECKOUT / ".venv" / "frameworks"
SUITES = CHECKOUT / "tests" / "frameworks"
DOCUMENT = CHECKOUT / "docs" / "framework-conformance.md"
SECONDS = 900  # for the suite of one framework, on a busy machine
STAMP = "made-for.txt"


@dataclass(frozen=True)
class Framework:
    """A framework: its adapter, what its environment needs, and the suite that is run there."""

    name: str
    packages: tuple[str, ...]
    suite: str  # what it is, for the document
    light: bool  # whether `make test` runs it
    by_entry_point: bool = False  # whether it finds our adapter in the list of what is installed

    @property
    def module(self) -> str:
        """The name of its adapter, and of its file below tests/frameworks."""
        return self.name.replace("-", "_")

    @property
    def place(self) -> Path:
        """The directory of its environment."""
        return ENVIRONMENTS / self.name


FRAMEWORKS = (
    Framework("pydantic-ai", ("pydantic-ai-slim>=2,<3",), "`pydantic_ai.workspaces.conformance`, and a run with a scripted model", True),
    Framework("smolagents", ("smolagents>=1.26,<2",), "a real `CodeAgent` with a scripted model", True),
    Framework("langchain", ("langchain>=1.4,<2",), "the real shell middleware", False),
    Framework("openai-agents", ("openai-agents>=0.24,<0.25",), "a real `Runner` with a scripted model", True),
    Framework("inspect-ai", ("inspect-ai>=0.3.285,<0.4",), "`inspect_ai.util._sandbox.self_check`, and a real evaluation", False, True),
    Framework(
        "deepagents",
        ("deepagents>=0.7,<0.8", "langchain-tests>=1.1,<1.2", "pytest-asyncio"),
        "langchain-tests `SandboxIntegrationTests`",
        False,
    ),
)


class Unreachable(Exception):
    """The packages of a framework could not be installed. The text says why."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one test: passed, failed or skipped, and in words why."""

    state: str
    why: str = ""


def ensure(framework: Framework) -> None:
    """Make the environment of a framework, unless it is there already. Raises `Unreachable`."""
    wanted = "\n".join((*framework.packages, "pytest", sys.version.split()[0]))
    stamp = framework.place / STAMP
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return
    uv = str(Path(sys.executable).parent / "uv")
    python = str(framework.place / "bin" / "python")
    ours = [[uv, "pip", "install", "--quiet", "--python", python, "--editable", str(CHECKOUT), "--no-deps"]]
    for command in (
        [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(framework.place)],
        [uv, "pip", "install", "--quiet", "--python", python, "pytest", *framework.packages],
        *(ours if framework.by_entry_point else []),
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unreachable(f"{' '.join(command[1:3])}: {done.stderr.strip()[-500:]}")
    stamp.write_text(wanted, encoding="utf-8")


def version(framework: Framework) -> str:
    """Return the installed version of a framework."""
    names = [package.partition(">")[0].partition("=")[0] for package in framework.packages if not package.startswith("pytest")]
    code = f"from importlib.metadata import version as v; print(', '.join(f'{{n}} {{v(n)}}' for n in {names!r}))"
    return subprocess.run([framework.place / "bin" / "python", "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def run(framework: Framework) -> dict[str, Outcome]:
    """Run the suite of a framework, in its environment, as the user of this process."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        report = Path(place) / "report.xml"
        words = [str(framework.place / "bin" / "python"), "-m", "pytest", "--quiet", "-p", "no:cacheprovider", "-c", os.devnull]
        words += ["--rootdir", str(SUITES), "--import-mode=importlib", "--noconftest", "-p", "framework_guide", f"--junitxml={report}"]
        words += ["-o", "asyncio_mode=auto"] if "pytest-asyncio" in framework.packages else []
        words += [str(SUITES / f"suite_{framework.module}.py")]
        # The environment holds the packages that are tested; ours comes from this checkout, also where that is a copy.
        variables = {
            **os.environ,
            "PYTHONPATH": f"{CHECKOUT / 'src'}:{SUITES}",
            "PATH": f"{framework.place / 'bin'}:{os.environ.get('PATH', '')}",
        }
        done = subprocess.run(words, cwd=place, env=variables, capture_output=True, text=True, timeout=SECONDS, check=False)
        if not report.exists():
            raise AssertionError(f"the suite of {framework.name} did not run:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        return read(report)


def read(report: Path) -> dict[str, Outcome]:
    """Return the outcomes in a report of pytest, by the name of the test with its class."""
    found: dict[str, Outcome] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name', '')}"
        bad = next((each for each in case if each.tag in ("failure", "error")), None)
        skipped = case.find("skipped")
        if bad is not None:
            found[name] = Outcome("failed", (bad.get("message") or bad.text or "")[:300])
        elif skipped is not None:
            found[name] = Outcome("skipped", (skipped.get("message") or "")[:300])
        else:
            found[name] = Outcome("passed")
    return found


def unexplained(framework: Framework, outcomes: Mapping[str, Outcome], reasons: Mapping[tuple[str, str], str]) -> list[str]:
    """Return what is not as it should be: tests that did not pass without a reason, and reasons for tests that pass."""
    wrong = []
    for name, outcome in outcomes.items():
        short = name.rpartition(".")[2]
        if name.startswith("TestPlain."):  # a backend without a sandbox, which shows whose a failure is
            continue
        reason = reasons.get((framework.name, short))
        if outcome.state != "passed" and reason is None:
            wrong.append(f"{name}: {outcome.state}: {outcome.why}")
        plain = outcomes.get(f"TestPlain.{short}")
        if plain is not None and reason is not None and plain.state == "passed":
            wrong.append(f"{name}: it passes without a sandbox, so this is ours")
        if outcome.state == "passed" and reason is not None and not reason.startswith("as "):
            wrong.append(f"{name}: passes, so it needs no reason")
    return wrong or ([] if outcomes else ["no test ran"])


def document(found: Mapping[str, Mapping[str, Mapping[str, Outcome]]], reasons: Mapping[tuple[str, str], str]) -> str:
    """Return the page: a table of the suites, and one of the tests that do not apply. `found` is by user, framework and test."""
    users = list(found)
    lines = [
        "# The frameworks' own suites",
        "",
        "Written by `make frameworks`. Three frameworks ship a suite for backends inside their wheel; it runs here unchanged, against our",
        "adapter. For the others a real agent runs with a scripted model. Each framework is installed into an environment of its own, from",
        "the index, and everything runs twice: as root, and as a user who owns nothing.",
        "",
        f"| framework | what runs | tests | {' | '.join(f'passed as {user}' for user in users)} | do not apply |",
        f"| --- | --- | --: | {' | '.join('--:' for _ in users)} | --: |",
    ]
    for framework in FRAMEWORKS:
        ours = {
            user: {name: each for name, each in found[user][framework.name].items() if not name.startswith("TestPlain.")} for user in users
        }
        names = {name.rpartition(".")[2] for each in ours.values() for name in each}
        passed = " | ".join(str(sum(each.state == "passed" for each in ours[user].values())) for user in users)
        exempt = sum((framework.name, name) in reasons for name in names)
        lines.append(f"| {version(framework)} | {framework.suite} | {len(names)} | {passed} | {exempt} |")
    lines += ["", "What does not apply, and why:", "", "| framework | test | why |", "| --- | --- | --- |"]
    lines += [f"| {name} | `{test}` | {why} |" for (name, test), why in reasons.items()]
    lines += [
        "",
        "A reason that begins with *the framework* is checked: the same test fails there with a backend that starts plain processes,",
        "without any sandbox. A test that passes and has a reason, or fails and has none, fails `make frameworks`.",
        "",
    ]
    return "\n".join(lines)


def _by_pytest(report: Path, *, as_a_user: bool) -> dict[str, dict[str, Outcome]]:
    """Run all suites through tests/frameworks, as root or as a user, and return their outcomes from the report."""
    test = "tests/frameworks/test_frameworks.py"
    if as_a_user:
        subprocess.run(
            ["env", "MARKS=torture or not torture", "scripts/unprivileged.sh", "--report", str(report), test], cwd=CHECKOUT, check=False
        )
    else:
        words = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "torture or not torture",
            f"--junitxml={report}",
            "-o",
            "junit_family=xunit1",
            test,
        ]
        subprocess.run(words, cwd=CHECKOUT, check=False)
    found: dict[str, dict[str, Outcome]] = {}
    for each in ElementTree.parse(report).iter("property"):
        if (each.get("name") or "").startswith("outcomes of "):
            outcomes = json.loads(each.get("value") or "{}")
            found[(each.get("name") or "").removeprefix("outcomes of ")] = {name: Outcome(*pair) for name, pair in outcomes.items()}
    return found


def main(reasons: Mapping[tuple[str, str], str], frameworks: Iterable[Framework] = FRAMEWORKS) -> int:
    """Run everything, write the document, and return 1 if something failed without a reason."""
    users = {"root": False, "a user": True} if os.geteuid() == 0 else {"a user": False}
    with tempfile.TemporaryDirectory(prefix="agent-sandbox-frameworks.", dir="/var/tmp") as place:
        os.chmod(place, 0o755)
        copy = reachable.checkout(Path(place))  # the user may not enter this one, and may write to neither
        os.environ[reachable.VARIABLE] = str(copy)
        for each in {CHECKOUT, copy}:
            subprocess.run([each / ".venv/bin/python", "-m", "scripts.frameworks", "--install"], cwd=each, check=True)
        found = {
            user: _by_pytest(Path(place) / f"{number}.xml", as_a_user=as_a_user) for number, (user, as_a_user) in enumerate(users.items())
        }
    missing = [f"{each.name} as {user}" for user in users for each in frameworks if each.name not in found[user]]
    wrong = [line for user in users for each in frameworks for line in unexplained(each, found[user].get(each.name, {}), reasons)]
    for line in (*(f"NOT RUN: {each}" for each in missing), *wrong):
        print(line, file=sys.stderr)
    if not missing and len(users) == 2:
        DOCUMENT.write_text(document(found, reasons), encoding="utf-8")
        print(f"wrote {DOCUMENT.relative_to(CHECKOUT)}")
    return 1 if wrong or missing else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--install"]:
        for wanted in FRAMEWORKS:
            ensure(wanted)
        sys.exit()
    from tests.frameworks.reasons import REASONS

    sys.exit(main(REASONS))
