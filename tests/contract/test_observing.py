"""A run that is observed: what is seen of it, that it is the same run, and that nothing hangs on who looks. Real guests throughout."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agent_sandbox._fast.values import replace
from agent_sandbox.engine.work import Command, Outcome, Work
from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.policy.model import ProgramRules, cloned
from agent_sandbox.runtime.base import Guest, Launch
from agent_sandbox.runtime.process.runtime import ProcessRuntime
from agent_sandbox.testing import CLAIMS, Bench, Claim
from tests import compiled
from tests.patience import until
from tests.security.harness import ENVIRONMENT, GENEROUS, ROOT, Box, listening, outside, reading

# The claims about what a program can tell of how it runs; the rest are about limits, which others keep.
_SAME = {
    "an_exit_code_is_the_programs_own",
    "a_signal_is_reported_as_a_shell_does",
    "streams_are_exact_and_apart",
    "what_cannot_be_found_ends_with_127_and_what_cannot_be_executed_with_126",
    "nothing_outlives_its_run",
}

_CALLS = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def call(*words):
    got = libc.syscall(*words)
    return -ctypes.get_errno() if got < 0 else got
"""
_FLOOD = """
import os
for number in range(1000):
    try:
        os.open(f"/none/{number}", 0)
    except OSError:
        pass
"""
_START = """
import subprocess
subprocess.run(["git", "--version"])
try:
    subprocess.run(["tr"])
except FileNotFoundError:
    print("none")
"""


def seen(outcome: Outcome, kind: str) -> dict[str, bool]:
    """What of this kind was seen, and whether it is allowed."""
    return {each.target: each.allowed for each in outcome.observed if each.kind == kind}


def test_the_files_and_programs_of_a_pipeline_are_seen_with_who_used_them(box: Box) -> None:
    outcome = box.shell("cat greeting.txt | tr a-z A-Z > shouted.txt; cat shouted.txt", observe=True)
    assert outcome.stdout == b"HELLO\n"
    found = {(each.kind, os.path.basename(each.target), os.path.basename(each.program)) for each in outcome.observed}
    assert {("read", "greeting.txt", "cat"), ("write", "shouted.txt", "bash"), ("execute", "tr", "bash")} <= found
    assert seen(outcome, "read")[str(box.project / "greeting.txt")] is True
    (twice,) = (each for each in outcome.observed if (each.kind, os.path.basename(each.target)) == ("execute", "cat"))
    assert twice.times == 2


def test_each_way_to_change_a_file_is_seen_by_its_absolute_name(box: Box) -> None:
    done = """
import os
os.mkdir("a"); os.rename("greeting.txt", "a/b"); os.symlink("a/b", "link"); os.link("a/b", "hard"); os.truncate("a/b", 1)
os.chmod("a/b", 0o600); os.utime("a/b"); os.unlink("link"); os.rmdir("src/empty") if os.path.exists("src/empty") else os.mkfifo("fifo")
fd = os.open("a", os.O_DIRECTORY); os.close(os.open("c", os.O_WRONLY | os.O_CREAT, dir_fd=fd)); os.unlink("b", dir_fd=fd)
os.chdir("a"); open("../a/./d", "x").close()
"""
    outcome = box.python(done, observe=True)
    assert outcome.exit.code == 0, outcome.stderr
    top = str(box.project)
    names = ("a", "a/b", "greeting.txt", "link", "hard", "fifo", "a/c", "a/d")
    assert {f"{top}/{name}" for name in names} <= seen(outcome, "write").keys()
    assert seen(outcome, "read")[f"{top}/a/b"], "a second name gives access to what it names"


def test_git_and_its_children_are_seen(box: Box) -> None:
    outcome = box.shell("git init -q new && cd new && git -c user.name=a -c user.email=a@b commit -q --allow-empty -m x", observe=True)
    assert outcome.exit.code == 0, outcome.stderr
    assert any(target.endswith("/new/.git/HEAD") for target in seen(outcome, "write"))
    assert any(os.path.basename(target) == "git" for target in seen(outcome, "execute"))


