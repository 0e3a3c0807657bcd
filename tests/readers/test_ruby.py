"""Ruby is read as tokens: code inside strings is code, heredocs are strings, and constants are followed over their dots."""

from __future__ import annotations

from agent_sandbox.readers import LARGEST
from agent_sandbox.readers.ruby import RubySource, read


def words(source: RubySource) -> list[tuple[str, int]]:
    return [(text, line) for kind, text, line in source.tokens if kind == "word"]


def test_comments_and_strings_are_no_words_but_code_in_a_string_is() -> None:
    assert words(read("a # b\n'c'\n\"d #{e} f\"\n:g\n=begin\nh\n=end\ni")) == [("a", 1), ("e", 3), ("i", 8)]


def test_a_heredoc_is_a_string_and_one_in_backticks_a_command() -> None:
    kinds = [kind for kind, _, _ in read("x = <<A + <<`B`\ntext\nA\nrm\nB\ny").tokens]
    assert [kind for kind in kinds if kind not in ("mark", "line", "end")] == ["word", "text", "shell", "word"]


def test_percent_literals_are_strings_and_a_remainder_is_none() -> None:
    assert [kind for kind, _, _ in read("%w[a b] %x(ls)").tokens[:2]] == ["text", "shell"]
    assert words(read("a%w")) == [("a", 1), ("w", 1)]


def test_constants_are_followed_over_their_dots() -> None:
    assert read("Net::HTTP.get(x)").dotted(0) == "Net.HTTP.get"


def test_methods_that_are_defined_are_known() -> None:
    assert read("def a; end\ndef b(x) end\nc").methods == {"a", "b"}


def test_the_first_argument_is_found_with_and_without_a_parenthesis() -> None:
    assert read("send(:a)").argument(1) == 2 and read("send :a").argument(1) == 1


def test_text_that_is_too_large_says_so() -> None:
    assert read("x" * (LARGEST + 1)).unreadable and not read("x").unreadable
