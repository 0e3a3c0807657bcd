"""Record what a run exchanges, and answer another run from the record: real clients, on a small internet that writes down every byte."""

from __future__ import annotations

import base64
import json
import shlex
import stat
import sys
from pathlib import Path

import pytest

from tests.e2e.test_network import WEB, Go, client, go

pytestmark = pytest.mark.once

__all__ = ["go"]

VALUE = "value-of-the-secret-8c2d"


def line(command: str, *flags: str) -> str:
    return f"{{sandbox}} run --throw-away {shlex.join(flags)} -- sh -c {shlex.quote(command)}"


def test_an_installation_is_recorded_and_repeated_without_any_network(go: Go, tmp_path: Path) -> None:
    record = tmp_path / "record"
    command = client("pip").format("web.test")
    first = go(line(command, "--network", "web.test", "--record-network", str(record), "--record-bodies"))
    assert "hello from web.test" in first.stdout and f"exchanges: {record}\n" in first.stderr, first
    assert {where.partition(":")[0] for where in first.received} == {WEB}, "the control: these bytes can be seen"
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    again = go(line(f"{command}; curl -sS https://web.test/page", "--replay-network", str(record)), name="away")
    assert "hello from web.test" in again.stdout, again
    assert "holds no further GET https://web.test:443/page" in again.stdout, "and what is not in it does not leave"
    assert again.received == {} and again.asked == []
    assert "nothing left this machine" in again.stderr


def test_neither_secrets_nor_credentials_are_in_a_record(go: Go, tmp_path: Path) -> None:
    record = tmp_path / "record"
    command = "curl -sS -H \"Authorization: Bearer $KEY\" -H 'Cookie: c=canary-in-a-cookie' https://web.test/headers"
    flags = ("--network", "web.test", "--secret", "KEY@web.test", "--record-network", str(record), "--record-bodies")
    visit = go(f"KEY={VALUE} {line(command, *flags)}")
    sent = b"".join(visit.received.values())
    assert VALUE.encode() in sent and b"canary-in-a-cookie" in sent, "the control: the host had both"
    text = record.read_text()
    made = json.loads(text.splitlines()[1])
    assert made["target"] == "/headers" and made["body"], text
    assert VALUE not in text and "authorization" not in json.dumps(made["asked"]) and "cookie" not in json.dumps(made["asked"])
    assert VALUE.encode() not in base64.b64decode(made["body"])


def test_a_record_needs_a_network_and_a_replay_a_whole_record(go: Go, tmp_path: Path) -> None:
    record, other = tmp_path / "record", tmp_path / "other"
    other.write_text("{}\n")
    lines = (
        line("true", "--record-network", str(record)),
        line("true", "--network", "web.test", "--record-network", str(tmp_path / "missing" / "record")),
        line("curl -sS https://web.test/page", "--replay-network", str(other)),
        line("true", "--network", "web.test", "--record-bodies"),
        line("true", "--network", "web.test", "--record-network", str(record), "--replay-network", str(other)),
    )
    visit = go("; ".join(f"{each}; echo $?" for each in lines))
    assert visit.stdout.split() == ["2", "125", "125", "2", "2"], visit
    for said in ("add --network HOST", "No such file", "not a valid record", "add --record-network FILE", "do not go together"):
        assert said in visit.stderr, said
    assert visit.received == {} and not record.exists()


def test_a_run_that_is_killed_leaves_no_record(go: Go, tmp_path: Path) -> None:
    record = tmp_path / "record"
    flags = ("--network", "web.test", "--record-network", str(record), "--record-bodies")
    killed = line("curl -sS https://web.test/page; echo; sleep 100", *flags)
    out = tmp_path / "out"
    visit = go(f"{killed} > {out} & pid=$!; until grep -q hello {out}; do sleep 0.1; done; kill -9 $pid; wait; cat {out}")
    assert "hello from web.test" in visit.stdout and not record.exists(), visit
    again = go(line("curl -sS https://web.test/page", *flags), name="again")
    assert "hello from web.test" in again.stdout and len(record.read_text().splitlines()) == 3
    assert not Path(f"{record}.new").exists()


SDK = """
import sys
from agent_sandbox import PolicyError, Sandbox
record = sys.argv[1]
code = "import urllib.request; print(urllib.request.urlopen('https://web.test/page').read().decode())"
with Sandbox(network=["web.test"], validate_code=False) as sandbox:
    print(sandbox.execute(code, record_network=record, record_bodies=True).stdout)
    again = sandbox.execute(code, replay_network=record)
    print(again.stdout, again.notes)
    try:
        sandbox.execute(code, record_bodies=True)
    except PolicyError as error:
        print(error)
with Sandbox(validate_code=False) as sandbox:
    print(sandbox.execute(code, replay_network=record).error)
"""


def test_the_sdk_records_and_replays_a_run(go: Go, tmp_path: Path) -> None:
    record = tmp_path / "record"
    visit = go(f"{shlex.quote(sys.executable)} -c {shlex.quote(SDK)} {record}")
    assert visit.stdout.count("hello from web.test") == 2 and "nothing left this machine" in visit.stdout, visit
    assert visit.received[f"{WEB}:443"].count(b"GET /page") == 1, "the second run was answered from the record"
    assert "record_bodies goes with record_network" in visit.stdout and "the run has no network" in visit.stdout
