"""`verify`: attack real sandboxes on this machine, under this user's own policy, and report for each promise whether it held.

`doctor` tests features of the machine; `verify` tests whether the sandbox keeps its promises with them. No file of the user is changed.
Only entries in the ledger remain, because every run is recorded.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Literal

from agent_sandbox._fast.values import dataclass, replace
from agent_sandbox.assembly import here
from agent_sandbox.cli.caller import guest_environment, unwound_by_signals
from agent_sandbox.cli.context import policy_of, project_of, working_directory
from agent_sandbox.cli.options import VerifyOptions
from agent_sandbox.cli.render.messages import Console, Style, shown
from agent_sandbox.cli.results import InterruptedResult, VerbResult
from agent_sandbox.errors import PolicyError, SandboxError
from agent_sandbox.policy.model import Policy
from agent_sandbox.policy.paths import Tree
from agent_sandbox.policy.secrets import Mask
from agent_sandbox.selftest.bench import DecoyBench, Surroundings, aside, set_up
from agent_sandbox.selftest.boxes import Bare
from agent_sandbox.selftest.differences import DIFFERENCES
from agent_sandbox.selftest.probe import BOXES, CHOSEN, CONTAINER, PRODUCT, SDK, WASM, Absent, Probe, Seen, judge, look, look_inside
from agent_sandbox.selftest.probe import Result as ProbeResult
from agent_sandbox.selftest.probes import PROBES
from agent_sandbox.selftest.product import Product
from agent_sandbox.selftest.sandboxed import Cloned, Compiled, Locked, OnRuntime
from agent_sandbox.selftest.walls import judge_walls
from agent_sandbox.workspace.project import Project
from agent_sandbox.workspace.store import SandboxState, Store
from agent_sandbox.workspace.view.plan import PRIVATE

_WIDTH = 13  # of the status column


@dataclass(frozen=True)
class ProbeFacts:
    """The result of one probe (an attack) in one kind of sandbox (`box`), with the promise that it tests (`claim`)."""

    probe: str
    box: str
    status: Literal["pass", "fail", "inconclusive"]
    claim: str
    tried: str
    why: str | None
    reached: Mapping[str, str]
    shown: tuple[str, ...]
    unshown: tuple[str, ...]
    excused: bool
    remedies: tuple[str, ...]


@dataclass(frozen=True)
class WallFacts:
    """The verdict on one protection (`wall`). `attacked_by` are probes, or single ways of a probe; empty if nothing attacks the wall.

    `absent`: this machine does not have the wall, or refuses the attack without it, too. `not shown`: the attack could not be tried.
    """

    wall: str
    status: Literal["held", "broken", "absent", "not shown", "not attacked"]
    says: str
    why: str | None
    attacked_by: tuple[str, ...]


@dataclass(frozen=True)
class VerifyResult(VerbResult):
    """The results of all attacks, one for each promise and kind of sandbox, and the verdict on each wall, also on those not attacked."""

    kind = "verify"

    held: bool
    counts: dict[str, int]
    seconds: float
    results: tuple[ProbeFacts, ...]
    walls: tuple[WallFacts, ...]

    @property
    def code(self) -> int:
        """1 if a promise was broken, or could not be tested although the machine permits the test; else 0."""
        return 0 if self.held else 1

    def text(self, console: Console) -> None:
        _table(self.results, console.style)
        _tell_walls(self.walls, console.style)
        print(f"\n{console.style.heading(_verdict(self))}")


def verify(options: VerifyOptions, console: Console) -> VerbResult:
    """Attack sandboxes on this machine, and report which promises held."""
    began = time.monotonic()
    received: list[int] = []
    try:
        with unwound_by_signals(received):
            results = _attack(options, progress=sys.stderr.isatty() and not console.quiet)
    except KeyboardInterrupt:
        return InterruptedResult((received or [signal.SIGINT])[0])
    held = not any(result.bad for result in results)
    counts = {status: sum(result.status == status for result in results) for status in ("pass", "fail", "inconclusive")}
    facts = _facts(results, {} if held else _remedies(results))
    return VerifyResult(held, counts, round(time.monotonic() - began, 3), facts, _wall_facts(results))


def _attack(options: VerifyOptions, *, progress: bool) -> list[ProbeResult]:
    policy = policy_of(options.policy, _project(options))
    image, policy = policy.image, replace(policy, image="")  # `run` is attacked on the machine, and an image beside it
    chosen = [name for name, wanted in ((CONTAINER, image), (options.runtime, options.runtime)) if wanted]
    attacks = _ASIDE | {name: _on_runtime(name, image if name == CONTAINER else "") for name in chosen}
    store = Store.open(here().host.state)
    with set_up(_places(policy), _surroundings(policy), forget=lambda bench: _forget(store, bench)) as bench:
        # Not before the bench is set up, as `run` would: it has put a secret into our environment, which must not come along.
        environment = guest_environment(os.environ, options.env, home=here().host.home)
        cloned = Cloned(bench, policy, environment, store.sandbox_for(bench.project))
        with ExitStack() as stack:
            others = {box: stack.enter_context(aside(lambda attack=attack: attack(bench))) for box, attack in attacks.items()}  # type: ignore[misc]
            seen = {cloned.name: _in_the_foreground(bench, cloned, progress=progress)}
            seen |= {box: _seen_aside(box, result) for box, result in others.items()}
    without = seen[Bare.name]
    return [
        judge(probe, box, without.get(probe.name, ""), seen[box][probe.name])
        for probe in PROBES
        for box in (*probe.boxes, *(chosen if SDK in probe.boxes else ()))
    ]


def _bare(bench: DecoyBench) -> Seen:
    return look(_for(Bare.name), bench, bench.bare)


def _locked(bench: DecoyBench) -> Seen:
    return look_inside(Locked(bench), _for(SDK), bench)


def _on_runtime(name: str, image: str) -> Callable[[DecoyBench], Seen]:
    different = DIFFERENCES.get(name, {})
    tried = [probe for probe in _for(name) if probe.name not in different]

    def attack(bench: DecoyBench) -> Seen:
        return {probe: Absent(why) for probe, why in different.items()} | look_inside(OnRuntime(bench, name, image=image), tried, bench)

    return attack


def _compiled(bench: DecoyBench) -> Seen:
    with Compiled() as box:
        return look(_for(WASM), bench, box)


def _product(bench: DecoyBench) -> Seen:
    return look(_for(PRODUCT), bench, Product())


_ASIDE: dict[str, Callable[[DecoyBench], Seen]] = {Bare.name: _bare, SDK: _locked, WASM: _compiled, PRODUCT: _product}


def _for(box: str) -> list[Probe]:
    """Return the probes that run in this box. On the bare machine these are all that do not show by themselves that they can succeed."""
    box = SDK if box in CHOSEN else box
    return [probe for probe in PROBES if (not probe.own_control if box == Bare.name else box in probe.boxes)]


def _seen_aside(box: str, result: Callable[[], Seen]) -> Seen:
    """Return what the probes of a box saw in a fork of ours. If the fork broke, none of them has shown anything."""
    try:
        return result()
    except SandboxError as error:
        return dict.fromkeys((probe.name for probe in _for(box)), str(error))


def _in_the_foreground(bench: DecoyBench, cloned: Cloned, *, progress: bool) -> Seen:
    """Run the probes of one kind of sandbox, the slowest, and show their progress. The others run in parallel."""
    mine = _for(cloned.name)

    def starting(probe: Probe) -> None:
        if progress:
            print(f"\r\x1b[K{mine.index(probe) + 1}/{len(mine)} {probe.name}", end="", file=sys.stderr, flush=True)

    try:
        return look_inside(cloned, mine, bench, starting=starting)
    finally:
        if progress:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _project(options: VerifyOptions) -> Project:
    """Return the project whose policy is tested.

    In `/` and in the home directory, where `run` refuses to work, the current directory stands in for a project.
    """
    try:
        return project_of(options.project)
    except PolicyError:
        if options.project is not None:
            raise
        return Project(working_directory())


def _surroundings(policy: Policy) -> Surroundings:
    hidden = [path for mask in policy.files.masks for path in _hidden_by(mask)]
    hidden += [pattern.path for pattern in policy.files.denied if isinstance(pattern, Tree)]
    return Surroundings(tuple(hidden), tuple(dict.fromkeys((here().host.home, working_directory()))), policy.system)


def _hidden_by(mask: Mask) -> list[str]:
    """Return the paths that a mask must hide: its own path or, if it shows an empty directory there, the real entries in it."""
    if not mask.stays:
        return [mask.path]
    try:
        return [f"{mask.path}/{name}" for name in sorted(os.listdir(mask.path))]
    except OSError:  # not there, or closed to us
        return []


def _places(policy: Policy) -> list[str]:
    """Return real directories that a sandbox shows under this policy, without those that are private to each sandbox."""
    chosen = (os.environ["TMPDIR"],) if os.environ.get("TMPDIR") else ()
    candidates = [os.path.realpath(path) for path in (*chosen, "/var/tmp", here().host.home, working_directory())]
    return [path for path in candidates if policy.files.reaches(path) and not any((path + "/").startswith(f"{own}/") for own in PRIVATE)]


def _forget(store: Store, bench: DecoyBench) -> None:
    state: SandboxState = store.sandbox_for(bench.project)
    state.reset()
    with suppress(FileNotFoundError):
        os.unlink(os.path.join(store.path, "locks", state.id))


def _remedies(results: list[ProbeResult]) -> dict[str, list[str]]:
    """Return, for each probe that failed, the remedies that `doctor` gives for the kernel features it depends on."""
    from agent_sandbox.cli.commands.doctor import examine  # only after a failure
    from agent_sandbox.cli.remedies import Situation

    try:
        known = {row.name: row.remedy for row in examine(Situation.look()) if row.status != "ok" and row.remedy}
    except Exception as error:  # what breaks a sandbox may break the doctor, too, and must not end the verdict
        return {result.probe.name: [f"doctor could not look for a remedy: {error}"] for result in results if result.bad}
    return {
        result.probe.name: [f"{name}: {known[name]}" for name in result.probe.rests_on if name in known] for result in results if result.bad
    }


def _facts(results: Sequence[ProbeResult], remedies: Mapping[str, Sequence[str]]) -> tuple[ProbeFacts, ...]:
    """Return the results of probes as facts for the output."""
    return tuple(
        ProbeFacts(
            result.probe.name,
            result.box,
            result.status,
            result.probe.claim,
            result.probe.tries,
            result.why or None,
            result.reached,
            result.shown,
            result.unshown,
            result.excused,
            tuple(remedies.get(result.probe.name, ())),
        )
        for result in results
    )


def _wall_facts(results: Sequence[ProbeResult]) -> tuple[WallFacts, ...]:
    return tuple(
        WallFacts(each.wall.name, each.status, each.wall.says, each.why or None, each.wall.attacks) for each in judge_walls(results)
    )


def _table(results: Sequence[ProbeFacts], style: Style) -> None:
    """Print one line per probe and one column per kind of sandbox; then each result that did not pass, with its attack and evidence."""
    claims = {result.probe: result.claim for result in results}
    by_place = {(result.probe, result.box): result for result in results}
    boxes = [box for box in BOXES if any(result.box == box for result in results)]
    width = max(map(len, claims), default=0) + 2
    print(style.heading(f"{'':{width}}{''.join(f'{box:<{_WIDTH}}' for box in boxes)}").rstrip())
    for name, claim in claims.items():
        cells = [by_place.get((name, box)) for box in boxes]
        words = "".join(style.status(cell.status, _WIDTH) if cell else f"{'-':<{_WIDTH}}" for cell in cells)
        print(f"{name:<{width}}{words}{claim}")
    for group in _grouped(results):
        _explain(group, style)


def _grouped(results: Sequence[ProbeFacts]) -> list[list[ProbeFacts]]:
    """Group the results that did not pass, worst first: equal ones of a probe, and all probes that nothing but the same reason stopped."""
    groups: dict[tuple[object, ...], list[ProbeFacts]] = {}
    for result in results:
        if result.status != "pass":
            probe = result.probe if result.status == "fail" else ""
            groups.setdefault((probe, result.status, result.why, result.excused, *result.reached.items()), []).append(result)
    return sorted(groups.values(), key=lambda each: (each[0].excused, each[0].status))


def _explain(group: Sequence[ProbeFacts], style: Style) -> None:
    """Print one group of results. If they are of several probes, what each claims and tries is left to the table."""
    first = group[0]
    probes, boxes = (dict.fromkeys(names) for names in ([each.probe for each in group], [each.box for each in group]))
    print(f"\n{style.status(first.status, 0)} {', '.join(probes)} ({', '.join(boxes)}): {shown(first.why or '')}")
    if len(probes) == 1:
        print(f"  claimed  {first.claim}")
        print(f"  tried    {first.tried}")
    for way, seen in first.reached.items():
        print(f"  seen     {shown(way)}: {shown(seen)}")
    for remedy in dict.fromkeys(remedy for each in group for remedy in each.remedies):
        print(f"  -> {shown(remedy)}")


def _tell_walls(walls: Sequence[WallFacts], style: Style) -> None:
    """Print each wall that did not simply hold: broken ones first, then those that were not shown, are not here, or are not attacked."""
    for status, heading in _WALL_HEADINGS.items():
        chosen = [wall for wall in walls if wall.status == status]
        if not chosen:
            continue
        print(f"\n{style.heading(heading)}")
        width = max(len(wall.wall) for wall in chosen) + 2
        reasons = dict.fromkeys(wall.why or "" for wall in chosen)
        for why in reasons:
            same = [wall for wall in chosen if (wall.why or "") == why]
            for wall in same:
                print(f"  {wall.wall:<{width}}{wall.says}{f' ({shown(why)})' if len(same) == 1 else ''}")
            if len(same) > 1:
                print(f"  {'':{width}}({len(same)} walls: {shown(why)})")


_WALL_HEADINGS = {
    "broken": "WALLS THAT ARE BROKEN",
    "not shown": "WALLS THAT COULD NOT BE ATTACKED, ALTHOUGH THEY SHOULD BE",
    "absent": "WALLS THAT ARE NOT HERE: this machine lacks them, or refuses the attack by itself",
    "not attacked": "Walls that verify does not attack",
}


def _verdict(result: VerifyResult) -> str:
    """Return the overall result as one sentence. It claims only what was attacked."""
    told = ", ".join(f"{count} {status}" for status, count in result.counts.items() if count)
    walls = {status: [wall.wall for wall in result.walls if wall.status == status] for status in ("held", *_WALL_HEADINGS)}
    rest = [
        f"{len(walls[status])} {words}"
        for status, words in (("absent", "are not here"), ("not attacked", "are not attacked"))
        if walls[status]
    ]
    if not result.held:
        broken = f" Broken: {', '.join(walls['broken'])}." if walls["broken"] else ""
        return f"Not everything that is promised was held or could be shown: {told}, in {result.seconds:.1f} s.{broken}"
    return (
        f"The {len(walls['held'])} walls that were attacked held: {told}, in {result.seconds:.1f} s. Of the others, {' and '.join(rest)}."
    )
