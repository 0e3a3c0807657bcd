"""The link to an egress process: what is sent arrives, and what a hostile process sends is bounded and typed."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.egress import frames, orders
from agent_sandbox.egress.frames import FRAME
from agent_sandbox.egress.orders import FlowRecord, Orders, decode_rules, encode_rules
from agent_sandbox.egress.service import bounded
from agent_sandbox.policy.network import NetworkRules, Reach, RequestRule
from agent_sandbox.policy.traffic_budgets import read_budget

_texts = st.text("abc.*", min_size=1, max_size=8)
_tuples = st.lists(_texts, max_size=3).map(tuple)
_requests = st.builds(RequestRule, _texts, _tuples, _tuples)
_reaches = st.builds(
    Reach,
    st.none() | _tuples,
    st.none() | st.lists(st.integers(1, 65535), max_size=3).map(tuple),
    st.lists(_requests, max_size=2).map(tuple),
    _tuples,
    _tuples,
    _tuples,
)
_rules = st.builds(NetworkRules, st.booleans(), st.booleans(), st.lists(_reaches, max_size=3).map(tuple), _tuples, st.booleans())


@given(_rules)
def test_rules_arrive_as_they_were_sent(rules: NetworkRules) -> None:
    assert decode_rules(json.loads(json.dumps(encode_rules(rules)))) == rules


def test_orders_arrive_with_their_descriptors() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader, writer = os.pipe()
        sent = Orders(
            NetworkRules(outbound=True, reaches=(Reach(("a.example",)),), budgets=(read_budget("* 1MB"),)),
            1,
            tables=(("mine.toml", "# text " * 20_000),),
        )
        frames.send(ours, sent.encoded(), (reader, writer))
        message, descriptors = frames.receive(theirs, most=orders.MOST_ORDER_BYTES)
        assert Orders.decoded(message) == sent and len(descriptors) == 2
        os.write(descriptors[1], b"x")
        assert os.read(reader, 1) == b"x"
        for each in (reader, writer, *descriptors):
            os.close(each)


@pytest.mark.parametrize(
    "sent",
    [
        FRAME.pack(frames.MOST_BYTES + 1),
        FRAME.pack(4) + b"null",
        FRAME.pack(2) + b"{}",
        FRAME.pack(10) + b'{"kind":1}',
        FRAME.pack(3) + b"\xff\xfe\x00",
        FRAME.pack(2) + b"[]",
    ],
)
def test_a_message_that_is_too_long_or_malformed_is_refused_before_it_is_read(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(sent)
        with pytest.raises(ValueError):
            frames.receive(theirs)


def test_an_end_in_the_middle_of_a_message_is_an_end() -> None:
    for part in (b"", b"\0\0", FRAME.pack(10) + b"{"):
        ours, theirs = socket.socketpair()
        with theirs:
            ours.sendall(part)
            ours.close()
            with pytest.raises(EOFError):
                frames.receive(theirs)


@pytest.mark.parametrize("field", [{"name": 1}, {"port": "x"}, {"port": True}, {"sent": -1}, {"received": 1 << 70}, {"requests": "GET"}])
def test_a_flow_with_a_field_of_another_type_is_refused(field: dict[str, Any]) -> None:
    good = {
        "kind": "flow",
        "name": "a.example",
        "port": 443,
        "how": "https",
        "sent": 1,
        "received": 2,
        "requests": ["GET /"],
        "refused": "",
    }
    assert FlowRecord.decoded(good).target == "a.example:443"
    with pytest.raises(ValueError):
        FlowRecord.decoded({**good, **field})


def test_a_long_flow_fits_into_one_frame() -> None:
    flow = {"name": "a" * 100_000, "port": 1, "refused": "é" * 100_000, "requests": ["ü" * 1000] * 1000, "other": object()}
    assert len(frames.frame({"kind": "flow", **bounded(flow)})) < frames.MOST_BYTES
    assert bounded(flow)["requests"][-1] == "and 980 more"
