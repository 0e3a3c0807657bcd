"""An execution policy for LangChain's shell middleware: its persistent shell runs in a sandbox.

policy = SandboxExecutionPolicy()
agent = create_agent(model, middleware=[ShellToolMiddleware(workspace_root="/home/me/project", execution_policy=policy)])
...
print(Workspace.over("/home/me/project").diff())
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent_sandbox.adapters.environment import needing

with needing("langchain"):
    from langchain.agents.middleware import _execution
    from langchain.agents.middleware._execution import BaseExecutionPolicy

__all__ = ["SandboxExecutionPolicy"]

LOADING = ("LD_", "AGENT_SANDBOX_", "BASH_ENV", "GLIBC_TUNABLES")


@dataclass
class SandboxExecutionPolicy(BaseExecutionPolicy):
    """Starts the shell by `agent-sandbox run`, in the sandbox of the workspace. Use the root of a project as `workspace_root`.

    The changes of a project wait there: `agent-sandbox diff` and `agent-sandbox promote`, or `Workspace.over`, show and promote them. In a
    temporary workspace, which the middleware makes if there is no `workspace_root`, everything is thrown away when the shell ends. The
    shell gets the variables that the middleware is given, and none of this process's secrets. `options` are further options of
    `agent-sandbox run`, such as ("--network", "packages", "--memory", "2G").
    """

    options: Sequence[str] = ()

    def spawn(self, *, workspace: Path, env: Mapping[str, str], command: Sequence[str]) -> subprocess.Popen[str]:
        """Start the shell and return its process. The sandbox ends with the process, also if that is killed."""
        temporary = workspace.name.startswith(_execution.SHELL_TEMP_PREFIX)
        words = [sys.executable, "-P", "-m", "agent_sandbox", "run", "--quiet", "--project", str(workspace), "--cwd", str(workspace)]
        words += ["--throw-away"] if temporary else []
        # These make programs load code, so no file of variables may hold them; they are hardly secret.
        loading = {name: value for name, value in env.items() if name.startswith(LOADING)}
        words += [word for name, value in loading.items() for word in ("--env", f"{name}={value}")]
        # The others go by a file in memory. In the words of a command every user of the machine could read them; in the environment of the
        # command they would act on our own program, outside of the sandbox: PYTHONPATH may lead to the agent's files.
        variables = os.memfd_create("variables", 0)
        try:
            with open(variables, "wb", closefd=False) as file:
                file.writelines(_line(name, value) for name, value in env.items() if name not in loading)
            # The command is the caller's and the sandbox is its wall; the words are a list, so no shell of ours reads them. It starts where
            # this process is, not in the workspace: a relative PYTHONPATH of ours must not lead there.
            return subprocess.Popen(
                [*words, "--env-file", f"/proc/self/fd/{variables}", *self.options, "--", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="replace",
                bufsize=1,
                pass_fds=(variables,),
                start_new_session=True,
            )
        finally:
            os.close(variables)


def _line(name: str, value: str) -> bytes:
    """Return a variable as a line of `--env-file`."""
    escaped = value.translate({ord("\\"): "\\\\", ord('"'): '\\"', ord("\n"): "\\n", ord("\r"): "\\r"})
    return f'{name}="{escaped}"\n'.encode()