def test_a_secret_that_is_asked_for_is_seen_as_denied_and_not_read(box: Box) -> None:
    secret = box.home / ".ssh" / "id_rsa"
    canary = secret.read_text()
    assert outside(reading(secret)) == [canary]
    outcome = box.python(reading(secret, box.project / "greeting.txt"), observe=True)
    assert json.loads(outcome.stdout) == ["hello\n"]
    assert seen(outcome, "read")[str(secret)] is False
    assert seen(outcome, "read")[str(box.project / "greeting.txt")] is True
    assert seen(box.unmasked.python(reading(secret), observe=True), "read")[str(secret)] is True


def test_a_program_that_is_not_allowed_is_seen_where_the_machine_has_it_and_a_search_along_the_path_is_not(box: Box) -> None:
    policy = cloned(masks=(), limits=GENEROUS, programs=ProgramRules((("git",),)))
    outcome = box.with_(policy=policy).python(_START, observe=True)
    assert outcome.stdout.endswith(b"none\n"), outcome.stderr
    tried = seen(outcome, "execute").items()
    assert {os.path.basename(target) for target, allowed in tried if allowed} == {"git"}
    assert {os.path.basename(target) for target, allowed in tried if not allowed} == {"tr"}
    assert all(os.path.lexists(target) for target, _ in tried)


def test_a_name_that_is_asked_for_is_seen_and_the_connection_that_follows_is_called_by_it(box: Box) -> None:
    connect = """
import json, socket
came = []
for host, port in (("canary.example.com", 443), ("192.0.2.7", 8080), ("2001:db8:ffff::7", 25)):
    try:
        socket.create_connection((host, port), timeout=5)
        came.append("through")
    except OSError as error:
        came.append(error.errno)
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    for address in (("192.0.2.8", 9), ("192.0.2.53", 53), ("127.0.0.1", 9)):
        try:
            sock.sendto(b"x", address)
        except OSError as error:
            came.append(error.errno)
with socket.socket() as server:
    server.bind(("127.0.0.1", 7777)); server.listen()
    socket.create_connection(("127.0.0.1", 7777)).close()
print(json.dumps(came))
"""
    outcome = box.python(connect, observe=True)
    assert outcome.exit.code == 0, outcome.stderr
    assert json.loads(outcome.stdout) == [101, 101, 101, 101, 101], "no way leads out"
    assert seen(outcome, "resolve") == {"canary.example.com": False}
    reached = seen(outcome, "connect")
    assert {
        "canary.example.com:443",
        "192.0.2.7:8080",
        "[2001:db8:ffff::7]:25",
        "192.0.2.8:9",
        "192.0.2.53:53",
        "127.0.0.1:7777",
    } <= reached.keys()
    assert not any(reached.values())
    assert "127.0.0.1:7777" in seen(outcome, "listen")
    assert not any(target.startswith("198.18.") for target in reached)


def test_names_are_answered_for_and_still_nothing_leaves(box: Box) -> None:
    """The wall of the network is the same as ever: who listens on the machine hears nothing, and there is no device but loopback."""
    look = "import json; print(json.dumps([line.split(':')[0].strip() for line in open('/proc/net/dev').readlines()[2:]]))"
    knock = "import json, socket\ntry:\n    socket.create_connection(('{}', {}), timeout=3)\n    print(1)\nexcept OSError:\n    print(0)\n"
    with listening(socket.AF_INET, ("127.0.0.1", 0)) as host:
        assert outside(knock.format(*host.address)) == 1
        assert until(lambda: host.accepted == 1)
        assert box.probe(knock.format(*host.address), observe=True) == 0
        assert box.probe(knock.format("localhost.example.com", host.address[1]), observe=True) == 0
        assert host.accepted == 1
    assert box.probe(look, observe=True) == ["lo"]


@pytest.mark.parametrize("claim", [claim for claim in CLAIMS if claim.__name__ in _SAME], ids=lambda claim: claim.__name__)
def test_a_program_cannot_tell_that_it_is_observed(claim: Claim, box: Box) -> None:
    class Observing(ProcessRuntime):
        def launch(self, launch: Launch) -> Guest:  # type: ignore[override]
            return box.runtime.launch(replace(launch, observe=True))

    claim(Bench(Observing(), box.session().explain(Work(Command(("true",)), ENVIRONMENT))))


