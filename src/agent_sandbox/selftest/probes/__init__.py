"""All probes of the self-test, in the order in which they run."""

from __future__ import annotations

from agent_sandbox.selftest.probe import Probe
from agent_sandbox.selftest.probes import (
    confinement,
    counters,
    egress,
    files,
    governance,
    kernel,
    limits,
    network,
    persistence,
    processes,
    promotion,
    wasm,
)

_SUBJECTS = (files, network, egress, processes, kernel, confinement, limits, counters, persistence, wasm, promotion, governance)

PROBES: tuple[Probe, ...] = tuple(
    probe for subject in (*(each.SUBJECT for each in _SUBJECTS), persistence.LEDGER) for probe in subject.probes
)
