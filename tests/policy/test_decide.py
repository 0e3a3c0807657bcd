"""The decision is total, repeatable, and never loosened by tightening a policy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.action import FILE_READS, FILE_WRITES, LANGUAGES, Action, CallTool, Promote, RunCode, RunCommand, Undo, UseFile
from agent_sandbox.policy.decide import LARGEST_SOURCE, Allow, Ask, Deny, decide, granting, lifting
from agent_sandbox.policy.model import AskRules, FileRules, Guarantee, Policy, ProgramRules, cloned, locked, repeatable, required
from agent_sandbox.policy.paths import Beneath, Tree
from agent_sandbox.policy.secrets import Mask, default_masks

CLONED = cloned(masks=default_masks(homes=["/home/u"]))

paths = st.lists(st.sampled_from(["a", "b", ".c"]), max_size=3).map(lambda parts: "/" + "/".join(parts))
patterns = st.lists(st.builds(Tree, paths) | st.builds(Beneath, paths), max_size=3).map(tuple)
masks = st.lists(st.builds(Mask, paths, st.just("test")), max_size=2).map(tuple)
rules = st.builds(FileRules, st.booleans(), st.booleans(), patterns, patterns, st.booleans(), masks)


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    base, processes = locked(), draw(st.booleans())
    return replace(base, files=draw(rules), processes=processes, requires=required(processes, base.limits))


codes = st.builds(
    RunCode, st.sampled_from([*LANGUAGES, "cobol", ""]), st.just("0" * 64), st.integers(0, LARGEST_SOURCE + 1), st.none() | paths
)
classes = st.lists(st.sampled_from(["ci", "git-hooks", "setuid"]), max_size=2, unique=True).map(tuple)
promotions = st.builds(Promote, paths, st.just("0" * 64), st.integers(0, 9), classes, classes) | st.builds(Undo, paths, st.just("1"))
actions: st.SearchStrategy[Action] = codes | st.builds(RunCommand, st.just(("ls",)), st.none() | paths) | promotions


@st.composite
def tightened(draw: st.DrawFn) -> tuple[Policy, Policy]:
    """A policy, and one that allows at most as much."""
    policy = draw(policies())
    files = policy.files
    narrower = replace(
        files,
        read=files.read and draw(st.booleans()),
        write=files.write and draw(st.booleans()),
        allowed=files.allowed[: draw(st.integers(0, 3))],
        denied=files.denied + draw(patterns),
        allow_hidden=files.allow_hidden and draw(st.booleans()),
        masks=files.masks + draw(masks),
    )
    processes = policy.processes and draw(st.booleans())
    return policy, replace(policy, files=narrower, processes=processes, requires=required(processes, policy.limits))


@given(policies(), actions, st.floats())
def test_every_question_has_one_answer_with_a_reason(policy: Policy, action: Action, now: float) -> None:
    verdict = decide(policy, (), action, now=now)
    assert isinstance(verdict, Allow | Deny | Ask)
    assert verdict.because.rule and verdict.because.why
    assert isinstance(verdict, Allow) or verdict.because.remedy
    assert verdict == decide(replace(policy), (), replace(action), now=now)


@given(tightened(), actions)
def test_tightening_a_policy_never_turns_a_refusal_into_permission(pair: tuple[Policy, Policy], action: Action) -> None:
    policy, tighter = pair
    if isinstance(decide(policy, (), action, now=0), Deny):
        assert isinstance(decide(tighter, (), action, now=0), Deny)


@pytest.mark.parametrize("language", LANGUAGES)
def test_known_languages_may_run_in_both_presets(language: str) -> None:
    for policy in (locked(), CLONED):
        assert isinstance(decide(policy, (), RunCode.of(language, b"1"), now=0), Allow)


@pytest.mark.parametrize(
    ("policy", "action", "rule"),
    [
        (CLONED, RunCode.of("cobol", b"1"), "language"),
        (CLONED, RunCode.of("python", b""), "code-size"),
        (CLONED, RunCode("python", "0" * 64, 50_000_000), "code-size"),
        (locked(), RunCommand.of(["ls"]), "processes"),
        (locked(), RunCode.of("python", b"1", cwd="/home/u"), "cwd"),
        (CLONED, RunCommand.of(["ls"], cwd="/home/u/.ssh"), "cwd"),
        (locked(read=True, allowed=[Beneath("/data/x")]), RunCode.of("python", b"1", cwd="/data"), "cwd"),
        (locked(allowed=[Beneath("/data")]), RunCode.of("python", b"1", cwd="/data"), "cwd"),
        (locked(read=True, allowed=[Beneath("/data")], denied=[Tree("/data")]), RunCode.of("python", b"1", cwd="/data"), "cwd"),
    ],
)
def test_it_is_denied_by_the_rule_that_says_so(policy: Policy, action: Action, rule: str) -> None:
    verdict = decide(policy, (), action, now=0)
    assert isinstance(verdict, Deny)
    assert verdict.because.rule == rule


@pytest.mark.parametrize(
    ("policy", "action"),
    [
        (CLONED, RunCommand.of(["ls"], cwd="/home/u/project")),
        (locked(), RunCode.of("python", b"1", cwd="/tmp")),
        (locked(processes=True), RunCommand.of(["ls"])),
        (locked(read=True, allowed=[Tree("/data")]), RunCode.of("python", b"1", cwd="/data")),
        (locked(read=True, allowed=[Beneath("/data")]), RunCode.of("python", b"1", cwd="/data")),
    ],
)
def test_the_like_that_is_allowed_is_allowed(policy: Policy, action: Action) -> None:
    assert isinstance(decide(policy, (), action, now=0), Allow)


def test_protected_changes_need_their_own_yes() -> None:
    def verdict(*approved: str) -> object:
        return decide(CLONED, (), Promote("/srv/app", "0" * 64, 2, ("ci", "git-hooks"), approved), now=0.0)

    refused = verdict("ci")
    assert isinstance(refused, Deny) and refused.because.rule == "protected"
    assert "git-hooks" in refused.because.why and "--approve git-hooks" in refused.because.remedy
    assert isinstance(verdict("ci", "git-hooks"), Allow)


def test_a_sandbox_that_may_not_write_promotes_nothing() -> None:
    assert isinstance(decide(locked(), (), Promote("/srv/app", "0" * 64, 1), now=0.0), Deny)
    assert isinstance(decide(locked(), (), Undo("/srv/app", "1"), now=0.0), Deny)


def test_a_tool_is_called_only_if_the_policy_names_it() -> None:
    policy, call = locked(tools=["look"]), CallTool.of("look", b"{}")
    assert isinstance(decide(policy, (), call, now=0.0), Allow)
    refused = decide(policy, (), CallTool.of("burn", b"{}"), now=0.0)
    assert isinstance(refused, Deny) and refused.because.rule == "tool"
    assert call.digest() != CallTool.of("look", b"[]").digest()


def test_a_file_is_used_unless_it_is_hidden_and_changed_only_where_changes_are_allowed() -> None:
    shown = cloned(masks=(Mask("/srv/app/.env", "a secret"),))
    locked_up, reading = locked(), locked(read=True, allowed=[Tree("/data")])

    def rule(policy: Policy, operation: str, path: str) -> str:
        verdict = decide(policy, (), UseFile.of(operation, path), now=0.0)
        return "" if isinstance(verdict, Allow) else verdict.because.why

    for operation in (*FILE_READS, *FILE_WRITES):
        assert rule(shown, operation, "/srv/app/notes.txt") == ""
        assert "hides" in rule(shown, operation, "/srv/app/.env") and "hides" in rule(shown, operation, "/srv/app/.env/below")
        assert rule(locked_up, operation, "/tmp/x") == ""
        assert "does not show" in rule(locked_up, operation, "/srv/x") and "does not show" in rule(reading, operation, "/srv/x")
    assert [rule(reading, operation, "/data/x") for operation in FILE_READS] == ["", "", "", ""], "what exists is for the view to say"
    assert all("no changes of files" in rule(reading, operation, "/data/x") for operation in FILE_WRITES)
    assert rule(locked(read=True, allowed=[Beneath("/data")]), "list", "/data") == "", "where a pattern begins"
    assert "unknown operation" in rule(shown, "burn", "/srv/app/notes.txt")
    assert UseFile.of("write", "/a", b"1").digest() != UseFile.of("write", "/a", b"2").digest() != UseFile.of("write", "/a").digest()
    with pytest.raises(PolicyError):
        UseFile.of("read", "relative")


@pytest.mark.parametrize(
    ("effects", "operation", "asked"),
    [
        (("reads",), "read", "reads"),
        (("reads",), "write", ""),
        (("writes",), "write", "writes"),
        (("writes",), "list", ""),
        (("destroys",), "remove", "destroys"),
        (("destroys",), "mkdir", ""),
        (("writes",), "remove", "writes"),
        (("network",), "remove", ""),
    ],
)
def test_a_rule_about_effects_asks_about_files_too(effects: tuple[str, ...], operation: str, asked: str) -> None:
    policy = replace(cloned(masks=()), asks=AskRules(effects=effects))
    verdict = decide(policy, (), UseFile.of(operation, "/srv/app/x y"), now=0.0)
    if asked:
        assert isinstance(verdict, Ask) and f"of the kind {asked}" in verdict.because.why
        assert verdict.suggest == f"file {operation} '/srv/app/x y'"
    else:
        assert isinstance(verdict, Allow)


def test_a_repeatable_policy_requires_that_runs_are_the_same_and_changes_nothing_else() -> None:
    policy = repeatable(locked())
    assert policy.requires == locked().requires | {Guarantee.DETERMINISTIC}
    assert replace(policy, requires=locked().requires) == locked()


def test_what_a_person_would_type_is_quoted() -> None:
    assert granting("run git push") == "agent-sandbox grant 'run git push' --for 10m"
    assert lifting("x; y") == "agent-sandbox grant --elevate --allow 'x; y' --for 10m"


@pytest.mark.parametrize("name", ["*", "git*", "?url", "[a-z]*", "x,bash", "x bash", "$(id)", "x;reboot", "-h", "", "ｇit", "a'b", "x\n"])
def test_no_name_that_an_agent_chose_comes_back_as_a_line_that_allows_something_else(name: str) -> None:
    """A hint is copied, and an elevation is offered by the name of what was refused."""
    policy = cloned(masks=(), programs=ProgramRules((("git",),)))
    verdict = decide(policy, (), RunCommand.of([f"./{name}"]), now=0.0)
    assert isinstance(verdict, Deny) and "--allow" not in verdict.because.remedy and verdict.program == ""
    plain = decide(policy, (), RunCommand.of(["npm-7.x"]), now=0.0)
    assert isinstance(plain, Deny) and plain.because.remedy == "to allow it: --allow git,npm-7.x" and plain.program == "npm-7.x"


@pytest.mark.parametrize("words", [["git", "push", "**"], ["git", "push", "*"], ["git", "pu*"]])
def test_what_an_agent_typed_is_not_suggested_as_the_grant_of_more(words: list[str]) -> None:
    policy = replace(cloned(masks=()), asks=AskRules(effects=("network", "unknown")))
    asked = decide(policy, (), RunCommand.of(words), now=0.0)
    assert isinstance(asked, Ask) and asked.suggest == "" and "grant" not in asked.because.remedy
    exact = decide(policy, (), RunCommand.of(["git", "push", "o*x"]), now=0.0)
    assert isinstance(exact, Ask) and exact.suggest == "run git push 'o*x'"
