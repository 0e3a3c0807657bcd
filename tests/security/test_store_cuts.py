"""The store is cut off at any system call: killed with SIGKILL before the n-th, while it makes an image, freezes, goes back, squashes, or
removes. Whatever the moment, the next who opens it finds the old state or the new, whole, and nothing stays on the machine.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent_sandbox.policy.model import cloned
from agent_sandbox.workspace.store import SandboxState, Store
from agent_sandbox.workspace.stored_sandbox import Stored
from tests.e2e.program import Shell
from tests.leftovers import adopting, left_since, traces
from tests.security.conftest import Tell
from tests.security.harness import case

SEED = int(os.environ.get("AGENT_SANDBOX_SEED", "20240607"))
SAMPLE = 2  # cuts for each deed
# What the deed needs is loaded before the cuts begin: the interpreter's own reading of files is not what is tried.
AT_THE_DOOR = """
import ctypes, os, sys
from agent_sandbox.workspace import originals, store, stored_sandbox
from agent_sandbox.workspace.layers import history, image, readback, squash, stack
from agent_sandbox.kernel import loop, syscalls
import json
ctypes.CDLL(None).prctl(0x59616d61, ctypes.c_ulong(-1 & 0xFFFFFFFFFFFFFFFF), 0, 0, 0)
gate, deed, directory, project = int(sys.argv[1]), *sys.argv[2:]
state = store.Store.open(directory).sandbox_for(project)
box = stored_sandbox.Stored(state)
os.write(1, b"ready\\n")
os.read(gate, 1)
if deed == "make":
    with state.lock():
        state.prepare(8 << 30)
elif deed == "snapshot":
    box.snapshot("cut")
elif deed == "rollback":
    box.rollback("first")
elif deed == "forget":
    box.forget("second")
elif deed == "squash":
    with state.lock():
        box._shorten()
elif deed == "drop":
    with state.lock():
        box.drop([f"{project}/file"], "before promote")
