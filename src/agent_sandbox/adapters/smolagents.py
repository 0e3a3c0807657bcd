"""A Python executor for smolagents: the agent's code runs in a sandbox, and its tools run here.

with SandboxExecutor() as executor:
    agent = CodeAgent(tools=[...], model=..., executor=executor)
    agent.run("How many seconds are there in a leap year?")
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, Unpack

from agent_sandbox.adapters.environment import needing
from agent_sandbox.errors import SandboxError
from agent_sandbox.options import SandboxArguments
from agent_sandbox.result import SandboxResult
from agent_sandbox.runtime.guest_rpc import codec
from agent_sandbox.sandbox import Sandbox
from agent_sandbox.session import SandboxSession

with needing("smolagents"):
    from smolagents.local_python_executor import CodeOutput, InterpreterError, PythonExecutor

__all__ = ["SandboxExecutor"]

FINAL = "final_answer"
VARIABLES = "variables_of_the_agent"  # a tool of ours, by which variables cross
# The program ends with its final answer, whatever exceptions it catches.
_ENDING = f"""
def _ending(call):
    def {FINAL}(*args, **kwargs):
        call(*args, **kwargs)
        raise SystemExit(0)
    return {FINAL}
{FINAL} = _ending({FINAL})
"""


class SandboxExecutor(PythonExecutor):
    """A `PythonExecutor`. Variables, imports and files stay from step to step, in one session of a sandbox.

    Tools and managed agents are called in this process; their arguments and results are data. The sandbox of the default settings has no
    network and no files of the machine; the arguments are those of `Sandbox`. A step that exceeds its time ends the session: the next step
    starts anew, without the variables of the code.
    """

    def __init__(self, **settings: Unpack[SandboxArguments]) -> None:
        settings.setdefault("validate_code", False)
        self.sandbox = Sandbox(**settings)
        self.state: dict[str, Any] = {}  # smolagents shows what was printed before an error from here
        self._session: SandboxSession | None = None
        self._tools: dict[str, Callable[..., object]] = {}
        self._offered: frozenset[str] = frozenset()
        self._variables: dict[str, Any] = {}
        self._final: list[object] = []

    def send_tools(self, tools: dict[str, Any]) -> None:
        """Offer these tools to the code. Tools with other names than before start a new session."""
        self._tools = dict(tools)
        if self._session is not None and frozenset(self._tools) != self._offered:
            self._end_session()

    def send_variables(self, variables: dict[str, Any]) -> None:
        """Give the code these variables. Raises TypeError for one that is not data."""
        for name, value in variables.items():
            try:
                codec.spell(value)
            except (TypeError, ValueError) as error:
                raise TypeError(f"the variable {name!r} cannot cross into the sandbox: {error}") from None
        self._variables.update(variables)
        if self._session is not None:
            self._give_variables(self._session)

    def __call__(self, code_action: str) -> Any:
        """Run one step. Raises `InterpreterError` if it fails; what it printed is in `state`."""
        session = self._opened()
        self._final.clear()
        result = session.run(code_action)
        self.state["_print_outputs"] = logs = result.stdout
        if self._final:
            return CodeOutput(output=self._final[0], logs=logs, is_final_answer=True)
        if not result.success:
            raise InterpreterError(self._failure(session, result))
        return CodeOutput(output=result.value if result.value_repr is None else result.value_repr, logs=logs, is_final_answer=False)

    def _failure(self, session: SandboxSession, result: SandboxResult) -> str:
        failed = [str(error) for error in result.tool_errors]
        told = f"{result.error or 'the code failed'}{f' (a tool raised: {failed[0]})' if failed else ''}"
        if not session.ended:
            return told
        self._end_session()
        return f"{told}; all variables are gone"

    def _opened(self) -> SandboxSession:
        if self._session is None or self._session.ended:
            self._end_session()
            offered = {name: self._call(name) for name in self._tools}
            self._session = self.sandbox.session(tools={**offered, VARIABLES: lambda: self._variables})
            self._offered = frozenset(self._tools)
            if FINAL in offered:
                self._prepare(self._session, _ENDING)
            self._give_variables(self._session)
        return self._session

    def _give_variables(self, session: SandboxSession) -> None:
        if self._variables:
            self._prepare(session, f"globals().update({VARIABLES}())")

    def _prepare(self, session: SandboxSession, source: str) -> None:
        if not (done := session.run(source)).success:
            raise SandboxError(f"the session could not be prepared: {done.error}", hint="look at the error")

    def _call(self, name: str) -> Callable[..., object]:
        def call(*args: Any, **kwargs: Any) -> object:
            answer = self._tools[name](*args, **kwargs)
            if name == FINAL:
                self._final.append(answer)
                return None
            return answer.to_string() if hasattr(answer, "to_string") and not isinstance(answer, str) else answer

        return call

    def _end_session(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def cleanup(self) -> None:
        """End the session and the sandbox. smolagents calls it when an agent is cleaned up."""
        self._end_session()
        self.sandbox.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.cleanup()
