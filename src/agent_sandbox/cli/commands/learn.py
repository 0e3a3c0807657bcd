"""`policy learn`: run commands on throw-away clones, observe them, and print the smallest policy that would have allowed them.

The policy goes to standard output; output of the commands and messages go to standard error. Before the policy is printed, the same
commands run again under it, as a test.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from agent_sandbox._fast.encoding import sha256
from agent_sandbox._fast.values import dataclass, replace
from agent_sandbox.assembly import here
from agent_sandbox.cli.caller import EscapedOutput, forwarding, guest_environment
from agent_sandbox.cli.context import ProjectSandbox, ceiling_of, current_and_whole
from agent_sandbox.cli.execute import code_of, directory_of, refusal, say_how_it_ended, variables_of
from agent_sandbox.cli.options import PolicyVerbOptions
from agent_sandbox.cli.render.messages import Console, remark
from agent_sandbox.cli.results import VerbResult
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

_THE_SAME = "tried again under this policy: it ends the same way, with the same changes"
_OTHER_WORDS = "its output is not the same: it may hold the time of day, or miss something"
_INTERRUPTED = "not tried again: it was interrupted"
_NOT_TRIED = (
    "not tried again: the commands saw changes in the sandbox, and a policy that names files begins without them; promote them, or reset"
)


@dataclass(frozen=True)
class _Learnt:
    """A proposed policy, and the results of running the commands under it; see `PolicyLearnResult`."""

    proposal: Proposal
    code: int
    differs: tuple[str, ...]
    tried: tuple[str, ...]


@dataclass(frozen=True)
class _First:
    """The first run of a command, before there is a proposal: the digest of its output, and how it ended."""

    ran: ObservedRun
    printed: str
    code: int
    interrupted: bool


@dataclass(frozen=True)
class SettingFacts:
    """A setting of a proposed policy, and the action that needs it."""

    key: str
    value: object
    because: str


@dataclass(frozen=True)
class PolicyLearnResult(VerbResult):
    """A proposed policy. The commands ran again under it: `differs` lists those that ended differently, `tried` other remarks."""

    kind = "policy-learn"

    toml: str
    settings: tuple[SettingFacts, ...]
    left_out: tuple[str, ...]
    remarks: tuple[str, ...]
    differs: tuple[str, ...]
    tried: tuple[str, ...]
    exit: int

    @property
    def code(self) -> int:
        """The exit code of the commands. If that is 0 and a command ended differently under the proposal: 1."""
        return self.exit or (1 if self.differs else 0)

    def text(self, console: Console) -> None:
        sys.stdout.write(self.toml)
        self.say(console)

    def say(self, console: Console) -> None:
        """Print the settings that were not proposed, the remarks, and the differences."""
        for each in self.left_out:
            console.note(f"not proposed: {each}")
        for each in (*self.remarks, *self.differs, *self.tried):
            console.note(each)


def learn(options: PolicyVerbOptions, console: Console) -> PolicyLearnResult:
    """Learn a policy from commands."""
    commands = tuple(Command(words) for words in options.commands)
    learnt = _learnt(options, commands)
    proposal = learnt.proposal
    text = as_toml(proposal, heading=("needed by these commands:", *(f"  {_typed(each)}" for each in commands)))
    settings = tuple(SettingFacts(line.key, value, because) for line in proposal.lines for value, because in line.parts())
    result = PolicyLearnResult(text, settings, tuple(proposal.left_out), tuple(proposal.remarks), learnt.differs, learnt.tried, learnt.code)
    if not console.shows:
        result.say(console)
    return result


def _learnt(options: PolicyVerbOptions, commands: tuple[Command, ...]) -> _Learnt:
    run = options.run
    sandbox = current_and_whole(run.project, run.policy)
    project, home = sandbox.project.path, here().host.home
    ceiling = effective(ceiling_of(run.policy, sandbox.project), chosen(run.policy.files), home=home).policy
    env, cwd = guest_environment(os.environ, variables_of(run), home=home), directory_of(run, sandbox.project)
    works = [Work(each, env, cwd=cwd, stdin=DEVNULL, collect=False, observe=True) for each in commands]
    own = next((layer for layer in layers_of(project).below if layer.origin.startswith(f"{project}/")), None)
    with _runtimes() as runtimes:
        runs, waits = _first_runs(works, ceiling, runtimes, sandbox)

        def proposed(*, named: bool) -> Proposal:
            proposal = propose([each.ran for each in runs], ceiling, project=project, home=home, named=named)
            return widened(own, proposal, home=home) if own is not None and options.add else proposal

        code = next((each.code for each in runs if each.code), 0)
        proposal = proposed(named=False)
        if waits or any(each.interrupted for each in runs):
            return _Learnt(proposal, code, (), (_NOT_TRIED if waits else _INTERRUPTED,))
        learnt = _Learnt(proposal, code, *_tried(proposal, runs, ceiling, runtimes, project))
        if learnt.differs and (more := proposed(named=True)).lines != proposal.lines:
            differs, tried = _tried(more, runs, ceiling, runtimes, project)
            return learnt if differs else _Learnt(more, code, differs, tried)
        return learnt


def _first_runs(works: list[Work], policy: Policy, runtimes: Runtimes, sandbox: ProjectSandbox) -> tuple[list[_First], bool]:
    """Run all commands on clones of the project's sandbox. Return the runs, and whether the sandbox has changes."""
    runs, waits = [], False
    for work in works:
        session = _session(policy, runtimes, sandbox.project.path)
        printed = _Printed(pass_on=True)
        with forwarding() as forward:
            heard = replace(work, on_start=forward.begin, on_output=printed)
            if not sandbox.state.exists:
                outcome = session.run(heard)
            else:
                with simulated(
                    session,
                    heard,
                    Plans(sandbox.state.store),
                    sandbox.project.path,
                    waiting=Stored(sandbox.state),
                    governed="",
                    keep=False,
                    send=True,
                ) as made:
                    outcome = replace(made.outcome, changes=made.changes)
                    waits = waits or made.plan.on_the_sandbox
        say_how_it_ended(refusal(work, outcome), outcome.exit.reason, outcome.exit.limits_hit)
        for note in outcome.notes:
            remark(note)
        _check_observed(work, outcome)
        printed.finish()
        runs.append(_First(ObservedRun(work, outcome), printed.digest, code_of(outcome.exit, forward.received), bool(forward.received)))
    return runs, waits


