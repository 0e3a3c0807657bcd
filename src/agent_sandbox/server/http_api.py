"""The HTTP interface of the daemon: each verb of the command line is a resource, and the answer is the verb's JSON document.

A request is performed as `agent-sandbox --json VERB …` in a worker of the daemon. A client that asks for `text/event-stream` gets the
output while it is written. A client that goes away ends what it asked for. This module needs the extra `server`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from agent_sandbox.cli.grammar import OPTIONS, VERBS
from agent_sandbox.cli.help import version
from agent_sandbox.cli.manual import MANUAL
from agent_sandbox.errors import SandboxError, WorkspaceError
from agent_sandbox.server.daemon_place import Counts, state_of
from agent_sandbox.server.errands import Errand, TooBusy
from agent_sandbox.server.event_log import silent
from agent_sandbox.server.local_ports import LOCAL_HOSTS, bears
from agent_sandbox.server.traces import Traces

LARGEST_REQUEST = 16 << 20  # bytes
LARGEST_ANSWER = 64 << 20
PROBLEM = "agent-sandbox/problem/1"
_TOO_LARGE = f"the request is larger than {LARGEST_REQUEST >> 20} MiB"
_CLOSE = {"Connection": "close"}  # what follows on the connection is the rest of a body, which nobody reads
# Verbs that need a terminal, or the caller's own process, or serve something themselves.
NOT_SERVED = frozenset({"shell", "serve", "mcp", "completion", "setup"})
SERVED = {name: verb for name, verb in VERBS.items() if name not in NOT_SERVED}
_NOT_OPTIONS = frozenset({"--json", "--help", "--color", "--quiet"})
_PATHS = frozenset({"/v1/state", "/v1/openapi.json", "/metrics", "/healthz"})
_ERRAND = "agent_sandbox.errand"  # in the scope of a request that is performed
_ENDLESS = frozenset({"--follow", "--watch"})
_WORD = "^[^\\u0000]*$"
_BASE64 = "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_FIELDS = frozenset({"words", "program", "options", "directory", "environment", "stdin", "stdin_base64"})


@dataclass(frozen=True)
class Order:
    """A request as a command line, with its directory, environment and input."""

    line: tuple[str, ...]
    directory: str
    environment: Mapping[str, str]
    stdin: bytes


def application(
    state: str,
    place: Path,
    token: str = "",
    *,
    keys: str = "",
    log: Callable[..., None] = silent,
    traces: Traces | None = None,
) -> Starlette:
    """Return the interface of the daemon in `place`. With a token, each request has to bear it. Requests are logged and traced.

    Whatever a client's environment says, its command lines use this directory of state, and these `keys` of its ledger.
    """
    # A chosen directory of state holds its own keys, unless they are chosen, too: the ledger would be taken for a forged one.
    chosen = {"AGENT_SANDBOX_STATE": state} | ({"AGENT_SANDBOX_KEYS": keys} if keys else {})

    async def perform(request: Request) -> Response:
        verb = request.path_params["verb"]
        if verb not in SERVED:
            raise HTTPException(404, f"there is no verb {verb!r} here")
        streamed = "text/event-stream" in request.headers.get("accept", "")
        order = await _order(request, verb, chosen, streamed=streamed)
        try:
            errand = await _begun(request, order, place)
        except WorkspaceError as error:
            raise HTTPException(404, error.message) from error
        except (TooBusy, OSError) as error:
            why = error.message if isinstance(error, SandboxError) else "the daemon does not answer"
            raise HTTPException(503, why, headers={"Retry-After": "1"}) from error
        request.scope[_ERRAND] = errand
        if streamed:
            return StreamingResponse(_events(errand), media_type="text/event-stream")
        return await _document(request, errand)

    async def show_state(request: Request) -> Response:
        counts = await _counts(state)
        return JSONResponse({"schema": "agent-sandbox/serve/1", "running": counts is not None, **(asdict(counts) if counts else {})})

    async def show_metrics(request: Request) -> Response:
        return PlainTextResponse(_metrics(await _counts(state)), media_type="text/plain; version=0.0.4")

    async def show_description(request: Request) -> Response:
        return JSONResponse(description(token=bool(token)))

    async def show_health(request: Request) -> Response:
        return JSONResponse({"alive": True})

    routes = [
        Route("/v1/verbs/{verb}", perform, methods=["POST"]),
        Route("/v1/state", show_state, methods=["GET"]),
        Route("/v1/openapi.json", show_description, methods=["GET"]),
        Route("/metrics", show_metrics, methods=["GET"]),
        Route("/healthz", show_health, methods=["GET"]),
    ]
    handlers = {HTTPException: _refusal, ClientDisconnect: _refusal, Exception: _refusal}
    served = Starlette(routes=routes, exception_handlers=handlers)
    served.router.redirect_slashes = False
    served.add_middleware(_Guard, token=token)
    served.add_middleware(_Record, log=log, traces=traces or Traces(), door="port" if token else "socket")
    return served


class _Record:
    """Logs each request, and traces it: what was asked for and how it ended, and none of its content."""

    def __init__(self, app: Any, log: Callable[..., None], traces: Traces, door: str) -> None:
        self._app, self._log, self._traces, self._door = app, log, traces, door

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        began, status = time.monotonic(), 0

        async def noting(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        verb = scope.get("path", "").removeprefix("/v1/verbs/")
        what = verb if verb in SERVED else "other" if scope.get("path") not in _PATHS else scope["path"]
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope.get("headers", ())}
        with self._traces.span(f"agent-sandbox {what}", headers) as attributes:
            try:
                await self._app(scope, receive, noting)
            finally:
                errand = scope.get(_ERRAND)
                code = None if errand is None else errand.exit
                attributes |= {"http.request.method": scope.get("method", ""), "http.response.status_code": status}
                attributes |= {"agent_sandbox.verb": what} | ({} if code is None else {"process.exit.code": code})
                seconds = round(time.monotonic() - began, 3)
                self._log("request", door=self._door, method=scope.get("method"), what=what, status=status, exit=code, seconds=seconds)


class _Guard:
    """Lets through what bears the token and was meant for this machine's own address. All else is answered before anything of it is read.

    A page in a browser does not know the token. It is refused also if it did: by the Host that its name for this address gives away, and by
    its Origin. A request with two lengths is refused: a proxy in front may believe the other one, and take its body for a request.
    """

    def __init__(self, app: Any, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        refusal = self._refusal(scope.get("headers", ())) if scope["type"] == "http" else _problem(403, "only HTTP is served here")
        await (self._app if refusal is None else refusal)(scope, receive, send)

    def _refusal(self, headers: Sequence[tuple[bytes, bytes]]) -> JSONResponse | None:
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
            return _problem(400, "the request has both Content-Length and Transfer-Encoding", _CLOSE)
        if any(name == b"content-length" and _is_too_long(value) for name, value in headers):
            return _problem(413, _TOO_LARGE, _CLOSE)
        if not self._token:  # a socket that only this user can reach
            return None
        if not bears(headers, self._token):
            return _problem(401, "the request bears no token, or another one", {"WWW-Authenticate": "Bearer", **_CLOSE})
        hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
        if len(hosts) != 1 or hosts[0].rpartition(":")[0] not in LOCAL_HOSTS or any(name == b"origin" for name, _ in headers):
            return _problem(403, "the request is for another host, or comes from a page in a browser", _CLOSE)
        return None


def _is_too_long(length: bytes) -> bool:
    """Whether a length is beyond the limit. What is no number, the server itself refuses."""
    return len(length) > len(str(LARGEST_REQUEST)) or (length.isdigit() and int(length) > LARGEST_REQUEST)


def _problem(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"schema": PROBLEM, "status": status, "message": message}, status, headers)


async def _refusal(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return _problem(error.status_code, error.detail, error.headers)
    if isinstance(error, ClientDisconnect):  # nobody reads this
        return _problem(400, "the client has gone")
    return _problem(500, f"the request could not be answered: {type(error).__name__}")


async def _counts(state: str) -> Counts | None:
    """Ask the daemon for its counts. Raises `HTTPException` if it does not answer."""
    try:
        return await asyncio.to_thread(state_of, state)
    except SandboxError as error:
        raise HTTPException(503, error.message, headers={"Retry-After": "1"}) from error


async def _begun(request: Request, order: Order, place: Path) -> Errand:
    """Let the daemon begin. A client that goes away before its turn has asked for nothing: raises `ClientDisconnect`."""
    starting = Errand.start(place, order.line, directory=order.directory, environment=order.environment, stdin=order.stdin)
    beginning, leaving = asyncio.ensure_future(starting), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((beginning, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not beginning.done():
            raise ClientDisconnect
        return beginning.result()
    finally:
        beginning.cancel()
        leaving.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


async def _order(request: Request, verb: str, chosen: Mapping[str, str], *, streamed: bool) -> Order:
    """Read the body of a request. `chosen` are variables that hold for each. Raises `HTTPException` for what cannot be understood."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > LARGEST_REQUEST:
            raise HTTPException(413, _TOO_LARGE, headers=_CLOSE)
    try:
        asked = json.loads(body.decode(), object_pairs_hook=_object) if body else {}
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is no JSON: {error}") from error
    if not isinstance(asked, dict) or (unknown := set(asked) - _FIELDS):
        wanted = ", ".join(sorted(_FIELDS))
        raise HTTPException(
            400, f"unknown fields: {', '.join(sorted(unknown))}" if isinstance(asked, dict) else f"send an object with {wanted}"
        )
    words, program = _texts(asked, "words"), _texts(asked, "program")
    spec = SERVED[verb]
    if "program" in asked and (len(words) > spec.named or not spec.command or ("words" in asked and not spec.named)):
        raise HTTPException(400, "a program is for verbs that run one, and without other words")
    if any(word.startswith("-") and word != "-" for word in words):
        raise HTTPException(400, "a word begins with '-': options are in `options`, and a program with its arguments in `program`")
    options = _options(asked.get("options", {}), verb)
    if not streamed and (endless := _ENDLESS.intersection(options)):
        raise HTTPException(406, f"{', '.join(endless)} has no end: ask for it with Accept: text/event-stream")
    line = [
        *(() if streamed else ("--json",)),
        verb,
        *options,
        *words,
        *(("--", *program) if program else ()),
    ]
    directory = asked.get("directory", "/")
    if not _is_text(directory) or not directory.startswith("/"):
        raise HTTPException(400, "`directory` is an absolute path")
    environment = asked.get("environment", {})
    if not isinstance(environment, dict) or not all(
        name and "=" not in name and _is_text(name) and _is_text(value) for name, value in environment.items()
    ):
        raise HTTPException(400, "`environment` is an object of texts, by names without '='")
    return Order(tuple(line), directory, {**os.environ, **environment, **chosen}, _stdin(asked))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. Raises ValueError for a name that it has twice: who has read it before us may have taken the other one."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name appears twice in one object")
    return found


