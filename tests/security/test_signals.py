"""Every way to send a signal, tried on init and on whoever started the run; and every way to slow init down or to change what it is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

from agent_sandbox.kernel import landlock
from agent_sandbox.runtime.base import ExitReason
from tests.patience import stretched
from tests.security.conftest import Tell
from tests.security.harness import GENEROUS, Box, case, outside

x86_64 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers in this probe are those of x86_64")

# TARGETS is a list of expressions: a process each, or none. What is a child of ours is waited for, so that an effect is seen and not only
# an answer.
ROUTES = """
import ctypes, errno, fcntl, json, os, signal, struct, time
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(each) if isinstance(each, int) else each for each in arguments))
    if result < 0: raise OSError(ctypes.get_errno(), "")
def queued(number):
    info = ctypes.create_string_buffer(128)
    struct.pack_into("iii", info, 0, number, 0, -1)
    return info
def through_a_file(pid, number):
    reading, writing = os.pipe()
    fcntl.fcntl(reading, fcntl.F_SETOWN, pid)
    fcntl.fcntl(reading, 10, number)  # F_SETSIG: this one instead of SIGIO
    fcntl.fcntl(reading, fcntl.F_SETFL, fcntl.fcntl(reading, fcntl.F_GETFL) | fcntl.FASYNC)
    os.write(writing, b"x")
ROUTES = {
    "kill": lambda pid, number: os.kill(pid, number),
    "kill of a group": lambda pid, number: os.kill(-pid, number),
    "tkill": lambda pid, number: call(200, pid, number),
    "tgkill": lambda pid, number: call(234, pid, pid, number),
    "rt_sigqueueinfo": lambda pid, number: call(129, pid, number, queued(number)),
    "rt_tgsigqueueinfo": lambda pid, number: call(297, pid, pid, number, queued(number)),
    "pidfd_send_signal": lambda pid, number: signal.pidfd_send_signal(os.pidfd_open(pid), number),
    "F_SETSIG": through_a_file,
}
def child():
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        while True: time.sleep(60)
    while os.getpgid(pid) != pid: time.sleep(0.001)
    return pid
found = {}
for target in TARGETS:
    for route, send in ROUTES.items():
        for number in SIGNALS:
            pid = eval(target)
            try:
                send(pid, number)
                answer = "sent"
            except OSError as error:
                answer = errno.errorcode[error.errno]
            if target == "child()":
                deadline = time.monotonic() + 5
                while not (ended := os.waitpid(pid, os.WNOHANG))[0] and answer == "sent" and time.monotonic() < deadline: time.sleep(0.001)
                answer = "ended" if ended[0] else answer
            found[f"{route} {int(number)} to {target}"] = answer
print(json.dumps(found), flush=True)
"""


def _routes(targets: list[str], signals: Iterable[int]) -> str:
    return ROUTES.replace("TARGETS:", f"{targets!r}:").replace("SIGNALS:", f"{[int(each) for each in signals]!r}:")


@pytest.fixture
def victim() -> Iterator[int]:
    """A process of the same user on the machine."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True) as process:
        yield process.pid
        process.kill()


@x86_64
@case(28)
def test_no_signal_reaches_init_or_anybody_outside_by_any_route(number: int, box: Box, victim: int, tell: Tell) -> None:
    everything = [each for each in signal.valid_signals() if each not in (32, 33)]
    inside = box.probe(_routes(["1", str(victim)], everything))
    outward = {name: answer for name, answer in inside.items() if not name.endswith(" to 1")}
    # Telling a file to signal a process that is not there succeeds: it is when the signal is due that there is nobody.
    assert {answer for name, answer in outward.items() if "F_SETSIG" not in name} == {"ESRCH"}
    # The group 1 is everybody whom one may signal, except init: in a machine, a user may signal other processes of its own.
    toward_init = {
        answer for name, answer in inside.items() if name.endswith(" to 1") and not name.startswith(("F_SETSIG", "kill of a group"))
    }
    # Before Landlock's sixth version signals are accepted and have no effect: init catches none of them.
    version = 0 if box.runtime.traits.name == "microvm" else landlock.abi()  # the kernel of a machine is older
    assert toward_init == ({"EPERM"} if version >= 6 else {"sent"}) or toward_init <= {"EPERM", "ESRCH"}
    os.kill(victim, 0)
    with open(f"/proc/{victim}/stat") as stat:
        assert stat.read().rpartition(")")[2].split()[0] in "RSD", "neither stopped nor ended"
    control = outside(_routes(["child()"], [signal.SIGKILL, signal.SIGTERM]))
    assert set(control.values()) == {"ended"}, control
    tell(f"{len(inside)} attempts: init goes on, nobody outside is met", control=f"{len(control)} on a child outside: each ends it")


