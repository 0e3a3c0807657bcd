"""The search of a run: what its policy says of it, and the file in which compiled rules are kept."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from agent_sandbox.egress import search
from agent_sandbox.egress.dlp import prefilter, rules
from agent_sandbox.egress.dlp.rules import RuleMatcher
from agent_sandbox.egress.dlp.scanner import Scanner, Search
from agent_sandbox.egress.orders import Orders
from agent_sandbox.engine.provisions import COMPILED, Provisions
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.bound_secrets import BoundSecret
from agent_sandbox.policy.network import NetworkRules, public_web
from agent_sandbox.policy.search_rules import SearchRules

CARD, KEY, OWN = b"4111111111111111", b"AKIAQYLPMN5HFIQR7XYA", "quiet-Harbour-77-lantern"


@pytest.fixture(scope="module")
def compiled() -> RuleMatcher:
    return search.compiled_rules(None)


def _orders(said: SearchRules, tables: tuple[tuple[str, str], ...] = (), own: tuple[tuple[str, str], ...] = ()) -> Orders:
    return Orders(replace(public_web(), search=said), 0, own=own, tables=tables)


def _found(made: Search | None, text: bytes) -> set[tuple[str, str]]:
    assert made is not None
    scanner = Scanner(made)
    return {(each.rule, each.action) for each in (*scanner.feed(text), *scanner.finish())}


def test_actions_are_those_of_the_policy(compiled: RuleMatcher) -> None:
    text = b"%b %b" % (CARD, KEY)
    assert _found(search.search_of(_orders(SearchRules()), compiled), text) == {("card", "block"), ("aws-access-key", "block")}
    mild = SearchRules(actions=(("personal", "alert"),))
    assert _found(search.search_of(_orders(mild), compiled), text) == {("card", "alert"), ("aws-access-key", "block")}
    assert search.search_of(_orders(SearchRules(off=True)), compiled) is None


def test_own_secrets_are_blocked_whatever_is_said_of_kinds(compiled: RuleMatcher) -> None:
    mild = SearchRules(actions=(("secret", "alert"),))
    assert _found(search.search_of(_orders(mild, own=(("NAME", OWN),)), compiled), OWN.encode().hex().encode()) == {
        ("own-secret:NAME", "block")
    }
    bound = replace(_orders(mild), secrets=(BoundSecret("T", "placeholder", OWN, ("a.example",)),))
    assert _found(search.search_of(bound, compiled), OWN.encode()) == {("own-secret:T", "block")}


def test_a_table_of_the_user_adds_changes_and_removes_rules(compiled: RuleMatcher) -> None:
    table = """
        [[rule]]
        id = "badge"
        what = "the number of a badge"
        pattern = 'badge-[0-9]{6}'
        [[rule]]
        id = "card"
        off = true
    """
    made = search.search_of(_orders(SearchRules(), (("mine.toml", table),)), compiled)
    assert _found(made, b"badge-123456 %b" % CARD) == {("badge", "block")}
    with pytest.raises(PolicyError, match=r"mine\.toml"):
        search.search_of(_orders(SearchRules(), (("mine.toml", "[[rule]]\nid = 'x'"),)), compiled)


def test_orders_arrive_as_they_were_sent() -> None:
    said = SearchRules(True, (("card", "alert"),), (("secret", "block"),), ("/x",))
    secret = BoundSecret("T", "placeholder", OWN, ("a.example", "*.b.example"), "query:key")
    orders = Orders(NetworkRules(True, search=said), 2, (secret,), (("N", OWN),), (("/x", "text"),))
    assert Orders.decoded(orders.encoded()) == orders
    assert OWN not in repr(orders)


def test_compiled_rules_are_kept_and_used_again(tmp_path: Path, compiled: RuleMatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Provisions(state=str(tmp_path)).open_compiled()
    assert kept is not None
    _afresh(search.compiled_rules, kept)
    written = (tmp_path / COMPILED).read_bytes()
    assert len(written) > 1000 and (tmp_path / COMPILED).stat().st_mode & 0o777 == 0o600
    import hyperscan

    class Database(hyperscan.Database):
        def compile(self, *_: object, **__: object) -> None:
            raise AssertionError("compiled again")

    with monkeypatch.context() as patched:
        patched.setattr(hyperscan, "Database", Database)
        again = _afresh(search.compiled_rules, kept)
    assert _found(search.search_of(_orders(SearchRules()), again), CARD) == {("card", "block")}
    assert (tmp_path / COMPILED).read_bytes() == written
    for spoilt in (written[:-1], b"", written[:40] + bytes([written[40] ^ 1]) + written[41:], b"x" * 100):
        (tmp_path / COMPILED).write_bytes(spoilt)
        assert _found(search.search_of(_orders(SearchRules()), _afresh(search.compiled_rules, kept)), CARD) == {("card", "block")}
        assert (tmp_path / COMPILED).read_bytes() != spoilt
    os.close(kept)


def test_the_rules_of_the_product_are_kept_as_they_were_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Provisions(state=str(tmp_path)).open_compiled()
    assert kept is not None
    rules._shipped.cache_clear()
    _afresh(search.compiled_rules, kept)
    read, written = rules.default_rules(), (tmp_path / COMPILED).read_bytes()

    def fail(*_: object) -> None:
        raise AssertionError("read again")

    with monkeypatch.context() as patched:
        patched.setattr(rules, "read_rules", fail)
        rules._shipped.cache_clear()
        _afresh(search.compiled_rules, kept)
        assert rules.default_rules() == read and (tmp_path / COMPILED).read_bytes() == written
        patched.setattr(rules, "_FIELDS", {**rules._FIELDS, "more": str})  # the control: rules of another version are read
        rules._shipped.cache_clear()
        with pytest.raises(AssertionError, match="read again"):
            _afresh(search.compiled_rules, kept)
    assert rules.default_rules() == read
    os.close(kept)


def _afresh(make: Callable[[int], RuleMatcher], kept: int) -> RuleMatcher:
    """Make a matcher as a new process would: nothing is remembered of what was compiled."""
    from agent_sandbox.egress.dlp import encodings

    encodings._prefilter.cache_clear()
    return make(kept)


def test_a_file_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    there = tmp_path / COMPILED

    def widen() -> None:
        there.chmod(0o666)

    def link() -> None:
        os.link(there, tmp_path / "other")

    def lead_away() -> None:
        there.rename(tmp_path / "other")
        there.symlink_to("other")

    for spoil in (widen, link, lead_away):
        there.unlink(missing_ok=True)
        (tmp_path / "other").unlink(missing_ok=True)
        kept = Provisions(state=str(tmp_path)).open_compiled()
        assert kept is not None, "the control"
        os.close(kept)
        spoil()
        assert Provisions(state=str(tmp_path)).open_compiled() is None
    assert Provisions().open_compiled() is None


def test_nothing_is_stored_of_what_a_run_compiles(compiled: RuleMatcher) -> None:
    store: dict[bytes, bytes] = {}
    with prefilter.compiling_with(store):
        search.search_of(_orders(SearchRules(), own=(("NAME", OWN),)), compiled)
    assert len(store) == 1, "the control: within such a block it would be"
    search.search_of(_orders(SearchRules(), own=(("NAME", OWN + "2"),)), compiled)
    assert len(store) == 1
