"""Capabilities given up stay given up, also for user 0 and across execve. Each in a user namespace of its own, as a guest has."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_sandbox.kernel import namespaces, syscalls
from tests.kernel.children import ChildEnded, in_child

SETS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")


def user_namespace_works() -> bool:
    try:
        in_child(become_root_of_a_namespace)
    except ChildEnded:
        return False
    return True


def become_root_of_a_namespace() -> None:
    uid, gid = os.geteuid(), os.getegid()
    syscalls.unshare(syscalls.CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")


pytestmark = pytest.mark.skipif(not user_namespace_works(), reason="this host forbids user namespaces")


def sets(status: str) -> dict[str, int]:
    return {name: int(value, 16) for name, value in (line.split(":") for line in status.splitlines() if line.startswith("Cap"))}


def after(act: Callable[[], None] | None) -> tuple[dict[str, int], dict[str, int]]:
    """The capability sets of user 0 of a fresh namespace after `act`, of itself and of a program it executes."""

    def child() -> tuple[dict[str, int], dict[str, int]]:
        become_root_of_a_namespace()
        if act:
            act()
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
        own = sets(Path("/proc/self/status").read_text())
        return own, sets(subprocess.check_output(["cat", "/proc/self/status"], text=True))

    return in_child(child)


def mask(names: frozenset[str]) -> int:
    return sum(1 << namespaces.CAPABILITIES[name] for name in names)


def test_after_drop_all_neither_the_process_nor_what_it_executes_has_any() -> None:
    nothing = dict.fromkeys(SETS, 0)
    assert after(namespaces.drop_capabilities) == (nothing, nothing)
    own, executed = after(None)
    assert own["CapEff"] and executed["CapEff"], "without it, user 0 of a namespace has them all"


def test_what_is_kept_survives_execve_and_nothing_else_does() -> None:
    kept = mask(namespaces.PACKAGE_MANAGER)
    expected = {"CapInh": 0, "CapPrm": kept, "CapEff": kept, "CapBnd": kept, "CapAmb": 0}
    assert after(lambda: namespaces.keep_capabilities(namespaces.PACKAGE_MANAGER)) == (expected, expected)


def test_dropped_capabilities_cannot_be_taken_back() -> None:
    attempts: dict[str, Callable[[], object]] = {
        "capset": lambda: syscalls.capset(mask(frozenset({"CHOWN"}))),
        "securebits": lambda: syscalls.prctl(syscalls.PR_SET_SECUREBITS, 0),
        "ambient": lambda: syscalls.prctl(syscalls.PR_CAP_AMBIENT, 2, namespaces.CAPABILITIES["CHOWN"]),
    }

    def child(drop: bool) -> dict[str, bool]:
        become_root_of_a_namespace()
        if drop:
            namespaces.drop_capabilities()
        done = {}
        for name, attempt in attempts.items():
            try:
                attempt()
                done[name] = True
            except PermissionError:
                done[name] = False
        return done

    assert in_child(lambda: child(drop=True)) == {"capset": False, "securebits": False, "ambient": False}
    assert in_child(lambda: child(drop=False))["capset"] is True


def test_the_securebits_are_locked_and_keep_caps_is_off() -> None:
    get_securebits = 27

    def child() -> int:
        become_root_of_a_namespace()
        namespaces.drop_capabilities()
        return syscalls.prctl(get_securebits)

    assert in_child(child) == 0b11101111


def test_without_the_right_to_drop_it_is_an_error() -> None:
    def child() -> str:
        become_root_of_a_namespace()
        namespaces.keep_capabilities(frozenset({"CHOWN"}))
        try:
            namespaces.drop_capabilities()
        except PermissionError:
            return "refused"
        return "done"

    assert in_child(child) == "refused"


def test_a_name_that_is_no_capability_is_refused_before_anything_is_dropped() -> None:
    with pytest.raises(KeyError, match="CAP_CHOWN"):
        namespaces.keep_capabilities({"CAP_CHOWN"})


def test_the_names_are_numbered_as_in_the_headers() -> None:
    sample = {"CHOWN": 0, "SETPCAP": 8, "SYS_ADMIN": 21, "SETFCAP": 31, "CHECKPOINT_RESTORE": 40}
    assert {name: namespaces.CAPABILITIES[name] for name in sample} == sample


def test_a_capability_that_is_left_is_an_error_that_names_it() -> None:
    def child(*, drop: bool) -> str:
        become_root_of_a_namespace()
        if drop:
            namespaces.drop_capabilities()
        try:
            namespaces.assert_capabilities(())
        except PermissionError as error:
            return str(error.strerror)
        return "none"

    assert in_child(lambda: child(drop=True)) == "none"
    assert in_child(lambda: child(drop=False)).startswith("capabilities are left: 0x")
