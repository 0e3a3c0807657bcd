"""Attacks on what the overlay keeps: links to real files, forged marks, devices, pipes and sockets in a layer."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent_sandbox.kernel import syscalls
from agent_sandbox.runtime.outer_view import VIEW
from tests.security.conftest import Tell
from tests.security.harness import ROOT, Box, case, outside, snapshot
from tests.workspace.layers.overlays import in_namespace

PREFIX = "trusted.overlay." if ROOT else "user.overlay."  # the marks that these overlays believe


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


@contextmanager
def _upper(box: Box, path: Path) -> Iterator[Path]:
    """Where a kept layer has what was written at a path."""
    with box.layers() as layers:
        targets = {top: os.fsdecode((top.parent / "target").read_bytes()) for top in layers.glob("*/upper")}
        if box.runtime.traits.name in ("gvisor", "microvm"):  # what stands around the guest sees its view one directory down
            targets = {top: target.removeprefix(VIEW) or "/" for top, target in targets.items()}
        top, target = max(((top, target) for top, target in targets.items() if path.is_relative_to(target)), key=lambda each: len(each[1]))
        yield top / path.relative_to(target)


MARK = """
import os
for prefix in ("trusted", "user"):
    for name, value in (("redirect", b"/etc"), ("opaque", b"x"), ("opaque", b"y"), ("metacopy", b""), ("origin", b"x"), ("whiteout", b""),
                        ("impure", b"y"), ("upper", b"x"), ("overlay.opaque", b"y"), ("overlay.whiteout", b"")):
        for path in ("src", "made", "greeting.txt"):
            try:
                os.setxattr(path, f"{prefix}.overlay.{name}", value)
            except OSError as error:
                print(prefix, error.errno)
"""


@case(19)
def test_marks_of_the_overlay_set_by_a_guest_are_not_believed(number: int, box: Box, tell: Tell) -> None:
    kept = box.kept
    refused = kept.python("import os; os.mkdir('made')\n" + MARK).stdout
    assert refused.count(b"trusted") == 30, "no guest may set these at all"
    made = kept.changes()
    assert made[f"{box.project}/made"] == "added", "and a directory that claims to hide what is below it"
    assert set(made) <= {f"{box.project}/{name}" for name in ("made", "src", "greeting.txt")}, "deletes nothing"
    with kept.layers() as layers:
        marks = {name for path in layers.rglob("upper/**/*") for name in os.listxattr(path, follow_symlinks=False)}
    assert not {PREFIX + "redirect", PREFIX + "metacopy", PREFIX + "whiteout"} & marks
    assert kept.shell("ls src made; cat greeting.txt").stdout.split() == [b"made:", b"src:", b"app.py", b"hello"], "nor does the next view"
    # The control arm: the same mark, put where the guest could not put it, is believed by view and reader alike.
    with _upper(kept, box.project / "src") as upper:
        upper.mkdir(exist_ok=True)
        os.setxattr(upper, PREFIX + "opaque", b"y")
    assert kept.shell("ls src").stdout == b"" and kept.changes()[f"{box.project}/src/app.py"] == "deleted"
    tell("trusted.*: EPERM; user.*: believed by nobody", control="the same mark set from outside hides a real file")


@case(19)
def test_a_layer_that_points_elsewhere_is_not_followed(number: int, box: Box, tell: Tell) -> None:
    """Should a guest ever get such a mark onto the disk: the overlay is mounted so that it leads nowhere."""
    hidden = box.project / "hidden"
    hidden.mkdir()
    (hidden / "secret").write_text("CANARY")
    kept = box.kept
    kept.shell("mkdir pointing; rm -rf hidden")
    with _upper(kept, box.project / "pointing") as upper:
        os.setxattr(upper, PREFIX + "redirect", os.fsencode(hidden))
    outcome = kept.shell("ls -A pointing; cat pointing/secret")
    assert b"secret" not in outcome.stdout and b"CANARY" not in outcome.stdout
    if not ROOT:  # where layers are a user's, no option makes the kernel follow
        with _upper(kept, box.project / "pointing") as upper:
            tell("the directory does not show what it points to", control="the mark is on disk: " + str(os.listxattr(upper)))
        return
    followed = box.project.parent / "followed"
    _mounted_as_by_default(box, followed)
    assert followed.read_text() == "CANARY"
    tell("the directory does not show what it points to", control="an overlay that follows shows it")


def _mounted_as_by_default(box: Box, answer: Path) -> None:
    """The same mark below an overlay that follows. What it shows is written to `answer`."""
    scratch = box.project.parent / "scratch"
    for name in ("lower/hidden", "upper/pointing", "work", "merged"):
        (scratch / name).mkdir(parents=True)
    (scratch / "lower/hidden/secret").write_text("CANARY")
    os.setxattr(scratch / "upper/pointing", PREFIX + "redirect", b"/hidden")

    def look() -> None:
        options = f"lowerdir={scratch}/lower,upperdir={scratch}/upper,workdir={scratch}/work,redirect_dir=follow"
        syscalls.mount("overlay", str(scratch / "merged"), "overlay", 0, options)
        answer.write_text((scratch / "merged/pointing/secret").read_text())

    in_namespace(look)


NODES = """
import ctypes, errno, json, os, stat
libc = ctypes.CDLL(None, use_errno=True)
made, answers = [], set()
for name, mode, device in (("block", stat.S_IFBLK, os.makedev(7, 0)), ("char", stat.S_IFCHR, os.makedev(1, 1)), ("white", stat.S_IFCHR, 0)):
    for place in (".", "/tmp", "/nowhere"):
        path = f"{place}/{name}-MARK"
        try:
            os.mknod(path, mode | 0o666, device)
            os.unlink(path)
            made.append(name)
        except OSError as error:
            if place == "/nowhere":
                answers.add(errno.errorcode[error.errno])
