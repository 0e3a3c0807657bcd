"""What a guest finds around it: its own processes, identity, devices and network, and nothing of the machine's."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from agent_sandbox.kernel import ids
from agent_sandbox.runtime.base import Terminal
from agent_sandbox.runtime.process.guest_handle import ProcessGuest
from tests.patience import until
from tests.security.harness import ROOT, Box, knows, listening, outside

DESCRIPTORS = """
import json, os
found = {}
for fd in os.listdir("/proc/self/fd"):
    try:
        found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        pass  # the listing's own
print(json.dumps(sorted(int(fd) for fd, to in found.items() if not to.startswith("/proc/"))))
"""


def test_there_are_no_descriptors_but_the_three(box: Box) -> None:
    held = os.open("/etc/passwd", os.O_RDONLY)
    os.set_inheritable(held, True)
    try:
        assert box.probe(DESCRIPTORS) == [0, 1, 2]
        assert box.run("python3", "-c", DESCRIPTORS).stdout == b"[0, 1, 2]\n"
    finally:
        os.close(held)


def test_it_has_a_session_of_its_own_and_no_terminal(box: Box) -> None:
    outcome = box.shell("echo $$; cut -d' ' -f6,7 /proc/$$/stat; exec 3<>/dev/tty && echo terminal")
    pid, session = outcome.stdout.decode().splitlines()
    assert session == f"{pid} 0", "session leader, terminal 0"
    assert outcome.exit.code != 0


def test_a_terminal_that_was_asked_for_is_its_own(box: Box) -> None:
    outcome = box.shell("tty; stty size; exec 3<>/dev/tty && echo terminal", terminal=Terminal(24, 80))
    assert outcome.stdout.replace(b"\r", b"") == b"/dev/pts/0\n24 80\nterminal\n"


def test_init_is_closed_to_the_guest(box: Box) -> None:
    closed = ("environ", "mem", "maps", "root/etc", "cwd/etc", "exe", "fd/0", "stack", "auxv", "ns/user")
    outcome = box.python(f"""
for name in {closed!r}:
    try:
        open(f"/proc/1/{{name}}", "rb").read(1)
        print("open:", name)
    except OSError:
        pass
""")
    assert (outcome.exit.code, outcome.stdout) == (0, b"")


def test_proc_shows_only_the_guests_own_processes(box: Box) -> None:
    seen = box.probe("import os, json; print(json.dumps([pid for pid in os.listdir('/proc') if pid.isdecimal()]))")
    assert seen == ["1", "2"]
    assert str(os.getpid()) in outside("import os, json; print(json.dumps([pid for pid in os.listdir('/proc') if pid.isdecimal()]))")


def test_nothing_of_the_machine_can_be_set_through_proc(box: Box) -> None:
    source = """
import json, os, stat
opened = []
for top in [f"/proc/{name}" for name in os.listdir("/proc") if not name.isdecimal() and name not in ("self", "thread-self", "net")]:
    for directory, _, names in [*os.walk(top), ("/", (), [top])]:
        for name in names:
            try:
                file = os.open(os.path.join(directory, name), os.O_WRONLY)
            except OSError:
                continue
            if not stat.S_ISCHR(os.fstat(file).st_mode):  # what is masked is /dev/null
                opened.append(os.path.join(directory, name))
            os.close(file)
print(json.dumps(opened))
"""
    assert box.probe(source) == []
    if ROOT:
        assert len(outside(source)) > 100, "the machine's own root may"


def test_secrets_of_the_kernel_are_masked(box: Box) -> None:
    source = """
import json
read = {}
for name in ("kcore", "keys", "timer_list", "kmsg"):
    try:
        with open("/proc/" + name, "rb", buffering=0) as file:
            read[name] = len(file.read(64))
    except OSError:
        read[name] = 0
print(json.dumps(read))
"""
    assert set(box.probe(source).values()) == {0}


def test_there_is_no_sys(box: Box) -> None:
    assert box.run("ls", "-A", "/sys").stdout == b""


def test_the_machine_has_another_name_inside(box: Box) -> None:
    assert box.run("uname", "-n").stdout == b"sandbox\n"
    assert os.uname().nodename != "sandbox"


def test_it_can_talk_to_itself_over_loopback(box: Box) -> None:
    outcome = box.python("""
