"""Attacks on counters that the whole machine shares. A test takes a small part of one; the control arm shows that the part can be taken."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agent_sandbox.kernel import counters, syscalls
from agent_sandbox.kernel.syscall_rules import numbers
from agent_sandbox.runtime.base import ExitReason
from tests.security.conftest import Tell
from tests.security.harness import GENEROUS, Box, case, outside

MIB = 1 << 20
MEMORY = 64 * MIB
SCRATCH = ("--user", "--map-root-user", "--net")

# Fills socket buffers with about 150 MB, and tells how much of it the kernel holds. Above the limit it first waits for its end.
FILL = """
import fcntl, json, socket, struct, time
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as lo:  # a new namespace has its loopback device down
    flags = struct.unpack("16sh22x", fcntl.ioctl(lo, 0x8913, struct.pack("16sh22x", b"lo", 0)))[1]
    if not flags & 1: fcntl.ioctl(lo, 0x8914, struct.pack("16sh22x", b"lo", flags | 1))
kept = []
def large(made):
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF): made.setsockopt(socket.SOL_SOCKET, option, 1 << 30)
    made.setblocking(False)
    return made
def pair():
    if KIND == "unix": return [large(each) for each in socket.socketpair()]
    kind = socket.SOCK_STREAM if KIND == "tcp" else socket.SOCK_DGRAM
    there, here = socket.socket(socket.AF_INET, kind), socket.socket(socket.AF_INET, kind)
    there.bind(("127.0.0.1", 0))
    if KIND == "tcp": there.listen(1)
    here.connect(there.getsockname())
    if KIND == "tcp": there = there.accept()[0]
    return [large(here), large(there)]
def column(table, number, part):
    rows = [line.split() for line in open("/proc/net/" + table)][1:]
    return sum(int(row[number].split(":")[part], 16) for row in rows)
def held():
    if KIND == "unix": return sent
    if KIND == "netlink": return sum(int(line.split()[4]) for line in list(open("/proc/net/netlink"))[1:])
    return column(KIND, 4, 0) + column(KIND, 4, 1)
sent = 0
for number in range(400):
    if number % 20 == 0 and held() > 150 << 20: break
    if KIND == "netlink":
        kept.append(large(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)))
        question = struct.pack("=IHHIIBxHiII", 32, 18, 1, 1, 0, 0, 0, 1, 0, 0)  # about the loopback device; nobody reads the answer
        for _ in range(3000): kept[-1].send(question)
        continue
    kept.append(pair())
    here = 0
    try:
        while here < 8 << 20: here += kept[-1][0].send(bytes(60000))
    except BlockingIOError: pass
    sent += here
most = held()
if most > LIMIT: time.sleep(WAIT)
print(json.dumps(most))
"""


def _fill(kind: str, *, wait: float) -> str:
    return FILL.replace("KIND", repr(kind)).replace("LIMIT", str(MEMORY)).replace("WAIT", str(wait))


@pytest.fixture
def watched(box: Box) -> Iterator[Box]:
    """A box whose init is a fork of this process, and so has the constants that a test sets."""
    with box.fresh(single_threaded=True) as own:
        yield own.with_(limits=GENEROUS)


@case(301)
@pytest.mark.parametrize("kind", ["tcp", "udp", "netlink", "unix"])
def test_socket_buffers_are_bounded_with_the_memory(number: int, kind: str, box: Box, tell: Tell) -> None:
    outcome = box.with_(limits=replace(GENEROUS, memory_bytes=MEMORY)).run("python3", "-c", _fill(kind, wait=300))
    if outcome.exit.reason is ExitReason.EXITED:
        held = json.loads(outcome.stdout)
        assert held <= MEMORY, (held, outcome.stderr)
        inside = f"{held // MIB} MiB held"
    else:
        assert (outcome.exit.reason, outcome.exit.limits_hit) == (ExitReason.OUT_OF_MEMORY, ("memory",)), (outcome.exit, outcome.stderr)
        inside = "ended for memory"
    control = outside(_fill(kind, wait=0), namespace=SCRATCH)
    assert control > MEMORY
    tell(f"{inside} where {MEMORY // MIB} MiB are allowed", control=f"{control // MIB} MiB held")


# Python's mmap keeps a copy of the descriptor, which would count as well. A mapping of a file of the clone counts nowhere: see below.
MAP = """
libc = ctypes.CDLL(None)
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
def mapped(number, path="/tmp/file"):
    if not os.path.exists(path): open(path, "a").close()
    places = []
    for _ in range(number):
        fd = os.open(path, os.O_RDONLY); places.append(libc.mmap(None, 1, 1, 2, fd, 0)); os.close(fd)
    return places
