"""The secrets broker: where values go, where they never go, and that none comes back."""

from __future__ import annotations

import base64
import json
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.egress.dlp.own_secrets import OwnSecrets
from agent_sandbox.egress.dlp.rules import default_rules
from agent_sandbox.egress.dlp.scanner import Search
from agent_sandbox.egress.http1 import Fields, RequestHead, ResponseHead
from agent_sandbox.egress.inspection import Inspection
from agent_sandbox.egress.rules import FlowRefused, Origin
from agent_sandbox.egress.secrets import Broker, Scrubber
from agent_sandbox.egress.web import Customs, Passage
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.bound_secrets import BoundSecret, new_placeholder
from agent_sandbox.policy.network import network_rules

VALUE = "s3cret/Value+7q"
HOLDER = new_placeholder("GITHUB_TOKEN", bytes(range(16)))
RULES = network_rules(outbound=True)
BOUND, OTHER = Origin("api.test", 443, True), Origin("other.test", 443, True)


def secret(place: str = "authorization") -> BoundSecret:
    return BoundSecret("GITHUB_TOKEN", HOLDER, VALUE, ("api.test", "*.api.test"), place)


def customs(*secrets: BoundSecret) -> Customs:
    return Customs(RULES, Inspection(None, ((each.name, each.placeholder) for each in secrets), b"k" * 32), Broker(secrets))


def admit(secrets: BoundSecret, *fields: tuple[bytes, bytes], origin: Origin = BOUND, target: str = "/", length: int | None = 0) -> Passage:
    head = RequestHead(b"POST", target.encode(), ((b"host", origin.field), *fields), length)
    return customs(secrets).admit(origin, head)


def sent(passage: Passage, body: bytes = b"") -> bytes:
    """Return everything that leaves."""
    whole = (passage.feed(body) if body else b"") + passage.finish() if body else b""
    return passage.onward(len(whole)) + whole


def basic(user: str, password: str) -> bytes:
    return b"Basic " + base64.b64encode(f"{user}:{password}".encode())


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        (f"Bearer {HOLDER}".encode(), f"Bearer {VALUE}".encode()),
        (f"token {HOLDER}".encode(), f"token {VALUE}".encode()),
        (HOLDER.encode(), VALUE.encode()),
        (basic("me", HOLDER), basic("me", VALUE)),
        (basic(HOLDER, "x-oauth-basic"), basic(VALUE, "x-oauth-basic")),
    ],
)
def test_the_value_goes_into_the_authorization_of_a_bound_host(field: bytes, expected: bytes) -> None:
    passage = admit(secret(), (b"authorization", field))
    assert b"Authorization: " + expected + b"\r\n" in sent(passage)
    assert passage.secrets == ["GITHUB_TOKEN"]


def test_a_long_name_beside_the_value_is_no_credential_and_is_searched() -> None:
    search = Search.of(default_rules(), OwnSecrets.of([("OTHER", "another-s3cret-of-mine")]), b"k" * 32)
    bound = secret()
    guarded = Customs(RULES, Inspection(search, [(bound.name, bound.placeholder)], b"k" * 32), Broker([bound]))

    def asked(field: bytes) -> RequestHead:
        return RequestHead(b"GET", b"/", ((b"host", b"api.test"), (b"authorization", field), (b"x-some-longer-field", b"a-value")))

    name = "somebody.with.a.long.name"
    for field, left in ((basic(name, HOLDER), basic(name, VALUE)), (f"Bearer {HOLDER}".encode(), f"Bearer {VALUE}".encode())):
        assert left in guarded.admit(BOUND, asked(field)).onward(0)
    for field in (basic("another-s3cret-of-mine", HOLDER), f"another-s3cret-of-mine {HOLDER}".encode()):
        with pytest.raises(FlowRefused):
            guarded.admit(BOUND, asked(field))


LIMITED = BoundSecret("INDEX", HOLDER, VALUE, ("api.test",), paths=("/simple/", "/files/"), methods=("GET", "HEAD"))


@pytest.mark.parametrize(
    ("method", "target", "goes"),
    [
        *((b"GET", b"/simple/", True), (b"HEAD", b"/files/a%20b.whl?x=/api/", True), (b"GET", b"/files/a//b", False)),
        *((b"GET", b"/simple/././a", True), (b"GET", b"/./files/a", True), (b"GET", b"/simple/.%2e/api", False)),
        *((b"GET", b"/simple/%2e/a", False), (b"GET", b"/simple/./../api", False)),
        *((b"POST", b"/simple/", False), (b"GET", b"/", False), (b"GET", b"/simple", False), (b"GET", b"/api?/simple/", False)),
        *((b"GET", b"/simple/../api", False), (b"GET", b"/simple/%2e%2e/api", False), (b"GET", b"/simple/%252e%252e/api", False)),
        *((b"GET", b"/simple/..;/api", False), (b"GET", b"/simple/..%5capi", False), (b"GET", b"/Simple/", False)),
    ],
)
def test_a_value_goes_only_into_requests_with_its_methods_and_paths(method: bytes, target: bytes, goes: bool) -> None:
    head = RequestHead(method, target, ((b"host", b"api.test"), (b"authorization", f"Bearer {HOLDER}".encode())))
    if goes:
        assert f"Bearer {VALUE}".encode() in customs(LIMITED).admit(BOUND, head).onward(0)
        return
    with pytest.raises(FlowRefused) as refused:
        customs(LIMITED).admit(BOUND, head)
    assert "GET, HEAD below /simple/ and /files/ of api.test alone" in str(refused.value)


