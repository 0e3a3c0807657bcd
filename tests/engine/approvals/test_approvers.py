"""A token answers what the policy asks about, and nothing that it denies."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_sandbox.engine import gate as gate_module
from agent_sandbox.engine.approvals.approvers import CapabilityApprover
from agent_sandbox.engine.gate import Gate, Granted, Refused
from agent_sandbox.errors import Denied
from agent_sandbox.ledger.event import Intent
from agent_sandbox.policy.action import Action, RunCommand
from agent_sandbox.policy.decide import Ask, Reason
from agent_sandbox.policy.model import locked
from agent_sandbox.policy.tokens import Times, Token, attenuate
from tests.engine.test_grants import LOG, Office
from tests.ledger.samples import read

ASK = Ask(Reason("risky", "it is risky"), "x")


class Somebody:
    """A person who always says yes, and counts."""

    asked = 0

    def ask(self, action: Action, verdict: Ask, deadline: float) -> Granted | Refused:
        self.asked += 1
        return Granted("somebody")

    def end(self) -> None:
        self.asked = 0


@pytest.fixture
def office(tmp_path: Path) -> Office:
    return Office(tmp_path)


def approver(office: Office, *tokens: Token, somebody: Somebody | None = None) -> CapabilityApprover:
    return CapabilityApprover(office.all, tokens, sandbox="box", otherwise=somebody)


def test_a_token_that_covers_it_answers_and_nobody_is_asked(office: Office) -> None:
    somebody = Somebody()
    answer = approver(office, office.grant(), somebody=somebody).ask(LOG, ASK, 0.0)
    assert isinstance(answer, Granted) and answer.by.startswith("capability ") and somebody.asked == 0


def test_what_no_token_covers_is_for_somebody_or_refused(office: Office) -> None:
    somebody, other = Somebody(), RunCommand.of(["curl", "x"])
    assert approver(office, office.grant(), somebody=somebody).ask(other, ASK, 0.0) == Granted("somebody")
    refused = approver(office, office.grant()).ask(other, ASK, 0.0)
    assert isinstance(refused, Refused) and "does not cover" in refused.why
    assert isinstance(approver(office).ask(LOG, ASK, 0.0), Refused)


def test_revoked_used_up_and_expired_tokens_are_no_answer(office: Office) -> None:
    once, revoked, ended = attenuate(office.grant(), Times(1)), office.grant(), office.grant(seconds=1.0)
    office.all.revoke(revoked, by="bob")
    assert isinstance(approver(office, once).ask(LOG, ASK, 0.0), Granted)
    office.now += 2.0
    for token in (once, revoked, ended):
        assert isinstance(approver(office, token).ask(LOG, ASK, 0.0), Refused)


def test_through_the_gate_it_is_recorded_as_approved_and_a_revocation_counts_from_the_next_action_on(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = office.grant()
    gate = Gate(locked(), office.ledger, clock=lambda: office.now, approver=approver(office, token), sandbox="box")
    done: list[str] = []
    with pytest.raises(Denied):
        gate.perform(LOG, lambda _: done.append("denied by the policy, whatever a token says"))
    monkeypatch.setattr(gate_module, "decide", lambda *_, **__: ASK)
    gate.perform(LOG, lambda _: done.append("asked, and allowed"))
    office.all.revoke(token, by="bob")
    with pytest.raises(Denied, match="revoked"):
        gate.perform(LOG, lambda _: done.append("after the revocation"))
    assert done == ["asked, and allowed"]
    (intent,) = [entry.event for entry in read(office.ledger.path) if isinstance(entry.event, Intent)]
    assert intent.rule.startswith("approval of capability ") and intent.sandbox == "box"
