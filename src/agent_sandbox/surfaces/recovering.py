"""Whoever looks at a sandbox first brings to its end what was cut off there, and says so."""

from __future__ import annotations

import os
import time

from agent_sandbox import places
from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.recovering import interrupted, recovered
from agent_sandbox.engine.stored import Stored
from agent_sandbox.errors import Busy, SandboxError
from agent_sandbox.surfaces.arguments import Request
from agent_sandbox.surfaces.current import Current, current, policy_of
from agent_sandbox.surfaces.messages import remark


def recover(stored: Stored, gate: Gate) -> None:
    """For a verb that promotes. Raises `Busy` while somebody has the sandbox."""
    for words in recovered(stored, gate):
        remark(words)


def current_and_whole(request: Request) -> Current:
    """The current sandbox for a verb that does not promote: what is under way just now is left alone, what cannot be ended is said.

    Plans that nobody carried out in time go by the way.
    """
    found = current(request)
    if os.path.isdir(os.path.join(found.state.store.path, "plans")):
        from agent_sandbox.workspace.saved_plans import Plans

        Plans(found.state.store).sweep()
    if interrupted(found.state):
        try:
            policy = policy_of(request, found.project)
            recover(Stored(found.state), Gate(policy, places.ledger(), clock=time.time, sandbox=found.state.id))
        except Busy:
            pass
        except (SandboxError, OSError) as error:
            remark(f"a promotion was cut off and could not be brought to its end: {error}")
    return found
