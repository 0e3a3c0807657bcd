"""`hook`, `shell-prefix`, `agent` and `connect`: coding agents and the sandbox."""

from __future__ import annotations

import os
import sys

from agent_sandbox._fast.values import dataclass, replace
from agent_sandbox.cli.options import CommandOptions
from agent_sandbox.cli.parser import Request
from agent_sandbox.cli.render.messages import Console
from agent_sandbox.cli.results import VerbResult


@dataclass(frozen=True)
class HookResult(VerbResult):
    """The exit code of a hook. It has no document: its output is the answer."""

    kind = ""

    exit: int

    def text(self, console: Console) -> None:
        return


def coding_agents(request: Request, console: Console) -> VerbResult:
    """Perform one of these verbs."""
    match request.verb:
        case "shell-prefix":
            return shell_prefix(request, console)
        case "agent":
            return agent(request, console)
        case "hook":
            from agent_sandbox.coding_agents.hook import respond  # `agent-sandbox hook` itself never comes here

            return HookResult(respond(request.words, os.environ))
        case _:
            from agent_sandbox.cli.commands.connect import ConnectOptions, connect  # the other verbs start faster without it

            return connect(ConnectOptions.read(request), console)


def shell_prefix(request: Request, console: Console) -> VerbResult:
    """Run one shell command in the sandbox. Its own hook and MCP server, and any command inside a sandbox, are started directly."""
    from agent_sandbox.coding_agents.nested import is_inside  # not for the other verbs
    from agent_sandbox.coding_agents.own_commands import is_ours  # not for the other verbs

    (command,) = request.words
    if is_inside() or is_ours(command):
        sys.stdout.flush()
        os.execvp(_shell(), [_shell(), "-c", command])
    from agent_sandbox.cli.commands.run import run  # not for the other verbs

    options = replace(CommandOptions.read(request), command=(_shell(), "-c", command))
    return run(options, replace(console, quiet=True))


def _shell() -> str:
    return "bash" if os.path.exists("/bin/bash") else "sh"


def agent(request: Request, console: Console) -> VerbResult:
    """Run a whole coding agent in the sandbox, with the host of its API and without its key."""
    from agent_sandbox.cli.commands.run import run  # not for the other verbs
    from agent_sandbox.coding_agents.whole_agents import provide  # not for the other verbs

    options = CommandOptions.read(request)
    networked = bool(options.policy.network) or options.policy.allow_network
    needs = provide(request.words, os.environ, networked=networked, bound=bool(options.secrets))
    for note in needs.notes:
        console.note(note)
    policy = replace(options.policy, network=tuple(dict.fromkeys((*options.policy.network, *needs.network))))
    secrets, env = (*options.secrets, *needs.secrets), (*needs.env, *options.env)
    return run(replace(options, command=request.words, policy=policy, secrets=secrets, env=env), console)
