"""Attempts to have a power, to keep one, or to find a program to which the rules do not apply."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from agent_sandbox.errors import LaunchFailed
from agent_sandbox.kernel import landlock, namespaces, seccomp, syscalls
from tests.security.conftest import Tell
from tests.security.harness import ENVIRONMENT, GENEROUS, Box, case, outside

SETS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
ROOTLIKE = ("--user", "--map-root-user")

# Of every thread of every process there is, init among them; and after an execve.
HELD = """
import json, os, subprocess, sys, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
held = {}
for pid in os.listdir("/proc"):
    if pid.isdecimal():
        for task in os.listdir(f"/proc/{pid}/task"):
            for line in open(f"/proc/{pid}/task/{task}/status"):
                if line.startswith("Cap"): held.setdefault(line.split()[0][:-1], set()).add(int(line.split()[1], 16))
after = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True).stdout
for line in after.splitlines():
    if line.startswith("Cap"): held[line.split()[0][:-1]].add(int(line.split()[1], 16))
print(json.dumps({name: sorted(values) for name, values in held.items()}))
"""


@case(47)
def test_nobody_inside_has_any_capability(number: int, box: Box, tell: Tell) -> None:
    inside = box.probe(HELD)
    shown = SETS[:4] if box.runtime.traits.name == "gvisor" else SETS  # its kernel shows no ambient ones
    assert inside == {name: [0] for name in shown}, inside
    assert box.run("python3", "-c", HELD).stdout.decode().count("[0]") == len(shown)
    control = outside(HELD, namespace=(*ROOTLIKE, "--pid", "--fork", "--mount-proc"))
    assert all(control[name][-1] for name in ("CapPrm", "CapEff", "CapBnd")), control
    tell("all five sets are empty: init, guest, threads, after execve", control="in a bare namespace the probe finds all of them")


@case(47)
def test_a_stage_that_still_has_a_power_does_not_begin(number: int, box: Box, monkeypatch: pytest.MonkeyPatch, tell: Tell) -> None:
    def begin() -> bytes:
        with box.fresh(single_threaded=True) as own:  # forks this very process: what is changed here is changed in its guests
            return own.shell("echo ran").stdout

    assert begin() == b"ran\n", "the control arm: as it is, it begins"
    for module, name, instead, why in (
        (namespaces, "drop_capabilities", lambda: None, "capabilities are left"),
        (seccomp, "install", lambda program: _fail(), "no filter today"),
        (landlock, "enforce", lambda rules: _fail(), "no filter today"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, instead)
            with pytest.raises(LaunchFailed, match=why):
                begin()
    tell("capabilities, filter or Landlock missing: no guest", control="as it is, it begins")


def _fail() -> None:
    raise OSError(1, "no filter today")


# How a program that no list names is started all the same. Each ends in the same few deeds.
WAYS = """
import ctypes, json, os, shutil, subprocess, sys
words = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
def from_memory():
    handle = os.memfd_create("x")
    with open(shutil.which(words[0]), "rb") as file: os.write(handle, file.read())
    os.execve(handle, words, os.environ)
def by_descriptor():
    handle = os.open(shutil.which(words[0]), os.O_RDONLY)
    libc.syscall(322, handle, b"", (ctypes.c_char_p * 9)(*map(os.fsencode, words)), (ctypes.c_char_p * 1)(), 0x1000)
def by_the_loader():
    loader = next(path for path in ("/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1") if os.path.exists(path))
    os.execv(loader, [loader, shutil.which(words[0]), *words[1:]])
def from_scratch(directory):
    target = os.path.join(directory, "renamed")
    shutil.copy(shutil.which(words[0]), target)
    os.execv(target, words)
def by_a_script():
    with open(SCRATCH + "/script", "w") as file: file.write("#!/bin/sh\\nexec " + " ".join(words))
    os.chmod(SCRATCH + "/script", 0o755)
    os.execv(SCRATCH + "/script", ["script"])
ways = {
    "memfd": from_memory, "execveat": by_descriptor, "loader": by_the_loader, "script": by_a_script,
    "scratch": lambda: from_scratch(SCRATCH), "shared memory": lambda: from_scratch(SHARED),
    "builtin": lambda: os.execv("/bin/bash", ["bash", "-c", 'echo "$(<"$1")"', "bash", words[-1]]),
}
found = {}
for name, way in ways.items():
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(writing, 1)
        try: way()
        except OSError: pass
        os._exit(113)
    os.close(writing)
    said = b""
    while part := os.read(reading, 4096): said += part
    found[name] = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said.decode()]
print(json.dumps(found))
"""


@case(41, prio="P2")
def test_however_a_program_is_started_the_same_rules_hold(number: int, box: Box, tmp_path: Path, tell: Tell) -> None:
    """There is no list of allowed programs to be gone around, and no document sells one: what is enforced is enforced on all."""
    secret = box.home / ".ssh" / "id_rsa"
    open_file = box.project / "greeting.txt"

    def ways(*words: str, scratch: str = "/tmp", shared: str = "/dev/shm") -> str:
        return f"import sys; SCRATCH, SHARED, sys.argv = {scratch!r}, {shared!r}, ['', *{list(words)!r}]\n" + WAYS

    readable = box.probe(ways("cat", str(open_file)))
    running = {name for name, (code, said) in readable.items() if (code, said) == (0, "hello\n")}
    assert running >= {"memfd", "execveat", "loader", "script", "scratch", "builtin"}, f"so that what follows says something: {readable}"
    assert not any(said.strip() for _, said in box.probe(ways("cat", str(secret))).values()), "a masked secret is masked for all of them"
    namespaces = box.probe(ways("unshare", "--user", "true"))
    assert all(code != 0 for name, (code, _) in namespaces.items() if name != "builtin"), namespaces
    control = outside(ways("cat", str(secret), scratch=str(tmp_path), shared=str(tmp_path)))
    assert {name for name, (_, said) in control.items() if said == secret.read_text()} >= running
    tell(f"{sorted(running)} run, and read no secret", control="outside each of them reads it")


# Powers asked for by system call, with what a kernel without our filter and without our limits answers.
POWERS = """
import ctypes, errno, json, os, resource
libc = ctypes.CDLL(None, use_errno=True)
def answer(function, *arguments):
    ctypes.set_errno(0)
    result = function(*(ctypes.c_long(each) if isinstance(each, int) else each for each in arguments))
    return "done" if result >= 0 else errno.errorcode[ctypes.get_errno()]
