"""The JSON Schema of a policy file, made from the table of settings, for editors and policy authors."""

from __future__ import annotations

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.policy.files.presets import PRESETS

if TYPE_CHECKING:
    from typing import Any
from agent_sandbox.policy.files.settings import SECTIONS, SETTINGS, Setting, Shape

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """Return the schema as JSON types."""
    tables: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    top: dict[str, Any] = {}
    for setting in SETTINGS:
        section, dot, key = setting.key.rpartition(".")
        (tables[section] if dot else top)[key] = _of(setting)
    top["extends"] |= {"enum": list(PRESETS)}
    for section, properties in tables.items():
        top[section] = {"type": "object", "properties": properties, "additionalProperties": False}
    return {
        "$schema": DIALECT,
        "title": "Policy of Agent Sandbox",
        "description": "agent-sandbox.toml, or the table tool.agent-sandbox of pyproject.toml. Each layer only takes away.",
        "type": "object",
        "properties": top,
        "additionalProperties": False,
    }


def _of(setting: Setting) -> dict[str, Any]:
    return {**_shape(setting), "description": setting.meaning}


def _shape(setting: Setting) -> dict[str, Any]:
    match setting.shape:
        case Shape.BOOL:
            return {"type": "boolean"}
        case Shape.COUNT:
            return {"type": "integer", "minimum": 1, "maximum": setting.most}
        case Shape.NUMBER:
            return {"type": "number", "exclusiveMinimum": 0, "maximum": setting.most}
        case Shape.TEXT:
            if setting.one_of:
                return {"type": "string", "enum": list(setting.one_of)}
            return {"type": "string", "minLength": 1, "maxLength": 80, **({"pattern": setting.pattern} if setting.pattern else {})}
        case Shape.TEXTS:
            limits = {"enum": list(setting.one_of)} if setting.one_of else {"pattern": setting.pattern}
            return {"type": "array", "items": {"type": "string", **limits}}
        case _:
            return {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": setting.most}}
