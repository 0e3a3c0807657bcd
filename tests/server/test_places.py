"""The places of holders: the kernel's lock says who lives, and what the dead left is removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_sandbox.errors import SandboxError
from agent_sandbox.server.places import MOST_HOLDERS, Places
from agent_sandbox.workspace.store import Store


def test_a_place_lives_as_long_as_its_lock_is_held(tmp_path: Path) -> None:
    places = Places(Store.open(str(tmp_path)))
    assert places.living() == ()
    (first, lock), (second, other) = places.make(), places.make()
    assert {place.id for place in places.living()} == {first.id, second.id}
    assert first.id[0].isalpha() and oct(os.stat(first.path).st_mode & 0o777) == "0o700"
    os.close(lock)
    assert places.living() == (second,) and not os.path.exists(first.path)
    os.close(other)
    assert places.living() == () and os.listdir(tmp_path / "timelines") == [".lock"]


def test_there_is_a_limit_and_the_dead_do_not_count(tmp_path: Path) -> None:
    places = Places(Store.open(str(tmp_path)))
    made = [places.make() for _ in range(MOST_HOLDERS)]
    with pytest.raises(SandboxError, match=f"{MOST_HOLDERS} sessions with a timeline are held already"):
        places.make()
    os.close(made.pop()[1])
    made.append(places.make())
    for _, lock in made:
        os.close(lock)


def test_a_socket_is_reached_however_long_its_path_is(tmp_path: Path) -> None:
    state = tmp_path.joinpath(*["long-name-of-a-directory"] * 6)
    place, lock = Places(Store.open(str(state))).make()
    with place.listen() as listener, place.connect() as link:
        assert oct(os.stat(os.path.join(place.path, "socket")).st_mode & 0o777) == "0o600"
        listener.accept()[0].close()
        assert link.recv(1) == b""
    os.close(lock)
