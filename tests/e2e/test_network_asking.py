"""Hosts and data that somebody is asked for, and capabilities for hosts, on a small internet that records what reaches it."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.program import PROGRAM
from tests.egress.internet import ADDRESSES, Visit, run_on_internet

pytestmark = pytest.mark.once

pytest.importorskip("h2", reason="needs the extra `network`")

WEB, OTHER, DB = (ADDRESSES[name] for name in ("web.test", "other.test", "db.test"))
Go = Callable[..., Visit]

# Waits for the next question, shows it, and answers it.
ANSWER = """answer() {
    until digest=$({sandbox} --json approve | grep -o '"digest": *"[0-9a-f]*' | grep -o '[0-9a-f]*$' | head -1) && [ "$digest" ]; do :; done
    {sandbox} approve "$digest" "$@"
}
"""


@pytest.fixture
def go(project: Path, tmp_path: Path) -> Go:
    """Run a line of a shell on the small internet, in the project. `answer --yes` in it answers the next question."""

    def visit(line: str, *, name: str = "net") -> Visit:
        env = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
        env |= {"AGENT_SANDBOX_STATE": str(tmp_path / "state"), "PYTHONPATH": str(Path(__file__).parents[2])}
        line = (ANSWER + line).replace("{sandbox}", shlex.join(PROGRAM)).replace("{python}", shlex.quote(sys.executable))
        return run_on_internet(tmp_path / name, ["sh", "-c", line], env=env, cwd=project, seconds=200)

    return visit


def run(command: str, *flags: str) -> str:
    return f"{{sandbox}} run --throw-away {shlex.join(flags)} -- sh -c {shlex.quote(command)}"


def heard(visit: Visit, address: str) -> bytes:
    return b"".join(data for where, data in visit.received.items() if where.startswith(f"{address}:"))


def test_a_host_is_reached_after_a_yes_and_not_after_a_no_and_the_answers_hold_for_the_run(go: Go, tmp_path: Path) -> None:
    urls = ("https://a.web.test/page", "https://a.web.test/bytes?3", "http://other.test/page", "http://other.test/again")
    command = "; ".join(f"curl -sS -m 60 {shlex.quote(url)}; echo" for url in (*urls, "http://b.web.test/page"))
    flags = ("--network", "*.web.test+ask,other.test+ask", "--policy", "deny.toml")
    Path(tmp_path / "project" / "deny.toml").write_text('[network]\ndenied_hosts = ["b.web.test"]\n')
    visit = go(f"{run(command, *flags)} & answer --yes --for-run; answer --refuse; wait; {{sandbox}} log --json")
    assert "hello from a.web.test\nxxx\n" in visit.stdout and visit.stdout.count("said no") >= 2, visit
    assert b"GET /page" in heard(visit, WEB) and b"GET /bytes?3" in heard(visit, WEB) and heard(visit, OTHER) == b""
    assert set(visit.asked) == {"a.web.test"}, "no resolver hears of a name before the yes"
    assert "  | asked by run " in visit.stdout and ": sh -c " in visit.stdout, "and by whom"
    assert "host      a.web.test" in visit.stdout and "method    GET" in visit.stdout and "path      /page" in visit.stdout
    assert visit.stderr.count("waiting 5 minutes for an answer") == 2, "each host is asked for once, and one that is denied never"
    assert "approval of" in visit.stdout, "who decided is in the ledger"


@pytest.mark.parametrize("name", ["inside.test", "meta.test"])
def test_a_name_that_leads_inside_is_refused_although_somebody_agreed(go: Go, name: str) -> None:
    visit = go(f"{run(f'curl -sS -m 60 http://{name}/page', '--network', f'{name}+ask')} & answer --yes; wait")
    assert "refused by the sandbox" in visit.stdout and visit.received == {} and name in visit.asked, visit


HELD = """
import http.client, socket
web = http.client.HTTPConnection("web.test")
web.request("GET", "/page")
print(web.getresponse().read())
db = socket.create_connection(("db.test", 5432))
db.send(b"one")
print(db.recv(9), flush=True)
input()
web.request("GET", "/revoked")
answer = web.getresponse()
print(answer.status, answer.read())
try:
    print("the end", db.recv(9))
except ConnectionResetError:
    print("the end", b"")
