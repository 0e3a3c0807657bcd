"""Actions are canonical, and hold no secrets."""

from __future__ import annotations

import pytest

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.action import LANGUAGES, Action, Promote, RunCode, RunCommand, Undo, canonical_language


def test_the_same_request_has_the_same_digest_however_it_is_spelt() -> None:
    one = RunCode.of("Python3", b"1", cwd="/a//b/", environment=["B", "A", "B"])
    other = RunCode.of("python", b"1", cwd=b"/a/./b", environment=["A", "B"])
    assert one == other
    assert one.digest() == other.digest()


def test_another_request_has_another_digest() -> None:
    actions: list[Action] = [
        RunCode.of("python", b"1"),
        RunCode.of("python", b"2"),
        RunCode.of("ruby", b"1"),
        RunCode.of("python", b"1", cwd="/a"),
    ]
    actions += [
        RunCommand.of(["a", "b"]),
        RunCommand.of(["a b"]),
        RunCommand.of(["a", "b"], environment=["X"]),
        RunCommand.of(["a", "\udcff"]),
    ]
    assert len({action.digest() for action in actions}) == 8


def test_an_action_holds_neither_source_nor_values() -> None:
    assert "hunter2" not in repr(RunCode.of("python", b"password = 'hunter2'", environment={"TOKEN": "hunter2"}))


def test_every_alias_leads_to_a_known_language_and_an_unknown_name_to_itself() -> None:
    assert {canonical_language(name) for name in ("python3", "JS", "node", "nodejs", "rb", "sh", "shell", *LANGUAGES)} == set(LANGUAGES)
    assert canonical_language("COBOL") == "cobol"


@pytest.mark.parametrize("argv", [[], [""], "ls -l", ["ls", "a\0b"]])
def test_a_command_that_cannot_be_is_refused(argv: list[str]) -> None:
    with pytest.raises(PolicyError):
        RunCommand.of(argv)


@pytest.mark.parametrize("name", ["", "A=B", "A\0"])
def test_a_name_that_no_variable_can_have_is_refused(name: str) -> None:
    with pytest.raises(PolicyError, match="environment variable"):
        RunCommand.of(["ls"], environment=[name])


@pytest.mark.parametrize("cwd", ["relative", "", "/a/../b"])
def test_a_working_directory_that_is_not_plain_is_refused(cwd: str) -> None:
    with pytest.raises(PolicyError):
        RunCode.of("python", b"1", cwd=cwd)


def test_an_undoing_has_a_digest_of_its_own() -> None:
    assert Undo("/srv", "1").digest() != Undo("/srv", "2").digest() != Promote("/srv", "0" * 64, 1).digest()


@pytest.mark.parametrize("name", ["", "A=B", "A\0B"])
def test_what_is_no_name_of_an_environment_variable_is_refused(name: str) -> None:
    with pytest.raises(PolicyError, match="not a name of an environment variable"):
        RunCode.of("python", b"1", environment=[name])
