"""What a policy gives makes patterns of code no issue; what it takes away brings them back."""

from __future__ import annotations

from agent_sandbox.policy.code.patterns import CodeGrant, granted
from agent_sandbox.policy.model import ProgramRules, cloned, locked
from agent_sandbox.policy.paths import Tree


def test_what_is_permitted_is_granted_and_the_network_never_is() -> None:
    assert granted(locked()) == frozenset()
    assert granted(locked(read=True, allowed=[Tree("/data")])) == granted(locked(write=True, allowed=[Tree("/data")])) == {CodeGrant.FILES}
    assert granted(locked(processes=True)) == {CodeGrant.PROCESSES, CodeGrant.SHELL}
    assert granted(locked(processes=True, programs=ProgramRules(shell=False))) == {CodeGrant.PROCESSES}
    assert granted(cloned(masks=())) == {CodeGrant.FILES, CodeGrant.PROCESSES, CodeGrant.SHELL}
