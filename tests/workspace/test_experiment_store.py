"""Places of experiments: made, kept, found again, and swept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_sandbox.errors import PolicyError
from agent_sandbox.workspace.experiment_store import MOST_KEPT, ExperimentStore
from agent_sandbox.workspace.kept_places import KEPT_SECONDS
from agent_sandbox.workspace.store import Store


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Store:
    return Store.open(str(tmp_path / "state"), clock=clock)


def places(store: Store) -> list[str]:
    return sorted(name for name in os.listdir(os.path.join(store.path, "experiments")) if not name.startswith("."))


def keep(store: Store, clock: Clock) -> str:
    with ExperimentStore(store).making("/project") as place:
        place.keep("text")
        clock.now = os.stat(os.path.join(place.path, next(n for n in os.listdir(place.path) if n.startswith("result-")))).st_mtime
    return place.id


def test_a_place_ends_with_its_block_unless_it_is_kept(store: Store, clock: Clock) -> None:
    with ExperimentStore(store).making("/project") as place:
        os.makedirs(os.path.join(place.frozen, "deep"))
        assert places(store) == [place.id]
    assert places(store) == [] == os.listdir(os.path.join(store.path, "trash"))
    kept = keep(store, clock)
    assert [name for name, _ in ExperimentStore(store).kept()] == [kept]
    with ExperimentStore(store).opened(kept[:4]) as (found, text):
        assert (found.id, text) == (kept, "text")


def test_what_a_killed_process_left_is_swept_and_what_is_held_is_not(store: Store) -> None:
    left = os.path.join(store.path, "experiments", "0123456789ab")
    os.makedirs(os.path.join(left, "frozen"))
    with ExperimentStore(store).making("/project") as place:
        assert places(store) == [place.id]
        ExperimentStore(store).sweep()
        assert places(store) == [place.id]


def test_kept_experiments_are_few_and_end(store: Store, clock: Clock) -> None:
    every = [keep(store, clock) for _ in range(MOST_KEPT + 2)]
    assert len(places(store)) == MOST_KEPT and every[-1] in places(store)
    clock.now += KEPT_SECONDS + 1
    assert ExperimentStore(store).kept() == () and places(store) == []


def test_an_unknown_or_altered_experiment_is_refused(store: Store, clock: Clock) -> None:
    kept = keep(store, clock)
    for prefix in ("ffff", "", "../x"):
        with pytest.raises(PolicyError, match="there is no experiment"), ExperimentStore(store).opened(prefix):
            pass
    place = os.path.join(store.path, "experiments", kept)
    result = next(name for name in os.listdir(place) if name.startswith("result-"))
    Path(place, result).write_text("other")
    os.utime(Path(place, result), (clock.now, clock.now))
    with pytest.raises(PolicyError, match="has been changed"), ExperimentStore(store).opened(kept):
        pass
