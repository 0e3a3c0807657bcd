"""Which changes need their own yes. The names themselves are in the attack suite; here is what more than a name decides."""

from __future__ import annotations

import pytest

from agent_sandbox.workspace.changes import Change, ChangeSet, Kind
from agent_sandbox.workspace.escape import folded
from agent_sandbox.workspace.nodes import EntryType, Node
from agent_sandbox.workspace.protected import (
    CLASSES,
    DIRECTORIES,
    NAMES,
    STARTS,
    SUFFIXES,
    classes_of,
    classes_of_all,
    classes_of_path,
    leaves,
)

FILE, DIRECTORY = Node(EntryType.FILE, 0o644, 0, 0), Node(EntryType.DIRECTORY, 0o755, 0, 0)


def changed(path: str) -> Change:
    return Change(path, Kind.MODIFIED, FILE, FILE)


def added(path: str, node: Node = FILE) -> Change:
    return Change(path, Kind.ADDED, None, node)


def test_every_class_that_names_lead_to_has_a_sentence_and_every_name_its_plain_spelling() -> None:
    assert {*NAMES.values(), *DIRECTORIES.values(), *STARTS.values(), *SUFFIXES.values()} <= CLASSES.keys()
    for name in (*NAMES, *(part for path in DIRECTORIES for part in path.split("/"))):
        assert folded(name) == name


@pytest.mark.parametrize(
    ("before", "after", "held"),
    [
        (b'{"scripts": {"test": "x"}, "version": "1"}', b'{"scripts": {"test": "x"}, "version": "2"}', False),
        (b'{"scripts": {"test": "x"}}', b'{"scripts": {"test": "x", "postinstall": "evil"}}', True),
        (b'{"version": "1"}', b'{"version": "2"}', False),
        (None, b'{"scripts": {"prepare": "evil"}}', True),
        (None, b"{}", False),
        (b"{}", b"not json", True),
        (b"{}", b"[" * 100_000, True),
        (b"{}", b"[]", True),
    ],
)
def test_of_package_json_only_what_is_run_counts(before: bytes | None, after: bytes, held: bool) -> None:
    found = classes_of(changed("/p/package.json"), "/p", texts=lambda change: (before, after))
    assert ("package-scripts" in found) == held


@pytest.mark.parametrize(
    ("after", "held"),
    [(b"[project]\nname='x'", False), (b"[tool.agent-sandbox]\nallow=['git']", True), (b"\xff", True), (b"tool = 1", True)],
)
def test_of_pyproject_only_our_policy_counts(after: bytes, held: bool) -> None:
    found = classes_of(changed("/p/pyproject.toml"), "/p", texts=lambda change: (b"[project]", after))
    assert ("policy" in found) == held


def test_a_repository_that_is_not_called_git_is_one() -> None:
    bare = ("HEAD", "config", "objects", "refs", "hooks")
    found = classes_of_all(ChangeSet(tuple(added(f"/p/docs/x/{name}") for name in bare)), "/p")
    assert {path for path, classes in found.items() if "git-config" in classes} == {f"/p/docs/x/{name}" for name in bare}


def test_to_remove_a_directory_is_to_remove_what_is_in_it() -> None:
    gone = Change("/p/.github", Kind.DELETED, DIRECTORY, None)
    paths = ["/p/.github", "/p/.github/workflows", "/p/.github/workflows/ci.yml", "/p/src/.env"]
    assert classes_of_all(ChangeSet((gone,)), "/p", gone=paths) == {"/p/.github": {"ci"}}


def test_many_deletions_are_a_class_of_their_own() -> None:
    deleted = [Change(f"/p/{number}", Kind.DELETED, FILE, None) for number in range(6)]
    assert classes_of_all(ChangeSet(tuple(deleted)), "/p", bulk_limit=5) == {"/p": {"bulk-deletion"}}
    assert classes_of_all(ChangeSet(tuple(deleted)), "/p", bulk_limit=6) == {}


def test_a_commit_made_inside_is_one_class_and_its_hooks_another() -> None:
    commit = (".git/objects/12/3456", ".git/refs/heads/main", ".git/logs/refs/heads/main", ".git/index", ".git/HEAD", ".git/COMMIT_EDITMSG")
    assert {kind for name in commit for kind in classes_of_path(name)} == {"git-history"}
    assert classes_of(added("/p/.git", DIRECTORY), "/p") == {"git-history"}
    assert classes_of(added("/p/.git"), "/p") == {"git-config"}


def test_a_link_is_followed_through_the_tree_as_it_would_be() -> None:
    links = {"/p/dir": "deep/er", "/p/deep/er/back": "../..", "/p/a": "b", "/p/b": "a", "/p/out": "/elsewhere"}

    def out(path: str, target: str) -> bool:
        return leaves(path, target, "/p", links.get)

    assert not out("/p/x", "dir/../sibling") and not out("/p/x", "dir/back/y")
    assert out("/p/x", "dir/back/../y") and out("/p/x", "a") and out("/p/x", "out/y") and out("/p/x", "..")
    assert not out("/p/sub/x", "..") and not out("/p/x", "/p/sub") and out("/p/x", "/p/../q") and out("/p/x", "/pq")
    assert not leaves("/etc/x", "/var/y", "/", links.get)


def test_directories_with_the_group_of_their_parent_lend_no_power() -> None:
    shared, sticky = (Node(EntryType.DIRECTORY, mode, 0, 0) for mode in (0o2755, 0o1777))
    assert classes_of(added("/p/d", shared), "/p") == frozenset()
    assert classes_of(added("/p/d", sticky), "/p") == {"setuid"}
    assert classes_of(Change("/p/d", Kind.MODE, sticky, sticky), "/p") == frozenset()
