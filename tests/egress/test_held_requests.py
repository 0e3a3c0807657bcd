"""Requests of a simulation: those that only read are sent, others are held, and each is told."""

from __future__ import annotations

from typing import Any

import pytest

from agent_sandbox.egress.orders import RequestMade
from agent_sandbox.policy.network import network_rules, only_reads
from tests.egress.test_recorder import CANARY, SEARCH, request
from tests.egress.wire import Beyond, door, run


class Told:
    """Keeps what is told of requests."""

    def __init__(self) -> None:
        self.requests: list[RequestMade] = []

    async def __call__(self, facts: dict[str, Any]) -> None:
        self.requests.append(RequestMade.decoded(facts))


@pytest.mark.parametrize(
    ("sent", "leaves"),
    [
        (request(f"GET /{CANARY}"), True),
        (request(f"HEAD /{CANARY}"), True),
        (request(f"OPTIONS /{CANARY}"), True),
        (request("POST /a/git-upload-pack", body=CANARY.encode()), True),
        (request("POST /a/git-receive-pack", body=CANARY.encode()), False),
        (request("POST /a", body=CANARY.encode()), False),
        (request(f"PUT /{CANARY}"), False),
        (request(f"PATCH /{CANARY}"), False),
        (request(f"DELETE /{CANARY}"), False),
        (request(f"PROPFIND /{CANARY}"), False),
        (request(f"GET /{CANARY}", "X-HTTP-Method-Override: DELETE"), False),
        (request(f"GET /{CANARY}", "Upgrade: websocket").replace(b"Connection: close", b"Connection: close, upgrade"), False),
    ],
)
def test_a_simulation_sends_only_what_reads(sent: bytes, leaves: bool) -> None:
    async def test(*, hold: bool) -> tuple[bytes, bytes, Told]:
        beyond, told = Beyond(), Told()
        async with door(beyond=beyond.serve, hold=hold, tell=told) as opened:
            return await opened.send_tls("web.test", sent), beyond.all, told

    back, arrived, told = run(test(hold=True))
    assert (CANARY.encode() in arrived) is leaves
    assert [each.left for each in told.requests] == [leaves]
    if not leaves:
        assert back.startswith(b"HTTP/1.1 403 ") and b"a simulation does not send" in back and arrived == b""
    assert CANARY.encode() in run(test(hold=False))[1], "the control: a run sends it"


def test_a_simulation_opens_no_connection_that_is_not_read() -> None:
    async def test() -> None:
        beyond = Beyond()
        rules = network_rules(outbound=True, hosts=["web.test", "web.test:443"], opaque=["web.test:443"])
        async with door(rules, beyond.serve, hold=True) as opened:
            assert await opened.send(b"CONNECT web.test:443 HTTP/1.1\r\n\r\n" + CANARY.encode(), proxy=True)
        assert beyond.received == [] and any("--send would" in flow["refused"] for flow in opened.flows)

    run(test())


def test_what_is_told_of_a_request_is_its_path_without_the_query_and_without_found_data() -> None:
    async def test() -> None:
        told = Told()
        async with door(tell=told, search=SEARCH) as opened:
            await opened.send_tls("web.test", request(f"GET /a?b={CANARY}"))
            await opened.send_tls("web.test", request("GET /tok_12345678"))
            await opened.send_tls("web.test", request("GET /" + "x" * 5000))
            await opened.send_tls("web.test", request("POST /a", body=b"x"))
        assert [(each.method, each.path, each.origin, each.left) for each in told.requests] == [
            ("GET", "/a", "https://web.test", True),
            ("GET", "", "https://web.test", True),
            ("GET", "", "https://web.test", True),
            ("POST", "/a", "https://web.test", True),
        ]

    run(test())


@pytest.mark.parametrize(
    "wrong", [{"method": 1}, {"port": 0}, {"port": "x"}, {"left": 1}, {"path": "a\nb"}, {"name": "\u00e9"}, {"secrets": ""}]
)
def test_a_request_that_is_told_wrongly_is_refused(wrong: dict[str, Any]) -> None:
    right = {"method": "GET", "name": "a.test", "port": 1, "tls": True, "path": "/", "left": True, "secrets": []}
    assert RequestMade.decoded(right).origin == "https://a.test:1"
    with pytest.raises(ValueError, match="a request"):
        RequestMade.decoded({**right, **wrong})


def test_reading_is_decided_by_the_method_and_by_what_git_fetches_with() -> None:
    assert only_reads("GET", "/delete") and only_reads("POST", "/x.git/git-upload-pack")
    assert not only_reads("get", "/") and not only_reads("PUT", "/git-upload-pack") and not only_reads("POST", "/git-upload-pack/x")
