"""The frozen project in a mount plan."""

from __future__ import annotations

import pytest

from agent_sandbox.engine.experiment.frozen_base import with_frozen
from agent_sandbox.errors import PolicyError
from agent_sandbox.kernel.mount_plan import Copies, ExecutableFiles, MountPlan, Overlay, PathMask, Proc, Step, Tmpfs, quote_target

PROJECT, FROZEN = "/home/ada/app", "/state/frozen"


def plan(*steps: Step) -> MountPlan:
    return MountPlan(None, steps)  # type: ignore[arg-type]


def overlay(target: str, **fields: object) -> Overlay:
    return Overlay(target, target, quote_target(target), **fields)  # type: ignore[arg-type]


def test_an_overlay_of_the_copy_takes_the_place_of_the_project_with_all_that_is_hidden_there() -> None:
    masks = (
        PathMask("home/ada/.ssh"),
        PathMask("home/ada/app/.env"),
        PathMask("home/ada/app/secrets", keep=True),
        PathMask("home/ada/app2/.env"),
    )
    machine = overlay("/", masks=masks, files=("home/ada/app/bin/tool", "usr/x"), links_over=(("home/ada/app/ca.pem", "/run/ca"),))
    inner, code = overlay("/home/ada/app/mounted"), ExecutableFiles(("/usr/bin/make",))
    steps = with_frozen(plan(machine, Tmpfs("/tmp", 1), inner, code, Proc()), PROJECT, FROZEN).steps
    made = steps[2]
    assert steps == (machine, Tmpfs("/tmp", 1), made, inner, code, Proc()), "after what lies around it, before what lies in it"
    assert isinstance(made, Overlay) and (made.source, made.target, made.key) == (FROZEN, PROJECT, quote_target(PROJECT))
    assert made.masks == (PathMask(".env"), PathMask("secrets", keep=True)) and made.files == ("bin/tool",)
    assert made.links_over == (("ca.pem", "/run/ca"),) and made.writable


def test_trees_that_are_not_frozen_are_shown_live_inside_it_unless_they_are_hidden() -> None:
    venv = f"{PROJECT}/.venv"
    machine = overlay("/", masks=(PathMask("home/ada/app/.venv/secret"), PathMask("home/ada/app/.env")))
    project, live = with_frozen(plan(machine), PROJECT, FROZEN, (venv,)).steps[1:]
    assert isinstance(project, Overlay) and project.source == FROZEN
    assert isinstance(live, Overlay) and (live.source, live.target, live.masks) == (venv, venv, (PathMask("secret"),))
    for mask in ("home/ada/app/.venv", "home/ada/app/nested"):
        masked = overlay("/", masks=(PathMask(mask),))
        trees = (venv, f"{PROJECT}/nested/node_modules", f"{PROJECT}/.venv2")
        shown = [step.source for step in with_frozen(plan(masked), PROJECT, FROZEN, trees).steps[1:] if isinstance(step, Overlay)]
        assert shown == [FROZEN, *(tree for tree in trees if not tree.removeprefix("/").startswith((mask + "/",)) and tree != f"/{mask}")]


def test_a_hidden_project_is_not_shown_again() -> None:
    for mask in ("home/ada/app", "home/ada", "home"):
        with pytest.raises(PolicyError, match="hides it"):
            with_frozen(plan(overlay("/", masks=(PathMask(mask),))), PROJECT, FROZEN)


def test_a_project_that_is_an_overlay_already_keeps_its_place() -> None:
    own = overlay(PROJECT, masks=(PathMask(".env"),), writable=False)
    steps = with_frozen(plan(overlay("/"), own), PROJECT, FROZEN).steps
    assert len(steps) == 2 and isinstance(steps[1], Overlay)
    assert (steps[1].source, steps[1].masks, steps[1].writable) == (FROZEN, own.masks, False)


def test_a_view_that_does_not_show_the_project_as_an_overlay_is_refused() -> None:
    for steps in (
        (overlay("/usr"),),
        (overlay("/"), Copies(PROJECT, PROJECT, "key")),
        (overlay("/"), Copies(PROJECT + "/d", PROJECT + "/d", "key")),
    ):
        with pytest.raises(PolicyError, match="cannot be frozen"):
            with_frozen(plan(*steps), PROJECT, FROZEN)
