"""The network of a run, end to end: real guests, a real egress process, and an internet of our own that records what arrives."""

from __future__ import annotations

import datetime
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent_sandbox.egress import frames
from agent_sandbox.egress.authority import Authority
from agent_sandbox.egress.orders import FlowRecord
from agent_sandbox.engine import egress, egress_program, egress_zygote, trust
from agent_sandbox.engine.egress_zygote import EgressFork
from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.provisions import Provisions
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.runtimes import only
from agent_sandbox.engine.turns import InterpreterTurns, Turn
from agent_sandbox.engine.work import Code, Command, Outcome, Work
from agent_sandbox.errors import LaunchFailed, LedgerUnavailable
from agent_sandbox.kernel.doors import Doors
from agent_sandbox.kernel.ids import EGRESS_ID
from agent_sandbox.ledger.event import Noted, tell
from agent_sandbox.ledger.writer import Ledger
from agent_sandbox.policy.bound_secrets import BoundSecret
from agent_sandbox.policy.model import Policy, cloned, locked
from agent_sandbox.policy.network import NetworkRules, network_rules
from agent_sandbox.runtime.process.runtime import ProcessRuntime
from tests.egress.world import METADATA, OTHER, PRIVATE, PUBLIC, World, in_world, kept_rules
from tests.kernel.children import ChildEnded
from tests.ledger.samples import read

pytest.importorskip("h2", reason="needs the extra `network`")
pytest.importorskip("cryptography", reason="needs the extra `network`")

ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
NAMES = {"good.example": PUBLIC, "evil.example": OTHER, "inner.example": PRIVATE, "meta.example": METADATA}

# What each attempt printed: the answer, or the kind of error.
TRY = """
import errno, socket, sys, urllib.error, urllib.request
def get(url, **headers):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
            print(answer.status, answer.read().decode().strip())
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode().strip())
    except urllib.error.URLError as error:
        print(type(error.reason).__name__, error.reason)
    except OSError as error:
        print(type(error).__name__)
"""


def rules(*hosts: str, private: tuple[str, ...] = ()) -> NetworkRules:
    return network_rules(outbound=True, hosts=hosts or ("good.example",), private=private)


def run(world: World, ledger: Path, code: str, network: NetworkRules, *, policy: Policy | None = None, work: Work | None = None) -> Outcome:
    """Run Python code in a sandbox with these network rules. The world's own authority is what this machine trusts."""
    trust.system_roots = lambda: world.trusted  # in the child of this test
    runtime = ProcessRuntime()
    try:
        gate = Gate(policy or cloned(masks=(), network=network), Ledger(ledger, clock=lambda: 0.0), clock=lambda: 0.0)
        return Session(gate, only(runtime), provisions=kept_rules()).run(work or Work(Command((sys.executable, "-c", TRY + code)), ENV))
    finally:
        runtime.close()


def printed(outcome: Outcome) -> list[str]:
    return outcome.stdout.decode().splitlines()


