"""`run`: a command in the project's sandbox; and `sim`: the same on a clone that is thrown away.

The keeper is forked first, while there is little to copy, and gets ready on a processor of its own. Meanwhile this process loads the rest
of the program, finds the project and decides.
"""

from __future__ import annotations

from agent_sandbox._fast.values import replace
from agent_sandbox.cli.parser import Request
from agent_sandbox.runtime.process.zygote import Zygote


def run(request: Request) -> int:
    """The verb `run`."""
    forked = None if request.has("--explain") else Zygote(None)
    from agent_sandbox.cli.execute import perform
    from agent_sandbox.engine.work import Command

    words = request.words if request.separated or len(request.words) > 1 else ("bash", "-c", request.words[0])
    return perform(request, Command(words), stdin=0, forked=forked)


def sim(request: Request) -> int:
    """The verb `sim`."""
    return run(replace(request, given={**request.given, "--simulate": ("",)}))
