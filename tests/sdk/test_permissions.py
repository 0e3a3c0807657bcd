"""Permissions of the SDK become one policy; what cannot be enforced together is refused."""

from __future__ import annotations

from typing import Any

import pytest

from agent_sandbox import FilePermission, NetworkPermission, PermissionLevel, PermissionSet, ProcessPermission
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.code.patterns import CodeGrant
from agent_sandbox.policy.model import Guarantee

ANY: Any = lambda value: value  # noqa: E731  what a caller without a type checker may pass
READ, WRITE = PermissionLevel.READ, PermissionLevel.WRITE


def test_an_empty_set_permits_nothing() -> None:
    policy = PermissionSet().policy()
    assert not (policy.files.read or policy.files.write or policy.processes or policy.network.outbound)
    assert PermissionSet().warnings == () and PermissionSet().grants == frozenset()


@pytest.mark.parametrize(
    ("level", "read", "write", "hidden"),
    [
        (PermissionLevel.NONE, False, False, True),
        (READ, True, False, False),
        (WRITE, True, True, False),
        (PermissionLevel.FULL, True, True, True),
    ],
)
def test_each_level_includes_those_before_it(level: PermissionLevel, read: bool, write: bool, hidden: bool) -> None:
    files = PermissionSet([FilePermission(level, allowed_paths=["/data"])]).policy().files
    assert (files.read, files.write, files.allow_hidden) == (read, write, hidden)


def test_two_of_a_kind_permit_what_either_does_and_deny_what_either_does() -> None:
    permissions = PermissionSet()
    permissions.add(FilePermission(READ, ["/a"], ["/a/x"])).add(FilePermission(READ, ["/b"], ["/b/x"]))
    files = permissions.policy().files
    assert [path for path in ("/a/1", "/b/1", "/c", "/a/x", "/b/x") if files.reaches(path)] == ["/a/1", "/b/1"]
    permissions.add(ProcessPermission(True, True, ["git"])).add(ProcessPermission(True, True))
    assert not permissions.policy().programs.groups, "one of them names no limit"


@pytest.mark.parametrize(
    ("one", "other", "field"),
    [
        (FilePermission(READ, ["/a"]), FilePermission(WRITE, ["/b"]), "level"),
        (FilePermission(READ, ["/a"], allow_hidden=True), FilePermission(READ, ["/b"]), "allow_hidden"),
        (ProcessPermission(True, True), ProcessPermission(True, False), "allow_shell"),
        (ProcessPermission(True, max_processes=5), ProcessPermission(True, max_processes=6), "max_processes"),
    ],
)
def test_what_cannot_be_enforced_together_is_refused_and_changes_nothing(one: Any, other: Any, field: str) -> None:
    permissions = PermissionSet([one])
    with pytest.raises(PolicyError, match=f"differ in {field}"):
        permissions.add(other)
    assert permissions == PermissionSet([one])
    assert permissions != PermissionSet() and permissions != 5


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FilePermission(ANY("read")), "level must be a PermissionLevel"),
        (lambda: FilePermission(READ, "/data"), "allowed_paths must be a list"),
        (lambda: FilePermission(READ, ANY(5)), "allowed_paths must be a list"),
        (lambda: FilePermission(READ, allow_hidden=ANY(1)), "allow_hidden must be True or False"),
        (lambda: NetworkPermission(allowed_hosts=["https://x.example"]), "is an address"),
        (lambda: NetworkPermission(allowed_ports=[0]), "not a port"),
        (lambda: ProcessPermission(allowed_commands=["/bin/git"]), "not the name of a command"),
        (lambda: PermissionSet([FilePermission(READ, ["data"])]), "is not absolute"),
        (lambda: PermissionSet([ProcessPermission(max_processes=0)]), "max_processes cannot be 0"),
        (lambda: PermissionSet([ANY("read")]), "not a permission"),
    ],
)
def test_what_cannot_be_a_permission_is_refused_by_name(make: Any, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        make()


def test_named_commands_require_that_tools_are_confined_and_unnamed_ones_do_not() -> None:
    assert Guarantee.PROGRAMS_CONFINED in PermissionSet([ProcessPermission(True, True, ["git"])]).policy().requires
    assert Guarantee.PROGRAMS_CONFINED in PermissionSet([ProcessPermission(True)]).policy().requires, "no shell is a limit, too"
    assert Guarantee.PROGRAMS_CONFINED not in PermissionSet([ProcessPermission(True, True)]).policy().requires


@pytest.mark.parametrize(
    ("permission", "grants"),
    [
        (FilePermission(), set()),
        (FilePermission(READ), {CodeGrant.FILES}),
        (ProcessPermission(), set()),
        (ProcessPermission(True), {CodeGrant.PROCESSES}),
        (ProcessPermission(True, True), {CodeGrant.PROCESSES, CodeGrant.SHELL}),
        (NetworkPermission(), set()),
        (NetworkPermission(allow_outbound=True), {CodeGrant.NETWORK}),
    ],
)
def test_a_permission_lifts_the_warnings_that_it_covers(permission: Any, grants: set[CodeGrant]) -> None:
    assert PermissionSet([permission]).grants == grants


def test_a_set_shows_what_it_holds() -> None:
    assert "ProcessPermission(allow_subprocess=True" in repr(PermissionSet([ProcessPermission(True)]))
