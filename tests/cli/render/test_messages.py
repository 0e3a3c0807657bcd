"""Amounts as people read them."""

from __future__ import annotations

from agent_sandbox.cli.render.messages import counted, human_size


def test_amounts_are_written_as_people_read_them() -> None:
    assert [human_size(amount) for amount in (0, 1023, 1024, 1536, 5 << 30, 3 << 50)] == [
        *("0 bytes", "1023 bytes", "1 KiB", "1.5 KiB", "5 GiB", "3072 TiB")
    ]
    assert (counted(1, "change"), counted(1200, "entry", "entries")) == ("1 change", "1,200 entries")
