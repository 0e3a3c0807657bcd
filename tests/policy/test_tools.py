"""Rules about tools: which names they permit, and what the refusal of one says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.action import RunCode, RunCommand
from agent_sandbox.policy.decide import Allow, Deny, decide
from agent_sandbox.policy.model import Policy, cloned, locked
from agent_sandbox.policy.tools import EVERY_TOOL, SHELLS, ToolRules, interprets

names = st.sampled_from(["git", "git-lfs", "python3", "python3.11", "rm", "bash", "sh", "zsh", "node"])
patterns = st.sampled_from(["git", "git*", "python*", "python3.1?", "rm", "bash", "*", "[a-m]*"])
rules = st.builds(
    ToolRules, st.none() | st.lists(patterns, max_size=3).map(tuple), st.lists(patterns, max_size=2).map(tuple), st.booleans()
)


def permitted(rules: ToolRules, *argv: str) -> bool:
    return isinstance(decide(cloned(masks=(), tools=rules), (), RunCommand.of(argv), now=0.0), Allow)


@given(rules, names)
def test_denying_more_never_permits_more(rules: ToolRules, name: str) -> None:
    for other in ("git", "*", name):
        tighter = ToolRules(rules.allowed, (*rules.denied, other), rules.shell)
        assert rules.permits(name) or not tighter.permits(name)
    assert not ToolRules(rules.allowed, (name,), rules.shell).permits(name)


@given(rules, names)
def test_allowing_fewer_never_permits_more(rules: ToolRules, name: str) -> None:
    fewer = ToolRules(() if rules.allowed is None else rules.allowed[:-1], rules.denied, shell=False)
    assert rules.permits(name) or not fewer.permits(name)
    assert EVERY_TOOL.permits(name) and not ToolRules((), (), shell=False).permits(name)


@pytest.mark.parametrize("shell", sorted(SHELLS))
def test_a_pattern_brings_no_shell_along_where_there_is_to_be_none(shell: str) -> None:
    assert not ToolRules(("*",), (), shell=False).permits(shell)
    assert ToolRules((shell,), (), shell=False).permits(shell), "only its own name does"
    assert not ToolRules(None, (), shell=False).permits(shell)


def test_the_rules_about_a_tool_are_about_its_name_wherever_it_lies() -> None:
    rules = ToolRules(("git",), (), shell=False)
    assert permitted(rules, "git", "log") and permitted(rules, "/usr/bin/git", "log")
    assert not permitted(rules, "/usr/bin/gitk") and not permitted(rules, "bash", "-c", "git log")
    assert permitted(ToolRules(("git",), (), shell=True), "bash", "-c", "git log")


def test_a_refusal_has_the_line_that_would_allow_it() -> None:
    tools = ToolRules(("git", "curl"), ("rm",), shell=False)
    verdict = decide(cloned(masks=(), tools=tools), (), RunCommand.of(["npm", "install"]), now=0.0)
    assert isinstance(verdict, Deny) and verdict.because.rule == "tools" and "--allow git,curl,npm" in verdict.because.remedy
    denied = decide(cloned(masks=(), tools=tools), (), RunCommand.of(["rm", "x"]), now=0.0)
    assert isinstance(denied, Deny) and "denies the tool 'rm'" in denied.because.why and "--allow" not in denied.because.remedy


def test_code_for_a_shell_needs_a_shell() -> None:
    code = RunCode.of("bash", b"git log")
    assert isinstance(decide(locked(processes=True, tools=ToolRules(("git",), (), shell=False)), (), code, now=0.0), Deny)
    assert isinstance(decide(locked(processes=True, tools=ToolRules(("git",), (), shell=True)), (), code, now=0.0), Allow)
    assert isinstance(decide(locked(tools=EVERY_TOOL), (), code, now=0.0), Allow), "without such rules any language runs"


@pytest.mark.parametrize("name", ["", ".", "..", "/usr/bin/git", "./git", "a\0b", "x[", "a\\b"])
def test_what_is_no_name_of_a_tool_is_refused(name: str) -> None:
    for allowed, denied in (((name,), ()), (None, (name,))):
        with pytest.raises(PolicyError) as refusal:
            ToolRules(allowed, denied)
        assert refusal.value.hint


def test_rules_about_tools_need_processes_to_rule_over() -> None:
    with pytest.raises(PolicyError, match="processes"):
        locked(tools=ToolRules(("git",)))


def test_policies_with_other_rules_about_tools_have_other_digests() -> None:
    def policy(*allowed: str) -> Policy:
        return cloned(masks=(), tools=ToolRules(allowed))

    assert policy("git").digest() == policy("git").digest() != policy("git", "curl").digest()


@pytest.mark.parametrize(
    ("name", "expected"),
    [("python3.11", True), ("node", True), ("bash", True), ("git", False), ("nodejs-thing", False), ("perl5.36.0", True)],
)
def test_programs_that_run_what_they_are_given_are_known(name: str, expected: bool) -> None:
    assert interprets(name) is expected