def test_an_allowed_host_is_reached_its_certificate_verified_and_the_flow_recorded(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"

    def act(world: World) -> tuple[Outcome, list[str], list[str]]:
        done = run(world, ledger, "get('https://good.example/a?b=c'); get('http://good.example/d')", rules())
        return done, world.heard, world.asked

    outcome, heard, asked = in_world(NAMES, act)
    assert printed(outcome) == [f"200 hello from {PUBLIC}"] * 2, outcome.stderr
    assert heard == [f"GET good.example/a?b=c at {PUBLIC}:443", f"GET good.example/d at {PUBLIC}:80"]
    assert set(asked) == {"good.example"}
    flows = [(flow.target, flow.how, flow.requests, flow.refused) for flow in outcome.network]
    assert sorted(flows) == [
        ("good.example:443", "https", ("GET /a 200, received 25",), ""),
        ("good.example:80", "http", ("GET /d 200, received 25",), ""),
    ]
    notes = [entry for entry in read(ledger) if isinstance(entry.event, Noted)]
    assert [(tell(entry).category, tell(entry).level, tell(entry).target) for entry in notes] == [
        ("network", "info", flow.target) for flow in outcome.network
    ]


def test_python_code_in_a_locked_view_reaches_an_allowed_host_too(tmp_path: Path) -> None:
    def act(world: World) -> Outcome:
        policy = locked(network=rules())
        return run(world, tmp_path / "l", "", rules(), policy=policy, work=Work(Code("python", TRY + "get('https://good.example/')"), ENV))

    assert printed(in_world(NAMES, act)) == [f"200 hello from {PUBLIC}"]


def test_a_server_whose_certificate_nobody_trusts_is_refused(tmp_path: Path) -> None:
    def act(world: World) -> tuple[Outcome, Outcome, list[str]]:
        code = "get('https://good.example/')"
        known = run(world, tmp_path / "l", code, rules())
        heard = list(world.heard)
        world.trusted = Authority(datetime.datetime.now(datetime.UTC)).certificate  # which signed none of the servers
        return known, run(world, tmp_path / "l", code, rules()), world.heard[len(heard) :]

    known, unknown, heard = in_world(NAMES, act)
    assert printed(known)[0].startswith("200 ")
    assert printed(unknown)[0].startswith("502 ") and "certificate" in printed(unknown)[0] and heard == []


def test_a_name_that_is_not_allowed_does_not_resolve_and_no_resolver_hears_of_it(tmp_path: Path) -> None:
    def act(world: World) -> tuple[Outcome, list[str], list[str]]:
        return run(world, tmp_path / "l", "get('https://evil.example/'); get('https://good.example/')", rules()), world.asked, world.heard

    outcome, asked, heard = in_world(NAMES, act)
    assert printed(outcome)[0].startswith("gaierror") and printed(outcome)[1].startswith("200 ")
    assert set(asked) == {"good.example"}, "the canary: the same server does hear of an allowed name"
    assert heard == [f"GET good.example/ at {PUBLIC}:443"]
    (refused,) = [flow for flow in outcome.network if flow.refused]
    assert (refused.name, refused.how) == ("evil.example", "dns") and "--network evil.example" in refused.refused
    assert any("evil.example" in note for note in outcome.notes)


def test_an_address_that_is_written_down_ends_at_the_door(tmp_path: Path) -> None:
    code = f"get('http://{OTHER}/'); get('http://{OTHER}/', Host='evil.example'); get('http://{OTHER}/', Host='good.example')"

    def act(world: World) -> tuple[Outcome, list[str]]:
        return run(world, tmp_path / "l", code, rules()), world.heard

    outcome, heard = in_world(NAMES, act)
    first, second, third = printed(outcome)
    assert first.startswith("403 ") and f"--network {OTHER}" in first
    assert second.startswith("403 ") and "--network evil.example" in second
    assert third == f"200 hello from {PUBLIC}", "the host that is allowed is reached where it is, not where the program wanted it"
    assert heard == [f"GET good.example/ at {PUBLIC}:80"]


def test_private_and_metadata_addresses_are_refused_unless_a_private_one_is_named(tmp_path: Path) -> None:
    code = f"get('http://inner.example/'); get('http://meta.example/'); get('http://{METADATA}/')"
    hosts = ("inner.example", "meta.example")

    def act(private: tuple[str, ...]) -> list[tuple[list[str], list[str]]]:
        return in_world(NAMES, lambda world: [(printed(run(world, tmp_path / "l", code, rules(*hosts, private=private))), world.heard)])

    ((inner, *metadata), heard), *_ = act(())
    assert [each[:4] for each in (inner, *metadata)] == ["403 "] * 3 and heard == []
    ((inner, *metadata), heard), *_ = act(("inner.example", "meta.example"))
    assert inner == f"200 hello from {PRIVATE}", "the control: the server is there"
    assert metadata[0].startswith("403 ") and heard == [f"GET inner.example/ at {PRIVATE}:80"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's guests may write to /etc")
def test_names_resolve_whatever_name_server_the_view_names_or_none(tmp_path: Path) -> None:
    code = """
import os, subprocess
def ask(text):
    if os.path.lexists("/etc/resolv.conf"):
        os.unlink("/etc/resolv.conf")
    if text is not None:
        with open("/etc/resolv.conf", "w") as file:
            file.write(text)
    print(*subprocess.run(["getent", "ahostsv4", "good.example"], capture_output=True, text=True).stdout.split()[:1])
for text in (None, "", *(f"nameserver {address}\\n" for address in ("127.0.0.1", "127.0.0.53", "8.8.8.8", "::1", "2001:db8::53"))):
    ask(text)
with open("/etc/nsswitch.conf", "w") as file:
    file.write("hosts: files mdns4_minimal [NOTFOUND=return] resolve [!UNAVAIL=return] dns\\n")
ask("nameserver 127.0.0.53\\noptions edns0 trust-ad\\nsearch corp.example\\n")
"""

    def act(world: World) -> Outcome:
        return run(world, tmp_path / "l", code, rules())

    outcome = in_world(NAMES, act)
    assert printed(outcome) == ["198.18.1.0"] * 8, outcome.stderr


def test_datagrams_other_ports_and_raw_sockets_are_refused_at_once(tmp_path: Path) -> None:
    code = """
def attempt(deed):
    try:
        print("done", deed())
    except OSError as error:
        print(errno.errorcode[error.errno])
def datagram(address):
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(30)
        sock.connect((address, 443))
        sock.send(b"QUIC")
        return sock.recv(10)
attempt(lambda: datagram("93.184.215.14"))
attempt(lambda: datagram("2001:4860:4860::8888"))
attempt(lambda: socket.create_connection(("good.example", 25), 30))
attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP))
attempt(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
attempt(lambda: socket.create_connection(("good.example", 443), 30).close())
"""

    def act(world: World) -> Outcome:
        return run(world, tmp_path / "l", code, rules())

    outcome = in_world(NAMES, act)
    refused = ["ECONNREFUSED"] * 3
    assert printed(outcome)[:3] == refused and printed(outcome)[5] == "done None"
    assert set(printed(outcome)[3:5]) <= {"EPERM", "EAFNOSUPPORT", "EACCES"}


def test_a_run_without_network_rules_has_no_door(tmp_path: Path) -> None:
    def act(world: World) -> tuple[Outcome, list[str], list[str]]:
        return (
            run(world, tmp_path / "l", "get('http://good.example/'); get('http://93.184.215.14/')", NetworkRules()),
            world.asked,
            world.heard,
        )

    outcome, asked, heard = in_world(NAMES, act)
    assert not any(line.startswith(("200", "403")) for line in printed(outcome))
    assert asked == heard == [] and outcome.network == ()


def test_when_the_egress_process_dies_the_network_is_gone_and_the_run_is_told(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    code = "get('http://good.example/'); input(); get('http://93.184.215.14/')"

    def act(world: World) -> Outcome:
        processes = opened()

        def kill(stream: str, data: bytes) -> None:
            handle = os.pidfd_open(processes[0].pid)
            os.kill(processes[0].pid, signal.SIGKILL)
            select.select([handle], [], [])
            os.write(writer, b"go\n")

        reader, writer = os.pipe()
        work = Work(Command((sys.executable, "-uc", TRY + code)), ENV, stdin=reader, on_output=once(kill))
        return run(world, ledger, "", rules(), work=work)

    outcome = in_world(NAMES, act)
    first, second = printed(outcome)
    assert first == f"200 hello from {PUBLIC}"
    assert second.startswith("ConnectionRefusedError")
    assert any("the network was lost during the run" in note for note in outcome.notes)
    assert "network.lost" in [entry.event.what for entry in read(ledger) if isinstance(entry.event, Noted)]


def test_a_run_that_uses_no_network_leaves_its_process_to_the_next_one_and_a_run_that_does_does_not(tmp_path: Path) -> None:
    def act(world: World) -> tuple[list[int], list[bool], list[Outcome]]:
        trust.system_roots = lambda: world.trusted
        processes, runtime = opened(), ProcessRuntime()
        runtimes = only(runtime)
        gate = Gate(cloned(masks=(), network=rules()), Ledger(tmp_path / "l", clock=lambda: 0.0), clock=lambda: 0.0)
        pids, alive, done = [], [], []
        try:
            for code in ("pass", "get('https://good.example/')", "pass", "get('https://good.example/')"):
                done.append(Session(gate, runtimes, provisions=kept_rules()).run(Work(Command((sys.executable, "-c", TRY + code)), ENV)))
                pids.append(processes[-1].pid)
                alive.append(processes[-1]._fork.serves(time.time()))
        finally:
            runtimes.companion(egress_zygote.EgressZygote).close()
            runtime.close()
        return pids, alive, done

    (unused, used, again, last), alive, done = in_world(NAMES, act)
    assert unused == used and again == last and used != again
    assert alive == [True, False, True, False]
    assert [printed(each) for each in done] == [[], [f"200 hello from {PUBLIC}"]] * 2
    assert [len(each.network) for each in done] == [0, 1, 0, 1]


def test_what_a_program_does_last_is_recorded_however_late_it_is_seen(tmp_path: Path) -> None:
    code = r"""
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    sock.sendto(bytes.fromhex("abcd01000001000000000000") + b"\4evil\7example\0\0\1\0\1", ("198.18.0.1", 53))
for _ in range(3):
    socket.create_connection(("93.184.215.14", 80)).send(b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n")
"""

    def act(world: World) -> Outcome:
        def sleep(self: egress.EgressProcess, doors: object) -> None:  # until the run has ended
            select.select([self._wake], [], [])

        egress.EgressProcess._await_arrival = sleep  # type: ignore[method-assign]
        return run(world, tmp_path / "l", code, rules())

    outcome = in_world(NAMES, act)
    assert outcome.exit.code == 0, outcome.stderr
    flows = [(flow.name, flow.how, flow.times) for flow in outcome.network if flow.refused]
    assert ("evil.example", "dns", 1) in flows and sum(times for _, how, times in flows if how != "dns") == 3, outcome.network


def test_what_a_program_does_last_is_recorded_however_slow_the_egress_is(tmp_path: Path) -> None:
    code = r"""
get('http://good.example/')
input()
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    for name in range(20):
        query = bytes.fromhex("abcd01000001000000000000") + b"\2%02d\7example\0\0\1\0\1" % name
        sock.sendto(query, ("198.18.0.1", 53))
for _ in range(3):
    socket.create_connection(("93.184.215.14", 80)).send(b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n")
"""

    def act(world: World) -> Outcome:
        processes, real = opened(), egress.EgressProcess._send

        def stop(stream: str, data: bytes) -> None:
            os.kill(processes[0].pid, signal.SIGSTOP)
            os.write(writer, b"go\n")

        def send(self: egress.EgressProcess, message: dict[str, Any]) -> None:
            real(self, message)
            if message["kind"] == "finish":
                os.kill(self.pid, signal.SIGCONT)

        egress.EgressProcess._send = send  # type: ignore[method-assign, assignment]
        reader, writer = os.pipe()
        return run(
            world,
            tmp_path / "l",
            "",
            rules(),
            work=Work(Command((sys.executable, "-uc", TRY + code)), ENV, stdin=reader, on_output=once(stop)),
        )

    outcome = in_world(NAMES, act)
    assert outcome.exit.code == 0, outcome.stderr
    refused = [flow for flow in outcome.network if flow.refused]
    assert {flow.name for flow in refused if flow.how == "dns"} == {f"{name:02}.example" for name in range(20)}
    assert sum(flow.times for flow in refused if flow.how != "dns") == 3, outcome.network


@pytest.mark.parametrize("silent", [False, True])
def test_a_process_that_does_not_say_that_its_flows_have_ended_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    monkeypatch.setattr(egress, "FINISH_SECONDS", 1.0 if silent else 60.0)

    def act(world: World) -> tuple[bool, bool, list[str]]:
        processes, let_go = opened(), list[EgressFork]()
        real = egress_zygote.EgressZygote.let_go

        def remember(self: egress_zygote.EgressZygote, fork: EgressFork) -> None:
            let_go.append(fork)
            real(self, fork)

        def stop(stream: str, data: bytes) -> None:
            process.append(os.pidfd_open(processes[0].pid))
            if silent:
                os.kill(processes[0].pid, signal.SIGSTOP)
            os.write(writer, b"go\n")

        egress_zygote.EgressZygote.let_go = remember  # type: ignore[method-assign]
        process: list[int] = []
        reader, writer = os.pipe()
        code = TRY + "get('http://good.example/'); input()"
        work = Work(Command((sys.executable, "-uc", code)), ENV, stdin=reader, on_output=once(stop))
        outcome = run(world, tmp_path / "l", "", rules(), work=work)
        return bool(let_go), bool(select.select(process, [], [], 0)[0]), printed(outcome)

    left, ended, said = in_world(NAMES, act)
    assert said == [f"200 hello from {PUBLIC}"]
    assert left is not silent and (ended or not silent)


def test_when_the_process_dies_before_the_network_is_used_the_network_is_gone_and_the_run_is_told(tmp_path: Path) -> None:
    code = "print('here'); input(); get('http://93.184.215.14/')"

    def act(world: World) -> tuple[Outcome, list[str]]:
        processes = opened()

        def kill(stream: str, data: bytes) -> None:
            os.kill(processes[0].pid, signal.SIGKILL)
            thread = processes[0]._thread
            assert thread is not None
            thread.join()
            os.write(writer, b"go\n")

        reader, writer = os.pipe()
        work = Work(Command((sys.executable, "-uc", TRY + code)), ENV, stdin=reader, on_output=once(kill))
        return run(world, tmp_path / "l", "", rules(), work=work), world.heard

    outcome, heard = in_world(NAMES, act)
    assert printed(outcome)[1].startswith("ConnectionRefusedError") and heard == []
    assert any("the network was lost during the run" in note for note in outcome.notes)


def test_rules_that_are_narrowed_before_the_network_is_used_hold_from_the_first_request(tmp_path: Path) -> None:
    code = "print('here'); input(); get('http://good.example/')"

    def act(world: World, narrowed: NetworkRules) -> tuple[Outcome, list[str]]:
        processes = opened()

        def narrow(stream: str, data: bytes) -> None:
            processes[0].obey(narrowed)
            os.write(writer, b"go\n")

        reader, writer = os.pipe()
        work = Work(Command((sys.executable, "-uc", TRY + code)), ENV, stdin=reader, on_output=once(narrow))
        return run(world, tmp_path / "l", "", rules(), work=work), world.heard

    outcome, heard = in_world(NAMES, lambda world: act(world, rules("other.example")))
    assert not printed(outcome)[1].startswith("200 ") and heard == []
    outcome, heard = in_world(NAMES, lambda world: act(world, rules()))
    assert printed(outcome)[1].startswith("200 ") and len(heard) == 1, "the control"


def opened() -> list[egress.EgressProcess]:
    """Return a list to which every egress process of this test's child is added."""
    processes: list[egress.EgressProcess] = []
    real = egress.EgressProcess.open

    def remember(self: egress.EgressProcess, guest: object) -> None:
        processes.append(self)
        real(self, guest)  # type: ignore[arg-type]

    egress.EgressProcess.open = remember  # type: ignore[method-assign]
    return processes


def once(act: Callable[[str, bytes], None]) -> Callable[[str, bytes], None]:
    """Return a function that does something when it is first called."""
    left = [act]

    def call(stream: str, data: bytes) -> None:
        if left:
            left.pop()(stream, data)

    return call


def test_a_guest_can_neither_see_nor_signal_the_egress_process(tmp_path: Path) -> None:
    code = """
import os
get('http://good.example/')
for number in (int(input()), 2**22 - 1):
    try:
        os.kill(number, 9)
        print("killed")
    except OSError as error:
        print(errno.errorcode[error.errno], os.path.exists(f"/proc/{number}"))
get('http://good.example/')
"""

    def act(world: World) -> Outcome:
        processes = opened()

        def tell(stream: str, data: bytes) -> None:
            os.kill(processes[0].pid, 0)  # the control: it is there, under this number, for others
            os.write(writer, f"{processes[0].pid}\n".encode())

        reader, writer = os.pipe()
        work = Work(Command((sys.executable, "-uc", TRY + code)), ENV, stdin=reader, on_output=once(tell))
        return run(world, tmp_path / "l", "", rules(), work=work)

    first, *signals, last = printed(in_world(NAMES, act))
    assert first == last == f"200 hello from {PUBLIC}"
    assert signals == ["ESRCH False"] * 2


def test_rules_that_are_narrowed_while_a_run_goes_on_hold_from_the_next_request(tmp_path: Path) -> None:
    code = "get('http://good.example/'); input(); get('http://good.example/')"

    def act(world: World) -> tuple[Outcome, list[str]]:
        processes = opened()

        def narrow(stream: str, data: bytes) -> None:
            processes[0].obey(rules("other.example"))
            os.write(writer, b"go\n")

        reader, writer = os.pipe()
        work = Work(Command((sys.executable, "-uc", TRY + code)), ENV, stdin=reader, on_output=once(narrow))
        return run(world, tmp_path / "l", "", rules(), work=work), world.heard

    outcome, heard = in_world(NAMES, act)
    first, second = printed(outcome)
    assert first.startswith("200 ") and not second.startswith("200 ") and len(heard) == 1


def test_whoever_changes_rules_goes_on_when_they_are_in_force_however_slow_the_egress_is(tmp_path: Path) -> None:
    code = "get('http://good.example/'); input(); get('http://good.example/')"

    def act(world: World) -> tuple[Outcome, bool, list[str]]:
        processes, waits = opened(), []

        def narrow(stream: str, data: bytes) -> None:
            os.kill(processes[0].pid, signal.SIGSTOP)
            changing = threading.Thread(target=processes[0].obey, args=(rules("other.example"),))
            changing.start()
            changing.join(0.5)
            waits.append(changing.is_alive())
            os.kill(processes[0].pid, signal.SIGCONT)
            changing.join()
            os.write(writer, b"go\n")

        reader, writer = os.pipe()
        work = Work(Command((sys.executable, "-uc", TRY + code)), ENV, stdin=reader, on_output=once(narrow))
        return run(world, tmp_path / "l", "", rules(), work=work), waits == [True], world.heard

    outcome, waited, heard = in_world(NAMES, act)
    first, second = printed(outcome)
    assert waited and first.startswith("200 ") and not second.startswith("200 ") and len(heard) == 1


def test_a_flow_that_cannot_be_recorded_ends_the_network(tmp_path: Path) -> None:
    code = """
get('http://good.example/')
while True:  # until the door is closed: the program may be faster than the record
    try:
        socket.create_connection(("93.184.215.14", 80), 30).close()
    except ConnectionRefusedError:
        break
    except ConnectionError:  # it was open, and was closed with the door
        pass
"""

    def act(world: World) -> Outcome:
        def fail(self: Gate, what: str, facts: object) -> None:
            raise LedgerUnavailable("the disk is full", hint="")

        Gate.note = fail  # type: ignore[method-assign]
        return run(world, tmp_path / "l", code, rules())

    outcome = in_world(NAMES, act)
    assert printed(outcome)[0].startswith("200 ") and outcome.exit.code == 0
    assert any("cannot be recorded: the disk is full" in note for note in outcome.notes)


def test_without_the_packages_it_needs_a_run_with_a_network_does_not_start_and_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_with(tmp_path, monkeypatch, "sitecustomize", "import sys; sys.path[:] = [each for each in sys.path if '-packages' not in each]")
    monkeypatch.setattr(egress_program, "packages", lambda: "")
    runtime = ProcessRuntime()
    gate = Gate(cloned(masks=(), network=rules()), Ledger(tmp_path / "l", clock=lambda: 0.0), clock=lambda: 0.0)
    runtimes = only(runtime)
    try:
        with pytest.raises(LaunchFailed) as failed:
            Session(gate, runtimes, provisions=kept_rules()).run(Work(Command(("true",)), ENV))
    finally:
        runtimes.companion(egress_zygote.EgressZygote).close()
        runtime.close()
    assert "No module named 'cryptography'" in failed.value.message and "hyperscan" in failed.value.hint


@pytest.mark.torture  # it waits longer than the C library does by default
def test_a_name_waits_for_a_process_that_is_slow_to_get_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = f"import sys, time; time.sleep(15); sys.path.remove({str(tmp_path)!r}); del sys.modules['h2']; import h2"
    start_with(tmp_path, monkeypatch, "h2", late)
    outcome = in_world(NAMES, lambda world: run(world, tmp_path / "l", "get('http://good.example/')", rules()))
    assert printed(outcome)[0].startswith("200 "), outcome


def test_a_process_that_fails_to_get_ready_leaves_the_run_without_a_network_and_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = tmp_path / "begun"  # the process fails only now: before, nothing would run
    broken = f"import os, time\nwhile not os.path.exists({str(begun)!r}): time.sleep(0.01)\nraise RuntimeError('a broken package')"
    start_with(tmp_path, monkeypatch, "h2", broken)
    code = """
print("begun", flush=True)
while True:  # until it is known
    try:
        socket.create_connection(("93.184.215.14", 80)).recv(1)
    except ConnectionRefusedError:
        break
    except ConnectionError:  # it had been opened, and was closed with the door
        pass
get('http://good.example/')
"""

    def act(world: World) -> tuple[Outcome, list[str], list[str]]:
        work = Work(Command((sys.executable, "-c", TRY + code)), ENV, on_output=lambda *_: begun.touch())
        return run(world, tmp_path / "l", "", rules(), work=work), world.heard, world.asked

    outcome, heard, asked = in_world(NAMES, act)
    assert outcome.exit.code == 0 and not printed(outcome)[1].startswith("200 ") and heard == asked == []
    assert any("the network was lost" in note and "a broken package" in note for note in outcome.notes), outcome.notes


def test_a_process_that_has_failed_to_get_ready_lets_nothing_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_with(tmp_path, monkeypatch, "cryptography", "raise RuntimeError('a broken package')")
    with pytest.raises(ChildEnded, match="could not get ready: RuntimeError: a broken package"):
        in_world(NAMES, lambda world: run(world, tmp_path / "l", "print('it ran')", rules()))


@pytest.mark.parametrize("says", [{"kind": "failed", "why": "no confinement"}, {"kind": "ready"}], ids=["failed", "ready"])
def test_a_process_that_is_not_confined_gets_no_orders(tmp_path: Path, says: dict[str, str]) -> None:
    secret = BoundSecret("TOKEN", "placeholder", "the-Value-7f3a9c5", ("good.example",))
    ours, theirs = socket.socketpair()
    listener, place = socket.create_server(("127.0.0.1", 0)), tmp_path / "trust"
    place.mkdir()
    with theirs, subprocess.Popen(["sleep", "600"]) as other, socket.create_connection(listener.getsockname()) as client:
        fork = EgressFork(ours, time.time())
        fork.certificate, fork._process = b"made", os.pidfd_open(other.pid)  # stands for a process that has sent its certificate
        zygote = SimpleNamespace(fork=lambda *_: fork, keep_ready=lambda: None, take_back=EgressFork.drop)
        process = egress.EgressProcess(Notes(), rules(), zygote, Provisions((secret,)))  # type: ignore[arg-type]
        doors = Doors((), (listener.detach(),), os.open(place, os.O_RDONLY | os.O_DIRECTORY))
        process.open(SimpleNamespace(doors=doors))  # type: ignore[arg-type]
        frames.send(theirs, says)
        if says["kind"] == "failed":
            client.settimeout(60)
            with suppress(ConnectionResetError):
                assert client.recv(1) == b"", "the door has closed"
            process.close()
            assert theirs.recv(1) == b"" and any("no confinement" in note for note in process.taken()[1])
        else:  # the control
            message, descriptors = frames.receive(theirs, most=1 << 20)
            assert secret.value in str(message) and len(descriptors) == 1
            os.close(descriptors[0])
            theirs.close()  # as the end of the process does
            process.close()
        assert other.wait(60) == -signal.SIGKILL


def start_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, text: str) -> None:
    """Let every egress program that is started find this module before all others of its name."""
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.setattr(egress_program, "_ENVIRONMENT", {**egress_program._ENVIRONMENT, "PYTHONPATH": str(tmp_path)})


class Notes:
    """A gate that keeps the notes it is told."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, str, int]] = []

    def note(self, what: str, facts: Mapping[str, Any]) -> None:
        self.notes.append((what, facts["target"], facts.get("times", 1)))


def test_refusals_do_not_crowd_out_the_record_of_what_was_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egress, "MOST_FLOWS", 3)
    gate, zygote = Notes(), SimpleNamespace(fork=lambda *_: EgressFork(socket.socket(), 0.0), take_back=EgressFork.forget)
    process = egress.EgressProcess(gate, rules(), zygote)  # type: ignore[arg-type]
    for number in range(20):
        process._keep(FlowRecord(f"{number}.evil.example", 0, "dns", refused="no"))
    for _ in range(5):
        process._keep(FlowRecord("good.example", 443, "https", sent=1))
    flows, notes = process.taken()
    process.close()
    assert len([flow for flow in flows if flow.refused]) == 6 and any("14 more" in note for note in notes)
    assert [(flow.name, flow.times, flow.sent) for flow in flows if not flow.refused] == [("good.example", 1, 1)] * 3 + [
        ("good.example", 2, 2)
    ]
    assert ("network.repeated", "good.example:443", 2) in gate.notes


def test_a_process_that_asks_without_end_and_reads_no_answer_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egress, "SEND_SECONDS", 1)
    ours, theirs = socket.socketpair()
    with theirs, subprocess.Popen(["sleep", "600"]) as other:
        gate = Gate(cloned(masks=(), network=rules()), Ledger(tmp_path / "l", clock=lambda: 0.0), clock=lambda: 0.0)
        fork = EgressFork(ours, 0.0)
        fork._process = os.pidfd_open(other.pid)  # stands for an egress process that somebody took over
        zygote = SimpleNamespace(fork=lambda provisions: fork, keep_ready=lambda: None)
        process = egress.EgressProcess(gate, rules(), zygote)  # type: ignore[arg-type]
        process._ordered = True
        asked = {"number": 1, "host": "evil.example", "port": 443, "method": "GET", "path": "/", "data": "", "again": False}
        for _ in range(100_000):
            if other.poll() is not None:
                break
            process._hear({"kind": "ask", **asked})
        assert other.wait(60) == -signal.SIGKILL
        process.close()


def test_the_rules_are_asked_again_before_a_name_is_resolved() -> None:
    assert egress.resolved(rules(), "evil.example")[0] == ()
    assert "--network evil.example" in egress.resolved(rules(), "evil.example")[1]
    assert egress.resolved(rules(), "GOOD.example.")[0] == (), "a name that is not canonical was not judged as it will be asked"
    assert egress.resolved(rules("localhost.example"), "127.0.0.1")[0] == ()


def test_an_observed_run_names_the_hosts_that_it_reached_and_those_it_did_not(tmp_path: Path) -> None:
    code = "get('http://good.example/'); get('http://evil.example/')"

    def act(world: World) -> Outcome:
        return run(world, tmp_path / "l", "", rules(), work=Work(Command((sys.executable, "-c", TRY + code)), ENV, observe=True))

    outcome = in_world(NAMES, act)
    assert printed(outcome)[0].startswith("200 ") and len(printed(outcome)) == 2
    network = {(each.kind, each.target, each.allowed) for each in outcome.observed if each.kind in ("connect", "resolve")}
    assert network == {("connect", "good.example:80", True), ("resolve", "evil.example", False)}


def test_an_interpreter_of_turns_keeps_its_network_between_them(tmp_path: Path) -> None:
    def act(world: World) -> tuple[list[str], list[list[str]]]:
        trust.system_roots = lambda: world.trusted
        runtime = ProcessRuntime()
        gate = Gate(locked(network=rules()), Ledger(tmp_path / "l", clock=lambda: 0.0), clock=lambda: 0.0)
        turns = InterpreterTurns(Session(gate, only(runtime), provisions=kept_rules()), Work(Code("python", ""), ENV))
        try:
            done = [turns.run(Turn(TRY + f"get('https://good.example/{number}')")).outcome for number in range(2)]
        finally:
            turns.close()
            runtime.close()
        return world.heard, [printed(each) for each in done]

    heard, said = in_world(NAMES, act)
    assert said == [[f"200 hello from {PUBLIC}"]] * 2
    assert [each.split()[1] for each in heard] == ["good.example/0", "good.example/1"]


def test_guests_that_wait_ready_serve_runs_with_and_without_a_network(tmp_path: Path) -> None:
    def act(world: World) -> list[list[str]]:
        trust.system_roots = lambda: world.trusted
        runtime = ProcessRuntime(warm=2)
        said = []
        try:
            for number in range(4):
                policy = locked(network=rules()) if number % 2 else locked()
                gate = Gate(policy, Ledger(tmp_path / "l", clock=lambda: 0.0), clock=lambda: 0.0)
                said.append(
                    printed(
                        Session(gate, only(runtime), provisions=kept_rules()).run(
                            Work(Code("python", TRY + "get('http://good.example/')"), ENV)
                        )
                    )
                )
        finally:
            runtime.close()
        return said

    without, first, again, second = in_world(NAMES, act)
    assert first == second == [f"200 hello from {PUBLIC}"]
    assert not any(line.startswith("200") for line in without + again)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may look into a process that cannot be dumped")
def test_the_process_of_a_run_holds_no_file_and_no_user_of_the_machine(tmp_path: Path) -> None:
    def act(world: World) -> tuple[list[str], list[str], str]:
        processes = opened()
        looked: list[tuple[list[str], list[str], str]] = []

        def look(stream: str, data: bytes) -> None:
            place = f"/proc/{processes[0].pid}"
            held = []
            for each in os.listdir(f"{place}/fd"):
                with suppress(FileNotFoundError):  # closed meanwhile
                    held.append(os.readlink(f"{place}/fd/{each}"))
            with open(f"{place}/status") as file:
                uid = next(line.split()[1] for line in file if line.startswith("Uid:"))
            looked.append((held, os.listdir(f"{place}/root"), uid))
            os.write(writer, b"go\n")

        reader, writer = os.pipe()
        work = Work(Command((sys.executable, "-uc", TRY + "get('http://good.example/'); input()")), ENV, stdin=reader, on_output=once(look))
        run(world, tmp_path / "l", "", rules(), work=work)
        return looked[0]

    held, root, uid = in_world(NAMES, act)
    assert held and not [each for each in held if each.partition(":")[0] not in ("socket", "anon_inode", "/dev/null")]
    assert root == ["proc"] and uid == str(EGRESS_ID)


def test_variables_that_name_a_proxy_name_ours_and_no_other_variable_changes() -> None:
    given = {"HTTPS_PROXY": "http://corp:8080", "all_proxy": "socks5://corp", "http_proxy": "", "NO_PROXY": "x.example", "PATH": "/bin"}
    ours = "http://198.18.0.1:3128"
    assert egress.proxied(given, (80, 443)) == {**given, "HTTPS_PROXY": ours, "all_proxy": ours}
    assert egress.proxied({"http_proxy": "x"}, (80, 443, 3128)) == {"http_proxy": "http://198.18.0.1:3129"}
