"""A network in a virtual machine: the same doors, the same egress, and so the same answers and records as in `process`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.egress.internet import ADDRESSES, Visit, run_on_internet
from tests.runtime.microvm.machines import runtime_in

# It makes a template of its own. The relay, and a machine at doors of the test, are tried in `make test` (tests/runtime/microvm).
pytestmark = [pytest.mark.once, pytest.mark.torture]

pytest.importorskip("h2", reason="needs the extra `network`")

WEB, OTHER = (ADDRESSES[name] for name in ("web.test", "other.test"))
# The last request is sent, and its answer not waited for.
CODE = """
import socket, ssl, urllib.request
def get(url, **how):
    try:
        return urllib.request.urlopen(url, timeout=120, **how).read().decode().strip()[:40]
    except OSError as error:
        return type(error).__name__
print(get("https://web.test/page"))
print(len(get("http://web.test/bytes?200000")))
print(get("http://web.test/echo", data=b"posted" * 20000))
print(get("http://other.test/canary-WHO"), get("http://OTHER/canary-WHO"))
print(get("https://OTHER/canary-WHO", context=ssl._create_unverified_context()))
try:
    socket.create_connection(("WEB", 22), 60)
except OSError as error:
    print(type(error).__name__)
last = socket.create_connection(("web.test", 80))
last.sendall(b"GET /last HTTP/1.1\\r\\nHost: web.test\\r\\n\\r\\n")
""".replace("OTHER", OTHER).replace("WEB", WEB)
# It runs the code in machines whose template lies in the directory that is named, and in `process`, and prints what became of it.
SCRIPT = """
import json, os, sys
from agent_sandbox import Sandbox
from agent_sandbox.assembly import registry
from agent_sandbox.runtime.microvm.runtime import MicroVmRuntime
directory, code = sys.argv[1:]
registry().register("machine", lambda: MicroVmRuntime(directory, kernel=os.environ.get("AGENT_SANDBOX_KERNEL", "")))
found = {}
for name, hosts in (("machine", ["web.test"]), ("process", ["web.test"]), ("open", ["web.test", "other.test"])):
    runtime = "machine" if name == "machine" else "process"
    with Sandbox(runtime=runtime, network=hosts, validate_code=False, timeout_seconds=600) as sandbox:
        ran = sandbox.execute(code.replace("WHO", name))
    flows = sorted((each.name, each.port, each.how, each.refused, each.requests) for each in ran.network)
    found[name] = {"said": ran.stdout.splitlines(), "flows": flows, "error": ran.error, "stderr": ran.stderr}
json.dump(found, sys.stdout)
"""


@pytest.fixture
def visit(project: Path, tmp_path: Path) -> Visit:
    runtime_in(tmp_path).close()  # skips where there is no QEMU, or no kernel
    (tmp_path / "script.py").write_text(SCRIPT)
    env = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    env |= {"AGENT_SANDBOX_STATE": str(tmp_path / "state")}
    argv = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "machines"), CODE]
    return run_on_internet(tmp_path / "net", argv, env=env, cwd=project, seconds=600)


@pytest.mark.needs_root  # without it, the small internet is a user namespace in which no directory belongs to anybody who is trusted
@pytest.mark.timeout(300)
def test_a_program_in_a_machine_reaches_the_host_that_is_allowed_and_no_other_as_in_process(visit: Visit) -> None:
    assert visit.code == 0, visit
    found: dict[str, Any] = json.loads(visit.stdout)
    machine, process, control = (found[name] for name in ("machine", "process", "open"))
    assert machine["said"][:2] == ["hello from web.test", "40"], machine
    assert machine["said"] == process["said"], "the program must not see a difference"
    assert machine["flows"] == json.loads(json.dumps(process["flows"]).replace("canary-process", "canary-machine")), "nor must the record"
    assert any(name == "other.test" and refused for name, _, _, refused, _ in machine["flows"])
    assert any("/last" in request for *_, requests in machine["flows"] for request in requests), "sent last, and not waited for"
    arrived = b"".join(visit.received.values())
    assert b"canary-machine" not in arrived
    assert b"canary-open" in arrived, "the host writes down what reaches it"
    assert control["said"] != machine["said"]
