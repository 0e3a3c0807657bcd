"""Without Hyperscan, for which some platforms have no wheel, the search takes longer and finds the same. Without RE2 it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.egress.dlp import encodings
from agent_sandbox.egress.dlp.own_secrets import OwnSecrets
from agent_sandbox.egress.dlp.rules import default_rules
from agent_sandbox.egress.dlp.scanner import Search
from bench.encodings import COMPRESSED, TEXTUAL
from tests.egress.dlp.samples import KEY, OWN, SEARCH, TOKENS, find

TEXT = (
    f"{OWN} and {TOKENS['npm-token']()} for ada@example.org, card 4111 1111 1111 1111, from 203.0.113.9; password = 'tr0ub4dor&3'\n"
).encode()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Search]:
    monkeypatch.setitem(sys.modules, "hyperscan", None)
    encodings._prefilter.cache_clear()
    search = Search.of(default_rules(), OwnSecrets.of([("DEPLOY", OWN)]), KEY)
    assert search.matcher._filter.ends(b"") is None  # the control: there is no prefilter
    yield search
    encodings._prefilter.cache_clear()


@pytest.mark.parametrize("encoding", [*TEXTUAL, *COMPRESSED])
def test_the_findings_are_the_same(encoding: str, slow: Search) -> None:
    data = {**TEXTUAL, **COMPRESSED}[encoding](TEXT)
    found = find(data, search=slow)
    assert found
    encodings._prefilter.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "hyperscan")
        assert find(data, search=SEARCH) == found


def test_the_findings_in_source_code_are_the_same(slow: Search) -> None:
    data = b"\n".join(Path(each).read_bytes() for each in (encodings.__file__, __file__))
    found = find(data, search=slow)
    encodings._prefilter.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "hyperscan")
        assert find(data, search=SEARCH) == found


def test_without_re2_the_search_refuses_and_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['re2'] = None\n"
        "from agent_sandbox.egress.dlp.rules import default_rules\n"
        "try: default_rules()\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert told.startswith("PolicyError the search for secrets needs RE2")
    assert "google-re2" in told
