"""Attacks on what the kernel counts: for each user, for each namespace, or for nobody. What a guest takes, its starter must not miss."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from agent_sandbox.kernel import ids
from tests.patience import machine_wide, until
from tests.security.conftest import Tell
from tests.security.harness import GENEROUS, ROOT, Box, case, outside
from tests.security.watching import held

# As many of each as can be had, up to a number that an ordinary user could have; all of it is kept.
TAKE = """
import ctypes, json, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
kept, ENOUGH = [], 5000
def most(limit, take):
    count = 0
    while count < min(limit, ENOUGH):
        try:
            if take() is False: break
        except OSError:
            break
        count += 1
    return count
def timer():
    event = (ctypes.c_int * 16)(); event[2] = signal.SIGUSR1
    return libc.timer_create(1, event, ctypes.byref(ctypes.c_void_p())) == 0
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN, signal.SIGUSR1})
found = {
    "inotify instances": most(100, lambda: libc.inotify_init1(0) >= 0),
    "terminals": most(80, lambda: kept.append(os.openpty())),
    "message queues": most(40, lambda: libc.mq_open(f"/q{len(kept)}{kept.append(0)}".encode(), 0o102, 0o600, None) >= 0),
    "timers and signals": most(2500, timer) + most(2500, lambda: libc.sigqueue(os.getpid(), signal.SIGRTMIN, None) == 0),
    "segments": most(300, lambda: libc.shmget(0, 4096, 0o600) >= 0),
    "semaphores": most(300, lambda: libc.semget(0, 100, 0o600) >= 0),
    "keys": most(10, lambda: libc.syscall(248, b"user", os.urandom(8).hex().encode(), b"x", 1, -2) > 0),
    "namespaces": most(3, lambda: libc.unshare(0x10000000 | 0x40000000) == 0),
    "descriptors": most(1000, lambda: kept.append(os.open("/dev/null", os.O_RDONLY))),
}
print(json.dumps(found), flush=True)
"""
BOUNDS = {"inotify instances": 32, "terminals": 64, "message queues": 1, "timers and signals": 1024, "keys": 0, "namespaces": 0}
OPEN_FILES = 600
OTHERS_MAY_COME = 3  # and take some of what is counted for the whole machine; what a guest takes is taken every time
ONE_OF_EACH = TAKE.replace("ENOUGH = [], 5000", "ENOUGH = [], 1")


def _tables() -> dict[str, str]:
    """What the machine's own ipc namespace holds, and how much of the quota for keys is used by this user."""
    tables = {name: Path(f"/proc/sysvipc/{name}").read_text() for name in ("shm", "sem", "msg")}
    keys = [line.split()[1:] for line in Path("/proc/key-users").read_text().splitlines() if line.split(":")[0].strip() == str(os.getuid())]
    return {**tables, "keys": str(keys)}


def _take_all(box: Box) -> tuple[dict[str, int], list[str]]:
    """What a guest could take, and what of it the machine missed meanwhile or afterwards."""
    before, terminals = _tables(), _terminals()
    with held(box.with_(limits=replace(GENEROUS, open_files=OPEN_FILES)), TAKE) as said:
        inside = json.loads(said)
        missed = [name for name, table in _tables().items() if table != before[name]]
        mine = outside(ONE_OF_EACH, namespace=("--user", "--map-root-user", "--ipc"))
        assert 0 not in mine.values(), f"who started it has some of each left: {mine}"
    assert {name: inside[name] for name, most in BOUNDS.items() if inside[name] > most} == {}
    assert inside["descriptors"] < OPEN_FILES
    given_back = until(lambda: _terminals() <= terminals, seconds=10)
    return inside, missed if given_back else [*missed, "terminals"]


def _terminals() -> int:
    return int(Path("/proc/sys/kernel/pty/nr").read_text())


@case(141, prio="P1")
def test_what_the_kernel_counts_cannot_be_used_up(number: int, box: Box, tell: Tell) -> None:
    with machine_wide():
        tries = [_take_all(box)]
        while tries[-1][1] and len(tries) < OTHERS_MAY_COME:
            tries.append(_take_all(box))
        inside, missed = tries[-1]
        assert missed == [], tries
        control = outside(TAKE, namespace=("--user", "--map-root-user", "--ipc"))
    unbounded = {name for name in inside if control[name] > inside[name]}
    assert unbounded >= {"inotify instances", "terminals", "timers and signals", "keys", "descriptors"}, control
    tell(str({name: inside[name] for name in BOUNDS}), control=str({name: control[name] for name in BOUNDS}))


