"""The runtimes of this version as candidates of the router, with any guarantees."""

from __future__ import annotations

from agent_sandbox._fast.values import replace
from agent_sandbox.policy.model import Guarantee
from agent_sandbox.runtime.process import runtime as process
from agent_sandbox.runtime.router.model import Candidate, Feature
from agent_sandbox.runtime.wasm import runtime as wasm


def process_host(guarantees: frozenset[Guarantee], *, unavailable: str = "") -> Candidate:
    return Candidate(replace(process.TRAITS, guarantees=guarantees), unavailable)


def wasm_host(guarantees: frozenset[Guarantee], *, features: frozenset[Feature] = frozenset(), unavailable: str = "") -> Candidate:
    return Candidate(replace(wasm.TRAITS, guarantees=guarantees, features=features), unavailable)
