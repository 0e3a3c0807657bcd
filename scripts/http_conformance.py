"""Schemathesis against the HTTP interface of a real daemon: every operation of its OpenAPI description, with every check that it has.

It is installed from the index into an environment of its own. The requests that it makes up are performed, in a project and a home that are
made for this and removed; absolute paths in them are moved there (`scripts/http_requests.py`). A check that fails, an answer that says
"server error", and an operation that was not tried fail this.

Usage: python -m scripts.http_conformance   writes docs/http-conformance.md
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.frameworks import Framework, ensure, version

CHECKOUT = Path(__file__).resolve().parent.parent
PAGE = CHECKOUT / "docs" / "http-conformance.md"
SUITE = Framework("schemathesis", ("schemathesis>=4.30,<5",), "`st run --checks all`", False)
SECONDS = 3600
EXAMPLES = 10  # made up for each operation, beside those that cover its schema
HOOKS = "http_requests"  # a module beside this one
PROGRAM = [sys.executable, "-m", "agent_sandbox"]
# The interface answers 406 where a valid request cannot be answered as a document, which the default list does not have.
SETTINGS = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "401", "403", "404", "406", "409"]
"""


@dataclass
class Operation:
    """The results of one operation."""

    requests: int = 0
    answers: Counter[int] = field(default_factory=Counter)
    passed: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)

    @property
    def wrong(self) -> list[str]:
        """The unexpected results."""
        errors = sum(count for status, count in self.answers.items() if status >= 500)
        found = [f"{name}: {count} times" for name, count in self.failed.items()]
        return [*found, *([f"{errors} answers of 500 and above"] if errors else []), *([] if self.requests else ["it was not tried"])]


@contextmanager
def served(place: Path) -> Iterator[tuple[str, str, Path]]:
    """Serve a project below this directory, with a home and a state of its own. Yield the address, the token and the project."""
    project, home, token = place / "project", place / "home", place / "state" / "token"
    (project / ".git").mkdir(parents=True)
    home.mkdir()
    env = {**os.environ, "HOME": str(home), "AGENT_SANDBOX_STATE": str(place / "state")}
    line = [*PROGRAM, "serve", "--listen", "127.0.0.1:0", "--token-file", str(token)]
    with subprocess.Popen(line, cwd=project, env=env, stderr=subprocess.PIPE, text=True) as daemon:
        assert daemon.stderr is not None
        try:
            address = next(word for said in daemon.stderr for word in said.replace(",", " ").split() if word.startswith("127.0.0.1:"))
            yield f"http://{address}", token.read_text().strip(), project
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.communicate()


def run(
    operations: Sequence[str] = (), *, phases: str = "examples,coverage,fuzzing,stateful", examples: int = EXAMPLES
) -> dict[str, Operation]:
    """Run the suite, on all operations or those with these paths, and return what came of each."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        place = Path(name)
        report, settings = place / "report.ndjson", place / "schemathesis.toml"
        settings.write_text(SETTINGS)
        with served(place) as (url, token, project):
            words = [str(SUITE.place / "bin" / "st"), "--config-file", str(settings), "run", f"{url}/v1/openapi.json"]
            words += ["--header", f"Authorization: Bearer {token}", "--checks", "all", "--phases", phases, "--continue-on-failure"]
            words += ["--max-examples", str(examples), "--no-shrink", "--no-color", "--request-timeout", "300", "--seed", "1"]
            words += ["--max-response-time", "300"]  # how fast this machine is, is not what is asked
            words += ["--suppress-health-check", "all", "--report", "ndjson", "--report-ndjson-path", str(report)]
            words += [word for path in operations for word in ("--include-path", path)]
            env = {
                **os.environ,
                "SCHEMATHESIS_HOOKS": HOOKS,
                "PYTHONPATH": str(CHECKOUT / "scripts"),
                "HTTP_REQUESTS_PROJECT": str(project),
            }
            done = subprocess.run(words, cwd=place, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
        if not report.exists():
            raise AssertionError(f"the suite did not run:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        found = read(map(json.loads, report.read_text().splitlines()))
        if done.returncode and not any(each.wrong for each in found.values()):
            raise AssertionError(f"the suite failed, and its report does not say why:\n{done.stdout[-3000:]}")
        return found


def read(events: Iterable[Mapping[str, Any]]) -> dict[str, Operation]:
    """Return the operations in a report of the suite."""
    found: dict[str, Operation] = {}
    for event in events:
        scenario = event.get("ScenarioFinished")
        if scenario is None or not (recorder := scenario.get("recorder")):
            continue
        operation = found.setdefault(recorder["label"], Operation())
        for interaction in recorder.get("interactions", {}).values():
            operation.requests += 1
            operation.answers[(interaction.get("response") or {}).get("status_code") or 599] += 1  # 599: no answer
        for checks in recorder.get("checks", {}).values():
            for check in checks:
                (operation.passed if check["status"] == "success" else operation.failed)[check["name"]] += 1
        if scenario["status"] == "error":
            operation.failed["the suite itself"] += 1
    return found


def document(found: Mapping[str, Operation], suite: str) -> str:
    """Return the page."""
    passed: Counter[str] = sum((each.passed for each in found.values()), Counter())
    failed: Counter[str] = sum((each.failed for each in found.values()), Counter())
    lines = [
        "# HTTP conformance",
        "",
        f"Written by `make conformance-http`: {suite} reads `/v1/openapi.json` of a daemon that runs, makes up requests that fit the",
        "description and requests that do not, sends them to every operation, and checks each answer. The requests are performed, in a",
        "project that is made for this.",
        "",
        f"{len(found)} operations, {sum(each.requests for each in found.values()):,} requests.",
        "",
        "| check | passed | failed |",
        "| --- | --: | --: |",
        *(f"| {name} | {passed[name]:,} | {failed[name]:,} |" for name in sorted(passed | failed)),
        "",
        "Answers: performed (200), refused with a reason (400, 404, 406, 413), another method (405).",
        "",
        "| operation | requests | performed | refused | another method | failed checks |",
        "| --- | --: | --: | --: | --: | --- |",
    ]
    for name, each in found.items():
        refused = sum(count for status, count in each.answers.items() if 400 <= status < 500 and status != 405)
        lines.append(
            f"| {name} | {each.requests} | {each.answers[200]} | {refused} | {each.answers[405]} | {'; '.join(each.wrong) or '–'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run everything, and write the page."""
    ensure(SUITE)
    found = run()
    PAGE.write_text(document(found, version(SUITE)), encoding="utf-8")
    for name, each in found.items():
        print(f"{name}: {each.requests} requests: {'; '.join(each.wrong) or 'all checks passed'}")
    return int(not found or any(each.wrong for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