def in_memory(number):
    for _ in range(number):
        fd = os.memfd_create("x"); libc.mmap(None, 1, 1, 2, fd, 0); os.close(fd)
def behind(deed):
    deed()
    threading.Thread(target=lambda: (time.sleep(WAIT), os._exit(0))).start()
    libc.syscall(EXIT, 0)  # the first thread ends, the other goes on
def hop():
    if time.monotonic() > END: os._exit(0)
    threading.Thread(target=hop).start()
def passing(deed):
    deed(); hop()
    libc.syscall(EXIT, 0)
""".replace("EXIT", str(numbers(syscalls.MACHINE)["exit"]))
OPEN = "kept.extend(os.open('/dev/null', os.O_RDONLY) for _ in range(NUMBER))"
WAYS = {
    "descriptors": OPEN,
    "descriptors of another thread": f"behind(lambda: {OPEN})",
    "descriptors of threads that come and go": f"passing(lambda: {OPEN})",
    "mappings": "mapped(NUMBER)",
    "hidden mappings": "mapped(NUMBER); libc.prctl(4, 0, 0, 0, 0)",
    "mappings of a misleading name": "mapped(NUMBER, '/tmp/ 00:00 0 00:00 0')",
    "mappings of another thread": "behind(lambda: mapped(NUMBER))",
    "mappings of threads that come and go": "passing(lambda: mapped(NUMBER))",
    "memfds": "in_memory(NUMBER)",
}
SHARE, TOO_MANY, FEW = 6000, 3000, 300  # files: of the run as these tests set it, and of each of three processes


def _hold(way: str, each: int, *, wait: float) -> str:
    deed = WAYS[way].replace("NUMBER", str(each))
    head = f"import ctypes, os, threading, time\nWAIT, END = {wait}, time.monotonic() + {wait}\nkept = []\n{MAP}"
    return f"{head}\nfor _ in range(2):\n    if os.fork() == 0: break\n{deed}\ntime.sleep(WAIT)"


def _limit_files(monkeypatch: pytest.MonkeyPatch, *, pressure: int) -> None:
    """Make the share small, so that a test can reach it, counted while the machine has more than `pressure` files open."""
    most = int(Path("/proc/sys/fs/file-max").read_text())
    for name, files in (("PRESSURE", pressure), ("SHARE", SHARE), ("STIR", SHARE // 8)):
        monkeypatch.setattr(counters, name, most // files)


def _is_left_alone(box: Box, way: str, each: int) -> bool:
    """Whether such a program comes to its end. One whose threads follow one another is now and then taken for one that hides."""
    tries = 3 if "come and go" in way else 1
    return any(box.run("python3", "-c", _hold(way, each, wait=1.0)).exit.reason is ExitReason.EXITED for _ in range(tries))


@case(302)
@pytest.mark.parametrize("way", WAYS)
def test_a_run_holds_no_more_than_its_share_of_the_machines_open_files(
    number: int, way: str, watched: Box, monkeypatch: pytest.MonkeyPatch, tell: Tell
) -> None:
    """With the real share the same program is not ended."""
    assert _is_left_alone(watched, way, TOO_MANY)
    _limit_files(monkeypatch, pressure=SHARE // 4)
    with watched.fresh(single_threaded=True) as small:
        ended = small.run("python3", "-c", _hold(way, TOO_MANY, wait=300)).exit
        assert (ended.reason, ended.limits_hit) == (ExitReason.SHARE_LIMIT, ("share",))
        if way != "hidden mappings":  # those are estimated, on the high side
            assert _is_left_alone(small, way, FEW)
    tell(f"ended above {SHARE} files", control=f"{3 * FEW} files, and {3 * TOO_MANY} with the real share, are not ended")


# Whether the kernel shows a mapping of a file of the clone as one of an overlay, and not as one of the layer below.
SHOWN = """
import json, mmap
with open("/etc/passwd") as file: kept = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
devices = [line.split()[2].split(":") for line in open("/proc/self/mountinfo") if " - overlay " in line]
overlays = {f"{int(major):02x}:{int(minor):02x}" for major, minor in devices}
print(json.dumps(any(line.split()[3] in overlays for line in open("/proc/self/maps") if "/etc/passwd" in line)))
"""

# How many of 3000 mapped files the machine counts, at the quietest of ten times: others open and close files meanwhile.
COUNTED = f"""
import ctypes, json, os
{MAP}
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
libc.mmap.restype = ctypes.c_void_p
def counted(path):
    before = int(open("/proc/sys/fs/file-nr").read().split()[0])
    places = mapped(3000, path)
    after = int(open("/proc/sys/fs/file-nr").read().split()[0])
    for place in places: libc.munmap(place, 1)
    return after - before
