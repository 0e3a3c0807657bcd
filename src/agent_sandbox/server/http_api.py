"""The HTTP interface of the daemon: each verb of the command line is a resource, and the answer is the verb's JSON document.

A request is performed as `agent-sandbox --json VERB …` in a worker of the daemon. A client that asks for `text/event-stream` gets the
output while it is written. A client that goes away ends what it asked for. This module needs the extra `server`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from agent_sandbox.cli.grammar import OPTIONS, VERBS
from agent_sandbox.cli.help import version
from agent_sandbox.cli.manual import MANUAL
from agent_sandbox.errors import SandboxError, WorkspaceError
from agent_sandbox.server.daemon import state_of
from agent_sandbox.server.errands import Errand, TooBusy
from agent_sandbox.server.local_ports import LOCAL_HOSTS, bears

LARGEST_REQUEST = 16 << 20  # bytes
LARGEST_ANSWER = 64 << 20
PROBLEM = "agent-sandbox/problem/1"
# Verbs that need a terminal, or the caller's own process, or serve something themselves.
NOT_SERVED = frozenset({"shell", "serve", "mcp", "completion", "setup"})
SERVED = {name: verb for name, verb in VERBS.items() if name not in NOT_SERVED and not verb.later}
_NOT_OPTIONS = frozenset({"--json", "--help", "--color", "--quiet"})
_FIELDS = frozenset({"words", "program", "options", "directory", "environment", "stdin", "stdin_base64"})


@dataclass(frozen=True)
class Order:
    """A request as a command line, with its directory, environment and input."""

    line: tuple[str, ...]
    directory: str
    environment: Mapping[str, str]
    stdin: bytes


def application(state: str, place: Path, token: str = "") -> Starlette:
    """Return the interface of the daemon in `place`. With a token, each request has to bear it."""

    async def perform(request: Request) -> Response:
        verb = request.path_params["verb"]
        if verb not in SERVED:
            raise HTTPException(404, f"there is no verb {verb!r} here")
        streamed = "text/event-stream" in request.headers.get("accept", "")
        order = await _order(request, verb, state, streamed=streamed)
        try:
            errand = await Errand.start(place, order.line, directory=order.directory, environment=order.environment, stdin=order.stdin)
        except WorkspaceError as error:
            raise HTTPException(400, error.message) from error
        except (TooBusy, OSError) as error:
            why = error.message if isinstance(error, SandboxError) else "the daemon does not answer"
            raise HTTPException(503, why, headers={"Retry-After": "1"}) from error
        if streamed:
            return StreamingResponse(_events(errand), media_type="text/event-stream")
        return await _document(request, errand)

    async def show_state(request: Request) -> Response:
        counts = state_of(state)
        return JSONResponse({"schema": "agent-sandbox/serve/1", "running": counts is not None, **(asdict(counts) if counts else {})})

    async def show_metrics(request: Request) -> Response:
        return PlainTextResponse(_metrics(state), media_type="text/plain; version=0.0.4")

    async def show_description(request: Request) -> Response:
        return JSONResponse(description())

    async def show_health(request: Request) -> Response:
        return JSONResponse({"alive": True})

    routes = [
        Route("/v1/verbs/{verb}", perform, methods=["POST"]),
        Route("/v1/state", show_state, methods=["GET"]),
        Route("/v1/openapi.json", show_description, methods=["GET"]),
        Route("/metrics", show_metrics, methods=["GET"]),
        Route("/healthz", show_health, methods=["GET"]),
    ]
    served = Starlette(routes=routes, exception_handlers={HTTPException: _refusal})
    if token:
        served.add_middleware(_Guard, token=token)
    return served


class _Guard:
    """Lets through what bears the token and was meant for this machine's own address. All else is answered before anything of it is read.

    A page in a browser does not know the token. It is refused also if it did: by the Host that its name for this address gives away, and by
    its Origin.
    """

    def __init__(self, app: Any, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        refusal = self._refusal(scope.get("headers", ())) if scope["type"] == "http" else _problem(403, "only HTTP is served here")
        await (self._app if refusal is None else refusal)(scope, receive, send)

    def _refusal(self, headers: Sequence[tuple[bytes, bytes]]) -> JSONResponse | None:
        if not bears(headers, self._token):
            return _problem(401, "the request bears no token, or another one", {"WWW-Authenticate": "Bearer"})
        hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
        if len(hosts) != 1 or hosts[0].rpartition(":")[0] not in LOCAL_HOSTS or any(name == b"origin" for name, _ in headers):
            return _problem(403, "the request is for another host, or comes from a page in a browser")
        return None


def _problem(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"schema": PROBLEM, "status": status, "message": message}, status, headers)


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _problem(error.status_code, error.detail, error.headers)


async def _order(request: Request, verb: str, state: str, *, streamed: bool) -> Order:
    """Read the body of a request. Raises `HTTPException` for what cannot be understood."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > LARGEST_REQUEST:
            raise HTTPException(413, f"the request is larger than {LARGEST_REQUEST >> 20} MiB")
    try:
        asked = json.loads(body) if body else {}
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is no JSON: {error}") from error
    if not isinstance(asked, dict) or (unknown := set(asked) - _FIELDS):
        wanted = ", ".join(sorted(_FIELDS))
        raise HTTPException(
            400, f"unknown fields: {', '.join(sorted(unknown))}" if isinstance(asked, dict) else f"send an object with {wanted}"
        )
    words, program = _texts(asked, "words"), _texts(asked, "program")
    if program and (words or not SERVED[verb].command):
        raise HTTPException(400, "a program is for verbs that run one, and without other words")
    if any(word.startswith("-") and word != "-" for word in words):
        raise HTTPException(400, "a word begins with '-': options are in `options`, and a program with its arguments in `program`")
    line = [
        *(() if streamed else ("--json",)),
        verb,
        *_options(asked.get("options", {}), verb),
        *words,
        *(("--", *program) if program else ()),
    ]
    directory = asked.get("directory", "/")
    if not isinstance(directory, str) or not directory.startswith("/"):
        raise HTTPException(400, "`directory` is an absolute path")
    environment = asked.get("environment", {})
    if not isinstance(environment, dict) or not all(
        isinstance(value, str) and "\0" not in name + value for name, value in environment.items()
    ):
        raise HTTPException(400, "`environment` is an object of texts")
    return Order(tuple(line), directory, {**os.environ, **environment, "AGENT_SANDBOX_STATE": state}, _stdin(asked))


