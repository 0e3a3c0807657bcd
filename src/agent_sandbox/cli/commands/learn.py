"""`policy learn`: run commands on throw-away clones, watch them, and print the smallest policy that would have allowed what happened.

The policy goes to standard output; what the commands print, and what people should know, to standard error. Before it is printed it is
tried: the same commands run once more under it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from agent_sandbox._fast.encoding import sha256
from agent_sandbox._fast.values import dataclass, replace
from agent_sandbox.assembly import here
from agent_sandbox.cli import streams
from agent_sandbox.cli.change_list import current_and_whole
from agent_sandbox.cli.commands.diff import aside
from agent_sandbox.cli.context import Current, ceiling_of
from agent_sandbox.cli.environment import guest_environment
from agent_sandbox.cli.execute import code_of, directory_of, say_how_it_ended
from agent_sandbox.cli.parser import Request
from agent_sandbox.cli.render.messages import remark
from agent_sandbox.engine.learn import ObservedRun, difference, propose
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.runtimes import Runtimes
from agent_sandbox.engine.simulation.run import simulated
from agent_sandbox.engine.work import Command, Outcome, Work
from agent_sandbox.errors import RuntimeUnavailable, SandboxError
from agent_sandbox.policy.files.layers import effective, widened
from agent_sandbox.policy.model import Policy
from agent_sandbox.policy.proposal import Proposal, as_toml
from agent_sandbox.policy_files import chosen, layers_of
from agent_sandbox.runtime.base import DEVNULL
from agent_sandbox.runtime.process.runtime import ProcessRuntime
from agent_sandbox.workspace.saved_plans import Plans
from agent_sandbox.workspace.stored_sandbox import Stored

_NOT_THE_SAME = 1
_THE_SAME = "tried again under this policy: it ends the same way, with the same changes"
_OTHER_WORDS = "what it prints is not the same: it may hold the time of day, or miss something"
_INTERRUPTED = "not tried again: it was interrupted"
_NOT_TRIED = (
    "not tried again: what waits in the sandbox was there for the commands, and a policy that names files begins without it; "
    "promote it, or reset"
)


@dataclass(frozen=True)
class _Learnt:
    """What came of it: `differs` says how the commands ended differently under the proposal; `tried` is what else that showed."""

    proposal: Proposal
    code: int
    differs: tuple[str, ...]
    tried: tuple[str, ...]


@dataclass(frozen=True)
class _First:
    """A first run: what it was, what it printed by its digest, and how it ended."""

    ran: ObservedRun
    printed: str
    code: int
    interrupted: bool


def learn(request: Request, words: tuple[str, ...]) -> int:
    """The form `policy learn` of the verb `policy`."""
    commands = (Command(words),) if request.separated else tuple(Command(("bash", "-c", line)) for line in words)
    learnt = _learnt(request, commands)
    text = as_toml(learnt.proposal, heading=("what was seen to be needed by:", *(f"  {_typed(each)}" for each in commands)))
    if request.has("--json"):
        _print_document(learnt, text)
    else:
        sys.stdout.write(text)
    if not request.has("--quiet"):
        for left_out in learnt.proposal.left_out:
            remark(f"not proposed: {left_out}")
        for said in (*learnt.proposal.remarks, *learnt.differs, *learnt.tried):
            remark(said)
    return learnt.code or (_NOT_THE_SAME if learnt.differs else 0)


def _learnt(request: Request, commands: tuple[Command, ...]) -> _Learnt:
    found = current_and_whole(request)
    project, home = found.project.path, here().host.home
    ceiling = effective(ceiling_of(request, found.project), chosen(request.values("--policy")), home=home).policy
    env = guest_environment(os.environ, request.values("--env"), home=home)
    works = [Work(each, env, cwd=directory_of(request, found.project), stdin=DEVNULL, collect=False, observe=True) for each in commands]
    own = next((layer for layer in layers_of(project).below if layer.origin.startswith(f"{project}/")), None)
    with _runtimes() as runtimes:
        runs, waits = _first_runs(works, ceiling, runtimes, found)

        def proposed(*, named: bool) -> Proposal:
            proposal = propose([each.ran for each in runs], ceiling, project=project, home=home, named=named)
            return widened(own, proposal, home=home) if own is not None and request.has("--add") else proposal

        code = next((each.code for each in runs if each.code), 0)
        proposal = proposed(named=False)
        if waits or any(each.interrupted for each in runs):
            return _Learnt(proposal, code, (), (_NOT_TRIED if waits else _INTERRUPTED,))
        learnt = _Learnt(proposal, code, *_tried(proposal, runs, ceiling, runtimes, project))
        if learnt.differs and (more := proposed(named=True)).lines != proposal.lines:
            differs, tried = _tried(more, runs, ceiling, runtimes, project)
            return learnt if differs else _Learnt(more, code, differs, tried)
        return learnt


def _first_runs(works: list[Work], policy: Policy, runtimes: Runtimes, found: Current) -> tuple[list[_First], bool]:
    """Run everything on clones of the machine as the project's sandbox sees it. Also: whether anything waits in there."""
    runs, waits = [], False
    for work in works:
        session = _session(policy, runtimes, found.project.path)
        printed = _Printed(pass_on=True)
        with streams.forwarding() as forward:
            heard = replace(work, on_start=forward.begin, on_output=printed)
            if not found.state.exists:
                outcome = session.run(heard)
            else:
                with simulated(
                    session, heard, Plans(found.state.store), found.project.path, waiting=Stored(found.state), governed="", keep=False
                ) as made:
                    outcome = replace(made.outcome, changes=made.changes)
                    waits = waits or made.plan.on_the_sandbox
        say_how_it_ended(work, outcome)
        for note in outcome.notes:
            remark(note)
        _check_observed(work, outcome)
        runs.append(_First(ObservedRun(work, outcome), printed.digest, code_of(outcome.exit, forward.received), bool(forward.received)))
    return runs, waits


