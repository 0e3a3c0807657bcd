"""What a policy gives, as far as it makes patterns of code no issue."""

from __future__ import annotations

from agent_sandbox.policy.code.model import Grant
from agent_sandbox.policy.model import Policy


def granted(policy: Policy) -> frozenset[Grant]:
    """What code need not be warned of, because it is permitted. Never the network, which there is none of."""
    found = {Grant.FILES} if policy.files.read or policy.files.write else set()
    if policy.processes:
        found |= {Grant.PROCESSES, Grant.SHELL} if policy.programs.shell else {Grant.PROCESSES}
    return frozenset(found)
