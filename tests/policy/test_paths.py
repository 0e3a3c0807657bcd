"""Path patterns mean one thing each, and what has no meaning is refused."""

from __future__ import annotations

import contextlib
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.paths import Beneath, Glob, PathPattern, Tree, ancestors, covering, matches, normalise, parse

name = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1).filter(lambda text: text not in (".", ".."))
plain_name = st.text("abc.é -", min_size=1).filter(lambda text: text not in (".", ".."))
path = st.lists(plain_name, max_size=5).map(lambda parts: "/" + "/".join(parts))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("/data", Tree("/data")),
        ("/", Tree("/")),
        ("/data/", Tree("/data")),
        ("//data/./x//", Tree("/data/x")),
        ("~", Tree("/home/u")),
        ("~/.ssh", Tree("/home/u/.ssh")),
        ("/data/*", Beneath("/data")),
        ("/data/**", Beneath("/data")),
        ("/data/**/*", Beneath("/data")),
        ("/*", Beneath("/")),
        ("~/*", Beneath("/home/u")),
        ("/config/*.json", Glob("/config", "*.json")),
        ("/data/secret*", Glob("/data", "secret*")),
        ("/a/*/b", Glob("/a", "*/b")),
        ("**/.env", Glob("/", "**/.env")),
        ("/a/[*]/[[]x", Tree("/a/*/[x")),
        ("/a/[\\]", Tree("/a/\\")),
        ("/a/[*]*", Glob("/a", "[*]*")),
        (b"/caf\xe9", Tree("/caf\udce9")),
        ("/caf\udce9", Tree("/caf\udce9")),
        ("/\udcc3\udca9", Tree("/é")),
    ],
)
def test_a_pattern_is_parsed_once_into_a_value(text: str | bytes, value: PathPattern) -> None:
    assert parse(text, home="/home/u") == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "data",
        "./data",
        "*.py",
        "*",
        "../x",
        "/a/../b",
        "/a/..",
        "/a/[.][.]/b",
        "/a\0b",
        "~bob/x",
        "/a\\b",
        "/a[",
        "/a[]",
        "/a[z-a]",
        "/a[^b]",
        "/\ud800",
    ],
)
def test_what_cannot_be_understood_is_refused_with_the_pattern_and_a_remedy(text: str) -> None:
    with pytest.raises(PolicyError) as refusal:
        parse(text, home="/home/u")
    assert repr(text) in refusal.value.message
    assert refusal.value.hint


def test_a_tilde_without_a_home_is_refused() -> None:
    with pytest.raises(PolicyError, match="no home is known"):
        parse("~/x")


def test_wildcards_in_the_home_itself_are_literal() -> None:
    assert parse("~/*", home="/home/[u]*") == Beneath("/home/[u]*")


@pytest.mark.parametrize(
    ("pattern", "covered", "not_covered"),
    [
        ("/data", ["/data", "/data/x", "/data/x/y"], ["/", "/database", "/data2/x"]),
        ("/data/*", ["/data/x", "/data/.x", "/data/x/y"], ["/data", "/database/x"]),
        ("/", ["/", "/x"], []),
        ("/*", ["/x", "/x/y"], ["/"]),
        (
            "/config/*.json",
            ["/config/a.json", "/config/.json", "/config/sub/a.json", "/config/d.json/x"],
            ["/config/a.jsonx", "/config", "/a.json"],
        ),
        ("/data/secret*", ["/data/secret", "/data/secrets/key"], ["/data/a", "/data/my-secret"]),
        ("**/.env", ["/.env", "/a/.env", "/a/b/.env", "/.env/x"], ["/a.env", "/a/.envrc"]),
        ("/a/**/b/**/c", ["/a/b/c", "/a/bz/b/c", "/a/x/b/y/z/c"], ["/a/bc", "/a/b/xc", "/a/xb/c"]),
        ("/a/?", ["/a/x", "/a/x/y"], ["/a/xy", "/a"]),
        ("/a/[b-d]1", ["/a/c1"], ["/a/e1", "/a/c12"]),
        ("/a/[!b]1", ["/a/c1"], ["/a/b1", "/a//1"]),
        ("/a/[]x]", ["/a/]", "/a/x"], ["/a/y"]),
    ],
)
def test_a_pattern_covers_these_and_not_those(pattern: str, covered: list[str], not_covered: list[str]) -> None:
    parsed = parse(pattern)
    assert [path for path in covered if not matches(parsed, path)] == []
    assert [path for path in not_covered if matches(parsed, path)] == []


def test_a_name_made_to_slow_a_matcher_down_does_not() -> None:
    pattern = parse("/" + "*a" * 20 + "b")
    started = time.process_time()
    assert not matches(pattern, "/" + "a" * 4000)
    assert time.process_time() - started < 2


@given(st.lists(name, max_size=5))
def test_any_name_can_be_written_as_an_escaped_pattern(parts: list[str]) -> None:
    escaped = "/".join("".join(f"[{c}]" if c in "*?[\\" else c for c in part) for part in parts)
    assert parse("/" + escaped) == Tree("/" + "/".join(parts))


@given(st.binary(min_size=1).filter(lambda raw: b"\0" not in raw and b".." not in raw))
def test_any_bytes_are_a_path_and_come_back_the_same(raw: bytes) -> None:
    path = normalise(b"/" + raw)
    assert os.fsencode(path) == os.fsencode(os.path.normpath(b"/" + raw.lstrip(b"/")))
    assert normalise(path) == path == normalise(os.fsencode(path))


@given(path, path)
def test_a_tree_covers_a_path_exactly_when_it_is_among_its_ancestors(top: str, path: str) -> None:
    top, path = normalise(top), normalise(path)
    assert matches(Tree(top), path) == (top in ancestors(path))
    assert matches(Beneath(top), path) == (top in ancestors(path)[1:])


@given(st.text("ab*?/", min_size=1), path, plain_name)
def test_what_a_pattern_covers_it_covers_with_all_beneath(text: str, path: str, child: str) -> None:
    pattern, path = parse("/" + text), normalise(path)
    if matches(pattern, path):
        assert matches(pattern, normalise(path + "/" + child))


@given(st.text(max_size=30))
def test_parsing_gives_a_value_or_a_policy_error_and_nothing_else(text: str) -> None:
    with contextlib.suppress(PolicyError):
        parse(text, home="/h")


def test_relative_patterns_are_those_of_the_project() -> None:
    covered = covering(["src/*.py", "./docs", "/etc", "~/x", "**/*.md"], project="/srv/app", home="/home/u")
    paths = ["/srv/app/src/a.py", "/srv/app/docs/x", "/etc/hosts", "/home/u/x", "/any/where.md", "/srv/app/other", "/srv/src/a.py"]
    assert [covered(path) for path in paths] == [True, True, True, True, True, False, False]
