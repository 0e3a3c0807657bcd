"""Names of programs: what is denied stays denied, and layers only narrow."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.action import RunCode, RunCommand
from agent_sandbox.policy.decide import Allow, Deny, decide
from agent_sandbox.policy.guarantees import Guarantee
from agent_sandbox.policy.model import locked
from agent_sandbox.policy.tools import ToolRules

NAMES = ["git", "python3", "python", "rm", "bash", "mkfs.ext4", "curl"]
PATTERNS = st.sampled_from([*NAMES, "python*", "mkfs*", "*", "[g]it", "?m"])
groups = st.lists(PATTERNS, max_size=3).map(tuple)
rules = st.builds(ToolRules, st.lists(groups, max_size=2).map(tuple), groups, st.booleans())


def test_a_name_has_to_be_in_every_group_and_in_none_that_is_denied() -> None:
    tools = ToolRules((("git", "python*"), ("git", "curl")), ("curl",))
    assert [name for name in NAMES if tools.permits(name)] == ["git"]
    assert tools.permits("/usr/bin/git"), "a path is judged by its last name"
    assert not ToolRules((("gitx",),)).permits("git")
    assert not ToolRules((("git",),)).permits("gitx")


def test_without_a_shell_no_shell_is_permitted_even_if_it_is_listed() -> None:
    assert not ToolRules((("bash",),), shell=False).permits("bash")
    assert ToolRules((("bash",),)).permits("bash")


def test_what_restricts_nothing_says_so() -> None:
    assert not ToolRules().restricts
    assert all(each.restricts for each in (ToolRules(((),)), ToolRules(denied=("rm",)), ToolRules(shell=False)))


def test_what_an_allowed_tool_opens_is_named() -> None:
    tools = ToolRules((("git", "cat", "python*", "bash", "perl"),), denied=("perl",))
    assert tools.opens() == ("git", "python*", "bash")


@settings(max_examples=60, deadline=None)
@given(rules, groups, groups, st.booleans(), st.sampled_from(NAMES))
def test_narrowing_never_permits_more(tools: ToolRules, allowed: tuple[str, ...], denied: tuple[str, ...], shell: bool, name: str) -> None:
    narrower = tools.narrowed(allowed=allowed, denied=denied, shell=shell)
    assert not narrower.permits(name) or tools.permits(name)
    assert tools.narrowed() == tools.narrowed().narrowed()


@pytest.mark.parametrize("name", ["", "a/b", "a\0b", "a[", "a\\b", 5])
def test_what_is_no_name_of_a_command_is_refused(name: str) -> None:
    with pytest.raises(PolicyError, match="command"):
        ToolRules(((name,),))


def test_a_policy_that_names_tools_requires_that_they_are_confined() -> None:
    named = ToolRules((("git",),))
    assert Guarantee.TOOLS_CONFINED in locked(processes=True, tools=named).requires
    assert Guarantee.TOOLS_CONFINED not in locked(processes=True).requires
    assert Guarantee.TOOLS_CONFINED not in locked(processes=False, tools=named).requires, "without processes there is nothing to confine"


@pytest.mark.parametrize(
    ("argv", "tools", "why", "remedy"),
    [
        (["npm", "install"], ToolRules((("git", "curl"),)), "'npm'", "to allow it: --allow git,curl,npm"),
        (["bash", "-c", "git status && npm i"], ToolRules((("git", "bash"),)), "'npm'", "--allow git,bash,npm"),
        (["sh", "-c", "ls"], ToolRules(shell=False), "'sh'", "allow a shell"),
        (["rm", "x"], ToolRules(denied=("r?",)), "'rm'", "take rm off the list of denied commands"),
        (["env", "rm", "x"], ToolRules((("env",),)), "'rm'", "--allow env,rm"),
        (["sh", "-c", "("], ToolRules((("git",),)), "'sh'", "--allow git,sh"),
    ],
)
def test_a_program_that_is_not_allowed_is_refused_with_the_line_that_would_allow_it(
    argv: list[str], tools: ToolRules, why: str, remedy: str
) -> None:
    verdict = decide(locked(processes=True, tools=tools), (), RunCommand.of(argv), now=0.0)
    assert isinstance(verdict, Deny) and verdict.because.rule == "tools"
    assert why in verdict.because.why and remedy in verdict.because.remedy


def test_a_command_line_whose_tools_are_known_is_refused_like_a_command() -> None:
    policy = locked(processes=True, tools=ToolRules((("git",),)))
    refused = decide(policy, (), RunCode.of("bash", b"npm i", tools=("npm",)), now=0.0)
    assert isinstance(refused, Deny) and "--allow git,npm" in refused.because.remedy
    assert isinstance(decide(policy, (), RunCode.of("bash", b"git log", tools=("git",)), now=0.0), Allow)
    assert isinstance(decide(policy, (), RunCommand.of(["git", "log"]), now=0.0), Allow)
    without = decide(locked(), (), RunCode.of("bash", b"ls", tools=("ls",)), now=0.0)
    assert isinstance(without, Deny) and without.because.rule == "processes"
