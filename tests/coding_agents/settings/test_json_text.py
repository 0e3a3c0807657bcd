"""Changes of single members keep every other letter of a JSON text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.coding_agents.settings.json_text import BadText, read, with_element, with_member, without

WITH_COMMENTS = """{
    // mine
    "a": 1, /* beside it */
    "list": [
        "x", // why
    ],
    "b": {"c": "//"}, // last
}
"""


def test_a_member_is_added_in_the_form_of_the_file() -> None:
    assert with_member('{\n    "a": 1\n}\n', ("b", "c"), 2) == '{\n    "a": 1,\n    "b": {\n        "c": 2\n    }\n}\n'
    assert with_member('{"a":1}', ("b",), [2]) == '{"a":1, "b": [2]}'
    assert with_member("{}\n", ("b",), 2) == '{\n  "b": 2\n}\n'
    assert with_member('{\n\t"a": {}\n}', ("a", "b"), 2) == '{\n\t"a": {\n\t\t"b": 2\n\t}\n}'
    assert with_member('{"a": {"b": 1} }', ("a", "b"), 3) == '{"a": {"b": 3} }'
    assert with_member('{ "a": 1,\n  "b": 2 }', ("c",), 3) == '{ "a": 1,\n  "b": 2, "c": 3 }'


def test_an_element_is_added_to_a_list() -> None:
    assert with_element('{"a": ["x"]}', ("a",), "y") == '{"a": ["x", "y"]}'
    assert with_element('{\n  "a": [\n    "x"\n  ]\n}', ("a",), "y") == '{\n  "a": [\n    "x",\n    "y"\n  ]\n}'
    assert with_element("{}", ("p", "a"), "y") == '{\n  "p": {\n    "a": [\n      "y"\n    ]\n  }\n}'


def test_comments_and_trailing_commas_stay() -> None:
    text = with_member(with_element(WITH_COMMENTS, ("list",), "y", comments=True), ("d",), 4, comments=True)
    assert read(text, comments=True).value == {"a": 1, "list": ["x", "y"], "b": {"c": "//"}, "d": 4}
    assert all(line in text for line in ('    // mine\n    "a": 1, /* beside it */\n', '"x", // why\n', '"b": {"c": "//"}, // last\n'))
    back = without(without(text, ("d",), comments=True), ("list",), 1, comments=True)
    assert read(back, comments=True).value == read(WITH_COMMENTS, comments=True).value


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "{", "}", "[", '{"a"}', '{"a" 1}', '{"a": }', "{a: 1}", '{"a": 1 "b": 2}', '{"a": 1}}', '{"a": 1} x', "{'a': 1}"),
        *('{"a": 1, "a": 2}', '{"a": 1,}', '// c\n{"a": 1}', '{"a": /* c */ 1}', '{"a": tru}', "[" * 100_000, '{"a": "\n"}', '{"a": 01}'),
    ],
)
def test_what_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(BadText):
        read(text)


@pytest.mark.parametrize("text", ['{"a": 1 /* no end', "{,}", "[1,,2]", '{"a": 1} /*'])
def test_what_is_not_json_with_comments_is_refused(text: str) -> None:
    with pytest.raises(BadText):
        read(text, comments=True)


def test_something_else_on_the_way_is_refused() -> None:
    for text, path in (('{"a": 1}', ("a", "b")), ('{"a": []}', ("a", "b")), ("[]", ("a",))):
        with pytest.raises(BadText):
            with_member(text, path, 1)
    with pytest.raises(BadText):
        with_element('{"a": {}}', ("a",), 1)
    for path, index in ((("b",), None), (("a",), 1), (("b",), 0)):
        with pytest.raises(BadText):
            without('{"a": [1]}', path, index)


_NAMES = st.sampled_from(["a", "b", "c d", 'q"', "é"])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=3),
    max_leaves=8,
)
_DOCUMENTS = st.dictionaries(_NAMES, _VALUES, max_size=4)


@given(_DOCUMENTS, _NAMES, _VALUES, st.sampled_from([None, 1, 2, 4, "\t"]))
def test_a_member_that_is_added_and_removed_leaves_the_rest(
    document: dict[str, Any], name: str, value: Any, indent: int | str | None
) -> None:
    text = json.dumps(document, indent=indent, ensure_ascii=False)
    assert read(text).value == document
    changed = with_member(text, (name,), value)
    assert json.loads(changed) == {**document, name: value}
    if name not in document:
        assert json.loads(without(changed, (name,))) == document


@given(st.lists(_VALUES, max_size=4), _VALUES, st.sampled_from([None, 2]))
def test_an_element_that_is_added_and_removed_leaves_the_rest(elements: list[Any], value: Any, indent: int | None) -> None:
    text = json.dumps({"x": 1, "l": elements}, indent=indent)
    changed = with_element(text, ("l",), value)
    assert json.loads(changed) == {"x": 1, "l": [*elements, value]}
    for index in range(len(elements) + 1):
        kept = [*elements, value]
        del kept[index]
        assert json.loads(without(changed, ("l",), index)) == {"x": 1, "l": kept}
