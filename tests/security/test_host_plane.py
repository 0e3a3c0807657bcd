"""Attacks on our own side: host code that reads what a guest left, helpers, sockets, and what is swept away afterwards."""

from __future__ import annotations

import ast
import os
import random
import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest

import agent_sandbox
from agent_sandbox.errors import Denied, SandboxError, WorkspaceError
from agent_sandbox.kernel import placing
from agent_sandbox.runtime.base import Reason
from agent_sandbox.workspace import beneath, removal
from agent_sandbox.workspace.store import Store
from tests.security.conftest import Tell
from tests.security.harness import Box, case, listening, outside, snapshot, until
from tests.workspace.racing import Swapper

SAMPLE_SECONDS, TORTURE_SECONDS = 2.0, 600.0
SOURCES = Path(agent_sandbox.__file__).parent


def _race(tmp_path: Path, seconds: float) -> dict[str, int]:
    """Swap a directory with a link to the outside, as fast as it goes, while each of our readers walks below it. Counts how each went."""
    outside_tree, inside = tmp_path / "outside", tmp_path / "inside"
    (outside_tree / "sub").mkdir(parents=True)
    (outside_tree / "sub" / "canary").write_text("CANARY")
    (inside / "directory" / "sub").mkdir(parents=True)
    (inside / "directory" / "sub" / "canary").write_text("own")
    (inside / "link").symlink_to(outside_tree)
    (tmp_path / "view").mkdir()
    (tmp_path / "view" / "r").symlink_to(inside)
    counts = dict.fromkeys(("opened", "walked", "refused", "placed", "through the link", "violations"), 0)
    handle = os.open(inside, os.O_RDONLY | os.O_DIRECTORY)
    here = os.open(".", os.O_RDONLY)
    deadline = time.monotonic() + seconds
    order = random.Random(4)
    os.chdir(tmp_path / "view")
    try:
        with Swapper(inside / "directory", inside / "link"):
            while time.monotonic() < deadline:
                _attempt(order.randrange(4), handle, inside, counts)
    finally:
        os.fchdir(here)
        os.close(here)
        os.close(handle)
    assert (outside_tree / "sub" / "canary").read_text() == "CANARY"
    assert sorted(os.listdir(outside_tree / "sub")) == ["canary"], "nothing was made out there"
    return counts


def _attempt(which: int, handle: int, inside: Path, counts: dict[str, int]) -> None:
    try:
        if which == 0:
            fd = beneath.open_file(handle, "directory/sub/canary")
            counts["opened"] += 1
            counts["violations"] += os.read(fd, 16) != b"own"
            os.close(fd)
        elif which == 1:
            for entry in beneath.walk(handle):
                counts["violations"] += entry.name == "canary" and entry.status.st_size != 3
            counts["walked"] += 1
        elif which == 2:
            with placing.directory_for("/directory/sub/made") as place:
                counts["placed"] += 1
                counts["violations"] += "outside" in os.readlink(place)
        else:  # the control arm: what an ordinary open is led to
            with open(inside / "directory/sub/canary", "rb") as file:
                counts["through the link"] += file.read() == b"CANARY"
    except (OSError, WorkspaceError):
        counts["refused"] += 1


def _check_race(counts: dict[str, int]) -> None:
    assert counts["violations"] == 0, counts
    assert min(counts[name] for name in ("opened", "walked", "placed", "refused", "through the link")) > 0, (
        f"an idle race shows nothing: {counts}"
    )


@case(4)
def test_swapping_directories_leads_none_of_our_readers_outside(number: int, tmp_path: Path, tell: Tell) -> None:
    counts = _race(tmp_path, SAMPLE_SECONDS)
    _check_race(counts)
    tell(
        f"{counts['opened'] + counts['walked'] + counts['placed']} successes, 0 violations",
        control=f"an ordinary open was led out {counts['through the link']} times",
    )


@case(4)
@pytest.mark.torture
@pytest.mark.timeout(1200)
def test_swapping_directories_for_ten_minutes(number: int, tmp_path: Path, tell: Tell) -> None:
    counts = _race(tmp_path, TORTURE_SECONDS)
    _check_race(counts)
    tell(str(counts), control=f"an ordinary open was led out {counts['through the link']} times")


@case(23)
def test_no_module_of_ours_reads_files_for_a_guest(number: int, box: Box, tell: Tell) -> None:
    """There is no in-process file tool yet. What stands instead: every action of the model's is code or a command, and runs inside."""
    actions = ast.parse((SOURCES / "policy" / "action.py").read_text())
    kinds = {
        node.name for node in actions.body if isinstance(node, ast.ClassDef) and node.name.startswith(("Read", "Write", "List", "Glob"))
    }
    assert kinds == set()
    with pytest.raises(Denied):
        box.files(read=True, allowed=[]).run("cat", "/etc/hostname", cwd=str(box.project))
    assert box.files(read=True, allowed=[]).run("cat", "/etc/hostname", cwd="/tmp").exit.code == 1
    assert box.run("cat", "/etc/hostname").exit.code == 0
    tell("no action but running things inside", control="the clone shows what the locked view does not")


