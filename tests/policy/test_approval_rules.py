"""What a policy wants somebody to agree to: rules only add questions, and what is not understood is asked about."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.action import Action, CallTool, Promote, RunCode, RunCommand, Undo
from agent_sandbox.policy.approval_rules import Word, question_about, touched
from agent_sandbox.policy.decide import Allow, Ask, Deny, decide
from agent_sandbox.policy.explanation import explain, lint
from agent_sandbox.policy.files.document import from_mapping
from agent_sandbox.policy.files.layers import effective
from agent_sandbox.policy.model import EFFECTS, LIFTABLE, NEEDS, AskRules, Policy, cloned, locked
from agent_sandbox.readers.shell.analyze import understand
from agent_sandbox.readers.shell.effects import EffectKind
from tests.policy.test_decide import actions, policies

OPEN = cloned(masks=())
PUSH = RunCommand.of(["git", "push", "origin", "main"])
CHANGE = Promote("/p", "0" * 64, 1)
PROTECTED = replace(CHANGE, protected=("ci",), approved=("ci",))


def some(known: tuple[str, ...]) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.sampled_from(known), max_size=3, unique=True).map(tuple)


rules = st.builds(
    AskRules,
    some(("git push **", "ls", "npm publish")),
    some(EFFECTS),
    some(("look*", "send")),
    st.booleans(),
    st.booleans(),
    st.none() | st.booleans(),
    st.none() | some(("alice", "bob")),
    some(NEEDS),
    st.none() | some(LIFTABLE),
)
calls = st.builds(CallTool, st.sampled_from(["look", "send", "other"]), st.just("0" * 64), st.just(1))
lines = st.sampled_from(["git push", "ls -l", "$(x) y", "if", "git -C /x push -f"])
all_actions: st.SearchStrategy[Action] = actions | calls | lines.map(lambda line: RunCommand.of(["bash", "-c", line]))


def verdict(asks: AskRules, action: Action, policy: Policy = OPEN) -> Allow | Deny | Ask:
    return decide(replace(policy, asks=asks), (), action, now=0.0)


@given(policies(), rules, all_actions)
def test_asking_never_allows_more_and_never_denies(policy: Policy, asks: AskRules, action: Action) -> None:
    before, after = decide(policy, (), action, now=0.0), verdict(asks, action, policy)
    if isinstance(before, Deny):
        assert after == before, "Deny counts more than Ask"
    else:
        assert isinstance(after, Ask | Allow)
        assert isinstance(after, Allow) or asks.asks
    assert after == verdict(asks, action, policy), "the same question has the same answer"


@given(rules, rules, all_actions)
def test_another_layer_never_asks_less_and_never_lets_more_people_answer(above: AskRules, below: AskRules, action: Action) -> None:
    both = above.narrowed(below)
    for one in (above, below):
        if question_about(one, action) is not None:
            assert question_about(both, action) is not None
        assert {*one.needs} <= {*both.needs}
        assert one.approvers is None or (both.approvers is not None and {*both.approvers} <= {*one.approvers})
        assert one.elevate is None or (both.elevate is not None and {*both.elevate} <= {*one.elevate})


@pytest.mark.parametrize(
    "line",
    [
        "git push",
        "git -C /elsewhere push --force",
        "cd x && /usr/bin/git push origin",
        "env A=1 git push",
        "x=push; git $x",
        "bash -c 'git push'",
        "echo a | xargs git push",
        "$(printf git) push",
        "eval \"$(echo Z2l0IHB1c2g= | base64 -d)\"",
        "g=git; p=$(cat name); $p push",
        "if then",
    ],
)  # fmt: skip
def test_a_command_is_asked_about_however_it_is_written_and_also_when_it_cannot_be_understood(line: str) -> None:
    asks = AskRules(commands=("git push **",))
    for action in (RunCommand.of(["bash", "-c", line]), _looked_at(asks, line)):
        found = verdict(asks, action)
        assert isinstance(found, Ask) and found.because.rule in ("approvals.commands", "approvals.opaque"), found


@pytest.mark.parametrize("line", ["git log", "ls -l", "npm install", "pushd x", "gittool=1 make test", "git pull"])
def test_what_no_rule_is_about_is_not_asked_about(line: str) -> None:
    asks = AskRules(commands=("git push **", "npm publish"))
    assert isinstance(verdict(asks, RunCommand.of(["bash", "-c", line])), Allow)
    assert isinstance(verdict(asks, _looked_at(asks, line)), Allow)


def _looked_at(asks: AskRules, line: str) -> RunCode:
    return replace(RunCode.of("bash", line.encode()), touches=touched(asks, understand(line)))


def test_code_in_bash_that_nobody_has_looked_at_is_asked_about() -> None:
    unseen = RunCode.of("bash", b"true")
    assert isinstance(verdict(AskRules(commands=("git push **",)), unseen), Ask)
    assert isinstance(verdict(AskRules(tools=("x",)), unseen), Allow), "where no rule is about commands, there is nothing to look for"


@pytest.mark.parametrize(
    ("asks", "action", "asked"),
    [
        (AskRules(effects=("network",)), PUSH, True),
        (AskRules(effects=("destroys",)), PUSH, False),
        (AskRules(effects=("destroys",)), RunCommand.of(["rm", "-rf", "x"]), True),
        (AskRules(effects=("network",)), RunCommand.of(["no-such-tool"]), True),  # what it does is not known
        (AskRules(effects=("network",), opaque=False), RunCommand.of(["no-such-tool"]), False),
        (AskRules(opaque=True), RunCommand.of(["bash", "-c", "$x"]), True),
        (AskRules(opaque=True), RunCommand.of(["bash", "-c", "no-such-tool"]), True),
        (AskRules(opaque=True), RunCommand.of(["bash", "-c", "ls | sort"]), False),
        (AskRules(commands=("git push",)), RunCommand.of(["/home/u/bash", "-c", "git push"]), True),  # who knows what that is
        (AskRules(effects=("runs-code",)), RunCode.of("python", b"1"), True),
        (AskRules(effects=("network",)), RunCode.of("python", b"1"), False),
        (AskRules(commands=("echo now",)), RunCommand.of(["bash", "-c", "echo now"]), True),  # no program, but the shell's own
        (AskRules(commands=("npm publish",)), RunCommand.of(["npm", "--tag", "x", "publish", "--dry-run"]), True),
        (AskRules(commands=("make dep*",)), RunCommand.of(["make", "deploy"]), True),
        (AskRules(commands=("make dep*",)), RunCommand.of(["make", "test"]), False),
        (AskRules(promotions=True), CHANGE, True),
        (AskRules(promotions=True), Undo("/p", "1"), True),
        (AskRules(protected=True), CHANGE, False),
        (AskRules(protected=True), PROTECTED, True),
        (AskRules(protected=True), Undo("/p", "1"), False),
        (AskRules(promotions=True), PUSH, False),
    ],
)
def test_each_rule_asks_about_its_own(asks: AskRules, action: Action, asked: bool) -> None:
    assert isinstance(verdict(asks, action), Ask if asked else Allow)


def test_a_tool_is_asked_about_by_its_name() -> None:
    policy = locked(tools=("look", "send_mail"))
    assert isinstance(verdict(AskRules(tools=("send_*",)), CallTool.of("send_mail", b"x"), policy), Ask)
    assert isinstance(verdict(AskRules(tools=("send_*",)), CallTool.of("look", b"x"), policy), Allow)
    assert isinstance(verdict(AskRules(tools=("send_*",)), CallTool.of("send_other", b"x"), policy), Deny), "it was never handed over"


def test_the_question_names_its_rule_and_the_line_that_would_permit_it() -> None:
    found = verdict(AskRules(commands=("git push **",)), RunCommand.of(["bash", "-c", "git push origin main"]))
    assert isinstance(found, Ask)
    assert found.because.rule == "approvals.commands" and "git push **" in found.because.why
    assert found.suggest == "run git push origin main"
    assert found.because.remedy == "agent-sandbox grant 'run git push origin main' --for 10m"


def test_every_effect_can_be_asked_about() -> None:
    assert {*EFFECTS} == {kind.value for kind in EffectKind}


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"commands": ("",)}, "not the words"),
        ({"commands": ("**",)}, "not the words"),
        ({"commands": ("git ** push",)}, "not the words"),
        ({"commands": ("git\x1bpush",)}, "not the words"),
        ({"commands": ("/bin/git push",)}, "not the name of a command"),
        ({"effects": ("evil",)}, "there is no effect 'evil'"),
        ({"tools": ("a/b",)}, "not the name"),
        ({"needs": ("luck",)}, "there is no need 'luck'"),
        ({"elevate": ("everything",)}, "there is no rule"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(wrong: dict[str, tuple[str, ...]], what: str) -> None:
    with pytest.raises(PolicyError, match=what):
        AskRules(**wrong)  # type: ignore[arg-type]


def test_obfuscation_is_asked_about_unless_that_is_switched_off() -> None:
    assert AskRules(commands=("git push",)).opaque and AskRules(effects=("network",)).opaque
    assert not AskRules(commands=("git push",), opaque=False).opaque and not AskRules().opaque


def test_a_policy_file_asks_and_is_explained() -> None:
    table = {
        "approvals": {
            "commands": ["git push **"],
            "effects": ["network"],
            "tools": ["send"],
            "promotions": True,
            "protected": True,
            "approvers": ["alice"],
            "high_risk": "another-user",
        }
    }
    layer = from_mapping(table, origin="a.toml")
    found = effective(OPEN, (layer, from_mapping({"approvals": {"approvers": ["bob"], "opaque": False}}, origin="b.toml")), home="/home/u")
    asks = found.policy.asks
    assert asks.opaque and asks.needs == ("another-user",) and asks.approvers == (), "nobody is in both lists"
    said = "\n".join(explain(found))
    for words in ("git push **", "network", "the tool send", "real files", "protected kinds", "analysed", "nobody", "another-user"):
        assert words in said
    assert lint((layer,)) == ()
    assert not any("approvals" in line for line in explain(effective(OPEN, (), home="/home/u")))
    for lifts, told in ((["limits"], "may relax limits"), ([], "may relax nothing")):
        lifting = from_mapping({"approvals": {"elevate": lifts}}, origin="d.toml")
        assert told in "\n".join(explain(effective(OPEN, (lifting,), home="/home/u")))
    wrong = {"approvals": {"approvers": ["a:b"]}}
    with pytest.raises(PolicyError, match="not the name of a user"):
        from_mapping(wrong, origin="c.toml")


@pytest.mark.parametrize(
    ("word", "needs", "approvers", "enough"),
    [
        (Word(7), (), None, True),
        (Word(7), (), {8}, False),
        (Word(8), (), {8}, True),
        (Word(7), ("another-user",), None, False),  # the one who asks
        (Word(0), ("another-user",), None, True),
        (Word(8), ("another-user",), None, False),  # not their name, and maybe an id of theirs for containers
        (Word(8), ("another-user",), {8}, True),
        (Word(7), ("another-user",), {7}, False),
        (Word(-1), ("another-user",), None, False),
        (Word(7), ("second-factor",), None, False),
        (Word(7, factor=True), ("second-factor",), None, True),
        (Word(7, factor=True), ("another-user", "second-factor"), None, False),
        (Word(0), ("another-user", "second-factor"), None, False),
        (Word(0, factor=True), ("another-user", "second-factor"), None, True),
    ],
)
def test_whose_word_is_enough(word: Word, needs: tuple[str, ...], approvers: set[int] | None, enough: bool) -> None:
    assert word.counts(needs, approvers, asker=7) is enough


@pytest.mark.parametrize(
    "line",
    ["cp /usr/bin/git x", "ln -s /usr/bin/git x", "python3 -c \"import os; os.system('git push')\"", "awk 'BEGIN{system(\"git push\")}'"],
)
def test_a_program_is_asked_about_also_where_it_is_handed_to_another(line: str) -> None:
    assert isinstance(verdict(AskRules(commands=("git push **",), opaque=False), RunCommand.of(["bash", "-c", line])), Ask)