def test_threads_children_and_signals_are_as_without_it(box: Box) -> None:
    busy = """
import json, os, signal, subprocess, threading
caught = []
signal.signal(signal.SIGALRM, lambda *_: caught.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
def work():
    for _ in range(60):
        os.close(os.open("/etc/passwd", os.O_RDONLY))
threads = [threading.Thread(target=work) for _ in range(4)]
[each.start() for each in threads]; [each.join() for each in threads]
ended = [subprocess.run(["true"]).returncode for _ in range(3)]
ended.append(os.spawnvp(os.P_WAIT, "false", ["false"]))
signal.setitimer(signal.ITIMER_REAL, 0)
print(json.dumps([ended, bool(caught)]))
"""
    outcome = box.python(busy, observe=True)
    assert json.loads(outcome.stdout or b"null") == [[0, 0, 0, 1], True], (outcome.exit, outcome.stderr)
    (opened,) = (each for each in outcome.observed if (each.kind, each.target) == ("read", "/etc/passwd"))
    assert opened.times >= 240


def test_calls_with_arguments_that_lead_nowhere_fail_as_ever(box: Box) -> None:
    """Bad pointers, a name without an end, one that ends where its page does, an address that is too long, a descriptor that is none."""
    hostile = (
        _CALLS
        + """
import json, mmap
pages = mmap.mmap(-1, 3 * 4096)
base = ctypes.addressof(ctypes.c_char.from_buffer(pages))
libc.mprotect(ctypes.c_void_p(base + 2 * 4096), 4096, 0)
OPEN, CONNECT, SENDMSG, EXECVE, UNLINKAT = NUMBERS
def at(place): return ctypes.c_void_p(base + place)
got = [call(OPEN, -100, ctypes.c_void_p(bad), 0) for bad in (0, 1, 0x7FFFFFFFF000, 0xFFFFFFFFFFFFFFFF)]
pages[0:8192] = b"a" * 8192
got.append(call(OPEN, -100, at(0), 0))
pages[8192 - 6 : 8192] = b"/etc/\\0"
got.append(call(OPEN, -100, at(8192 - 6), 0) > 0)
pages[8192 - 5 : 8192] = b"/etc/"
got.append(call(OPEN, -100, at(8192 - 5), 0))
got.append(call(OPEN, 999, ctypes.c_char_p(b"relative"), 0))
got.append(call(UNLINKAT, -100, ctypes.c_char_p(b""), 0))
got.append(call(CONNECT, 999, at(8192 - 4), 128))
got.append(call(CONNECT, 0, ctypes.c_void_p(1), 0xFFFFFFFF))
got.append(call(SENDMSG, 999, ctypes.c_void_p(1), 0))
got.append(call(EXECVE, ctypes.c_void_p(1), None, None))
print(json.dumps(got))
"""
    ).replace("NUMBERS", repr(_numbers("openat", "connect", "sendmsg", "execve", "unlinkat")))
    without, with_it = (box.python(hostile, observe=each) for each in (False, True))
    assert without.exit.code == 0, without.stderr
    assert json.loads(with_it.stdout) == json.loads(without.stdout)
    assert "/etc" in seen(with_it, "read")
    assert with_it.notes == without.notes


def test_a_guest_has_no_hold_of_what_it_is_observed_by_and_adds_no_filter_of_its_own(box: Box) -> None:
    own = (
        _CALLS
        + """
import json, os, struct
held = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")]
code = ctypes.create_string_buffer(struct.pack("=HBBI", 6, 0, 0, 0x7FFF0000))
program = ctypes.create_string_buffer(struct.pack("=HxxxxxxQ", 1, ctypes.addressof(code)))
got = [call(SECCOMP, 1, flags, program) for flags in (0, 8)]
os.close(os.open("/etc/passwd", os.O_RDONLY))
print(json.dumps([[name for name in held if "seccomp" in name], got]))
"""
    ).replace("SECCOMP", str(_numbers("seccomp")[0]))
    outcome = box.python(own, observe=True)
    assert json.loads(outcome.stdout or b"null") == [[], [-22, -22]], outcome.stderr
    assert "/etc/passwd" in seen(outcome, "read")


