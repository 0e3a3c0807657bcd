"""The shelf of mask layers: what is asked of a run, what is given to the next, and that no descriptor is left or given twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_sandbox.kernel import mask_layers
from agent_sandbox.kernel.mask_layers import Findings
from agent_sandbox.kernel.mount_plan import MountPlan, Overlay, PathMask, ThrowAway
from agent_sandbox.runtime.process import mask_shelf
from agent_sandbox.runtime.process.mask_shelf import MaskShelf

FINDINGS: dict[int, Findings] = {0: {"": (0o40755, 0, 0), "home": None}}


def plan(name: str, **more: object) -> MountPlan:
    masks = tuple(PathMask(f"{number}") for number in range(mask_shelf._FEW_MASKS))
    return MountPlan(ThrowAway(1 << 20), (Overlay(f"/{name}", f"/{name}", name, **{"masks": masks, **more}),))  # type: ignore[arg-type]


def descriptor(tmp_path: Path) -> int:
    return os.open(tmp_path, os.O_PATH)


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def asked(shelf: MaskShelf, of: MountPlan) -> tuple[object, int]:
    with shelf.offer(of) as (request, given):
        assert all(map(is_open, given))
        return request, len(given)


def test_the_second_run_of_a_plan_is_asked_for_its_layers_and_the_third_is_given_them(tmp_path: Path) -> None:
    shelf, fd = MaskShelf(lasting=True), descriptor(tmp_path)
    assert asked(shelf, plan("a")) == (None, 0)
    assert asked(shelf, plan("a")) == (mask_layers.MAKE, 0)
    shelf.keep(plan("a"), FINDINGS, fd)
    assert asked(shelf, plan("a")) == (FINDINGS, 1)
    assert asked(shelf, plan("b")) == (None, 0), "another plan has other layers"
    shelf.close()
    assert not is_open(fd)


def test_the_shelf_keeps_its_own_descriptor_while_others_use_theirs(tmp_path: Path) -> None:
    shelf, fd = MaskShelf(lasting=True), descriptor(tmp_path)
    shelf.keep(plan("a"), FINDINGS, fd)
    with shelf.offer(plan("a")) as (_, (given,)):
        shelf.drop(plan("a"), mask_layers.OUTDATED)
        assert not is_open(fd)
        assert is_open(given), "it is about to be sent"
    assert not is_open(given)


def test_outdated_layers_are_made_anew_by_the_next_run(tmp_path: Path) -> None:
    shelf = MaskShelf(lasting=True)
    shelf.keep(plan("a"), FINDINGS, descriptor(tmp_path))
    shelf.drop(plan("a"), mask_layers.OUTDATED)
    assert asked(shelf, plan("a")) == (mask_layers.MAKE, 0)
    shelf.close()


def test_where_the_kernel_refuses_shared_layers_none_are_asked_for_again(tmp_path: Path) -> None:
    shelf = MaskShelf(lasting=True)
    shelf.keep(plan("a"), FINDINGS, descriptor(tmp_path))
    shelf.drop(plan("a"), mask_layers.REFUSED)
    for each in (plan("a"), plan("b")):
        assert [asked(shelf, each) for _ in range(3)] == [(None, 0)] * 3


def test_only_the_plans_used_last_are_kept(tmp_path: Path) -> None:
    shelf = MaskShelf(lasting=True)
    fds = {f"{number}": descriptor(tmp_path) for number in range(mask_shelf._MOST_PLANS + 1)}
    for name, fd in fds.items():
        shelf.keep(plan(name), FINDINGS, fd)
        asked(shelf, plan("0"))  # used again and again
    assert [name for name, fd in fds.items() if not is_open(fd)] == ["1"]
    shelf.close()
    assert not any(map(is_open, fds.values()))


def test_a_late_descriptor_is_closed_if_the_shelf_is(tmp_path: Path) -> None:
    shelf, fd = MaskShelf(lasting=True), descriptor(tmp_path)
    shelf.close()
    shelf.keep(plan("a"), FINDINGS, fd)
    assert not is_open(fd)


@pytest.mark.parametrize("links", ["links_over", "links_instead"])
def test_layers_with_links_of_one_run_are_not_shared(links: str) -> None:
    shelf = MaskShelf(lasting=True)
    special = plan("a", **{links: (("etc/x", "/run/x"),)})
    assert [asked(shelf, special) for _ in range(3)] == [(None, 0)] * 3


def test_layers_that_hide_little_are_not_shared() -> None:
    shelf = MaskShelf(lasting=True)
    assert [asked(shelf, plan("a", masks=(PathMask("x"),))) for _ in range(3)] == [(None, 0)] * 3


def test_a_keeper_of_a_single_run_is_asked_for_nothing() -> None:
    shelf = MaskShelf(lasting=False)
    assert [asked(shelf, plan("a")) for _ in range(3)] == [(None, 0)] * 3


def test_both_sides_use_the_same_words() -> None:
    assert (mask_shelf._MAKE, mask_shelf._REFUSED) == (mask_layers.MAKE, mask_layers.REFUSED)
