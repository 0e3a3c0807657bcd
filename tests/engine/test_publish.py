"""Published ports of real guests: open while the run goes on, to this machine alone, and recorded."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import pytest

from agent_sandbox._fast.values import replace
from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.publish import PublishedRecord
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.runtimes import only
from agent_sandbox.engine.turns import InterpreterTurns, Turn
from agent_sandbox.engine.work import Code, Command, Outcome, Work
from agent_sandbox.errors import LedgerUnavailable, PolicyError
from agent_sandbox.ledger.event import Noted
from agent_sandbox.ledger.writer import Ledger
from agent_sandbox.policy.model import Policy, cloned, locked
from agent_sandbox.policy.network import network_rules
from agent_sandbox.policy.publications import Publication
from agent_sandbox.runtime.process.runtime import ProcessRuntime
from tests.ledger.samples import read
from tests.patience import until

ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
INNER = 3000
INWARD = network_rules(inbound=True)
# Serves two pages, then ends. `/machine` is what became of a connection to the machine's port from inside.
SERVER = f"""
import http.server, socket, sys
class Pages(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        text = "hello"
        if self.path.startswith("/machine"):
            try:
                socket.create_connection(("127.0.0.1", int(self.path.partition("?")[2])), 5)
                text = "reached"
            except OSError as error:
                text = type(error).__name__
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", {INNER}), Pages)
"""
TWO_PAGES = SERVER + "server.handle_request(); server.handle_request()"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


def get(port: int, path: str = "/", host: str | None = None) -> tuple[int, str] | str:
    """Return the status and text of a page, or the kind of error."""
    with closing(HTTPConnection("127.0.0.1", port, timeout=60)) as client:
        try:
            client.request("GET", path, headers={} if host is None else {"Host": host})
            answer = client.getresponse()
            return answer.status, answer.read().decode()
        except (OSError, HTTPException) as error:
            return type(error).__name__


def got(port: int, path: str = "/") -> tuple[int, str] | str:
    """Return a page of a server that may still be starting."""
    answer: tuple[int, str] | str = ""

    def serves() -> bool:
        nonlocal answer
        answer = get(port, path)
        return answer[0] != 502

    until(serves)
    return answer


@pytest.fixture
def runtime() -> Iterator[ProcessRuntime]:
    made = ProcessRuntime()
    yield made
    made.close()


class Running:
    """A run in a thread of its own."""

    def __init__(self, runtime: ProcessRuntime, ledger: Path, work: Work, policy: Policy | None = None) -> None:
        gate = Gate(policy or cloned(masks=(), network=INWARD), Ledger(ledger, clock=lambda: 0.0), clock=lambda: 0.0)
        self.outcome: Outcome | None = None
        self.session = Session(gate, only(runtime))
        self._thread = threading.Thread(target=self._run, args=(work,))
        self._thread.start()

    def _run(self, work: Work) -> None:
        self.outcome = self.session.run(work)

    def wait(self) -> Outcome:
        self._thread.join(120)
        assert self.outcome is not None
        return self.outcome


def work(port: int, code: str = TWO_PAGES) -> tuple[Work, threading.Event]:
    opened = threading.Event()
    publish = (Publication(port, INNER),)
    return Work(Command((sys.executable, "-c", code)), ENV, publish=publish, on_publish=lambda _: opened.set()), opened


def notes(ledger: Path) -> list[tuple[str, object]]:
    return [(entry.event.what, entry.event.facts["target"]) for entry in read(ledger) if isinstance(entry.event, Noted)]


def test_a_server_of_the_run_is_reached_at_the_published_port_while_it_runs_and_that_is_recorded(
    runtime: ProcessRuntime, tmp_path: Path
) -> None:
    port = free_port()
    assert get(port) == "ConnectionRefusedError", "the control: nobody is there before"
    todo, opened = work(port)
    running = Running(runtime, tmp_path / "ledger", todo)
    assert opened.wait(60)
    assert got(port) == (200, "hello")
    turned_away = get(port, host="evil.example")
    assert turned_away[0] == 421 and "evil.example" in turned_away[1]
    assert get(port, f"/machine?{port}") == (200, "ConnectionRefusedError"), "from inside, the port of the machine is not there"
    outcome = running.wait()
    assert get(port) == "ConnectionRefusedError", "it ends with the run"
    (record,) = outcome.published
    assert (record.port, record.inner, record.requests) == (port, INNER, 2) and record.turned_away >= 1
    assert any("evil.example" in note for note in outcome.notes)
    target = f"127.0.0.1:{port}"
    told = notes(tmp_path / "ledger")
    assert told[0] == ("network.published", target) and told[-1] == ("network.visited", target)
    assert ("network.turned-away", target) in told


def test_no_other_address_of_the_machine_is_listened_on(runtime: ProcessRuntime, tmp_path: Path) -> None:
    port = free_port()
    todo, opened = work(port, "input()")
    ends, ours = socket.socketpair()
    with ends, ours:
        running = Running(runtime, tmp_path / "ledger", replace(todo, stdin=ends.fileno()))
        assert opened.wait(60)
        for other in ("127.0.0.2", "::1"):
            with pytest.raises(OSError):
                socket.create_connection((other, port), 5)
        socket.create_connection(("127.0.0.1", port), 5).close()  # the control
        ours.send(b"\n")
        running.wait()


def test_a_port_in_use_refuses_the_run_before_anything_starts(runtime: ProcessRuntime, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        todo, opened = work(port, "pass")
        gate = Gate(cloned(masks=(), network=INWARD), Ledger(tmp_path / "ledger", clock=lambda: 0.0), clock=lambda: 0.0)
        with pytest.raises(PolicyError, match=f"port {port} of this machine is in use"):
            Session(gate, only(runtime)).run(todo)
    assert not opened.is_set() and notes(tmp_path / "ledger") == []
    assert Session(gate, only(runtime)).run(todo).exit.code == 0, "the control: a moment later it is free"


def test_a_policy_without_inbound_connections_publishes_nothing(runtime: ProcessRuntime, tmp_path: Path) -> None:
    port = free_port()
    todo, opened = work(port)
    gate = Gate(cloned(masks=()), Ledger(tmp_path / "ledger", clock=lambda: 0.0), clock=lambda: 0.0)
    with pytest.raises(PolicyError, match="permits no published ports"):
        Session(gate, only(runtime)).run(todo)
    assert not opened.is_set() and get(port) == "ConnectionRefusedError"


def test_a_port_does_not_lead_to_the_door_of_the_sandbox(runtime: ProcessRuntime, tmp_path: Path) -> None:
    rules = network_rules(outbound=True, inbound=True, hosts=["db.example:3000"])
    gate = Gate(cloned(masks=(), network=rules), Ledger(tmp_path / "ledger", clock=lambda: 0.0), clock=lambda: 0.0)
    with pytest.raises(PolicyError, match="port 3000 of the sandbox is where its connections outward arrive"):
        Session(gate, only(runtime)).run(work(free_port())[0])


def test_what_cannot_be_recorded_is_not_published(runtime: ProcessRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    todo, opened = work(port)
    gate = Gate(cloned(masks=(), network=INWARD), Ledger(tmp_path / "ledger", clock=lambda: 0.0), clock=lambda: 0.0)

    def fail(what: str, facts: object) -> None:
        raise LedgerUnavailable("the disk is full", hint="make room")

    monkeypatch.setattr(gate, "note", fail)
    with pytest.raises(LedgerUnavailable):
        Session(gate, only(runtime)).run(todo)
    assert not opened.is_set() and get(port) == "ConnectionRefusedError"


def test_a_run_that_ends_in_the_middle_ends_its_connections(runtime: ProcessRuntime, tmp_path: Path) -> None:
    port = free_port()
    half = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"
    todo, opened = work(port, f"{SERVER}connection, _ = server.socket.accept(); connection.recv(1000); connection.send({half!r})")
    running = Running(runtime, tmp_path / "ledger", todo)
    assert opened.wait(60)
    assert got(port) in ("IncompleteRead", "ConnectionResetError")
    assert running.wait().exit.code == 0
    assert get(port) == "ConnectionRefusedError"


def test_in_a_session_the_port_stays_open_between_turns_until_it_is_closed(runtime: ProcessRuntime, tmp_path: Path) -> None:
    port = free_port()
    gate = Gate(locked(network=INWARD), Ledger(tmp_path / "ledger", clock=lambda: 0.0), clock=lambda: 0.0)
    turns = InterpreterTurns(Session(gate, only(runtime)), Work(Code("python", ""), ENV, publish=(Publication(port, INNER),)))
    serving = SERVER + "import threading; threading.Thread(target=server.serve_forever, daemon=True).start()"
    first = turns.run(Turn(serving)).outcome
    assert first.published == (PublishedRecord(port, INNER),)
    assert got(port) == (200, "hello")
    second = turns.run(Turn("1")).outcome
    assert second.published == (PublishedRecord(port, INNER, requests=1, sent=5),), "what was asked between the turns"
    turns.close()
    assert get(port) == "ConnectionRefusedError"
