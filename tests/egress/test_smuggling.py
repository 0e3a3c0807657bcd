"""Published cases of request smuggling: none leaves in a form that two readers could understand differently."""

from __future__ import annotations

import re

import h11
import pytest

from agent_sandbox.egress.http1 import MalformedHttp, MessageReader, ReaderMark, RequestHead, write_chunk, write_request
from agent_sandbox.egress.rules import FlowRefused, Origin, judge_request
from agent_sandbox.policy.network import network_rules
from tests.egress.smuggling_cases import CASES, SECOND, Case

RULES, ORIGIN = network_rules(outbound=True), Origin("a", 80, False)


def read(data: bytes) -> list[tuple[RequestHead, bytes]] | None:
    """Return the requests that are understood from bytes; None if one of them is refused."""
    reader = MessageReader()
    reader.receive(data)
    reader.receive(b"")
    found: list[tuple[RequestHead, bytes]] = []
    try:
        while (event := reader.next()) is not ReaderMark.CLOSED:
            if isinstance(event, RequestHead):
                found.append((event, b""))
            elif isinstance(event, bytes):
                found[-1] = (found[-1][0], found[-1][1] + event)
        for head, _ in found:
            judge_request(RULES, ORIGIN, head)
    except (MalformedHttp, FlowRefused):
        return None
    return found


def lenient(data: bytes) -> str:
    """Return how a reader that forgives takes the end of the first request: "chunks", or a length; nothing if it sees no request.

    Lines end in anything, names are trimmed to their letters, an underscore is a hyphen, and numbers end where they end.
    """
    if re.match(rb"\S+\s+\S+\s+HTTP/\d+\.\d+\s", data) is None:
        return ""
    fields = {}
    for line in re.split(rb"\r\n|\n|\r", data.partition(b"\r\n\r\n")[0].replace(b"-\r\n", b"-").replace(b":\n ", b":")):
        name, _, value = line.replace(b"_", b"-").partition(b":")
        fields[re.sub(rb"[^a-z-]", b"", name.lower())] = value
    if b"chunk" in fields.get(b"transfer-encoding", b"").lower():
        return "chunks"
    return str(int((re.match(rb"\s*\+?(\d+)", fields.get(b"content-length", b"")) or [0, 0])[1]))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.source)
def test_a_published_case_is_refused_or_understood_in_one_way(case: Case) -> None:
    found = read(case.data)
    if case.bodies is None:
        assert found is None, found
        return
    assert found is not None and tuple(body for _, body in found) == case.bodies
    for head, body in found:
        judged = judge_request(RULES, ORIGIN, head)
        framing = (b"transfer-encoding", b"chunked") if head.length is None else (b"content-length", b"%d" % len(body))
        onward = write_request(judged.method, judged.target, (*judged.fields, framing))
        onward += write_chunk(body) + b"0\r\n\r\n" if head.length is None else body
        assert as_h11_reads(onward + SECOND) == [(judged.method, body), (b"GET", b"")], "what goes on is one request for another reader"


def as_h11_reads(data: bytes) -> list[tuple[bytes, bytes]]:
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(data)
    found: list[tuple[bytes, bytes]] = []
    while not isinstance(event := connection.next_event(), type(h11.NEED_DATA)):
        if isinstance(event, h11.Request):
            found.append((event.method, b""))
        elif isinstance(event, h11.Data):
            found[-1] = (found[-1][0], found[-1][1] + bytes(event.data))
        elif isinstance(event, h11.EndOfMessage):
            connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
            connection.send(h11.EndOfMessage())
            connection.start_next_cycle()
    return found


def test_a_reader_that_forgives_takes_what_ours_refuses() -> None:
    """The control: the cases are no rubbish that every reader would refuse."""
    refused = [case for case in CASES if case.bodies is None]
    assert len(refused) > 600
    assert [case.source for case in refused if not lenient(case.data)] == []
    ways = [lenient(case.data) for case in refused if case.source.startswith("smuggler") and case.source.endswith("alone")]
    assert ways.count("chunks") > 0.9 * len(ways), "it takes nearly every way to write the coding for the coding"
    assert lenient(b"\x16\x03\x01\x00\x05hello\r\n\r\n") == lenient(b"hello\r\n\r\n") == ""


@pytest.mark.parametrize("field", ["Transfer_Encoding: chunked", "Content_Length: 5", "content_length: 0"])
def test_a_field_that_some_servers_take_for_one_of_framing_is_refused(field: str) -> None:
    data = f"POST / HTTP/1.1\r\nHost: a\r\n{field}\r\nContent-Length: 2\r\n\r\nab".encode()
    assert read(data) is None, "gateways such as CGI take an underscore for a hyphen"
    assert read(data.replace(field.encode(), b"X_Other: 1")) is not None, "the control"
