"""The server as the package `mcp` wants it: it lists and calls tools, reads resources, reports progress, and lets a person answer.

It serves the protocol of 2026-07-28 and the handshakes before it. A question to a person is an elicitation where the client takes requests
of a server, a result that asks for input where the protocol has that, and else a refusal that names the question.
"""

from __future__ import annotations

import json
import logging
import math
import time
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import mcp_types as types
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from mcp.server.lowlevel import Server
from mcp.server.request_state import RequestStateBoundary, RequestStateSecurity
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from agent_sandbox._fast.values import replace
from agent_sandbox.cli.commands.approve import user_name
from agent_sandbox.cli.help import version
from agent_sandbox.cli.main import failure_of, fault_of
from agent_sandbox.engine.approvals.question import Decision
from agent_sandbox.errors import Denied, PolicyError, SandboxError
from agent_sandbox.mcp import catalogue
from agent_sandbox.mcp.answers import ToolAnswer, answer, cut, plain_answer, sendable
from agent_sandbox.mcp.calls import LONGEST_QUESTION, ServedCall
from agent_sandbox.mcp.person import PendingQuestion
from agent_sandbox.mcp.python_sessions import can_fork
from agent_sandbox.mcp.tools import LONGEST_RESOURCE, Toolbox
from agent_sandbox.workspace.escape import visible

if TYPE_CHECKING:
    from mcp.server.context import ServerRequestContext

    from agent_sandbox.engine.approvals.inbox import Waiting

    Context = ServerRequestContext[Any, Any]

log = logging.getLogger(__name__)
NAME = "agent-sandbox"
GONE = "agent_sandbox.gone"  # in the scope of an HTTP request whose client has gone
APPROVE = "approve"  # the field of a form that says yes
_KIND = "promote_"  # before the name of a protected kind, in the form
_TICK_SECONDS = 0.1
_PROGRESS_SECONDS = 1.0
_LONGEST_FAULT = 300  # characters of what is wrong with arguments
_LONGEST_NAME = 40  # characters of what a client calls itself
RESOURCES = {
    "agent-sandbox://diff": ("diff", "The pending changes, as a unified diff", "text/x-diff"),
    "agent-sandbox://ledger": ("ledger", "The newest entries of the ledger about this sandbox", "application/json"),
    "agent-sandbox://timeline": ("timeline", "The steps of the python session", "text/plain"),
}


