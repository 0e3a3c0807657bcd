"""Attacks on the view: secrets by name, through links, through /proc, through other system calls, through what the overlay believes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agent_sandbox.errors import PolicyError
from agent_sandbox.kernel.mounts import Bind, ThrowAway
from agent_sandbox.policy.paths import parse
from agent_sandbox.runtime.process import ProcessRuntime
from agent_sandbox.runtime.running import ProcessGuest
from agent_sandbox.workspace.draft import Host, Needs
from agent_sandbox.workspace.store import Store
from agent_sandbox.workspace.view import plan_view
from tests.security.conftest import Tell
from tests.security.harness import ROOT, Box, case, outside, snapshot

READ = """
import json
read = []
for path in PATHS:
    try:
        with open(path, "rb") as file:
            read.append(file.read(4096).decode(errors="replace"))
    except OSError:
        pass
print(json.dumps(read))
"""


def _reading(*paths: Path | str) -> str:
    return READ.replace("PATHS", repr([str(path) for path in paths]))


def _secrets(box: Box) -> list[Path]:
    return [box.home / ".ssh/id_rsa", box.home / ".aws/credentials", box.home / ".bash_history", Path("/etc/shadow")]


@case(1)
def test_secrets_cannot_be_read_by_name(number: int, box: Box, tell: Tell) -> None:
    outcome = box.python(_reading(*_secrets(box)))
    assert json.loads(outcome.stdout) == [] and not list(outcome.changes)
    seen = outside(_reading(*_secrets(box)))
    assert len(seen) == (4 if ROOT else 3) and all(text for text in seen)
    tell("ENOENT; nothing in output or changes", control=f"read without a sandbox: {len(seen)}")


@case(1)
def test_the_home_directory_does_not_even_list_them(number: int, box: Box, tell: Tell) -> None:
    assert box.run("ls", "-A", str(box.home)).stdout == b""
    tell("the directory is empty", control=f"{len(list(box.home.iterdir()))} names without a sandbox")
    assert len(list(box.home.iterdir())) == 3


@case(2)
def test_a_link_in_the_workspace_leads_to_what_the_view_has_there(number: int, box: Box, tell: Tell) -> None:
    canary = box.project.parent / "canary.txt"
    canary.write_text("real")
    (box.project / "key").symlink_to(box.home / ".ssh/id_rsa")
    (box.project / "out").symlink_to(canary)
    before = snapshot(box.project.parent)
    outcome = box.shell(f"cat key; ln -s {box.home}/.aws own; cat own/credentials; echo changed > out; cat out; echo planted > key")
    assert outcome.stdout == b"changed\n", "its write went to its own layer"
    after = {path: facts for path, facts in snapshot(box.project.parent).items() if "ledger" not in path}
    assert after == {path: facts for path, facts in before.items() if "ledger" not in path}
    assert "CANARY" in (box.project / "key").read_text(), "the same link leads to the secret without a sandbox"
    tell("not found; the write was captured", control="the link leads to the canary without a sandbox")


@case(5)
def test_pivots_through_proc_stay_inside(number: int, box: Box, tell: Tell) -> None:
    secret = box.home / ".ssh/id_rsa"
    pivots = [f"/proc/{who}/{name}" for who in ("self", "thread-self", "1", "self/task/2") for name in ("root", "cwd")]
    outcome = box.python(
        _reading(*(f"{pivot}{secret}" for pivot in pivots), *(f"{pivot}/../../../../..{secret}" for pivot in pivots))
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
    assert outside(_reading(f"/proc/self/root{secret}")), "the same pivot reaches it without a sandbox"
    tell("inside the view only; no path of the host in links, mounts or cgroups", control="/proc/self/root reaches the canary outside")


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
    runtime = ProcessRuntime()
    try:
        done = box.with_(runtime=runtime).probe(OWN_IMAGE)
    finally:
        runtime.close()
    assert (hashlib.sha256(interpreter.read_bytes()).digest(), interpreter.stat().st_mode, interpreter.stat().st_mtime_ns) == before
    assert os.listxattr(interpreter) == [] and not {"write", "truncate", "init"} & set(done)
    copy = tmp_path / "control"
    shutil.copy(interpreter, copy)
    control = outside(
        f"import subprocess, sys; print(subprocess.run([{str(copy)!r}, '-c', {OWN_IMAGE!r}], capture_output=True, text=True).stdout)"
    )
    assert "chmod" in control and stat.S_IMODE(copy.stat().st_mode) == 0o4777
    tell(f"the interpreter is unchanged (a sealed copy took: {', '.join(done) or 'nothing'})", control="chmod 4777 works outside")


@case(10)
def test_a_protected_file_made_inside_is_nothing_outside(number: int, box: Box, tell: Tell) -> None:
    """What the guest makes under a protected name is in its own layer, where only a promotion could take it from; nothing here loads it."""
    names = [box.project / "agent-sandbox.toml", box.project / ".git/config", box.home / ".bashrc", box.home / ".ssh/authorized_keys"]
    before = snapshot(box.project)
    script = "; ".join(f"mkdir -p {name.parent}; echo planted > {name}" for name in names)
    outcome = box.shell(script)
    assert not any(name.exists() for name in names) and snapshot(box.project) == before
    assert {str(name) for name in names} <= {change.path for change in outcome.changes}, "each is shown before anybody could take it over"
    assert box.shell("cat " + " ".join(map(str, names))).stdout == b"", "and the next run starts without it"
    subprocess.run(["bash", "-c", script], check=True)
    assert all(name.read_text() == "planted\n" for name in names) and snapshot(box.project) != before, "the control arm"
    tell("captured, listed, and gone with the run", control="without a sandbox the same line plants all of them")


ODD = ["/p/*.key", "/p/[a-z]", "/p/[[]x]", "/p/a[\\]b", "/p/**/.env", "/p/?", os.fsdecode(b"/p/\xff\xfe")]
REFUSED = ["/p/[", "/p/a\\b", "/p/[^a]", "/p/../etc", "", "relative", "/p/\0", "/p/[z-a]", "/"]


@case(11)
@pytest.mark.parametrize("pattern", ODD)
def test_an_odd_deny_rule_is_enforced(number: int, pattern: str, box: Box, tell: Tell) -> None:
    place = box.project / "p"
    place.mkdir()
    names = [b"x.key", b"m", b"[x]", b"a\\b", b".env", b"7", b"\xff\xfe", b"harmless.txt"]
    for name in names:
        (place / os.fsdecode(name)).write_bytes(b"CANARY " + name)
    rule = parse(str(box.project) + pattern)
    shown = box.files(read=True, allow_hidden=True, allowed=[parse(str(box.project))], denied=[rule])
    seen = shown.python(f"import os\nfor name in os.listdir(os.fsencode({str(place)!r})): print(name)").stdout
    hidden = [name for name in names if repr(name).encode() not in seen]
    assert hidden and b"harmless.txt" not in hidden
    everything = box.files(read=True, allow_hidden=True, allowed=[parse(str(box.project))])
    assert everything.python(f"import os\nfor name in os.listdir(os.fsencode({str(place)!r})): print(name)").stdout.count(b"\n") == len(
        names
    )
    tell(f"hides {hidden}", control="without the rule all are there")


@case(11)
@pytest.mark.parametrize("pattern", REFUSED)
def test_a_deny_rule_that_cannot_be_enforced_is_refused(number: int, pattern: str, box: Box, tell: Tell) -> None:
    with pytest.raises(PolicyError):
        box.files(read=True, allow_hidden=True, allowed=[parse(str(box.project))], denied=[parse(pattern)]).run("true", cwd="/tmp")
    tell("PolicyError before anything ran", control="the patterns above are accepted")


@case(14)
def test_a_deny_inside_an_allow_is_kept_by_the_view_and_not_left_to_landlock(number: int, box: Box, tell: Tell) -> None:
    """Landlock cannot express it, so no rule is ever given to Landlock for it: the denied name is not in the view, in any shape of rule."""
    secret = box.project / "src" / "app.py"
    link = box.project / "link"
    link.symlink_to(box.project / "src")
    for allowed in (box.project, secret, link):
        for hidden in (True, False):
            shown = box.files(read=True, allow_hidden=hidden, allowed=[parse(str(allowed))], denied=[parse(str(secret))])
            assert shown.probe(_reading(secret, link / "app.py"), cwd="/tmp") == [], (allowed, hidden)
    control = box.files(read=True, allow_hidden=True, allowed=[parse(str(box.project))])
    assert len(control.probe(_reading(secret, link / "app.py"), cwd="/tmp")) == 2
    tell("not there, under its own name or behind a link", control="without the deny it is read")


@case(14)
def test_masks_hold_where_rootless_views_bind_single_files(number: int, box: Box, tell: Tell) -> None:
    """Rootless, a directory with a mount in it is shown entry by entry, and its files are bound one by one, past every overlay."""
    (box.home / "mounted").mkdir()
    (box.home / "harmless.txt").write_text("seen")
    mounts = Host.look().mounts
    fake = [type(mounts[0])(**{**vars(mounts[0]), "target": str(box.home / "mounted"), "fstype": "tmpfs"})]
    plan = plan_view(box.rules, Needs(), ThrowAway(1 << 24), host=Host((*mounts, *fake), False), project=str(box.project))
    bound = {step.source for step in plan.steps if isinstance(step, Bind)}
    assert str(box.home / ".bash_history") not in bound
    assert str(box.home / "harmless.txt") in bound, "the others are bound"
    tell("masked files are not bound", control="an ordinary file beside them is")


OTHER_CALLS = """
import ctypes, errno, json, os
libc = ctypes.CDLL(None, use_errno=True)
path = PATH.encode()
def call(number, *arguments):
    result = libc.syscall(number, *arguments)
    return "ok" if result >= 0 else errno.errorcode[ctypes.get_errno()]
