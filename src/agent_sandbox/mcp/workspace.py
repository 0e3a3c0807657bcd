"""The sandbox that a server owns: the project's stored sandbox, under the policy of the server's command line.

The policy is read anew before each call, so a file that a person changes counts at once. A call may narrow it. An elevation that a person
granted counts for the calls after it. The work of a call runs with the environment of `agent-sandbox run`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from agent_sandbox import policy_files
from agent_sandbox._calls import Run
from agent_sandbox._fast.values import replace
from agent_sandbox.assembly import here
from agent_sandbox.cli import elevation
from agent_sandbox.cli.commands.promote import (
    PromoteResult,
    nothing_to_promote,
    promotion_facts,
    promotion_result,
    wanted_by,
)
from agent_sandbox.cli.context import ProjectSandbox, effective_of, pending_in, project_of, provisions_for
from agent_sandbox.cli.execute import ChangeCounts, RunResult, change_counts, code_of, run_result
from agent_sandbox.cli.options import CommandOptions, PromoteOptions
from agent_sandbox.engine import promote as engine_promote
from agent_sandbox.engine.experiment.outcome import carry_attempt, proposed_attempt
from agent_sandbox.engine.gate import APPROVAL_SECONDS, Gate, Refused
from agent_sandbox.engine.recover import recovered
from agent_sandbox.engine.review import diff_for_approver
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.simulation.run import Simulated, simulated
from agent_sandbox.engine.work import Code, Command
from agent_sandbox.errors import Denied, PolicyError
from agent_sandbox.mcp.calls import ServedCall
from agent_sandbox.mcp.person import PersonQuestions, elevation_question
from agent_sandbox.network_changes import NetworkChanges
from agent_sandbox.policy.decide import Deny, Reason
from agent_sandbox.policy.elevation import Elevation
from agent_sandbox.policy.files.document import from_mapping
from agent_sandbox.policy.files.layers import Effective, narrowed
from agent_sandbox.policy.model import OFFLINE, AskRules, Policy, cloned, limited, with_network
from agent_sandbox.workspace.saved_plans import Plans
from agent_sandbox.workspace.store import Store
from agent_sandbox.workspace.stored_sandbox import Stored
from agent_sandbox.workspaces import Workspace, in_a_thread

if TYPE_CHECKING:
    from agent_sandbox.engine.approvals.inbox import Inbox
    from agent_sandbox.engine.code_check import EarlyLook
    from agent_sandbox.engine.gate import Approver
    from agent_sandbox.engine.promote import PromotionProposal, Wanted
    from agent_sandbox.policy.tokens import Token
    from agent_sandbox.workspace.experiment_store import AttemptState

DEFAULT_SECONDS = 600.0  # of one call; a policy may set less
_PROMOTIONS = AskRules(promotions=True)
_SHOWN = ("/usr", "/etc")  # of the machine, to Python sessions, beside the project


class ServedWorkspace(Workspace):
    """The workspace of a server. It serves one call at a time: `begin` sets the call that the next methods work for."""

    def __init__(
        self, options: CommandOptions, env: Mapping[str, str], tokens: Sequence[Token] = (), questions: PersonQuestions | None = None
    ) -> None:
        """`options` are those of `agent-sandbox mcp`, and `env` is the environment of what it runs.

        `tokens` are capabilities of a person. Raises `PolicyError` for a project or policy that cannot be used.
        """
        place = project_of(options.project)
        self._options, self._place = options, place
        self._left: Callable[[], float] | None = None  # until an elevation of the present call expires
        self.call = ServedCall("", {})
        effective = effective_of(options.policy, place)
        self._effective = effective
        stored = Stored(Store.open(here().host.state).sandbox_for(place.path))
        self.questions = questions or PersonQuestions(stored.state.id, tokens)
        super().__init__(stored, cloned(masks=()))
        self._env = dict(env)
        self._provisions = provisions_for(options, self._policy, place)
        if options.intent is not None:
            self.intent(options.intent)

    def twin(self) -> ServedWorkspace:
        """Return another workspace of the same sandbox and questions, for an experiment, which closes it."""
        twin = ServedWorkspace(self._options, self._env, questions=self.questions)
        twin.call = self.call
        return twin

    def begin(self, call: ServedCall) -> None:
        """Work for this call from now on."""
        self.call = call
        call.ends_by(self.kill)

    def _bounded(self, policy: Policy, config: object) -> policy_files.Bound:
        """Return the policy of the command line, which the policy files have narrowed already."""
        effective = self._effective
        return policy_files.Bound(effective.policy, policy_files.early_look(effective), effective.warnings)

    def _gate_of(self, policy: Policy, sandbox: str = "", *, in_person: bool = False) -> Gate:
        asks = policy.asks_somebody or in_person
        approver = self.questions.approver(policy, lambda: self.call, in_person=in_person) if asks else None
        return here().gate(policy, approver=approver, sandbox=sandbox or self.id)

    def _decider(self, policy: Policy) -> Approver:
        return self.questions.approver(policy, lambda: self.call)

    def _search_again(self) -> None:
        """Read the policy again, with the secrets that have appeared since."""
        self._effective = effective_of(self._options.policy, self._place)
        if self._effective.policy != self._policy:
            self._policy = self._effective.policy
            self._early = policy_files.early_look(self._effective)
            self._gate = self._gate_of(self._policy)
            if self._changes is None and self._policy.network.outbound:  # a person has opened one since
                self._changes = NetworkChanges(self.id, here().ledger(), self._decider, self.project)
            self._provisions = provisions_for(self._options, self._policy, self._place)

    def policy_of_call(self) -> Policy:
        """Return the policy in force for the present call: with elevations first, then narrowed by the call itself."""
        policy, self._left = self._policy, None
        if os.path.isdir(here().host.elevations):  # rarely there
            lifted = elevation.lifted(policy, self.id)
            if lifted is not None:
                policy, self._left = lifted.policy, lifted.left
        if self.call.narrow is not None:
            policy = narrowed(Effective(policy), self.call.narrow, home=here().host.home).policy
        return policy

    @contextmanager
    def _session(self, run: Run, timeout: float | None) -> Iterator[Session]:
        self._runs.begin(run)
        try:
            self._search_again()
            policy = self.policy_of_call()
            limits = policy.limits
            if timeout is not None and (limits.wall_seconds is None or timeout < limits.wall_seconds):
                policy = limited(policy, replace(limits, wall_seconds=timeout))
            gate = self._gate_of(policy)
            if self.call.cancelled:  # before the run was registered
                run.cancel()
            try:
                yield here().session(
                    gate,
                    here().runtimes(self._runtime),
                    project=self.project,
                    state=self._kept.state,
                    on_busy=lambda busy: self._await_turn(run, busy),
                    beside=in_a_thread,
                    early=self._early,
                    provisions=self._provisions if policy.network.outbound else None,
                    control=self._changes.control if self._changes is not None and policy.network.outbound else None,
                )
            finally:
                gate.end()
        finally:
            self._runs.end(run)

    def perform(self, what: Code | Command, *, stdin: bytes = b"", cwd: str | None = None, timeout: float | None = None) -> RunResult:
        """Run work for the present call, as `agent-sandbox run` does."""
        run = Run()
        with self._session(run, timeout or DEFAULT_SECONDS) as session:
            work = replace(self._work(run, what, stdin=stdin, env_vars=None, args=(), cwd=cwd), on_output=self.call.output, left=self._left)
            outcome = session.run(work)
            counts = self._counts(session.policy)
            return run_result(work, outcome, session.policy, self.project, code_of(outcome.exit, []), counts)

    def _counts(self, policy: Policy) -> ChangeCounts:
        return change_counts(pending_in(ProjectSandbox(self._place, self._kept.state), policy), self.project, kept=True)

    @contextmanager
    def simulating(self, what: Code | Command, *, stdin: bytes, cwd: str | None, timeout: float | None) -> Iterator[Simulated]:
        """Simulate work for the present call. The plan is not kept."""
        run = Run()
        work = self._work(run, what, stdin=stdin, env_vars=None, args=(), cwd=cwd)
        recovered(self._stored, self._gate)
        with (
            self._session(run, timeout or DEFAULT_SECONDS) as session,
            simulated(
                session,
                replace(work, on_output=self.call.output, left=self._left),
                Plans(self._stored.state.store),
                self.project,
                waiting=self._stored,
                governed=session.policy.digest(),
                on_busy=session.on_busy,
                keep=False,
            ) as simulation,
        ):
            yield simulation

    def promoted(self, options: PromoteOptions, attempt: AttemptState | None = None) -> PromoteResult:
        """Promote changes, or those of an attempt, if a person says yes to exactly these. Raises as `agent-sandbox promote` does.

        The question names each protected kind. Capabilities approve a promotion only if it has no protected kind.
        """
        self._search_again()
        wanted = wanted_by(options, self.project)
        policy = replace(self._policy, asks=self._policy.asks.narrowed(_PROMOTIONS))
        recovered(self._stored, self._gate)
        with self._proposed(policy, wanted, attempt) as proposal:
            if not proposal.changes and not proposal.settled:
                return promotion_result(proposal, proposal.plan(), "", "nothing-to-do", nothing_to_promote(proposal))
            kinds = tuple(proposal.protected())
            gate = self._gate_of(policy, in_person=bool(kinds))
            agreed = proposal.approving(frozenset(kinds))
            self.call.kinds = kinds
            try:
                carry = engine_promote.carry_out if attempt is None else carry_attempt
                done = carry(agreed, self._stored, gate, details=lambda: diff_for_approver(agreed))
            finally:
                self.call.kinds = ()
                gate.end()
            return replace(promotion_result(agreed, agreed.plan(), "", "promoted", None), done=promotion_facts(done))

    @contextmanager
    def _proposed(self, policy: Policy, wanted: Wanted, attempt: AttemptState | None) -> Iterator[PromotionProposal]:
        if attempt is None:
            with engine_promote.proposed(self._stored, policy, wanted, here().process) as proposal:
                yield proposal
        else:
            with proposed_attempt(attempt, self._stored, policy, wanted, here().process) as proposal:
                yield proposal

    def elevate(self, what: Elevation, *, seconds: float, reason: str) -> str:
        """Ask a person to lift rules for a time, and lift them. Return the elevation in words. Raises `Denied` if that is refused."""
        self._search_again()
        policy, lifts = self._policy, what.describe()
        elevation.check_elevation(policy, what)
        deadline = time.time() + APPROVAL_SECONDS
        question = elevation_question(policy, self.id, lifts, seconds, f"the agent asks for it: {reason}", deadline)
        answer = self.questions.ask(question, policy, self.call)
        if isinstance(answer, Refused):
            because = Reason("approval", f"it lifts rules, and it was not approved: {answer.why}", "ask the user")
            raise Denied(f"denied: {because.why}", verdict=Deny(because), hint=because.remedy)
        elevation.begin(policy, self.id, what, seconds=seconds, by=answer.by, word=answer.word)
        return lifts

    def policy_of_sessions(self) -> Policy:
        """Return the policy of Python sessions: the present one without a network, with the project and the machine's programs alone.

        A timeline cannot keep the whole machine: it exchanges the layers of whole directories.
        """
        self._search_again()
        policy = self.policy_of_call()
        policy = with_network(policy, OFFLINE) if policy.network.outbound else policy
        if policy.programs.restricts:  # each program is a mount of its own then, in layers that would have to be exchanged
            raise PolicyError("there are no python sessions under a list of programs", hint="use the tool run with code")
        shown = from_mapping({"files": {"allowed": [self.project, *filter(os.path.isdir, _SHOWN)]}}, origin="python")
        return narrowed(Effective(policy), shown, home=here().host.home).policy

    def elevated_seconds(self) -> float | None:
        """Return the seconds until the policy that was last returned loses an elevation; None if it has none."""
        return None if self._left is None else self._left()

    def _changeable(self) -> NetworkChanges:
        if self._changes is None:
            raise PolicyError("this sandbox has no network", hint="the user can start the server with --network HOST")
        return super()._changeable()

    @property
    def stored(self) -> Stored:
        """The stored sandbox."""
        return self._stored

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the person who starts the server: warnings of the policy files, and what is not as wished."""
        return (*self._effective.warnings, *(self._provisions.notes if self._provisions is not None else ()))

    def inbox(self) -> Inbox:
        """Return the inbox of questions under the present policy."""
        return here().inbox(policy=self._policy)

    def current_policy(self) -> Policy:
        """Return the policy of the server as it is now."""
        self._search_again()
        return self._policy

    def most_seconds(self) -> float | None:
        """Return the wall time that the policy allows a piece of work."""
        return self._policy.limits.wall_seconds

    @property
    def early(self) -> EarlyLook | None:
        """The check of code before it runs, if the policy files ask for one."""
        return self._early

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment of the work."""
        return self._env
