"""How one runtime fits one piece of work: what bars it, what it lacks, and what cannot be told."""

from __future__ import annotations

from collections.abc import Iterator

from agent_sandbox.policy.guarantees import Guarantee
from agent_sandbox.runtime.routing.model import COMMAND, Host, Reading, Work
from agent_sandbox.values import dataclass


@dataclass(frozen=True)
class Fit:
    """`barred` excludes for good; `lacks` says what the work would miss, as far as its text shows; `doubts` what the text does not tell."""

    host: Host
    barred: str = ""
    lacks: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()

    @property
    def eligible(self) -> bool:
        """Whether it may be used at all: it is there, gives the guarantees and takes the language."""
        return not self.barred

    @property
    def runs(self) -> bool:
        """Whether nothing speaks against it."""
        return not (self.barred or self.lacks or self.doubts)

    @property
    def reason(self) -> str:
        """What speaks against it most, or nothing."""
        return self.barred or next(iter((*self.lacks, *self.doubts)), "")


def fit(host: Host, work: Work, requires: frozenset[Guarantee], reading: Reading) -> Fit:
    """Judge a runtime. Guarantees come before anything that the code says of itself."""
    if barred := _barred(host, work, requires):
        return Fit(host, barred)
    if host.whole:
        return Fit(host)
    if reading.unreadable:
        return Fit(host, lacks=(f"the code could not be read: {reading.unreadable}",))
    return Fit(host, "", tuple(_lacks(host, work, reading)), (*reading.unseen, *_unread(work, reading)))


def _barred(host: Host, work: Work, requires: frozenset[Guarantee]) -> str:
    if host.unavailable:
        return f"not available: {host.unavailable}"
    if missing := requires - host.guarantees:
        return f"does not give {', '.join(sorted(each.value for each in missing))}"
    if work.language not in host.languages:
        return "runs no native programs" if work.language == COMMAND else f"does not run {work.language[:40]}"
    return ""


def _lacks(host: Host, work: Work, reading: Reading) -> Iterator[str]:
    for feature, where in reading.features.items():
        if feature not in host.features:
            yield f"it {feature.value}: {where}"
    for name, line in reading.modules.items():
        if not _has(host, work, name):
            yield f"it has no {name[:80]} (line {line})"
    for name, line in reading.names.items():
        if name in host.absent and not _lies_beside(work, name):
            yield f"it has no {name[:80]} (line {line})"
    for name in sorted(host.absent) if reading.loose else ():
        module, _, attribute = name.rpartition(".")
        if module in reading.loose and attribute in reading.words and not _lies_beside(work, module):
            yield f"it has no {name} (line {reading.loose[module]})"
    for alternatives in reading.choices:
        if not any(all(_has(host, work, name) for name in names) for names in alternatives):
            yield f"it has no {alternatives[0][0][:80]}, nor anything that the code would take instead"


def _has(host: Host, work: Work, module: str) -> bool:
    top = module.partition(".")[0]
    if top in work.given or _lies_beside(work, module) or host.modules is None:
        return True
    return top in host.modules and module not in host.absent


def _lies_beside(work: Work, name: str) -> bool:
    return work.local is not None and name.partition(".")[0] in work.local


def _unread(work: Work, reading: Reading) -> Iterator[str]:
    if work.goes_on:
        yield "what later turns need is not known"
    chosen = {name for alternatives in reading.choices for names in alternatives for name in names}
    for name in sorted({*reading.modules, *chosen} - work.given):
        if work.local is None:
            yield f"a module {name[:80]} may lie beside the code"
        elif _lies_beside(work, name):
            yield f"the module {name[:80]} lies beside the code and was not read"
