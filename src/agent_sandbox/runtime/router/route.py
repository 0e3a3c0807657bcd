"""Choose a runtime: the cheapest that gives every required guarantee and, as far as the text of the work shows, can run it.

There is always an answer, and the same input gives the same answer. Its time is bounded by the size of text that the readers accept. If the
text does not show what the work needs, the work goes to a lighter runtime only if it can start again on a heavier one. `lack_in` recognises
a run that must do so.
"""

from __future__ import annotations

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, replace
from agent_sandbox.policy.model import Guarantee
from agent_sandbox.readers import shown
from agent_sandbox.runtime.base import COMMAND
from agent_sandbox.runtime.router.model import Candidate, Feature, Permits, ProgramNeeds, Route, Workload

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_BARRED_BY = {Feature.PROCESSES: "processes", Feature.SOCKETS: "network"}

_REJECTED = "Possibly unhandled promise rejection: "  # QuickJS prints it before the error of a rejected promise
_TAIL = 4096  # bytes of stderr that are inspected: a traceback ends with the error
_MISSING = ("ModuleNotFoundError: ", "ImportError: ")
_UNSUPPORTED = (
    "RuntimeError: can't start new thread",
    "OSError: [Errno 58] ",  # ENOTSUP in the numbering of WASI
    "OSError: [Errno 52] ",  # ENOSYS
    "ReferenceError: ",  # JavaScript: a name that only Node.js has
)
_UNAVAILABLE = " is unavailable on wasm32-wasi"  # the error of `ctypes` and `mmap` there, after their name
_LATE_WARNING = "RuntimeWarning: "  # follows the error that ended an event loop


@dataclass(frozen=True)
class Fit:
    """The fitness of one runtime for the work.

    `barred` is a reason that excludes the runtime. `lacks` lists what the text of the work needs and the runtime does not have, or why the
    text could not be read. `doubts` lists what the work may need, but its text does not show.
    """

    host: Candidate
    barred: str = ""
    lacks: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()

    @property
    def eligible(self) -> bool:
        """Whether the runtime may be used at all: it is available, gives the guarantees and supports the language."""
        return not self.barred

    @property
    def runs(self) -> bool:
        """Whether nothing speaks against the runtime."""
        return not (self.barred or self.lacks or self.doubts)

    @property
    def reason(self) -> str:
        """The strongest reason against the runtime; empty if there is none."""
        return self.barred or next(iter((*self.lacks, *self.doubts)), "")


def fit(host: Candidate, work: Workload, requires: frozenset[Guarantee], needs: ProgramNeeds) -> Fit:
    """Judge how well a runtime fits the work. Required guarantees are checked before anything that the code shows."""
    if barred := _barred(host, work, requires):
        return Fit(host, barred)
    if host.traits.whole:
        return Fit(host)
    if needs.unreadable:
        return Fit(host, lacks=(f"the code could not be read: {needs.unreadable}",))
    return Fit(host, "", tuple(_lacks(host, work, needs)), (*needs.unseen, *_unread(work, needs)))


def _barred(host: Candidate, work: Workload, requires: frozenset[Guarantee]) -> str:
    if host.unavailable:
        return f"not available: {host.unavailable}"
    if missing := requires - host.traits.guarantees:
        return f"does not give {', '.join(sorted(each.value for each in missing))}"
    if work.language not in host.traits.languages:
        return "runs no native programs" if work.language == COMMAND else f"does not run {work.language[:40]}"
    return ""


def _lacks(host: Candidate, work: Workload, needs: ProgramNeeds) -> Iterator[str]:
    for feature, where in needs.features.items():
        if host.traits.features is not None and feature not in host.traits.features:
            yield f"it {feature.value}: {where}"
    for name, line in needs.modules.items():
        if not _has(host, work, name):
            yield f"it has no {name[:80]} (line {line})"
    for name, line in needs.names.items():
        if name in host.traits.absent and not _lies_beside(work, name):
            yield f"it has no {name[:80]} (line {line})"
    for name in sorted(host.traits.absent) if needs.loose else ():
        module, _, attribute = name.rpartition(".")
        if module in needs.loose and attribute in needs.words and not _lies_beside(work, module):
            yield f"it has no {name} (line {needs.loose[module]})"
    for alternatives in needs.choices:
        if not any(all(_has(host, work, name) for name in names) for names in alternatives):
            yield f"it has no {alternatives[0][0][:80]}, nor anything that the code would take instead"


def _has(host: Candidate, work: Workload, module: str) -> bool:
    top = module.partition(".")[0]
    if top in work.given or _lies_beside(work, module) or host.traits.modules is None:
        return True
    return top in host.traits.modules and module not in host.traits.absent


def _lies_beside(work: Workload, name: str) -> bool:
    return work.local is not None and name.partition(".")[0] in work.local


def _unread(work: Workload, needs: ProgramNeeds) -> Iterator[str]:
    if work.goes_on:
        yield "what later turns need is not known"
    chosen = {name for alternatives in needs.choices for names in alternatives for name in names}
    for name in sorted({*needs.modules, *chosen} - work.given):
        if work.local is None:
            yield f"a module {name[:80]} may lie beside the code"
        elif _lies_beside(work, name):
            yield f"the module {name[:80]} lies beside the code and was not read"