how = (ctypes.c_uint64 * 3)(os.O_RDONLY, 0, 0)
handle = ctypes.create_string_buffer(128); handle[0] = 120
mount_id = ctypes.c_int()
print(json.dumps({
    "open": call(2, path, 0), "creat": call(85, path, 0o600), "stat": call(4, path, ctypes.create_string_buffer(256)),
    "openat2": call(437, -100, path, ctypes.byref(how), 24), "readlink": call(89, path, ctypes.create_string_buffer(64), 64),
    "execveat": call(322, -1, b"", None, None, 0x1000), "name_to_handle_at": call(303, -100, b"/", handle, ctypes.byref(mount_id), 0),
    "open_by_handle_at": call(304, -100, handle, 0), "fsopen": call(430, b"ext4", 0), "open_tree": call(428, -100, b"/", 1),
    "mount": call(165, b"x", b"/", b"tmpfs", 0, None), "umount2": call(166, b"/proc", 2), "pivot_root": call(155, b".", b"."),
    "chroot": call(161, b"/"), "move_mount": call(429, -1, b"", -1, b"", 0), "mount_setattr": call(442, -1, b"", 0, 0, 0),
}))
"""


@case(16)
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers in this probe are those of x86_64")
def test_every_way_to_open_a_file_gets_the_same_answer(number: int, box: Box, tell: Tell) -> None:
    secret = box.home / ".ssh/id_rsa"
    inside = box.probe(OTHER_CALLS.replace("PATH", repr(str(secret))))
    assert {inside[name] for name in ("open", "creat", "stat", "openat2", "readlink")} == {"ENOENT"}
    refused = ("name_to_handle_at", "open_by_handle_at", "fsopen", "open_tree", "mount", "umount2", "pivot_root", "chroot")
    assert {inside[name] for name in (*refused, "move_mount", "mount_setattr")} == {"EPERM"}
    control = outside(OTHER_CALLS.replace("PATH", repr(str(secret))), namespace=("--user", "--map-root-user", "--mount", "--pid", "--fork"))
    assert {control[name] for name in ("open", "stat", "openat2", "name_to_handle_at", "mount", "chroot")} == {"ok"}
    assert "EPERM" not in {control[name] for name in ("move_mount", "mount_setattr", "execveat")}, (
        "bad arguments: the kernel says so itself"
    )
    tell("ENOENT for the name, EPERM for handles and mounts", control="all succeed in a bare namespace")


@case(17)
def test_a_hard_link_to_a_real_file_is_a_copy(number: int, box: Box, tell: Tell) -> None:
    before = snapshot(box.project)
    outcome = box.shell("ln greeting.txt twin && echo changed >> twin && cat greeting.txt")
    assert outcome.stdout == b"hello\nchanged\n"
    assert snapshot(box.project) == before
    os.link(box.project / "greeting.txt", box.project / "twin")
    with (box.project / "twin").open("a") as twin:
        twin.write("changed\n")
    assert (box.project / "greeting.txt").read_text() == "hello\nchanged\n"
    tell("copied up; the real file is byte for byte the same, with one link", control="outside the write goes through")


@case(19)
def test_marks_of_the_overlay_set_by_a_guest_are_not_believed(number: int, box: Box, tell: Tell) -> None:
    outcome = box.python("""