def _texts(asked: Mapping[str, Any], name: str) -> list[str]:
    texts = asked.get(name, [])
    if not isinstance(texts, list) or not all(isinstance(each, str) and "\0" not in each for each in texts):
        raise HTTPException(400, f"`{name}` is a list of texts")
    return texts


def _options(asked: object, verb: str) -> list[str]:
    """Return options as words of a command line. Raises `HTTPException` for one that the verb does not have."""
    if not isinstance(asked, dict):
        raise HTTPException(400, "`options` is an object: the name of each option, and true, a text, or a list of texts")
    line: list[str] = []
    for name, value in asked.items():
        if name not in SERVED[verb].every_option or name in _NOT_OPTIONS:
            raise HTTPException(400, f"{verb} has no option {name!r} here")
        values = value if isinstance(value, list) else [value]
        for each in values:
            if each is True and not OPTIONS[name].value:
                line.append(name)
            elif isinstance(each, str) and OPTIONS[name].value and "\0" not in each:
                line.append(f"{name}={each}")
            elif each is not False or OPTIONS[name].value:
                raise HTTPException(400, f"{name} takes {'a text' if OPTIONS[name].value else 'true or false'}")
    return line


def _stdin(asked: Mapping[str, Any]) -> bytes:
    text, encoded = asked.get("stdin", ""), asked.get("stdin_base64", "")
    if not isinstance(text, str) or not isinstance(encoded, str) or (text and encoded):
        raise HTTPException(400, "`stdin` is a text; or `stdin_base64` bytes")
    try:
        return base64.b64decode(encoded, validate=True) if encoded else text.encode()
    except ValueError as error:
        raise HTTPException(400, "`stdin_base64` is no base64, or `stdin` no Unicode") from error


async def _document(request: Request, errand: Errand) -> Response:
    """Answer with the document of a verb, when it has ended. A client that goes away meanwhile ends it."""
    collected = {"stdout": bytearray(), "stderr": bytearray()}
    try:
        async with aclosing(_watched(request, errand)) as output:
            async for name, data in output:
                collected[name] += data
                if sum(map(len, collected.values())) > LARGEST_ANSWER:
                    return _problem(500, f"the answer is larger than {LARGEST_ANSWER >> 20} MiB; ask for text/event-stream")
    finally:
        errand.close()
    messages = collected["stderr"].decode(errors="backslashreplace")
    try:
        result = json.loads(collected["stdout"])
    except ValueError:  # a verb that prints text for people only
        result = {"schema": "agent-sandbox/text/1", "text": collected["stdout"].decode(errors="backslashreplace")}
    return JSONResponse({"exit": errand.exit, "result": result, "messages": messages})


async def _watched(request: Request, errand: Errand) -> AsyncGenerator[tuple[str, bytes], None]:
    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            continue
        errand.close()

    watcher = asyncio.create_task(gone())
    try:
        async for each in errand.output():
            yield each
    finally:
        watcher.cancel()


async def _events(errand: Errand) -> AsyncIterator[bytes]:
    """Yield the output as events: `stdout` and `stderr` with a text, or base64 of what is none; in the end `end` with the exit code."""
    held = {"stdout": b"", "stderr": b""}
    try:
        async for name, data in errand.output():
            content, held[name] = _content(held[name] + data)
            if content:
                yield _event(name, content)
        for name, rest in held.items():
            if rest:
                yield _event(name, {"base64": base64.b64encode(rest).decode()})
        yield _event("end", {"exit": errand.exit})
    finally:
        errand.close()


