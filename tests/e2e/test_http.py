"""The HTTP interface of the daemon, as curl and other programs use it: the verbs of the command line, with the same results."""

from __future__ import annotations

import base64
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from agent_sandbox.cli import errand
from tests.e2e.program import Shell, words
from tests.e2e.test_daemon import alone, counts, serving
from tests.leftovers import children
from tests.patience import until

pytestmark = pytest.mark.once

QUICK = {"--throw-away": True}


@pytest.fixture
def token_file(shell: Shell) -> Path:
    return Path(shell.env["AGENT_SANDBOX_STATE"], "token")


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def served(shell: Shell, token_file: Path, port: int) -> Iterator[Shell]:
    with serving(shell, "--listen", f"127.0.0.1:{port}", "--token-file", str(token_file)):
        with client(shell) as asking:
            assert until(lambda: answers(asking))
        yield shell


def place(shell: Shell) -> Path:
    return Path(shell.env["AGENT_SANDBOX_STATE"], errand.PLACE, "http")


def client(shell: Shell) -> httpx.Client:
    """One who asks on the socket. Its path may be longer than an address can be."""
    short = f"/proc/self/fd/{os.open(place(shell).parent, os.O_PATH)}/http"
    return httpx.Client(transport=httpx.HTTPTransport(uds=short), base_url="http://daemon", timeout=None)


def answers(asking: httpx.Client) -> bool:
    try:
        return asking.get("/healthz").status_code == 200
    except httpx.TransportError:
        return False


def test_a_verb_gives_what_the_command_line_gives(served: Shell) -> None:
    with client(served) as asking:
        line = "cat; echo $GREETING; echo aside >&2; exit 3"
        asked = {"words": [line], "options": {**QUICK, "--env": ["GREETING"]}}
        told = asking.post(
            "/v1/verbs/run", json={**asked, "directory": str(served.cwd), "environment": {"GREETING": "hi"}, "stdin": "typed "}
        ).json()
        asked_there = Shell(served.cwd, {**alone(served).env, "GREETING": "hi"})
        expected = json.loads(asked_there("--json", "run", "--throw-away", "--env", "GREETING", line, stdin=b"typed ").stdout)
        del told["result"]["usage"], expected["usage"]
        assert told == {"exit": 3, "result": expected, "messages": ""}
        for verb in ("status", "diff", "list", "log"):
            told = asking.post(f"/v1/verbs/{verb}", json={"directory": str(served.cwd)}).json()
            assert told["exit"] == 0, told
            assert told["result"]["schema"].startswith(f"agent-sandbox/{verb}/")
        listed = asking.post("/v1/verbs/run", json={"program": ["printf", "%s", "--version"], "directory": str(served.cwd)}).json()
        assert listed["result"]["stdout"] == "--version", "what follows `program` is never an option of ours"


@pytest.mark.both
@pytest.mark.parametrize("first", ["the command line", "HTTP"])
def test_both_doors_write_one_ledger_where_no_directory_of_state_is_chosen(shell: Shell, tmp_path: Path, first: str) -> None:
    home = tmp_path / "home"
    home.mkdir()
    unchosen = dict.fromkeys((*filter(lambda name: name.startswith("XDG_"), os.environ), "AGENT_SANDBOX_STATE", "AGENT_SANDBOX_KEYS"), "")
    typed = Shell(shell.cwd, {**shell.env, **unchosen, "HOME": str(home)})
    state = home / ".local/state/agent-sandbox"

    def by_command_line() -> None:
        done = alone(typed)("run", "--throw-away", "true")
        assert not done.returncode, words(done)

    with serving(typed, "--http"):
        link = os.open(state / errand.PLACE, os.O_PATH)
        transport = httpx.HTTPTransport(uds=f"/proc/self/fd/{link}/http")
        try:
            with httpx.Client(transport=transport, base_url="http://daemon", timeout=None) as asking:
                assert until(lambda: answers(asking))

                def by_http(**environment: str) -> None:
                    asked = {"words": ["env"], "options": QUICK, "directory": str(typed.cwd), "environment": environment}
                    told = asking.post("/v1/verbs/run", json=asked).json()
                    assert told["exit"] == 0, told
                    assert str(home / ".local/share") not in told["result"]["stdout"], "a program learns where the keys are"

                if first == "HTTP":
                    by_http()
                by_command_line()
                by_http()
                by_http(HOME=str(tmp_path), XDG_DATA_HOME=str(tmp_path), AGENT_SANDBOX_KEYS=str(tmp_path))  # they choose nothing here
        finally:
            os.close(link)
        by_command_line()
    verified = alone(typed)("log", "verify")
    assert not verified.returncode, verified
    assert not list((state / "ledger.jsonl.keys").glob("*")), "the keys lie beside the ledger that they protect"


