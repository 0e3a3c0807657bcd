"""A model that says what it is told to: the APIs of three providers on a port of this machine, for the real programs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Call = tuple[str, Mapping[str, Any]]  # a tool and its input


@dataclass
class Model:
    """The tool calls that are still to be made, and the requests that have come. After the last call it says "done"."""

    calls: list[Call]
    port: int = 0
    requests: list[dict[str, Any]] = field(default_factory=list)

    def next(self) -> Call | None:
        return self.calls.pop(0) if self.calls else None

    def was_told(self, text: str) -> bool:
        """Whether a request held this text."""
        return any(text in json.dumps(request, ensure_ascii=False) for request in self.requests)


@contextmanager
def scripted(calls: Sequence[Call]) -> Iterator[Model]:
    """Serve a model that makes these tool calls, one in each turn."""
    model = Model(list(calls))

    class Handler(_Handler):
        told = model

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        model.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield model
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    told: Model

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._answer("application/json", '{"data": [], "models": []}')

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
        self.told.requests.append(request)
        if "/responses" in self.path:
            self._answer("text/event-stream", _events(_openai(self.told.next())))
        elif "/messages" in self.path and request.get("stream"):
            self._answer("text/event-stream", _events(_anthropic(self.told.next() if request.get("tools") else None)))
        elif "enerateContent" in self.path:
            body = json.dumps(_google(self.told.next() if request.get("tools") else None))
            streamed = "stream" in self.path
            self._answer("text/event-stream" if streamed else "application/json", f"data: {body}\n\n" if streamed else body)
        else:
            self._answer("application/json", '{"input_tokens": 1}')

    def _answer(self, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _events(events: Sequence[dict[str, Any]]) -> str:
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)


def _openai(call: Call | None) -> list[dict[str, Any]]:
    if call:
        item = {"type": "function_call", "id": "f", "call_id": "c", "name": call[0], "arguments": json.dumps(call[1])}
    else:
        item = {"type": "message", "role": "assistant", "id": "m", "content": [{"type": "output_text", "text": "done"}]}  # type: ignore[dict-item]
    usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2, "input_tokens_details": None, "output_tokens_details": None}
    return [
        {"type": "response.created", "response": {"id": "r"}},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": {"id": "r", "usage": usage}},
    ]


def _anthropic(call: Call | None) -> list[dict[str, Any]]:
    usage = {"input_tokens": 1, "output_tokens": 1}
    message: dict[str, Any] = {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "stop_reason": None,
        "usage": usage,
    }
    block: dict[str, Any] = {"type": "text", "text": ""}
    delta: dict[str, Any] = {"type": "text_delta", "text": "done"}
    if call:
        block = {"type": "tool_use", "id": f"toolu_{id(call)}", "name": call[0], "input": {}}
        delta = {"type": "input_json_delta", "partial_json": json.dumps(call[1])}
    return [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "content_block_delta", "index": 0, "delta": delta},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use" if call else "end_turn"}, "usage": {"output_tokens": 1}},
        {"type": "message_stop"},
    ]


def _google(call: Call | None) -> dict[str, Any]:
    part = {"functionCall": {"name": call[0], "args": call[1]}} if call else {"text": "done"}
    usage = {"promptTokenCount": 1, "candidatesTokenCount": 1, "totalTokenCount": 2}
    candidate = {"content": {"role": "model", "parts": [part]}, "finishReason": "STOP", "index": 0}
    return {"candidates": [candidate], "usageMetadata": usage}
