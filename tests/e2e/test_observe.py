"""`run --observe`: what a run tried is in the log, allowed and denied."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.program import Shell


def test_what_a_run_tried_can_be_looked_up_by_category(shell: Shell, project: Path) -> None:
    done = shell("run", "--observe", "--deny", str(project / "src"), "cat greeting.txt src/app.py; getent hosts canary.example.net")
    assert done.stdout.startswith(b"hello\n")
    logged: dict[tuple[str, str], bool] = {}
    for category in ("file", "process", "network"):
        lines = shell("log", "--category", category, "--format", "jsonl").stdout.splitlines()
        logged |= {(entry["action"], entry["target"]): entry["allowed"] for entry in map(json.loads, lines)}
    assert logged["read", str(project / "greeting.txt")] is True
    assert logged["read", str(project / "src" / "app.py")] is False
    assert logged["resolve", "canary.example.net"] is False
    assert any(action == "execute" and target.endswith("/cat") for action, target in logged)
    assert b"app.py" in shell("log", "--category", "file", "--denied").stdout


def test_a_run_without_it_writes_no_more_than_ever(shell: Shell) -> None:
    assert shell("run", "cat greeting.txt").stdout == b"hello\n"
    assert shell("log", "--category", "file", "--format", "jsonl").stdout == b""
