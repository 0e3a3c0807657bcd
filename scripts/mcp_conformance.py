"""The conformance suite of the Model Context Protocol and its inspector against our server, in an environment of their own.

Both are installed from npm into build/mcp-conformance, with a Node that they need. The suite prescribes tools, resources and prompts that a
reference server has; ours has its own. A check that asks for one of those does not apply, and the page names what it asked for. Any other
check that fails is a failure, and ends this with 1.

Usage: python -m scripts.mcp_conformance   writes docs/mcp-conformance.md
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

CHECKOUT = Path(__file__).resolve().parent.parent
PLACE = CHECKOUT / "build" / "mcp-conformance"
PAGE = CHECKOUT / "docs" / "mcp-conformance.md"
PACKAGE, INSPECTOR, NODE = "@modelcontextprotocol/conformance", "@modelcontextprotocol/inspector@2.12.0", "node@22"
HANDSHAKE, MODERN = "0.1.16", "0.2.0-alpha.12"
PROGRAM = [sys.executable, "-m", "agent_sandbox"]
# What a check says when it wanted something that only the suite's reference server has.
WANTED = (
    (re.compile(r"there is no tool '([a-z_0-9]+)'"), "the tool `{}` of the reference server"),
    (re.compile(r"[Tt]ool '([a-z_0-9]+)'"), "the tool `{}` of the reference server"),
    (re.compile(r"there is no resource '(test://\S+)'"), "the resource `{}` of the reference server"),
    (re.compile(r"no tool with (x-mcp-header) annotations"), "a tool with `{}`, which ours have not"),
    (re.compile(r"(prompts)/list returned .* Method not found"), "{}, which we do not offer"),
    (re.compile(r"Expected InputRequiredResult with inputRequests and (requestState)"), "a tool of the reference server that asks twice"),
    (re.compile(r"could not get initial (InputRequiredResult)"), "a tool of the reference server that asks for input"),
)
METHODS = {
    "completion-complete": "completions",
    "logging-set-level": "the logging capability, deprecated in 2026-07-28",
    "tools-call-with-logging": "the logging capability, deprecated in 2026-07-28",
    "resources-subscribe": "subscriptions",
    "resources-unsubscribe": "subscriptions",
    "input-required-result-non-tool-request": "prompts",
    **dict.fromkeys(
        ("prompts-list", "prompts-get-simple", "prompts-get-with-args", "prompts-get-embedded-resource", "prompts-get-with-image"),
        "prompts",
    ),
}
TASKS = "the extension tasks, which we do not offer"


class Check(NamedTuple):
    """One check of a scenario. `why` is why it does not apply, or what failed."""

    scenario: str
    name: str
    outcome: str  # passed, failed, or does not apply
    why: str = ""


def installed() -> dict[str, Path]:
    """Install the suites and the inspector, unless they are there, and return the program of each and that of Node."""
    wanted = {"handshake": f"{PACKAGE}@{HANDSHAKE}", "modern": f"{PACKAGE}@{MODERN}", "inspector": INSPECTOR, "node": NODE}
    for name, package in wanted.items():
        if not (PLACE / name / "node_modules").is_dir():
            PLACE.mkdir(parents=True, exist_ok=True)
            print(f"installing {package}", flush=True)
            npm = ["npm", "install", "--no-audit", "--no-fund", "--silent", "--prefix", str(PLACE / name), package]
            subprocess.run(npm, check=True)
    entry = Path("node_modules") / PACKAGE / "dist" / "index.js"
    return {
        "handshake": PLACE / "handshake" / entry,
        "modern": PLACE / "modern" / entry,
        "inspector": PLACE / "inspector" / "node_modules" / ".bin" / "mcp-inspector",
        "node": PLACE / "node" / "node_modules" / "node" / "bin" / "node",
    }


@contextmanager
def project() -> Iterator[tuple[Path, dict[str, str]]]:
    """Make a project, and an environment whose sandboxes go with it."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        root = Path(place, "project")
        (root / ".git").mkdir(parents=True)
        (root / "greeting.txt").write_text("hello\n")
        yield root, {**os.environ, "AGENT_SANDBOX_STATE": str(Path(place, "state"))}


SERVE = """
import sys
from agent_sandbox.cli.options import CommandOptions
from agent_sandbox.mcp import transports
from agent_sandbox.server import local_ports
from agent_sandbox.mcp.tools import Toolbox
toolbox = Toolbox(CommandOptions(project=sys.argv[1]), {"PATH": "/usr/bin:/bin"})
listener = local_ports.listening_at("127.0.0.1", 0)
port = listener.getsockname()[1]
print(port, flush=True)
transports.serve_app(transports.application(toolbox, port), listener)
toolbox.close()
"""


@contextmanager
def served(root: Path, env: dict[str, str]) -> Iterator[str]:
    """Serve the sandbox on a local port without a token, which the suite cannot send; everything else is as for users."""
    with subprocess.Popen([sys.executable, "-c", SERVE, str(root)], env=env, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}/mcp"
        finally:
            server.terminate()


