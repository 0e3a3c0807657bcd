"""Attacks on other processes: terminals, tracing, signals, identities."""

from __future__ import annotations

import errno
import os
import pty

import pytest

from agent_sandbox.runtime.base import ExitReason, Terminal
from agent_sandbox.runtime.process.guest_handle import ProcessGuest
from tests.security.conftest import Tell
from tests.security.harness import ROOT, Box, case, outside

TYPING = """
import ctypes, errno, fcntl, json, os, termios
libc = ctypes.CDLL(None, use_errno=True)
found = {}
for fd in (0, 1, 2):
    for name, request in (("TIOCSTI", 0x5412), ("TIOCLINUX", 0x541C), ("TIOCSTI with garbage above", 0x5412 | 1 << 40)):
        buffer = ctypes.create_string_buffer(b"!")
        result = libc.syscall(ctypes.c_long(16), fd, ctypes.c_ulong(request), buffer)
        found[f"{name} {fd}"] = "ok" if result == 0 else errno.errorcode[ctypes.get_errno()]
print(json.dumps(found))
"""


@case(25)
def test_nothing_can_be_typed_into_a_terminal(number: int, box: Box, tell: Tell) -> None:
    inside = box.probe(TYPING)
    assert set(inside.values()) == {"EPERM"}, inside
    own = box.python(TYPING, terminal=Terminal(24, 80))
    assert b"!" not in own.stdout.replace(b'"!"', b"") and b'"ok"' not in own.stdout
    pid, master = pty.fork()
    if pid == 0:
        os.execvp("python3", ["python3", "-c", TYPING])
    said = b""
    try:
        while chunk := os.read(master, 4096):
            said += chunk
    except OSError:
        pass  # its end
    os.waitpid(pid, 0)
    os.close(master)
    # Who may administer the machine may type; others may where the machine still has the old ways (dev.tty.legacy_tiocsti), else EIO.
    assert b'"ok"' in said if ROOT else (b'"ok"' in said or b"EIO" in said), said
    tell(
        "EPERM, on a pipe and on a terminal of its own",
        control="outside the kernel decides: " + ("typed" if b'"ok"' in said else "EIO or EINVAL"),
    )


MEDDLING = """
import ctypes, errno, json, os, signal
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *arguments)
    return "ok" if result >= 0 else errno.errorcode[ctypes.get_errno()]
buffer = ctypes.create_string_buffer(64)
local = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 64)
sibling = os.fork()
if sibling == 0:
    signal.pause()
remote = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 64)
found = {}
for name, pid in (("supervisor", SUPERVISOR), ("init", 1), ("sibling", sibling)):
    found[f"ptrace {name}"] = call(101, 0x4206, pid, 0, 0)
    found[f"read {name}"] = call(310, pid, local, 1, remote, 1, 0)
    found[f"write {name}"] = call(311, pid, local, 1, remote, 1, 0)
    found[f"kcmp {name}"] = call(312, os.getpid(), pid, 0, 0, 0)
    try:
        handle = os.pidfd_open(pid)
        found[f"getfd {name}"] = call(438, handle, 0, 0)
    except OSError as error:
        found[f"getfd {name}"] = errno.errorcode[error.errno]
    try:
        os.close(os.open(f"/proc/{pid}/mem", os.O_RDWR))
        found[f"mem {name}"] = "ok"
    except OSError as error:
        found[f"mem {name}"] = errno.errorcode[error.errno]
os.kill(sibling, signal.SIGKILL)
os.waitpid(sibling, 0)
print(json.dumps(found))
"""


@case(26)
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers in this probe are those of x86_64")
def test_no_process_can_be_traced_or_read(number: int, box: Box, tell: Tell) -> None:
    probe = MEDDLING.replace("SUPERVISOR", str(os.getpid()))
    inside = box.probe(probe)
    # A guest may open the memory of its own child: that is its own. All else is refused, by the filter or because there is no such process.
    assert inside.pop("mem sibling") == ("EACCES" if box.runtime.traits.name == "gvisor" else "ok")
    assert set(inside.values()) <= {"EPERM", "ESRCH", "ENOENT", "EACCES", "ENOSYS"}, inside
    control = outside(probe)
    assert {control[f"{what} sibling"] for what in ("read", "getfd", "kcmp")} == {"ok"}
    tell(f"{len(inside)} attempts refused", control="all succeed on a sibling outside")


