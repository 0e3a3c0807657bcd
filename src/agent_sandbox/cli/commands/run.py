"""`run`: run a command in the project's sandbox; and `sim`: run it on a throw-away clone.

The keeper (the parent process of the run) is forked first, while this process has little memory to copy. While the keeper gets ready on
another processor, this process loads the rest of the program, finds the project and judges the action.
"""

from __future__ import annotations

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.cli.options import CommandOptions
from agent_sandbox.cli.render.messages import Console
from agent_sandbox.cli.results import VerbResult
from agent_sandbox.runtime.process import zygote

if TYPE_CHECKING:
    from agent_sandbox.engine.egress_program import EgressProgram


def started_egress(options: CommandOptions) -> EgressProgram | None:
    """Start the egress program if the options name a network, so that it loads meanwhile. For a policy with one it is started later."""
    if options.explain or not (options.policy.network or options.policy.allow_network):
        return None
    from agent_sandbox.engine.egress_program import start_program  # few runs have a network

    try:
        return start_program(once=True)
    except OSError:  # the run says so, when it starts one itself
        return None


def run(options: CommandOptions, console: Console) -> VerbResult:
    """Run a command; for `sim`, simulate it."""
    forked = None if options.explain else zygote.forked()
    egress = started_egress(options)
    from agent_sandbox.cli.execute import perform
    from agent_sandbox.engine.work import Command

    return perform(options, Command(options.command), console, stdin=0, forked=forked, egress=egress)
