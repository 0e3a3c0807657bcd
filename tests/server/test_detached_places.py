"""What is known about detached sandboxes outlives them for a while; whether one more may run is decided before it starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_sandbox.errors import PolicyError, SandboxError
from agent_sandbox.server import admission
from agent_sandbox.server.admission import MachineRoom, most_detached, objection
from agent_sandbox.server.detached_places import KEPT_SECONDS, MOST_KEPT, DetachedPlaces, write_end, write_facts
from agent_sandbox.workspace.store import Store

ROOM = MachineRoom(8 << 30, 16 << 30, 1 << 40)


def test_one_runs_while_its_lock_is_held_then_it_is_lost_or_has_ended(tmp_path: Path) -> None:
    places = DetachedPlaces(Store.open(str(tmp_path)))
    assert places.records() == ()
    (first, lock), (second, other), (third, last) = places.make(), places.make(), places.make()
    for place, since in ((first, 2.0), (second, 1.0)):
        write_facts(place, {"since": since})
    assert [(each.name, each.running, each.lost) for each in places.records()] == [(second.id, True, False), (first.id, True, False)]
    write_end(second, {"exit": 3})
    for descriptor in (lock, other, last):
        os.close(descriptor)
    assert [(each.running, each.lost) for each in places.records()] == [(False, False), (False, True)]
    assert places.record(second.id).end == {"exit": 3} and places.record(second.id[:6]).name == second.id
    assert not os.path.exists(third.path), "one that never began leaves nothing"
    with pytest.raises(PolicyError, match="no detached sandbox"):
        places.record("t123")
    with pytest.raises(PolicyError, match=r"more than one|no detached"):
        places.record("d")
    assert places.forget_ended() == 2 and places.records() == ()


def test_those_that_ended_long_ago_are_removed_and_never_one_that_runs(tmp_path: Path) -> None:
    places = DetachedPlaces(Store.open(str(tmp_path)))
    old, lock = places.make()
    running, held = places.make()
    for place in (old, running):
        write_facts(place, {"since": 1.0})
        os.utime(place.path, (0, 0))
    os.close(lock)
    assert KEPT_SECONDS > 0 and [each.name for each in places.records()] == [running.id]
    for number in range(MOST_KEPT + 5):
        place, lock = places.make()
        write_facts(place, {"since": float(number)})
        os.close(lock)
    assert len(places.records()) == MOST_KEPT + 1
    os.close(held)


def test_no_more_are_admitted_than_there_may_be_and_than_there_is_room_for(tmp_path: Path) -> None:
    assert objection(ROOM, 63, 64) == ""
    assert "64 detached sandboxes run already" in objection(ROOM, 64, 64)
    assert "MiB of memory are left" in objection(MachineRoom(admission.SHORT_MEMORY - 1, 16 << 30, 1 << 40), 0, 64)
    assert "MiB are left on the disk" in objection(MachineRoom(8 << 30, 16 << 30, admission.SHORT_DISK - 1), 0, 64)
    assert [most_detached({admission.MOST: text}) for text in ("3", "0", "-1", "x", "")] == [3, 0, *[admission.MOST_DETACHED] * 3]
    places = DetachedPlaces(Store.open(str(tmp_path)), {admission.MOST: "1"})
    _, lock = places.make()
    with pytest.raises(SandboxError, match="not started: 1 detached sandbox runs already"):
        places.make()
    os.close(lock)
    os.close(places.make()[1])


def test_this_machine_has_memory_and_a_disk(tmp_path: Path) -> None:
    room = MachineRoom.look(str(tmp_path))
    assert 0 < room.memory <= room.total_memory and room.disk > 0
