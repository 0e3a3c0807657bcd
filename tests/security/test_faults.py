"""The n-th system call of ours fails, for every n: with no space, no memory, no descriptors, a broken disk, an interruption.

strace makes the kernel answer so, in the supervisor alone or in everything it starts, once it stands at the door of its work. Whatever then
happens, what was done was recorded before, nothing that was kept is lost, nothing hangs, and nothing is left.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent_sandbox.ledger.chain import verify
from agent_sandbox.ledger.event import Intent
from tests.e2e.program import Shell
from tests.ledger.samples import read
from tests.leftovers import adopting, left_since, traces
from tests.patience import Hung
from tests.security.conftest import Tell
from tests.security.harness import case

SEED = int(os.environ.get("AGENT_SANDBOX_SEED", "20240607"))
SAMPLE = 36  # each fault once
FAULTS = (
    *(("openat", error) for error in ("EMFILE", "EIO", "ENOMEM")),
    *(("write", error) for error in ("ENOSPC", "EIO", "EINTR")),
    *(("read", error) for error in ("EIO", "EINTR")),
    *(("mkdir", error) for error in ("ENOSPC", "EIO")),
    *(("flock", error) for error in ("EINTR", "ENOMEM")),
    *(("socketpair", error) for error in ("EMFILE", "ENOMEM")),
    *(("pipe2", error) for error in ("EMFILE",)),
    *(("pidfd_open", error) for error in ("EMFILE", "ENOMEM")),
    *(("clone", error) for error in ("ENOMEM",)),
    *(("mmap", error) for error in ("ENOMEM",)),
    *(("sendmsg", error) for error in ("ENOMEM", "EINTR")),
    *(("recvmsg", error) for error in ("ENOMEM", "EINTR")),
    *(("poll", error) for error in ("ENOMEM", "EINTR")),
    *(("mount", error) for error in ("ENOMEM", "ENOSPC")),
    *(("unshare", error) for error in ("ENOMEM", "ENOSPC")),
    *(("rename", error) for error in ("ENOSPC", "EIO")),
    *(("fsync", error) for error in ("EIO", "ENOSPC")),
    *(("ftruncate", error) for error in ("EIO",)),
    *(("pread64", error) for error in ("EIO",)),
    *(("pwrite64", error) for error in ("ENOSPC",)),
)
# Python tells itself of a signal by a byte in a pipe. That such a write fails is no fault that exists: writes fail in the supervisor alone,
# which gets no signals here.
SUPERVISOR_ONLY = {"write"}
OFTEN = {"openat", "read", "write", "mmap"}
AT_FIRST = {"mkdir", "rename", "fsync"}  # what is mostly done when a project has no sandbox yet: these fail in a new one each time
# Everything it will use is imported before it says that it is ready: the interpreter's own reading of files is not what is tried. Anybody
# of the same user may trace it.
AT_THE_DOOR = """
import ctypes, os, sys
from agent_sandbox.cli import context, execute, main
from agent_sandbox.cli.commands import diff, run, status
from agent_sandbox.engine import recover, stored_run
ctypes.CDLL(None).prctl(0x59616d61, ctypes.c_ulong(-1 & 0xFFFFFFFFFFFFFFFF), 0, 0, 0)
os.write(1, b"ready\\n")
os.read(int(sys.argv[1]), 1)
os.close(int(sys.argv[1]))
sys.exit(main.main(sys.argv[2:]))
"""


@dataclass(frozen=True)
class Faulted:
    """How a command ended whose n-th call failed, if it made so many."""

    injected: bool
    code: int
    stdout: bytes
    stderr: str


@dataclass
class Trial:
    """A project with a change set that must not be lost, and what became of it under faults."""

    shell: Shell
    scratch: Path
    refused: int = 0
    done: int = 0

    @property
    def ledger(self) -> Path:
        return Path(self.shell.environment["AGENT_SANDBOX_STATE"], "ledger.jsonl")

    def fail(self, call: str, error: str, nth: int, *, everywhere: bool) -> bool:
        """Run a command whose n-th call fails, and check what must hold whatever came of it. Whether there was such a call."""
        what = f"{error} at call {nth} of {call}, {'everywhere' if everywhere else 'in the supervisor'}"
        before, intents = traces(adopted=True), self._intents()
        ended = self._run(call, error, nth, everywhere, "run", "--", "sh", "-c", "echo x >> proof; echo RAN")
        ran = b"RAN" in ended.stdout
        assert left_since(before, adopted=True) == [], what
        assert "Traceback" not in ended.stderr, (what, ended)
        assert self._intents() - intents >= ran, f"{what}: done, and not recorded before"
        assert ran or ended.code != 0, (what, ended)
        kept = self.shell("run", "--", "cat", "precious")
        assert kept.stdout == b"work of days\n", (what, kept)
        verify(self.ledger)
        if ended.injected:
            self.done, self.refused = self.done + ran, self.refused + (not ran)
        else:
            assert ran, (what, ended)
        return ended.injected

    def _new_project(self) -> Path:
        project = Path(tempfile.mkdtemp(dir=self.scratch))
        (project / ".git").mkdir()
        return project

    def _intents(self) -> int:
        return sum(isinstance(entry.event, Intent) for entry in read(self.ledger))

    def _run(self, call: str, error: str, nth: int, everywhere: bool, *line: str) -> Faulted:
        gate, opener = os.pipe()
        log = self.scratch / "strace"
        with ExitStack() as stack:
            command = [sys.executable, "-c", AT_THE_DOOR, str(gate), *line]
            pipe = subprocess.PIPE
            target = stack.enter_context(
                subprocess.Popen(
                    command,
                    cwd=self._new_project() if call in AT_FIRST else self.shell.cwd,
                    env=self.shell.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=pipe,
                    stderr=pipe,
                    pass_fds=[gate],
                )
            )
            os.close(gate)
            assert target.stdout is not None and target.stdout.readline() == b"ready\n"
            inject = ["-e", f"trace={call}", "-e", f"inject={call}:error={error}:when={nth}"]
            tracer = stack.enter_context(
                subprocess.Popen(["strace", *(["-f"] if everywhere else []), *inject, "-o", log, "-p", str(target.pid)], stderr=pipe)
            )
            assert tracer.stderr is not None
            said = tracer.stderr.readline()
            assert b"attached" in said, said
            os.close(opener)
            try:
                stdout, stderr = target.communicate()
            except Hung as hung:
                hung.add_note(f"{error} at call {nth} of {call} made it hang: {log.read_text()[-2000:]}")
                raise
            finally:
                target.kill()
                tracer.communicate()
        return Faulted("(INJECTED)" in log.read_text(errors="replace"), target.returncode, stdout, stderr.decode(errors="replace"))


@pytest.fixture
def trial(project: Path, tmp_path: Path) -> Iterator[Trial]:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: make setup")
    shell = Shell(project, {"AGENT_SANDBOX_STATE": str(tmp_path / "state")})
    assert shell("run", "--", "sh", "-c", "echo work of days > precious").returncode == 0
    with adopting():
        yield Trial(shell, tmp_path)


def _conclude(trial: Trial, tell: Tell) -> None:
    assert trial.refused > 0 and trial.done > 0, "some faults stop a run, some do not; else nothing was tried"
    healthy = trial.shell("run", "--", "sh", "-c", "cat precious; echo x >> proof; wc -l < proof")
    assert healthy.stdout.startswith(b"work of days\n") and int(healthy.stdout.split()[-1]) > 0, healthy
    tell(
        f"{trial.refused} refused, {trial.done} done and recorded before; nothing lost, hung or left",
        control="a call that does not fail: it runs",
    )


@case(148)
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_sample_of_failing_calls_is_refused_or_done_and_loses_nothing(number: int, trial: Trial, tell: Tell) -> None:
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    for at in range(SAMPLE):
        call, error = FAULTS[at % len(FAULTS)]
        everywhere = chance.random() < 0.5 and call not in SUPERVISOR_ONLY
        trial.fail(call, error, chance.randint(1, 6 if call in OFTEN else 3), everywhere=everywhere)
    assert not trial.fail("fsync", "EIO", 1000, everywhere=True), "the control arm: nothing fails, and it runs"
    _conclude(trial, tell)


@case(148)
@pytest.mark.torture
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("everywhere", [False, True], ids=["supervisor", "everywhere"])
def test_every_call_failing_in_turn_is_refused_or_done_and_loses_nothing(number: int, everywhere: bool, trial: Trial, tell: Tell) -> None:
    """For each call and error n goes up until a run has no n-th call any more."""
    for call, error in FAULTS:
        if everywhere and call in SUPERVISOR_ONLY:
            continue
        nth = 1
        while trial.fail(call, error, nth, everywhere=everywhere):
            nth += 1
        print(f"{call} {error}: {nth - 1} calls")
    _conclude(trial, tell)
