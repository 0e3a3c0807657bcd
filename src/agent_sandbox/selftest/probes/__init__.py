"""All probes of the self-test, in the order in which they run."""

from __future__ import annotations

from agent_sandbox.selftest.probe import Probe
from agent_sandbox.selftest.probes import confinement, files, governance, kernel, limits, network, persistence, processes, promotion, wasm

PROBES: tuple[Probe, ...] = tuple(
    probe
    for subject in (
        *(each.SUBJECT for each in (files, network, processes, kernel, confinement, limits, persistence, wasm, promotion, governance)),
        persistence.LEDGER,
    )
    for probe in subject.probes
)
