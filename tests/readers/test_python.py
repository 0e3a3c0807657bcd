"""A Python program is read once: nodes in the order of the text, branches that never run apart, and numbers where the text has them."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from agent_sandbox.readers import LARGEST
from agent_sandbox.readers.python import (
    ImportChoice,
    elements,
    has_only_integers,
    is_int_type,
    names_an_encoding,
    number,
    read,
    repetitions,
)


def expression(text: str) -> Any:
    return ast.parse(text, mode="eval").body


def names_executed(text: str) -> list[str]:
    return [node.id for node in read(text).executed() if isinstance(node, ast.Name)]


def test_nodes_come_in_the_order_of_the_text() -> None:
    attributes = [node.attr for node in read("a.one\nif b.two:\n    c.three(d.four)\ne.five").kinds[ast.Attribute]]
    assert attributes == ["one", "two", "three", "four", "five"]


@pytest.mark.parametrize("test", ["False", "0", "TYPE_CHECKING", "typing.TYPE_CHECKING"])
def test_a_branch_that_never_runs_is_not_executed_but_seen(test: str) -> None:
    source = read(f"import typing\nfrom typing import TYPE_CHECKING\nif {test}:\n    import dead\nelse:\n    import alive")
    executed = [each.name for node in source.executed() if isinstance(node, ast.Import) for each in node.names]
    assert executed == ["typing", "alive"]
    assert len(source.kinds[ast.Import]) == 3


def test_a_name_that_is_bound_anew_is_no_constant() -> None:
    assert names_executed("from typing import TYPE_CHECKING\nTYPE_CHECKING = f()\nif TYPE_CHECKING:\n    print(x)") == [
        "TYPE_CHECKING",
        "x",
    ]


def test_a_name_is_executed_where_it_is_passed_on_and_not_where_it_is_called_renamed_or_before_a_dot() -> None:
    assert names_executed("called()\nbefore.dot\nnew = renamed\nf(passed)\nstored = [listed]") == ["passed", "listed"]


def test_imports_with_fallbacks_are_one_choice_with_all_alternatives() -> None:
    inner = "    try:\n        import b\n    except ImportError:\n        import c\n        print(late)"
    source = read(f"try:\n    import a\nexcept ImportError:\n{inner}")
    executed = list(source.executed())
    choices = [node for node in executed if isinstance(node, ImportChoice)]
    assert [(choice.lineno, choice.alternatives) for choice in choices] == [(1, [("a",), ("b",), ("c",)])]
    assert not any(isinstance(node, ast.Import) for node in executed)
    assert [node.id for node in executed if isinstance(node, ast.Name)] == ["late"]


@pytest.mark.parametrize("handler", ["except ValueError:\n    import b", "except ImportError:\n    b = None", "finally:\n    import b"])
def test_another_try_is_no_choice(handler: str) -> None:
    assert not any(isinstance(node, ImportChoice) for node in read(f"try:\n    import a\n{handler}").executed())


def test_definitions_are_those_at_top_level_that_stay() -> None:
    assert read("def a(): ...\nclass B:\n    def c(self): ...\ndef d(): ...\ndel d").definitions() == {"a": 1, "B": 2}


def test_text_that_cannot_be_read_says_why() -> None:
    assert read("x" * (LARGEST + 1)).too_large
    assert (read("def").too_large, read("def").unreadable) == (False, "line 1: invalid syntax")
    assert read("x = '\ud800'").unreadable == "Python does not accept its characters or numbers"
    assert read("(" * 1000).unreadable


def test_added_text_shares_the_names() -> None:
    source = read("import os as o")
    assert source.add("o.fork") == "" and source.add("(") != ""
    assert source.names.origins(source.kinds[ast.Attribute][0]) == {"os.fork"}


def test_another_encoding_than_utf_8_is_noticed_in_the_first_two_lines() -> None:
    assert names_an_encoding("#!/usr/bin/python\n# coding: latin-1") and not names_an_encoding("# -*- coding: utf-8 -*-\n")
    assert not names_an_encoding("\n\n# coding: latin-1")


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("2 * 3 + 4", 10), ("10 ** 3", 1000), ("1 << 4", 16), ("int(1e3)", 1000), ("x", 0), ("1.5", 0), ("10 ** 1000", 0)],
)
def test_a_constant_expression_has_its_number(text: str, value: int) -> None:
    assert number(expression(text)) == value


def test_sizes_are_told_as_far_as_the_text_shows() -> None:
    assert [elements(expression(text).args) for text in ("f(2, 3)", "f((4, 5))", "f(x)", "f()")] == [6, 20, 1, 0]
    assert [repetitions(expression(text)) for text in ("[0] * 5", "6 * 'a'", "x * 7", "[0] + [1]")] == [5, 6, 0, 0]


def test_integers_are_told_from_other_numbers() -> None:
    assert has_only_integers(expression("[1, (-2, 3)]"), unknown=False) and not has_only_integers(expression("[1, 2.0]"), unknown=True)
    assert has_only_integers(expression("[x]"), unknown=True) and not has_only_integers(expression("[x]"), unknown=False)
    assert is_int_type(expression("int")) and is_int_type(expression("'uint'")) and not is_int_type(expression("float"))
