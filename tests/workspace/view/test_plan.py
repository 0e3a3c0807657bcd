"""From rules and mounts to a plan: what is shown, what is hidden, and what is refused. Nothing is mounted here."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from agent_sandbox.errors import PolicyError
from agent_sandbox.kernel import mountinfo
from agent_sandbox.kernel.mount_plan import Copies, MountPlan, Overlay, PathMask, SealRoot, SkeletonRoot, ThrowAway, Tmpfs
from agent_sandbox.policy import paths
from agent_sandbox.policy.model import EVERYWHERE, FileRules
from agent_sandbox.policy.secrets import Mask as Secret
from agent_sandbox.workspace.view import plan as planning
from agent_sandbox.workspace.view.plan import MachineFacts, Needs, plan_view

ROOT = mountinfo.parse(b"1 0 8:1 / / rw - ext4 /dev/sda rw\n")
WHOLE = FileRules(read=True, write=True, allowed=EVERYWHERE, allow_hidden=True)
LAYERS = ThrowAway(1 << 20)


def host(*, privileged: bool = True, extra: bytes = b"") -> MachineFacts:
    return MachineFacts(mountinfo.visible((*ROOT, *mountinfo.parse(extra))), privileged)


def plan(rules: FileRules, needs: Needs = Needs(), *, on: MachineFacts | None = None, project: str | None = None) -> MountPlan:  # noqa: B008
    return plan_view(rules, needs, LAYERS, host=on or host(), project=project)


def overlays(made: MountPlan) -> dict[str, Overlay]:
    return {step.target: step for step in made.steps if isinstance(step, Overlay)}


def rules_for(*allowed: str, denied: tuple[str, ...] = (), write: bool = False, allow_hidden: bool = True) -> FileRules:
    return FileRules(True, write, tuple(map(paths.parse, allowed)), tuple(map(paths.parse, denied)), allow_hidden)


def test_as_root_the_whole_machine_is_one_overlay_per_filesystem() -> None:
    made = plan(WHOLE, on=host(extra=b"2 1 8:2 / /srv rw - ext4 /dev/sdb rw\n3 1 0:9 / /proc rw - proc proc rw\n"))
    assert list(overlays(made)) == ["/", "/srv"]
    assert not any(isinstance(step, SkeletonRoot) for step in made.steps)


def test_without_root_it_is_one_overlay_per_top_level_directory_on_a_sealed_root() -> None:
    made = plan(WHOLE, on=host(privileged=False))
    assert "/" not in overlays(made)
    assert {"/usr", "/etc"} <= set(overlays(made))
    assert isinstance(made.steps[0], SkeletonRoot)
    assert isinstance(made.steps[-1], SealRoot)


def test_a_filesystem_that_cannot_be_shown_does_not_stop_the_run_unless_the_project_is_on_it() -> None:
    on = host(extra=b"2 1 8:2 / /srv rw - fuse.x x rw\n")
    assert not overlays(plan(WHOLE, on=on))["/srv"].required
    assert overlays(plan(WHOLE, on=on, project="/srv/here"))["/srv"].required


def test_each_run_has_its_own_tmp_and_the_project_is_shown_even_there() -> None:
    made = plan(WHOLE, project="/tmp")
    assert any(isinstance(step, Tmpfs) and step.target == "/tmp" for step in made.steps)
    assert overlays(made)["/tmp"].required


def test_inner_mounts_come_after_the_outer_ones_that_would_hide_them() -> None:
    targets = [getattr(step, "target", "") for step in plan(WHOLE, project="/tmp/a/b").steps]
    assert targets.index("/") < targets.index("/tmp") < targets.index("/tmp/a/b")


def test_a_secret_is_hidden_also_where_its_filesystem_is_mounted_again(tmp_path: Path) -> None:
    secret = Secret("/home/u/.ssh", "keys")
    on = host(extra=b"2 1 8:1 /home/u /srv rw - ext4 /dev/sda rw\n")
    made = overlays(plan(replace(WHOLE, masks=(secret,)), on=on))
    assert PathMask("home/u/.ssh") in made["/"].masks
    assert PathMask(".ssh") in made["/srv"].masks


def test_a_secret_behind_a_link_is_hidden_where_it_really_is(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    made = overlays(plan(replace(WHOLE, masks=(Secret(str(tmp_path / "link"), "keys"),))))
    hidden = {mask.path for mask in made["/"].masks}
    assert {str(tmp_path / "link")[1:], str(tmp_path / "real")[1:]} <= hidden


def test_a_filesystem_mounted_below_what_is_hidden_is_not_shown() -> None:
    on = host(extra=b"2 1 8:2 / /home/u/.ssh/keys rw - ext4 /dev/sdb rw\n")
    assert "/home/u/.ssh/keys" not in overlays(plan(replace(WHOLE, masks=(Secret("/home/u/.ssh", "keys"),)), on=on))


def test_denied_beneath_leaves_the_directory_and_denied_tree_does_not() -> None:
    made = overlays(plan(FileRules(True, False, EVERYWHERE, (paths.parse("/etc/*"), paths.parse("/opt")), True)))
    assert set(made["/"].masks) >= {PathMask("etc", keep=True), PathMask("opt")}


def test_a_home_that_is_hidden_as_a_whole_is_there_and_empty() -> None:
    made = overlays(plan(replace(WHOLE, masks=(Secret("/home/v", "the home of somebody else", stays=True),))))
    assert PathMask("home/v", keep=True) in made["/"].masks


def test_the_interpreters_files_stay_where_their_surroundings_are_denied(tmp_path: Path) -> None:
    interpreter = tmp_path / "home" / "python"
    interpreter.mkdir(parents=True)
    made = overlays(plan(rules_for("/*", denied=(str(tmp_path / "home"),)), Needs(trees=(str(interpreter),))))
    assert PathMask(str(tmp_path / "home")[1:], keep=True) in made["/"].masks
    assert str(interpreter)[1:] in made["/"].places
    assert not made[str(interpreter)].writable


def test_chosen_trees_stand_on_an_empty_root(tmp_path: Path) -> None:
    made = plan(rules_for(f"{tmp_path}/*"), Needs(trees=("/usr/lib",)))
    assert set(overlays(made)) == {"/usr/lib", str(tmp_path)}
    assert isinstance(made.steps[0], SkeletonRoot)


def test_reading_allows_no_writing_and_an_interpreter_is_never_writable(tmp_path: Path) -> None:
    assert not overlays(plan(rules_for(f"{tmp_path}/*")))[str(tmp_path)].writable
    made = overlays(plan(rules_for(f"{tmp_path}/*", write=True), Needs(trees=("/usr/lib",))))
    assert made[str(tmp_path)].writable
    assert not made["/usr/lib"].writable


def test_an_allowed_path_that_does_not_exist_is_no_error() -> None:
    assert overlays(plan(rules_for("/no/such/place/*"))) == {}


def test_a_single_allowed_file_comes_alone(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("1")
    (tmp_path / "two").write_text("2")
    copies = [step for step in plan(rules_for(str(tmp_path / "one"))).steps if isinstance(step, Copies)]
    assert [step.entries for step in copies] == [("one",)]


def test_a_link_that_is_allowed_is_there_as_a_link_and_what_it_leads_to_under_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "shown").mkdir()
    (tmp_path / "real" / "file").write_text("content")
    (tmp_path / "shown" / "file").write_text("content")
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("real/file")
    (tmp_path / "three").symlink_to("shown/file")
    made = plan(rules_for(f"{tmp_path}/one", f"{tmp_path}/two", f"{tmp_path}/three", f"{tmp_path}/shown"))
    copies = {step.target: step for step in made.steps if isinstance(step, Copies)}
    assert set(copies) == {str(tmp_path), f"{tmp_path}/real"}, "a copy over what is shown anyway would hide it"
    assert sorted(copies[str(tmp_path)].entries) == ["one", "three", "two"]
    assert copies[f"{tmp_path}/real"].entries == ("file",)
    barred = plan(rules_for(f"{tmp_path}/one", denied=(f"{tmp_path}/real/fi*",)))
    assert [step.entries for step in barred.steps if isinstance(step, Copies)] == [("one", "two")], "a link is no way to what is denied"


def test_what_is_mounted_below_copies_has_a_place_among_them(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "file").write_text("content")
    made = plan(rules_for(f"{tmp_path}/file", f"{tmp_path}/tree"))
    assert [step.places for step in made.steps if isinstance(step, Copies)] == [("tree",)]


def test_a_pattern_that_is_no_tree_copies_what_it_lets_through(tmp_path: Path) -> None:
    for name in ("a.json", "b.key", ".hidden.json"):
        (tmp_path / name).write_text("x")
    copies = [step for step in plan(rules_for(f"{tmp_path}/*.json")).steps if isinstance(step, Copies)]
    assert [step.entries for step in copies] == [(".hidden.json", "a.json")]
    copies = [step for step in plan(rules_for(f"{tmp_path}/*.json", allow_hidden=False)).steps if isinstance(step, Copies)]
    assert [step.entries for step in copies] == [("a.json",)]


def test_a_denied_pattern_inside_an_allowed_tree_holds(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.key").write_text("x")
    (tmp_path / "sub" / "c.txt").write_text("x")
    made = plan(rules_for(f"{tmp_path}/*", denied=(f"{tmp_path}/*.key",)))
    copies = [step for step in made.steps if isinstance(step, Copies)]
    assert [step.entries for step in copies] == [("sub", "sub/c.txt")]
    assert str(tmp_path) not in overlays(made)


def test_a_pattern_over_the_whole_machine_is_refused() -> None:
    with pytest.raises(PolicyError, match="reaches over the whole machine"):
        plan(rules_for("/*", denied=("**/.env",)))


def test_more_than_a_copy_at_every_start_should_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        (tmp_path / f"{number}.json").write_text("x")
    monkeypatch.setattr(planning, "MOST_ENTRIES", 4)
    with pytest.raises(PolicyError, match="would copy more than 4 entries"):
        plan(rules_for(f"{tmp_path}/*.json"))


def test_denying_everything_is_refused() -> None:
    with pytest.raises(PolicyError, match="denying / leaves nothing"):
        plan(rules_for("/*", denied=("/",)))


def test_sys_is_an_empty_directory() -> None:
    assert Tmpfs("/sys", 4096, 0o555) in plan(WHOLE).steps
    assert not any(target.startswith("/sys") for target in overlays(plan(WHOLE, on=MachineFacts.look())))


def test_this_machine_as_it_is_can_be_planned() -> None:
    made = plan(WHOLE, on=MachineFacts.look(), project=os.getcwd())
    assert made.describe()