print("done", flush=True)
"""


@dataclass
class Cuts:
    """A project with a sandbox of two snapshots, copied anew for each cut."""

    shell: Shell
    scratch: Path
    cut: int = 0
    finished: int = 0

    def strike(self, deed: str, call: str, nth: int) -> bool:
        """Kill it at its n-th call of this kind, and see that everything is old or new. Whether there was such a call."""
        what = f"{deed}, killed at call {nth} of {call}"
        before = traces(adopted=True)
        state = self._state(deed)
        old = self._shown(state)
        done = self._run(deed, call, nth, state)
        assert left_since(before, adopted=True) == [], what
        self._check(deed, state, old, what)
        self.cut, self.finished = self.cut + (not done), self.finished + done
        return not done

    def _state(self, deed: str) -> SandboxState:
        # A new directory each time: a program that was run in the last one may still write the names of its project there.
        directory = self.scratch / f"state-{self.cut + self.finished}"
        for last in self.scratch.glob("state-*"):
            shutil.rmtree(last, ignore_errors=True)
        if deed == "make":
            return Store.open(str(directory)).sandbox_for(str(self.shell.cwd))
        subprocess.run(["cp", "-a", "--sparse=always", self.scratch / "prepared", directory], check=True)
        return Store.open(str(directory)).sandbox_for(str(self.shell.cwd))

    def _shown(self, state: SandboxState) -> dict[str, str]:
        changes = Stored(state).changes(cloned(masks=()))
        return {os.path.basename(change.path): change.kind.value for change in changes.within(state.project)}

    def _check(self, deed: str, state: SandboxState, old: dict[str, str], what: str) -> None:
        stored = Stored(state)
        labels = [each.label for each in stored.snapshots().snapshots]
        now = self._shown(state)
        shell = Shell(self.shell.cwd, {"AGENT_SANDBOX_STATE": state.store.path})
        match deed:
            case "make":
                assert now == {} and labels == []
            case "snapshot":
                assert now == old and labels in (MADE, [*MADE, "cut"]), (what, labels)
            case "rollback":
                gone_back = labels == [*MADE, "before rollback to first"]
                assert (gone_back and now == {"file": "added"}) or (labels == MADE and now == old), (what, labels, now)
            case "forget":
                assert now == old and labels in (MADE, ["first", "third"]), (what, labels)
            case "squash":
                assert now == old and labels == MADE, (what, now)
            case "drop":
                dropped = labels == [*MADE, "before promote"]
                assert now == ({name: kind for name, kind in old.items() if name != "file"} if dropped else old), (what, labels, now)
        ran = shell("run", "--", "sh", "-c", "cat file 2>/dev/null; echo after >> file; tail -1 file")
        assert ran.returncode == 0 and ran.stdout.endswith(b"after\n"), (what, ran)
        if deed != "make":
            assert shell("rollback", "first").returncode == 0 and shell("run", "--", "cat", "file").stdout == b"one\n", what

    def _run(self, deed: str, call: str, nth: int, state: SandboxState) -> bool:
        gate, opener = os.pipe()
        with ExitStack() as stack:
            target = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", AT_THE_DOOR, str(gate), deed, state.store.path, state.project],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=[gate],
                )
            )
            os.close(gate)
            assert target.stdout is not None and target.stdout.readline() == b"ready\n"
            tracer = stack.enter_context(
                subprocess.Popen(
                    ["strace", "-e", f"inject={call}:signal=KILL:when={nth}", "-o", "/dev/null", "-p", str(target.pid)],
                    stderr=subprocess.PIPE,
                )
            )
            assert tracer.stderr is not None
            said = tracer.stderr.readline()
            assert b"attached" in said, said
            os.close(opener)
            stdout, stderr = target.communicate()
            tracer.communicate()
        assert target.returncode == -9 or stdout == b"done\n", (deed, call, nth, target.returncode, stderr)
        return target.returncode == 0


@pytest.fixture
def cuts(project: Path, tmp_path: Path) -> Iterator[Cuts]:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: make setup")
    shell = Shell(project, {"AGENT_SANDBOX_STATE": str(tmp_path / "prepared")})
    for line in (
        ("run", "echo one > file"),
        ("snapshot", "first"),
        ("run", "echo two > file; mkdir d; echo x > d/f"),
        ("snapshot", "second"),
        ("rollback", "first"),
        ("run", "echo three > file; echo z > e"),
        ("snapshot", "third"),
        ("run", "echo four > file; rm e; echo y > other"),
    ):
        assert shell(*line).returncode == 0, line
    with adopting():
        yield Cuts(shell, tmp_path)


DEEDS = ("make", "snapshot", "rollback", "forget", "squash", "drop")
CHANGING = ("openat", "write", "fsync", "rename", "ftruncate", "close")  # every deed makes some of each
MADE = ["first", "second", "third"]
CALLS = (
    *("openat", "close", "write", "pwrite64", "ftruncate", "fallocate", "fsync", "syncfs", "rename", "renameat", "mkdir", "mkdirat"),
    *("linkat", "mknodat", "unlink", "unlinkat", "flock", "ioctl", "fsconfig", "fsmount", "clone3", "vfork", "wait4"),
)


@case(148)
@pytest.mark.slow
@pytest.mark.needs_root
@pytest.mark.timeout(400)
def test_a_sample_of_cuts_leaves_the_old_state_or_the_new(number: int, cuts: Cuts, tell: Tell) -> None:
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    for deed in DEEDS:
        for call in chance.sample(CHANGING, SAMPLE):
            cuts.strike(deed, call, chance.choice((1, 1, 2)))
        assert not cuts.strike(deed, "fsync", 1000), "the control arm: it gets done"
    assert cuts.cut >= len(DEEDS), cuts
    tell(f"{cuts.cut} cuts, old or new each time, nothing left", control=f"{cuts.finished} were let finish")


@case(148)
@pytest.mark.torture
@pytest.mark.needs_root
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("deed", DEEDS)
def test_a_cut_at_every_call_leaves_the_old_state_or_the_new(number: int, deed: str, cuts: Cuts, tell: Tell) -> None:
    for call in CALLS:
        nth = 1
        while cuts.strike(deed, call, nth):
            nth += 1
    assert cuts.cut > 10
    tell(f"{cuts.cut} cuts of {deed}, old or new each time", control="the last was let finish")
