"""A plan is made from values alone: what comes along of a change, what does not, and what is refused or held."""

from __future__ import annotations

import pytest

from agent_sandbox.workspace.changes import Change, ChangeSet, Kind
from agent_sandbox.workspace.nodes import EntryType, Node
from agent_sandbox.workspace.promotion.plan import Adjust, LeftOut, Plan, Put, Remove, plan
from agent_sandbox.workspace.protected import classes_of_all
from agent_sandbox.workspace.reality import Fingerprint

GUEST = 1879048192


def node(kind: EntryType = EntryType.FILE, mode: int = 0o644, owner: int = 1000, size: int = 3, **rest: object) -> Node:
    return Node(kind, mode, owner, owner, size if kind is EntryType.FILE else 0, **rest)  # type: ignore[arg-type]


def seen(what: Node) -> Fingerprint:
    return Fingerprint(what, 1, 2, 3, 4, 5_000_000_000)


def planned(*changes: Change, approved: frozenset[str] = frozenset(), **expected: Node) -> Plan:
    paths: dict[str, Fingerprint | None] = {change.path: None for change in changes}
    paths |= {f"/p/{name.replace('__', '/')}": seen(what) for name, what in expected.items()}
    made = ChangeSet(changes)
    return plan(made, paths, root="/p", classes=classes_of_all(made, "/p"), approved=approved)


def look(made: Plan) -> tuple[int, dict[str, bytes], int | None]:
    [step] = made.steps
    assert isinstance(step, Put)
    return step.items[0].look.mode, dict(step.items[0].look.xattrs), step.items[0].look.uid


@pytest.mark.parametrize(
    ("guest", "old", "mode"),
    [
        (0o644, None, 0o644),
        (0o755, None, 0o755),
        (0o777, None, 0o755),  # nobody else may write what is new
        (0o666, 0o644, 0o644),
        (0o666, 0o664, 0o664),  # the group could write it before
        (0o640, 0o664, 0o640),  # taken away is taken away
        (0o600, 0o644, 0o600),
        (0o775, 0o666, 0o775),
    ],
)
def test_the_guest_says_what_may_be_read_and_run_and_not_who_may_write(guest: int, old: int | None, mode: int) -> None:
    before = node(mode=old) if old is not None else None
    change = Change("/p/f", Kind.MODIFIED if before else Kind.ADDED, before, node(mode=guest, owner=GUEST))
    made = planned(change, f=before) if before else planned(change)
    assert look(made)[0] == mode
    assert (LeftOut("/p/f", "the right of others to write") in made.left_out) == bool(guest & ~mode)


def test_the_owner_is_that_of_what_is_replaced_or_of_the_directory() -> None:
    added = Change("/p/f", Kind.ADDED, None, node(owner=GUEST))
    replaced = Change("/p/f", Kind.MODIFIED, node(), node(owner=GUEST))
    assert look(planned(added))[2] is None
    assert look(planned(replaced, f=node()))[2] == 1000
    assert planned(replaced, f=node()).left_out == (LeftOut("/p/f", "the owner"),)
    assert planned(Change("/p/f", Kind.OWNER, node(), node(owner=GUEST)), f=node()).steps == ()


def test_power_comes_along_only_with_its_own_yes() -> None:
    caps = {"security.capability": b"\1"}
    for change in (
        Change("/p/f", Kind.ADDED, None, node(mode=0o4755)),
        Change("/p/f", Kind.ADDED, None, node(mode=0o2755)),
        Change("/p/f", Kind.ADDED, None, node(mode=0o755, xattrs=caps), xattrs=("security.capability",)),
        Change("/p/f", Kind.MODIFIED, node(mode=0o4755), node(mode=0o4755, size=4)),
    ):
        assert [held.classes for held in planned(change).held] == [{"setuid"}]
        mode, xattrs, _ = look(planned(change, approved=frozenset({"setuid"})))
        assert change.after is not None and (mode, xattrs) == (change.after.mode, change.after.xattrs)


def test_of_attributes_only_the_users_come_along_and_never_an_overlays() -> None:
    all_of_them = {"user.note": b"x", "user.overlay.opaque": b"y", "trusted.x": b"z", "system.posix_acl_access": b"a"}
    change = Change("/p/f", Kind.ADDED, None, node(xattrs=all_of_them), xattrs=tuple(sorted(all_of_them)))
    made = planned(change)
    assert look(made)[1] == {"user.note": b"x"}
    assert {left.what for left in made.left_out} == {f"the attribute {name}" for name in all_of_them if name != "user.note"}


def test_a_directory_that_others_have_made_is_theirs_and_gets_what_is_new() -> None:
    directory = node(EntryType.DIRECTORY, 0o755)
    made = planned(
        Change("/p/d", Kind.ADDED, None, directory), Change("/p/d/f", Kind.ADDED, None, node()), d=node(EntryType.DIRECTORY, 0o700)
    )
    assert [(type(step), step.path) for step in made.steps] == [(Put, "d/f")]


def test_what_is_in_a_new_directory_is_put_with_it_and_what_was_in_an_old_one_goes_with_it() -> None:
    directory = node(EntryType.DIRECTORY, 0o755)
    made = planned(
        Change("/p/d", Kind.RETYPED, directory, node()),
        Change("/p/n", Kind.ADDED, None, directory),
        Change("/p/n/f", Kind.ADDED, None, node()),
        Change("/p/n-other", Kind.ADDED, None, node()),
        Change("/p/gone", Kind.DELETED, directory, None),
        d=directory,
        d__x=node(),
        gone=directory,
        gone__y=node(),
    )
    steps = {step.path: step for step in made.steps}
    assert {path: type(step) for path, step in steps.items()} == {"d": Put, "n": Put, "n-other": Put, "gone": Remove}
    put, new, gone = steps["d"], steps["n"], steps["gone"]
    assert isinstance(put, Put) and isinstance(new, Put) and isinstance(gone, Remove)
    assert put.inside.keys() == {"x"} and [item.path for item in new.items] == ["n", "n/f"] and gone.inside.keys() == {"y"}


def test_directories_are_opened_up_first_and_closed_last() -> None:
    was, closed, opened = (node(EntryType.DIRECTORY, mode) for mode in (0o755, 0o500, 0o700))
    made = planned(
        Change("/p/closing", Kind.MODE, was, closed),
        Change("/p/closing/f", Kind.ADDED, None, node()),
        Change("/p/opening", Kind.MODE, closed, opened),
        Change("/p/opening/f", Kind.ADDED, None, node()),
        closing=was,
        opening=closed,
    )
    assert [(type(step), step.path) for step in made.steps] == [
        *((Adjust, "opening"), (Put, "closing/f"), (Put, "opening/f"), (Adjust, "closing")),
    ]


def test_what_is_gone_already_needs_no_step() -> None:
    assert planned(Change("/p/f", Kind.DELETED, node(), None)).steps == ()


def test_something_real_that_was_hidden_from_the_sandbox_is_never_replaced() -> None:
    made = planned(Change("/p/secret", Kind.ADDED, None, node(), masks_real=True), secret=node())
    assert [refusal.path for refusal in made.refused] == ["/p/secret"] and made.steps == ()


def test_a_path_that_nobody_looked_at_is_refused() -> None:
    made = plan(ChangeSet((Change("/p/f", Kind.ADDED, None, node()),)), {}, root="/p", classes={})
    assert "was not examined" in made.refused[0].why
