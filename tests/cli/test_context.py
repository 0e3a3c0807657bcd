"""Changes sorted as a person wants to see them."""

from __future__ import annotations

from agent_sandbox.cli.context import sort
from agent_sandbox.workspace.changes import Change, ChangeSet, Kind


def changes(*paths: str) -> ChangeSet:
    return ChangeSet(tuple(Change(path, Kind.ADDED, None, None) for path in paths))


def test_the_project_elsewhere_and_by_products_are_told_apart() -> None:
    files = sort(changes("/var/tmp/p/a", "/var/tmp/p/__pycache__/b", "/etc/c", "/var/cache/d", "/var/tmp/e"), "/var/tmp/p")
    assert [change.path for change in files.project] == ["/var/tmp/p/a"]
    assert [change.path for change in files.elsewhere] == ["/etc/c"]
    assert [change.path for change in files.noise] == ["/var/cache/d", "/var/tmp/e", "/var/tmp/p/__pycache__/b"]


def test_a_directory_called_tmp_in_the_project_is_no_noise() -> None:
    assert [change.path for change in sort(changes("/p/tmp/a"), "/p").project] == ["/p/tmp/a"]


def test_when_the_whole_machine_is_the_project_nothing_is_elsewhere() -> None:
    files = sort(changes("/etc/c", "/home/u/x"), "/")
    assert (len(files.project), files.elsewhere) == (2, ())
