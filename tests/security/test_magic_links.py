"""Attacks through the magic links of /proc, which lead to what a process has open and not to what it may see by name."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.security.conftest import Tell
from tests.security.harness import Box, case, outside, reading


@case(5)
def test_pivots_through_proc_stay_inside(number: int, box: Box, tell: Tell) -> None:
    secret = box.home / ".ssh/id_rsa"
    pivots = [f"/proc/{who}/{name}" for who in ("self", "thread-self", "1", "self/task/2") for name in ("root", "cwd")]
    outcome = box.python(
        reading(*(f"{pivot}{secret}" for pivot in pivots), *(f"{pivot}/../../../../..{secret}" for pivot in pivots))
        + """
import os
for pid in ("self", "1", "thread-self"):
    for name in ("root", "cwd", "exe", *(f"fd/{n}" for n in range(64))):
        try:
            print(os.readlink(f"/proc/{pid}/{name}"))
        except OSError:
            pass
print(open("/proc/self/mountinfo").read(), open("/proc/self/cgroup").read())
"""
    )
    first, _, links = outcome.stdout.decode().partition("\n")
    assert json.loads(first) == []
    assert str(box.project.parent / "ledger") not in links and "upperdir=/" not in links and re.search(r"agent-sandbox-\d", links) is None
    control = box.unmasked.probe(reading(*(f"{pivot}{secret}" for pivot in pivots if pivot.endswith("self/root"))))
    assert len(control) == 2, "the same pivots reach it where it is not hidden"
    tell("inside the view only; no path of the host in links, mounts or cgroups", control="without the masks the pivots reach the canary")


READ_ALL = """
import json, os, re
marks, told, count = re.compile(bytes.fromhex(MARKS)), set(), 0  # spelt so that they are in no file themselves
for top in TOPS:
    for directory, folders, files in os.walk(top):
        for name in (*folders, *files):
            path = f"{directory}/{name}"
            data = b""
            try:
                if os.path.islink(path):
                    data = os.readlink(os.fsencode(path))
                elif name not in folders and name not in ("mem", "pagemap"):
                    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                    try:
                        data = os.read(fd, 1 << 18)
                    finally:
                        os.close(fd)
                    count += 1
            except OSError:
                continue
            if marks.search(data):
                told.add(path)
print(json.dumps([count, sorted(told)]))
"""


@case(5)
@pytest.mark.parametrize("here", [False, True], ids=["from the zygote", "from the caller"])
def test_nothing_readable_in_proc_or_sys_tells_of_the_host(
    number: int, here: bool, box: Box, monkeypatch: pytest.MonkeyPatch, tell: Tell
) -> None:
    """Every file and link of both trees, searched for paths of our own state, for our environment and for names of control groups."""
    secret = f"environment-of-the-supervisor-{os.urandom(8).hex()}"
    ours = "|".join(re.escape(str(box.project.parent / name)) for name in ("ledger", "state"))
    script = READ_ALL.replace("MARKS", repr(rf"{ours}|agent-sandbox-\d|upperdir=/|{secret}".encode().hex()))
    inside = box.project / "read_all.py"
    inside.write_text(script.replace("TOPS", '("/proc", "/sys")'))
    monkeypatch.setenv("ATTACKED", secret)
    with box.fresh(single_threaded=here) as own:
        outcome = own.kept.run("python3", str(inside))
    count, told = json.loads(outcome.stdout)
    assert told == [] and count > 100, outcome.stderr
    assert [path for path in outside(script.replace("TOPS", '("/proc/self",)'))[1] if path.endswith("environ")]
    tell(f"{count} files read, none tells", control="outside /proc/self/environ does")


ABOUT_INIT = """
import errno, json, os
told = []
ways = {
    "environ auxv maps smaps stack syscall io": lambda path: open(path, "rb").read(),
    "mem": lambda path: os.close(os.open(path, os.O_RDONLY)),
    "fd fdinfo map_files": os.listdir,
    "ns/mnt root cwd exe": os.readlink,
}
for names, way in ways.items():
    for path in (f"/proc/{PID}/{extra}{name}" for name in names.split() for extra in ("", f"task/{PID}/")):
        try:
            way(path)
            told.append(path.rpartition("/")[2])
        except OSError as error:
            assert error.errno in (errno.EACCES, errno.EPERM, errno.ENOENT), error
