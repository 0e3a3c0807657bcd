"""Guests on a kernel in user space: the contract of every runtime, and what only this one promises."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agent_sandbox import Sandbox
from agent_sandbox.engine.work import Code, Command, Work
from agent_sandbox.errors import LaunchFailed, RuntimeUnavailable
from agent_sandbox.kernel import probes
from agent_sandbox.policy.model import MIB, Guarantee, cloned
from agent_sandbox.runtime.base import Argv, Demands, ExitReason, Terminal
from agent_sandbox.runtime.gvisor.probe import try_platforms
from agent_sandbox.runtime.gvisor.runtime import GvisorRuntime
from agent_sandbox.runtime.process import guest_handle
from agent_sandbox.runtime.process.guest_handle import ProcessGuest
from agent_sandbox.runtime.process.probe import trial
from agent_sandbox.testing import CLAIMS, CODE_CLAIMS, Bench, Claim
from tests import gvisor
from tests.leftovers import command, descendants, left_since, running, traces
from tests.security.harness import ENVIRONMENT, GENEROUS, Box, reading, snapshot

SAMPLED = ("a_signal_is_reported", "memory_of_code")
SCRIPT = """
    echo new > new.txt; echo more >> greeting.txt; rm src/app.py; mkdir -p a/b; ln -s /etc/passwd link; chmod 600 a
    mv new.txt a/moved.txt; cp -p greeting.txt a/copy.txt; ls -la a | wc -l; stat -c %a a; cat greeting.txt
"""


def claims(known: tuple[Claim, ...]) -> list[object]:
    """A few of the claims for `make test`, the others for `make torture`: a guest takes a third of a second of processor time."""
    rest = pytest.mark.torture
    return [pytest.param(each, id=each.__name__, marks=() if each.__name__.startswith(SAMPLED) else rest) for each in known]


@pytest.fixture(scope="module")
def kernel() -> Iterator[GvisorRuntime]:
    """The runtime, on whatever platform works here."""
    made = gvisor.runtime()
    yield made
    made.close()


@pytest.fixture
def inside(kernel: GvisorRuntime, box: Box) -> Box:
    """A clone of the machine, on a kernel in user space."""
    return box.with_(runtime=kernel)


@pytest.mark.parametrize("claim", claims(CLAIMS))
def test_native_programs_keep_the_contract(claim: Claim, inside: Box) -> None:
    claim(Bench(inside.runtime, inside.session().explain(Work(Command(("true",)), ENVIRONMENT))))


@pytest.mark.parametrize("claim", claims(CODE_CLAIMS))
def test_python_keeps_the_contract(claim: Claim, inside: Box) -> None:
    claim(Bench(inside.runtime, inside.session().explain(Work(Code("python", "pass"), ENVIRONMENT))))


def test_the_probe_shows_by_live_guests_that_each_declared_guarantee_holds(kernel: GvisorRuntime) -> None:
    support = kernel.probe()
    hard = {Guarantee.MEMORY_HARD} if "memory" in probes.control_group()[0] else set()
    assert support.guarantees == (kernel.traits.guarantees - {Guarantee.MEMORY_HARD}) | hard, support.missing
    assert {"separate-kernel", "programs-confined", "deterministic"} <= support.missing.keys()


def test_another_kernel_answers_the_program(inside: Box, box: Box) -> None:
    """No namespace hides the version of a kernel. The control arm is a guest that has the machine's."""
    version = "uname -v"
    assert box.shell(version).stdout.decode().strip() == os.uname().version
    assert inside.shell(version).stdout.decode().strip() not in ("", os.uname().version)


def test_a_platform_is_usable_where_a_listing_runs_on_it(kernel: GvisorRuntime) -> None:
    tried = try_platforms(kernel)
    assert [each.platform for each in tried] == ["systrap", "ptrace"]
    assert any(not each.why for each in tried), tried