@pytest.mark.parametrize("field", [(b"x-http-method-override", b"DELETE"), (b"x-original-url", b"/api"), (b"x_rewrite_url", b"/api")])
def test_a_limited_value_goes_into_no_request_that_a_server_may_take_for_another(field: tuple[bytes, bytes]) -> None:
    fields = ((b"host", b"api.test"), (b"authorization", f"Bearer {HOLDER}".encode()), field)
    with pytest.raises(FlowRefused, match="GET, HEAD below /simple/"):
        customs(LIMITED).admit(BOUND, RequestHead(b"GET", b"/simple/", fields))
    assert VALUE.encode() in customs(LIMITED).admit(BOUND, RequestHead(b"GET", b"/simple/", fields[:2])).onward(0), "the control arm"


def test_a_limited_secret_leaves_other_requests_of_its_host_alone() -> None:
    head = RequestHead(b"GET", b"/api", ((b"host", b"api.test"), (b"authorization", b"Bearer own")))
    assert b"Bearer own" in customs(LIMITED).admit(BOUND, head).onward(0)
    with pytest.raises(FlowRefused):
        customs(LIMITED).admit(BOUND, RequestHead(b"GET", b"/simple/", head.fields))


def test_the_value_goes_into_a_named_field_query_form_and_object() -> None:
    assert f"X-Key: {VALUE}\r\n".encode() in sent(admit(secret("header:X-Key"), (b"x-key", HOLDER.encode())))
    passage = admit(secret("query:key"), target=f"/?a=b&key={HOLDER}")
    assert f"?a=b&key={quote(VALUE, safe='')} HTTP".encode() in sent(passage)
    form = (b"content-type", b"application/x-www-form-urlencoded")
    passage = admit(secret("body:key"), form, length=None)
    assert sent(passage, f"a=b&key={HOLDER}".encode()).endswith(f"\r\n\r\na=b&key={quote(VALUE, safe='')}".encode())
    passage = admit(secret("body:key"), (b"content-type", b"application/json; charset=utf-8"), length=None)
    assert sent(passage, json.dumps({"a": 1.50, "key": HOLDER}).encode()).endswith(json.dumps({"a": 1.50, "key": VALUE}).encode())


JSON = (b"content-type", b"application/json")
ELSEWHERE: dict[str, tuple[BoundSecret, Origin, str, Fields, bytes]] = {
    "another host": (secret(), OTHER, "/", ((b"authorization", f"Bearer {HOLDER}".encode()),), b""),
    "a bound host without TLS": (secret(), Origin("api.test", 80, False), "/", ((b"authorization", f"Bearer {HOLDER}".encode()),), b""),
    "another field": (secret(), BOUND, "/", ((b"x-other", HOLDER.encode()),), b""),
    "another field, in base64": (secret(), BOUND, "/", ((b"x-other", base64.b64encode(f"me {HOLDER}".encode())),), b""),
    "the authorization, and more": (secret("header:x-key"), BOUND, "/", ((b"x-key", f"{HOLDER} {HOLDER}".encode()),), b""),
    "the path": (secret(), BOUND, f"/{HOLDER}", (), b""),
    "the query": (secret(), BOUND, f"/?q={HOLDER}", (), b""),
    "the query, all percent-encoded": (secret(), BOUND, "/?q=" + "".join(f"%{ord(each):02x}" for each in HOLDER), (), b""),
    "another part of the query": (secret("query:key"), BOUND, f"/?key={HOLDER}&q={HOLDER}", (), b""),
    "the same part of the query twice": (secret("query:key"), BOUND, f"/?key={HOLDER}&key={HOLDER}", (), b""),
    "a public post": (secret(), BOUND, "/gists", (JSON,), json.dumps({"text": f"look: {HOLDER}"}).encode()),
    "a public post beside the authorization": (
        secret(),
        BOUND,
        "/gists",
        ((b"authorization", f"Bearer {HOLDER}".encode()), JSON),
        json.dumps({"text": HOLDER}).encode(),
    ),
    "a body in base64": (secret(), BOUND, "/", (), base64.b64encode(f"look here: {HOLDER}".encode())),
    "a body in hexadecimal": (secret(), BOUND, "/", (), HOLDER.encode().hex().encode()),
    "a body in escapes": (secret(), BOUND, "/", (JSON,), ('{"a":"' + "".join(f"\\u{ord(each):04x}" for each in HOLDER) + '"}').encode()),
    "another field of the object": (secret("body:key"), BOUND, "/", (JSON,), json.dumps({"key": "x", "text": HOLDER}).encode()),
    "a nested field of the object": (secret("body:key"), BOUND, "/", (JSON,), json.dumps({"a": {"key": HOLDER}}).encode()),
    "a name twice in the object": (secret("body:key"), BOUND, "/", (JSON,), f'{{"key":"x","key":"{HOLDER}"}}'.encode()),
    "the object's field in escapes, and the text as it is": (
        secret("body:key"),
        BOUND,
        "/",
        (JSON,),
        ('{"key":"\\u0061' + HOLDER[1:] + '","x":{"key":"' + HOLDER + '"}}').encode(),
    ),
    "a body of another type": (secret("body:key"), BOUND, "/", ((b"content-type", b"text/plain"),), f"key={HOLDER}".encode()),
}