def _check_observed(work: Work, outcome: Outcome) -> None:
    """The start of the program at least is seen, where somebody watches."""
    if not outcome.observed and not outcome.refused:
        why = "; ".join(outcome.notes) or "see: agent-sandbox doctor"
        raise RuntimeUnavailable(f"what {_typed(work.what)!r} did could not be observed", missing=("observer",), hint=why)


def _tried(
    proposal: Proposal, runs: list[_First], ceiling: Policy, runtimes: Runtimes, project: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Run everything again under the proposal, silently. What is not the same, and what else is to be said."""
    policy = effective(ceiling, (proposal.document(),), home=here().host.home).policy
    differs, other_words = [], False
    for first in runs:
        printed = _Printed(pass_on=False)
        try:
            with streams.forwarding() as forward:
                work = replace(first.ran.work, on_start=forward.begin, on_output=printed)
                again = _session(policy, runtimes, project).run(work)
            if forward.received:
                return (), (_INTERRUPTED,)
            how = difference(first.ran.outcome, again)
        except SandboxError as error:
            how = error.message
        if how:
            differs.append(f"under this policy {_typed(first.ran.work.what)!r} does not end the same way: {how}")
        other_words = other_words or printed.digest != first.printed
    return tuple(differs), () if differs else (_THE_SAME, *((_OTHER_WORDS,) if other_words else ()))


class _Printed:
    """Listens to what a command prints."""

    def __init__(self, *, pass_on: bool) -> None:
        self._pass_on = pass_on
        self._streams = {"stdout": sha256(), "stderr": sha256()}

    def __call__(self, name: str, data: bytes) -> None:
        self._streams[name].update(data)
        if self._pass_on:
            aside(name, data)

    @property
    def digest(self) -> str:
        """The same for the same output, however it was interleaved."""
        return "".join(each.hexdigest() for each in self._streams.values())


def _session(policy: Policy, runtimes: Runtimes, project: str) -> Session:
    return here().session(here().gate(policy), runtimes, project=project)


@contextmanager
def _runtimes() -> Iterator[Runtimes]:
    """Commands are native programs, and one runtime has those."""
    process = ProcessRuntime(single_threaded=True)
    try:
        yield here().only(process)
    finally:
        process.close(leaving=True)


def _typed(what: object) -> str:
    """A command as it was typed."""
    assert isinstance(what, Command)
    return " ".join(what.argv[2:] if what.argv[:2] == ("bash", "-c") else what.argv)


def _print_document(learnt: _Learnt, text: str) -> None:
    from agent_sandbox.cli.render.json import print_document

    proposal = learnt.proposal
    settings = [{"key": line.key, "value": value, "because": because} for line in proposal.lines for value, because in line.parts()]
    said = {"left_out": list(proposal.left_out), "remarks": list(proposal.remarks), "differs": list(learnt.differs)}
    print_document("policy-learn", {"toml": text, "settings": settings, **said, "tried": list(learnt.tried), "exit": learnt.code})
