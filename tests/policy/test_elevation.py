"""What is lifted is lifted up to the ceiling, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.policy.elevation import Elevation, elevated
from agent_sandbox.policy.model import MIB, Limits, Policy, ProgramRules, cloned, implied
from agent_sandbox.policy.paths import Tree
from agent_sandbox.policy.programs import covers, is_pattern
from agent_sandbox.policy.secrets import Mask

NAMES = ("git", "curl", "ls", "bash", "python3")
names = st.lists(st.sampled_from((*NAMES, "c*", "py*")), max_size=3, unique=True).map(tuple)
programs = st.builds(ProgramRules, st.lists(names, max_size=2).map(tuple), names, st.booleans())
sizes = st.sampled_from([None, 64 * MIB, 256 * MIB, 1024 * MIB])


def policy_of(rules: ProgramRules, memory: int | None, ceiling: Policy | None = None) -> Policy:
    limits = Limits(memory_bytes=memory)
    if ceiling is not None:
        above = ceiling.programs
        rules = ProgramRules((*above.groups, *rules.groups), (*above.denied, *rules.denied), above.shell and rules.shell)
        most = ceiling.limits.memory_bytes
        limits = Limits(memory_bytes=most if memory is None else memory if most is None else min(memory, most))
    return cloned(masks=(), limits=limits, programs=rules)


@given(programs, sizes, programs, sizes, st.lists(st.sampled_from(NAMES), max_size=3).map(tuple), sizes)
def test_never_beyond_the_ceiling_and_never_less_than_before(
    top: ProgramRules, most: int | None, below: ProgramRules, memory: int | None, more: tuple[str, ...], wanted: int | None
) -> None:
    ceiling = policy_of(top, most)
    policy = policy_of(below, memory, ceiling)
    what = Elevation(more, (("memory_bytes", wanted),) if wanted is not None else ())
    raised = elevated(policy, what, ceiling)
    for name in NAMES:
        assert not raised.programs.permits(name) or ceiling.programs.permits(name)
        assert not policy.programs.permits(name) or raised.programs.permits(name)
        by_pattern = any(is_pattern(each) and each not in more and covers((each,), name) for each in policy.programs.denied)
        assert raised.programs.permits(name) or by_pattern or not (name in more and ceiling.programs.permits(name))
    before, after = policy.limits.memory_bytes, raised.limits.memory_bytes
    assert (before is None) == (after is None) and (before is None or after is None or before <= after)
    assert most is None or (after is not None and after <= most)
    assert implied(raised.processes, raised.limits, raised.programs) <= raised.requires
    assert replace(raised, name=policy.name, programs=policy.programs, limits=policy.limits, requires=policy.requires) == policy


def test_a_program_is_permitted_that_only_the_project_had_left_out() -> None:
    ceiling = cloned(masks=(), programs=ProgramRules(denied=("ssh",)))
    policy = cloned(masks=(), programs=ProgramRules((("git",),), ("ssh", "curl")))
    raised = elevated(policy, Elevation(programs=("curl", "ssh")), ceiling)
    assert raised.programs.permits("curl") and not raised.programs.permits("ssh") and not policy.programs.permits("curl")
    assert raised.name == "cloned+elevated" and raised.digest() != policy.digest()


def test_lifting_one_of_those_that_a_pattern_denies_does_not_let_the_others_in() -> None:
    policy = cloned(masks=(), programs=ProgramRules(denied=("ssh*", "mkfs*")))
    raised = elevated(policy, Elevation(programs=("ssh",)), cloned(masks=()))
    assert not any(raised.programs.permits(name) for name in ("ssh", "sshd", "ssh-add", "mkfs.ext4"))
    assert elevated(policy, Elevation(programs=("ssh*",)), cloned(masks=())).programs.permits("ssh-add")


def test_a_path_is_shown_unless_the_ceiling_denies_it() -> None:
    denied = (Tree("/etc/a"), Tree("/etc/b"))
    policy = cloned(masks=(Mask("/home/u/.ssh", "keys"), Mask("/home/u/.aws", "keys")), denied=denied)
    ceiling = cloned(masks=(), denied=(Tree("/etc/b"),))
    files = elevated(policy, Elevation(paths=("/home/u/.ssh", "/etc/a", "/etc/b", "/nothing")), ceiling).files
    assert files.reaches("/home/u/.ssh/id") and not files.reaches("/home/u/.aws/key")
    assert files.reaches("/etc/a") and not files.reaches("/etc/b")


@pytest.mark.parametrize(("sorts", "left"), [(None, ("programs", "limits", "paths")), (("limits",), ("limits",)), ((), ())])
def test_only_what_may_be_lifted_is(sorts: tuple[str, ...] | None, left: tuple[str, ...]) -> None:
    what = Elevation(("curl",), (("memory_bytes", 5.0),), ("/a",))
    assert what.only(sorts).sorts() == left
    assert what.describe() == "programs curl; limits memory bytes up to 5; paths /a"