HARASS = """
import os, signal, time
for _ in range(4):
    if os.fork() == 0:
        os.setsid()
        while True:
            for target, number in ((1, 9), (1, signal.SIGSTOP), (1, signal.SIGCHLD), (-1, signal.SIGCHLD), (-1, signal.SIGSTOP)):
                try: os.kill(target, number)
                except OSError: pass
            if os.fork() == 0: os._exit(0)
            try: os.kill(os.getppid(), signal.SIGSTOP)
            except OSError: pass
time.sleep(60)
"""


@case(28, 139)
def test_a_crowd_that_harasses_init_does_not_move_the_deadline(number: int, box: Box, tell: Tell) -> None:
    limited = box.with_(limits=replace(GENEROUS, processes=60, wall_seconds=0.7))
    outcome = limited.python(HARASS)
    assert outcome.exit.reason is ExitReason.TIMED_OUT and outcome.exit.usage.wall_seconds < 0.7 + stretched(1.0)
    assert box.run("true").exit.code == 0
    tell(f"ended after {outcome.exit.usage.wall_seconds:.2f} s", control="a run that harasses nobody exits by itself")


# What would hold init up, or make it somebody else's: scheduling, limits, priorities, names; then what /proc would let be written.
INIT = """
import ctypes, errno, json, os, resource
libc = ctypes.CDLL(None, use_errno=True)
def call(function, *arguments):
    if function(*(ctypes.c_long(each) for each in arguments)) < 0: raise OSError(ctypes.get_errno(), "")
def write(name, text):
    handle = os.open(f"/proc/{TARGET}/{name}", os.O_WRONLY)
    try: os.write(handle, text)
    finally: os.close(handle)
DEEDS = {
    "idle": lambda: os.sched_setscheduler(TARGET, os.SCHED_IDLE, os.sched_param(0)),
    "one processor": lambda: os.sched_setaffinity(TARGET, [0]),
    "nice": lambda: os.setpriority(os.PRIO_PROCESS, TARGET, 19),
    "nice user": lambda: os.setpriority(os.PRIO_USER, os.getuid(), 19),
    "idle disk": lambda: call(libc.syscall, 251, 1, TARGET, 3 << 13),
    "no descriptors": lambda: resource.prlimit(TARGET, resource.RLIMIT_NOFILE, (4, 4)),
    "core files": lambda: resource.prlimit(TARGET, resource.RLIMIT_CORE, (0, 0)),
    "no processor time": lambda: resource.prlimit(TARGET, resource.RLIMIT_CPU, (1, 1)),
    "core scheduling": lambda: call(libc.prctl, 62, 2, TARGET, 1, 0),
    "first to be killed": lambda: write("oom_score_adj", b"1000"),
    "slack": lambda: write("timerslack_ns", b"1000000000"),
    "what it dumps": lambda: write("coredump_filter", b"0x7f"),
    "its group's share": lambda: write("autogroup", b"19"),
    "its memory": lambda: write("mem", b"x"),
    "its name": lambda: write("comm", b"x"),
    "its pages": lambda: write("clear_refs", b"1"),
    "its ids": lambda: write("uid_map", b"0 0 1"),
}
found = {}
for name, deed in DEEDS.items():
    try:
        deed()
        found[name] = "done"
    except OSError as error:
        found[name] = errno.errorcode[error.errno]
print(json.dumps(found))
"""
# In a session of its own: the kernel shares processors out by session, and this test would slow down whoever started it.
ON_A_CHILD = """
import os, time
TARGET = os.fork()
if TARGET == 0:
    os.setsid()
    time.sleep(600)
    os._exit(0)
while os.getsid(TARGET) != TARGET: pass
"""


@x86_64
@case(28)
def test_init_can_be_neither_slowed_down_nor_changed(number: int, box: Box, tell: Tell) -> None:
    inside = box.probe("TARGET = 1\n" + INIT)
    assert "done" not in inside.values(), inside
    control = outside(
        ON_A_CHILD + INIT + "os.kill(TARGET, 9)", namespace=("--user", "--map-root-user", "--pid", "--mount-proc", "--fork")
    )  # without a pid namespace, "nice user" would slow the whole machine down
    done = {name for name, answer in control.items() if answer == "done"}
    assert done >= {"idle", "one processor", "nice", "idle disk", "no descriptors", "core files", "first to be killed"}, control
    assert done >= {"what it dumps", "its pages"}
    tell(f"{len(inside)} ways refused: {json.dumps(sorted(set(inside.values())))}", control=f"{len(done)} of them work on a child outside")