def test_output_arrives_while_the_program_runs(served: Shell) -> None:
    line = "echo first; printf '\\303'; sleep 0.1; printf '\\244\\n'; read line; echo $line >&2; printf '\\377'; exit 4"
    asked = {"words": [line], "options": QUICK, "directory": str(served.cwd), "stdin_base64": base64.b64encode(b"typed\n").decode()}
    with client(served) as asking:
        with asking.stream("POST", "/v1/verbs/run", json=asked, headers={"Accept": "text/event-stream"}) as answer:
            text = "".join(answer.iter_text())
        events = [(kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for kind, data in _pairs(text)]
        said = b"".join(_bytes(data) for kind, data in events if kind == "stdout")
        assert said == b"first\n\xc3\xa4\n\xff" and events[-1] == ("end", {"exit": 4})
        assert b"".join(_bytes(data) for kind, data in events if kind == "stderr") == b"typed\n"


def _pairs(text: str) -> Iterator[list[str]]:
    return (event.split("\n") for event in text.strip().split("\n\n"))


def _bytes(data: dict[str, Any]) -> bytes:
    return base64.b64decode(data["base64"]) if "base64" in data else str(data["text"]).encode()


@pytest.mark.parametrize("how", ["document", "events"])
def test_a_client_that_goes_away_ends_what_it_asked_for(served: Shell, how: str) -> None:
    asked = json.dumps({"words": ["sleep 1000"], "options": QUICK, "directory": str(served.cwd)})
    accept = "text/event-stream" if how == "events" else "application/json"
    curl = ["curl", "--silent", "--no-buffer", "--unix-socket", "http", "-H", f"Accept: {accept}", "-d", asked, "http://x/v1/verbs/run"]
    with subprocess.Popen(curl, cwd=place(served).parent, stdout=subprocess.DEVNULL) as asking:
        assert until(lambda: counts(served)["performing"] == 1)
        asking.kill()
    assert until(lambda: counts(served)["performing"] == 0)
    assert counts(served)["lost"] == 1


BAD: list[tuple[str, Any, int]] = [
    ("run", b"{", 400),
    ("run", b"[1]", 400),
    ("run", b"[" * 100_000, 400),
    ("run", {"unknown": 1}, 400),
    ("run", {"words": "echo"}, 400),
    ("run", {"words": ["--version"]}, 400),
    ("run", {"words": ["a\0b"]}, 400),
    ("run", {"words": ["true"], "program": ["true"]}, 400),
    ("status", {"program": ["true"]}, 400),
    ("run", {"words": ["true"], "options": {"--no-such": True}}, 400),
    ("run", {"words": ["true"], "options": {"--json": True}}, 400),
    ("run", {"words": ["true"], "options": {"--timeout": True}}, 400),
    ("run", {"words": ["true"], "options": {"--throw-away": "yes"}}, 400),
    ("run", {"words": ["true"], "directory": "here"}, 400),
    ("run", {"words": ["true"], "directory": "/no/such/directory"}, 404),
    ("run", {"words": ["true"], "directory": "/\ud800"}, 400),
    ("run", {"words": ["\ud800"]}, 400),
    ("run", {"program": ["echo", "\ud800"]}, 400),
    ("run", {"words": ["true"], "options": {"--env": "A=\ud800"}}, 400),
    ("run", {"words": ["true"], "options": {"--throw-away": [True]}}, 400),
    ("run", {"words": ["true"], "options": None}, 400),
    ("run", {"words": ["true"], "environment": {"A": "\ud800"}}, 400),
    ("run", {"words": ["true"], "environment": {"A=B": "1"}}, 400),
    ("run", {"words": ["true"], "environment": {"": "1"}}, 400),
    ("run", {"words": ["true"], "stdin": "a", "stdin_base64": ""}, 400),
    ("run", b'{"words": ["true"], "words": ["echo 2"]}', 400),
    ("run", b'{"words": ["true"], "stdin": ' + b"1" * 5000 + b"}", 400),
    ("run", json.dumps({"words": ["true"]}).encode("utf-16"), 400),
    ("log", {"options": {"--follow": True}}, 406),
    ("approve", {"options": {"--watch": True}}, 406),
    ("run", {"words": ["true"], "directory": "/\0"}, 400),
    ("run", {"words": ["true"], "environment": {"A": 1}}, 400),
    ("run", {"words": ["true"], "stdin_base64": "*"}, 400),
    ("run", b"x" * (17 << 20), 413),
    ("shell", {}, 404),
    ("serve", {}, 404),
    ("no-such", {}, 404),
]


def test_what_cannot_be_understood_is_refused_with_a_reason(served: Shell) -> None:
    with client(served) as asking:
        for verb, body, status in BAD:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = asking.post(f"/v1/verbs/{verb}", content=content)
            assert answer.status_code == status, (verb, body)
            assert answer.json()["schema"] == "agent-sandbox/problem/1" and answer.json()["message"]
        assert asking.post("/v1/verbs/run", json={"words": ["true"], "options": QUICK}).status_code == 200
        assert counts(served)["performed"] == 1, "none of the others was performed"


def _poured(link: socket.socket, head: str, piece: bytes, most: int) -> tuple[bytes, int]:
    """Send a body without an end. Return the answer, and how much of the body was taken before the other side closed the connection."""
    link.sendall(f"POST /v1/verbs/run HTTP/1.1\r\nHost: 127.0.0.1:1\r\n{head}\r\n".encode())
    answer, taken = b"", 0
    with suppress(ConnectionError):
        while taken < most:
            readable, writable, _ = select.select([link], [link], [])
            if readable:
                if not (part := link.recv(4096)):
                    break
                answer += part
            elif writable:
                taken += link.send(piece[taken % len(piece) :])
    return answer, taken


def test_a_body_that_is_too_large_is_refused_at_once_and_not_read_to_its_end(served: Shell, port: int, token_file: Path) -> None:
    buffers = 16 << 20  # what the kernel takes for one who does not read, and more
    large, piece = 100 << 20, b"10000\r\n" + b" " * 65536 + b"\r\n"
    bearing = f"Authorization: Bearer {token_file.read_text().strip()}\r\n"
    pours = {
        "length": (f"{bearing}Content-Length: {large}\r\n", b"413", buffers),
        "chunks": (f"{bearing}Transfer-Encoding: chunked\r\n", b"413", (16 << 20) + buffers),
        "no token": ("Transfer-Encoding: chunked\r\n", b"401", buffers),
    }
    for how, (head, status, most) in pours.items():
        with socket.create_connection(("127.0.0.1", port)) as link:
            answer, taken = _poured(link, head, piece, large)
            assert answer.startswith(b"HTTP/1.1 " + status), (how, answer[:100])
            assert taken <= most, how
    with client(served) as asking:  # the control arm
        assert asking.post("/v1/verbs/list", content=b"{}" + b" " * (15 << 20)).status_code == 200


def test_only_who_bears_the_token_is_heard_on_a_port(served: Shell, port: int, token_file: Path) -> None:
    url, body = f"http://127.0.0.1:{port}/v1/verbs/run", {"words": ["echo 1"], "options": QUICK, "directory": str(served.cwd)}
    token = token_file.read_text().strip()
    wrong = ["", "Bearer", f"Bearer {token}x", f"Bearer {token[:-1]}", f"Basic {token}", token]
    for given in wrong:
        answer = httpx.post(url, json=body, headers={"Authorization": given} if given else {})
        assert answer.status_code == 401, given
    assert httpx.get(f"http://127.0.0.1:{port}/metrics").status_code == 401
    bearing = {"Authorization": f"Bearer {token}"}
    for page in ({"Host": f"rebound.example:{port}"}, {"Host": "127.0.0.1"}, {"Origin": "https://page.example"}, {"Origin": "null"}):
        answer = httpx.post(url, json=body, headers={**bearing, **page})
        assert answer.status_code == 403, page
    assert counts(served)["performed"] == 0
    right = httpx.post(url, json=body, headers=bearing, timeout=None)
    assert right.status_code == 200 and right.json()["result"]["stdout"] == "1\n", "the control arm"
    assert token_file.stat().st_mode & 0o777 == 0o600 and place(served).stat().st_mode & 0o777 == 0o600


@pytest.mark.both
@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--listen", "0.0.0.0:8765", "--token-file", "t"), "no address of this machine's own"),
        (("--listen", "127.0.0.1:8765"), "needs --token-file"),
        (("--listen", "127.0.0.1:none", "--token-file", "t"), "no address of this machine's own"),
        (("--listen", "127.0.0.1:8765", "--token-file", "{state}/open"), "others can read or change the token"),
        (("--listen", "127.0.0.1:8765", "--token-file", "{state}/short"), "too short"),
        (("--listen", "127.0.0.1:8765", "--token-file", "t"), "a sandbox could read the token"),
        (("--listen", "127.0.0.1:8765", "--token-file", "{state}/leads-out"), "a sandbox could read the token"),
        (("--token-file", "t"), "--token-file is for --listen"),
        (("--status", "--http"), "about a daemon that runs"),
    ],
)
def test_an_unsafe_door_is_not_opened(shell: Shell, options: tuple[str, ...], why: str) -> None:
    state = Path(shell.env["AGENT_SANDBOX_STATE"])
    state.mkdir()
    (state / "open").write_text("a-token-that-is-long-enough")
    (state / "open").chmod(0o644)
    (state / "short").touch(mode=0o600)
    (state / "leads-out").symlink_to(shell.cwd / "t")
    refused = shell("serve", *(word.format(state=state) for word in options))
    assert refused.returncode == 2 and why in words(refused)


