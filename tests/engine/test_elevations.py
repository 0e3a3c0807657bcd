"""An elevation is never longer than it was granted, whatever happens to clocks and processes, and its end is on record."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from threading import Thread

import pytest

from agent_sandbox._fast.encoding import Seal
from agent_sandbox.engine.elevations import LONGEST_SECONDS, Elevations
from agent_sandbox.errors import LedgerUnavailable, PolicyError
from agent_sandbox.ledger.event import Entry, Event, Noted
from agent_sandbox.ledger.writer import Ledger
from agent_sandbox.policy.approval_rules import Word
from agent_sandbox.policy.elevation import Elevation
from tests.ledger.samples import read

ME = Word(1000)
CURL = Elevation(programs=("curl",), limits=(("memory_bytes", 1 << 30),), paths=("/home/u/.ssh",))


class Machine:
    """With a clock that can be set, and the time it has been up, which cannot."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.clock, self.up, self.boot = 1_000.0, 50.0, "first"
        self.ledger = Ledger(top / "ledger", clock=lambda: self.clock)
        self.all = self.another()

    def another(self) -> Elevations:
        times = {"clock": lambda: self.clock, "since_boot": lambda: self.up}
        return Elevations(str(self.top / "elevations"), Seal(b"k" * 32), self.ledger, boot=lambda: self.boot, **times)

    def passes(self, seconds: float) -> None:
        self.clock += seconds
        self.up += seconds

    def noted(self) -> list[tuple[str, object]]:
        events = [entry.event for entry in read(self.ledger.path)]
        return [(event.what, event.facts.get("ended")) for event in events if isinstance(event, Noted)]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_it_holds_for_its_time_and_its_end_is_recorded_with_the_true_time(machine: Machine) -> None:
    name = machine.all.begin("box", CURL, seconds=60, by="alice", word=ME)
    machine.passes(59)
    (raised,) = machine.all.standing()
    assert (raised.name, raised.sandbox, raised.what, raised.by, raised.left) == (name, "box", CURL, "alice", 1.0)
    machine.passes(10_000)  # nobody was there
    assert machine.another().standing() == []
    assert machine.noted() == [("elevation.began", None), ("elevation.ended", 1_060.0)]
    assert machine.another().standing() == [] and len(machine.noted()) == 2, "once"


def test_a_clock_that_is_set_back_gives_nothing(machine: Machine) -> None:
    machine.all.begin("box", CURL, seconds=60, by="alice", word=ME)
    machine.passes(59)
    machine.clock -= 10_000
    (raised,) = machine.all.standing()
    assert raised.left == 1.0
    machine.up += 1
    assert machine.all.standing() == []


def test_a_clock_that_is_set_forward_ends_it(machine: Machine) -> None:
    machine.all.begin("box", CURL, seconds=60, by="alice", word=ME)
    machine.clock += 61
    assert machine.all.standing() == []


@pytest.mark.parametrize("up", [1.0, 51.0, 10_000.0])
def test_a_machine_that_was_started_anew_has_none_left(machine: Machine, up: float) -> None:
    machine.all.begin("box", CURL, seconds=60, by="alice", word=ME)
    machine.boot, machine.up = "second", up
    assert machine.all.standing() == []
    assert machine.noted()[-1][0] == "elevation.ended"


def test_time_since_the_start_that_runs_backwards_ends_it(machine: Machine) -> None:
    machine.all.begin("box", CURL, seconds=60, by="alice", word=ME)
    machine.up -= 1
    assert machine.all.standing() == []


def test_it_can_be_taken_back(machine: Machine) -> None:
    name = machine.all.begin("box", CURL, seconds=60, by="alice", word=ME)
    machine.passes(5)
    machine.all.end(name, by="bob")
    assert machine.all.standing() == [] and machine.noted()[-1] == ("elevation.ended", 1_005.0)
    for wrong in (name, "../ledger", ""):
        with pytest.raises(PolicyError, match="no elevation"):
            machine.all.end(wrong, by="bob")


def test_what_was_not_sealed_or_was_changed_or_renamed_is_none(machine: Machine) -> None:
    name = machine.all.begin("box", CURL, seconds=60, by="alice", word=ME)
    file = machine.top / "elevations" / name
    content = file.read_bytes()
    for at in range(0, len(content), 7):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert machine.all.standing() == []
    file.write_bytes(content)
    assert len(machine.all.standing()) == 1, "as it was, it holds"
    os.rename(file, file.with_name("0" * 32))
    assert machine.all.standing() == []


def test_nothing_and_for_ever_cannot_be_lifted(machine: Machine) -> None:
    for what, seconds in ((Elevation(), 60.0), (CURL, 0.0), (CURL, -1.0), (CURL, LONGEST_SECONDS + 1), (CURL, float("nan"))):
        with pytest.raises(PolicyError):
            machine.all.begin("box", what, seconds=seconds, by="alice", word=ME)
    assert machine.all.standing() == []


def test_what_cannot_be_recorded_does_not_begin(machine: Machine) -> None:
    class Full:
        def record(self, event: Event, *, lasting: bool = False) -> Entry:
            raise LedgerUnavailable("full")

        def unended(self, action_digest: str) -> int | None:
            return None

    broken = Elevations(str(machine.top / "elevations"), Seal(b"k" * 32), Full(), clock=lambda: 0.0, since_boot=lambda: 0.0, boot=str)
    with pytest.raises(LedgerUnavailable):
        broken.begin("box", CURL, seconds=60, by="alice", word=ME)
    assert machine.all.standing() == []


def test_several_who_come_at_once_record_the_end_once(machine: Machine) -> None:
    machine.all.begin("box", CURL, seconds=60, by="alice", word=ME)
    machine.passes(61)
    threads = [Thread(target=machine.another().sweep) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [what for what, _ in machine.noted()] == ["elevation.began", "elevation.ended"]


def test_who_is_killed_while_granting_leaves_a_record_or_less_and_never_a_longer_time(machine: Machine) -> None:
    """At every system call that changes something: killed there, what stands is the whole elevation with its record, or none."""
    for cut in range(1, 40):
        place = machine.top / str(cut)
        place.mkdir()
        inside = Machine(place)
        pid = os.fork()
        if pid == 0:
            _die_at(cut)
            inside.all.begin("box", CURL, seconds=60, by="alice", word=ME)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        standing = inside.another().standing()
        assert len(standing) <= 1 and all(each.left <= 60 for each in standing)
        began = [what for what, _ in inside.noted()] if inside.ledger.path and os.path.exists(inside.ledger.path) else []
        assert not standing or began == ["elevation.began"], f"cut {cut}"
        if os.waitstatus_to_exitcode(status) == 0:
            return
    pytest.fail("it never came to its end")


def _die_at(number: int) -> None:
    """Kill this process at the given call of what changes a disk."""
    left = [number]

    def counted(function: object) -> object:
        def call(*args: object, **kwargs: object) -> object:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)  # type: ignore[operator]

        return call

    for name in ("open", "write", "fsync", "link", "mkdir", "unlink", "rename"):
        setattr(os, name, counted(getattr(os, name)))