def _event(name: str, content: Mapping[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(content)}\n\n".encode()


def _content(data: bytes) -> tuple[dict[str, str], bytes]:
    """Return what an event says of bytes of output, and the bytes that wait for the rest of their character."""
    try:
        return {"text": data.decode()}, b""
    except UnicodeDecodeError as error:
        if error.end < len(data) or error.reason != "unexpected end of data":
            return {"base64": base64.b64encode(data).decode()}, b""
        whole = data[: error.start].decode()
        return {"text": whole} if whole else {}, data[error.start :]


def _metrics(state: str) -> str:
    """Return the counts in Prometheus's text format."""
    counts = state_of(state)
    if counts is None:
        return ""
    told = [("counter", name) for name in ("performed", "refused", "handed_back", "lost")]
    told += [("gauge", name) for name in ("performing", "waiting", "ready")]
    lines = (
        f"# TYPE agent_sandbox_{name}{'_total' if kind == 'counter' else ''} {kind}\n"
        f"agent_sandbox_{name}{'_total' if kind == 'counter' else ''} {getattr(counts, name)}\n"
        for kind, name in told
    )
    return "".join(lines) + f"# TYPE agent_sandbox_start_time_seconds gauge\nagent_sandbox_start_time_seconds {counts.began}\n"


def description() -> dict[str, Any]:
    """Return the description of the interface, in OpenAPI 3.1."""
    text = {"type": "string"}
    answer = {
        "type": "object",
        "required": ["exit", "result", "messages"],
        "properties": {
            "exit": {"type": "integer", "minimum": 0, "maximum": 255, "description": "the exit code of the command line"},
            "result": {"type": "object", "required": ["schema"], "properties": {"schema": text}, "description": "the document of --json"},
            "messages": {"type": "string", "description": "what was said to people"},
        },
    }
    problem = {
        "type": "object",
        "required": ["schema", "status", "message"],
        "properties": {"schema": {"const": PROBLEM}, "status": {"type": "integer"}, "message": text},
    }

    def said(status: str, why: str) -> dict[str, Any]:
        return {status: {"description": why, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Problem"}}}}}

    refusals = {**said("400", "The request cannot be understood."), **said("413", "It is too large."), **said("503", "Try again later.")}
    paths: dict[str, Any] = {}
    for name, verb in SERVED.items():
        options = {each: _option_schema(each) for each in verb.every_option if each not in _NOT_OPTIONS}
        fields: dict[str, Any] = {
            "words": {
                "type": "array",
                "items": {"type": "string", "pattern": "^(?!-.)[^\\u0000]*$"},
                "description": f"as in: {verb.usage}",
            },
            "options": {"type": "object", "additionalProperties": False, "properties": options},
            "directory": {"type": "string", "pattern": "^/[^\\u0000]*$", "default": "/", "description": "where the command line is typed"},
            "environment": {"type": "object", "additionalProperties": text, "description": "added to the daemon's own"},
            "stdin": {**text, "description": "standard input, or base64 in `stdin_base64`"},
            "stdin_base64": {**text, "contentEncoding": "base64"},
        }
        if verb.command:
            fields["program"] = {
                "type": "array",
                "items": {"type": "string"},
                "description": "a program and its arguments, instead of words",
            }
        body = {"application/json": {"schema": {"type": "object", "additionalProperties": False, "properties": fields}}}
        content = {
            "application/json": {"schema": {"$ref": "#/components/schemas/Answer"}},
            "text/event-stream": {"schema": {"type": "string", "description": "events stdout, stderr and end"}},
        }
        paths[f"/v1/verbs/{name}"] = {
            "post": {
                "operationId": name,
                "summary": f"{verb.summary[0].upper()}{verb.summary[1:]}.",
                **({"description": MANUAL[name]} if name in MANUAL else {}),
                "requestBody": {"content": body},
                "responses": {"200": {"description": "It was performed.", "content": content}, **refusals},
            }
        }
    one = {"type": "object"}
    for path, what in (
        ("/v1/state", "The state of the daemon."),
        ("/healthz", "Whether it answers."),
        ("/v1/openapi.json", "This description."),
    ):
        paths[path] = {
            "get": {"summary": what, "responses": {"200": {"description": what, "content": {"application/json": {"schema": one}}}}}
        }
    paths["/metrics"] = {
        "get": {
            "summary": "Counts for Prometheus.",
            "responses": {"200": {"description": "Counts.", "content": {"text/plain": {"schema": text}}}},
        }
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Agent Sandbox", "version": version(), "summary": "The verbs of the command line over HTTP."},
        "paths": paths,
        "components": {
            "schemas": {"Answer": answer, "Problem": problem},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _option_schema(name: str) -> dict[str, Any]:
    option = OPTIONS[name]
    text = {"type": "string", "pattern": "^[^\\u0000]*$"}
    kind = {"oneOf": [text, {"type": "array", "items": text}]} if option.value else {"type": "boolean"}
    return {**kind, "description": option.help}