def _is_text(value: object) -> TypeGuard[str]:
    """Whether a value can be a word of a command line, or a part of the environment."""
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        os.fsencode(value)
    except UnicodeEncodeError:  # half a character of UTF-16
        return False
    return True


def _texts(asked: Mapping[str, Any], name: str) -> list[str]:
    texts = asked.get(name, [])
    if not isinstance(texts, list) or not all(map(_is_text, texts)):
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
        if not OPTIONS[name].value:
            if not isinstance(value, bool):
                raise HTTPException(400, f"{name} takes true or false")
            line += [name] if value else []
            continue
        values = value if isinstance(value, list) else [value]
        if not all(map(_is_text, values)):
            raise HTTPException(400, f"{name} takes a text")
        line += [f"{name}={each}" for each in values]
    return line


def _stdin(asked: Mapping[str, Any]) -> bytes:
    text, encoded = asked.get("stdin", ""), asked.get("stdin_base64", "")
    if not isinstance(text, str) or not isinstance(encoded, str) or {"stdin", "stdin_base64"} <= set(asked):
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
    async def end_with_client() -> None:
        await _gone(request)
        errand.close()

    watcher = asyncio.create_task(end_with_client())
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


def _metrics(counts: Counts | None) -> str:
    """Return the counts in Prometheus's text format."""
    if counts is None:
        return ""
    told = [("counter", name) for name in ("performed", "refused", "handed_back", "lost", "held_ended")]
    told += [("gauge", name) for name in ("performing", "waiting", "ready", "held")]
    lines = (
        f"# TYPE agent_sandbox_{name}{'_total' if kind == 'counter' else ''} {kind}\n"
        f"agent_sandbox_{name}{'_total' if kind == 'counter' else ''} {getattr(counts, name)}\n"
        for kind, name in told
    )
    return "".join(lines) + f"# TYPE agent_sandbox_start_time_seconds gauge\nagent_sandbox_start_time_seconds {counts.began}\n"


