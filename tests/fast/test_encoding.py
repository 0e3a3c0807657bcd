"""What is spelt without `json` and named without `hashlib` is what they would have said."""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox._fast.encoding import Seal, as_json, sha256

text = st.text(st.characters(), max_size=50) | st.text('"\\\\/\x7f\x1f\n a\ud83d\ude00é', max_size=10)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=20,
)


@given(plain, st.booleans())
def test_a_value_is_spelt_as_json_spells_it(value: Any, sort_keys: bool) -> None:
    told = json.dumps(value, sort_keys=sort_keys, separators=(",", ":"))
    assert as_json(value, sort_keys=sort_keys) == told


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_json_has_not_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        as_json([value])


@pytest.mark.parametrize("value", [b"", {1}, object()])
def test_a_type_that_json_has_not_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="JSON has no"):
        as_json({"a": value})


@given(st.binary(max_size=300))
def test_the_digest_is_sha_256(data: bytes) -> None:
    assert sha256(data).hexdigest() == hashlib.sha256(data).hexdigest()


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_a_seal_is_hmac_sha_256(key: bytes, message: bytes) -> None:
    seal = Seal(key)
    assert seal.on(message) == hmac.digest(key, message, "sha256") == seal.on(message), "and can be used again"
    assert seal.derived(b"one").on(message) != seal.derived(b"other").on(message)
