"""Every verb, run with --json: each prints one document, and its schema holds."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from agent_sandbox.cli.grammar import VERBS
from tests import compiled
from tests.e2e.program import Shell
from tests.patience import until

pytestmark = pytest.mark.once

SCHEMAS = Path(__file__).resolve().parents[2] / "docs" / "schemas"
NOT_PRINTED = {"interrupted"}  # after a signal
NOT_EVERYWHERE = {"log-checkpoint", "policy-learn", "fork"}  # where the extra, the observer or live forks are missing, they are refused
ELSEWHERE = {"replay", "setup", "verify", "image"}  # in the other tests, in test_verify and test_containers
BACKGROUND = {"exec", "logs", "stop", "ps"}  # in test_detached
ANSWERING = {"hook"}  # what it prints is an answer in the form of another program
ALSO_TYPED = {"simulate", "apply"}  # the same verbs as sim and promote

SEQUENCE: tuple[tuple[str, ...], ...] = (
    ("help",),
    ("help", "run"),
    ("run", "--help"),
    ("version",),
    ("completion", "bash"),
    ("completion", "zsh"),
    ("completion", "fish"),
    ("completion", "words", "--", "run", "--col"),
    ("doctor",),
    ("status",),
    ("log",),
    ("run", "echo new > file; printf '\\377'; mkdir made; ln -s file link"),
    ("run", "--observe", "--throw-away", "cat file"),
    ("run", "--allow", "cat", "--", "ls"),
    ("run", "--timeout", "0.2", "sleep 60"),
    ("run", "--explain", "true"),
    ("run", "--deny-command", "ls", "ls"),
    ("run", "--nonsense", "true"),
    ("run", "--diff", "echo x > other"),
    ("shell",),
    ("mcp",),
    ("code", "code.py"),
    ("diff",),
    ("diff", "--all"),
    ("diff", "rm -r gone binary"),
    ("sim", "--throw-away", "rm binary; echo x > made-by-sim; curl http://example.com"),
    ("sim", "--throw-away", "echo x > made-by-sim"),
    ("carry-out",),
    ("try", "a=echo x > tried", "b=exit 3", "--check", "echo 1..1; echo ok 1", "--side-by-side"),
    ("try",),
    ("try", "0123"),
    ("run", "--timeline", "code.py"),
    ("timeline",),
    ("timeline", "--all"),
    ("rewind", "1"),
    ("inspect",),
    ("inspect", "1", "--eval", "6 * 7"),
    ("inspect", "--list", "."),
    ("inspect", "--file", "binary"),
    ("inspect", "1", "2", "--diff"),
    ("timeline", "--keep-files"),
    ("fork",),
    ("timeline", "--all", "--end"),
    ("run", "--timeline", "--", "touch", "stepped"),
    ("timeline", "."),
    ("rewind", ".", "1"),
    ("snapshot", "first"),
    ("snapshots",),
    ("rollback",),
    ("snapshots", "--forget", "first", "--yes"),
    ("promote",),
    ("promote", "--dry-run"),
    ("promote", "--yes"),
    ("promote", "--yes"),
    ("status",),
    ("undo",),
    ("undo", "--yes"),
    ("undo", "--yes"),
    ("list",),
    ("prune",),
    ("prune", "--unchanged", "--dry-run"),
    ("reset", "--yes"),
    ("policy", "explain"),
    ("policy", "lint"),
    ("policy", "test", "git push --force | sh"),
    ("policy", "learn", "cat file"),
    ("approve",),
    ("approve", "0123456789"),
    ("approve", "--enroll"),
    ("deny", "0123456789"),
    ("grant", "run git push **", "--for", "1m"),
    ("grant", "--elevate", "--memory", "16G", "--for", "1m"),
    ("capabilities",),
    ("revoke", "--all"),
    ("log", "--limit", "none"),
    ("log", "verify"),
    ("log", "checkpoint"),
    ("checkpoints",),
    ("serve", "--status"),
    ("serve", "--unit", "user"),
    ("replay", "no-such-record"),
    ("connect", "claude", "--scope", "project", "--dry-run"),
    ("connect", "emacs"),
    ("agent", "--", "no-such-agent"),
    ("shell-prefix", "--", "cat file"),
)


@cache
def schema(kind: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((SCHEMAS / f"{kind}.json").read_text())
    return read


def checked(done: subprocess.CompletedProcess[bytes]) -> dict[str, Any]:
    """The document that was printed, alone, once its schema holds."""
    assert done.stdout.isascii(), "nothing that a guest wrote acts on a terminal"
    document: dict[str, Any] = json.loads(done.stdout)
    kind = document["schema"].split("/")[1]
    jsonschema.Draft202012Validator(schema(kind)).validate(document)
    return document


@pytest.fixture
def prepared(shell: Shell) -> Shell:
    """A project with files to change."""
    (shell.cwd / "file").write_text("old\n")
    (shell.cwd / "binary").write_bytes(bytes(range(256)))
    (shell.cwd / "gone").mkdir()
    (shell.cwd / "gone" / "inside").write_text("x\n")
    (shell.cwd / "code.py").write_text("print(6 * 7)\n")
    return shell


@pytest.mark.timeout(600)
def test_every_verb_prints_one_document_that_its_schema_describes(prepared: Shell) -> None:
    documents = [(line, checked(prepared("--json", *line))) for line in SEQUENCE]
    plan, *_ = next(document for line, document in documents if line[0] == "carry-out")["plans"]
    carried = checked(prepared("--json", "carry-out", plan["digest"], "--yes"))
    assert carried["carried_out"]
    printed = {document["schema"].split("/")[1] for document in (*(document for _, document in documents), carried)}
    elsewhere = (ELSEWHERE - {"image"}) | BACKGROUND | {"detach", "images", "setup-microvm"}
    assert {path.stem for path in SCHEMAS.glob("*.json")} - printed - NOT_EVERYWHERE == NOT_PRINTED | elsewhere
    verbs = {line[0] for line, _ in documents} | ELSEWHERE | BACKGROUND
    assert verbs | ALSO_TYPED | ANSWERING == set(VERBS)


def test_a_question_that_waits_is_listed_and_answered_as_a_document(prepared: Shell) -> None:
    (prepared.cwd / "agent-sandbox.toml").write_text('[approvals]\ncommands = ["echo **"]\n')
    with prepared.start("run", "--", "echo", "asked") as process:
        assert until(lambda: checked(prepared("--json", "approve"))["waiting"])
        digest = checked(prepared("--json", "approve"))["waiting"][0]["digest"]
        answered = checked(prepared("--json", "approve", digest, "--yes"))
        assert answered["answered"] and process.wait() == 0


def test_what_replay_says_is_a_document(prepared: Shell, tmp_path: Path) -> None:
    compiled.offer(tmp_path / "cache", Path(prepared.env["AGENT_SANDBOX_STATE"]))
    inside = replace(prepared, env={**prepared.env, "XDG_CACHE_HOME": str(tmp_path / "cache")})
    record = str(tmp_path / "record.json")
    recorded = checked(inside("--json", "code", "--deterministic", "--throw-away", "--record", record, "code.py"))
    assert recorded["schema"] == "agent-sandbox/run/1"
    assert checked(inside("--json", "replay", record))["same"]


def test_what_setup_says_is_a_document(prepared: Shell) -> None:
    nowhere = str(prepared.cwd / "file" / "cache")  # where nothing can be compiled, which takes minutes
    document = checked(
        replace(prepared, env={**prepared.env, "XDG_CACHE_HOME": nowhere, "AGENT_SANDBOX_SHARED_CACHE": nowhere})("--json", "setup")
    )
    assert document["state_dir"] and document["wasm"] != "ready"
