"""The zygote of egress processes, and the process that it has ready for the next run."""

from __future__ import annotations

import gc
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.engine.egress_program import start_program
from agent_sandbox.engine.egress_zygote import FRESH_SECONDS, MOST_SPARES, EgressZygote
from tests.egress.world import kept_rules

PATIENCE = 60.0  # a guard against a host that hangs


@pytest.fixture
def zygote() -> Iterator[EgressZygote]:
    made = EgressZygote()
    yield made
    made.close()


def test_the_first_run_leaves_no_process_behind_and_the_second_has_one_ready(zygote: EgressZygote) -> None:
    serve(zygote)
    assert ready(zygote) == []
    serve(zygote)
    (waiting,) = ready(zygote)
    pid, _ = serve(zygote)
    assert pid == waiting


def test_every_process_has_an_authority_of_its_own_also_the_one_that_waited(zygote: EgressZygote) -> None:
    certificates = [serve(zygote)[1] for _ in range(4)]
    assert len(set(certificates)) == len(certificates)


def test_a_process_that_waited_and_was_killed_is_replaced(zygote: EgressZygote) -> None:
    for _ in range(2):
        serve(zygote)
    (waiting,) = ready(zygote)
    end(waiting)
    pid, _ = serve(zygote)
    assert pid != waiting


def test_the_process_that_waits_ends_with_its_zygote(zygote: EgressZygote) -> None:
    for _ in range(2):
        serve(zygote)
    (waiting,) = ready(zygote)
    process = os.pidfd_open(waiting)
    zygote.close()
    await_end(process)


def test_a_fork_of_the_application_holds_no_link_to_the_process_that_waits(zygote: EgressZygote) -> None:
    """Else it would outlive the application whose runs it is for."""
    for _ in range(2):
        serve(zygote)
    ready(zygote)
    (spare,) = zygote._spares
    number = spare.link.fileno()
    before = os.fstat(number).st_ino
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if os.fstat(number).st_ino != before else 1)
        except OSError:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_process_that_got_no_orders_serves_the_next_run(zygote: EgressZygote) -> None:
    first = zygote.fork(kept_rules())
    first.await_readiness()
    pid, certificate = first.pid, first.certificate
    zygote.take_back(first)
    again = zygote.fork(kept_rules())
    again.await_readiness()  # at once: it has said so before
    assert (again.pid, again.certificate) == (pid, certificate)
    other = zygote.fork(kept_rules())  # the control: it is in use, and nobody else gets it
    other.await_readiness()
    assert other.pid != pid and other.certificate != certificate
    for each in (again, other):
        each.end()
        assert each.ended()


def test_a_process_whose_authority_is_a_day_old_is_replaced() -> None:
    now = [1000.0]
    zygote = EgressZygote(clock=lambda: now[0])
    try:
        pids = []
        for seconds in (0.0, FRESH_SECONDS - 1, 1.0, -FRESH_SECONDS):  # a clock may also be set back
            now[0] += seconds
            fork = zygote.fork(kept_rules())
            fork.await_readiness()
            pids.append(fork.pid)
            zygote.take_back(fork)
        first, second, third, fourth = pids
        assert first == second and len({second, third, fourth}) == 3
    finally:
        zygote.close()


def test_a_bounded_number_of_processes_waits(zygote: EgressZygote) -> None:
    forks = [zygote.fork(kept_rules()) for _ in range(MOST_SPARES + 1)]
    for each in forks:
        each.await_readiness()
    surplus = os.pidfd_open(forks[-1].pid)
    for each in forks:
        zygote.take_back(each)
    await_end(surplus)
    assert sorted(ready(zygote)) == sorted(each.pid for each in forks[:-1])


def test_a_process_that_could_not_get_ready_is_not_kept(zygote: EgressZygote) -> None:
    fork = zygote.fork(kept_rules())
    fork.link.close()
    with pytest.raises(OSError):
        fork.await_readiness()
    zygote.take_back(fork)
    assert zygote._spares == []


def test_closing_waits_for_the_end_of_the_processes_that_were_let_go(zygote: EgressZygote) -> None:
    fork = zygote.fork(kept_rules())
    fork.await_readiness()
    process = os.pidfd_open(fork.pid)
    os.kill(fork.pid, signal.SIGSTOP)  # so that it does not end with its link
    zygote.let_go(fork)
    closing = threading.Thread(target=zygote.close)
    closing.start()
    closing.join(0.5)
    assert closing.is_alive()
    signal.pidfd_send_signal(process, signal.SIGKILL)
    closing.join(PATIENCE)
    assert not closing.is_alive()
    await_end(process)


@pytest.mark.parametrize("killed", [False, True])
def test_a_program_that_was_started_before_is_used_and_replaced_if_it_was_killed(killed: bool) -> None:
    program = start_program(once=True)
    zygote = EgressZygote(program)
    if killed:
        os.kill(program.pid, signal.SIGKILL)
        os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)
    try:
        serve(zygote)
        assert (zygote._pid == program.pid) is not killed
    finally:
        zygote.close()


def test_closing_ends_a_program_that_no_run_used() -> None:
    program = start_program()
    process = os.pidfd_open(program.pid)
    EgressZygote(program).close()
    await_end(process)


def test_a_zygote_that_is_forgotten_leaves_no_descriptor_behind() -> None:
    before = len(os.listdir("/proc/self/fd"))
    zygote = EgressZygote()
    fork = zygote.fork(kept_rules())
    fork.await_readiness()
    zygote.take_back(fork)
    assert len(os.listdir("/proc/self/fd")) > before, "the control"
    fork.link.close()  # else it is reported, as one of the test
    del fork, zygote
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def serve(zygote: EgressZygote) -> tuple[int, bytes]:
    """Take a process for a run as the engine does, end it, and return its pid and its certificate."""
    fork = zygote.fork(kept_rules())
    fork.await_readiness()
    pid, certificate = fork.pid, fork.certificate
    fork.end()
    assert fork.ended()
    zygote.keep_ready()
    return pid, certificate


def ready(zygote: EgressZygote) -> list[int]:
    """Return the processes that wait. One that was asked for is waited for."""
    children = Path(f"/proc/{zygote._pid}/task/{zygote._pid}/children")
    until = time.monotonic() + PATIENCE
    while not (found := [int(each) for each in children.read_text().split()]) and zygote._spares:
        assert time.monotonic() < until
        time.sleep(0.01)
    return found


def end(pid: int) -> None:
    process = os.pidfd_open(pid)
    signal.pidfd_send_signal(process, signal.SIGKILL)
    await_end(process)


def await_end(process: int) -> None:
    poller = select.poll()
    poller.register(process, select.POLLIN)
    assert poller.poll(PATIENCE * 1000)
    os.close(process)
