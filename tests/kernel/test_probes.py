"""Live tries say what happened, end, and leave nothing."""

from __future__ import annotations

import os

from agent_sandbox.kernel import probes


def test_what_a_try_returns_or_raises_comes_back() -> None:
    assert probes.attempt(lambda: "it works") == probes.Trial(True, "it works")

    def fails() -> str:
        raise PermissionError(1, "not here")

    assert probes.attempt(fails) == probes.Trial(False, "not here")


def test_a_try_that_dies_is_a_try_that_failed() -> None:
    def dies() -> str:
        os._exit(7)

    assert not probes.attempt(dies).worked


def test_a_try_changes_nothing_here() -> None:
    before = os.readlink("/proc/self/ns/mnt"), sorted(os.listdir("/proc/self/fd"))
    assert probes.own_namespaces().worked
    assert probes.overlay().worked
    assert (os.readlink("/proc/self/ns/mnt"), sorted(os.listdir("/proc/self/fd"))) == before


def test_a_filter_and_rules_are_tried_against_what_they_must_refuse() -> None:
    assert probes.system_call_filter().worked
    assert probes.landlock_rules().said.startswith("ABI") or not probes.landlock_rules().worked
