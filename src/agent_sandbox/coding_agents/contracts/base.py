"""The parts of a hook contract, which every program has in its own form."""

from __future__ import annotations

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from agent_sandbox.coding_agents.decide import ToolKind
    from agent_sandbox.coding_agents.tool_calls import AgentCall, Answer, HookReply


@dataclass(frozen=True)
class Contract:
    """The hook contract of a program.

    `event` is the event before a tool call, `tools` what is known of its tools, and `directory` the variable in which it names the
    directory of its session, if it does. `is_ours` tells tools of our MCP server from others, `reply` writes an answer in the program's
    form, and `rewrites` says whether the running version obeys a rewritten command.
    """

    event: str
    tools: Mapping[str, ToolKind]
    directory: str
    is_ours: Callable[[AgentCall], bool]
    reply: Callable[[Answer], HookReply]
    rewrites: Callable[[], bool]
