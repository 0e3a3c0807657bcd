"""Whether runs are deterministic and fuel is limited here, as runs show that would not be otherwise."""

from __future__ import annotations

from agent_sandbox.policy.guarantees import Guarantee
from agent_sandbox.runtime.base import Completed, Launch, Reason, Support
from agent_sandbox.runtime.probe import trial
from agent_sandbox.values import TYPE_CHECKING, replace

if TYPE_CHECKING:
    from agent_sandbox.runtime.wasm.runtime import WasmRuntime

# Each of these differs from one ordinary run to the next.
_TELLTALE = """
import os, random, secrets, tempfile, time, uuid
time.sleep(3600)
print(time.time(), time.monotonic(), time.perf_counter(), random.random(), secrets.token_hex(), uuid.uuid1(), tempfile.mkdtemp())
print([os.stat(os.path.join("/tmp", name)) for name in os.listdir("/tmp")], object())
"""
_ENDLESS = "while True: pass"
_OURS = (Guarantee.DETERMINISTIC, Guarantee.FUEL_LIMITED)
_FUEL = 10_000_000  # a hundredth of a second


def proved(runtime: WasmRuntime, support: Support) -> Support:
    """What was found of the walls, and what the program inside them is given besides. Raises what a launch raises."""
    if not runtime.ready_to_count:
        why = "the second module, which counts what it executes, has not been compiled: agent-sandbox setup"
        return replace(support, missing={**support.missing, **{each.value: why for each in _OURS}})
    first, second = (_ran(runtime, replace(trial(_TELLTALE), deterministic=7)) for _ in range(2))
    same = (first.stdout, first.exit.usage.fuel) == (second.stdout, second.exit.usage.fuel) and first.stdout.count(b"\n") == 2
    launch = trial(_ENDLESS)
    ended = _ran(runtime, replace(launch, limits=replace(launch.limits, fuel=_FUEL))).exit
    shown = {Guarantee.DETERMINISTIC: same, Guarantee.FUEL_LIMITED: ended.reason is Reason.FUEL_LIMIT}
    missing = {name: why for name, why in support.missing.items() if name not in {each.value for each in _OURS}}
    missing |= {each.value: "live runs showed that it does not hold" for each, holds in shown.items() if not holds}
    return replace(support, guarantees=support.guarantees | {each for each, holds in shown.items() if holds}, missing=missing)


def _ran(runtime: WasmRuntime, launch: Launch) -> Completed:
    with runtime.launch(launch) as guest:
        return guest.wait()
