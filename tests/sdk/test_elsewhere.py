"""Where this is not Linux: everything can be imported, code runs behind one wall and says so, and what cannot be done is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import compiled

CHECKOUT = Path(__file__).resolve().parents[2]
MAIN = "from agent_sandbox.cli.main import main; print(main({words}))"


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """A user who has run `agent-sandbox setup`, at home."""
    compiled.give(tmp_path / "cache", tmp_path / "state")
    return {"XDG_CACHE_HOME": str(tmp_path / "cache"), "AGENT_SANDBOX_STATE": str(tmp_path / "state"), "HOME": str(tmp_path)}


def on(system: str, code: str, places: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.elsewhere", system, code]
    return subprocess.run(command, cwd=CHECKOUT, env={**os.environ, **places}, capture_output=True, text=True, check=False)


RUN = """
import agent_sandbox, agentbox
result = agent_sandbox.Sandbox(runtime="auto").execute("print(6 * 7)")
print(result.stdout, result.status, result.route.runtime, result.notes)
for attempt in (
    lambda: agent_sandbox.Sandbox().execute("1"),
    lambda: agentbox.Sandbox(allow_file_read=True, allowed_paths=["/etc"]).run("1"),
    lambda: agentbox.Sandbox(allow_subprocess=True).run(["true"]),
):
    try:
        print("refused", attempt().error)
    except agent_sandbox.SandboxError as error:
        print("raised", type(error).__name__, error)
"""


def test_code_runs_behind_one_wall_and_what_needs_a_second_is_refused(places: dict[str, str], tmp_path: Path) -> None:
    done = on("darwin", RUN, places)
    ran, default, files, command = done.stdout.replace("\n SandboxStatus", " SandboxStatus").splitlines()
    assert ran.startswith('42 SandboxStatus.COMPLETED wasm-one-wall ("one wall only: '), done
    assert default.startswith("raised RuntimeUnavailable the runtime 'process' does not work here") and 'runtime="auto"' in default
    assert files.startswith("raised RuntimeUnavailable the runtime 'wasm-one-wall' shows no files")
    assert command.startswith("refused the runtime 'wasm-one-wall' runs Python code only")
    assert done.stderr == ""
    assert (tmp_path / "state" / "ledger.jsonl").read_text().count('"wasm-one-wall"') == 1, "and it is recorded"


def test_doctor_names_the_missing_wall_and_the_other_verbs_say_why_not(places: dict[str, str]) -> None:
    words = ["doctor", "--json"]
    document, _, code = on("darwin", MAIN.format(words=words), places).stdout.rstrip().rpartition("\n")
    found = json.loads(document)
    assert [(row["name"], row["status"]) for row in found["rows"]] == [("second wall", "missing"), ("wasm", "ok")] and code == "0"
    refused = on("darwin", MAIN.format(words=["run", "true"]), places)
    assert refused.stdout == "125\n" and "Sandbox(runtime='auto')" in refused.stderr


def test_before_it_is_compiled_it_says_what_to_do(tmp_path: Path) -> None:
    bare = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "AGENT_SANDBOX_STATE": str(tmp_path / "state")}
    done = on("darwin", "import agentbox; agentbox.Sandbox().run('1')", bare)
    assert "RuntimeUnavailable" in done.stderr and "agent-sandbox setup" in done.stderr


def test_on_windows_it_can_be_imported_and_refuses_with_the_remedy(places: dict[str, str]) -> None:
    stored = ("workspaces", "experiments", "live_experiments", "checkpoints", "tasks")  # what needs a store or Linux's groups
    names = f"{{*agent_sandbox.__all__}} - {{name for home in {stored} for name in agent_sandbox._HOMES[home]}}"
    code = f"import agent_sandbox, agentbox\nfor name in {names}: getattr(agent_sandbox, name)"
    imported = on("win32", code, places)
    assert imported.returncode == 0, imported.stderr
    refused = on("win32", "import agentbox; agentbox.Sandbox()", places)
    assert "RuntimeUnavailable: there are no sandboxes on Windows" in refused.stderr and "WSL2" in refused.stderr
    line = on("win32", MAIN.format(words=["run", "true"]), places)
    assert line.stdout == "125\n" and "WSL2" in line.stderr