@pytest.mark.parametrize(("bound", "origin", "target", "fields", "body"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_a_placeholder_at_any_other_place_is_refused(bound: BoundSecret, origin: Origin, target: str, fields: Fields, body: bytes) -> None:
    with pytest.raises(FlowRefused) as refused:
        leaves = sent(admit(bound, *fields, origin=origin, target=target, length=len(body)), body)
        pytest.fail(f"it left: {leaves!r}")
    assert refused.value.status == 403
    assert VALUE not in str(refused.value)


def test_a_body_is_refused_however_it_is_divided() -> None:
    body = json.dumps({"text": f"look: {HOLDER}"}).encode()
    for cut in range(1, len(body)):
        passage = admit(secret(), JSON, length=len(body))
        with pytest.raises(FlowRefused):
            assert passage.feed(body[:cut]) + passage.feed(body[cut:]) == b""
            passage.finish()


def test_a_foreign_credential_does_not_go_to_a_bound_host_in_the_secrets_place() -> None:
    with pytest.raises(FlowRefused, match="is for the secret GITHUB_TOKEN alone"):
        admit(secret(), (b"authorization", b"Bearer of-somebody-else"))
    assert b"of-somebody-else" in sent(admit(secret(), (b"authorization", b"Bearer of-somebody-else"), origin=OTHER))


def test_a_request_without_a_placeholder_goes_on() -> None:
    assert sent(admit(secret(), JSON, length=2), b"{}").endswith(b"\r\n\r\n{}")


def test_a_bound_host_is_asked_for_a_plain_and_whole_answer() -> None:
    fields = ((b"accept-encoding", b"gzip"), (b"range", b"bytes=0-3"))
    assert b"Accept-Encoding: identity\r\n" in sent(admit(secret(), *fields))
    assert b"Range" not in sent(admit(secret(), *fields))
    assert b"Accept-Encoding: gzip\r\nRange" in sent(admit(secret(), *fields, origin=OTHER))


def test_a_packed_answer_of_a_bound_host_is_refused() -> None:
    packed = ResponseHead(200, ((b"content-encoding", b"gzip"),), 10)
    with pytest.raises(FlowRefused, match="cannot be taken out"):
        admit(secret()).response(packed)
    assert admit(secret(), origin=OTHER).response(packed).length == 10


def test_the_value_is_taken_out_of_the_fields_of_an_answer() -> None:
    answer = ResponseHead(302, ((b"location", f"https://other.test/?t={quote(VALUE, safe='')}".encode()),), 0, reason=VALUE.encode())
    back = admit(secret()).response(answer)
    assert back.fields == ((b"location", f"https://other.test/?t={HOLDER}".encode()),)
    assert back.reason == HOLDER.encode()


def test_a_field_of_an_answer_with_the_value_in_its_name_is_left_out() -> None:
    name = b"x-" + VALUE.encode().hex().encode()
    passage = admit(secret())
    assert passage.response(ResponseHead(200, ((name, b"a"), (b"x-b", b"c")), 0)).fields == ((b"x-b", b"c"),)
    assert passage.trailers(((name, b"a"), (b"x-b", b"c"))) == ((b"x-b", b"c"),)
    assert admit(secret(), origin=OTHER).trailers(((name, b"a"),)) == ((name, b"a"),), "the control arm"


WRITTEN = {
    "plain": VALUE.encode(),
    "quoted": quote(VALUE, safe="").encode(),
    "base64": base64.b64encode(VALUE.encode()),
    "base64 after a user": base64.b64encode(f"me:{VALUE}".encode()),
    "base64 for addresses": base64.urlsafe_b64encode(f"u:{VALUE}".encode()),
    "hexadecimal": VALUE.encode().hex().encode(),
    "JSON with escaped slashes": VALUE.replace("/", "\\/").encode(),
}


@pytest.mark.parametrize("written", WRITTEN.values(), ids=WRITTEN)
def test_the_value_is_taken_out_of_the_body_of_an_answer(written: bytes) -> None:
    core = written.rstrip(b"=")[3:-3]
    passage = admit(secret())
    back = passage.receive(b"before " + written + b" after") + passage.received()
    assert core not in back
    assert back.startswith(b"before ")
    assert back.endswith(b" after")
    assert HOLDER.encode() in back


def test_the_answer_of_another_host_is_left_alone() -> None:
    passage = admit(secret(), origin=OTHER)
    assert passage.receive(VALUE.encode()) + passage.received() == VALUE.encode()


def scrub(pieces: list[bytes]) -> bytes:
    scrubber = Broker((secret(),)).scrubber("api.test")
    assert isinstance(scrubber, Scrubber)
    return b"".join([scrubber.feed(each) for each in pieces]) + scrubber.finish()


_PIECES = st.lists(
    st.one_of(
        st.sampled_from([*WRITTEN.values(), VALUE[:5].encode(), VALUE[5:].encode(), b"s", b"s3", b" ", b"s3cret/"]), st.binary(max_size=3)
    ),
    max_size=8,
)


def test_a_long_answer_is_scrubbed_to_its_end_wherever_the_value_is_cut() -> None:
    scrubber = Broker([secret()]).scrubber("api.test")
    assert scrubber is not None
    answer = (b"x" * 60_001 + VALUE.encode()) * 40
    pieces = [answer[place : place + 65536] for place in range(0, len(answer), 65536)]
    back = b"".join(map(scrubber.feed, pieces)) + scrubber.finish()
    assert back == (b"x" * 60_001 + HOLDER.encode()) * 40


@given(_PIECES, st.sets(st.integers(0, 300), max_size=8))
@settings(max_examples=400, deadline=None)
def test_any_division_of_an_answer_is_scrubbed_alike(parts: list[bytes], cuts: set[int]) -> None:
    text = b"".join(parts)
    places = sorted(each for each in cuts if 0 < each < len(text))
    divided = scrub([text[start:end] for start, end in zip((0, *places), (*places, len(text)), strict=True)])
    scrubber = Broker((secret(),)).scrubber("api.test")
    assert scrubber is not None
    assert divided == scrubber.clean(text)
    assert VALUE.encode() not in divided


def test_what_cannot_be_the_beginning_of_a_value_is_not_held_back() -> None:
    scrubber = Broker((secret(),)).scrubber("api.test")
    assert scrubber is not None
    assert scrubber.feed(b"data: {} \n\n") == b"data: {} \n\n"
    assert scrubber.feed(b"x: s3cr") == b"x: "
    assert scrubber.feed(b"umbs") + scrubber.finish() == b"s3crumbs"


def test_a_secret_shows_its_name_and_not_its_value() -> None:
    assert VALUE not in repr(secret())
    assert HOLDER.startswith("agent-sandbox-secret-github-token-")


@pytest.mark.parametrize(
    ("value", "place"), [("short", "authorization"), ("with\r\nlines in it", "authorization"), (VALUE, "cookie"), (VALUE, "header:")]
)
def test_a_secret_that_cannot_be_bound_is_an_error(value: str, place: str) -> None:
    with pytest.raises(PolicyError):
        BoundSecret("A", HOLDER, value, ("api.test",), place)


def test_a_request_with_a_secret_and_further_fields_is_not_taken_for_a_leak() -> None:
    """With the product's own rules: a field that follows the credential is not its value."""
    search = Search.of(default_rules(), OwnSecrets.of(()), b"key")
    bound = BoundSecret("TOKEN", "agent-sandbox-secret-token-0123", "the value of it", ("api.test",))
    customs = Customs(
        network_rules(outbound=True, hosts=["api.test"]), Inspection(search, (("TOKEN", bound.placeholder),), b"k"), Broker((bound,))
    )
    origin = Origin("api.test", 443, True)

    def head(credential: bytes) -> RequestHead:
        after = ((b"content-length", b"11"), (b"content-type", b"application/x-www-form-urlencoded"))
        return RequestHead(b"POST", b"/", ((b"host", b"api.test"), (b"authorization", credential), *after), 11)

    passage = customs.admit(origin, head(b"Bearer " + bound.placeholder.encode()))
    assert passage.secrets == ["TOKEN"] and (b"authorization", b"Bearer the value of it") in passage.judged.fields
    with pytest.raises(FlowRefused):  # the control: the scheme is searched all the same
        customs.admit(origin, head(b"AKIAQYLPMN5HFIQR7XYA " + bound.placeholder.encode()))
