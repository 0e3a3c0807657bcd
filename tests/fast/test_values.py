"""Our classes of values behave as the real ones do: each claim is tried on both."""

from __future__ import annotations

import copy
import dataclasses
import enum
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from typing import Any, ClassVar

import pytest

from agent_sandbox._fast import values


def _make(dataclass: Callable[..., Any], field: Callable[..., Any]) -> Any:
    @dataclass(frozen=True)
    class Point:
        """A point."""

        kind: ClassVar[str] = "point"
        x: int
        y: int = 2
        tags: list[str] = field(default_factory=list, compare=False)
        secret: str = field(default="s", repr=False)
        half: float = field(init=False, repr=False)

        def __post_init__(self) -> None:
            if self.x < 0:
                raise ValueError("negative")
            object.__setattr__(self, "half", self.x / 2)

        @cached_property
        def far(self) -> int:
            return self.x * 1000

    @dataclass(frozen=True)
    class Named(Point):
        name: str = ""

    return Point, Named


OURS, REAL = _make(values.dataclass, values.field), _make(dataclasses.dataclass, dataclasses.field)


@pytest.fixture(params=[OURS, REAL], ids=["ours", "the real one"])
def both(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def point(both: Any) -> Any:
    return both[0]


def test_values_are_compared_hashed_and_shown_by_their_fields(point: Any) -> None:
    assert point(1) == point(x=1, y=2) != point(1, 3)
    assert point(1, tags=["a"]) == point(1), "a field that is not compared does not count"
    assert len({point(1), point(1), point(2)}) == 2
    assert repr(point(1)).endswith("Point(x=1, y=2, tags=[])")
    assert point(1) != (1, 2)


def test_values_cannot_be_changed_but_replaced(point: Any) -> None:
    made = point(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.x = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        del made.x
    assert dataclasses.replace(made, y=5) == point(1, 5)
    assert (made.far, made.half) == (1000, 0.5)


@pytest.mark.parametrize(
    ("args", "given"),
    [((), {}), ((1, 2, [], "s", 5), {}), ((1,), {"x": 1}), ((1,), {"z": 1}), ((1,), {"half": 1.0})],
    ids=["missing", "many", "twice", "unknown", "set by itself"],
)
def test_what_does_not_fit_is_a_type_error(point: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        point(*args, **given)


def test_a_value_checks_itself_when_it_is_made_and_when_it_is_replaced(point: Any) -> None:
    with pytest.raises(ValueError, match="negative"):
        point(-1)
    with pytest.raises(ValueError, match="negative"):
        dataclasses.replace(point(1), x=-1)


def test_a_default_is_made_anew_for_each_value(point: Any) -> None:
    assert point(1).tags is not point(1).tags


def test_fields_are_inherited_listed_and_matched(both: Any) -> None:
    point, inheriting = both
    named = inheriting(1, name="n")
    assert [each.name for each in dataclasses.fields(named)] == ["x", "y", "tags", "secret", "half", "name"]
    assert dataclasses.asdict(named) == {"x": 1, "y": 2, "tags": [], "secret": "s", "half": 0.5, "name": "n"}
    assert point.__match_args__ == ("x", "y", "tags", "secret")
    assert point(1) != inheriting(1)


@pytest.mark.parametrize("dataclass", [values.dataclass, dataclasses.dataclass], ids=["ours", "the real one"])
def test_a_default_that_all_would_share_is_refused(dataclass: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="default_factory"):

        @dataclass(frozen=True)
        class Wrong:
            shared: list[int] = []  # noqa: RUF012


def test_a_field_may_be_left_out_of_the_hash(both: Any) -> None:
    dataclass, field = (values.dataclass, values.field) if both is OURS else (dataclasses.dataclass, dataclasses.field)

    @dataclass(frozen=True)
    class Node:
        name: str
        attributes: dict[str, bytes] = field(default_factory=dict, hash=False)

    assert hash(Node("a", {"x": b""})) == hash(Node("a"))
    assert Node("a", {"x": b""}) != Node("a")


@pytest.mark.parametrize("dataclass", [values.dataclass, dataclasses.dataclass], ids=["ours", "the real one"])
def test_what_is_not_frozen_can_be_changed_and_has_no_hash(dataclass: Callable[..., Any]) -> None:
    @dataclass
    class Changing:
        x: int = 1

    made = Changing()
    made.x = 2
    assert made == Changing(2)
    with pytest.raises(TypeError, match="unhashable"):
        hash(made)


def _make_with_slots(dataclass: Callable[..., Any], field: Callable[..., Any], frozen: bool) -> Any:
    options: dict[str, Any] = {"frozen": frozen, "slots": True}

    @dataclass(**options)
    class Slotted:
        """A point."""

        kind: ClassVar[str] = "point"
        x: int
        y: int = 2
        tags: list[str] = field(default_factory=list, compare=False)
        fixed: int = field(default=7, init=False)
        own: list[int] = field(default_factory=list, init=False, repr=False, compare=False)
        half: float = field(init=False, repr=False)

        def __post_init__(self) -> None:
            if self.x < 0:
                raise ValueError("negative")
            object.__setattr__(self, "half", self.x / 2)

        @property
        def far(self) -> int:
            return self.x * 1000

    return Slotted


SLOTTED = {
    f"{name}, {'frozen' if frozen else 'changing'}": _make_with_slots(dataclass, field, frozen)
    for name, dataclass, field in (("ours", values.dataclass, values.field), ("the real one", dataclasses.dataclass, dataclasses.field))
    for frozen in (True, False)
}


@pytest.mark.parametrize("slotted", SLOTTED.values(), ids=SLOTTED)
def test_values_with_slots_are_the_same_without_a_dictionary(slotted: Any) -> None:
    made = slotted(1)
    assert (made.x, made.y, made.tags, made.fixed, made.own, made.half, made.far, made.kind) == (1, 2, [], 7, [], 0.5, 1000, "point")
    assert not hasattr(made, "__dict__") and slotted.__slots__ == ("x", "y", "tags", "fixed", "own", "half")
    assert slotted.__doc__ == "A point." and slotted.__qualname__.endswith("Slotted")
    assert repr(slotted(x=1, tags=["a"])).endswith("Slotted(x=1, y=2, tags=['a'], fixed=7)")
    assert slotted(1, tags=["a"]) == made != slotted(1, 3) and slotted(1) != (1, 2)
    assert slotted(1).tags is not made.tags and slotted(1).own is not made.own
    assert dataclasses.replace(made, y=5) == slotted(1, 5)
    assert [each.name for each in dataclasses.fields(made)] == ["x", "y", "tags", "fixed", "own", "half"]
    assert slotted.__match_args__ == ("x", "y", "tags")
    match made:
        case slotted(x, y):
            assert (x, y) == (1, 2)
        case _:
            pytest.fail("it is matched by position")
    assert copy.copy(made) == copy.deepcopy(made) == made
    for args, given in (((), {}), ((1, 2, [], 7), {}), ((1,), {"x": 1}), ((1,), {"z": 1}), ((1,), {"fixed": 1})):
        with pytest.raises(TypeError):
            slotted(*args, **given)
    with pytest.raises(ValueError, match="negative"):
        dataclasses.replace(made, x=-1)


@pytest.mark.parametrize("slotted", SLOTTED.values(), ids=SLOTTED)
def test_values_with_slots_are_changed_or_hashed_as_they_say(slotted: Any) -> None:
    made, frozen = slotted(1), slotted in (SLOTTED["ours, frozen"], SLOTTED["the real one, frozen"])
    with pytest.raises(dataclasses.FrozenInstanceError) if frozen else nullcontext():
        made.y = 3
    assert made.y == (2 if frozen else 3)
    with nullcontext() if frozen else pytest.raises(TypeError, match="unhashable"):
        assert len({slotted(1, own) for own in (1, 1, 2)}) == 2
    with pytest.raises((AttributeError, TypeError)):
        made.unknown = 1


def test_our_own_functions_replace_a_value_with_slots() -> None:
    for slotted in (SLOTTED["ours, frozen"], SLOTTED["ours, changing"]):
        assert values.replace(slotted(1), y=5) == slotted(1, 5)
        assert values.is_dataclass(slotted(1)) and [each.name for each in values.fields(slotted)][:2] == ["x", "y"]


def test_our_own_functions_do_what_the_real_ones_do() -> None:
    made = OURS[1](1, name="n")
    assert values.replace(made, y=5) == dataclasses.replace(made, y=5)
    assert [each.name for each in values.fields(made)] == [each.name for each in dataclasses.fields(made)]
    assert [values.is_dataclass(each) for each in (made, OURS[1], 1)] == [True, True, False]
    assert dataclasses.is_dataclass(OURS[1])
    with pytest.raises(ValueError, match="negative"):
        values.replace(made, x=-1)
    with pytest.raises(TypeError):
        values.replace(made, z=1)


def test_where_no_value_can_come_nothing_goes_on() -> None:
    with pytest.raises(AssertionError, match="'surprise'"):
        values.assert_never("surprise")  # type: ignore[arg-type]


class Ours(values.Enum):
    """A closed set."""

    RED = "red"
    GREEN = "green"
    CRIMSON = "red"

    @property
    def shout(self) -> str:
        return f"{self.value}!"


class Real(enum.Enum):
    """A closed set."""

    RED = "red"
    GREEN = "green"
    CRIMSON = "red"

    @property
    def shout(self) -> str:
        return f"{self.value}!"


@pytest.fixture(params=[Ours, Real], ids=["ours", "the real one"])
def colour(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_members_are_listed_found_and_shown(colour: Any) -> None:
    assert [member.name for member in colour] == ["RED", "GREEN"]
    assert (len(colour), list(colour.__members__)) == (2, ["RED", "GREEN", "CRIMSON"])
    assert colour("red") is colour["RED"] is colour.RED is colour.CRIMSON is colour(colour.RED)
    assert (colour.RED.value, colour.RED.shout) == ("red", "red!")
    assert str(colour.RED) == f"{colour.__name__}.RED"
    assert repr(colour.RED) == f"<{colour.__name__}.RED: 'red'>"
    assert colour.RED in colour
    assert isinstance(colour.RED, colour)


def test_members_are_equal_to_themselves_only_and_stay_one(colour: Any) -> None:
    assert colour.RED == colour.RED != colour.GREEN
    assert colour.RED != "red"
    assert len({colour.RED, colour.GREEN, colour.CRIMSON}) == 2
    for again in (copy.copy(colour.RED), copy.deepcopy(colour.RED), pickle.loads(pickle.dumps(colour.RED))):
        assert again is colour.RED


def test_a_set_of_members_is_closed(colour: Any) -> None:
    unknown: Any
    for unknown in ("blue", None, []):
        with pytest.raises(ValueError, match="is not a valid"):
            colour(unknown)
    with pytest.raises(KeyError):
        colour["BLUE"]
    with pytest.raises(AttributeError):
        colour.RED = "blue"


def test_members_of_both_kinds_are_recognised() -> None:
    assert [values.is_member(each) for each in (Ours.RED, Real.RED, "red", Ours, None)] == [True, True, False, False, False]