"""


def test_a_capability_for_hosts_is_revoked_by_another_process_while_the_run_goes_on(go: Go, tmp_path: Path) -> None:
    (tmp_path / "project" / "held.py").write_text(HELD)
    (tmp_path / "project" / "agent-sandbox.toml").write_text('[network]\nhosts = ["unused.test"]\n')
    visit = go(
        'token=$({sandbox} grant "network web.test GET" network\\ db.test:5432 --for 10m -q); mkfifo go\n'
        '{sandbox} run --throw-away --capability "$token" "curl -sS -d x http://web.test/post; python3 held.py" <go >out 2>&1 & exec 3>go\n'
        "until grep -q one out || ! kill -0 $!; do :; done; {sandbox} revoke --all; echo >&3; wait; cat out; {sandbox} run --throw-away"
        ' --capability "$token" "curl -sS -m 9 http://web.test/later"'
    )
    assert "no capability of this run covers POST" in visit.stdout and "hello from web.test" in visit.stdout, visit
    assert "403 b'refused by the sandbox: the capability was revoked, so web.test:80 is not reached any more" in visit.stdout
    assert "the end b''" in visit.stdout, "an open connection has ended as well"
    assert b"/page" in heard(visit, WEB) and heard(visit, DB) == b"one"
    assert not any(path in heard(visit, WEB) for path in (b"/revoked", b"/post", b"/later"))
    assert "a capability opens nothing of web.test, db.test:5432: it was revoked" in visit.stderr


def test_found_data_leaves_after_a_yes_and_nobody_is_shown_it(go: Go, tmp_path: Path) -> None:
    (tmp_path / "ask.toml").write_text('[dlp]\nask = ["email"]\n')
    command = (
        "curl -sS -m 60 -d to=canary@example.org https://web.test/no; echo; curl -sS -m 60 -d to=canary@example.org http://web.test/yes"
    )
    visit = go(f"{run(command, '--network', 'web.test', '--policy', str(tmp_path / 'ask.toml'))} & answer --refuse; answer --yes; wait")
    assert b"/no" not in heard(visit, WEB) and b"POST /yes" in heard(visit, WEB) and b"canary@example.org" in heard(visit, WEB), visit
    assert "data      email in the body" in visit.stdout, "who is asked is told the rule and the place"
    assert visit.stdout.count("canary") == 1 and "canary" not in visit.stderr, "the value is in the host's answer, and nowhere else"
    strict = tmp_path / "project" / "agent-sandbox.toml"
    strict.write_text('[dlp]\nblock = ["email"]\n')
    refused = go(run(command, "--network", "web.test", "--policy", str(tmp_path / "ask.toml")), name="strict")
    assert heard(refused, WEB) == b"" and "waiting" not in refused.stderr, "a project's file turns the question into a no"


SDK = """
import json, sys, threading
from agent_sandbox import Sandbox, PolicyError
GET = '''
import urllib.request, urllib.error
for url in URLS:
    try:
        print(urllib.request.urlopen(url, timeout=60).read().decode())
    except (urllib.error.URLError, OSError) as error:
        print(getattr(error, "code", type(error).__name__))
'''
def get(*urls):
    return GET.replace("URLS", repr(urls))
found = {}
asked = []
def boss(action, ask):
    asked.append(f"{action.host} {action.method} {action.path}")
    return "run" if action.host == "a.web.test" else action.path == "/page"
settings = dict(network=["*.web.test+ask", "other.test+ask"], validate_code=False, timeout_seconds=120)
with Sandbox(approver=boss, **settings) as sandbox:
    ran = sandbox.execute(get("http://a.web.test/page", "http://a.web.test/bytes?2", "http://other.test/page", "http://other.test/page"))
    found["first"], found["asked"] = ran.stdout, list(asked)
    found["second"] = sandbox.execute(get("http://a.web.test/page")).stdout
    found["asked again"] = asked[len(found["asked"]):]
    asked.clear()
    flood = get(*(f"http://flood{each}.web.test/no" for each in range(40)))
    found["flood"], found["flooded"] = sandbox.execute(flood).stdout, len(asked)
    token = sandbox.grant("network c.web.test", seconds=600)
    asked.clear()
    with sandbox.session() as turns:
        found["granted"] = turns.run(get("http://c.web.test/page")).stdout
        sandbox.revoke(token)
        found["revoked"] = turns.run(get("http://c.web.test/bytes?5")).stdout
    found["asked by granted"] = list(asked)
token = Sandbox(name="box", network=["x.test+ask"]).grant("network d.web.test", seconds=600)
with Sandbox(name="box", capabilities=[token], validate_code=False) as sandbox:
    found["by capability alone"] = sandbox.execute(get("http://d.web.test/page", "http://other.test/page")).stdout
try:
    Sandbox(name="another", capabilities=[token])
except PolicyError as error:
    found["stolen"] = error.message
json.dump(found, sys.stdout)
"""


@pytest.fixture
def sdk(go: Go, tmp_path: Path) -> tuple[dict[str, Any], Visit]:
    (tmp_path / "sdk.py").write_text(SDK)
    visit = go(f"{{python}} {shlex.quote(str(tmp_path / 'sdk.py'))}")
    assert visit.code == 0, visit
    return json.loads(visit.stdout), visit


def test_an_applications_approver_is_asked_for_hosts_and_its_sandbox_grants_and_revokes_them(sdk: tuple[dict[str, Any], Visit]) -> None:
    found, visit = sdk
    assert found["first"].split("\n")[:4] == ["hello from a.web.test", "xx", "hello from other.test", "hello from other.test"], found
    assert found["asked"] == ["a.web.test GET /page", "other.test GET /page", "other.test GET /page"], (
        "the run is asked once, True each time"
    )
    assert found["asked again"] == ["a.web.test GET /page"], "an answer for one run is none for the next"
    assert found["flooded"] == 20 and found["flood"].split() == ["403"] * 40
    assert not any("flood" in name for name in visit.asked) and b"flood" not in heard(visit, WEB)
    assert found["granted"].strip() == "hello from c.web.test" and found["revoked"].strip() == "403"
    assert found["asked by granted"] == [] and b"/bytes?5" not in heard(visit, WEB)
    assert found["by capability alone"].split("\n")[0] == "hello from d.web.test" and "hello from other" not in found["by capability alone"]
    assert "no effect" in found["stolen"], "a token of another sandbox opens nothing"
