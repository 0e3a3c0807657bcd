"""Data that crosses is the same on the other side; what is none, and what no one could have spelt, is refused."""

from __future__ import annotations

import marshal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.runtime.guest_rpc import codec

TEXT = st.text(st.characters())  # surrogates among them
SCALARS = st.none() | st.booleans() | st.integers() | st.integers(-(2**9000), 2**9000) | st.floats(allow_nan=False) | TEXT | st.binary()
KEYS = TEXT | st.sampled_from(["$int", "$bytes", "$dict", "$"])
DATA = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=20)


@settings(max_examples=50)
@given(DATA)
def test_what_is_spelt_is_understood_exactly(value: Any) -> None:
    assert _typed(codec.understood(codec.spell(value))) == _typed(value)


@settings(max_examples=50)
@given(DATA)
def test_what_is_packed_is_unpacked_exactly(value: Any) -> None:
    assert _typed(marshal.loads(codec.packed(codec.plain(value)))) == _typed(value)


def _typed(value: Any) -> Any:
    """With its types, which compare equal where values do: 1 and True, 0.0 and -0.0."""
    if isinstance(value, list):
        return [_typed(item) for item in value]
    if isinstance(value, dict):
        return {key: _typed(item) for key, item in value.items()}
    return type(value), repr(value) if isinstance(value, float) else value


@settings(max_examples=50)
@given(
    st.binary()
    | st.text().map(str.encode)
    | DATA.map(codec.spell).flatmap(lambda words: st.integers(0, len(words)).map(lambda n: words[:n]))
)
def test_whatever_is_said_is_understood_or_refused(words: bytes) -> None:
    try:
        value = codec.understood(words)
    except ValueError:
        return
    codec.plain(value)


WRONG = (
    b"", b"{", b"nul", b"[1,]", b'"\xff"', b'{"$int":"x"}', b'{"$int":1}', b'{"$bytes":"="}', b'{"$bytes":null}', b'{"$dict":1}',
    b'{"$dict":[["a"]]}', b'{"$dict":[[1,2]]}', b'{"$dict":[[{},2]]}', b"[" * 101 + b"]" * 101, b"[" * 1_000_000, b"9" * 5_000,
    b"[" + b"[]," * codec.MOST + b"0]", b'"' + b"x" * codec.LARGEST + b'"',
)  # fmt: skip


@pytest.mark.parametrize("words", WRONG, ids=lambda words: repr(words[:20]))
def test_what_nobody_spelt_is_refused(words: bytes) -> None:
    with pytest.raises(ValueError):
        codec.understood(words)


class Whole(int):
    """A number of somebody's own."""

    def __repr__(self) -> str:
        return "1, 2"


class Words(str):
    """Text of somebody's own."""

    __slots__ = ()

    def __str__(self) -> str:
        return '"'


def test_what_is_derived_from_data_crosses_as_what_it_is() -> None:
    value = [Whole(7), Words("text"), {Words("key"): Whole(8)}, bytearray(b"x"), memoryview(b"y"), (1, 2)]
    wanted = [7, "text", {"key": 8}, b"x", b"y", [1, 2]]
    assert codec.understood(codec.spell(value)) == wanted
    assert marshal.loads(codec.packed(codec.plain(value))) == wanted