def route(work: Workload, requires: frozenset[Guarantee], permits: Permits, hosts: Iterable[Candidate]) -> Route:
    """Choose the runtime for the work. It never chooses a runtime that is unavailable or lacks a required guarantee."""
    needs = read(work)
    fits = [fit(host, work, requires, needs) for host in sorted(hosts, key=lambda host: host.order)]
    notes = _notes(needs, permits)
    for index, candidate in enumerate(fits):
        forward = _forward(candidate, fits[index + 1 :], work)
        if candidate.runs or (candidate.eligible and not candidate.lacks and forward is not None):
            return Route(candidate.host.name, shown(_why(candidate, work, needs)), _others(fits, candidate), forward, notes)
    if not (eligible := [each for each in fits if each.eligible]):
        return Route(None, shown(_why_none(fits, work)), _others(fits, None), None, notes)
    # Nothing fits well. A runtime with the guarantees is safe to try, and its own error tells the author more than a refusal to guess.
    least = min(eligible, key=lambda each: (len(each.lacks), len(each.doubts), *each.host.order))
    why = f"nothing else here gives what is required, although {(*least.lacks, *least.doubts)[0]}"
    return Route(least.host.name, shown(why), _others(fits, least), None, notes)


def read(work: Workload) -> ProgramNeeds:
    """Return the needs that the text of the work shows. Only Python and JavaScript are read: other languages need a complete runtime."""
    if work.language == "python":
        from agent_sandbox.runtime.router.needs import needs_of_python  # slow to load, and not needed for commands

        needs = needs_of_python(work.source)
        return replace(needs, features={Feature.MACHINE: "__file__", **needs.features}) if work.placed else needs
    if work.language == "javascript":
        from agent_sandbox.runtime.router.needs import needs_of_javascript  # slow to load, and not needed for commands

        return needs_of_javascript(work.source)
    return ProgramNeeds()


def explain(chosen: Route) -> tuple[str, ...]:
    """Return the decision as lines, for `--explain` and for people who look at a result."""
    lines = [f"runtime: {chosen.runtime or 'none'}: {chosen.why}"]
    lines += [f"passed over: {name}: {why}" for name, why in chosen.passed_over]
    if chosen.fall_forward is not None:
        lines.append(f"falls forward: to {chosen.fall_forward}, once, on a fresh clone, if something turns out to be missing")
    return (*lines, *(f"note: {note}" for note in chosen.notes))


def _forward(chosen: Fit, heavier: list[Fit], work: Workload) -> str | None:
    if chosen.host.traits.whole or not chosen.eligible or not work.repeatable:
        return None
    return next((each.host.name for each in heavier if each.runs), None)


def _why(chosen: Fit, work: Workload, needs: ProgramNeeds) -> str:
    if chosen.doubts:
        return f"the cheapest that may do, and it can start again elsewhere: {chosen.doubts[0]}"
    if work.language == COMMAND:
        return "the cheapest that gives every required guarantee and runs native programs"
    if chosen.host.traits.whole:
        return f"the cheapest that gives every required guarantee and runs this {work.language}"
    used = ", ".join(sorted({name.partition(".")[0] for name in needs.modules})[:8])
    return f"the cheapest that gives every required guarantee and has what the code uses{f' ({used})' if used else ''}"


def _why_none(fits: list[Fit], work: Workload) -> str:
    if not any(work.language in each.host.traits.languages for each in fits):
        return f"no runtime here can run {'commands' if work.language == COMMAND else repr(work.language[:40])}"
    return "no available runtime can run this with every required guarantee"


def _others(fits: list[Fit], chosen: Fit | None) -> tuple[tuple[str, str], ...]:
    return tuple((each.host.name, shown(each.reason) or "costs more") for each in fits if each is not chosen)


def _notes(needs: ProgramNeeds, permits: Permits) -> tuple[str, ...]:
    permitted = {Feature.PROCESSES: permits.processes, Feature.SOCKETS: permits.network}
    notes = [
        f"it {feature.value} ({needs.features[feature]}), but the policy allows no {_BARRED_BY[feature]}"
        for feature, allowed in permitted.items()
        if not allowed and feature in needs.features
    ]
    if needs.open_loop:
        notes.append(f"how long the loop at line {needs.open_loop} runs cannot be told from the text")
    return tuple(map(shown, notes))


def lack_in(code: int, stderr: bytes) -> str | None:
    """Return the program's error if it ended because the runtime lacks a module or feature; None if it ended in another way."""
    if code == 0:
        return None
    lines = stderr[-_TAIL:].decode("utf-8", "replace").splitlines()
    # The stack of JavaScript follows its error, indented.
    last = next((line for line in reversed(lines) if line and not line[0].isspace() and _LATE_WARNING not in line), "")
    last = last.removeprefix(_REJECTED)
    if last.startswith((*_MISSING, *_UNSUPPORTED)) or (last.startswith("OSError: ") and last.endswith(_UNAVAILABLE)):
        return shown(last, 200)
    if last.startswith("AttributeError: module '") and " has no attribute " in last:
        return shown(last, 200)
    return None