def test_a_process_that_is_not_dumpable_is_observed_or_it_is_said_that_it_was_not(box: Box) -> None:
    """Rootless, what was forked from our interpreter and not executed since is beyond our reach then."""
    hide = "import ctypes, os\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\nos.close(os.open('greeting.txt', os.O_RDWR))\n"
    target = str(box.project / "greeting.txt")
    executed, forked = box.run("python3", "-c", hide, observe=True), box.python(hide, observe=True)
    assert target in seen(executed, "read") and target in seen(executed, "write"), executed.notes
    assert target in seen(forked, "read") or (not ROOT and "1 of its calls could not be looked at" in forked.notes)


@pytest.mark.needs_root  # an unprivileged guest cannot change a file of root's
@pytest.mark.parametrize("made", ["mkfifo", "ln -s /dev/zero", "ln -s /proc/self/mem"])
def test_settings_that_an_earlier_run_has_written_hold_nothing_up(box: Box, made: str) -> None:
    kept = box.kept
    assert kept.shell(f"rm -f /etc/resolv.conf && {made} /etc/resolv.conf").exit.code == 0
    outcome = kept.run("cat", "greeting.txt", observe=True)
    assert outcome.stdout == b"hello\n" and str(box.project / "greeting.txt") in seen(outcome, "read")


def test_a_flood_is_bounded_and_said_to_be(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_sandbox.runtime.observe.observer.MOST", 50)
    outcome = box.python(_FLOOD, observe=True)
    assert outcome.exit.code == 0 and len(outcome.observed) == 50
    assert any("950 calls after 50 of them were not looked at" in note for note in outcome.notes)


@pytest.mark.torture
def test_a_hundred_thousand_calls_are_seen(box: Box) -> None:
    flood = "import os\nfor _ in range(100_000):\n    os.close(os.open('/etc/passwd', os.O_RDONLY))\n"
    outcome = box.python(flood, observe=True)
    assert [each.times for each in outcome.observed if each.target == "/etc/passwd"] == [100_000]


def test_nothing_is_left_of_observing(box: Box) -> None:
    for _ in range(2):  # the second leaves the mask layers that later runs share
        box.run("true", observe=True)
    before = sorted(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        box.run("cat", "greeting.txt", observe=True)
    box.run("sleep", "60", observe=True, on_start=lambda guest: guest.kill())
    assert (sorted(os.listdir("/proc/self/fd")), threading.active_count()) == before


_SUPERVISOR = """
import os, sys, time
from pathlib import Path
from agent_sandbox.ledger.writer import Ledger
from agent_sandbox.runtime.process.runtime import ProcessRuntime
from tests.security.harness import Box
project = Path(sys.argv[1])
box = Box(ProcessRuntime(), project, project, Ledger(str(project / "ledger"), clock=time.time))
loop = f"import os\\nprint('there', flush=True)\\nwhile True: os.close(os.open('/etc/passwd', 0)) # {sys.argv[2]}"
box.run("python3", "-c", loop, observe=True, on_output=lambda *_: os.write(1, b"running\\n"))
"""


def test_when_the_supervisor_dies_so_does_what_it_observed(project: Path) -> None:
    mark = f"observed-{os.getpid()}-{project.parent.name}"
    with subprocess.Popen([sys.executable, "-c", _SUPERVISOR, str(project), mark], stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None and supervisor.stdout.readline() == b"running\n"
        assert len(_marked(mark)) >= 2, "the supervisor and its guest carry the mark"
        supervisor.kill()
    assert until(lambda: not _marked(mark)), _marked(mark)


@pytest.mark.needs_root
def test_a_run_inside_webassembly_cannot_be_observed_and_says_so(box: Box) -> None:
    inside = compiled.runtime()
    try:
        with pytest.raises(RuntimeUnavailable, match="no observer"):
            box.with_(runtime=inside).python("1", observe=True)
    finally:
        inside.close()


def test_guests_that_wait_beforehand_are_not_given_to_a_run_that_is_observed(box: Box) -> None:
    warm = ProcessRuntime(warm=1)
    try:
        for observe in (False, True, False):
            outcome = box.with_(runtime=warm).python("open('/etc/passwd')", observe=observe)
            assert bool(outcome.observed) is observe
    finally:
        warm.close()


def _marked(mark: str) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark.encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                found.append(int(name))
        except OSError:
            continue
    return found


def _numbers(*names: str) -> list[int]:
    from agent_sandbox.kernel import syscall_rules, syscalls

    known = syscall_rules.numbers(syscalls.MACHINE)
    return [known[name] for name in names]
