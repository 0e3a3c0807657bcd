"""A process that is killed at any moment leaves no action without its record."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from random import Random

import pytest

from agent_sandbox.engine.gate import Gate
from agent_sandbox.ledger.chain import entries
from agent_sandbox.ledger.event import Intent
from agent_sandbox.ledger.verify import evidence, examine
from agent_sandbox.ledger.writer import Ledger
from agent_sandbox.policy.action import RunCommand
from agent_sandbox.policy.model import locked
from tests.ledger.samples import exit_code, in_child


def act_for_ever(ledger: Ledger, done: int, start: int) -> None:
    """Action after action through the gate; what is done is in `done` the moment it is done."""
    gate = Gate(locked(processes=True), ledger, clock=lambda: 1.5)
    for number in range(start, start + 1_000_000):
        gate.perform(RunCommand.of(["echo", str(number)]), lambda _, number=number: os.write(done, f"{number}\n".encode()))  # type: ignore[misc]


def _kill_at_random_moments(tmp_path: Path, times: int, seed: int, writers: int) -> None:
    """Writers at once, each killed at a moment of its own, while the others go on; then the next ones."""
    random = Random(seed)
    ledger = Ledger(tmp_path / "ledger.jsonl", clock=lambda: 1.5, segment_bytes=40_000)  # small: some die while a file is closed
    said = b""
    for time in range(0, times, writers):
        children = list[tuple[int, int]]()
        for number in range(time, time + writers):
            reader, writer = os.pipe()
            children.append((reader, in_child(lambda writer=writer, number=number: act_for_ever(ledger, writer, number * 1_000_000))))  # type: ignore[misc]
            os.close(writer)
        for reader, child in children:
            wanted, heard = random.randrange(40), b""
            while heard.count(b"\n") < wanted:
                heard += os.read(reader, 4096)
            for _ in range(random.randrange(3_000)):  # somewhere within the next action, not always right behind a deed
                pass
            os.kill(child, signal.SIGKILL)
            assert exit_code(child) == -signal.SIGKILL
            while chunk := os.read(reader, 65536):
                heard += chunk
            os.close(reader)
            said += heard
    report = examine(ledger.path, evidence(ledger.keys))
    assert report.intact and report.complete, f"seed {seed}: {report}"
    recorded = {str(entry.event.action["argv"][1]) for entry in entries(ledger.path) if isinstance(entry.event, Intent)}  # type: ignore[index]
    done = said.decode().split()
    assert len(done) > times and set(done) <= recorded, f"seed {seed}: done and not recorded: {sorted({*done} - recorded)[:3]}"


@pytest.mark.parametrize("writers", [1, 4])
def test_kills_leave_no_action_without_its_record(tmp_path: Path, writers: int) -> None:
    _kill_at_random_moments(tmp_path, 16, seed=11, writers=writers)


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(10))
def test_a_thousand_kills_leave_no_action_without_its_record(tmp_path: Path, seed: int) -> None:
    _kill_at_random_moments(tmp_path, 100, seed=2000 + seed, writers=(1, 2, 4, 5, 10)[seed % 5])
