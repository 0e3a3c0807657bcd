"""The probes that show nothing in a runtime with a kernel of its own, and why. `verify` reports each with its reason."""

from __future__ import annotations

from collections.abc import Mapping

from agent_sandbox.selftest.probe import GVISOR, MICROVM

_NOT_SEEN = dict.fromkeys(
    ("powers", "control-group", "core-dumps", "private-mounts"), "its processes are none of the machine's, so nobody outside looks at them"
)
_AGENT = "its first process is our agent, which knows nothing of the machine, and belongs to the program"
_OWN = "what it finds there is made by the user-space kernel, and leads to nothing of the machine"

DIFFERENCES: Mapping[str, Mapping[str, str]] = {
    GVISOR: {
        **_NOT_SEEN,
        "devices": _OWN,
        "kernel-settings": _OWN,
        "init": _AGENT,
        "landlock": "the user-space kernel has no Landlock",
    },
    MICROVM: {
        **_NOT_SEEN,
        "init": _AGENT,
        "landlock": "signals are left to the kernel of the machine, which keeps them from its first process",
        "own-namespaces": "it has another kernel, whose first namespaces have the same numbers as everybody's",
    },
}