import os
os.mkdir("marked")
for prefix in ("trusted", "user"):
    for name, value in (("redirect", b"/etc"), ("opaque", b"y"), ("metacopy", b""), ("origin", b"x"), ("whiteout", b"")):
        try:
            os.setxattr("marked" if name in ("redirect", "opaque") else "greeting.txt", f"{prefix}.overlay.{name}", value)
        except OSError as error:
            print(prefix, name, error.errno)
os.setxattr("src", "user.overlay.opaque", b"y")
""")
    assert outcome.stdout.count(b"trusted") == 5, "no guest may set these at all"
    kinds = {change.path: change.kind.value for change in outcome.changes}
    assert f"{box.project}/src/app.py" not in kinds, "an opaque mark of the guest's own deletes nothing"
    assert f"{box.project}/marked/passwd" not in kinds
    assert kinds[f"{box.project}/marked"] == "added"
    tell("trusted.*: EPERM; user.*: an attribute like any other", control=f"{len(kinds)} changes reported, none of them made up")


@case(20)
def test_devices_cannot_be_made_and_pipes_and_sockets_block_nobody(number: int, box: Box, tell: Tell) -> None:
    outcome = box.python("""
import os, socket, stat
for name, mode, device in (("block", stat.S_IFBLK, os.makedev(8, 0)), ("char", stat.S_IFCHR, os.makedev(1, 1)), ("white", stat.S_IFCHR, 0)):
    try:
        os.mknod(name, mode | 0o666, device)
        print("made", name)
    except OSError:
        pass
