"""The lists of a person: what runs directly, what is asked about, and when the file is not to be trusted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.coding_agents.contracts.claude import CLAUDE
from agent_sandbox.coding_agents.contracts.codex import CODEX
from agent_sandbox.coding_agents.contracts.gemini import GEMINI
from agent_sandbox.coding_agents.decide import decide
from agent_sandbox.coding_agents.rules import FILE, PersonRules, account_file, read_rules
from agent_sandbox.coding_agents.shell_words import quote
from agent_sandbox.coding_agents.tool_calls import AgentCall, Answer, AskPerson, Leave, Refuse, Rewrite
from agent_sandbox.errors import PolicyError

RULES = PersonRules(direct=("git status", "git log *"), ask=("git push *", "make deploy"), tools=("WebFetch", "mcp__github__*"))


def answer(command: str, rules: PersonRules = RULES) -> Answer:
    return decide(AgentCall("Bash", {"command": command}, "/p"), CLAUDE.tools, rules, lambda each: f"<{each}>")


@pytest.mark.parametrize("command", ["git status", " git  status ", "git log", "git log --oneline -5 src/a.py"])
def test_a_listed_command_is_left_to_the_program(command: str) -> None:
    assert answer(command) == Leave()
    assert answer(command, PersonRules()) == Rewrite({"command": f"<{command}>"}), "the control: by default nothing runs directly"


@pytest.mark.parametrize(
    "command",
    [
        *("git status -s", "git", "gitstatus", "git statusx", "/usr/bin/git status", "git log; rm -rf /", "git log && ls", "git log | sh"),
        *(
            "git log > x",
            "git log $(ls)",
            "git log `ls`",
            "git log\nls",
            "git log *",
            "git log 'x'",
            "git log \\x",
            "git log ~",
            "X=1 git log",
        ),
        *("git log #", "git log {a,b}", "git log\tx", "git log !x", "git log [a]", "git log ?", "GIT_DIR=x git status", "", " "),
    ],
)
def test_anything_but_plain_words_of_a_listed_command_goes_into_the_sandbox(command: str) -> None:
    assert answer(command) == Rewrite({"command": f"<{command}>"})


@given(st.text(max_size=30))
def test_no_letter_of_a_shell_gets_out_beside_a_listed_command(tail: str) -> None:
    if RULES.runs_directly(f"git log {tail}"):
        assert all(letter.isalnum() or letter in " _@%+:,./-" for letter in tail) and tail.isascii()


def test_a_person_is_asked_where_the_program_can_ask() -> None:
    asked = answer("git push origin main")
    assert isinstance(asked, AskPerson) and asked.input == {"command": "<git push origin main>"}
    assert '"ask"' in CLAUDE.reply(asked).output and '"updatedInput"' in CLAUDE.reply(asked).output
    assert '"ask"' in GEMINI.reply(asked).output and '"tool_input"' in GEMINI.reply(asked).output
    assert '"deny"' in CODEX.reply(asked).output, "it takes a question for a failed hook, and would go on"
    assert isinstance(answer("make deploy"), AskPerson) and isinstance(answer("make"), Rewrite)


def test_a_command_that_the_model_rewrites_itself_is_asked_about_too() -> None:
    def wrapped(command: str) -> str:
        return f"x -- {quote(command)}"

    def of(command: str) -> Answer:
        return decide(AgentCall("Bash", {"command": command}, "/p"), CLAUDE.tools, RULES, wrapped)

    assert of("x -- 'git push origin'") == AskPerson({"command": "x -- 'git push origin'"}, of("git push origin").why)  # type: ignore[union-attr]
    assert of("x -- 'git pull'") == Rewrite({"command": "x -- 'git pull'"})


def test_a_listed_tool_is_left_to_the_program() -> None:
    def of(tool: str, rules: PersonRules) -> Answer:
        return decide(AgentCall(tool, {}, "/p"), CLAUDE.tools, rules, str)

    assert of("WebFetch", RULES) == of("mcp__github__x", RULES) == Leave()
    assert all(isinstance(of(tool, PersonRules()), Refuse) for tool in ("WebFetch", "mcp__github__x"))
    assert isinstance(of("mcp__gitlab__x", RULES), Refuse)


def test_without_a_file_nothing_is_listed(tmp_path: Path) -> None:
    assert read_rules(str(tmp_path / "missing")) == read_rules("") == read_rules(str(tmp_path / "no" / "directory")) == PersonRules()


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text('direct = ["git status", "git log *"]\nask = ["git push *", "make deploy"]\ntools = ["WebFetch", "mcp__github__*"]\n')
    path.chmod(0o600)
    assert read_rules(str(path)) == RULES


@pytest.mark.parametrize(
    "text",
    [
        *("direct = 1", "direct = [1]", "direct = ['']", "direct = ['*']", "direct = ['ls; rm']", "direct = ['ls | cat']", "direct ="),
        *("dirct = ['ls']", "[direct]", "ask = 'ls'", "tools = [' ']", "direct = ['ls *.py']", "\x00"),
    ],
)
def test_a_broken_file_is_an_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(PolicyError):
        read_rules(str(path))


def test_a_file_that_others_can_write_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text("direct = ['ls']\n")
    for mode in (0o620, 0o602):
        path.chmod(mode)
        with pytest.raises(PolicyError, match="others can write"):
            read_rules(str(path))
    path.chmod(0o600)
    assert read_rules(str(path)).direct == ("ls",)
    with pytest.raises(PolicyError, match="no settings file"):
        read_rules(str(tmp_path))


def test_no_variable_chooses_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = account_file()
    assert before == "" or before.endswith(f"/{FILE}")
    for name in ("HOME", "XDG_CONFIG_HOME", "AGENT_SANDBOX_STATE"):
        monkeypatch.setenv(name, str(tmp_path))
    assert account_file() == before and os.environ["HOME"] == str(tmp_path)
