"""`--publish`: a dev server of a sandbox, reached by a person of this machine, as typed."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from agent_sandbox import PolicyError, Sandbox, SandboxConfig
from agent_sandbox.runtime.base import Demands
from agent_sandbox.runtime.wasm.runtime import missing_means
from tests.e2e.program import Shell, words
from tests.engine.test_publish import INNER, SERVER, TWO_PAGES, free_port, get, got
from tests.patience import until

pytestmark = pytest.mark.once


@pytest.fixture
def shell(project: Path, tmp_path: Path) -> Shell:
    return Shell(project, {"AGENT_SANDBOX_STATE": str(tmp_path / "state")})


def first_line(process: subprocess.Popen[bytes]) -> str:
    assert process.stderr is not None
    return process.stderr.readline().decode()


@pytest.mark.both
@pytest.mark.parametrize("network", [(), ("--network", "web.test")])
def test_a_server_of_the_sandbox_is_reached_by_its_published_port_and_the_result_tells(shell: Shell, network: tuple[str, ...]) -> None:
    port = free_port()
    with shell.start("run", "--throw-away", "--publish", f"{port}:{INNER}", *network, "--", sys.executable, "-c", TWO_PAGES) as process:
        assert (
            first_line(process)
            == f"agent-sandbox: http://127.0.0.1:{port} is open: it leads to port {INNER} of the sandbox while this runs\n"
        )
        assert got(port) == (200, "hello")
        assert get(port, host=f"evil.example:{port}")[0] == 421
        assert get(port) == (200, "hello")
        assert process.wait(60) == 0
    assert get(port) == "ConnectionRefusedError"
    log = shell("log", "--all", "--category", "network").stdout.decode()
    assert all(f"{what}" in log for what in ("published", "turned-away", "visited", f"127.0.0.1:{port}"))


def test_the_document_of_a_run_holds_the_use_of_its_ports(shell: Shell) -> None:
    port = free_port()
    with shell.start("--json", "run", "--throw-away", "--publish", f"{port}:{INNER}", "--", sys.executable, "-c", TWO_PAGES) as process:
        assert until(lambda: get(port) == (200, "hello")) and get(port) == (200, "hello")
        assert process.stdout is not None
        document = json.loads(process.stdout.read())
    (used,) = document["published"]
    assert (used["port"], used["inner"], used["requests"], used["sent"]) == (port, INNER, 2, 10)
    assert "published" not in shell.json("run", "--throw-away", "--", "true"), "the control"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--publish", "80"), "below 1024"),
        (("--publish", "web"), "not a port to publish"),
        (("--publish", "8000,8000:1"), "published twice"),
        (("--publish", ""), "--publish is empty"),
        (("--publish", "8000", "--simulate"), "does not go with a simulation"),
        (("--publish", "8000", "--diff"), "does not go with --diff"),
        (("--publish", "8000", "--policy", "medium"), "no port may be published: preset medium forbids it"),
    ],
)
def test_a_port_that_cannot_be_published_refuses_the_run(shell: Shell, project: Path, flags: tuple[str, ...], said: str) -> None:
    done = shell("run", *flags, "--", "sh", "-c", "echo it ran")
    assert done.returncode == 2 and said in words(done) and done.stdout == b""


def test_a_port_in_use_refuses_the_run_with_the_remedy(shell: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = shell("run", "--publish", str(port), "--", "echo", "it ran")
    assert done.returncode == 2 and done.stdout == b""
    assert f"port {port} of this machine is in use" in words(done) and "publish another port" in words(done)


def test_code_inside_webassembly_has_no_server(shell: Shell, project: Path) -> None:
    (project / "code.py").write_text("print('it ran')")
    done = shell("code", "--runtime", "wasm", "--throw-away", "--publish", str(free_port()), "code.py")
    assert done.returncode == 125 and done.stdout == b""
    assert missing_means(Demands(inward=True)) == "it has no server that a published port could lead to" and not missing_means(Demands())
    with pytest.raises(PolicyError, match="nothing inside WebAssembly accepts a connection"):
        SandboxConfig(runtime="wasm", publish=[8000])


def test_a_sandbox_of_an_application_publishes_what_its_settings_name() -> None:
    port = free_port()
    with Sandbox(publish=[f"{port}:{INNER}"], validate_code=False) as sandbox, sandbox.session() as session:
        serving = SERVER + "import threading; threading.Thread(target=server.serve_forever, daemon=True).start()"
        assert session.run(serving).success
        assert got(port) == (200, "hello")
        (used,) = session.run("1").published
        assert used.requests == 1
        with pytest.raises(PolicyError, match="in use"):
            sandbox.execute("print(1)")


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_a_page_of_node_and_its_websocket_are_reached(shell: Shell, project: Path) -> None:
    """A dev server as people use them: it streams, keeps connections open, and upgrades one of them."""
    (project / "dev.js").write_text("""
const crypto = require("crypto")
const server = require("http").createServer((request, response) => {
  response.write("streamed "); setTimeout(() => response.end("page"), 50)
})
server.on("upgrade", (request, socket) => {
  const key = request.headers["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
  const accept = crypto.createHash("sha1").update(key).digest("base64")
  const fields = ["Upgrade: websocket", "Connection: Upgrade", `Sec-WebSocket-Accept: ${accept}`, "", ""]
  socket.write(["HTTP/1.1 101 Switching Protocols", ...fields].join("\\r\\n"))
  socket.on("data", data => { socket.end("heard " + data.length); server.close() })
})
server.listen(3000, "localhost")
""")
    port = free_port()
    with shell.start("run", "--throw-away", "--publish", f"{port}:3000", "--", "node", "dev.js") as process:
        assert until(lambda: get(port) == (200, "streamed page"))
        for origin, status in (("http://evil.example", b"403"), (f"http://localhost:{port}", b"101")):
            with socket.create_connection(("127.0.0.1", port), 60) as client:
                client.sendall(
                    f"GET / HTTP/1.1\r\nHost: localhost:{port}\r\nOrigin: {origin}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
                    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
                )
                data = client.recv(4096)
                assert data.split()[1] == status
                if status == b"101":
                    client.sendall(b"12345")
                    while piece := client.recv(100):
                        data += piece
                    assert data.endswith(b"heard 5")
        assert process.wait(60) == 0
