"""Intents on the command line: real clients on a small internet, which writes down every byte that reaches it."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

from tests.e2e.test_network import OTHER, WEB, Go, go
from tests.e2e.test_sim_network import simulate

pytestmark = pytest.mark.once

__all__ = ["go"]
pytest.importorskip("h2", reason="needs the extra `network`")

POLICY = """
[network]
outbound = true
hosts = ["web.test", "other.test", "db.test:5432"]

[intents."Read the web"]
hosts = ["web.test"]
requests = ["GET web.test/page"]

[intents.brief]
hosts = ["web.test"]
for = "1s"

[intents.other]
hosts = ["other.test"]

[intents.database]
hosts = ["db.test:5432"]
"""
PROJECT = '[intents.everything]\nhosts = ["*"]\n\n[intents.other]\nhosts = ["*"]\nrequests = ["GET other.test/page"]\n'
FIELD = "Agent-Sandbox-Intent"


def inside(policy: Path, command: str, *flags: str) -> str:
    return shlex.join(["run", "--throw-away", "--policy", str(policy), *flags, "--", "bash", "-c", command])


def test_only_the_declared_intent_is_open_on_the_command_line(go: Go, project: Path, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    policy = tmp_path / "own.toml"
    policy.write_text(POLICY)
    (project / "agent-sandbox.toml").write_text(PROJECT)
    get = "curl -sS -o /dev/stdout -w ' %{http_code}\\n'"
    lines = {
        "none": inside(policy, f"{get} https://web.test/page"),
        "flag": inside(
            policy,
            f"{get} https://web.test/page; {get} https://web.test/else; {get} -d x https://web.test/page; {get} https://other.test/page;"
            f"{get} -H '{FIELD}: other' https://other.test/canary-flag",
            *("--intent", "READ  the web"),
        ),
        "field": inside(
            policy,
            f"{get} -H '{FIELD}: OTHER' https://other.test/page; {get} -H '{FIELD}: other' https://web.test/canary-field;"
            f"{get} -H '{FIELD}: everything' https://other.test/canary-project; {get} -H '{FIELD}: other' https://other.test/canary-narrowed;"
            f"{get} --http1.1 -H '{FIELD}: other' https://other.test/page",
        ),
        "brief": inside(policy, f"sleep 1.5; {get} https://web.test/canary-late", "--intent", "brief"),
        "database": inside(policy, "exec 3<>/dev/tcp/db.test/5432; printf canary-db >&3; head -c 9 <&3", "--intent", "database"),
        "closed database": inside(policy, "exec 3<>/dev/tcp/db.test/5432; printf canary-no >&3; head -c 9 <&3", "--intent", "other"),
    }
    said = "; ".join(f"echo ::{name}; {{sandbox}} {line} 2>&1" for name, line in lines.items())
    visit = go(f"{said}; echo ::log; {{sandbox}} log --json --limit none --category network")
    told = {part.partition("\n")[0]: part.partition("\n")[2] for part in visit.stdout.split("::")[1:]}
    assert "no intent is declared; --intent 'read the web' or --intent 'brief' would open web.test:443" in told["none"], visit
    codes = {
        name: [line.split()[-1] for line in text.splitlines() if line.split()[-1:] in (["200"], ["403"])] for name, text in told.items()
    }
    assert codes["flag"] == ["200", "403", "403", "403", "403"] and "declared from outside" in told["flag"], told["flag"]
    assert codes["field"] == ["200", "403", "403", "403", "200"], told["field"]
    assert "the request declares an intent that the policy does not name" in told["field"]
    assert codes["brief"] == ["403"] and "the intent 'brief' has expired" in told["brief"]
    assert "canary-db" in told["database"] and "canary-no" not in told["closed database"]
    arrived = b"".join(visit.received.values())
    assert {where.partition(":")[0] for where in visit.received} == {WEB, OTHER, "11.0.0.4"}
    assert arrived.count(b"canary") == 1 and b"canary-db" in arrived and FIELD.lower().encode() not in arrived.lower()
    assert set(visit.asked) == {"web.test", "other.test", "db.test"}
    entries = [(entry["action"], entry["target"], entry["allowed"]) for entry in json.loads(told["log"])["entries"]]
    declared = [entry[1:] for entry in entries if entry[0] == "intent"]
    assert declared == [("read the web", True), ("brief", True), ("brief", False), ("database", True), ("other", True)]


def test_without_intents_the_same_requests_arrive(go: Go, project: Path, tmp_path: Path) -> None:
    """The control: what the test above does not see could have been seen."""
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    policy = tmp_path / "own.toml"
    policy.write_text(POLICY.partition("[intents")[0])
    urls = "https://other.test/canary-flag https://web.test/canary-field https://web.test/canary-late"
    visit = go("{sandbox} " + inside(policy, f"curl -sS {urls}; exec 3<>/dev/tcp/db.test/5432; printf canary-no >&3; head -c 9 <&3"))
    assert b"".join(visit.received.values()).count(b"canary") == 4, visit


def test_a_plan_that_was_made_under_an_intent_is_carried_out_under_it(go: Go, project: Path, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    own = tmp_path / "config" / "agent-sandbox" / "policy.toml"
    own.parent.mkdir(parents=True)
    own.write_text(POLICY)
    write = "curl -sS -d canary-planned https://other.test/echo > /dev/null; echo done > done"
    line, undeclared = simulate(write, "--intent", "other"), simulate(write.replace("planned", "refused"))
    carry = "{sandbox} carry-out $1 --yes"
    visit = go(f"export XDG_CONFIG_HOME={tmp_path}/config; {line}; {carry}; {undeclared}; {carry}")
    arrived = b"".join(visit.received.values())
    assert arrived.count(b"canary-planned") == 1 and b"canary-refused" not in arrived, visit
    assert (project / "done").read_text() == "done\n"
