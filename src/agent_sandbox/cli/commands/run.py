"""`run`: run a command in the project's sandbox; and `sim`: run it on a throw-away clone.

The keeper (the parent process of the run) is forked first, while this process has little memory to copy. While the keeper gets ready on
another processor, this process loads the rest of the program, finds the project and judges the action.
"""

from __future__ import annotations

from agent_sandbox.cli.options import CommandOptions
from agent_sandbox.cli.render.messages import Console
from agent_sandbox.cli.results import VerbResult
from agent_sandbox.runtime.process.zygote import Zygote


def run(options: CommandOptions, console: Console) -> VerbResult:
    """Run a command; for `sim`, simulate it."""
    forked = None if options.explain else Zygote(None)
    from agent_sandbox.cli.execute import perform
    from agent_sandbox.engine.work import Command

    return perform(options, Command(options.command), console, stdin=0, forked=forked)
