"""Sizes, times and counts as people write them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agent_sandbox.cli.render.quantities import count, counted, human_size, seconds, size
from agent_sandbox.errors import PolicyError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1000", 1000),
        ("512M", 512 << 20),
        ("2g", 2 << 30),
        ("1GiB", 1 << 30),
        ("64kb", 64 << 10),
        ("1.5K", 1536),
        ("10b", 10),
        ("none", None),
    ],
)
def test_sizes(text: str, expected: int | None) -> None:
    assert size("--memory", text) == expected


@pytest.mark.parametrize(("text", "expected"), [("30", 30), ("1.5", 1.5), ("2s", 2), ("5m", 300), ("1h", 3600), ("none", None)])
def test_times(text: str, expected: float | None) -> None:
    assert seconds("--timeout", text) == expected


@pytest.mark.parametrize("text", ["", " ", "-1", "0", "nan", "inf", "1e3", "M", "1X", "1MM", "٣", "1_000", "0x10", "--", "9" * 30 + "T"])
@pytest.mark.parametrize("read", [size, seconds, count])
def test_what_is_no_quantity_is_refused_with_an_example(read: Callable[[str, str], object], text: str) -> None:
    with pytest.raises(PolicyError) as refused:
        read("--option", text)
    assert "--option" in refused.value.message
    assert refused.value.hint


def test_amounts_are_written_as_people_read_them() -> None:
    assert [human_size(amount) for amount in (0, 1023, 1024, 1536, 5 << 30, 3 << 50)] == [
        *("0 bytes", "1023 bytes", "1 KiB", "1.5 KiB", "5 GiB", "3072 TiB")
    ]
    assert (counted(1, "change"), counted(1200, "entry", "entries")) == ("1 change", "1,200 entries")
