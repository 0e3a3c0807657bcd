"""Change sets that a hostile guest made, on their way into the real tree."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.errors import Drift, PolicyError, WorkspaceError
from agent_sandbox.kernel import syscalls
from agent_sandbox.workspace.changes import Change, ChangeSet, Kind
from agent_sandbox.workspace.nodes import EntryType, Node
from agent_sandbox.workspace.promotion.inspect import look_at, protected_classes
from agent_sandbox.workspace.promotion.plan import Plan, plan
from agent_sandbox.workspace.promotion.promote import promote, recover
from agent_sandbox.workspace.protected import classes_of_all, classes_of_path
from tests.security.conftest import Tell
from tests.security.harness import case
from tests.security.test_promotion_crash import naive
from tests.workspace.layers.overlays import in_namespace
from tests.workspace.promotion.trees import ME, Edited, changes_between, edit_mixed, make_mixed, shown

FILE = Node(EntryType.FILE, 0o644, 0, 0, 2)


@pytest.fixture
def mixed(tmp_path: Path) -> Iterator[Edited]:
    edited = Edited(tmp_path, make_mixed, edit_mixed)
    yield edited
    edited.close()


def added(path: str, node: Node = FILE) -> Change:
    return Change(path, Kind.ADDED, None, node)


@case(117)
def test_a_path_that_is_no_plain_path_in_the_tree_is_refused_before_anything_is_written(number: int, mixed: Edited, tell: Tell) -> None:
    root, before = str(mixed.project), shown(mixed.project)
    bad = [
        *(f"{root}/../escape", f"{root}/src/../../escape", f"{root}/./x", f"{root}//x", f"{root}/src/", f"{root}/x\0y", "relative", ""),
        *("/etc/passwd", f"{root}-sibling/x", f"{root}/{'n' * 256}", f"{root}/{'/'.join(['deep'] * 1000)}", f"{root}/.."),
    ]
    for path in bad:
        changes = ChangeSet((added(path), *mixed.changes))
        made = plan(changes, look_at(root, changes), root=root, classes={})
        assert [refusal.path for refusal in made.refused] == [path], path
        with pytest.raises(PolicyError):
            mixed.promote(made)
    assert shown(mixed.project) == before and not mixed.promotions.exists()
    assert os.path.normpath(os.path.join(root, bad[0])) == str(mixed.project.parent / "escape")
    tell(f"{len(bad)} kinds refused, nothing written", control="joined to the root, the first leads to its parent")


@case(118)
def test_a_link_that_leads_out_needs_its_own_yes_and_is_never_followed(number: int, tmp_path: Path, tell: Tell) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "canary").write_text("unharmed\n")

    def make(tree: Path) -> None:
        (tree / "deep/er").mkdir(parents=True)
        os.symlink("deep/er", tree / "shortcut")
        os.symlink(outside, tree / "real-way-out")
        (tree / "dir").mkdir()
        (tree / "dir/canary").write_text("in the tree\n")

    out = {
        "absolute": str(outside),
        "up": "../outside",
        "deep/climbs": "../../outside",
        "through-a-link": "shortcut/../../../outside",  # up from deep/er, not from where the link is
        "chain": "first",
        "first": "second/..",  # each by itself stays inside
        "second": "real-way-out",
        "loop": "loop",
    }
    inside = {
        "plain": "dir/canary",
        "deep/back": "../dir",
        "via": "shortcut/../..",
        "absolute-inside": "PROJECT/dir",
        "dangling": "nothing",
    }

    def edit(tree: Path) -> None:
        for name, target in {**out, **inside}.items():
            os.symlink(target.replace("PROJECT", str(tmp_path / "project")), tree / name)
        shutil.rmtree(tree / "dir")
        os.symlink("deep", tree / "dir")

    edited = Edited(tmp_path, make, edit)
    root = str(edited.project)
    classes = protected_classes(edited.changes, look_at(root, edited.changes), edited, root=root)
    assert {os.path.relpath(path, root) for path, found in classes.items() if "links-out" in found} == out.keys()
    assert {held.path for held in edited.plan(classes=classes).held} == {f"{root}/{name}" for name in out}
    edited.promote(edited.plan(classes=classes, approved=frozenset({"links-out"})))
    assert os.readlink(edited.project / "absolute") == str(outside) and os.readlink(edited.project / "dir") == "deep"
    assert shown(outside).keys() == {"canary"} and (outside / "canary").read_text() == "unharmed\n"
    edited.close()
    tell(f"{len(out)} links out held, {len(inside)} inside pass; promoted as links", control="approved, they lead out")


@pytest.mark.once
@case(120)
def test_removals_and_changes_of_type_are_counted_and_many_need_their_own_yes(number: int, tmp_path: Path, tell: Tell) -> None:
    def make(tree: Path) -> None:
        (tree / "big").mkdir()
        (tree / "swapped").mkdir()
        for at in range(120):
            (tree / f"big/{at}").write_text("x")
        (tree / "swapped/.env").write_text("x")

    def edit(tree: Path) -> None:
        for name in ("big", "swapped"):
            shutil.rmtree(tree / name)
        os.symlink("elsewhere", tree / "swapped")

    edited = Edited(tmp_path, make, edit)
    root = str(edited.project)
    expected = look_at(root, edited.changes)
    classes = classes_of_all(edited.changes, root, gone=expected)
    assert classes == {root: {"bulk-deletion"}, f"{root}/swapped": {"environment"}}
    made = plan(edited.changes, expected, root=root, classes=classes)
    assert {name for held in made.held for name in held.classes} == {"bulk-deletion", "environment"}
    made = plan(edited.changes, expected, root=root, classes=classes, approved=frozenset({"bulk-deletion", "environment"}))
    assert made.counts() == {"added": 0, "replaced": 1, "removed": 122, "adjusted": 0}
    edited.promote(made)
    assert shown(edited.project).keys() == {"swapped"}
    edited.undo()
    assert len(shown(edited.project)) == 123
    edited.close()
    tell("123 removals counted, held, and undone", control="approved, they are removed")


@case(121)
def test_devices_pipes_and_sockets_are_refused_and_nothing_waits_for_them(number: int, mixed: Edited, tell: Tell) -> None:
    os.mkfifo(mixed.after / "pipe")
    root = str(mixed.project)
    nodes = {
        "pipe": Node(EntryType.FIFO, 0o644, 0, 0),
        "socket": Node(EntryType.SOCKET, 0o644, 0, 0),
        "disk": Node(EntryType.DEVICE, 0o600, 0, 0),
    }
    special = ChangeSet(tuple(added(f"{root}/{name}", node) for name, node in nodes.items()))
    made = plan(special, look_at(root, special), root=root, classes={})
    assert {refusal.path for refusal in made.refused} == {f"{root}/{name}" for name in nodes}
    # A pipe where a file was announced: it is not opened, so nobody waits for a writer.
    lie = ChangeSet((added(f"{root}/pipe"),))
    with pytest.raises((Drift, WorkspaceError)):
        promote(plan(lie, look_at(root, lie), root=root, classes={}), mixed, str(mixed.promotions), holder=ME)
    assert "pipe" not in shown(mixed.project)
    mixed.promote()
    tell("refused; one under the name of a file is not opened", control="the rest of the set is promoted")


@case(123)
def test_content_is_copied_and_another_name_of_the_guests_file_leads_nowhere(number: int, mixed: Edited, tell: Tell) -> None:
    source = mixed.after / "src/added"
    os.link(source, mixed.after.parent / "elsewhere")
    mixed.promote()
    (mixed.after.parent / "elsewhere").write_text("written through the other name\n")
    assert (mixed.project / "src/added").read_text() == "added\n"
    os.link(source, mixed.project / "linked")
    assert (mixed.project / "linked").read_text().startswith("written")
    tell("a new inode with one name", control="linked into the tree, the other name writes to it")


AUTORUN = {
    "git-config": (
        *(".git/hooks/post-checkout", ".git/config", ".git/config.worktree", ".git/info/attributes", ".git/modules/x/config"),
        *(".gitmodules", "sub/.git", "sub/.git/hooks/pre-commit", ".git/worktrees/w/config.worktree", ".gitattributes"),
    ),
    "git-history": (".git/objects/ab/cdef", ".git/refs/heads/main", ".git/index", ".git/HEAD", ".git/logs/HEAD", ".git/packed-refs"),
    "environment": (".envrc", ".env", ".env.local", "deploy/.env.production"),
    "editor": (
        ".vscode/tasks.json",
        ".vscode/launch.json",
        ".devcontainer/devcontainer.json",
        ".idea/runConfigurations/x.xml",
        ".exrc",
        ".nvim.lua",
    ),
    "ci": (".github/workflows/ci.yml", ".gitlab-ci.yml", ".circleci/config.yml", "Jenkinsfile", "azure-pipelines.yml"),
    "package-scripts": (".pre-commit-config.yaml", "package.json", ".npmrc", ".yarnrc.yml", "pip.conf", ".husky/pre-commit"),
    "interpreter-startup": (
        "conftest.py",
        "tests/conftest.py",
        "sitecustomize.py",
        "usercustomize.py",
        "lib/evil.pth",
        "__pycache__/a.pyc",
    ),
    "shell-startup": (".bashrc", ".profile", ".zshrc", ".config/fish/conf.d/x.fish"),
    "agent-instructions": ("AGENTS.md", "CLAUDE.md", ".mcp.json", ".cursor/rules/x.mdc", ".github/copilot-instructions.md"),
    "policy": ("agent-sandbox.toml", "pyproject.toml"),
}


@pytest.mark.once
@case(124)
def test_what_runs_without_being_asked_for_needs_its_own_yes(number: int, mixed: Edited, tell: Tell) -> None:
    root = str(mixed.project)
    for kind, names in AUTORUN.items():
        for name in names:
            changes = ChangeSet((added(f"{root}/{name}"),))
            classes = classes_of_all(changes, root)
            assert classes[f"{root}/{name}"] == {kind}, name
            held = plan(changes, {f"{root}/{name}": None}, root=root, classes=classes, approved=frozenset(AUTORUN) - {kind}).held
            assert [each.path for each in held] == [f"{root}/{name}"]
            assert not plan(changes, {f"{root}/{name}": None}, root=root, classes=classes, approved=frozenset({kind})).held
    for name in ("src/app.py", "Makefile", "README.md", "setup.py", "git/hooks.py", ".gıt/config", "environment.yml", "src/config"):
        assert classes_of_path(name) == frozenset(), name
    tell(f"{sum(map(len, AUTORUN.values()))} names held, each for its class only", control="ordinary names pass")


@pytest.mark.once
@case(126)
@pytest.mark.parametrize(
    "name",
    [
        ".GIT",
        ".Git",
        ".git\u200c",
        ".g\u200bit",
        ".git.",
        ".git ",
        ".git . .",
        "GIT~1",
        "git~2",
        ".gi\ufe00t",
        ".git::$INDEX_ALLOCATION",
        ".ｇｉｔ",
    ],
)
def test_a_name_that_is_git_on_another_machine_counts_as_git(number: int, name: str, tell: Tell) -> None:
    assert classes_of_path(f"{name}/config") == {"git-config"}
    assert classes_of_path(f"sub/{name}") <= {"git-config", "git-history"} and classes_of_path(f"sub/{name}")
    tell("held as .git", control="an ordinary name passes")


@pytest.mark.once
@case(126)
def test_names_that_some_systems_do_not_tell_apart_need_their_own_yes(number: int, tell: Tell) -> None:
    pairs = [("README.md", "readme.MD"), ("café", "cafe\u0301"), ("a", "a\u200d"), ("x", "x."), ("straße", "STRASSE")]
    for there, new in pairs:
        changes = ChangeSet((added(f"/p/{new}"),))
        assert classes_of_all(changes, "/p", names=lambda directory, there=there: [there])[f"/p/{new}"] >= {"name-collision"}  # type: ignore[misc]
        both = ChangeSet((added(f"/p/{new}"), added(f"/p/{there}")))
        assert sum("name-collision" in found for found in classes_of_all(both, "/p").values()) == 1
        assert classes_of_all(changes, "/p", names=lambda directory: ["other"]) == {}
    tell(f"{len(pairs)} kinds of collision held", control="beside another name they pass")


@case(127)
def test_what_is_written_after_the_diff_was_shown_is_not_promoted(number: int, mixed: Edited, tell: Tell) -> None:
    root, before = str(mixed.project), shown(mixed.project)
    approved = {change.path: digest(mixed, change) for change in mixed.changes if change.after and change.after.type is EntryType.FILE}
    path = mixed.after / "src/added"
    content = path.read_bytes()
    path.write_bytes(content[::-1])  # the same size
    made = plan(mixed.changes, look_at(root, mixed.changes), root=root, classes={}, digests=approved)
    with pytest.raises(Drift, match="not the one that was approved"):
        mixed.promote(made)
    assert shown(mixed.project) == before and mixed.staging() == []
    path.write_bytes(content)
    mixed.promote(made)
    tell("refused, nothing written", control="with the content that was approved it is promoted")


def digest(edited: Edited, change: Change) -> str:
    fd = edited.open_file(change)
    with open(fd, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


@case(129)
def test_a_disk_that_is_full_at_any_file_leaves_all_as_it_was(number: int, tmp_path: Path, tell: Tell) -> None:
    (tmp_path / "mount").mkdir()

    def body() -> None:
        refused = 0
        for inodes in range(40, 80):
            place = tmp_path / "mount"
            syscalls.mount("tmpfs", str(place), "tmpfs", 0, f"size=4m,nr_inodes={inodes}")
            try:
                edited = Edited(place, make_mixed, lambda tree: None)
            except OSError:
                syscalls.umount2(str(place), syscalls.MNT_DETACH)
                continue
            edit_elsewhere = tmp_path / f"after-{inodes}"
            shutil.copytree(edited.project, edit_elsewhere, symlinks=True)
            edit_mixed(edit_elsewhere)
            full = From(edited, edit_elsewhere)
            before = shown(edited.project)
            try:
                promote(full.plan(), full, str(tmp_path / f"promotions-{inodes}"), holder=ME)
                assert shown(edited.project) != before
            except WorkspaceError as error:
                assert "No space left" in str(error) and "nothing was changed" in str(error), error
                assert shown(edited.project) == before and edited.staging() == []
                refused += 1
            syscalls.umount2(str(place), syscalls.MNT_DETACH)
        assert refused > 5, refused

    in_namespace(body)
    tell("full at each of its files in turn: old, and said so", control="with room it is promoted")


class From:
    """The changes of a project whose new content lies on another filesystem."""

    def __init__(self, edited: Edited, after: Path) -> None:
        self.edited, self.after = edited, after
        self.changes = changes_between(edited.project, after)

    def plan(self) -> Plan:
        root = str(self.edited.project)
        return plan(self.changes, look_at(root, self.changes), root=root, classes={})

    def open_file(self, change: Change) -> int:
        return os.open(self.after / os.path.relpath(change.path, self.edited.project), os.O_RDONLY)


@case(129)
@pytest.mark.parametrize("name", ["src/app.py", "gone", "to-link", "script"])
def test_a_file_that_cannot_be_replaced_leaves_all_as_it_was(number: int, name: str, mixed: Edited, tell: Tell) -> None:
    made, before = mixed.plan(), shown(mixed.project)
    with stubborn(mixed.project / name), pytest.raises(WorkspaceError, match="nothing was changed"):
        mixed.promote(made)
    assert shown(mixed.project) == before and mixed.staging() == []
    mixed.promote(mixed.plan())
    tell("old, and said so", control="once it can be replaced it is promoted")


class stubborn:
    """For the length of a block an entry cannot be renamed: by its flag as root, by the mode of its directory otherwise."""

    GET, SET, IMMUTABLE = 0x80086601, 0x40086602, 0x10

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        self._set(True)

    def __exit__(self, *ended: object) -> None:
        self._set(False)

    def _set(self, on: bool) -> None:
        if os.geteuid() != 0:
            self.path.parent.chmod(0o555 if on else 0o755)
            return
        fd = os.open(self.path, os.O_RDONLY)
        flags = struct.unpack("l", fcntl.ioctl(fd, self.GET, struct.pack("l", 0)))[0]
        try:
            fcntl.ioctl(fd, self.SET, struct.pack("l", flags | self.IMMUTABLE if on else flags & ~self.IMMUTABLE))
        except OSError as error:
            pytest.skip(f"this filesystem has no immutable files: {error}")
        finally:
            os.close(fd)


@case(130)
def test_two_promotions_come_one_after_the_other_and_a_dead_one_is_recovered(number: int, mixed: Edited, tell: Tell) -> None:
    made, before = mixed.plan(), shown(mixed.project)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        contents = Stalled(mixed, writer)
        promote(made, contents, str(mixed.promotions), holder=ME)
        os._exit(0)
    os.read(reader, 1)
    with pytest.raises(WorkspaceError, match="in use by"):
        mixed.promote(made)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(mixed.staging()) == 1
    assert recover(str(mixed.promotions), ME).rolled_back == (1,)
    assert shown(mixed.project) == before and mixed.staging() == []
    mixed.promote(made)
    tell("the second is told who has it; after its death it is rolled back", control="then the second is promoted")


class Stalled:
    """Contents that say when they are asked for, and then never come."""

    def __init__(self, contents: Edited, writer: int) -> None:
        self.contents, self.writer, self.left = contents, writer, 5

    def open_file(self, change: Change) -> int:
        self.left -= 1
        if not self.left:
            os.write(self.writer, b"x")
            signal.pause()
        return self.contents.open_file(change)


@pytest.mark.once
@case(132)
def test_a_change_set_of_absurd_size_is_refused_with_a_reason(number: int, mixed: Edited, tell: Tell) -> None:
    root = str(mixed.project)
    huge = ChangeSet((added(f"{root}/sparse", Node(EntryType.FILE, 0o644, 0, 0, 1 << 40)),))
    made = plan(huge, look_at(root, huge), root=root, classes={})
    assert "more than the" in made.refused[0].why
    many = ChangeSet(
        tuple(
            added(f"{root}/many/{at}" if at else f"{root}/many", FILE if at else Node(EntryType.DIRECTORY, 0o755, 0, 0))
            for at in range(20_000)
        )
    )
    assert plan(many, look_at(root, many), root=root, classes={}).counts()["added"] == 20_000
    deep = ChangeSet(tuple(added(root + "/d" * at, Node(EntryType.DIRECTORY, 0o755, 0, 0)) for at in range(1, 3000)))
    assert plan(deep, look_at(root, deep), root=root, classes={}).refused
    tell("a terabyte of holes and 3,000 levels refused", control="20,000 files are planned")


@case(133)
def test_what_is_cleared_away_never_leads_outside(number: int, mixed: Edited, tmp_path: Path, tell: Tell) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "canary").write_text("unharmed\n")
    os.symlink(outside, mixed.project / "gone/out")  # it goes with the directory, and later lies in what is kept
    mixed.promote(mixed.plan())
    assert not (mixed.project / "gone").exists()
    for _ in range(3):
        mixed.undo()
        mixed.promote(mixed.plan())
    assert (outside / "canary").read_text() == "unharmed\n"
    naive(mixed)
    shutil.rmtree(mixed.promotions)
    tell("kept, restored and forgotten as a link", control="the directory it leads to is there")