import socket
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
server.accept()[0].sendall(b"hello")
print(client.recv(5).decode(), sorted(name for _, name in socket.if_nameindex()))
""")
    assert outcome.stdout == b"hello ['lo']\n", outcome.stderr


REACH = """
import json, socket
reached = []
for family, address in ((socket.AF_INET, ("127.0.0.1", {port})), (socket.AF_UNIX, {abstract!r}), (socket.AF_UNIX, {path!r}),
                        (socket.AF_INET, ("192.0.2.1", 80)), (socket.AF_INET6, ("::1", {port}))):
    with socket.socket(family) as client:
        client.settimeout(2)
        try:
            client.connect(address)
            reached.append(str(address))
        except OSError:
            pass
print(json.dumps(reached))
"""


def test_no_listener_of_the_machine_can_be_reached(box: Box) -> None:
    abstract = f"\0agent-sandbox-{os.getpid()}"
    directory = os.open(box.project, os.O_PATH)  # a socket's name may be 107 bytes long, and tests live deep
    with (
        listening(socket.AF_INET, ("127.0.0.1", 0)) as loopback,
        listening(socket.AF_UNIX, abstract) as hidden,
        listening(socket.AF_UNIX, f"/proc/self/fd/{directory}/s") as named,
    ):
        probe = REACH.format(port=loopback.address[1], abstract=abstract, path="s")
        assert box.probe(probe) == []
        assert [loopback.accepted, hidden.accepted, named.accepted] == [0, 0, 0]
        assert len(outside(probe, cwd=box.project)) == 3, "the same probe reaches all three without a sandbox"
        assert until(lambda: [loopback.accepted, hidden.accepted, named.accepted] == [1, 1, 1])
    os.close(directory)


def test_it_has_no_powers(box: Box) -> None:
    status = box.probe("""
import json
lines = {name: value.strip() for name, _, value in (line.partition(":") for line in open("/proc/self/status"))}
print(json.dumps({name: lines[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Uid")}))
""")
    assert {status[f"Cap{kind}"] for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert status["Uid"].split() == [str(os.getuid())] * 4, "it sees itself as whoever started it"


def _descendant_in_a_sandbox(marker: str) -> str | None:
    """The pid, on the machine, of a process with this word on its command line."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if marker.encode() in (entry / "cmdline").read_bytes():
                    return entry.name
            except OSError:
                continue
    return None


@pytest.mark.needs_root
def test_seen_from_the_machine_a_guest_of_root_is_nobody(box: Box) -> None:
    marker = f"marker-of-this-guest-{os.getpid()}"
    guests: list[ProcessGuest] = []
    arrived = threading.Event()
    held, writing = os.pipe()  # keeps the guest waiting for its input
    runner = threading.Thread(
        target=lambda: box.run(
            "bash", "-c", f": {marker}; echo ready; read", on_start=guests.append, on_output=lambda *_: arrived.set(), stdin=held
        )
    )
    runner.start()
    try:
        assert arrived.wait()
        pid = _descendant_in_a_sandbox(marker)
        assert pid is not None
        status = knows(pid)
        uids, gids = {int(uid) for uid in status["Uid"].split()}, {int(gid) for gid in status["Gid"].split()}
        assert uids == gids == {ids.FIRST_ID}
        assert ids.FIRST_ID > 1 << 20, "above what distributions hand out"
        assert status["Groups"] == "" and int(status["CapEff"], 16) == 0
    finally:
        guests[0].kill()
        runner.join()
        os.close(held)
        os.close(writing)


def test_signals_start_unblocked_and_with_their_default_effect(box: Box) -> None:
    outcome = box.shell("grep -E 'Sig(Blk|Ign)' /proc/self/status")
    assert outcome.stdout == b"SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n"


def test_limits_cannot_be_raised_nor_priority(box: Box) -> None:
    outcome = box.python("""
import os, resource
for attempt in (
    lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 20, 1 << 20)),
    lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 30, 1 << 30)),
    lambda: os.nice(-5),
    lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
    lambda: os.write(os.open("/proc/self/oom_score_adj", os.O_WRONLY), b"-900"),
):
    try:
        attempt()
        print("raised")
    except (OSError, ValueError):
        pass
""")
    assert (outcome.exit.code, outcome.stdout) == (0, b""), outcome.stderr


def test_devices_are_the_harmless_ones(box: Box) -> None:
    expected = {"fd", "full", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout", "tty", "urandom", "zero"}
    assert set(box.run("ls", "/dev").stdout.decode().split()) == expected
    assert box.shell("head -c 4 /dev/urandom | wc -c; echo x > /dev/null; head -c 2 /dev/zero | od -An -tx1").stdout == b"4\n 00 00\n"