os.mkfifo("pipe")
socket.socket(socket.AF_UNIX).bind("sock")
""")
    assert outcome.stdout == b"" and outcome.exit.code == 0, outcome.stderr
    kinds = {Path(change.path).name: change.after.type.value for change in outcome.changes if change.after}
    assert set(kinds) == {"pipe", "sock"} and kinds["pipe"] != "file", "reading the changes did not wait for a writer"
    if ROOT:
        os.mknod(box.project / "control", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    os.mkfifo(box.project / "fifo")
    tell("EPERM for devices; pipe and socket listed as what they are", control="root makes devices outside")


@case(20)
def test_a_pipe_of_the_host_is_not_joined(number: int, box: Box, tell: Tell) -> None:
    os.mkfifo(box.project / "fifo")
    reader = os.open(box.project / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    try:
        box.python("import os; f = os.open('fifo', os.O_RDWR | os.O_NONBLOCK); os.write(f, b'leaked')")
        assert os.read(reader, 16) == b""
        outside("import os; f = os.open('fifo', os.O_RDWR | os.O_NONBLOCK); os.write(f, b'leaked'); print(1)", cwd=box.project)
        assert os.read(reader, 16) in (b"leaked", b""), "a pipe forgets what it held when its writer closes"
        writer = os.open(box.project / "fifo", os.O_WRONLY | os.O_NONBLOCK)
        os.write(writer, b"leaked")
        assert os.read(reader, 16) == b"leaked"
        os.close(writer)
    finally:
        os.close(reader)
    tell("its write went to a pipe of its own", control="the reader hears a writer outside")


@case(22)
def test_another_run_is_nowhere_to_be_seen(number: int, box: Box, tell: Tell) -> None:
    reading, writing = os.pipe()
    ready = threading.Event()
    guests: list[ProcessGuest] = []
    mark = f"mark-of-the-first-{os.urandom(8).hex()}"
    plant = f"for d in /tmp /dev/shm /run /var/tmp $PWD; do echo x > $d/{mark}; done; echo ready; read -r _"
    state = Store.open(str(box.project.parent / "state"))
    work = {"stdin": reading, "on_start": guests.append, "on_output": lambda *_: ready.set()}
    first = threading.Thread(target=lambda: box.with_(state=state.sandbox_for(str(box.project))).shell(plant, **work))
    first.start()
    try:
        assert ready.wait(20)
        second = box.shell(f"find /tmp /dev/shm /run /var/tmp {box.project.parent} -name {mark} 2>/dev/null; ls {state.path}")
        assert second.stdout == b""
        found = list(Path(state.path).rglob(mark))
        assert len(found) >= 2, "from outside, the layers of the first hold them"
    finally:
        os.close(writing)
        first.join()
        os.close(reading)
    tell("no file of the other run", control=f"{len(found)} in its layers on the host")
