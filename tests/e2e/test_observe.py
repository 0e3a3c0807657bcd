"""`run --observe`: what a run tried is in its document and in the log, allowed and denied."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.program import Shell


def test_what_a_run_tried_is_in_its_document_and_in_the_log(shell: Shell, project: Path) -> None:
    greeting, hidden = str(project / "greeting.txt"), str(project / "src" / "app.py")
    line = "cat greeting.txt src/app.py; getent hosts canary.example.net"
    document = json.loads(shell("run", "--observe", "--json", "--deny", str(project / "src"), line).stdout)
    assert document["stdout"].startswith("hello\n") and "canary.example.net" in document["stdout"]
    (read,) = (each for each in document["observed"] if each["target"] == greeting)
    assert (read["kind"], read["allowed"], read["times"]) == ("read", True, 1) and read["program"].endswith("/cat")
    told = [json.loads(line) for line in shell("log", "--format", "jsonl").stdout.splitlines()]
    logged = {(entry["category"], entry["action"], entry["target"]): entry["allowed"] for entry in told}
    assert logged["file", "read", greeting] is True
    assert logged["file", "read", hidden] is False
    assert logged["network", "resolve", "canary.example.net"] is False
    assert any(entry["action"] == "execute" and entry["target"].endswith("/cat") for entry in told if entry["category"] == "process")
    assert hidden.encode() in shell("log", "--category", "file", "--denied").stdout