page = ctypes.create_string_buffer(2 << 20)
own = {name: os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in ("user", "mnt", "net", "pid", "uts", "ipc")}
found = {
    "no randomisation": answer(libc.personality, 0x40000),
    "read implies execute": answer(libc.personality, 0x400000),
    "moved memory map": answer(libc.prctl, 35, 1, id(page) & ~4095, 0, 0),
    "securebits": answer(libc.prctl, 28, 0, 0, 0, 0),
    "ambient capability": answer(libc.prctl, 47, 2, 21, 0, 0),
    "new privileges again": answer(libc.prctl, 38, 0, 0, 0, 0),
    "real time": answer(libc.sched_setscheduler, 0, 1, (ctypes.c_int * 1)(1)),
    "deadline scheduling": answer(libc.syscall, 314, 0, (ctypes.c_uint32 * 12)(48, 6, 0, 0, 0, 0, 10**6, 0, 10**7, 0, 10**7, 0), 0),
    "before everybody": answer(libc.setpriority, 0, 0, -10),
    "real time on disk": answer(libc.syscall, 251, 1, 0, 1 << 13),
    "locked memory": answer(libc.mlock, page, 2 << 20),
    "all memory locked": answer(libc.mlockall, 3),
    "more files": answer(libc.setrlimit, 7, (ctypes.c_ulong * 2)(1 << 20, 1 << 20)),
    "core files": answer(libc.setrlimit, 4, (ctypes.c_ulong * 2)(0, 0)),
    "capability": answer(libc.syscall, 126, (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(1, 1, 0, 0, 0, 0)),
    "another user": answer(libc.setresuid, 12345, 12345, 12345),
    "another group": answer(libc.setgroups, 1, (ctypes.c_uint32 * 1)(12345)),
    **{f"setns {name}": answer(libc.setns, handle, 0) for name, handle in own.items()},
}
print(json.dumps(found))
"""


@case(46, 47)
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers in this probe are those of x86_64")
def test_no_power_can_be_asked_for(number: int, box: Box, tell: Tell) -> None:
    inside = box.with_(limits=replace(GENEROUS, open_files=512)).probe(POWERS)
    if box.runtime.traits.name == "gvisor":
        assert inside.pop("before everybody") == "done", "before its own processes: no priority of the machine's"
    assert "done" not in inside.values(), inside
    control = outside(POWERS, namespace=ROOTLIKE)
    done = {name for name, answer in control.items() if answer == "done"}
    assert done >= {"no randomisation", "read implies execute", "securebits", "capability", "core files"}, control
    assert control["setns mnt"] != "EPERM" or control["setns user"] != "EPERM", "where the kernel itself has something to say"
    tell(f"{len(inside)} refused", control=f"{len(done)} granted in a bare namespace")


# A listener of the guest's own would get its own processes' calls; it could not answer past us, and it gets none.
NOTIFY = """
import ctypes, errno, json, os, struct
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(38, 1, 0, 0, 0)
code = b"".join(struct.pack("=HBBI", *each) for each in (
    (0x20, 0, 0, 0), (0x15, 0, 1, 165), (0x06, 0, 0, 0x7FC00000), (0x06, 0, 0, 0x7FFF0000)))  # mount(2): ask; all else: allow
buffer = ctypes.create_string_buffer(code, len(code))
class Program(ctypes.Structure): _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_void_p))
listener = libc.syscall(317, 1, 8, ctypes.byref(Program(4, ctypes.addressof(buffer))))
if listener < 0: print(json.dumps(errno.errorcode[ctypes.get_errno()])); raise SystemExit
pid = os.fork()
if pid == 0:
    result = libc.syscall(165, b"none", b"/tmp", b"tmpfs", 0, 0)
    os._exit(0 if result == 0 else ctypes.get_errno())
import select, signal
asked = listener in select.select([listener, os.pidfd_open(pid)], [], [], 60)[0]
if asked:
    request = ctypes.create_string_buffer(80)
    libc.ioctl(listener, ctypes.c_ulong(0xC0502100), request)
    answer = struct.pack("=QqiI", struct.unpack_from("=Q", request)[0], 0, 0, 1)  # go on: SECCOMP_USER_NOTIF_FLAG_CONTINUE
    libc.ioctl(listener, ctypes.c_ulong(0xC0182101), answer)
print(json.dumps([asked, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]))
"""


@case(31)
@pytest.mark.skipif(syscalls.MACHINE != "x86_64", reason="the numbers in this probe are those of x86_64")
def test_a_filter_of_the_guests_own_widens_nothing(number: int, box: Box, tell: Tell) -> None:
    assert box.probe(NOTIFY, env=ENVIRONMENT) == "EINVAL", "a guest installs no filter: the machine has memory for only so many"
    control = outside(NOTIFY, namespace=(*ROOTLIKE, "--mount"))
    assert control == [True, 0], control
    tell("EINVAL: it gets no listener", control="in a bare namespace the listener lets mount(2) pass")
