"""`run`, a command in the project's sandbox; and `sim`, the same on a clone that is thrown away.

Before it can start, a keeper has to be ready, and this process has to load the rest of the program, find the project and decide. Neither
waits for the other: the keeper is forked first, while there is little to copy, and each goes its own way on a processor of its own.
"""

from __future__ import annotations

from agent_sandbox.runtime.process.zygote import Zygote
from agent_sandbox.surfaces.arguments import Request
from agent_sandbox.values import replace


def run(request: Request) -> int:
    """The verb `run`."""
    forked = None if request.has("--explain") else Zygote(None)
    from agent_sandbox.engine.work import Command
    from agent_sandbox.surfaces.performing import perform

    words = request.words if request.separated or len(request.words) > 1 else ("bash", "-c", request.words[0])
    return perform(request, Command(words), stdin=0, forked=forked)


def sim(request: Request) -> int:
    """The verb `sim`."""
    return run(replace(request, given={**request.given, "--simulate": ("",)}))