# Descriptors on their way through a unix socket count for the user, in every namespace, against the limit of whoever sends next.
IN_FLIGHT = """
import os, socket
kept, nothing = [], os.open("/dev/null", os.O_RDONLY)
try:
    while True:
        pair = socket.socketpair()
        kept.append(pair)
        pair[0].setblocking(False)
        try:
            while True: socket.send_fds(pair[0], [b"x"], [nothing] * 200)
        except BlockingIOError: pass
except OSError as error:
    print(error.strerror, flush=True)
"""
SEND_ONE = (
    "import json, os, socket\na, b = socket.socketpair()\ntry: socket.send_fds(a, [b'x'], [0]); print('1')\nexcept OSError: print('0')"
)


@contextmanager
def _lowered(soft: int) -> Iterator[None]:
    """A supervisor with as low a limit on open files as most users have, in proportion."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@case(141, prio="P1")
def test_descriptors_kept_on_their_way_do_not_keep_others_from_starting(number: int, box: Box, tell: Tell) -> None:
    """Init hands the supervisor a descriptor as the very user its guests are; rootless the supervisor is that user too."""
    who = ids.FIRST_ID if ROOT else os.getuid()
    with box.fresh() as own, machine_wide(), _lowered(300):
        fresh = own.with_(limits=replace(GENEROUS, open_files=256))
        with held(fresh, IN_FLIGHT) as said:
            assert said.startswith(b"Too many references"), "it has all that it can have"
            assert fresh.run("echo", "started").stdout == b"started\n"
            assert box.python("print('started')").stdout == b"started\n"
            as_the_same_user = ["setpriv", "--reuid", str(who), "--inh-caps=-all", "--bounding-set=-all"] if ROOT else []
            control = subprocess.run([*as_the_same_user, sys.executable, "-c", SEND_ONE], capture_output=True, check=True)
            assert control.stdout == b"0\n"
    assert subprocess.run([sys.executable, "-c", SEND_ONE], capture_output=True, check=True).stdout == b"1\n"
    tell("others start", control="another process of that user can send none")


@case(141, prio="P1")
def test_the_supervisor_needs_no_watches_that_a_guest_could_use_up(number: int, box: Box, tell: Tell) -> None:
    """epoll watches are bounded for each user. Millions would be needed to try it; that we hold none is seen at once."""

    def polls() -> list[str]:
        return [to for fd in os.listdir("/proc/self/fd") if "eventpoll" in (to := _target(fd))]

    seen: list[list[str]] = []
    assert box.run("echo", "x", on_output=lambda *_: seen.append(polls())).exit.code == 0
    assert seen == [[]]
    import select

    with select.epoll():
        assert polls() == ["anon_inode:[eventpoll]"]
    tell("none is held while a guest runs", control="one that is opened is found")


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:  # the descriptor of the listing itself
        return ""


EMPTY_FILES = """
import json, os
made = 0
try:
    os.mkdir("d")
    while made < 9000:
        os.close(os.open(f"d/{made}", os.O_CREAT | os.O_WRONLY))
        made += 1
except OSError as error:
    assert error.strerror == "No space left on device"
print(json.dumps(made))
"""


@case(141, prio="P1")
@pytest.mark.parametrize("place", ["/tmp", "."], ids=["scratch", "layer"])
def test_files_with_nothing_in_them_are_bounded_too(number: int, place: str, box: Box, tell: Tell) -> None:
    source = f"import os; os.chdir({place!r})\n" + EMPTY_FILES
    outcome = box.with_(limits=replace(GENEROUS, disk_bytes=8 << 20)).python(source)
    made = int(outcome.stdout)
    told = "disk" in outcome.exit.limits_hit or (box.runtime.traits.name == "microvm" and place == "/tmp")  # inside, where nobody looks
    assert 2000 < made < 5000 and told
    assert box.probe(source) == 9000
    tell(f"{made} in 8 MiB, and said", control="9000 fit where there is room")
