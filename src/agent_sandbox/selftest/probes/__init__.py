"""All probes of the self-test, in the order in which they run."""

from __future__ import annotations

from agent_sandbox.selftest.probe import Probe
from agent_sandbox.selftest.probes import files, kernel, limits, network, persistence, processes, record

PROBES: tuple[Probe, ...] = tuple(
    probe for subject in (files, network, processes, kernel, limits, persistence, record) for probe in subject.SUBJECT.probes
)