def description(*, token: bool = False) -> dict[str, Any]:
    """Return the description of the interface, in OpenAPI 3.1, for a door with or without a token."""
    text = {"type": "string"}
    word = {"type": "string", "pattern": _WORD}
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

    guarded = (
        {**said("401", "The request bears no token."), **said("403", "It is for another host, or comes from a page.")} if token else {}
    )
    every = {**said("400", "The request cannot be understood."), **guarded, **said("503", "Try again later.")}
    refusals = {
        **every,
        **said("404", "There is no such directory."),
        **said("406", "What has no end is for text/event-stream."),
        **said("413", "It is too large."),
        **said("500", "The answer is too large for a document."),
    }
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
            "environment": {
                "type": "object",
                "propertyNames": {"pattern": "^[^=\\u0000]+$"},
                "additionalProperties": word,
                "description": "added to the daemon's own",
            },
            "stdin": {**text, "description": "standard input, or base64 in `stdin_base64`"},
            "stdin_base64": {"type": "string", "pattern": _BASE64, "contentEncoding": "base64"},
        }
        either: list[dict[str, Any]] = [{"not": {"required": ["stdin", "stdin_base64"]}}]
        if verb.command:
            place = "after the name in `words`" if verb.named else "instead of words"
            fields["program"] = {"type": "array", "items": word, "description": f"a program and its arguments, {place}"}
            alone = {"properties": {"words": {"maxItems": 1}}} if verb.named else {"not": {"required": ["words"]}}
            either.append({"anyOf": [{"not": {"required": ["program"]}}, alone]})
        body = {"application/json": {"schema": {"type": "object", "additionalProperties": False, "properties": fields, "allOf": either}}}
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
            "get": {"summary": what, "responses": {"200": {"description": what, "content": {"application/json": {"schema": one}}}, **every}}
        }
    paths["/metrics"] = {
        "get": {
            "summary": "Counts for Prometheus.",
            "responses": {"200": {"description": "Counts.", "content": {"text/plain": {"schema": text}}}, **every},
        }
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Agent Sandbox", "version": version(), "summary": "The verbs of the command line over HTTP."},
        "paths": paths,
        **({"security": [{"token": []}]} if token else {}),
        "components": {
            "schemas": {"Answer": answer, "Problem": problem},
            **({"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}} if token else {}),
        },
    }


def _option_schema(name: str) -> dict[str, Any]:
    option = OPTIONS[name]
    text = {"type": "string", "pattern": _WORD}
    kind = {"oneOf": [text, {"type": "array", "items": text}]} if option.value else {"type": "boolean"}
    return {**kind, "description": option.help}
