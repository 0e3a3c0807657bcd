"""What was granted is on record, counted before it is used, and can be taken back at once."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from threading import Thread

import pytest

from agent_sandbox._fast.encoding import Seal
from agent_sandbox.engine.grants import Capabilities
from agent_sandbox.errors import LedgerUnavailable, PolicyError
from agent_sandbox.ledger.event import Noted
from agent_sandbox.ledger.writer import Ledger
from agent_sandbox.policy.action import RunCommand
from agent_sandbox.policy.tokens import Genuine, Only, RefusedToken, Times, Token, attenuate
from tests.ledger.samples import exit_code, in_child, read

GIT = (("run", "git", "**"),)
LOG = RunCommand.of(["git", "log"])


class Office:
    """Capabilities with a clock to turn."""

    def __init__(self, top: Path) -> None:
        self.now = 1000.0
        self.ledger = Ledger(top / "ledger", clock=lambda: self.now)
        self.directory = top / "capabilities"
        self.all = Capabilities(str(self.directory), Seal(b"k" * 32), self.ledger, clock=lambda: self.now)

    def grant(self, *, times: int | None = None, seconds: float = 60.0) -> Token:
        return self.all.grant("box", GIT, seconds=seconds, times=times, by="alice")

    def use(self, token: Token, sandbox: str = "box") -> str:
        found = self.all.use(token, LOG, sandbox=sandbox)
        return "" if isinstance(found, Genuine) else found.why

    def noted(self) -> list[str]:
        return [entry.event.what for entry in read(self.ledger.path) if isinstance(entry.event, Noted)]


@pytest.fixture
def office(tmp_path: Path) -> Office:
    return Office(tmp_path)


def test_a_capability_is_recorded_listed_used_and_taken_back_when_its_time_is_over(office: Office) -> None:
    token = office.grant(times=5)
    assert office.use(token) == "" and office.use(token, "another box") != ""
    (standing,) = office.all.standing()
    assert (standing.sandbox, standing.by, standing.limit, standing.used, standing.until) == ("box", "alice", 5, 1, 1060.0)
    office.now = 1060.0
    assert "expired" in office.use(token)
    assert office.all.standing() == [] and os.listdir(office.directory) == []
    assert office.noted() == ["capability.granted", "capability.ended"], "the return is on record, once"
    office.all.sweep()
    assert len(office.noted()) == 2


def test_it_is_used_as_often_as_it_says_and_what_was_derived_counts_together(office: Office) -> None:
    token = office.grant(times=3)
    narrow = attenuate(token, Times(2), Only((("run", "git", "log"),)))
    assert [office.use(each) for each in (narrow, token, narrow)] == ["", "", ""]
    assert "used up" in office.use(token) and "used up" in office.use(narrow)


def test_uses_are_counted_also_without_a_limit(office: Office) -> None:
    token = office.grant()
    assert office.all.standing()[0].limit is None and office.all.standing()[0].used == 0
    assert office.use(token) == office.use(token) == "" and office.all.standing()[0].used == 2
    assert office.use(attenuate(token, Only((("run", "nothing"),)))) and office.all.standing()[0].used == 2, "a refused use is none"


def test_a_use_that_is_refused_is_not_counted(office: Office) -> None:
    token = office.grant(times=2)
    narrow = attenuate(token, Times(1))
    assert office.use(narrow) == "" and "used up" in office.use(narrow) and "used up" in office.use(narrow)
    assert office.use(token) == "", "the limit above was not touched by the refusals"


def test_revoking_takes_effect_at_once_for_all_that_was_derived(office: Office) -> None:
    token = office.grant()
    narrow = attenuate(token, Times(9))
    office.all.revoke(narrow, by="bob")
    assert "revoked" in office.use(narrow) and "revoked" in office.use(attenuate(narrow, Times(1))) and office.use(token) == ""
    office.all.revoke(office.all.standing()[0].name, by="bob")
    assert "revoked" in office.use(token) and office.all.standing()[0].revoked
    assert office.noted() == ["capability.granted", "capability.revoked", "capability.revoked"]


@pytest.mark.parametrize("name", ["", "x", "../ledger", "0" * 32])
def test_what_is_not_there_cannot_be_revoked(office: Office, name: str) -> None:
    with pytest.raises(PolicyError, match="no capability"):
        office.all.revoke(name, by="bob")


def test_one_that_is_not_on_record_allows_nothing(office: Office) -> None:
    token = office.grant()
    (name,) = os.listdir(office.directory)
    (office.directory / name / "grant").unlink()
    assert "unknown capability" in office.use(token)


def test_what_cannot_be_recorded_is_not_granted(tmp_path: Path) -> None:
    office = Office(tmp_path)
    (tmp_path / "ledger").mkdir()
    with pytest.raises(LedgerUnavailable):
        office.grant()
    assert not office.directory.exists()


@pytest.mark.parametrize("what", [{"seconds": 0.0}, {"seconds": float("inf")}, {"times": 0}, {"seconds": float("nan")}])
def test_what_never_ends_or_never_begins_is_not_granted(office: Office, what: dict[str, float]) -> None:
    with pytest.raises(PolicyError, match="cannot grant"):
        office.grant(**what)  # type: ignore[arg-type]


def test_of_many_at_once_exactly_as_many_succeed_as_are_allowed(office: Office) -> None:
    token = office.grant(times=5)
    found: list[str] = []
    threads = [Thread(target=lambda: found.append(office.use(token))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.count("") == 5


@pytest.mark.parametrize("round", range(5))
def test_users_that_are_killed_never_had_more_than_was_allowed(office: Office, round: int) -> None:
    """What they did is said after it was counted; a use that was counted and not used is lost, never doubled."""
    token = office.grant(times=20)
    reader, writer = os.pipe()

    def use_for_ever() -> None:
        while isinstance(found := office.all.use(token, LOG, sandbox="box"), Genuine):
            os.write(writer, b".")
        assert isinstance(found, RefusedToken)
        signal.pause()

    children = [in_child(use_for_ever) for _ in range(4)]
    os.close(writer)
    done = len(os.read(reader, 1 + round))
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        exit_code(pid)
    while office.use(token) == "":
        done += 1
    while chunk := os.read(reader, 64):
        done += len(chunk)
    os.close(reader)
    assert done <= 20
    assert office.all.standing()[0].used == 20


def test_who_revokes_can_tell_what_goes_on_and_what_died(office: Office) -> None:
    token = office.grant()
    (standing,) = office.all.standing()
    assert office.all.going_on(standing.name) == [] == office.all.going_on("no name")
    ready, tell = os.pipe()
    go, let = os.pipe()
    pids: list[int] = []
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            os.close(let)
            office.all.mark(standing.name)
            os.write(tell, b".")
            os.read(go, 1)
            os._exit(0)
        pids.append(pid)
    os.read(ready, 1)
    while len(os.listdir(office.directory / standing.name)) < 3:
        continue
    own = office.all.mark(standing.name)
    os.read(ready, 1)
    assert office.all.going_on(standing.name) == sorted(pids), "our own is no news to us"
    os.kill(pids[0], signal.SIGKILL)
    os.waitpid(pids[0], 0)
    assert office.all.going_on(standing.name) == pids[1:], "and the dead hold nothing"
    os.close(let)
    os.waitpid(pids[1], 0)
    own.end()
    assert office.all.going_on(standing.name) == []
    assert sorted(os.listdir(office.directory / standing.name)) == ["grant"]
    mark = office.all.mark(standing.name)
    office.all.revoke(token, by="alice")
    office.now = 2000.0
    assert office.all.standing() == []
    mark.end()
    for fd in (ready, tell, go):
        os.close(fd)