OTHERS = """
import json, os, resource, signal
found = set()
def attempt(name, deed):
    try:
        deed()
        found.add(name)
    except (OSError, ValueError):
        pass
for target in TARGETS:
    for number in (signal.SIGSTOP, signal.SIGUSR1, signal.SIGKILL):
        attempt("kill", lambda: os.kill(target, number))
    attempt("prlimit", lambda: resource.prlimit(target, resource.RLIMIT_NOFILE, (64, 64)))
    attempt("priority", lambda: os.setpriority(os.PRIO_PROCESS, target, 19))
    attempt("schedule", lambda: os.sched_setscheduler(target, os.SCHED_IDLE, os.sched_param(0)))
print(json.dumps(sorted(found)))
"""
OWN_CHILD = "import os, time\nchild = os.fork()\nif child == 0: time.sleep(60); os._exit(0)\n"


@case(28)
def test_signals_and_limits_reach_nobody_else(number: int, box: Box, tell: Tell) -> None:
    """Every other route to send a signal, and everything that could be done to init, is in test_signals.py."""
    inside = box.probe(OTHERS.replace("TARGETS", repr([os.getpid(), os.getppid()])))
    assert inside == []
    everybody = box.probe(
        "import json, os, signal\ntry: os.kill(-1, signal.SIGTERM)\nexcept OSError as error: print(json.dumps(error.errno))"
    )
    assert everybody in (errno.ESRCH, errno.EPERM), "there is nobody else but init"
    deadline = box.with_(limits=box.limits.__class__(wall_seconds=0.5, memory_bytes=None)).shell(
        "kill -STOP -1; kill -KILL -1; while :; do :; done"
    )
    assert deadline.exit.reason is ExitReason.TIMED_OUT, "and the timer still fires"
    control = outside(OWN_CHILD + OTHERS.replace("TARGETS", "[child]"))
    assert control == ["kill", "priority", "prlimit", "schedule"]
    tell("nobody is met; supervisor and init go on, the deadline holds", control="outside all of it works on a child")


@case(44, prio="P1")
def test_a_run_that_has_ended_is_never_signalled_by_number(number: int, box: Box, monkeypatch: pytest.MonkeyPatch, tell: Tell) -> None:
    """The supervisor ends runs by closing a socket and has no pid of theirs at all; helpers hold pidfds or are the parent."""
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(pid))
    monkeypatch.setattr(os, "killpg", lambda pid, number: sent.append(pid))
    plan_guests: list[ProcessGuest] = []
    outcome = box.run("true", on_start=plan_guests.append)
    plan_guests[0].kill()
    plan_guests[0].interrupt(15)
    box.with_(limits=box.limits.__class__(wall_seconds=0.2, memory_bytes=None)).run("sleep", "60")
    assert outcome.exit.code == 0 and sent == []
    tell("no kill(2) by the supervisor, before or after the end", control="os.kill is recorded")
    os.kill(1, 0)
    assert sent == [1]


@case(46)
def test_setuid_programs_change_nobody(number: int, box: Box, tell: Tell) -> None:
    outcome = box.shell("""
        grep -h NoNewPrivs /proc/self/status
        for program in su mount umount newgrp passwd chsh sudo pkexec newuidmap; do
            command -v $program >/dev/null && stat -c '%a' $(command -v $program)
        done | sort -u
        cp /usr/bin/id mine && chmod 4755 mine && echo "before $(id -u), by the file $(./mine -u)"
        python3 -c 'import os; os.setuid(12345)' 2>&1 | tail -1
        su nobody -s /bin/sh -c 'id -u' 2>/dev/null; umount /proc 2>/dev/null && echo unmounted
        grep -c nosuid /proc/self/mountinfo
    """)
    said = outcome.stdout.decode()
    own_kernel = box.runtime.traits.name == "gvisor"  # it shows neither that bit nor these options
    uid = 0 if own_kernel else os.getuid()  # there every user is user 0, without capabilities
    assert ("NoNewPrivs:\t1" in said or own_kernel) and "unmounted" not in said
    assert f"before {uid}, by the file {uid}\n" in said and ("PermissionError" in said or "OSError" in said)
    mounts = box.shell("grep -v nosuid /proc/self/mountinfo | grep -v ' /dev/\\| /proc/'").stdout
    assert mounts == b"" or own_kernel, "every mount that can hold a program is nosuid"
    tell(
        "NoNewPrivs, nosuid everywhere, same uid",
        control=f"real setuid programs are there: {[w for w in said.split() if w.startswith('4')]}",
    )
