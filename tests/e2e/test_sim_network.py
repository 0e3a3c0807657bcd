"""Simulations with a network, and plans with requests: what is sent, what is not, and what carrying out a plan may send."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from tests.e2e.test_network import OTHER, WEB, Go, go

pytestmark = pytest.mark.once

__all__ = ["go"]

READ, WRITE = "curl -sS https://web.test/page", "curl -sS -d canary-in-a-body https://web.test/echo"
# Prints the digest of the plan of a command, and leaves it in $plan.
SIM = (
    'plan=$({sandbox} --json sim %s 2>/dev/null | python3 -c \'import json, sys; d = json.load(sys.stdin); print(d["digest"], d["kept"])\')'
)


def simulate(command: str, *flags: str) -> str:
    return f"{SIM % shlex.join((*flags, command))}; echo plan $plan; set -- $plan"


def test_a_simulation_sends_what_only_reads_and_lists_the_rest(go: Go) -> None:
    command = f"{READ}; {WRITE}; true"
    visit = go(f"{{sandbox}} sim --network web.test {shlex.quote(command)}")
    sent = visit.received[f"{WEB}:443"]
    assert b"GET /page" in sent and b"canary-in-a-body" not in sent and b"POST" not in sent
    assert "request GET https://web.test/page [sent]: medium" in visit.stdout, visit
    assert "request POST https://web.test/echo [would be sent]: high" in visit.stdout and "a simulation does not send POST" in visit.stderr
    really = go(f"{{sandbox}} sim --send --network web.test {shlex.quote(command)}", name="really")
    assert b"canary-in-a-body" in really.received[f"{WEB}:443"], "the control: a person can have it sent"
    assert "request POST https://web.test/echo [sent]: high" in really.stdout


def test_a_plan_with_requests_is_carried_out_once_and_with_its_requests(go: Go, project: Path) -> None:
    line = simulate(f"{READ} > page; {WRITE} > /dev/null", "--network", "web.test")
    visit = go(f"{line}; {{sandbox}} carry-out $1 --yes; {{sandbox}} carry-out $1 --yes")
    assert visit.received[f"{WEB}:443"].count(b"canary-in-a-body") == 1, visit
    assert (project / "page").read_text() == "hello from web.test"
    assert "sent: POST https://web.test/echo" in visit.stderr and "there is no plan" in visit.stderr


def test_what_is_not_in_the_plan_is_refused_and_no_file_is_carried_over(go: Go, project: Path, tmp_path: Path) -> None:
    """The command asks for other hosts, methods and paths than in its simulation, because something outside of the project has changed."""
    flag = tmp_path / "flag"
    other = "curl -sS https://other.test/canary; curl -sS https://web.test/canary; curl -sS -X PUT https://web.test/page; curl -sS http://web.test/page"
    command = f"echo x > made; if [ -e {flag} ]; then {other}; fi; {READ}"
    line = simulate(command, "--network", "web.test,other.test")
    really = f"{{sandbox}} run --network web.test,other.test {shlex.quote(other)}"
    visit = go(f"{line}; touch {flag}; {{sandbox}} carry-out $1 --yes; echo code $?; {really}")
    assert "code 1" in visit.stdout and "not in the plan" in visit.stderr, visit
    assert not (project / "made").exists() and "carry-out" in visit.stderr
    assert visit.received[f"{WEB}:443"].count(b"GET /canary") == 1, "only by the run that was allowed to: the control"
    assert visit.received[f"{WEB}:443"].count(b"PUT /page") == 1 and visit.received[f"{WEB}:80"].count(b"GET /page") == 1
    assert visit.received[f"{OTHER}:443"].count(b"GET /canary") == 1


def test_nothing_is_sent_for_a_plan_whose_files_cannot_be_carried_over(go: Go, project: Path) -> None:
    command = f"{WRITE} > /dev/null; echo x > made; mkdir -p .git/hooks; echo x > .git/hooks/pre-commit"
    carried = "{sandbox} carry-out $1 --yes"
    visit = go(
        f"{simulate(command, '--network', 'web.test')}; {carried}; echo code $?; touch made; {carried} --approve git-config; echo code $?"
    )
    assert "code 3" in visit.stdout and "code 1" in visit.stdout, visit
    assert visit.received == {} and (project / "made").read_text() == ""
    control = go(f"{simulate(command, '--network', 'web.test')}; {carried} --approve git-config; echo code $?", name="control")
    assert "code 0" in control.stdout and b"canary-in-a-body" in control.received[f"{WEB}:443"], control


def test_a_plan_with_a_secret_and_a_variable_needs_both_again(go: Go) -> None:
    command = 'curl -sS -H "Authorization: Bearer $KEY" -d "$WORD" https://web.test/echo'
    line = simulate(command, "--network", "web.test", "--secret", "KEY@web.test", "--env", "WORD=canary-word")
    visit = go(
        f"export KEY=value-of-the-secret-8c2d; {line}; {{sandbox}} carry-out $1 --yes; echo code $?; "
        "{sandbox} carry-out $1 --yes --env WORD=canary-word; echo code $?; grep -rl value-of-the-secret $AGENT_SANDBOX_STATE"
    )
    assert "code 2" in visit.stdout and "give it again: --env WORD" in visit.stderr and "code 0" in visit.stdout, visit
    sent = visit.received[f"{WEB}:443"]
    assert sent.count(b"Bearer value-of-the-secret-8c2d") == 1 and sent.count(b"canary-word") == 1
    assert "state" not in visit.stdout, "no file of ours holds the value"


def test_a_simulation_can_be_answered_from_a_record(go: Go, tmp_path: Path) -> None:
    record = tmp_path / "record"
    first = go(f"{{sandbox}} run --throw-away --network web.test --record-network {record} --record-bodies -- {WRITE}")
    assert b"canary-in-a-body" in first.received[f"{WEB}:443"]
    again = go(f"{{sandbox}} sim --replay-network {record} {shlex.quote(f'{WRITE} > answer')}", name="away")
    assert "+canary-in-a-body" in again.stdout and again.received == {} and again.asked == [], again


def test_a_learnt_policy_permits_the_requests_that_were_sent_and_no_others(go: Go, tmp_path: Path) -> None:
    learnt = tmp_path / "learnt.toml"
    beyond = "curl -sS -X PUT -d canary-in-a-put https://web.test/page; curl -sS https://web.test/canary-in-a-path"
    visit = go(
        f"{{sandbox}} policy learn --network web.test {shlex.quote(f'{READ}; curl -sS https://web.test/users/123/x; {WRITE}')} > {learnt}; "
        f"{{sandbox}} run --throw-away --policy {learnt} {shlex.quote(f'{READ}; curl -sS https://web.test/users/77; {beyond}')}"
    )
    lines = [line.split("#")[0].strip() for line in learnt.read_text().splitlines()]
    assert '"GET web.test/page",' in lines and '"GET web.test/users/*",' in lines and '"POST web.test/echo",' in lines, learnt.read_text()
    assert "it ends the same way" in visit.stderr, visit
    sent = visit.received[f"{WEB}:443"]
    assert b"GET /users/77" in sent and b"canary-in-a-put" not in sent and b"canary-in-a-path" not in sent
    assert "the policy allows only GET at web.test, and this is PUT" in visit.stdout
    control = go(f"{{sandbox}} run --throw-away --network web.test {shlex.quote(beyond)}", name="control")
    assert b"canary-in-a-put" in control.received[f"{WEB}:443"] and b"canary-in-a-path" in control.received[f"{WEB}:443"]


SDK = """
from agent_sandbox import Sandbox
code = "from urllib.request import urlopen; urlopen('https://web.test/page'); urlopen('https://web.test/echo', b'canary-in-a-body')"
with Sandbox(network=["web.test"], validate_code=False) as sandbox:
    for each in sandbox.simulate(code).http:
        print(each.method, each.target, each.sent, each.risk.level.value)
    print(sandbox.execute(code).success)
"""


def test_a_simulation_of_the_sdk_sends_only_what_reads_too(go: Go) -> None:
    visit = go(f"{shlex.quote(sys.executable)} -c {shlex.quote(SDK)}")
    assert visit.stdout.splitlines() == ["GET https://web.test/page True medium", "POST https://web.test/echo False high", "True"], visit
    assert visit.received[f"{WEB}:443"].count(b"canary-in-a-body") == 1, "by the run, which is the control, and not by the simulation"
