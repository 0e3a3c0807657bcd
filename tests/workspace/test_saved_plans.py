"""Plans on disk: whole or not there, few, and not for long."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_sandbox._fast.encoding import sha256
from agent_sandbox.errors import Busy, PolicyError, WorkspaceError
from agent_sandbox.workspace import saved_plans as module
from agent_sandbox.workspace.kept_places import KEPT_SECONDS
from agent_sandbox.workspace.saved_plans import MOST_PLANS, Plans
from agent_sandbox.workspace.store import Store


class Clock:
    """The machine's clock, which the files on disk are dated by, moved on."""

    def __init__(self) -> None:
        self.later = 0.0

    def __call__(self) -> float:
        import time

        return time.time() + self.later


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def plans(tmp_path: Path, clock: Clock) -> Plans:
    return Plans(Store.open(str(tmp_path / "state"), clock=clock))


def digests(plans: Plans) -> list[str]:
    return [digest for digest, _ in plans.all()]


def keep(plans: Plans, text: str) -> str:
    with plans.making("/project") as state:
        state.prepare()
        Path(state.layers, "file").write_text(text)
        plans.keep(state, text)
    return sha256(text.encode()).hexdigest()


def test_what_was_kept_is_found_by_its_beginning_and_what_was_not_is_gone(plans: Plans, tmp_path: Path) -> None:
    assert plans.all() == ()
    digest = keep(plans, "one")
    with plans.making("/project") as state:
        pass
    assert plans.all() == ((digest, "one"),) and not Path(state.path).exists()
    with plans.opened(digest[:6].upper()) as kept:
        assert (kept.text, kept.digest) == ("one", digest) and Path(kept.state.layers, "file").read_text() == "one"
        with pytest.raises(Busy), plans.opened(digest):
            pass
    plans.drop(kept)
    assert plans.all() == () and list((tmp_path / "state" / "trash").iterdir()) == []
    for prefix in (digest, "abc", "../x", ""):
        with pytest.raises(PolicyError), plans.opened(prefix):
            pass


def test_the_oldest_go_first_and_all_within_the_hour(plans: Plans, clock: Clock) -> None:
    kept = [keep(plans, f"plan {number}") for number in range(MOST_PLANS + 3)]
    assert digests(plans) == kept[:2:-1]
    clock.later = KEPT_SECONDS + 10
    assert digests(plans) == []


def test_all_together_they_take_no_more_than_they_may(plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 40 << 10)
    kept = [keep(plans, "x" * (12 << 10) + str(number)) for number in range(4)]
    assert len(digests(plans)) < 4 and digests(plans)[0] == kept[-1]
    with pytest.raises(WorkspaceError, match="too much"):
        keep(plans, "x" * (50 << 10))
    assert digests(plans)[0] == kept[-1]


def test_what_somebody_holds_is_not_swept_and_what_nobody_holds_is(plans: Plans, clock: Clock) -> None:
    digest = keep(plans, "old")
    clock.later = KEPT_SECONDS - 60
    with plans.opened(digest) as kept:
        clock.later = KEPT_SECONDS + 60
        with plans.making("/project"):
            assert Path(kept.state.path).exists()
    with plans.making("/project"):
        assert not Path(kept.state.path).exists()


def test_begun_it_is_good_for_nothing_unless_nothing_came_of_it(plans: Plans) -> None:
    digest = keep(plans, "one")
    with plans.opened(digest) as kept:
        kept.begin()
        kept.recall()
    with plans.opened(digest) as kept:
        kept.begin()
    with pytest.raises(PolicyError, match="there is no plan"), plans.opened(digest):
        pass


def test_a_text_that_is_not_what_its_digest_says_is_refused(plans: Plans) -> None:
    digest = keep(plans, "one")
    with plans.opened(digest) as kept:
        Path(kept.state.path, f"plan-{digest}").write_text("two")
    with pytest.raises(PolicyError, match="changed since"), plans.opened(digest):
        pass