def _check_observed(work: Work, outcome: Outcome) -> None:
    """Raise `RuntimeUnavailable` if nothing of a run was observed, not even the start of its program."""
    if not outcome.observed and not outcome.refused:
        why = "; ".join(outcome.notes) or "see: agent-sandbox doctor"
        raise RuntimeUnavailable(f"{_typed(work.what)!r} could not be observed", missing=("observer",), hint=why)


def _tried(
    proposal: Proposal, runs: list[_First], ceiling: Policy, runtimes: Runtimes, project: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Run all commands again under the proposal, without showing output. Returns the differences, and other remarks."""
    policy = effective(ceiling, (proposal.document(),), home=here().host.home).policy
    differs, other_words = [], False
    for first in runs:
        printed = _Printed(pass_on=False)
        try:
            with forwarding() as forward:
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
    """Computes the digest of a command's output, and prints the output if `pass_on` is set."""

    def __init__(self, *, pass_on: bool) -> None:
        self._output = EscapedOutput(aside=True) if pass_on else None
        self._streams = {"stdout": sha256(), "stderr": sha256()}

    def __call__(self, name: str, data: bytes) -> None:
        self._streams[name].update(data)
        if self._output is not None:
            self._output.pass_on(name, data)

    def finish(self) -> None:
        """Print the bytes of an incomplete character at the end of the output."""
        if self._output is not None:
            self._output.finish()

    @property
    def digest(self) -> str:
        """The digests of stdout and stderr. They do not depend on the order in which the two were interleaved."""
        return "".join(each.hexdigest() for each in self._streams.values())


def _session(policy: Policy, runtimes: Runtimes, project: str) -> Session:
    return here().session(here().gate(policy), runtimes, project=project)


@contextmanager
def _runtimes() -> Iterator[Runtimes]:
    """Yield only the process runtime, because commands are native programs."""
    process = ProcessRuntime(single_threaded=True)
    try:
        yield here().only(process)
    finally:
        process.close(leaving=True)


def _typed(what: object) -> str:
    """Return a command as it was typed."""
    assert isinstance(what, Command)
    return " ".join(what.argv[2:] if what.argv[:2] == ("bash", "-c") else what.argv)
