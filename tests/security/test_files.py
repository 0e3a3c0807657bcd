"""Attacks on the view: secrets by name, through links, through /proc, through other system calls, through what the overlay believes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent_sandbox.errors import PolicyError
from agent_sandbox.kernel.mount_plan import Bind, ThrowAway
from agent_sandbox.policy.paths import parse
from agent_sandbox.workspace.view.plan import MachineFacts, Needs, plan_view
from tests.patience import machine_wide
from tests.security.conftest import Tell
from tests.security.harness import ROOT, Box, case, meanwhile, outside, reading, snapshot


def _secrets(box: Box) -> list[Path]:
    return [box.home / ".ssh/id_rsa", box.home / ".aws/credentials", box.home / ".bash_history", Path("/etc/shadow")]


@case(1)
def test_secrets_cannot_be_read_by_name(number: int, box: Box, tell: Tell) -> None:
    outcome = box.python(reading(*_secrets(box)))
    assert json.loads(outcome.stdout) == [] and not list(outcome.changes)
    assert b"CANARY" not in outcome.stdout + outcome.stderr + Path(box.ledger.path).read_bytes()
    seen = box.unmasked.probe(reading(*_secrets(box)))
    assert len(seen) == (4 if ROOT and not box.runtime.traits.images else 3) and all(text for text in seen)
    tell("ENOENT; nothing in output, changes or ledger", control=f"without the masks {len(seen)} are read")


@case(1)
def test_the_home_directory_does_not_even_list_them(number: int, box: Box, tell: Tell) -> None:
    """Nor tell of them in another way: by trying names, or by an answer that a name which is free would not give."""
    (box.home / "empty").mkdir()
    probe = f"""
import json, os
os.chdir({str(box.home)!r})
told = [name for name in os.listdir(".") if name != "empty"]
told += [name for name in (".ssh", ".aws", ".bash_history", ".SSH", ".ssh/.", "./.aws//credentials") if os.path.lexists(name)]
for deed, *names in ((os.link, ".bash_history", "twin"), (os.rename, ".aws", "moved"), (os.rmdir, ".ssh"), (os.chdir, ".ssh")):
    try:
        deed(*names)
        told.append("done")
    except FileNotFoundError:
        pass
    except OSError as error:
        told.append(error.errno)
try:
    os.mkdir(".aws")
except FileExistsError:
    told.append("taken")
print(json.dumps(told))
"""
    assert box.probe(probe) == []
    told = box.unmasked.probe(probe)
    assert {".ssh", ".aws", ".bash_history", "done"} <= set(told) and len(told) > 8
    tell("as if they were not there, to every question", control=f"without the masks {len(told)} answers tell of them")


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
    control = box.unmasked.shell(f"cat key; ln -s {box.home}/.aws own; cat own/credentials")
    assert control.stdout.count(b"CANARY") == 2
    (box.project / "out").write_text("changed")
    assert canary.read_text() == "changed"
    tell("not found; the write was captured", control="without the masks both are read; outside the write goes through the link")


@case(2)
def test_a_project_that_is_itself_a_link_hides_its_secrets_under_both_names(number: int, box: Box, tell: Tell) -> None:
    (box.project / ".env").write_text("CANARY-env")
    (box.project / "linked.env").symlink_to(".env")
    link = box.project.parent / "link"
    link.symlink_to(box.project)
    paths = [f"{top}/{name}" for top in (link, box.project) for name in (".env", "linked.env", "src/../.env")]
    through = box.with_(project=link)
    assert through.probe(reading(*paths)) == []
    assert len(through.unmasked.probe(reading(*paths))) == len(paths)
    tell(f"{len(paths)} names: not found", control="without the masks all are read")


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


ODD = ["/p/*.key", "/p/two\nlines", "/p/[a-z]", "/p/[[]x]", "/p/a[\\]b", "/p/**/.env", "/p/?", os.fsdecode(b"/p/\xff\xfe")]
REFUSED = ["/p/[", "/p/a\\b", "/p/[^a]", "/p/../etc", "", "relative", "/p/\0", "/p/[z-a]", "/"]


@case(11)
@pytest.mark.parametrize("pattern", ODD)
def test_an_odd_deny_rule_is_enforced(number: int, pattern: str, box: Box, tell: Tell) -> None:
    place = box.project / "p"
    place.mkdir()
    names = [b"x.key", b"m", b"[x]", b"a\\b", b".env", b"7", b"\xff\xfe", b"two\nlines", b"harmless.txt"]
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
    fine = box.files(read=True, allow_hidden=True, allowed=[parse(str(box.project))], denied=[parse("/p/fine")])
    assert fine.run("true", cwd="/tmp").exit.code == 0
    tell("PolicyError before anything ran", control="with a rule that can be enforced the same run starts")


@case(14)
def test_a_deny_inside_an_allow_is_kept_by_the_view_and_not_left_to_landlock(number: int, box: Box, tell: Tell) -> None:
    """Landlock cannot express it, so no rule is ever given to Landlock for it: the denied name is not in the view, in any shape of rule."""
    secret = box.project / "src" / "app.py"
    link = box.project / "link"
    link.symlink_to(box.project / "src")
    for allowed in (box.project, secret, link):
        for hidden in (True, False):
            shown = box.files(read=True, allow_hidden=hidden, allowed=[parse(str(allowed))], denied=[parse(str(secret))])
            assert shown.probe(reading(secret, link / "app.py"), cwd="/tmp") == [], (allowed, hidden)
    control = box.files(read=True, allow_hidden=True, allowed=[parse(str(box.project))])
    assert len(control.probe(reading(secret, link / "app.py"), cwd="/tmp")) == 2
    tell("not there, under its own name or behind a link", control="without the deny it is read")


@case(14)
def test_masks_hold_where_rootless_views_bind_single_files(number: int, box: Box, tell: Tell) -> None:
    """Rootless, a directory with a mount in it is shown entry by entry, and its files are bound one by one, past every overlay."""
    (box.home / "mounted").mkdir()
    (box.home / "harmless.txt").write_text("seen")
    mounts = MachineFacts.look().mounts
    fake = [type(mounts[0])(**{**vars(mounts[0]), "target": str(box.home / "mounted"), "fstype": "tmpfs"})]
    plan = plan_view(box.rules, Needs(), ThrowAway(1 << 24), host=MachineFacts((*mounts, *fake), False), project=str(box.project))
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
    lacking = {"ENOSYS"} if box.runtime.traits.name == "gvisor" else set()  # its kernel has no openat2
    assert {inside[name] for name in ("open", "creat", "stat", "openat2", "readlink")} - lacking == {"ENOENT"}
    refused = ("name_to_handle_at", "open_by_handle_at", "fsopen", "open_tree", "mount", "umount2", "pivot_root", "chroot")
    assert {inside[name] for name in (*refused, "move_mount", "mount_setattr")} == {"EPERM"}
    control = outside(OTHER_CALLS.replace("PATH", repr(str(secret))), namespace=("--user", "--map-root-user", "--mount", "--pid", "--fork"))
    assert {control[name] for name in ("open", "stat", "openat2", "name_to_handle_at", "mount", "chroot")} == {"ok"}
    assert "EPERM" not in {control[name] for name in ("move_mount", "mount_setattr", "execveat")}, (
        "bad arguments: the kernel says so itself"
    )
    tell("ENOENT for the name, EPERM for handles and mounts", control="all succeed in a bare namespace")


PLANT = """
import os, sys
for place in PLACES:
    try:
        os.makedirs(place, exist_ok=True)
        open(f"{place}/MARK", "w").close()
    except OSError:
        pass
