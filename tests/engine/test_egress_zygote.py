"""The zygote of egress processes, and the process that it has ready for the next run."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.egress import orders
from agent_sandbox.engine.egress_zygote import EgressZygote
from agent_sandbox.engine.provisions import NO_PROVISIONS
from agent_sandbox.kernel import wire

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
    assert zygote._spare is not None
    number = zygote._spare.fileno()
    before = os.fstat(number).st_ino
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if os.fstat(number).st_ino != before else 1)
        except OSError:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def serve(zygote: EgressZygote) -> tuple[int, str]:
    """Take a process for a run as the engine does, end it, and return its pid and its certificate."""
    link = zygote.fork(NO_PROVISIONS)
    link.settimeout(PATIENCE)
    with link:
        pid, certificate = answer(link)
        process = os.pidfd_open(pid)
    await_end(process)
    zygote.keep_ready()
    return pid, certificate


def answer(link: socket.socket) -> tuple[int, str]:
    pid = wire.credentials(link)
    message, _ = orders.receive(link)
    assert message["kind"] == "ready", message
    return pid, str(message["certificate"])


def ready(zygote: EgressZygote) -> list[int]:
    """Return the processes that wait. One that was asked for is waited for."""
    children = Path(f"/proc/{zygote._pid}/task/{zygote._pid}/children")
    until = time.monotonic() + PATIENCE
    while not (found := [int(each) for each in children.read_text().split()]) and zygote._spare is not None:
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