@case(35)
def test_sockets_of_the_host_are_out_of_reach(number: int, box: Box, tell: Tell) -> None:
    abstract = f"\0attack-{os.getpid()}"
    directory = os.open(box.project, os.O_PATH)
    connect = f"""
import json, socket
reached = []
for address in ({abstract!r}, "s"):
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(address)
            reached.append(address)
        except OSError:
            pass
print(json.dumps(reached))
"""
    with listening(socket.AF_UNIX, abstract) as hidden, listening(socket.AF_UNIX, f"/proc/self/fd/{directory}/s") as named:
        assert box.probe(connect) == []
        assert (hidden.accepted, named.accepted) == (0, 0)
        assert len(outside(connect, cwd=box.project)) == 2
        assert until(lambda: (hidden.accepted, named.accepted) == (1, 1), seconds=5)
    os.close(directory)
    tell("0 accepts, abstract and named", control="1 accept each outside")


@case(37)
def test_there_is_no_broker_to_race(number: int, box: Box, tell: Tell) -> None:
    """No unix-socket allowlist exists, so no connect is mediated. What stands instead: the guest holds no socket but its own."""
    sockets = box.probe("""
import json, os
held = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]
known = open("/proc/net/unix").read().splitlines()[1:]
print(json.dumps([name for name in held if name.startswith("socket:")] + [line for line in known if "/" in line or "@" in line]))
""")
    assert sockets == []
    with listening(socket.AF_UNIX, f"\0control-{os.getpid()}"):
        assert f"@control-{os.getpid()}" in Path("/proc/net/unix").read_text()
    tell("no socket in its descriptors, none named in its network namespace", control="the host's list has ours")


@case(38)
def test_no_descriptor_can_be_sent_to_or_had_from_the_supervisor(number: int, box: Box, tell: Tell) -> None:
    before = set(os.listdir("/proc/self/fd"))
    answer = box.probe("""
import json, os, socket
sent = 0
for fd in range(3, 1024):
    try:
        with socket.socket(fileno=os.dup(fd)) as found:
            socket.send_fds(found, [b"x"], [0])
            sent += 1
    except OSError:
        pass
a, b = socket.socketpair()
socket.send_fds(a, [b"x"], [0])
print(json.dumps([sent, len(socket.recv_fds(b, 1, 1)[1])]))
""")
    assert answer == [0, 1] and set(os.listdir("/proc/self/fd")) == before
    tell("no socket to send through", control="sending works between its own sockets")


@case(40)
def test_a_supervisor_without_descriptors_starts_nothing(number: int, box: Box, tell: Tell) -> None:
    """No run asks for decisions yet. What stands instead: when our side runs out of descriptors, the launch fails."""
    import resource

    box.run("true")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    try:
        for room in range(1, 14):
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + room, hard))
            outcome = None
            with suppress(OSError, SandboxError):
                outcome = box.shell("echo ran > proof; cat proof")
            assert outcome is None or outcome.exit.reason in (Reason.EXITED, Reason.KILLED)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) == used and not (box.project / "proof").exists()
    assert box.run("true").exit.code == 0
    tell("refused or ran as always; no descriptor lost", control="it works again with room")


@case(43)
def test_no_program_of_the_projects_is_run_on_the_host(
    number: int, box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tell: Tell
) -> None:
    fakes = box.project / "node_modules" / ".bin"
    fakes.mkdir(parents=True)
    proof = tmp_path / "proof"
    for name in ("python3", "python", "bash", "sh", "git", "node", "mount", "unshare", "newuidmap", "nft", "ip", "bwrap"):
        (fakes / name).write_text(f"#!/bin/sh\necho $0 >> {proof}\n")
        (fakes / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{fakes}:{os.environ['PATH']}")
    monkeypatch.chdir(box.project)
    from agent_sandbox.runtime.process import ProcessRuntime

    runtime = ProcessRuntime()
    try:
        fresh = box.with_(runtime=runtime)
        assert fresh.python("print(1)").stdout == b"1\n" and fresh.run("true").exit.code == 0
        inside = fresh.run("git", env={"PATH": str(fakes)}, cwd=str(box.project))
    finally:
        runtime.close()
    assert not proof.exists()
    assert inside.exit.code != 127, "inside, where it is asked for by name, it is found"
    os.system("git")
    assert proof.exists(), "without a sandbox PATH decides"
    tell("none was started outside", control="a plain lookup in PATH does start it")


@case(133)
def test_removal_goes_through_no_link_and_no_mount(number: int, box: Box, tmp_path: Path, tell: Tell) -> None:
    canary = tmp_path / "canary"
    canary.mkdir()
    (canary / "file").write_text("keep")
    state = Store.open(str(tmp_path / "state")).sandbox_for(str(box.project))
    outcome = box.with_(state=state).shell(
        f"ln -s {canary} link; mkdir -p a/b; ln -s {canary} a/b/link; mkdir closed; touch closed/x; chmod 000 closed;"
        " rm -rf src; ln -s / src; mkfifo pipe"
    )
    assert outcome.exit.code == 0
    before = snapshot(canary)
    layers = list(Path(state.layers).rglob("link"))
    assert layers and layers[0].is_symlink()
    state.reset()
    assert snapshot(canary) == before and not Path(state.layers).exists()
    directory = os.open(tmp_path, os.O_RDONLY)
    (tmp_path / "gone").mkdir()
    removal.remove_tree(directory, "gone")
    os.close(directory)
    assert not (tmp_path / "gone").exists()
    tell("the canary survives, the layers are gone", control="removal does remove what is there")
