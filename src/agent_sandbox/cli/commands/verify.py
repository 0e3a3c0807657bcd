"""`verify`: attack real sandboxes on this machine, under this user's own policy, and say of each promise whether it held.

`doctor` asks what the machine can do; this asks what the product does with it. Nothing of the user's is changed, and nothing is left but
entries in the ledger: what runs in a sandbox is recorded, whoever asks for it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from agent_sandbox.assembly import here
from agent_sandbox.cli.context import policy_of, project_of, working_directory
from agent_sandbox.cli.environment import guest_environment
from agent_sandbox.cli.parser import Request, UsageError
from agent_sandbox.errors import PolicyError, SandboxError
from agent_sandbox.policy.model import Policy
from agent_sandbox.policy.paths import Tree
from agent_sandbox.policy.secrets import Mask
from agent_sandbox.selftest import probe
from agent_sandbox.selftest.bench import DecoyBench, Surroundings, aside, set_up
from agent_sandbox.selftest.boxes import Attempt, Box, NoAnswer
from agent_sandbox.selftest.probe import Probe, Result, Seen, judge, look
from agent_sandbox.selftest.probes import PROBES
from agent_sandbox.selftest.sandboxed import Cloned, Locked
from agent_sandbox.workspace.project import Project
from agent_sandbox.workspace.store import SandboxState, Store
from agent_sandbox.workspace.view.plan import PRIVATE

_ENDING = (signal.SIGTERM, signal.SIGHUP)


def verify(request: Request) -> int:
    """The verb `verify`. Exits with 1 when a promise was broken, or could not be tried for a reason that is not the machine's."""
    if request.value("--runtime") not in (None, "process"):
        raise UsageError(f"--runtime {request.value('--runtime')} is not there yet; there is: process", hint="verify without --runtime")
    began = time.monotonic()
    received: list[int] = []
    try:
        with _unwound_by_signals(received):
            results = _attack(request, progress=sys.stderr.isatty() and not request.has("--quiet"))
    except KeyboardInterrupt:
        return 128 + (received or [signal.SIGINT])[0]
    seconds = time.monotonic() - began
    failed = any(result.bad for result in results)
    remedies = _remedies(results) if failed else {}
    if request.has("--json"):
        from agent_sandbox.cli.render.json import print_document

        counts = {status: sum(result.status == status for result in results) for status in ("pass", "fail", "inconclusive")}
        told = {"held": not failed, "counts": counts, "seconds": round(seconds, 3), "results": probe.document(results, remedies)}
        print_document("verify", told)
    else:
        probe.table(results, remedies, seconds)
    return 1 if failed else 0


def _attack(request: Request, *, progress: bool) -> list[Result]:
    policy = policy_of(request, _project(request))
    environment = guest_environment(os.environ, request.values("--env"), home=here().host.home)
    store = Store.open(here().host.state)
    with (
        set_up(_places(policy), _surroundings(policy), forget=lambda bench: _forget(store, bench)) as bench,
        Cloned(bench, policy, environment, store.sandbox_for(bench.project)) as cloned,
    ):
        _must_run(cloned)
        with aside(lambda: look(PROBES, bench, bench.bare)) as control, aside(lambda: _locked(bench)) as locked:
            seen = {cloned.name: _in_the_foreground(bench, cloned, progress=progress), Locked.name: locked()}
            without = control()
    return [judge(probe, box, without[probe.name], seen[box][probe.name]) for probe in PROBES for box in probe.boxes]


def _locked(bench: DecoyBench) -> Seen:
    with Locked(bench) as box:
        _must_run(box)
        return look(_for(box), bench, box)


def _for(box: Box) -> list[Probe]:
    return [probe for probe in PROBES if box.name in probe.boxes]


def _in_the_foreground(bench: DecoyBench, box: Box, *, progress: bool) -> Seen:
    """The probes whose number is shown while one waits; the others are done aside, in less time."""
    mine = _for(box)

    def starting(probe: Probe) -> None:
        print(f"\r\x1b[K{mine.index(probe) + 1}/{len(mine)} {probe.name}", end="", file=sys.stderr, flush=True)

    try:
        return look(mine, bench, box, starting=starting) if progress else look(mine, bench, box)
    finally:
        if progress:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _must_run(box: Box) -> None:
    """Where no sandbox can be made there is nothing to attack. What is raised says why, and where to look."""
    try:
        box.run(Attempt("files", "nothing"))
    except NoAnswer as error:
        raise SandboxError(
            f"a sandbox starts, but nothing can be tried in it: {error.message}", hint="run: agent-sandbox doctor"
        ) from error


def _project(request: Request) -> Project:
    """The user's, for the policy. Where `run` would refuse the directory for being too much, its secrets are hidden all the same."""
    try:
        return project_of(request)
    except PolicyError:
        if request.has("--project"):
            raise
        return Project(working_directory())


def _surroundings(policy: Policy) -> Surroundings:
    hidden = [path for mask in policy.files.masks for path in _hidden_by(mask)]
    hidden += [pattern.path for pattern in policy.files.denied if isinstance(pattern, Tree)]
    return Surroundings(tuple(hidden), tuple(dict.fromkeys((here().host.home, working_directory()))), policy.system)


def _hidden_by(mask: Mask) -> list[str]:
    """What must not be there: the place itself or, where the directory stays, what the real one holds."""
    if not mask.stays:
        return [mask.path]
    try:
        return [f"{mask.path}/{name}" for name in sorted(os.listdir(mask.path))]
    except OSError:  # not there, or closed to us
        return []


def _places(policy: Policy) -> list[str]:
    """Where the sandbox shows what is planted: not in its private directories, and not where the policy hides it."""
    chosen = (os.environ["TMPDIR"],) if os.environ.get("TMPDIR") else ()
    candidates = [os.path.realpath(path) for path in (*chosen, "/var/tmp", here().host.home, working_directory())]
    return [path for path in candidates if policy.files.reaches(path) and not any((path + "/").startswith(f"{own}/") for own in PRIVATE)]


def _forget(store: Store, bench: DecoyBench) -> None:
    state: SandboxState = store.sandbox_for(bench.project)
    state.reset()
    with suppress(FileNotFoundError):
        os.unlink(os.path.join(store.path, "locks", state.id))


def _remedies(results: list[Result]) -> dict[str, list[str]]:
    """What `doctor` knows about what a broken promise rests on."""
    from agent_sandbox.cli.commands.doctor import examine
    from agent_sandbox.cli.remedies import Situation

    known = {row.name: row.remedy for row in examine(Situation.look()) if row.status != "ok" and row.remedy}
    return {
        result.probe.name: [f"{name}: {known[name]}" for name in result.probe.rests_on if name in known] for result in results if result.bad
    }


@contextmanager
def _unwound_by_signals(received: list[int]) -> Iterator[None]:
    """Let what ends a program by default unwind it instead, as Ctrl-C does, so that nothing is left behind."""

    def unwind(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in _ENDING}
    for number, handler in before.items():
        if handler is signal.SIG_DFL:
            signal.signal(number, unwind)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
