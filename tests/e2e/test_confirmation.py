"""Verbs that destroy something ask a person first. Without a terminal they need --yes, and else change nothing."""

from __future__ import annotations

import pytest

from tests.e2e.program import Shell, words
from tests.e2e.sitting import sitting

pytestmark = pytest.mark.once


@pytest.fixture
def promoted(shell: Shell) -> Shell:
    """A project with a promotion that can be undone, a snapshot that can be forgotten, and a change that can be reset."""
    assert shell("run", "echo promoted > canary.txt").returncode == 0 and shell("promote", "--yes").returncode == 0
    assert shell("run", "echo pending > pending.txt").returncode == 0 and shell("snapshot", "kept").returncode == 0
    return shell


def _canaries(shell: Shell) -> tuple[bool, bool, bool]:
    """Whether the promoted file, the snapshot and the pending change are there."""
    kept = b"kept" in shell("snapshots").stdout
    return (shell.cwd / "canary.txt").exists(), kept, b"pending.txt" in shell("diff").stdout


DESTROYING = [(("undo",), 0), (("snapshots", "--forget", "kept"), 1), (("reset",), 2)]


@pytest.mark.parametrize(("verb", "canary"), DESTROYING, ids=["undo", "forget", "reset"])
def test_nothing_is_destroyed_without_a_terminal_and_without_yes(promoted: Shell, verb: tuple[str, ...], canary: int) -> None:
    assert _canaries(promoted) == (True, True, True)
    for more in ((), ("--quiet",), ("--json",)):
        refused = promoted(*verb, *more)
        assert refused.returncode == 3, (verb, more, refused)
        assert "needs --yes" in (refused.stdout.decode() if more == ("--json",) else words(refused))
    assert _canaries(promoted) == (True, True, True)
    assert promoted(*verb, "--yes").returncode == 0
    assert not _canaries(promoted)[canary], "with --yes it does destroy, so the canary can die"


@pytest.mark.parametrize(("verb", "canary"), DESTROYING, ids=["undo", "forget", "reset"])
def test_at_a_terminal_a_person_is_asked_and_no_is_no(promoted: Shell, verb: tuple[str, ...], canary: int) -> None:
    with sitting(promoted, *verb) as person:
        person.expect(b"[y/N] ")
        person.type(b"n\r")
        person.expect(b"nothing was changed")
        assert person.end() == 3
    assert _canaries(promoted) == (True, True, True)
    with sitting(promoted, *verb) as person:
        person.expect(b"[y/N] ")
        person.type(b"y\r")
        assert person.end() == 0
    assert not _canaries(promoted)[canary]


def test_a_rollback_needs_no_yes_because_it_loses_nothing(promoted: Shell) -> None:
    assert promoted("run", "echo later > later.txt").returncode == 0
    assert promoted("rollback", "kept").returncode == 0 and b"later.txt" not in promoted("diff").stdout
    before = max(each["id"] for each in promoted.json("snapshots")["snapshots"])
    assert promoted("rollback", str(before)).returncode == 0 and b"later.txt" in promoted("diff").stdout
