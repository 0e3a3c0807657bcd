"""Bad input, and clients that go away: clear errors, and nothing left running."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from httpx2 import AsyncClient
from mcp.client.streamable_http import streamable_http_client

from tests.e2e.program import PROGRAM, processes_with
from tests.mcp.client import HANDSHAKE, MODERN, TOKEN, Model, Place, Wire, connected, port, run, text_of

INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "tests", "version": "1"}},
}
HEADERS = {
    "Authorization": f"Bearer {TOKEN}",
    "Content-Type": "application/json",
    "Accept": "application/json, text/event-stream",
}
META = {
    "io.modelcontextprotocol/protocolVersion": MODERN,
    "io.modelcontextprotocol/clientInfo": {"name": "tests", "version": "1"},
    "io.modelcontextprotocol/clientCapabilities": {},
}


def sleeping(marker: str) -> dict[str, Any]:
    """The call of a tool that does not end by itself, with a word on its command line."""
    return {"name": "run", "arguments": {"command": f"exec -a {marker} sleep 10000"}}


def wait_until(condition: Callable[[], object]) -> None:
    """Wait as long as the test may take."""
    while not condition():
        time.sleep(0.05)


def test_what_is_no_message_is_answered_with_an_error(place: Place) -> None:
    wire = Wire(place)
    for line, number, code in (
        (b"{not json", None, -32700),
        (b"[" * 100_000, None, -32700),
        (b'["a list"]', None, -32600),
        (b'{"jsonrpc": "1.0", "id": 5, "method": "ping"}', 5, -32600),
        (b"x" * (9 << 20), None, -32600),
    ):
        wire.write(line)
        answer = wire.answer()
        assert (answer["id"], answer["error"]["code"]) == (number, code)
    assert wire.shake_hands("1999-01-01")["result"]["protocolVersion"] == "2025-11-25"  # an unknown version: ours is offered

    def called(arguments: object, name: str = "run") -> dict[str, Any]:
        wire.send("tools/call", {"name": name, "arguments": arguments}, 2)
        return wire.answer()

    assert called({}, "no such tool")["error"]["code"] == -32602
    assert called([1])["error"]["code"] == -32602
    wire.send("no/such/method", {}, 2)
    assert wire.answer()["error"]["code"] == -32601
    for wrong in ({"command": 5}, {"command": "x", "bogus": 1}, {"command": "x" * (2 << 20)}, {}, {"command": "a", "code": "b"}):
        result = called(wrong)["result"]
        assert result["isError"] and len(json.dumps(result)) < 3000
    wire.send("resources/read", {"uri": "file:///etc/shadow"}, 2)
    assert wire.answer()["error"]["code"] == -32602
    wire.write(b'{"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "read", "arguments": {"path": "\\ud800"}}}')
    assert "error" in wire.answer()
    assert called({"command": "echo still here"})["result"]["structuredContent"]["stdout"] == "still here\n"
    assert wire.close() == ""


def test_a_number_counts_by_its_value_and_what_is_none_is_refused(place: Place) -> None:
    wire = Wire(place)
    wire.shake_hands()

    def call(tool: str, arguments: str) -> dict[str, Any]:
        wire.write(
            b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"%s","arguments":%s}}' % (tool.encode(), arguments.encode())
        )
        found: dict[str, Any] = wire.answer()["result"]["structuredContent"]
        return found

    (place.project / "lines.txt").write_text("one\ntwo\nthree\n")
    for written in ('2, "limit": 1', '2.0, "limit": 1.0', '20e-1, "limit": 0.1e1'):
        assert call("read", f'{{"path": "lines.txt", "offset": {written}}}')["text"] == "two"
    assert call("read", '{"path": "lines.txt", "limit": 1e300}')["text"] == "one\ntwo\nthree\n"
    for broken in ("NaN", "Infinity", "1e400", "1.5"):
        refused = call("read", f'{{"path": "lines.txt", "limit": {broken}}}')
        assert refused["error"]["kind"] == "InvalidArguments", broken
    for unending in ("NaN", "1e400"):
        assert call("run", f'{{"command": "true", "timeout_seconds": {unending}}}')["error"]["kind"] == "InvalidArguments"
        asked = call("request", f'{{"programs": ["seq"], "reason": "to count", "minutes": {unending}}}')
        assert asked["error"]["kind"] == "InvalidArguments"
    assert wire.close() == ""


def test_a_cancelled_call_and_a_client_that_goes_away_leave_nothing(place: Place) -> None:
    wire = Wire(place)
    wire.shake_hands()
    first, second = f"cancelled-{place.project.parent.name}", f"abandoned-{place.project.parent.name}"
    wire.send("tools/call", sleeping(first), 2)
    wait_until(lambda: processes_with(first))
    wire.send("notifications/cancelled", {"requestId": 2})
    wait_until(lambda: not processes_with(first))
    wire.send("tools/call", {"name": "run", "arguments": {"command": "echo next"}}, 3)
    while (answer := wire.answer())["id"] != 3:
        pass
    assert answer["result"]["structuredContent"]["stdout"] == "next\n"
    wire.send("tools/call", sleeping(second), 4)
    wait_until(lambda: processes_with(second))
    assert wire.close() == ""
    wait_until(lambda: not processes_with(second))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_and_its_run(place: Place, number: signal.Signals) -> None:
    wire = Wire(place)
    wire.shake_hands()
    marker = f"signalled-{place.project.parent.name}-{number.name}"
    wire.send("tools/call", sleeping(marker), 2)
    wait_until(lambda: processes_with(marker))
    wire.server.send_signal(number)
    assert wire.server.wait() == 0
    wait_until(lambda: not processes_with(marker))
    wire.close()


def exchanged(url: str, body: bytes, **changes: str) -> tuple[int, dict[str, str], bytes]:
    """Send one request. A header that is changed to nothing is left out."""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
    try:
        headers = {name: value for name, value in {**HEADERS, **changes}.items() if value}
        connection.request("POST", place.path, body, headers)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def test_the_port_refuses_strangers_and_ends_what_nobody_waits_for(place: Place) -> None:
    body = json.dumps(INITIALIZE).encode()
    with port(place) as url:
        assert exchanged(url, body)[0] == 200  # the control: with everything right it answers
        for changes, status in (
            ({"Authorization": ""}, 401),
            ({"Authorization": f"Bearer {TOKEN}x"}, 401),
            ({"Authorization": f"Basic {TOKEN}"}, 401),
            ({"Host": "evil.example"}, 421),
            ({"Origin": "http://evil.example"}, 403),
        ):
            assert exchanged(url, body, **changes)[0] == status, changes
        assert exchanged(url, b"{bad")[0] == 400
        with suppress(BrokenPipeError):  # it may answer and close before everything is sent
            assert exchanged(url, b"x" * (5 << 20))[0] == 413
        unknown = exchanged(url, body.replace(b"initialize", b"tools/list"), **{"Mcp-Protocol-Version": "1999-01-01"})
        assert unknown[0] == 400
        with ExitStack() as stack:  # strangers who say nothing keep nobody out
            for _ in range(300):
                stack.enter_context(socket.create_connection((urlsplit(url).hostname, urlsplit(url).port)))
            assert exchanged(url, body)[0] == 200

        _, headers, _ = exchanged(url, body)
        handshake = {"Mcp-Session-Id": headers["mcp-session-id"], "Mcp-Protocol-Version": "2025-11-25"}
        assert exchanged(url, b'{"jsonrpc": "2.0", "method": "notifications/initialized"}', **handshake)[0] == 202
        modern = {"Mcp-Protocol-Version": MODERN, "Mcp-Method": "tools/call", "Mcp-Name": "run"}
        for own, meta in ((handshake, {}), (modern, {"_meta": META})):
            marker = f"gone-{len(own)}-{place.project.parent.name}"
            call = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {**sleeping(marker), **meta}}
            address = urlsplit(url)
            with socket.create_connection((address.hostname, address.port)) as connection:
                content = json.dumps(call).encode()
                given = {"Host": address.netloc, "Content-Length": str(len(content)), **HEADERS, **own}
                head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
                connection.sendall(f"POST {address.path} HTTP/1.1\r\n{head}\r\n".encode() + content)
                wait_until(lambda marker=marker: processes_with(marker))  # type: ignore[misc]
            wait_until(lambda marker=marker: not processes_with(marker))  # type: ignore[misc]


@pytest.mark.parametrize("mode", [HANDSHAKE, MODERN])
def test_a_real_client_works_over_http_and_what_runs_never_has_the_token(place: Place, mode: str) -> None:
    async def talk(url: str) -> None:
        async with AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60) as web:
            transport = streamable_http_client(url, http_client=web)
            async with connected(transport, mode, None) as model:
                await used(model)

    async def used(model: Model) -> None:
        assert model.client.protocol_version == (MODERN if mode == MODERN else "2025-11-25")
        run = await model("run", command="env; cat /proc/self/environ; echo here > new.txt")
        assert not run.is_error and TOKEN not in text_of(run) and "PATH=" in text_of(run)
        assert "+here" in text_of(await model("diff"))

    with port(place) as url:
        run(lambda: talk(url))


def test_only_local_addresses_and_good_tokens_are_served(place: Place, tmp_path: Path) -> None:
    for address in ("0.0.0.0:8765", "192.0.2.1:80", "127.0.0.1", "127.0.0.1:99999", "example.com:80"):
        done = place.program("mcp", "--listen", address)
        assert done.returncode == 2 and "local address" in done.stderr
    env = {**place.environment, "AGENT_SANDBOX_MCP_TOKEN": "short"}
    done = subprocess.run([*PROGRAM, "mcp", "--listen", "127.0.0.1:0"], cwd=place.project, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "at least 16" in done.stderr and "short" not in done.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = place.program("mcp", "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
        assert done.returncode == 2 and "cannot be used" in done.stderr


def test_without_its_extra_the_verb_names_it(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    from agent_sandbox.cli.commands import mcp
    from agent_sandbox.cli.main import main

    monkeypatch.setattr(mcp, "find_spec", lambda name: None)
    assert main(["mcp"]) == 125
    said = capfd.readouterr().err
    assert " install " in said and "'mcp<3,>=2.3'" in said and "entersandbox" not in said, "an index need not have this program"
