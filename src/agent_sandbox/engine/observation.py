"""The observed attempts of a run, judged by the policy that it ran under. They inform people, and never decide anything.

An attempt is judged by the path that it names, as the rules are written. Whether the call succeeded is not known here: a file that the
rules allow may not exist, and a link may lead to another file.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable

from agent_sandbox._fast.values import TYPE_CHECKING, replace
from agent_sandbox.engine.attachments import Attachment
from agent_sandbox.kernel.doors import OWN_ADDRESS, RESOLVER_PORT, proxy_port
from agent_sandbox.kernel.mount_plan import Bind, Copies, NewFile, Overlay, Symlink
from agent_sandbox.ledger.event import Facts
from agent_sandbox.policy.model import Policy
from agent_sandbox.policy.paths import contains
from agent_sandbox.policy.programs import LINE_SHELLS, reads_a_line
from agent_sandbox.runtime.base import Argv, Launch
from agent_sandbox.runtime.observe import CONNECT, EXECUTE, LISTEN, READ, RESOLVE, WRITE, Observed, SeenAttempt
from agent_sandbox.workspace.view.plan import PRIVATE

if TYPE_CHECKING:
    from agent_sandbox.egress.orders import FlowRecord
    from agent_sandbox.engine.gate import Gate
    from agent_sandbox.engine.work import Outcome
    from agent_sandbox.runtime.base import Completed, Guest

_CATEGORIES = {READ: "file", WRITE: "file", EXECUTE: "process", CONNECT: "network", RESOLVE: "network", LISTEN: "network"}
_MADE_ANEW = tuple(place for place in PRIVATE if place != "/sys")  # every run has its own, and may write to it


class Observation(Attachment):
    """Observes the attempts of a run, and judges them by its policy."""

    def __init__(self, gate: Gate, *, log: bool) -> None:
        """With `log` the observations are also recorded in the ledger, before the outcome of the run."""
        self._gate, self._log = gate, log

    def before(self, launch: Launch) -> Launch:
        """Return the launch with observation turned on."""
        return replace(launch, observe=True)

    def ended(self, guest: Guest, completed: Completed, outcome: Outcome) -> Outcome:
        """Add the judged attempts of the run, or of one turn, to the outcome. With `log`, also record them."""
        observed = judged(completed.observed, self._gate.policy, guest.launch)
        if guest.launch.network:
            observed = with_flows(observed, outcome.network, guest.launch.network)
        if self._log:
            for what, facts in map(noted, observed):
                self._gate.note(what, facts)
        return replace(outcome, observed=observed)


def judged(seen: Iterable[tuple[SeenAttempt, int]], policy: Policy, launch: Launch) -> tuple[Observed, ...]:
    """Judge the observed attempts of a launch. Return each once, with its count, in order of first appearance.

    Failed look-ups along a search path are left out, unless the program exists on the machine and the rules hide it.
    """
    judge = _Judge(policy, launch)
    counts: dict[tuple[str, str, str, bool], int] = {}
    for each, times in seen:
        allowed = judge.allows(each)
        if each.there or (not allowed and os.path.lexists(each.target)):
            key = (each.kind, each.target, each.program, allowed)
            counts[key] = counts.get(key, 0) + times
    return tuple(Observed(*key, times) for key, times in counts.items())


def with_flows(observed: Iterable[Observed], flows: Iterable[FlowRecord], ports: Collection[int]) -> tuple[Observed, ...]:
    """Replace the attempts that arrived at the egress by what it says of them: an observer sees addresses there, and no names.

    The program of a flow is known if only one program used its port.
    """
    kept: list[Observed] = []
    programs: dict[int, set[str]] = {}
    for each in observed:
        if each.kind == CONNECT and each.target == f"{OWN_ADDRESS}:{proxy_port(ports)}":
            continue  # what it asked our proxy for is a flow
        port = int(each.target.rpartition(":")[2]) if each.kind == CONNECT else RESOLVER_PORT if each.kind == RESOLVE else 0
        if port == RESOLVER_PORT or port in ports:
            programs.setdefault(port, set()).add(each.program)
        else:
            kept.append(each)
    counts: dict[tuple[str, str, str, bool], int] = {}
    for flow in flows:
        kind, port = (RESOLVE, RESOLVER_PORT) if flow.how == "dns" else (CONNECT, flow.port)
        by = programs.get(port, set())
        key = (kind, flow.target, next(iter(by)) if len(by) == 1 else "", not flow.refused)
        counts[key] = counts.get(key, 0) + flow.times
    return (*kept, *(Observed(*key, times) for key, times in counts.items()))


def noted(observed: Observed) -> tuple[str, Facts]:
    """Return the ledger's name and facts for an observation."""
    facts: Facts = {"target": observed.target, "program": observed.program, "allowed": observed.allowed, "times": observed.times}
    return f"{_CATEGORIES[observed.kind]}.{observed.kind}", facts


class _Judge:
    def __init__(self, policy: Policy, launch: Launch) -> None:
        self._policy = policy
        self._started = launch.executables[:1]  # the interpreter of code is started whatever the rules say
        self._line = isinstance(launch.program, Argv) and reads_a_line(launch.program.words)  # and so is the shell that reads a line
        steps = launch.root.steps
        trees = (step.target for step in steps if isinstance(step, Overlay | Bind | NewFile | Symlink))
        copied = [(step.target, (*step.entries, *(name for name, _ in step.contents))) for step in steps if isinstance(step, Copies)]
        self._shown = (*PRIVATE, *trees, *(os.path.join(target, entry) for target, entries in copied for entry in entries))

    def allows(self, seen: SeenAttempt) -> bool:
        if seen.kind == READ:
            files = self._policy.files
            return self._is_there(seen.target) and (files.read or not files.reaches(seen.target))
        if seen.kind == WRITE:
            return self._may_write(seen.target)
        if seen.kind == EXECUTE:
            return self._may_start(seen.target)
        return False  # what passes through the egress is judged there; nothing else leaves

    def _is_there(self, path: str) -> bool:
        """Return whether the guest's view has this path: a shown file, or a directory on the way to one."""
        files = self._policy.files
        if files.bars(path):
            return False
        return files.reaches(path) or files.leads_to(path) or any(contains(shown, path) or contains(path, shown) for shown in self._shown)

    def _may_write(self, path: str) -> bool:
        files = self._policy.files
        if files.bars(path):
            return False
        return any(contains(place, path) for place in _MADE_ANEW) or (files.write and (files.reaches(path) or files.leads_to(path)))

    def _may_start(self, path: str) -> bool:
        if path in self._started:
            return True
        programs, name = self._policy.programs, path.rpartition("/")[2]
        permitted = programs.permits(name) or (self._line and not programs.denies(name) and name in LINE_SHELLS)
        return permitted and self._is_there(path)
