"""Names of programs: what is denied stays denied, and layers only narrow."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.action import RunCode, RunCommand
from agent_sandbox.policy.decide import Allow, Deny, decide
from agent_sandbox.policy.model import Guarantee, ProgramRules, locked

NAMES = ["git", "python3", "python", "rm", "bash", "mkfs.ext4", "curl"]
PATTERNS = st.sampled_from([*NAMES, "python*", "mkfs*", "*", "[g]it", "?m"])
groups = st.lists(PATTERNS, max_size=3).map(tuple)
rules = st.builds(ProgramRules, st.lists(groups, max_size=2).map(tuple), groups, st.booleans())


def test_a_name_has_to_be_in_every_group_and_in_none_that_is_denied() -> None:
    programs = ProgramRules((("git", "python*"), ("git", "curl")), ("curl",))
    assert [name for name in NAMES if programs.permits(name)] == ["git"]
    assert programs.permits("/usr/bin/git"), "a path is judged by its last name"
    assert not ProgramRules((("gitx",),)).permits("git")
    assert not ProgramRules((("git",),)).permits("gitx")


def test_without_a_shell_no_shell_is_permitted_even_if_it_is_listed() -> None:
    assert not ProgramRules((("bash",),), shell=False).permits("bash")
    assert ProgramRules((("bash",),)).permits("bash")


def test_what_restricts_nothing_says_so() -> None:
    assert not ProgramRules().restricts
    assert all(each.restricts for each in (ProgramRules(((),)), ProgramRules(denied=("rm",)), ProgramRules(shell=False)))


def test_what_an_allowed_tool_opens_is_named() -> None:
    programs = ProgramRules((("git", "cat", "python*", "bash", "perl"),), denied=("perl",))
    assert programs.opens() == ("git", "python*", "bash")


@settings(max_examples=60, deadline=None)
@given(rules, groups, groups, st.booleans(), st.sampled_from(NAMES))
def test_narrowing_never_permits_more(
    programs: ProgramRules, allowed: tuple[str, ...], denied: tuple[str, ...], shell: bool, name: str
) -> None:
    narrower = programs.narrowed(allowed=allowed, denied=denied, shell=shell)
    assert not narrower.permits(name) or programs.permits(name)
    assert programs.narrowed() == programs.narrowed().narrowed()


@pytest.mark.parametrize("name", ["", "a/b", "a\0b", "a[", "a\\b", 5])
def test_what_is_no_name_of_a_command_is_refused(name: str) -> None:
    with pytest.raises(PolicyError, match="command"):
        ProgramRules(((name,),))


def test_a_policy_that_names_tools_requires_that_they_are_confined() -> None:
    named = ProgramRules((("git",),))
    assert Guarantee.PROGRAMS_CONFINED in locked(processes=True, programs=named).requires
    assert Guarantee.PROGRAMS_CONFINED not in locked(processes=True).requires
    assert Guarantee.PROGRAMS_CONFINED not in locked(processes=False, programs=named).requires, (
        "without processes there is nothing to confine"
    )


@pytest.mark.parametrize(
    ("argv", "programs", "why", "remedy"),
    [
        (["npm", "install"], ProgramRules((("git", "curl"),)), "'npm'", "to allow it: --allow git,curl,npm"),
        (["bash", "-c", "git status && npm i"], ProgramRules((("git", "bash"),)), "'npm'", "--allow git,bash,npm"),
        (["sh", "-c", "ls"], ProgramRules(shell=False), "'sh'", "allow a shell"),
        (["rm", "x"], ProgramRules(denied=("r?",)), "'rm'", "take rm off the list of denied commands"),
        (["env", "rm", "x"], ProgramRules((("env",),)), "'rm'", "--allow env,rm"),
        (["bash", "-c", "bash x.sh"], ProgramRules((("git",),)), "'bash'", "--allow git,bash"),
        (["bash", "x.sh"], ProgramRules((("git",),)), "'bash'", "--allow git,bash"),
        (["npm"], ProgramRules((tuple("abcdefghijklmnop"),)), "'npm'", "to allow it: add npm to the commands that are allowed"),
    ],
)
def test_a_program_that_is_not_allowed_is_refused_with_the_line_that_would_allow_it(
    argv: list[str], programs: ProgramRules, why: str, remedy: str
) -> None:
    verdict = decide(locked(processes=True, programs=programs), (), RunCommand.of(argv), now=0.0)
    assert isinstance(verdict, Deny) and verdict.because.rule == "programs"
    assert why in verdict.because.why and remedy in verdict.because.remedy


def test_a_command_line_whose_tools_are_known_is_refused_like_a_command() -> None:
    policy = locked(processes=True, programs=ProgramRules((("git",),)))
    refused = decide(policy, (), RunCode.of("bash", b"npm i", programs=("npm",)), now=0.0)
    assert isinstance(refused, Deny) and "--allow git,npm" in refused.because.remedy
    assert isinstance(decide(policy, (), RunCode.of("bash", b"git log", programs=("git",)), now=0.0), Allow)
    assert isinstance(decide(policy, (), RunCommand.of(["git", "log"]), now=0.0), Allow)
    assert isinstance(decide(policy, (), RunCommand.of(["bash", "-c", "git log"]), now=0.0), Allow), "the shell that reads it is ours"
    without_shell = locked(processes=True, programs=ProgramRules((("git",),), shell=False))
    assert isinstance(decide(without_shell, (), RunCommand.of(["bash", "-c", "git log"]), now=0.0), Deny)
    without = decide(locked(), (), RunCode.of("bash", b"ls", programs=("ls",)), now=0.0)
    assert isinstance(without, Deny) and without.because.rule == "processes"


def test_a_line_may_be_run_by_a_shell_that_no_group_names() -> None:
    lines = ProgramRules((("git",),), lines=True)
    assert lines.permits("bash") and lines.permits("sh") and not lines.permits("zsh") and not lines.permits("npm")
    assert not ProgramRules((("git",),), ("bash",), lines=True).permits("bash")
    assert not ProgramRules((("git",),), shell=False, lines=True).permits("bash")
    npm = decide(locked(processes=True, programs=lines), (), RunCommand.of(["bash", "-c", "git log && npm i"]), now=0.0)
    assert isinstance(npm, Deny) and "--allow git,npm" in npm.because.remedy
    assert isinstance(decide(locked(processes=True, programs=lines), (), RunCommand.of(["bash", "-c", "git log"]), now=0.0), Allow)


def test_code_for_a_shell_is_refused_where_there_is_to_be_none() -> None:
    refused = decide(locked(programs=ProgramRules(shell=False)), (), RunCode.of("bash", b"ls"), now=0.0)
    assert isinstance(refused, Deny) and "allow_shell=True" in refused.because.remedy


@given(rules, st.sampled_from(NAMES))
def test_what_is_denied_is_not_permitted_whatever_else_its_file_is_called(programs: ProgramRules, name: str) -> None:
    assert not (programs.denies(name) and programs.permits(name))
    assert bool(programs.denies("x", name)) == bool(programs.denies("x") or programs.denies(name))
