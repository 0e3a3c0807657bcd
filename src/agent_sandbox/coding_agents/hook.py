"""`agent-sandbox hook PROGRAM`: read the event of a coding agent, and answer it.

It starts for every tool call, so it loads almost nothing. Whatever goes wrong, it refuses: with exit code 2 and a text on standard error,
which every program here takes for a refusal. It never takes longer than `SECONDS`: a program may go on without a hook that is late.
"""

from __future__ import annotations

import os

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.coding_agents.decide import decide
from agent_sandbox.coding_agents.nested import is_inside
from agent_sandbox.coding_agents.rules import account_file, read_rules
from agent_sandbox.coding_agents.shell_words import contained
from agent_sandbox.coding_agents.tool_calls import LARGEST_EVENT, BadEvent, HookReply, Leave, read_call
from agent_sandbox.errors import SandboxError
from agent_sandbox.workspace.project import find_project

if TYPE_CHECKING:
    import signal
    from collections.abc import Mapping, Sequence

    from agent_sandbox.coding_agents.contracts.base import Contract
    from agent_sandbox.coding_agents.tool_calls import Answer
else:
    import _signal as signal  # without the enumerations of `signal`

PROGRAMS = ("claude", "codex", "gemini")
REFUSED = 2
SECONDS = 20  # all of these programs wait longer


def respond(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Answer the event on standard input, for the coding agent that the only word names. Return the exit code."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(SECONDS)  # ends this process by a signal, which the shell around it turns into a refusal
    try:
        reply = _reply(words, environment)
        _write(1, reply.output)
        _write(2, reply.error)
        return reply.code
    except Exception as error:  # a hook that breaks has not cleared this call
        try:
            _write(2, f"agent-sandbox hook: refused, because it failed: {type(error).__name__}: {str(error)[:500]}\n")
        except OSError:
            return REFUSED
        return REFUSED
    finally:
        signal.alarm(0)


def _reply(words: Sequence[str], environment: Mapping[str, str]) -> HookReply:
    if len(words) != 1 or words[0] not in PROGRAMS:
        return HookReply(error=f"agent-sandbox hook: refused: name one of {', '.join(PROGRAMS)}\n", code=REFUSED)
    contract = _contract(words[0])
    try:
        return contract.reply(_answer(contract, _read(0), environment))
    except BadEvent as error:
        return HookReply(error=f"agent-sandbox hook: refused: {error}\n", code=REFUSED)
    except SandboxError as error:
        return HookReply(error=f"agent-sandbox hook: refused: {error.message} ({error.hint})\n", code=REFUSED)


def _answer(contract: Contract, data: bytes, environment: Mapping[str, str]) -> Answer:
    call = read_call(data, contract.event, directory=environment.get(contract.directory, ""))
    if is_inside():  # the whole program runs in a sandbox
        return Leave()
    rules = read_rules(account_file())
    project = find_project(call.directory, home=environment.get("HOME") or "/").path
    return decide(
        call,
        contract.tools,
        rules,
        lambda command: contained(command, project),
        ours=contract.is_ours(call),
        rewrites=contract.rewrites(),
    )


def _contract(name: str) -> Contract:
    """Return the contract of a program. Only that one is loaded."""
    match name:
        case "claude":
            from agent_sandbox.coding_agents.contracts.claude import CLAUDE  # only the one that is needed

            return CLAUDE
        case "codex":
            from agent_sandbox.coding_agents.contracts.codex import CODEX  # only the one that is needed

            return CODEX
        case _:
            from agent_sandbox.coding_agents.contracts.gemini import GEMINI  # only the one that is needed

            return GEMINI


def _read(descriptor: int) -> bytes:
    """Read to the end. Raises `BadEvent` for more than an event can be."""
    parts, size = [], 0
    while part := os.read(descriptor, 1 << 20):
        parts.append(part)
        size += len(part)
        if size > LARGEST_EVENT:
            raise BadEvent(f"the event is larger than {LARGEST_EVENT >> 20} MB")
    if not parts:
        raise BadEvent("there is no event on standard input")
    return b"".join(parts)


def _write(descriptor: int, text: str) -> None:
    data = memoryview(text.encode(errors="backslashreplace"))
    while data:
        data = data[os.write(descriptor, data) :]
