"""Options as typed values, and sizes, times and counts as people write them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agent_sandbox.cli.options import (
    CommandOptions,
    PromoteOptions,
    ShowOptions,
    read_count,
    read_seconds,
    read_size,
)
from agent_sandbox.cli.parser import UsageError, parse
from agent_sandbox.cli.permission_options import ApproveOptions, GrantOptions
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
    assert read_size("--memory", text) == expected


@pytest.mark.parametrize(("text", "expected"), [("30", 30), ("1.5", 1.5), ("2s", 2), ("5m", 300), ("1h", 3600), ("none", None)])
def test_times(text: str, expected: float | None) -> None:
    assert read_seconds("--timeout", text) == expected


@pytest.mark.parametrize("text", ["", " ", "-1", "0", "nan", "inf", "1e3", "M", "1X", "1MM", "٣", "1_000", "0x10", "--", "9" * 30 + "T"])
@pytest.mark.parametrize("read", [read_size, read_seconds, read_count])
def test_what_is_no_quantity_is_refused_with_an_example(read: Callable[[str, str], object], text: str) -> None:
    with pytest.raises(PolicyError) as refused:
        read("--option", text)
    assert "--option" in refused.value.message
    assert refused.value.hint


def test_a_single_word_is_a_line_for_bash_and_several_are_a_program() -> None:
    assert CommandOptions.read(parse(["run", "make test"])).command == ("bash", "-c", "make test")
    assert CommandOptions.read(parse(["run", "--", "make"])).command == ("make",)
    assert CommandOptions.read(parse(["run", "make", "test"])).command == ("make", "test")


def test_sim_and_a_diff_of_a_command_are_runs_of_another_kind() -> None:
    sim, diff = CommandOptions.read(parse(["sim", "x"])), CommandOptions.read(parse(["diff", "--stat", "x"]))
    assert (sim.simulate, sim.throw_away, CommandOptions.read(parse(["run", "--simulate", "x"]))) == (True, False, sim)
    assert (diff.diff, diff.throw_away, diff.show.form) == (True, True, "stat")
    assert not CommandOptions.read(parse(["diff"])).diff


def test_limits_are_those_that_the_line_changes() -> None:
    read = CommandOptions.read(parse(["run", "--memory", "1G", "--timeout", "none", "x"]))
    assert read.policy.limits == (("wall_seconds", None), ("memory_bytes", 1 << 30))


def test_fuel_and_determinism_choose_webassembly() -> None:
    lines: tuple[list[str], ...] = ([], ["--fuel", "9"], ["--deterministic"], ["--runtime", "wasm"])
    read = [CommandOptions.read(parse(["run", *line, "x"])) for line in lines]
    assert [each.isolation for each in read] == ["process", "auto", "auto", "wasm"]
    assert [each.terminal for each in read] == [True, False, False, False]


def test_a_pager_is_for_people() -> None:
    lines: tuple[list[str], ...] = ([], ["--no-pager"], ["--json"], ["--patch"])
    assert [ShowOptions.read(parse(["diff", *line])).pager for line in lines] == [True, False, False, False]


def test_an_answer_without_a_look_needs_its_digest() -> None:
    assert ApproveOptions.read(parse(["approve"])).allow is None
    assert ApproveOptions.read(parse(["deny", "3f9a"])).allow is False
    assert ApproveOptions.read(parse(["approve", "a" * 64, "--yes"])).allow is True


@pytest.mark.parametrize(
    ("read", "line"),
    [
        (CommandOptions.read, ["run", "--seed", "1", "x"]),
        (CommandOptions.read, ["run", "--deterministic", "--record", "f", "x"]),
        (CommandOptions.read, ["run", "--simulate", "--diff", "x"]),
        (CommandOptions.read, ["diff", "--stat", "--patch"]),
        (CommandOptions.read, ["diff", "--raw"]),
        (PromoteOptions.read, ["promote", "--merge", "--force"]),
        (PromoteOptions.read, ["promote", "--resolve", "ours"]),
        (ApproveOptions.read, ["approve", "3f9a", "--yes"]),
        (ApproveOptions.read, ["approve", "--refuse"]),
        (GrantOptions.read, ["grant", "run x"]),
        (ApproveOptions.read, ["approve", "--timeout", "1m"]),
        (GrantOptions.read, ["grant", "--for", "1m"]),
        (GrantOptions.read, ["grant", "run x", "--memory", "1G", "--for", "1m"]),
    ],
)
def test_options_that_do_not_go_together_are_refused(read: Callable[..., object], line: list[str]) -> None:
    with pytest.raises(UsageError):
        read(parse(line))