def checks(node: Path, suite: Path, url: str, options: list[str]) -> list[Check]:
    """Run a suite and return its checks, in its order."""
    with tempfile.TemporaryDirectory() as results:
        line = [str(node), str(suite), "server", "--url", url, "-o", results, *options]
        subprocess.run(line, capture_output=True, check=False, timeout=900)  # it exits with 1 if any check fails
        found = []
        for directory in sorted(Path(results).iterdir(), key=lambda each: each.stat().st_mtime):
            scenario = re.sub(r"-\d{4}-\d\d-\d\dT.*", "", directory.name).removeprefix("server-")
            for each in json.loads((directory / "checks.json").read_text()):
                found.append(judged(scenario, each["id"], each["status"], each.get("errorMessage") or ""))
    if not found:
        raise SystemExit(f"the suite {suite} said nothing")
    return found


def judged(scenario: str, name: str, status: str, message: str) -> Check:
    """Return a check with what it means for us. A warning, which is about a recommendation, counts as passed, with its words."""
    if status in ("SUCCESS", "INFO"):
        return Check(scenario, name, "passed")
    if status == "SKIPPED":
        return Check(scenario, name, "does not apply", "the suite skips it here")
    if scenario.startswith("tasks-"):
        return Check(scenario, name, "does not apply", TASKS)
    for pattern, words in WANTED:
        if found := pattern.search(message):
            return Check(scenario, name, "does not apply", words.format(found[1]))
    if scenario in METHODS and "Method not found" in message:
        return Check(scenario, name, "does not apply", f"{METHODS[scenario]}, which we do not offer")
    if status == "WARNING":
        return Check(scenario, name, "passed", f"with a remark: {message}")
    return Check(scenario, name, "failed", message or "no reason given")


def inspected(node: Path, inspector: Path, root: Path, env: dict[str, str]) -> list[Check]:
    """Let the inspector call the server on standard input and output."""
    env = {**env, "PATH": f"{node.parent}:{env['PATH']}"}
    calls = {
        "tools/list": (["--method", "tools/list"], '"promote"'),
        "tools/call run": (["--method", "tools/call", "--tool-name", "run", "--tool-arg", "command=cat greeting.txt"], "hello"),
        "resources/list": (["--method", "resources/list"], "agent-sandbox://ledger"),
        "resources/templates/list": (["--method", "resources/templates/list"], "resourceTemplates"),
        "resources/read": (["--method", "resources/read", "--uri", "agent-sandbox://diff"], "no changes in the project"),
    }
    found = []
    for name, (options, expected) in calls.items():
        line = [str(inspector), "--cli", *PROGRAM, "mcp", "--project", str(root), *options]
        done = subprocess.run(line, env=env, capture_output=True, text=True, check=False, timeout=120)
        fine = done.returncode == 0 and expected in done.stdout
        found.append(Check("inspector", name, "passed" if fine else "failed", "" if fine else (done.stderr or done.stdout)[-300:]))
    return found


def table(found: list[Check]) -> Iterator[str]:
    """Yield the lines of a table: a line for each scenario, with reasons for what did not pass."""
    yield "| scenario | passed | failed | does not apply | |"
    yield "| --- | --: | --: | --: | --- |"
    for scenario in dict.fromkeys(each.scenario for each in found):
        own = [each for each in found if each.scenario == scenario]
        counts = [sum(each.outcome == outcome for each in own) for outcome in ("passed", "failed", "does not apply")]
        words = "; ".join(dict.fromkeys(each.why.replace("|", "\\|").replace("\n", " ") for each in own if each.why))
        prefix = "asks for " if counts[2] and not counts[1] and not words.startswith(("with a remark", "the suite")) else ""
        yield f"| {scenario} | {counts[0]} | {counts[1]} | {counts[2]} | {prefix}{words} |"


def main() -> int:
    """Run everything, and write the page."""
    if shutil.which("npm") is None:
        raise SystemExit("npm is needed: install Node.js")
    programs = installed()
    with project() as (root, env):
        with served(root, env) as url:
            handshake = checks(programs["node"], programs["handshake"], url, ["--suite", "all"])
            modern = checks(programs["node"], programs["modern"], url, ["--requirements", "2026-07-28"])
        inspector = inspected(programs["node"], programs["inspector"], root, env)
    parts = (
        (f"The suite {HANDSHAKE}, specification 2025-11-25", handshake),
        (f"The suite {MODERN}, specification 2026-07-28", modern),
        ("The inspector, on standard input and output", inspector),
    )
    lines = [
        "# MCP conformance",
        "",
        "Written by `make conformance-mcp`. The suite of the protocol's maintainers prescribes the tools, resources and prompts of",
        "a reference server. Ours has its own, so checks that ask for those do not apply; each line says what was asked for. What",
        "they are about, such as elicitation, input that is required, progress and tampered state, is tested with the protocol's",
        "own client in `tests/mcp/`.",
    ]
    for title, found in parts:
        failed, passed = (sum(each.outcome == outcome for each in found) for outcome in ("failed", "passed"))
        rest = len(found) - failed - passed
        print(f"{title}: {passed} passed, {failed} failed, {rest} do not apply")
        lines += ["", f"## {title}", "", f"{passed} checks passed, {failed} failed, {rest} do not apply.", "", *table(found)]
    PAGE.write_text("\n".join(lines) + "\n")
    return int(any(each.outcome == "failed" for _, found in parts for each in found))


if __name__ == "__main__":
    sys.exit(main())