def test_its_changes_are_those_of_the_process_runtime(inside: Box, box: Box) -> None:
    before = snapshot(box.project)
    ours, theirs = inside.shell(SCRIPT), box.shell(SCRIPT)
    assert (ours.exit.code, ours.stdout) == (0, theirs.stdout), ours.stderr

    def described(changes: object) -> dict[str, tuple[object, ...]]:
        return {each.path: (each.kind, each.after and (each.after.mode, each.after.uid, each.after.gid)) for each in changes}  # type: ignore[attr-defined]

    assert described(ours.changes) == described(theirs.changes) != {}
    assert snapshot(box.project) == before


def test_what_it_wrote_before_it_was_killed_is_there(inside: Box) -> None:
    """Nothing waits in the user-space kernel: the layers have it when the program has it."""
    kept = inside.kept
    outcome = kept.with_(limits=replace(GENEROUS, wall_seconds=3.0)).python(
        "open('made', 'w').write('x' * 100); import time; time.sleep(600)"
    )
    assert outcome.exit.reason is ExitReason.TIMED_OUT
    assert kept.run("wc", "-c", "made").stdout == b"100 made\n"


def test_secrets_are_hidden_and_the_machine_is_not_reached(inside: Box) -> None:
    keys = [inside.home / ".ssh/id_rsa", inside.home / ".aws/credentials"]
    assert inside.probe(reading(*keys)) == []
    assert len(inside.unmasked.probe(reading(*keys))) == 2, "the control arm"


def test_code_starts_threads_and_no_processes_unless_it_may(kernel: GvisorRuntime) -> None:
    launch = trial(
        "import os, threading\nt = threading.Thread(target=print, args=('thread',)); t.start(); t.join()\n"
        "if os.fork() == 0: os._exit(0)\nos.wait(); print('forked')"
    )
    for may, expected in ((False, b"thread\n"), (True, b"thread\nforked\n")):
        with kernel.launch(replace(launch, processes=may)) as guest:
            completed = guest.wait()
        assert completed.stdout == expected and (completed.exit.code == 0) is may, completed


def test_a_stored_sandbox_that_may_start_no_processes_is_refused(inside: Box) -> None:
    """An earlier run may have changed the interpreter that would install the filter inside."""
    policy = cloned(masks=(), limits=GENEROUS)
    policy = replace(policy, processes=False, requires=policy.requires | {Guarantee.NO_NEW_PROCESSES})
    with pytest.raises(RuntimeUnavailable, match="stored sandbox") as refusal:
        inside.kept.with_(policy=policy).python("pass")
    assert refusal.value.missing == ("no-new-processes",)


def test_the_limit_on_processes_is_kept_inside(inside: Box) -> None:
    limited = inside.with_(limits=replace(GENEROUS, processes=12, memory_bytes=1024 * MIB))
    forks = """
import os, time
made = 0
try:
    while made < 40:
        if os.fork() == 0:
            time.sleep(600)
        made += 1
except BlockingIOError:
    pass
print(made)
"""
    outcome = limited.python(forks)
    assert outcome.exit.code == 0 and 0 < int(outcome.stdout) < 12, outcome


def test_a_signal_reaches_the_program_and_not_the_kernel_around_it(inside: Box) -> None:
    guests: list[ProcessGuest] = []
    # In short sleeps: Python misses a signal that comes just before it sleeps.
    code = "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(7))\nprint('ready', flush=True)\nwhile True: time.sleep(0.1)"
    outcome = inside.python(code, on_start=guests.append, on_output=lambda *_: guests[0].interrupt(signal.SIGTERM))
    assert outcome.exit.code == 7 and outcome.exit.reason is ExitReason.EXITED


def _victim(name: str) -> int:
    """One of our descendants: the monitor (`runsc run`), the user-space kernel (`boot`) or the file server (`gofer`)."""
    lines = {pid: command(pid).split() for pid in descendants(os.getpid(), running())}
    return next(pid for pid, words in lines.items() if name in words and any("runsc" in word for word in words))


