"""Attacks on our own side: host code that reads what a guest left, helpers, sockets, and what is swept away afterwards."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import get_args

import pytest

from agent_sandbox.errors import Denied, PolicyError, SandboxError
from agent_sandbox.policy.action import Action, CallTool, Connect, OpenNetwork, Promote, RunCode, RunCommand, Undo, UseFile
from agent_sandbox.policy.decide import Allow, Deny, decide
from agent_sandbox.policy.paths import parse
from agent_sandbox.runtime.base import ExitReason
from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.store import Store
from tests.patience import until
from tests.security.conftest import Tell
from tests.security.harness import Box, case, listening, outside, snapshot
from tests.workspace.diff.previews import lines_of_diff


@case(23)
def test_what_we_show_of_a_guests_files_is_never_a_secret_of_the_hosts(number: int, box: Box, tell: Tell) -> None:
    """Reading changes and showing them is all that host code does with a guest's files. It does so with our rights, not the guest's."""
    secret = box.home / ".ssh" / "id_rsa"
    (box.project / "known").symlink_to(secret.parent)
    kept = box.kept
    kept.shell(f"""
        mkdir -p {secret.parent}; echo mine > {secret}
        ln -s {secret} greeting.link; rm greeting.txt; ln -s {secret} greeting.txt
        rm known; mkdir known; echo mine > known/id_rsa
        rm -rf src; ln -s {secret.parent} src
    """)
    shown = _shown(kept)
    assert "+mine" in shown and f"{secret}"[1:] in shown, "it is shown what the guest wrote there"
    assert "CANARY" not in shown
    assert "CANARY" in _shown(kept, box.unmasked), "the control arm"
    with kept.layers() as layers:
        assert "CANARY" in next(layers.rglob("greeting.link")).read_text(), "and who follows its links sees it too"
    tell("its own lines only", control="a reader without the masks, or one that follows links, shows the secret")


def _shown(kept: Box, as_if: Box | None = None) -> str:
    """The diff of everything that a kept sandbox changed, as `agent-sandbox diff --all` prints it."""
    with kept.layers() as place:
        layers = os.open(place, os.O_RDONLY)
        try:
            return "\n".join(line for change in (as_if or kept).read(layers) for line in lines_of_diff(change, layers))
        finally:
            os.close(layers)


@case(23)
def test_a_working_directory_outside_the_rules_is_refused(number: int, box: Box, tell: Tell) -> None:
    """The one path that comes with every request."""
    # Tools of the caller's, CallTool, are attacked in test_conversation.py; UseFile, whose path the caller names, in test_caller_files.py;
    # OpenNetwork and Connect, which name hosts, in sdk/test_intents.py and egress/test_consent.py.
    known = (RunCode, RunCommand, Promote, Undo, CallTool, UseFile, OpenNetwork, Connect)
    assert get_args(Action) == known, "another kind of action needs an attack of its own"
    locked = box.files(read=True, allowed=[parse(str(box.project / "src"))])
    for directory in (box.project, box.project / "src/..", box.home / ".ssh", Path("/etc"), Path("/proc/self/root/etc")):
        with pytest.raises((Denied, PolicyError)):
            locked.run("ls", cwd=str(directory))
    assert locked.run("ls", cwd=str(box.project / "src")).stdout == b"app.py\n"
    writing = box.files(read=True, write=True, allowed=[parse(str(box.project / "src"))])
    assert writing.policy is not None
    for place, verdict in (("/etc", Deny), (str(box.project), Deny), (str(box.project / "src"), Allow)):
        for action in (Promote(place, "0" * 64, 1), Undo(place, "1")):
            assert isinstance(decide(writing.policy, (), action, now=0), verdict)
    tell("Denied before anything ran", control="a directory inside the rules is taken")


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
        assert until(lambda: (hidden.accepted, named.accepted) == (1, 1))
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
    for _ in range(3):  # runs of one plan may share a descriptor of ours
        box.probe("print(1)")
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

    for _ in range(3):  # runs of one plan may share a descriptor of ours
        box.shell("true")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    try:
        for room in range(1, 14):
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + room, hard))
            outcome = None
            with suppress(OSError, SandboxError):
                outcome = box.shell("echo ran > proof; cat proof")
            assert outcome is None or outcome.exit.reason in (ExitReason.EXITED, ExitReason.KILLED)
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
    with box.fresh() as fresh:
        assert fresh.python("print(1)").stdout == b"1\n" and fresh.run("true").exit.code == 0
        inside = fresh.run("git", env={"PATH": str(fakes)}, cwd=str(box.project))
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
    kept = box.with_(state=state)
    outcome = kept.shell(
        f"ln -s {canary} link; mkdir -p a/b; ln -s {canary} a/b/link; mkdir closed; touch closed/x; chmod 000 closed;"
        " rm -rf src; ln -s / src; mkfifo pipe; true"
    )
    assert outcome.exit.code == 0
    before = snapshot(canary)
    with kept.layers() as layers:
        links = list(layers.rglob("link"))
        assert links and links[0].is_symlink()
        within = os.open(layers.parent, os.O_RDONLY | os.O_DIRECTORY)
        beneath.remove_tree(within, layers.name)  # as root nothing else walks there: a reset removes the image
        os.close(within)
        assert snapshot(canary) == before and not layers.exists()
    state.reset()
    assert snapshot(canary) == before and not state.exists
    directory = os.open(tmp_path, os.O_RDONLY)
    (tmp_path / "gone").mkdir()
    beneath.remove_tree(directory, "gone")
    os.close(directory)
    assert not (tmp_path / "gone").exists()
    tell("the canary survives, the layers are gone", control="removal does remove what is there")