print(json.dumps([min(abs(counted("/etc/passwd")) for _ in range(10)), max(counted("/tmp/file") for _ in range(10))]))
"""


@case(302)
def test_files_of_the_clone_that_a_run_maps_are_not_held_against_it(
    number: int, watched: Box, monkeypatch: pytest.MonkeyPatch, tell: Tell
) -> None:
    """The kernel does not count them. Every program maps its libraries, so that many honest processes would have many."""
    if not watched.probe(SHOWN):
        pytest.skip("this kernel shows the layer below an overlay, so that such mappings are counted to be on the safe side")
    of_the_clone, in_memory = watched.probe(COUNTED)
    assert of_the_clone < 1500 < in_memory, "what the kernel counts"
    _limit_files(monkeypatch, pressure=1)
    with watched.fresh(single_threaded=True) as small:
        mapping = _hold("mappings", TOO_MANY, wait=1.0).replace("/tmp/file", "/etc/passwd")
        assert small.run("python3", "-c", mapping).exit.reason is ExitReason.EXITED
        assert small.run("python3", "-c", _hold("mappings", TOO_MANY, wait=300)).exit.reason is ExitReason.SHARE_LIMIT
    tell(f"{3 * TOO_MANY} mappings of its own files are left alone", control=f"with as many of files in memory it is ended above {SHARE}")


CALLS = """
import ctypes, json, os, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *words):
    ctypes.set_errno(0)
    return libc.syscall(number, *words), ctypes.get_errno()
context = ctypes.c_ulong(0)
allow = ctypes.create_string_buffer(struct.pack("=HBBI", 6, 0, 0, 0x7FFF0000))
program = ctypes.create_string_buffer(struct.pack("=HxxxxxxQ", 1, ctypes.addressof(allow)))
libc.prctl(38, 1, 0, 0, 0)
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
    attach = libc.setsockopt(one.fileno(), 1, 26, program, 16)
got = {
    "requests": call(IO_SETUP, 500, ctypes.byref(context))[0],
    "taken": context.value != 0,
    "socket filter": attach,
    "filter": call(SECCOMP, 1, 0, program),
    "filter by prctl": (libc.prctl(22, 2, program), ctypes.get_errno()),
}
print(json.dumps(got))
""".replace("IO_SETUP", str(numbers(syscalls.MACHINE)["io_setup"])).replace("SECCOMP", str(numbers(syscalls.MACHINE)["seccomp"]))


@case(303)
def test_what_only_the_whole_machine_bounds_is_not_handed_out(number: int, box: Box, tell: Tell) -> None:
    """Huge pages need a machine that has some; `tests/kernel/test_seccomp.py` shows who refuses them."""
    inside, control = box.probe(CALLS), outside(CALLS)
    refused = {"filter": [-1, errno.EINVAL], "filter by prctl": [-1, errno.EPERM]}
    assert inside == {"requests": -1, "taken": False, "socket filter": -1, **refused}
    assert control == {"requests": 0, "taken": True, "socket filter": 0, "filter": [0, 0], "filter by prctl": [0, 0]}
    tell("none of them", control="500 requests, a filter of calls, a filter of packets")


# Connections that are closed while their other side does not read.
ORPHANS = """
import socket, time
kept = []
for _ in range(200):
    there = socket.socket(); there.bind(("127.0.0.1", 0)); there.listen(1)
    here = socket.create_connection(there.getsockname()); other = there.accept()[0]
    kept.append(other); here.setblocking(False)
    try:
        while True: here.send(bytes(65536))
    except BlockingIOError: pass
    here.close(); there.close()
time.sleep(WAIT)
"""


@case(304)
def test_a_run_leaves_no_more_than_its_share_of_closing_connections(
    number: int, watched: Box, monkeypatch: pytest.MonkeyPatch, tell: Tell
) -> None:
    assert watched.run("python3", "-c", ORPHANS.replace("WAIT", "1")).exit.reason is ExitReason.EXITED
    monkeypatch.setattr(counters, "MOST_ORPHANS", 50)
    with watched.fresh(single_threaded=True) as small:
        ended = small.run("python3", "-c", ORPHANS.replace("WAIT", "300")).exit
        assert (ended.reason, ended.limits_hit) == (ExitReason.SHARE_LIMIT, ("share",))
    tell("ended with 200 where 50 may be", control="200 where 4096 may be are left alone")
