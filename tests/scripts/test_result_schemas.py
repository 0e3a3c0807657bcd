"""The published schemas: one for each kind of document, generated from the code, and named in the documentation."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import pytest

from agent_sandbox.cli.render.json import document
from agent_sandbox.cli.results import DeclinedResult, ErrorFacts, ErrorResult
from scripts.result_schemas import result_types, schema_of

DOCS = Path(__file__).resolve().parents[2] / "docs"
KINDS = result_types()


def test_every_kind_of_document_has_a_schema_and_every_schema_a_kind() -> None:
    assert {path.stem for path in (DOCS / "schemas").glob("*.json")} == KINDS.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_a_schema_is_what_the_types_say_valid_and_documented(kind: str) -> None:
    published = json.loads((DOCS / "schemas" / f"{kind}.json").read_text())
    assert published == schema_of(kind, KINDS[kind]), "make reference"
    jsonschema.Draft202012Validator.check_schema(published)
    assert f"(../schemas/{kind}.json)" in (DOCS / "reference" / "json.md").read_text()


def test_a_schema_is_strict() -> None:
    schema = schema_of("declined", DeclinedResult)
    written = document(DeclinedResult("undo", 3, "undo needs --yes"))
    jsonschema.validate(written, schema)
    for wrong in ({**written, "more": 1}, {**written, "exit": "3"}, {"schema": written["schema"], "verb": "undo"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


def test_a_field_that_is_omitted_is_not_required() -> None:
    facts = ErrorFacts("UsageError", "what", "hint")
    jsonschema.validate(document(ErrorResult(facts, 2)), schema_of("error", ErrorResult))
