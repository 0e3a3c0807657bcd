"""All probes of the self-test, in the order in which they run."""

from __future__ import annotations

from agent_sandbox.selftest.probe import Probe
from agent_sandbox.selftest.probes import counters, files, kernel, limits, network, persistence, processes

PROBES: tuple[Probe, ...] = tuple(
    probe
    for subject in (*(each.SUBJECT for each in (files, network, processes, kernel, limits, counters, persistence)), persistence.LEDGER)
    for probe in subject.probes
)
