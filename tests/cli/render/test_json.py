"""Results as documents: nothing is lost, and nothing acts on a terminal."""

from __future__ import annotations

import json
import os

import pytest

from agent_sandbox._fast.values import dataclass
from agent_sandbox.cli.render.json import begin_document, document, encoded, end_document, print_document, write_changes
from agent_sandbox.cli.render.messages import Console
from agent_sandbox.cli.results import OMITTED, Omitted, PathFacts, PathName, VerbResult
from agent_sandbox.workspace.changes import Change, Kind


@dataclass(frozen=True)
class Inner:
    inline = True

    path: PathName
    more: int | Omitted = OMITTED


@dataclass(frozen=True)
class Sample(VerbResult):
    kind = ""  # no kind of the product's

    inner: Inner
    output: bytes
    changes: tuple[Change, ...]
    kinds: dict[str, Kind]

    def text(self, console: Console) -> None: ...


SAMPLE = Sample(Inner(PathName("/a")), b"out", (Change("/a", Kind.ADDED, None, None),), {"a": Kind.MODE})


def test_inline_values_stand_among_the_fields_and_omitted_ones_are_left_out() -> None:
    assert list(document(SAMPLE)) == ["schema", "path", "output", "changes", "kinds"]
    assert document(SAMPLE)["kinds"] == {"a": "mode"}
    assert "more" in document(Sample(Inner(PathName("/a"), 1), b"", (), {}))


def test_bytes_that_are_no_text_are_there_in_another_spelling() -> None:
    path = PathName(os.fsdecode(b"/\xff"))
    odd = document(Sample(Inner(path), b"\xff", (), {}))
    assert (odd["path"], odd["path_hex"]) == ("/\N{REPLACEMENT CHARACTER}", "2fff")
    assert (odd["output"], odd["output_base64"]) == ("\N{REPLACEMENT CHARACTER}", "/w==")
    assert encoded((PathFacts(path),)) == [{"path": "/\N{REPLACEMENT CHARACTER}", "path_hex": "2fff"}]
    assert encoded("\udcff") == "\N{REPLACEMENT CHARACTER}", "other readers refuse lone surrogates"


def test_a_document_in_pieces_is_the_same_document(capsys: pytest.CaptureFixture[str]) -> None:
    pieces: list[bytes] = []
    begin_document(pieces.append, SAMPLE)
    write_changes(pieces.append, iter(SAMPLE.changes))
    end_document(pieces.append, SAMPLE)
    print_document(SAMPLE)
    assert json.loads(b"".join(pieces)) == json.loads(capsys.readouterr().out)
