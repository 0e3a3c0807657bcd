"""The decision on a request, as transcripts without sockets: the bytes of a client, and the bytes that go on or the refusal."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.egress.http1 import MalformedHttp, MessageReader, RequestHead
from agent_sandbox.egress.inspection import Inspection
from agent_sandbox.egress.rules import FlowRefused, Origin, allowing_rule, ambiguity, read_absolute, read_authority
from agent_sandbox.egress.secrets import Broker
from agent_sandbox.egress.web import Customs
from agent_sandbox.policy.hosts import covers
from agent_sandbox.policy.network import NetworkRules, RequestRule, network_rules

RULES = network_rules(
    outbound=True,
    hosts=["web.test", "*.web.test", "api.test", "only.test"],
    requests=[RequestRule("api.test", ("GET", "POST"), ("/v1/*", "/status")), RequestRule("only.test", ("GET",))],
)
WEB, SECURE, API = Origin("web.test", 80, False), Origin("web.test", 443, True), Origin("api.test", 443, True)


def pass_on(data: bytes, origin: Origin = WEB, rules: NetworkRules = RULES) -> bytes | int:
    """Return the head that goes on for the bytes of a client, or the status of the refusal."""
    reader = MessageReader()
    reader.receive(data)
    try:
        head = reader.next()
        assert isinstance(head, RequestHead)
        return Customs(rules, Inspection(None, (), b""), Broker(())).admit(origin, head).onward(head.length)
    except (MalformedHttp, FlowRefused) as error:
        return error.status


def test_a_request_goes_on_as_it_was_understood() -> None:
    asked = b"GET /a?b=c HTTP/1.1\r\nhost: WEB.test.\r\nuser-agent: x\r\nCookie: a=b\r\n\r\n"
    assert pass_on(asked) == b"GET /a?b=c HTTP/1.1\r\nHost: web.test\r\nUser-Agent: x\r\nCookie: a=b\r\n\r\n"


def test_fields_for_the_next_hop_stay_behind() -> None:
    asked = (
        b"POST / HTTP/1.1\r\nHost: web.test\r\nConnection: close, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: 5\r\nTE: trailers\r\n"
        b"Expect: 100-continue\r\n"
        b"Proxy-Authorization: Basic eA==\r\nUpgrade: h2c\r\nHTTP2-Settings: x\r\nTrailer: X\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    assert pass_on(asked) == b"POST / HTTP/1.1\r\nHost: web.test\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_a_client_cannot_have_the_fields_dropped_that_a_server_judges_by() -> None:
    asked = b"GET / HTTP/1.1\r\nHost: web.test\r\nConnection: Host, Cookie, Authorization\r\nCookie: a\r\nAuthorization: b\r\n\r\n"
    assert pass_on(asked) == b"GET / HTTP/1.1\r\nHost: web.test\r\nCookie: a\r\nAuthorization: b\r\n\r\n"


def test_the_form_for_proxies_becomes_the_form_for_origins() -> None:
    assert pass_on(b"GET http://web.test/a HTTP/1.1\r\nHost: web.test\r\n\r\n") == b"GET /a HTTP/1.1\r\nHost: web.test\r\n\r\n"
    assert pass_on(b"GET http://web.test?q HTTP/1.1\r\nHost: web.test\r\n\r\n") == b"GET /?q HTTP/1.1\r\nHost: web.test\r\n\r\n"


def test_a_handshake_of_websocket_goes_on_without_extensions() -> None:
    asked = (
        b"GET /ws HTTP/1.1\r\nHost: web.test\r\nConnection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\nSec-WebSocket-Key: eA==\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Extensions: permessage-deflate\r\n\r\n"
    )
    assert pass_on(asked) == (
        b"GET /ws HTTP/1.1\r\nHost: web.test\r\nSec-Websocket-Key: eA==\r\nSec-Websocket-Version: 13\r\nConnection: Upgrade\r\n"
        b"Upgrade: websocket\r\n\r\n"
    )


REFUSED = {
    "no host": (b"GET / HTTP/1.1\r\nX: y\r\n\r\n", WEB, 400),
    "two hosts": (b"GET / HTTP/1.1\r\nHost: web.test\r\nHost: web.test\r\n\r\n", WEB, 400),
    "an empty host": (b"GET / HTTP/1.1\r\nHost:\r\n\r\n", WEB, 400),
    "a host with a name before @": (b"GET / HTTP/1.1\r\nHost: web.test@other.test\r\n\r\n", WEB, 400),
    "a host with a path": (b"GET / HTTP/1.1\r\nHost: web.test/other\r\n\r\n", WEB, 400),
    "a host with two values": (b"GET / HTTP/1.1\r\nHost: web.test, other.test\r\n\r\n", WEB, 400),
    "a host with a port that is none": (b"GET / HTTP/1.1\r\nHost: web.test:99999\r\n\r\n", WEB, 400),
    "another host than the connection's": (b"GET / HTTP/1.1\r\nHost: api.test\r\n\r\n", SECURE, 421),
    "another port than the connection's": (b"GET / HTTP/1.1\r\nHost: web.test:8080\r\n\r\n", SECURE, 421),
    "another host in the target": (b"GET http://api.test/ HTTP/1.1\r\nHost: web.test\r\n\r\n", WEB, 421),
    "another host beside the target": (b"GET http://web.test/ HTTP/1.1\r\nHost: api.test\r\n\r\n", WEB, 421),
    "another scheme": (b"GET gopher://web.test/ HTTP/1.1\r\nHost: web.test\r\n\r\n", WEB, 421),
    "a target that is no path": (b"GET a HTTP/1.1\r\nHost: web.test\r\n\r\n", WEB, 421),
    "a fragment": (b"GET /#a HTTP/1.1\r\nHost: web.test\r\n\r\n", WEB, 400),
    "CONNECT": (b"CONNECT web.test:80 HTTP/1.1\r\nHost: web.test\r\n\r\n", WEB, 405),
    "TRACE": (b"TRACE / HTTP/1.1\r\nHost: web.test\r\n\r\n", WEB, 405),
    "a host that is not allowed": (b"GET / HTTP/1.1\r\nHost: other.test\r\n\r\n", Origin("other.test", 80, False), 403),
    "a port that is not allowed": (b"GET / HTTP/1.1\r\nHost: web.test:81\r\n\r\n", Origin("web.test", 81, False), 403),
    "a method that is not allowed": (b"POST / HTTP/1.1\r\nHost: only.test\r\n\r\n", Origin("only.test", 443, True), 403),
    "a path that is not allowed": (b"GET /v2/a HTTP/1.1\r\nHost: api.test\r\n\r\n", API, 403),
    "a path that only begins the same": (b"GET /statuses HTTP/1.1\r\nHost: api.test\r\n\r\n", API, 403),
    "a path that leads out": (b"GET /v1/../v2 HTTP/1.1\r\nHost: api.test\r\n\r\n", API, 400),
    "a path that leads out, encoded": (b"GET /v1/%2e%2E/v2 HTTP/1.1\r\nHost: api.test\r\n\r\n", API, 400),
    "a path that leads out, encoded twice": (b"GET /v1/%252e%252e/v2 HTTP/1.1\r\nHost: api.test\r\n\r\n", API, 400),
    "a path that leads out with a parameter": (b"GET /v1/..;x/v2 HTTP/1.1\r\nHost: api.test\r\n\r\n", API, 400),
    "a path with a backslash": (b"GET /v1\\..\\v2 HTTP/1.1\r\nHost: api.test\r\n\r\n", API, 400),
    "a path with an encoded slash": (b"GET /v1/a%2fb HTTP/1.1\r\nHost: api.test\r\n\r\n", API, 400),
    "a path with an empty part": (b"GET /v1//a HTTP/1.1\r\nHost: api.test\r\n\r\n", API, 400),
}


@pytest.mark.parametrize(("data", "origin", "status"), REFUSED.values(), ids=REFUSED)
def test_a_request_that_may_not_leave_is_refused(data: bytes, origin: Origin, status: int) -> None:
    assert pass_on(data, origin) == status


@pytest.mark.parametrize(
    ("data", "origin"),
    [
        (b"GET / HTTP/1.1\r\nHost: web.test:443\r\n\r\n", SECURE),
        (b"GET / HTTP/1.1\r\nHost: a.b.web.test\r\n\r\n", Origin("a.b.web.test", 80, False)),
        (b"GET /v1/a HTTP/1.1\r\nHost: api.test\r\n\r\n", API),
        (b"GET /status?a=../b HTTP/1.1\r\nHost: api.test\r\n\r\n", API),
        (b"GET /any HTTP/1.1\r\nHost: only.test\r\n\r\n", Origin("only.test", 443, True)),
        (b"GET /@scope%2fname HTTP/1.1\r\nHost: web.test\r\n\r\n", WEB),
        (b"OPTIONS * HTTP/1.1\r\nHost: web.test\r\n\r\n", WEB),
    ],
)
def test_a_request_that_may_leave_does(data: bytes, origin: Origin) -> None:
    assert isinstance(pass_on(data, origin), bytes)


@pytest.mark.parametrize("field", ["X-HTTP-Method-Override", "x-http-method", "X_Method_Override"])
def test_a_method_in_a_field_is_judged_like_that_of_the_request(field: str) -> None:
    asked = f"POST /v1/x HTTP/1.1\r\nHost: api.test\r\n{field}: %s\r\n\r\n"
    for method in ("DELETE", " delete", "GET, DELETE", "x" * 100):
        assert pass_on((asked % method).encode(), API) == 403
    assert isinstance(pass_on((asked % "get").encode(), API), bytes), "a permitted one passes"
    assert isinstance(pass_on((asked % "DELETE").replace("api.test", "web.test").encode()), bytes), "so does any where all are"


@pytest.mark.parametrize("field", ["X-Original-URL", "X_Rewrite_Url"])
def test_a_path_in_a_field_is_refused_where_paths_are_judged(field: str) -> None:
    asked = f"GET /v1/x HTTP/1.1\r\nHost: api.test\r\n{field}: /admin\r\n\r\n"
    assert pass_on(asked.encode(), API) == 400
    assert isinstance(pass_on(asked.replace("api.test", "web.test").encode()), bytes), "the control arm: no path is judged there"


def test_a_refusal_names_the_line_that_would_allow_it() -> None:
    head = RequestHead(b"GET", b"/", ((b"host", b"other.test"),))
    with pytest.raises(FlowRefused, match=r"the policy does not allow other\.test; --network other\.test would"):
        Customs(RULES, Inspection(None, (), b""), Broker(())).admit(Origin("other.test", 80, False), head)


def test_the_rule_that_allows_a_host_is_named() -> None:
    assert allowing_rule(RULES, "a.web.test") == "*.web.test"
    assert allowing_rule(network_rules(outbound=True), "a.test") == "every public host"
    assert allowing_rule(RULES, "other.test") == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"web.test", ("web.test", 80)),
        (b"Web.Test.:8080", ("web.test", 8080)),
        (b"[2001:db8::1]:443", ("2001:db8::1", 443)),
        (b"[::ffff:127.0.0.1]", ("127.0.0.1", 80)),
        (b"127.1", None),
        (b"2130706433", None),
        (b"0x7f.0.0.1", None),
        (b"0177.0.0.1", None),
        (b"fe80::1%eth0", None),
        (b"web.test\x00.other.test", None),
        (b"web.test:", None),
        (b"web.test:+80", None),
        (b"web.test:\xb2", None),
        (b"", None),
        (b":80", None),
        (b"w\xc3\xa9b.test", None),
    ],
)
def test_an_authority_has_one_canonical_form(text: bytes, expected: tuple[str, int] | None) -> None:
    assert read_authority(text, 80) == expected


@given(st.text("a./%2efF\\;5c?", max_size=24))
@settings(max_examples=300, deadline=None)
def test_a_path_without_ambiguity_stays_beneath_its_beginning_for_every_reader(path: str) -> None:
    """The second reader decodes as long as anything changes, takes both slashes and drops parameters."""
    if ambiguity(f"/v1/{path}"):
        return
    text = f"/v1/{path}"
    for _ in range(4):
        text = re.sub(r"%([0-9a-fA-F]{2})", lambda found: chr(int(found[1], 16)), text).replace("\\", "/")
    assert ".." not in [part.partition(";")[0] for part in text.split("/")]


@given(st.binary(max_size=40))
@settings(max_examples=300, deadline=None)
def test_no_target_breaks_the_reader(target: bytes) -> None:
    found = read_absolute(target)
    assert found is None or found[2].startswith(b"/")
    read_authority(target, 80)


_LABEL = st.text("abx-", min_size=1, max_size=3)
_NAME = st.lists(_LABEL, min_size=1, max_size=4).map(".".join)


def _covers_simply(pattern: str, host: str) -> bool:
    """Return the same as `covers`, label by label."""
    if pattern == "*":
        return True
    wanted, labels = pattern.split("."), host.split(".")
    if wanted[0] != "*":
        return wanted == labels
    rest = wanted[1:]
    return len(labels) > len(rest) and labels[len(labels) - len(rest) :] == rest


@given(st.one_of(_NAME, _NAME.map("*.{}".format), st.just("*")), _NAME, st.booleans())
@settings(max_examples=500, deadline=None)
def test_the_host_matcher_agrees_with_a_second_one(pattern: str, host: str, beneath: bool) -> None:
    if beneath:
        host = f"{host}.{pattern.removeprefix('*.')}" if pattern != "*" else host
    assert covers((pattern,), host) == _covers_simply(pattern, host)