class SandboxServer:
    """Serves one toolbox to any number of clients, one call after the other."""

    def __init__(self, toolbox: Toolbox) -> None:
        self._toolbox = toolbox
        self._turn = anyio.Lock()
        entries = {each.name: each for each in catalogue.tools(forks=can_fork())}
        self._checks = {name: Draft202012Validator(each.schema) for name, each in entries.items()}
        self._listed = [tool_of(each) for each in entries.values()]
        self.lowlevel: Server[Any] = Server(
            NAME,
            version=version(),
            title="Agent Sandbox",
            description="Run, change and try on a clone of this machine; promote what the user approves.",
            instructions=catalogue.INSTRUCTIONS,
            get_tool_input_schema=lambda name: entries[name].schema if name in entries else None,
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
            on_list_resources=self._list_resources,
            on_list_resource_templates=self._list_templates,
            on_read_resource=self._read_resource,
        )
        # A client echoes the state of a question. The boundary seals it, with the tool, its arguments and an expiry.
        self.lowlevel.middleware.append(RequestStateBoundary(RequestStateSecurity.ephemeral(), default_audience=NAME))

    async def _list_tools(self, context: Context, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        return types.ListToolsResult(tools=self._listed)

    async def _call_tool(self, context: Context, params: types.CallToolRequestParams) -> types.CallToolResult | types.InputRequiredResult:
        check = self._checks.get(params.name)
        if check is None:
            raise MCPError(types.INVALID_PARAMS, f"there is no tool {params.name[:80]!r}")
        try:
            arguments: dict[str, Any] = with_numbers(dict(params.arguments or {}))
        except ValueError as error:
            return _result(_invalid(str(error)))
        if fault := next(iter(sorted(check.iter_errors(arguments), key=lambda each: list(map(str, each.path)))), None):
            return _result(_invalid(_fault_of(fault)))
        modern = context.session.protocol_version in MODERN_PROTOCOL_VERSIONS
        elicits = _elicits(context)
        call = ServedCall(params.name, arguments, can_elicit=elicits and not modern and context.session.can_send_request)
        async with self._turn:
            if modern and params.request_state is not None:
                await self._take_answers(context, params.request_state, params.input_responses or {})
            found = await self._performed(context, call)
        if found is None:
            return self._ask_for_input(call, elicits and modern)
        if call.pending:
            found = _with_pending(found, call)
        return _result(found)

    async def _performed(self, context: Context, call: ServedCall) -> ToolAnswer | None:
        """Perform a call in a thread, report its progress, and ask its questions. None if it waits for a person.

        If the client cancels the call or goes away, its work is ended before this returns.
        """
        found: ToolAnswer | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._accompany, context, call, tasks)
            try:
                found = await anyio.to_thread.run_sync(self._answer_of, call)
            finally:
                tasks.cancel_scope.cancel()
        return found

    def _answer_of(self, call: ServedCall) -> ToolAnswer | None:
        try:
            found = self._toolbox.perform(call)
            call.finished()
            return found
        except Denied as error:
            call.finished()
            if call.pending and error.verdict.because.rule == "approval":
                return None
            failure = failure_of(error)
        except SandboxError as error:
            call.finished()
            failure = failure_of(error)
        except OSError as error:  # what the files of the sandbox say
            call.finished()
            failure = replace(fault_of(error), error=replace(fault_of(error).error, hint=""))
        except Exception as error:  # the model is told, and the server goes on
            call.finished()
            failure = fault_of(error)
        facts = failure.error
        return answer(f"{facts.message}\n{facts.hint}".rstrip("\n"), failure, failed=True)

    async def _accompany(self, context: Context, call: ServedCall, tasks: Any) -> None:
        """While a call runs, report its progress and pass its questions on. Cancelled with the call, it ends the work."""
        began = told = time.monotonic()
        try:
            while True:
                await anyio.sleep(_TICK_SECONDS)
                while call.questions:
                    waiting, kinds = call.questions.popleft()
                    tasks.start_soon(self._elicit, context, call, waiting, kinds)
                if context.request is not None and context.request.scope.get(GONE):
                    call.cancel()
                now = time.monotonic()
                if now - told >= _PROGRESS_SECONDS:
                    told = now
                    await context.session.report_progress(round(now - began, 1), None, _progress_of(call))
        finally:
            call.cancel()

    async def _elicit(self, context: Context, call: ServedCall, waiting: Waiting, kinds: tuple[str, ...]) -> None:
        """Ask the client's user, and put the answer into the inbox. A client that cannot ask leaves the question to the command line."""
        try:
            request = _form(waiting.text, kinds)
            found = await context.session.elicit_form(request.message, request.requested_schema, context.request_id)
        except Exception as error:  # whatever the client did: it has not answered
            log.warning("the client could not ask its user: %s", type(error).__name__)
            call.give_up()
            return
        decision = Decision.ONCE if _says_yes(found, kinds) else Decision.NO
        by = _who(context)

        def put() -> None:
            inbox = self._toolbox.workspace.inbox()
            inbox.answer(waiting.name, decision, digest=waiting.digest, by=by)

        try:
            await anyio.to_thread.run_sync(put)
        except (SandboxError, OSError) as error:  # somebody answered elsewhere in this moment
            log.warning("an answer came too late: %s", error)

    def _ask_for_input(self, call: ServedCall, asks: bool) -> types.CallToolResult | types.InputRequiredResult:
        waiting = call.pending[0]
        if not asks or len(waiting.text) > LONGEST_QUESTION or waiting.needs:
            return _result(_pending(call))
        kinds = call.asked_kinds
        state = json.dumps({"question": waiting.digest, "kinds": kinds})
        return types.InputRequiredResult(
            input_requests={APPROVE: types.ElicitRequest(params=_form(waiting.text, kinds))}, request_state=state
        )

    async def _take_answers(self, context: Context, state: str, responses: Any) -> None:
        """Put the answer that came with a repeated request into the inbox. `state` is ours: its seal holds, for these arguments."""
        found = responses.get(APPROVE)
        if not isinstance(found, types.ElicitResult):
            return
        asked = json.loads(state)
        yes, by = _says_yes(found, tuple(asked["kinds"])), _who(context)

        def put() -> None:
            workspace = self._toolbox.workspace
            workspace.questions.answer(asked["question"], workspace.current_policy(), yes=yes, by=by)

        try:
            await anyio.to_thread.run_sync(put)
        except PolicyError as error:  # it was answered elsewhere, or is too old: the call asks again
            log.warning("an answer came too late: %s", error)

    async def _list_resources(self, context: Context, params: types.PaginatedRequestParams | None) -> types.ListResourcesResult:
        listed = [types.Resource(uri=uri, name=name, description=about, mime_type=kind) for uri, (name, about, kind) in RESOURCES.items()]
        return types.ListResourcesResult(resources=listed)

    async def _list_templates(self, context: Context, params: types.PaginatedRequestParams | None) -> types.ListResourceTemplatesResult:
        return types.ListResourceTemplatesResult(resource_templates=[])

    async def _read_resource(self, context: Context, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
        if params.uri not in RESOURCES:
            raise MCPError(types.INVALID_PARAMS, f"there is no resource {params.uri[:200]!r}", data={"uri": params.uri[:200]})
        name, _, kind = RESOURCES[params.uri]

        def read() -> str:
            match name:
                case "diff":
                    return cut(self._toolbox.pending(())[1], LONGEST_RESOURCE)
                case "ledger":
                    return json.dumps(self._toolbox.ledger())
                case _:
                    return self._toolbox.timeline()

        async with self._turn:
            try:
                text = await anyio.to_thread.run_sync(read)
            except (SandboxError, OSError) as error:
                raise MCPError(types.INTERNAL_ERROR, str(error)[:500]) from None
        return types.ReadResourceResult(contents=[types.TextResourceContents(uri=params.uri, mime_type=kind, text=sendable(text))])


def tool_of(entry: catalogue.ToolEntry) -> types.Tool:
    """Return an entry of the catalogue as the protocol lists it."""
    return types.Tool(
        name=entry.name,
        description=entry.description,
        input_schema=entry.listed,
        annotations=types.ToolAnnotations(
            read_only_hint=entry.reads,
            destructive_hint=None if entry.reads else entry.destroys,
            open_world_hint=entry.reaches_out,
        ),
    )


def _result(found: ToolAnswer) -> types.CallToolResult:
    return types.CallToolResult(
        content=[types.TextContent(type="text", text=found.text)], structured_content=found.document, is_error=found.failed
    )


def with_numbers(value: Any) -> Any:
    """Return a JSON value with its whole numbers as integers: JSON knows one kind of number, and 1.0 is 1.

    Raises ValueError for what is no number, or is infinite: JSON has neither, and every comparison with the first is false.

    >>> with_numbers({"limit": 2.0, "seconds": [0.5]})
    {'limit': 2, 'seconds': [0.5]}
    """
    match value:
        case float():
            if not math.isfinite(value):
                raise ValueError(f"{value} is no number of JSON")
            return int(value) if value.is_integer() else value
        case dict():
            return {name: with_numbers(each) for name, each in value.items()}
        case list():
            return [with_numbers(each) for each in value]
    return value


def _fault_of(fault: Any) -> str:
    """Return what is wrong with the arguments. A long value is not repeated."""
    place = ".".join(map(str, fault.path))
    why = fault.message if len(fault.message) <= _LONGEST_FAULT else f"does not meet {fault.validator} {str(fault.validator_value)[:80]}"
    return f"{place}: {why}" if place else why


def _invalid(why: str) -> ToolAnswer:
    facts = {"kind": "InvalidArguments", "message": why, "hint": "see the tool's input schema"}
    return plain_answer(f"invalid arguments: {why}", "error", {"error": facts, "exit": 2}, failed=True)


def _pending(call: ServedCall) -> ToolAnswer:
    questions = [PendingQuestion.of(each) for each in call.pending]
    text = "Not done: a person must approve it. Ask the user to run:\n" + "\n".join(each.approve for each in questions)
    text += "\nThen call this tool again with the same arguments."
    return plain_answer(text, "pending", {"tool": call.tool, "pending": questions}, failed=True)


def _with_pending(found: ToolAnswer, call: ServedCall) -> ToolAnswer:
    """Return the answer of a call that went on although something in it was refused until a person approves it."""
    commands = "\n".join(dict.fromkeys(PendingQuestion.of(each).approve for each in call.pending))
    return ToolAnswer(f"{found.text}\n--- refused until a person runs:\n{commands}", found.document, found.failed)


def _form(text: str, kinds: tuple[str, ...]) -> types.ElicitRequestFormParams:
    fields: dict[str, Any] = {APPROVE: {"type": "boolean", "title": "Allow exactly this, once", "default": False}}
    fields |= {f"{_KIND}{kind}": {"type": "boolean", "title": f"Also the protected kind {kind}", "default": False} for kind in kinds}
    schema: dict[str, Any] = {"type": "object", "properties": fields, "required": list(fields)}
    return types.ElicitRequestFormParams(message=text, requested_schema=schema)


def _says_yes(found: types.ElicitResult, kinds: tuple[str, ...]) -> bool:
    """Return whether a person has allowed it, and each protected kind. Everything else is no."""
    content = found.content or {}
    return found.action == "accept" and all(content.get(name) is True for name in (APPROVE, *(f"{_KIND}{kind}" for kind in kinds)))


def _elicits(context: Context) -> bool:
    """Return whether the client can show a form to its user. One that names no mode means forms."""
    capabilities = context.session.client_capabilities
    able = capabilities.elicitation if capabilities is not None else None
    return able is not None and (able.form is not None or able.url is None)


def _who(context: Context) -> str:
    params = context.session.client_params
    name = visible(params.client_info.name)[:_LONGEST_NAME] if params is not None else "an MCP client"
    return f"{user_name()} at {name}"


def _progress_of(call: ServedCall) -> str:
    last = visible(call.last_line)
    return f"{call.tool}: {last}" if last else call.tool
