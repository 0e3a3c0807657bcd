"""Attacks on the control plane: the daemon's sockets, its port and its token, from inside a sandbox, from a page, and across its death."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from agent_sandbox.cli import errand
from tests.e2e.program import Shell, words
from tests.e2e.test_asking import question
from tests.e2e.test_daemon import connected, counts, serving
from tests.patience import until
from tests.security.conftest import Tell
from tests.security.harness import case

# The daemon is the same for everybody: as root in `make test`, for others in `make torture`.
AS_ROOT = pytest.mark.torture if os.geteuid() else pytest.mark.slow
ASKING = '[approvals]\ncommands = ["touch marked-*"]\n'
# Have a snapshot made, by each address that may lead to the port and each socket; print which of them answered.
ASK = """
import http.client, json, os, socket, sys
port, token, directory, place, reached = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], []
class Unix(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        os.chdir(place)
        self.sock.connect("http")
ways = [http.client.HTTPConnection(name, port, timeout=30) for name in ("127.0.0.1", "localhost", "::1", "0.0.0.0", socket.gethostname())]
for number, link in enumerate([*ways, Unix("daemon")]):
    try:
        headers = {"Authorization": f"Bearer {token}", "Host": f"127.0.0.1:{port}"}
        link.request("POST", "/v1/verbs/snapshot", json.dumps({"directory": directory}), headers)
        if link.getresponse().status == 200:
            reached.append(number)
    except OSError:
        pass
print(json.dumps(reached))
"""
FIND = """
import json, os, sys
needle, found = sys.argv[1].encode(), []
for top in sys.argv[2:]:
    for place, _, names in os.walk(top):
        for name in names:
            try:
                if needle in open(os.path.join(place, name), "rb").read(1 << 20):
                    found.append("file")
            except OSError:
                pass
for pid in filter(str.isdecimal, os.listdir("/proc")):
    for name in ("environ", "cmdline"):
        try:
            if int(pid) != os.getpid() and needle in open(f"/proc/{pid}/{name}", "rb").read():
                found.append(name)
        except OSError:
            pass
print(json.dumps(sorted(set(found))))
"""


@pytest.fixture
def shell(project: Path, tmp_path: Path) -> Shell:
    """Somebody standing in a project, with a home and a state directory of their own."""
    (tmp_path / "home/.config/agent-sandbox").mkdir(parents=True)
    return Shell(project, {"AGENT_SANDBOX_STATE": str(tmp_path / "state"), "HOME": str(tmp_path / "home")})


class Door:
    """The port of a daemon, and its token."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self.file = Path(shell.env["AGENT_SANDBOX_STATE"], "token")

    @property
    def token(self) -> str:
        return self.file.read_text().strip()

    def snapshots(self) -> int:
        return len(self.shell.json("snapshots")["snapshots"])


@pytest.fixture
def door(shell: Shell) -> Iterator[tuple[Door, int]]:
    made = Door(shell)
    assert shell("run", "touch changed").returncode == 0
    with shell.start("serve", "--listen", "127.0.0.1:0", "--token-file", str(made.file)) as daemon:
        assert daemon.stderr is not None
        port = next(
            int(word.rstrip(",").rpartition(":")[2]) for line in daemon.stderr for word in line.decode().split() if "127.0.0.1:" in word
        )
        yield made, port
        daemon.terminate()
        daemon.communicate()


@case(95)
def test_a_guest_with_the_token_and_a_network_does_not_reach_the_daemon(number: int, door: tuple[Door, int], tell: Tell) -> None:
    """Everything that it could have stolen is given to it: the token, the port, the place of the socket, and every public host."""
    made, port = door
    state = made.shell.env["AGENT_SANDBOX_STATE"]
    place = Path(state, errand.PLACE)
    asking = (sys.executable, "-c", ASK, str(port), made.token, str(made.shell.cwd), str(place))
    before = made.snapshots()
    for options in (("--reveal", state), ("--allow-network", "--reveal", state)):
        inside = made.shell("run", "--throw-away", *options, "--", *asking)
        assert inside.stdout.splitlines()[-1:] == [b"[]"], (inside.stdout, inside.stderr)
    assert made.snapshots() == before
    outside = json.loads(subprocess.run(asking, capture_output=True, check=True).stdout)
    assert {0, 1, 5} <= set(outside) and made.snapshots() == before + len(outside)
    tell("no address and no socket answers; no snapshot was made", control=f"{len(outside)} snapshots by the same program outside")


@case(94)
def test_a_guest_does_not_find_the_token_of_the_port(number: int, door: tuple[Door, int], tell: Tell) -> None:
    made, _ = door
    find = (sys.executable, "-c", FIND, made.token, made.shell.env["HOME"], made.shell.env["AGENT_SANDBOX_STATE"], str(made.shell.cwd))
    inside = made.shell("run", "--throw-away", "--", *find)
    assert inside.stdout == b"[]\n", (inside.stdout, inside.stderr)
    outside = json.loads(subprocess.run(find, capture_output=True, check=True).stdout)
    assert outside == ["file"], "it is in its file, and in no command line and no environment"
    tell("nothing found", control="outside it is found in its file, and only there")


@case(94)
@AS_ROOT
def test_no_log_and_no_record_holds_a_token_right_or_wrong(number: int, shell: Shell, tell: Tell) -> None:
    file = Path(shell.env["AGENT_SANDBOX_STATE"], "token")
    guess = "a-token-of-somebody-who-guesses"
    with shell.start("serve", "--log", "json", "--listen", "127.0.0.1:0", "--token-file", str(file)) as daemon:
        assert daemon.stderr is not None
        port = int(json.loads(daemon.stderr.readline())["port"].rpartition(":")[2])
        token = file.read_text().strip()
        url, body = f"http://127.0.0.1:{port}", json.dumps({"directory": str(shell.cwd)})
        asked = [
            httpx.post(f"{url}/v1/verbs/list", content=body, headers={"Authorization": f"Bearer {token}"}, timeout=None),
            httpx.post(f"{url}/v1/verbs/list", content=body, headers={"Authorization": f"Bearer {guess}"}, timeout=None),
            httpx.get(f"{url}/{token}/{guess}?token={token}", headers={"Authorization": f"Bearer {token}"}, timeout=None),
        ]
        assert [each.status_code for each in asked] == [200, 401, 404]
        with socket.create_connection(("127.0.0.1", port)) as link:  # no request at all, which the server would complain about
            link.sendall(f"{token} {guess}\r\n\r\n".encode())
            assert b"400" in link.recv(100)
        daemon.terminate()
        said = daemon.communicate()[1]
    found = {path.name for path in file.parent.rglob("*") if path.is_file() and {token.encode(), guess.encode()} & _words(path)}
    assert token.encode() not in said and guess.encode() not in said
    assert found == {"token"}, "the control arm: it is found in its own file"
    assert [json.loads(line)["status"] for line in said.splitlines() if b'"request"' in line][:3] == [200, 401, 404]
    tell("in no line of the log, in no file but its own", control="each request is in the log, and the token in its file")


def _words(path: Path) -> set[bytes]:
    return set(re.split(rb"[^\w-]+", path.read_bytes()))


@case(95)
@AS_ROOT
def test_a_page_in_a_browser_cannot_use_the_port(number: int, door: tuple[Door, int], tell: Tell) -> None:
    """A form, a script of another origin, a name that leads to this address, and a WebSocket: with the token, which a page has not, too."""
    made, port = door
    url, right = f"http://127.0.0.1:{port}/v1/verbs/snapshot", {"Authorization": f"Bearer {made.token}"}
    body, before = json.dumps({"directory": str(made.shell.cwd)}), made.snapshots()
    upgrade = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
    }
    pages: list[tuple[dict[str, str], int]] = [
        ({"Content-Type": "text/plain", "Origin": "https://page.example"}, 401),
        ({"Content-Type": "application/x-www-form-urlencoded", "Cookie": f"token={made.token}"}, 401),
        ({**right, "Origin": "https://page.example"}, 403),
        ({**right, "Origin": "null"}, 403),
        ({**right, "Origin": f"http://127.0.0.1:{port}"}, 403),
        ({**right, "Host": f"rebound.example:{port}"}, 403),
        ({**right, "Host": f"127.0.0.1.rebound.example:{port}"}, 403),
        ({**upgrade, **right, "Origin": "https://page.example"}, 403),
        ({**upgrade, "Origin": "https://page.example"}, 401),
    ]
    for headers, status in pages:
        assert httpx.post(url, content=body, headers=headers, timeout=None).status_code == status, headers
    assert httpx.options(url, headers={"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}).status_code == 401
    assert made.snapshots() == before
    assert httpx.post(url, content=body, headers=right, timeout=None).status_code == 200 and made.snapshots() == before + 1
    tell(f"{len(pages)} requests of pages refused, no snapshot made", control="the same request without a page's headers makes one")


@case(92, 149)
@AS_ROOT
def test_an_answer_to_a_daemon_that_was_killed_is_no_answer_to_the_next(number: int, shell: Shell, tell: Tell) -> None:
    (shell.cwd / "agent-sandbox.toml").write_text(ASKING)

    line = "run", "touch marked-file; ls marked-file"
    with serving(shell) as daemon, shell.start(*line) as caller:
        stale = question(shell)
        daemon.kill()
        assert caller.communicate()[0] == b"" and caller.returncode == 125
    shell("approve", stale["digest"], "--yes")  # somebody has the question on their screen still
    assert shell("run", "ls marked-file").returncode == 2, "nothing of it was done"
    with serving(shell), shell.start(*line) as caller:
        assert until(lambda: any(each["digest"] != stale["digest"] for each in shell.json("approve")["waiting"])), "it is asked anew"
        (fresh,) = (each for each in shell.json("approve")["waiting"] if each["digest"] != stale["digest"])
        assert shell("run", "ls marked-file").returncode == 2, "the old answer is none to it"
        assert shell("approve", fresh["digest"], "--yes").returncode == 0
        assert caller.communicate()[0] == b"marked-file\n" and caller.returncode == 0, "the control arm"
    assert shell("log", "verify").returncode == 0
    tell("the late answer did nothing, then or later; the record is whole", control="an answer to the new question is one")


@case(44, 151)
@AS_ROOT
@pytest.mark.parametrize(
    "content", ["{pid}\n", *(pytest.param(text, marks=pytest.mark.torture) for text in ("", "garbage\n", "99999999\n"))]
)
def test_what_a_dead_daemon_left_stops_nobody_and_no_other_process_is_signalled(
    number: int, content: str, shell: Shell, tell: Tell
) -> None:
    """The number in its lock has passed on to another process; its sockets are still there, or are something else."""
    place = Path(shell.env["AGENT_SANDBOX_STATE"], errand.PLACE)
    place.mkdir(parents=True, mode=0o700)
    with subprocess.Popen(["sleep", "1000"]) as stranger:
        try:
            (place / "lock").write_text(content.format(pid=stranger.pid))
            (place / "socket").write_text("no socket")
            (place / "state").symlink_to("/dev/null")
            stopped = shell("serve", "--stop")
            assert stopped.returncode == 0 and b"no daemon runs" in stopped.stdout, words(stopped)
            assert shell("run", "--throw-away", "echo 1").stdout == b"1\n"
            with serving(shell):
                assert shell("run", "--throw-away", "echo 2").stdout == b"2\n" and counts(shell)["performed"] == 1
                assert shell("serve", "--stop").returncode == 0
            assert not counts(shell)["running"]
            assert stranger.poll() is None
        finally:
            stranger.kill()
    tell("nobody was signalled, and the next daemon serves", control="a daemon that runs is ended by the same words")


@case(38)
@AS_ROOT
def test_a_client_of_the_daemon_gets_no_descriptor_and_gives_it_only_its_own(number: int, shell: Shell, tell: Tell) -> None:
    """A client may send any descriptors. The daemon closes those of an invalid request."""
    with serving(shell):
        daemon = counts(shell)["pid"]
        reading, writing = os.pipe()
        before = len(os.listdir(f"/proc/{daemon}/fd"))
        for _ in range(20):
            with connected(shell) as link:
                socket.send_fds(link, [b"\0\0\0\x01x"], [writing] * 100)
                link.settimeout(120)
                assert link.recv(10) == b""
        os.close(writing)
        assert os.read(reading, 1) == b"", "nobody holds a copy"
        os.close(reading)
        assert until(lambda: len(os.listdir(f"/proc/{daemon}/fd")) <= before + 8)
        assert shell("run", "--throw-away", "echo 1").stdout == b"1\n" and counts(shell)["performed"] == 1
    tell("2,000 descriptors sent, none kept, none given back", control="a request is performed beside them")