open("moved", "w").close()
for source, target in ((b"moved", b"away"), (b"/nowhere/a", b"/nowhere/b")):
    if libc.renameat2(-100, source, -100, target, 4) == 0:  # which leaves a whiteout behind
        made.append("rename")
    elif source != b"moved":
        answers.add(errno.errorcode[ctypes.get_errno()])
print(json.dumps([sorted(set(made)), sorted(answers)]))
"""


@case(20)
def test_neither_devices_nor_deletions_can_be_forged(number: int, box: Box, tell: Tell) -> None:
    probe = NODES.replace("MARK", os.urandom(8).hex())
    assert box.probe(probe) == [[], ["EPERM"]], "and it is the filter that says so, before the kernel could say that there is no such place"
    kept = box.kept
    kept.shell("touch greeting.txt")
    place = box.project.parent / "control"
    place.mkdir()
    control, answers = outside(probe, cwd=place)
    assert set(control) >= ({"block", "char", "white", "rename"} if ROOT else {"white"}) and answers == ["ENOENT"]
    # And what such a node would do: in a layer it is believed, and a real file is gone.
    with _upper(kept, box.project / "greeting.txt") as upper:
        upper.unlink()
        os.mknod(upper, stat.S_IFCHR, 0)
    assert kept.changes()[f"{box.project}/greeting.txt"] == "deleted" and kept.shell("cat greeting.txt").exit.code == 1
    tell("EPERM for all", control=f"outside: {', '.join(control)}; a whiteout in a layer deletes a real file")


@case(20)
def test_pipes_and_sockets_left_in_a_layer_block_nobody(number: int, box: Box, tell: Tell) -> None:
    leave = "import os, socket; os.mkfifo('pipe'); os.mkfifo('greeting.pipe'); socket.socket(socket.AF_UNIX).bind('sock')"
    kinds = {Path(change.path).name: change.after.type.value for change in box.python(leave).changes if change.after}
    assert set(kinds) == {"pipe", "greeting.pipe", "sock"} and "file" not in kinds.values(), "reading the changes did not wait for a writer"
    kept = box.kept
    kept.python(leave)
    assert set(kept.changes()) == {f"{box.project}/{name}" for name in kinds}
    with _upper(kept, box.project / "pipe") as pipe, pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(["cat", pipe], timeout=0.3, check=False)
    tell("listed as what they are, not opened", control="whoever opens the same pipe to read waits")


@case(20)
def test_a_pipe_of_the_host_is_not_joined(number: int, box: Box, tell: Tell) -> None:
    os.mkfifo(box.project / "fifo")
    write = "import os; f = os.open('fifo', os.O_RDWR | os.O_NONBLOCK); os.write(f, b'leaked'); print(1)"
    reader = os.open(box.project / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert box.python(write).stdout == b"1\n" or box.runtime.traits.name == "gvisor", "which opens no pipe of the view at all"
        assert os.read(reader, 16) == b""
        outside(write, cwd=box.project)
        assert os.read(reader, 16) == b"leaked"
    finally:
        os.close(reader)
    tell("its write went to a pipe of its own", control="outside the same write is heard")
