"""`shell`: an interactive shell in the project's sandbox, on a terminal of its own."""

from __future__ import annotations

import os
import shutil

from agent_sandbox._fast.values import dataclass, replace
from agent_sandbox.cli.commands.run import started_egress
from agent_sandbox.cli.options import CommandOptions
from agent_sandbox.cli.parser import UsageError
from agent_sandbox.cli.render.messages import Console, counted
from agent_sandbox.cli.results import VerbResult
from agent_sandbox.runtime.process import zygote

MARK = "(sandbox) "
# bash evaluates PROMPT_COMMAND before each prompt, after its start-up files have set theirs. Other shells take PS1, if those leave it.
_MARKS = (
    "AGENT_SANDBOX=1",
    f"PS1={MARK}$ ",
    f'PROMPT_COMMAND=case $PS1 in "{MARK}"*) ;; *) PS1="{MARK}$PS1" ;; esac',
)
_USUAL = ("bash", "sh")


@dataclass(frozen=True)
class ShellResult(VerbResult):
    """An interactive shell that has ended. It has no document: its terminal was used by the shell."""

    kind = ""

    run: VerbResult
    exit: int
    changes: int | None  # in the sandbox; null if they are not known
    kept: bool

    def text(self, console: Console) -> None:
        if self.changes is None:
            self.run.text(console)
        elif not self.changes:
            console.note("the shell has ended; nothing is changed in the sandbox")
        elif not self.kept:
            console.note(f"the shell has ended; {counted(self.changes, 'change')} thrown away with the sandbox")
        else:
            changes = counted(self.changes, "change")
            console.note(f"the shell has ended; {changes} in the sandbox: agent-sandbox diff shows, agent-sandbox promote makes them real")


def shell(options: CommandOptions, console: Console) -> VerbResult:
    """Run an interactive shell. Raises `UsageError` without a terminal."""
    forked = None if options.explain else zygote.forked()
    egress = started_egress(options)
    from agent_sandbox.cli import caller  # after the fork, as `run` does
    from agent_sandbox.cli.execute import RunResult, perform  # after the fork, as `run` does
    from agent_sandbox.engine.work import Command  # after the fork, as `run` does

    if options.collect:
        raise UsageError("shell has no --json: it is for a person at a terminal", hint='use: agent-sandbox --json run "COMMAND"')
    if not options.explain and not caller.interactive():
        raise UsageError("shell needs a terminal as standard input and output", hint='without one: agent-sandbox run "COMMAND"')
    command = (user_shell(), "-i")
    if not options.explain:
        console.note(f"{os.path.basename(command[0])} in the sandbox: the machine is not changed; exit or Ctrl-D ends it")
    marked = replace(options, command=command, env=(*_MARKS, *options.env))
    result = perform(marked, Command(command), console, stdin=0, forked=forked, egress=egress)
    if not isinstance(result, RunResult) or result.refused:
        return result
    counts = result.changes
    known = counts is not None and not counts.problem
    return ShellResult(result, result.code, counts.total if counts is not None and known else None, counts is not None and counts.kept)


def user_shell() -> str:
    """Return the path of the user's shell: $SHELL if it is a program, else bash or sh. Raises `UsageError` if there is none."""
    named = os.environ.get("SHELL", "")
    candidates = ([named] if named.startswith("/") else []) + list(_USUAL)
    found = next((path for each in candidates if (path := shutil.which(each)) is not None), None)
    if found is None:
        raise UsageError("there is no shell: neither $SHELL nor bash nor sh is a program here", hint="set SHELL")
    return found
