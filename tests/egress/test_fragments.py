"""Secrets that are cut over several requests: what puts them together, and that ordinary traffic is left alone."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.egress.dlp.own_secrets import OwnSecrets
from agent_sandbox.egress.dlp.scanner import Search
from agent_sandbox.egress.fragments import MOST_REQUESTS, Fragments, texts_of_body, texts_of_name, texts_of_target
from agent_sandbox.egress.http1 import RequestHead
from agent_sandbox.egress.inspection import Inspection
from agent_sandbox.egress.rules import FlowRefused, Origin
from agent_sandbox.egress.secrets import Broker
from agent_sandbox.egress.web import Customs
from agent_sandbox.egress.websocket import TEXT, Message, Relay, write_message
from agent_sandbox.policy.network import network_rules
from tests.egress.wire import Beyond, door, run

VALUE = "kX9vQ2mZ7pL4wR8tB3nY6cJ1"  # 24 characters
ORIGIN = Origin("web.test", 443, True)
FORM, JSON = b"application/x-www-form-urlencoded", b"application/json"


def search(*values: str) -> Search:
    return Search.of((), OwnSecrets.of((f"S{number}", value) for number, value in enumerate(values or (VALUE,))), b"k" * 32)


def customs(*values: str) -> Customs:
    return Customs(network_rules(outbound=True), Inspection(search(*values), (), b"k" * 32), Broker(()))


def send(guard: Customs, target: str = "/", body: bytes = b"", kind: bytes = b"", host: str = "web.test", **fields: str) -> str:
    """Send a request. Return why it was refused, or nothing."""
    more = tuple((name.replace("_", "-").encode(), value.encode()) for name, value in fields.items())
    head = RequestHead(b"POST", target.encode(), ((b"host", host.encode()), (b"content-type", kind), *more), len(body))
    try:
        passage = guard.admit(Origin(host, 443, True), head)
        if body:
            passage.feed(body)
            passage.finish()
    except FlowRefused as error:
        assert error.withheld and VALUE not in str(error) and VALUE not in "".join(error.findings)
        return str(error)
    return ""


def cut(size: int, value: str = VALUE) -> list[str]:
    return [value[place : place + size] for place in range(0, len(value), size)]


PIECES: dict[str, Callable[[Customs], Iterator[str]]] = {
    "the path, in two": lambda to: (send(to, f"/a/{piece}") for piece in cut(12)),
    "the path, a character each": lambda to: (send(to, f"/a/{piece}") for piece in cut(1)),
    "a field of the query": lambda to: (send(to, f"/a?n={number}&d={piece}") for number, piece in enumerate(cut(2))),
    "two fields of one query": lambda to: (send(to, f"/?a={one}&b={two}") for one, two in [cut(12)]),
    "four fields, with others between": lambda to: (send(to, "/?" + "&x=0&".join(f"p{each}={each}" for each in cut(6))) for _ in "1"),
    "a form": lambda to: (send(to, body=f"n=1&d={piece}".encode(), kind=FORM) for piece in cut(3)),
    "JSON, over requests": lambda to: (send(to, body=json.dumps({"n": 1, "d": [piece]}).encode(), kind=JSON) for piece in cut(4)),
    "JSON, behind half a character": lambda to: (
        send(to, body=json.dumps({"n": "\ud800", "d": [piece]}).encode(), kind=JSON) for piece in cut(4)
    ),
    "JSON, a key and its value": lambda to: (send(to, body=json.dumps({one: two}).encode(), kind=JSON) for one, two in [cut(12)]),
    "plain bodies": lambda to: (send(to, body=piece.encode()) for piece in cut(1)),
    "the end of one long body and the beginning of the next": lambda to: (
        send(to, body=each) for each in (b"x\n" * 50_000 + VALUE[:9].encode(), VALUE[9:].encode() + b"\n" * 100_000)
    ),
    "multipart": lambda to: (
        send(
            to,
            body=b"--B\r\nContent-Disposition: form-data; name=a\r\n\r\n%b\r\n--B\r\nA: b\r\n\r\n%b\r\n--B--\r\n"
            % tuple(map(str.encode, cut(12))),
            kind=b"multipart/form-data; boundary=B",
        )
        for _ in "1"
    ),
    "a field of the head": lambda to: (send(to, x_trace=piece) for piece in cut(2)),
    "anywhere, in any order": lambda to: iter(
        (send(to, f"/{VALUE[18:]}"), send(to, f"/?q={VALUE[:6]}"), send(to, body=VALUE[12:18].encode()), send(to, x_id=VALUE[6:12]))
    ),
    "each in base64": lambda to: (send(to, f"/?q={base64.urlsafe_b64encode(piece.encode()).decode()}") for piece in reversed(cut(6))),
    "each in hexadecimal": lambda to: (send(to, f"/{piece.encode().hex()}/x") for piece in reversed(cut(8))),
    "each backwards": lambda to: (send(to, f"/{piece[::-1]}/x") for piece in cut(8)),
    "all in base64, cut then": lambda to: (send(to, f"/?d={piece}") for piece in cut(5, base64.b64encode(VALUE.encode()).decode())),
    "with pieces that overlap": lambda to: (send(to, f"/?d={VALUE[place : place + 9]}") for place in (12, 6, 0)),
    "most of it": lambda to: (send(to, f"/?d={piece}") for piece in cut(7)[:3]),
}


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_a_secret_that_is_cut_over_requests_is_refused_before_it_is_whole(pieces: Callable[[Customs], Iterator[str]]) -> None:
    answers = list(pieces(customs()))
    assert "S0" in answers[-1] and "the last piece" in answers[-1], answers
    assert not any(pieces(customs("another-V4lue-7f3a9c5"))), "the control: it is this secret that was found"


def test_what_completes_a_secret_is_refused_again_and_other_requests_are_not() -> None:
    guard = customs()
    assert send(guard, f"/?d={VALUE[:12]}") == ""
    assert send(guard, f"/?d={VALUE[12:]}") and send(guard, f"/?d={VALUE[12:]}")
    assert send(guard, "/?d=something-else") == "" and send(guard, f"/?e={VALUE[12:22]}") != ""


def test_each_host_is_looked_at_by_itself() -> None:
    guard = customs()
    assert [send(guard, f"/?d={piece}", host=f"{number}.test") for number, piece in enumerate(cut(8))] == ["", "", ""]


def test_pieces_that_lie_far_apart_are_forgotten() -> None:
    fragments = Fragments(search().own)
    assert fragments.completed("web.test", texts_of_target(f"/{VALUE[:12]}".encode())) == ""
    for _ in range(MOST_REQUESTS):
        assert fragments.completed("web.test", texts_of_target(b"/page")) == ""
    assert fragments.completed("web.test", texts_of_target(f"/{VALUE[12:]}".encode())) == "", "as the guide says"


def test_memory_is_bounded() -> None:
    fragments = Fragments(search().own)
    for number in range(3000):
        fragments.completed(f"{number}.test", texts_of_target(b"/a/b?c=d&" + b"&".join(b"%d=x" % each for each in range(50))))
    assert len(fragments._tails) <= 1024 and len(fragments._hosts) <= 1024


def test_names_are_joined_below_one_domain_whatever_their_case() -> None:
    fragments = Fragments(search().own)
    found = [fragments.completed(*texts_of_name(f"{piece}.x.web.test".lower())) for piece in cut(2)]
    assert not any(found), "the label between them is no piece"
    fragments = Fragments(search().own)
    assert [bool(fragments.completed(*texts_of_name(f"{piece}.web.test".lower()))) for piece in cut(8)] == [False, False, True]
    fragments = Fragments(search().own)
    assert [bool(fragments.completed(*texts_of_name(f"{piece}.web.test".lower()))) for piece in cut(3)][-1]


def test_messages_of_websocket_are_joined() -> None:
    guard = customs()
    head = RequestHead(b"GET", b"/", ((b"host", b"web.test"),))
    relay = Relay(guard.admit(ORIGIN, head), [])
    first, *rest = (write_message(Message(TEXT, json.dumps({"say": piece}).encode()), b"abcd") for piece in cut(8))
    assert relay.onward(first)
    with pytest.raises(FlowRefused):
        for each in rest:
            relay.onward(each)


def test_names_that_are_pieces_are_not_asked_of_a_resolver() -> None:
    async def test() -> None:
        async with door(beyond=Beyond().serve, search=search()) as opened:
            answer = b""
            for piece in cut(8):
                host = f"{piece}.web.test".lower()
                answer = await opened.send(f"GET http://{host}/ HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode(), proxy=True)
            assert b" 403 " in answer and len(opened.asked) == 2

    run(test())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, len(VALUE) - 1), min_size=1, max_size=6, unique=True), st.sampled_from(["/?d={}", "/x/{}", "/?a=1&d={}&z=2"])
)
def test_any_cut_at_one_place_is_found(borders: list[int], form: str) -> None:
    guard = customs()
    ends = [0, *sorted(borders), len(VALUE)]
    assert any(send(guard, form.format(VALUE[start:end])) for start, end in pairwise(ends))


def ordinary() -> Iterator[tuple[str, bytes, bytes]]:
    """Yield targets, types and bodies as ordinary clients send them: packages, APIs, and the source code of this project."""
    chance = random.Random(7)
    for number in range(400):
        digest = f"{chance.getrandbits(256):064x}"
        yield f"/packages/{digest[:2]}/{digest[2:4]}/{digest[4:]}/name-{number}.whl", b"", b""
        yield f"/v1/items/{number}?page={number % 9}&cursor={base64.urlsafe_b64encode(digest.encode()[:24]).decode()}", b"", b""
        yield (
            "/v1/items",
            JSON,
            json.dumps({"id": digest[:8], "name": f"item {number}", "at": "2026-01-01T00:00:00Z", "tags": ["a", "b"]}).encode(),
        )
    for file in sorted(Path(__file__).parents[2].glob("src/agent_sandbox/**/*.py"))[:120]:
        yield f"/repo/contents/{file.name}", b"text/x-python", file.read_bytes()


def test_ordinary_traffic_is_not_taken_for_pieces() -> None:
    chance = random.Random(11)
    values = [
        VALUE,
        f"{chance.getrandbits(160):040x}",
        f"{chance.getrandbits(64):016x}",
        "ghp_" + "aB3dE6gH9j" * 3 + "kLmN",
        "postgres-admin-2026",
    ]
    fragments = Fragments(search(*values).own)
    for target, kind, body in ordinary():
        assert fragments.completed("web.test", (*texts_of_target(target.encode()), *texts_of_body(kind, body))) == "", (target, body[:80])
    halves = (values[1][:20], values[1][20:])
    assert [bool(fragments.completed("web.test", texts_of_target(f"/{half}".encode()))) for half in halves] == [False, True], "the control"