print(json.dumps(told))
"""


@case(5)
@pytest.mark.parametrize("here", [False, True], ids=["from the zygote", "from the caller"])
def test_nothing_can_be_had_from_init(number: int, here: bool, box: Box, tell: Tell) -> None:
    """Init is a fork of the zygote or of the caller: its environment, memory and descriptors were ours."""
    with box.fresh(single_threaded=here) as own:
        outcome = own.run("python3", "-c", ABOUT_INIT.replace("PID", "1"))
    assert json.loads(outcome.stdout) == [], outcome.stderr
    control = subprocess.run(
        [sys.executable, "-c", f"import os\nPID = os.getpid()\n{ABOUT_INIT}"], capture_output=True, check=True, text=True
    )
    told = set(json.loads(control.stdout))
    assert {"environ", "maps", "mem", "fd", "root", "exe"} <= told
    tell("everything is refused", control=f"of a process of one's own {len(told)} kinds are told")


AGAIN = """
for way in /proc/self/fd/0 /proc/thread-self/fd/0 /proc/$$/fd/0 /dev/fd/0 /dev/stdin; do
    { : > $way; } 2>/dev/null
    ls -A $way/ $way/../given 2>/dev/null
done
"""


@case(5)
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_what_is_given_as_input_cannot_be_opened_again(number: int, kind: str, box: Box, tell: Tell) -> None:
    """A descriptor of a real file, even one for reading, is a way to open that file for writing; one of a directory leads anywhere."""
    given = box.project.parent / "given"
    given.mkdir()
    (given / "input").write_text("keep")
    (given / "input").chmod(0o666)
    path = given / "input" if kind == "file" else given
    handle = os.open(path, os.O_RDONLY)
    try:
        assert box.shell(AGAIN, stdin=handle).stdout == b"" and (given / "input").read_text() == "keep"
        control = subprocess.run(["bash", "-c", AGAIN], stdin=handle, capture_output=True, check=False).stdout
    finally:
        os.close(handle)
    assert b"input" in control if kind == "directory" else (given / "input").read_text() == ""
    tell("it gets the bytes through a pipe and nothing else", control=f"outside the real {kind} is open to it")


OWN_IMAGE = """
import json, os
done = []
for name, attempt in (
    ("chmod", lambda: os.chmod("/proc/self/exe", 0o4777)),
    ("write", lambda: os.open("/proc/self/exe", os.O_RDWR)),
    ("times", lambda: os.utime("/proc/self/exe", (0, 0))),
    ("attribute", lambda: os.setxattr("/proc/self/exe", "user.planted", b"1")),
    ("truncate", lambda: os.truncate("/proc/self/exe", 0)),
    ("init", lambda: os.open("/proc/1/exe", os.O_RDWR)),
):
    try:
        attempt()
        done.append(name)
    except OSError:
        pass
print(json.dumps(done))
"""


@case(7)
def test_the_helpers_own_program_cannot_be_changed_through_proc(
    number: int, box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tell: Tell
) -> None:
    """With an interpreter that belongs to whoever starts the sandbox, as those of pyenv, conda and uv do."""
    interpreter = tmp_path / "bin" / "python3"
    interpreter.parent.mkdir()
    shutil.copy(os.path.realpath(sys.executable), interpreter)
    interpreter.chmod(0o755)
    before = (hashlib.sha256(interpreter.read_bytes()).digest(), interpreter.stat().st_mode, interpreter.stat().st_mtime_ns)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    with box.fresh() as own:
        outcome = own.python(OWN_IMAGE)
    # On gVisor a program can be changed while it runs: in its clone, and it ends with what it runs on.
    assert outcome.exit.code == 0 or box.runtime.traits.name == "gvisor", outcome.stderr
    done = json.loads(outcome.stdout or b"[]")
    assert (hashlib.sha256(interpreter.read_bytes()).digest(), interpreter.stat().st_mode, interpreter.stat().st_mtime_ns) == before
    assert os.listxattr(interpreter) == [] and not {"write", "truncate", "init"} & set(done)
    copy = tmp_path / "control"
    shutil.copy(interpreter, copy)
    control = outside(
        f"import subprocess, sys; print(subprocess.run([{str(copy)!r}, '-c', {OWN_IMAGE!r}], capture_output=True, text=True).stdout)"
    )
    assert "chmod" in control and stat.S_IMODE(copy.stat().st_mode) == 0o4777
    tell(f"the interpreter is unchanged (a sealed copy took: {', '.join(done) or 'nothing'})", control="chmod 4777 works outside")