@pytest.mark.parametrize("victim", ["boot", *(pytest.param(each, marks=pytest.mark.torture) for each in ("run", "gofer"))])
def test_whichever_part_is_killed_the_run_ends_and_nothing_is_left(box: Box, victim: str) -> None:
    runtime = gvisor.runtime()
    ended = []
    try:
        own = box.with_(runtime=runtime, limits=replace(GENEROUS, wall_seconds=8.0))
        before = traces()
        ready = threading.Event()
        script = "(setsid sleep 600 &); echo ready; sleep 600"
        thread = threading.Thread(target=lambda: ended.append(own.shell(script, on_output=lambda *_: ready.set()).exit.reason))
        thread.start()
        assert ready.wait()
        os.kill(_victim(victim), signal.SIGKILL)
        thread.join()
        # Without its file server a guest that touches no file goes on, up to its limit.
        assert ended == [ExitReason.KILLED] or (victim == "gofer" and ended == [ExitReason.TIMED_OUT])
    finally:
        runtime.close()
    assert left_since(before) == []


def test_a_runsc_that_hangs_is_given_up_and_nothing_is_left(box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = gvisor.runtime().program()
    hanging = tmp_path / "runsc"
    hanging.write_text(f'#!/bin/sh\ncase "$*" in *--bundle*) sleep 600;; esac\nexec {real.path} "$@"\n')
    hanging.chmod(0o755)
    tmp_path.chmod(0o755)
    monkeypatch.setattr(guest_handle, "READY_SECONDS", 2.0)
    runtime = GvisorRuntime(path=str(hanging), platform="systrap")
    before = traces()
    try:
        with pytest.raises(LaunchFailed, match="in time"):
            box.with_(runtime=runtime).run("true")
    finally:
        runtime.close()
    assert left_since(before) == []


def test_what_it_cannot_do_is_refused_before_anything_runs(kernel: GvisorRuntime) -> None:
    launch = replace(trial(""), program=Argv(("true",)), processes=True)
    for change, why in (
        ({"terminal": Terminal(24, 80)}, "terminal"),
        ({"observe": True}, "observer"),
        ({"requires": frozenset({Guarantee.PROGRAMS_CONFINED})}, "programs-confined"),
        ({"requires": frozenset({Guarantee.SEPARATE_KERNEL})}, "separate-kernel"),
    ):
        with pytest.raises(RuntimeUnavailable, match=why):
            kernel.launch(replace(launch, **change))
    assert kernel.objection(Demands()) == ""


def test_tools_and_sessions_work_as_in_every_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gvisor.runtime().close()
    monkeypatch.setenv("AGENT_SANDBOX_STATE", str(tmp_path / "state"))

    def add(a: int, b: int) -> int:
        return a + b

    with Sandbox(runtime="gvisor", tools=[add]) as sandbox:
        assert sandbox.execute("print(add(2, 3))").stdout == "5\n"
        with sandbox.session() as session:
            session.run("kept = 6")
            assert session.run("print(kept * 7)").stdout == "42\n"


@pytest.mark.torture
def test_five_hundred_kills_leave_nothing(box: Box) -> None:
    runtime = gvisor.runtime()
    before = traces()
    try:
        own = box.with_(runtime=runtime)
        for number in range(500):
            guests: list[ProcessGuest] = []

            def end(*_: object, number: int = number, guests: list[ProcessGuest] = guests) -> None:
                os.kill([guests[0].init, _victim("run"), _victim("boot")][number % 3], signal.SIGKILL)

            outcome = own.shell("(setsid sleep 600 &); echo ready; sleep 600", on_start=guests.append, on_output=end)
            assert outcome.exit.reason is ExitReason.KILLED
    finally:
        runtime.close()
    assert left_since(before) == []
