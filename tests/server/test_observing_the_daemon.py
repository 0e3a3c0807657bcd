"""What the daemon tells those who watch over it: events as JSON, traces of OpenTelemetry, and its state to systemd."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from agent_sandbox.server import traces, units
from agent_sandbox.server.event_log import LONGEST, MOST_A_SECOND, EventLog
from tests.e2e.program import Shell
from tests.e2e.test_http import answers, client
from tests.patience import until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "canary-of-a-command-line"


class Collector(BaseHTTPRequestHandler):
    """Takes traces, as a collector of OpenTelemetry does."""

    def do_POST(self) -> None:
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def collecting() -> Iterator[tuple[str, list[bytes]]]:
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        server.bodies = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", server.bodies  # type: ignore[attr-defined]
        finally:
            server.shutdown()
            thread.join()


def test_events_traces_and_its_state_are_told_without_a_command_line(shell: Shell, tmp_path: Path) -> None:
    service = pytest.importorskip(
        "opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="opentelemetry-exporter-otlp-proto-http"
    )
    pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is missing")
    directory = os.open(tmp_path, os.O_PATH)
    with collecting() as (collector, bodies), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"/proc/self/fd/{directory}/notify")
        manager.settimeout(120)
        told = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector, "NOTIFY_SOCKET": f"/proc/{os.getpid()}/fd/{directory}/notify"}
        watched = Shell(shell.cwd, {**shell.env, **told})
        with watched.start("serve", "--http", "--log", "json") as daemon, client_when_ready(shell, manager) as asking:
            asked = {"words": [f"echo {SECRET}; exit 3"], "options": {"--throw-away": True}, "directory": str(shell.cwd)}
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            assert asking.post("/v1/verbs/run", json=asked, headers=headers).json()["exit"] == 3
            assert asking.get("/no/such/path").status_code == 404
            daemon.terminate()
            said = daemon.communicate()[1]
        assert manager.recv(100) == b"STOPPING=1"
    os.close(directory)
    events = [json.loads(line) for line in said.splitlines()]
    assert [each["event"] for each in events if each["event"] not in ("request",)] == ["ready", "performed", "stopping", "ended"]
    (run,) = (each for each in events if each.get("what") == "run")
    assert (run["status"], run["exit"], run["door"]) == (200, 3, "socket")
    assert any(each.get("what") == "other" and each["status"] == 404 for each in events)
    assert SECRET.encode() not in said
    spans = [
        span
        for body in bodies
        for group in service.ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    ]
    (span,) = (each for each in spans if each.name == "agent-sandbox run")
    attributes = {each.key: each.value.int_value or each.value.string_value for each in span.attributes}
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert attributes["process.exit.code"] == 3 and attributes["agent_sandbox.verb"] == "run"
    assert SECRET.encode() not in b"".join(bodies) and TRACE in b"".join(bodies).hex(), "the control arm: the bodies were read"


@contextmanager
def client_when_ready(shell: Shell, manager: socket.socket) -> Iterator[httpx.Client]:
    assert manager.recv(100) == b"READY=1"
    with client(shell) as asking:
        assert until(lambda: answers(asking))
        yield asking


def test_without_its_variables_nothing_of_opentelemetry_is_loaded() -> None:
    look = (
        "import os, sys; os.environ = {k: v for k, v in os.environ.items() if not k.startswith('OTEL_')}\n"
        "from agent_sandbox.server import front, http_api, traces\n"
        "with traces.start_traces().span('x', {}): pass\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    assert subprocess.run([sys.executable, "-c", look], capture_output=True, check=True).stdout == b"[]\n"
    wanted = {"OTEL_TRACES_EXPORTER": "console"}
    assert traces.wanted(wanted) and not traces.wanted({**wanted, "OTEL_SDK_DISABLED": "true"}), "the control arm"


def test_a_log_that_nobody_reads_and_a_flood_stop_nobody() -> None:
    reading, writing = os.pipe()
    now = [0.0]
    log = EventLog(writing, clock=lambda: now[0])
    for number in range(MOST_A_SECOND + 50):
        log("event", number=number)
    now[0] = 1.0
    log("long", what="x" * LONGEST)
    log("next")
    os.set_blocking(reading, False)
    lines = os.read(reading, 1 << 20).splitlines()
    assert len(lines) == MOST_A_SECOND + 1
    assert json.loads(lines[-1]) == {"time": "1970-01-01T00:00:01.000Z", "event": "next", "pid": os.getpid(), "left_out": 51}
    for second in range(2, 1000):
        now[0] = float(second)
        log("unread", what="x" * 3000)  # it does not wait: this would hang
    assert b"unread" in os.read(reading, 1 << 20)
    os.close(reading)
    log("gone")
    os.close(writing)


@pytest.mark.parametrize("kind", units.KINDS)
def test_the_units_are_what_systemd_takes(kind: str, shell: Shell, tmp_path: Path) -> None:
    printed = shell("serve", "--unit", kind)
    assert printed.returncode == 0 and shell.json("serve", "--unit", kind)["unit"] == printed.stdout.decode()
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("NOT TESTED: systemd-analyze is missing (package systemd)")
    path = tmp_path / ("agent-sandbox.service" if kind == "user" else "agent-sandbox@.service")
    line = [analyze, "verify", "--man=no", *(["--user"] if kind == "user" else []), str(path)]
    for text, fine in ((printed.stdout, True), (printed.stdout.replace(b"Type=notify", b"Type=whatever"), False)):
        path.write_bytes(text)
        done = subprocess.run(line, env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}, capture_output=True, check=False)
        about_ours = [said for said in done.stderr.decode().splitlines() if path.name in said]
        assert (about_ours == []) == fine, about_ours


def test_a_unit_that_does_not_exist_is_a_usage_error(shell: Shell) -> None:
    for wrong in (("--unit", "root"), ("--log", "xml"), ("--unit", "user", "--status"), ("--unit", "user", "--http")):
        assert shell("serve", *wrong).returncode == 2
