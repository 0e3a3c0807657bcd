"""Mask layers that are made for one run and given to the next: used only if they fit, and never needed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_sandbox.kernel import mount_steps, namespaces
from agent_sandbox.kernel.mask_layers import MAKE, OUTDATED, REFUSED, MaskLayers
from agent_sandbox.kernel.mount_plan import MountPlan, Overlay, PathMask, SkeletonRoot, ThrowAway, quote_target
from agent_sandbox.kernel.mount_tools import Site
from tests.kernel.children import in_child

Seen = tuple[list[str], list[str], str]


@pytest.fixture
def lower(tmp_path: Path) -> Path:
    lower = tmp_path / "lower"
    (lower / "dir").mkdir(parents=True)
    for name in ("key", "shown", "dir/key"):
        (lower / name).write_text("CANARY")
    return lower


def _plan(lower: Path) -> MountPlan:
    masks = (PathMask("key"), PathMask("missing/key"), PathMask("dir", keep=True))
    return MountPlan(ThrowAway(1 << 20), (SkeletonRoot(), Overlay(str(lower), "/seen", quote_target("/seen"), masks)))


def _see(plan: MountPlan, masks: MaskLayers) -> Seen:
    """Carry out the plan. Return the layers made, what the view shows, and what the supervisor is told of given layers."""
    namespaces.enter_private_mounts()
    mount_steps.perform(plan, Site(None, 0, userxattr=os.geteuid() != 0, masks=masks))
    shown = [os.path.join(directory, name) for directory, _, names in os.walk("r/seen") for name in names]
    return os.listdir("m"), sorted(path.removeprefix("r/seen/") for path in shown), masks.answer


def _twice(lower: Path, meanwhile: str = "", *, bad: bool = False) -> Seen:
    """What the second of two runs sees, which is given the layers of the first. With `bad`, something that is no layer."""
    plan = _plan(lower)

    def act() -> Seen:
        if os.geteuid() != 0:
            namespaces.enter_own_user_namespace()
        first = MaskLayers.asked(MAKE, ())
        assert _see(plan, first) == (["1"], ["shown"], "")
        given = first.hand_over()
        assert given is not None
        if meanwhile:
            (lower / meanwhile).mkdir()
            (lower / meanwhile / "other").write_text("x")
        if bad:
            os.close(given)
            given = os.open("/dev/null", os.O_PATH)
        os.chdir("/")
        return _see(plan, MaskLayers.asked(first.made, [given]))

    return in_child(act)


def test_layers_that_fit_are_used_and_none_are_made(lower: Path) -> None:
    made, shown, answer = _twice(lower)
    assert shown == ["shown"]
    if answer == REFUSED:
        pytest.skip("this kernel takes no detached mount as a layer (Linux 6.15)")
    assert (made, answer) == ([], "")


def test_a_layer_is_made_anew_if_the_machine_has_changed(lower: Path) -> None:
    made, shown, answer = _twice(lower, "missing")
    assert shown == ["missing/other", "shown"]
    assert made == ["1"]
    assert answer in (OUTDATED, REFUSED)


def test_a_layer_that_the_kernel_refuses_is_made_anew_and_nothing_is_uncovered(lower: Path) -> None:
    made, shown, answer = _twice(lower, bad=True)
    assert shown == ["shown"]
    assert made == ["1"]
    assert answer == REFUSED


def test_nothing_is_handed_over_unless_it_was_asked_for() -> None:
    masks = MaskLayers.asked(None, ())
    assert masks.hand_over() is None
    assert masks.report() is None
