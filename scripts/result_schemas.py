"""JSON Schemas of the documents that `--json` prints, generated from the types of the results (`agent_sandbox.cli.results`).

`scripts.write_reference` writes them to docs/schemas/, and a test compares.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import typing
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Any

import agent_sandbox.cli
from agent_sandbox._fast.values import fields
from agent_sandbox.cli.render.json import VERSION
from agent_sandbox.cli.results import ChangeFacts, Omitted, PathName, VerbResult
from agent_sandbox.engine.simulation.risk import Risk
from agent_sandbox.workspace.changes import Change, Kind
from agent_sandbox.workspace.nodes import EntryType

DRAFT = "https://json-schema.org/draft/2020-12/schema"
# Names that modules import for type checkers only: `run` starts often, and does not load them.
NAMES = {"Literal": typing.Literal, "ClassVar": typing.ClassVar, "EntryType": EntryType, "Kind": Kind, "Change": Change, "Risk": Risk}
PLAIN: dict[object, dict[str, object]] = {
    str: {"type": "string"},
    PathName: {"type": "string"},
    bytes: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    NoneType: {"type": "null"},
    object: {},
}


def result_types() -> dict[str, type[VerbResult]]:
    """Return the types of all results by the kind of their document."""
    for module in pkgutil.walk_packages(agent_sandbox.cli.__path__, "agent_sandbox.cli."):
        importlib.import_module(module.name)
    kinds = {each.kind: each for each in _below(VerbResult) if getattr(each, "kind", "")}
    return {kind: kinds[kind] for kind in sorted(kinds)}


def _below(cls: type[Any]) -> Iterator[type[Any]]:
    each: type[Any]
    for each in cls.__subclasses__():
        yield from (each, *_below(each))


def schema_of(kind: str, result: type[VerbResult]) -> dict[str, object]:
    """Return the schema of one kind of document."""
    definitions: dict[str, object] = {}
    body = _object(result, definitions)
    name = {"schema": {"const": f"agent-sandbox/{kind}/{VERSION}"}}
    return {
        "$schema": DRAFT,
        "$id": f"urn:agent-sandbox:{kind}:{VERSION}",
        "title": kind,
        **body,
        "properties": name | body["properties"],
        "required": ["schema", *body["required"]],
        **({"$defs": {each: definitions[each] for each in sorted(definitions)}} if definitions else {}),
    }


def summary(cls: type) -> str:
    """Return the first sentence of a type's docstring."""
    return " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split())


def _object(cls: type, definitions: dict[str, object]) -> dict[str, Any]:
    properties, required = _properties(cls, definitions)
    return {
        "description": summary(cls),
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _properties(cls: Any, definitions: dict[str, object]) -> tuple[dict[str, object], list[str]]:
    """Return the properties of a value and the names of those that are always there; of inline values, their own properties."""
    properties: dict[str, object] = {}
    required: list[str] = []
    hints = typing.get_type_hints(cls, localns=NAMES)
    for name in (each.name for each in fields(cls)):
        members = _members(hints[name])
        present = [ChangeFacts if each is Change else each for each in members if each is not Omitted]
        if getattr(present[0], "inline", False):
            inner, inner_required = _properties(present[0], definitions)
            properties |= inner
            required += inner_required if Omitted not in members else []
            continue
        properties[name] = _any_of(present, definitions)
        required += [name] if Omitted not in members else []
        if PathName in present:
            properties[f"{name}_hex"] = {"type": "string", "pattern": "^([0-9a-f]{2})+$"}
        if bytes in present:
            properties[f"{name}_base64"] = {"type": "string", "contentEncoding": "base64"}
    return properties, required


def _members(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, UnionType) or typing.get_origin(hint) is typing.Union else (hint,)


def _any_of(hints: list[Any], definitions: dict[str, object]) -> dict[str, object]:
    schemas = [_schema(each, definitions) for each in hints]
    if all(list(each) == ["type"] for each in schemas) and len(schemas) > 1:
        return {"type": [each["type"] for each in schemas]}
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _schema(hint: Any, definitions: dict[str, object]) -> dict[str, object]:
    if hint is Change:
        hint = ChangeFacts
    if hint in PLAIN:
        return dict(PLAIN[hint])
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        return {"type": "array", "items": _any_of(list(_members(arguments[0])), definitions)}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": _any_of(list(_members(arguments[1])), definitions)}
    if hasattr(hint, "__members__"):
        return {"enum": [each.value for each in hint]}
    if hint.__name__ not in definitions:
        definitions[hint.__name__] = {}  # it may hold itself
        definitions[hint.__name__] = _object(hint, definitions)
    return {"$ref": f"#/$defs/{hint.__name__}"}
