"""`run`: a command in the project's sandbox; and `sim`: the same on a clone that is thrown away.

The keeper is forked first, while this process has little memory to copy. The keeper gets ready on another processor. Meanwhile this process
loads the rest of the program, finds the project and judges the action.
"""

from __future__ import annotations

from agent_sandbox.cli.options import CommandOptions
from agent_sandbox.cli.render.messages import Console
from agent_sandbox.cli.results import VerbResult
from agent_sandbox.runtime.process.zygote import Zygote


def run(options: CommandOptions, console: Console) -> VerbResult:
    """Run a command, or simulate it."""
    forked = None if options.explain else Zygote(None)
    from agent_sandbox.cli.execute import perform
    from agent_sandbox.engine.work import Command

    return perform(options, Command(options.command), console, stdin=0, forked=forked)
