"""The runtimes of this machine as the router sees them: what each proved by its probe, and what it can run."""

from __future__ import annotations

from agent_sandbox.policy.guarantees import Guarantee
from agent_sandbox.runtime.routing import wasm_table
from agent_sandbox.runtime.routing.model import COMMAND, Feature, Host

# Steps of an order, with room between them; what a start costs is measured elsewhere.
WASM_COST = 10
PROCESS_COST = 20


def wasm_host(
    guarantees: frozenset[Guarantee],
    *,
    languages: frozenset[str] = frozenset({"python", "javascript"}),
    features: frozenset[Feature] = frozenset(),
    unavailable: str = "",
) -> Host:
    """CPython and QuickJS in WebAssembly. `features` are those that the runtime gives its guests beyond what WASI has."""
    return Host("wasm", WASM_COST, languages, guarantees, features, wasm_table.MODULES, wasm_table.ABSENT, unavailable)


def process_host(guarantees: frozenset[Guarantee], *, unavailable: str = "") -> Host:
    """Native programs in a confined process: whatever this machine has."""
    languages = frozenset({"python", "javascript", "ruby", "bash", COMMAND})
    return Host("process", PROCESS_COST, languages, guarantees, unavailable=unavailable)