def _memory(pid: int) -> int:
    """Return the memory that only this process uses, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def test_a_capability_of_who_started_the_daemon_is_not_lent_to_who_asks(shell: Shell) -> None:
    """A capability is never passed into a sandbox, so the refusal tells whether a command line has one."""
    body = {"words": ["true"], "options": {**QUICK, "--env": "AGENT_SANDBOX_CAPABILITY"}, "directory": str(shell.cwd)}
    own = {"environment": {"AGENT_SANDBOX_CAPABILITY": "cap1.another"}}
    started = Shell(shell.cwd, {**shell.env, "AGENT_SANDBOX_CAPABILITY": "cap1.token"})
    with serving(started, "--http"), client(shell) as asking:
        assert until(lambda: answers(asking))
        without, bearing = (asking.post("/v1/verbs/run", json=each).json() for each in (body, {**body, **own}))
    assert "the variable is not set" in without["result"]["error"]["message"]
    assert "the variable is not set" not in bearing["result"]["error"]["message"], "the control arm: its own"


def test_a_stream_that_nobody_reads_holds_up_only_its_own_program(served: Shell) -> None:
    much, bound = 40 << 20, 20 << 20
    asked = json.dumps({"words": [f"yes | head -c {much}"], "options": QUICK, "directory": str(served.cwd)})
    head = f"POST /v1/verbs/run HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\nContent-Length: {len(asked)}\r\n\r\n"
    (front,) = (pid for pid in children(counts(served)["pid"]) if not children(pid))
    with client(served) as asking, socket.socket(socket.AF_UNIX) as link:
        before = _memory(front)
        directory = os.open(place(served).parent, os.O_PATH)
        link.connect(f"/proc/self/fd/{directory}/http")
        os.close(directory)
        link.sendall(head.encode() + asked.encode())
        assert until(lambda: counts(served)["performing"] == 1)
        for _ in range(3):
            told = asking.post("/v1/verbs/run", json={"words": ["echo 1"], "options": QUICK, "directory": str(served.cwd)})
            assert told.json()["result"]["stdout"] == "1\n"
        assert counts(served)["performing"] == 1, "it has not ended: it waits for its reader"
        assert _memory(front) < before + bound
        read, last = 0, b""
        while b"event: end" not in last:
            last = last[-100:] + (part := link.recv(1 << 20))
            read += len(part)
        assert read > much and b'"exit": 0' in last, "the control arm: read, it goes on to its end"


def test_many_at_once_are_all_answered(served: Shell) -> None:
    with client(served) as asking, ThreadPoolExecutor(50) as crowd:
        body = {"words": ["echo $RANDOM"], "options": QUICK, "directory": str(served.cwd)}
        told = list(crowd.map(lambda _: asking.post("/v1/verbs/run", json=body).json()["exit"], range(50)))
    assert told == [0] * 50 and counts(served)["performed"] == 50


def test_its_description_is_of_what_it_serves(served: Shell) -> None:
    with client(served) as asking:
        description = asking.get("/v1/openapi.json").json()
        assert description["openapi"].startswith("3.1") and "/v1/verbs/run" in description["paths"]
        assert "--timeout" in json.dumps(description["paths"]["/v1/verbs/run"])
        assert asking.get("/v1/state").json()["running"] is True
        assert "agent_sandbox_performed_total 0\n" in asking.get("/metrics").text
        for path in description["paths"]:
            answer = asking.options(path)
            assert answer.status_code == 405, f"{path} is described but not served"


@pytest.mark.both
def test_a_program_in_a_sandbox_cannot_ask_over_http(served: Shell) -> None:
    ask = f"import os, socket; os.chdir({str(place(served).parent)!r}); socket.socket(socket.AF_UNIX).connect('http'); print('asked')"
    outside = subprocess.run([sys.executable, "-c", ask], capture_output=True, check=False)
    assert outside.stdout == b"asked\n", "the control arm"
    inside = served("run", "--reveal", str(place(served).parent), "--", sys.executable, "-c", ask)
    assert b"asked" not in inside.stdout and inside.returncode != 0


def test_a_sandbox_runs_on_between_requests(served: Shell) -> None:
    with client(served) as asking:

        def ask(verb: str, **fields: Any) -> dict[str, Any]:
            told: dict[str, Any] = asking.post(f"/v1/verbs/{verb}", json={"directory": str(served.cwd), **fields}).json()
            return told

        begun = ask("run", words=["echo up; sleep 1000"], options={"--detach": True})
        name = begun["result"]["name"]
        assert begun["exit"] == 0 and [each["name"] for each in ask("ps")["result"]["sandboxes"]] == [name]
        assert ask("exec", words=[name], program=["sh", "-c", "echo $0", "said"])["result"]["stdout"] == "said\n"
        assert ask("exec", words=[name, "more"], program=["true"])["status"] == 400
        assert "agent_sandbox_held 1\n" in asking.get("/metrics").text
        assert ask("stop", words=[name], options={"--timeout": "0"})["result"]["stopped"][0]["name"] == name
        assert until(lambda: "agent_sandbox_held 0\n" in asking.get("/metrics").text)
        assert "agent_sandbox_held_ended_total 1\n" in asking.get("/metrics").text
        assert ask("logs", words=[name])["result"]["output"][0]["data"] == "up\n"