print("ready", flush=True)
sys.stdin.read()
"""


@case(22)
def test_another_run_is_nowhere_to_be_seen(number: int, box: Box, tell: Tell) -> None:
    mark = f"mark-of-the-first-{os.urandom(8).hex()}"
    caches = [str(box.home / name) for name in (".cache/pip", ".npm", ".cargo")]
    places = ["/tmp", "/dev/shm", "/run", f"/run/user/{os.getuid()}", "/var/tmp", "/var/cache", str(box.project), *caches]
    kept = box.kept
    assert kept.state is not None
    # The whole machine takes minutes on an emulated processor.
    whole = "" if box.runtime.traits.name == "microvm" else f"find / -xdev -name {mark} 2>/dev/null; "
    with meanwhile(kept, PLANT.replace("PLACES", repr(places)).replace("MARK", mark)):
        second = box.shell(f"{whole}find {' '.join(places)} -name {mark} 2>/dev/null; ls {kept.state.store.path}")
        assert second.stdout == b""
        with kept.layers() as layers:
            found = list(layers.rglob(mark))
        assert len(found) >= 4, "from outside, the layers of the first hold them"
        looking = "image" if ROOT else mark  # as root they are in an image, which is all that there is to see
        seen = kept.with_(state=None).unmasked.shell(f"find {kept.state.path} -name {looking}").stdout.split()
        assert seen, "and where our state is not hidden, so does the view of the second"
    tell("no file of the other run", control=f"{len(found)} in its layers on the host; {len(seen)} seen where those are not hidden")


LOCK = """
import ctypes, fcntl, os, sys
libc = ctypes.CDLL(None)
watch = libc.inotify_init1(os.O_NONBLOCK)
held = [os.open(f"/dev/{name}", os.O_RDONLY) for name in ("null", "zero", "full", "random", "urandom")]
for fd, name in zip(held, ("null", "zero", "full", "random", "urandom")):
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert libc.inotify_add_watch(watch, f"/dev/{name}".encode(), 0xFFF) > 0
print("ready", flush=True)
sys.stdin.read()
try:
    print(len(os.read(watch, 65536)))
except BlockingIOError:
    print(0)
"""


@case(22)
@pytest.mark.needs_root
def test_devices_are_no_meeting_place(number: int, box: Box, tell: Tell) -> None:
    """A lock on a device, and the sight of others opening it, would join runs with each other and with the machine."""
    with machine_wide():
        with meanwhile(box, LOCK) as ended:
            assert _locked_by_others() == []
            assert _locked_by_others(box) == []
        assert ended[0].stdout == b"ready\n0\n", ended[0].stderr
        with subprocess.Popen([sys.executable, "-c", LOCK], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
            assert holder.stdin is not None and holder.stdout is not None and holder.stdout.readline() == b"ready\n"
            refused = _locked_by_others()
            holder.stdin.close()
            seen = int(holder.stdout.read())
    assert len(refused) == 5 and seen > 0
    tell("locks and watches of its own", control=f"outside {len(refused)} locks are refused and {seen} bytes of events seen")


def _locked_by_others(box: Box | None = None) -> list[str]:
    """Which devices cannot be locked here, or in a sandbox."""
    probe = """
import fcntl, json, os
refused = []
for name in ("null", "zero", "full", "random", "urandom"):
    try:
        fcntl.flock(os.open(f"/dev/{name}", os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        refused.append(name)
print(json.dumps(refused))
"""
    return list(outside(probe) if box is None else box.probe(probe))
