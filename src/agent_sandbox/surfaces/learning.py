"""`policy learn`: run commands on throw-away clones, watch them, and print the smallest policy that would have allowed what happened.

The policy goes to standard output; what the commands print, and what people should know, to standard error. Before it is printed it is
tried: the same commands run once more under it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from agent_sandbox import places
from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.learning import Ran, difference, propose
from agent_sandbox.engine.routing import Runtimes
from agent_sandbox.engine.session import Session
from agent_sandbox.engine.work import Command, Outcome, Work
from agent_sandbox.errors import RuntimeUnavailable, SandboxError
from agent_sandbox.policy.document import Document
from agent_sandbox.policy.model import Policy
from agent_sandbox.policy.narrowing import effective
from agent_sandbox.policy.proposal import Proposal, as_toml
from agent_sandbox.policy.widening import widened
from agent_sandbox.runtime.base import DEVNULL
from agent_sandbox.runtime.process import ProcessRuntime
from agent_sandbox.surfaces import streams
from agent_sandbox.surfaces.arguments import Request
from agent_sandbox.surfaces.current import ceiling_of, project_of
from agent_sandbox.surfaces.environment import guest_environment
from agent_sandbox.surfaces.messages import remark
from agent_sandbox.surfaces.performing import code_of, directory_of, say_how_it_ended
from agent_sandbox.surfaces.policies import layers_of
from agent_sandbox.values import dataclass, replace

_NOT_THE_SAME = 1


@dataclass(frozen=True)
class _Learnt:
    """What came of it: `differs` says how the commands ended differently under the proposal, one line for each that did."""

    proposal: Proposal
    code: int
    differs: tuple[str, ...]


def learn(request: Request, words: tuple[str, ...]) -> int:
    """The form `policy learn` of the verb `policy`."""
    commands = (Command(words),) if request.separated else tuple(Command(("bash", "-c", line)) for line in words)
    project = project_of(request)
    below = layers_of(project.path).below if request.has("--add") else ()
    own = next((layer for layer in below if layer.origin.startswith(project.path)), None)
    learnt = _learnt(request, commands, own)
    text = as_toml(learnt.proposal, heading=("what was seen to be needed by:", *(f"  {' '.join(_line(each))}" for each in commands)))
    if request.has("--json"):
        _print_json(learnt, text)
    else:
        sys.stdout.write(text)
    if not request.has("--quiet"):
        _tell(learnt)
    return learnt.code or (_NOT_THE_SAME if learnt.differs else 0)


def _learnt(request: Request, commands: tuple[Command, ...], own: Document | None) -> _Learnt:
    project = project_of(request)
    ceiling = ceiling_of(request, project)
    env = guest_environment(os.environ, request.values("--env"), home=places.home())
    works = [Work(each, env, cwd=directory_of(request, project), stdin=DEVNULL, on_output=aside, collect=False) for each in commands]
    with _runtimes() as runtimes:
        ran, codes = [], []
        for work in works:
            outcome, code = _run(_session(ceiling, runtimes, project.path), replace(work, observe=True))
            say_how_it_ended(work, outcome)
            ran.append(Ran(work, outcome))
            codes.append(code)
        if unseen := [each for each in ran if not each.outcome.observed and not each.outcome.refused]:
            raise RuntimeUnavailable(
                f"what {' '.join(_line(unseen[0].work.what))!r} did could not be observed",
                missing=("observer",),
                hint="; ".join(unseen[0].outcome.notes) or "see: agent-sandbox doctor",
            )
        proposal = propose(ran, ceiling, project=project.path, home=places.home())
        if own is not None:
            proposal = widened(own, proposal, home=places.home())
        differs = _tried(proposal, ran, ceiling, runtimes, project.path)
    return _Learnt(proposal, next((code for code in codes if code), 0), differs)


def _tried(proposal: Proposal, ran: list[Ran], ceiling: Policy, runtimes: Runtimes, project: str) -> tuple[str, ...]:
    """Run everything again under the proposal, silently."""
    policy = effective(ceiling, (proposal.document(),), home=places.home()).policy
    differs = []
    for each in ran:
        try:
            again, _ = _run(_session(policy, runtimes, project), replace(each.work, on_output=None, observe=True))
            how = difference(each.outcome, again)
        except SandboxError as error:
            how = error.message
        if how:
            differs.append(f"under the proposal {' '.join(_line(each.work.what))!r} does not end the same way: {how}")
    return tuple(differs)


def _session(policy: Policy, runtimes: Runtimes, project: str) -> Session:
    return Session(Gate(policy, places.ledger(), clock=time.time), runtimes, project=project)


def _run(session: Session, work: Work) -> tuple[Outcome, int]:
    with streams.forwarding() as forward:
        outcome = session.run(replace(work, on_start=forward.begin))
    return outcome, code_of(outcome.exit, forward.received)


@contextmanager
def _runtimes() -> Iterator[Runtimes]:
    """Commands are native programs, and those run in one runtime."""
    process = ProcessRuntime(single_threaded=True)
    try:
        yield Runtimes("process", lambda: process)
    finally:
        process.close(leaving=True)


def _line(what: object) -> tuple[str, ...]:
    """A command as it was typed."""
    assert isinstance(what, Command)
    return what.argv[2:] if what.argv[:2] == ("bash", "-c") else what.argv


def aside(name: str, data: bytes) -> None:
    """What a command prints, beside what we do."""
    streams.write_all(2, data)


def _tell(learnt: _Learnt) -> None:
    for words in learnt.proposal.left_out:
        remark(f"not proposed: {words}")
    for words in learnt.proposal.remarks:
        remark(words)
    for words in learnt.differs:
        remark(words)
    if not learnt.differs:
        remark("tried again under this policy: it ends the same way, with the same changes")


def _print_json(learnt: _Learnt, text: str) -> None:
    from agent_sandbox.surfaces.documents import print_document

    proposal = learnt.proposal
    settings = [
        {
            "key": line.key,
            "value": value,
            "because": because,
        }
        for line in proposal.lines
        for value, because in line.parts()
    ]
    told = {"left_out": list(proposal.left_out), "remarks": list(proposal.remarks), "differs": list(learnt.differs)}
    print_document("policy-learn", {"toml": text, "settings": settings, **told, "exit": learnt.code})
