"""Operations on a settings document, applied to its meaning and to its text, and their inverses.

The meaning decides: after the text was changed, it is read again, and has to mean what the operations make of the old meaning.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agent_sandbox.coding_agents.settings import json_text, toml_text

Form = Literal["json", "json with comments", "toml", "text"]
Path = tuple[str, ...]


@dataclass(frozen=True)
class SetMember:
    """Set the value at a path."""

    path: Path
    value: Any


@dataclass(frozen=True)
class RemoveMember:
    """Remove the value at a path, if it is still this one. `value` None: if it is an empty list or object."""

    path: Path
    value: Any = None


@dataclass(frozen=True)
class AddElement:
    """Add an element to the list at a path, unless it is there."""

    path: Path
    value: Any


@dataclass(frozen=True)
class RemoveElement:
    """Remove an element from the list at a path, if it is there."""

    path: Path
    value: Any


Operation = SetMember | RemoveMember | AddElement | RemoveElement


class Unfit(ValueError):
    """The document cannot be changed in this way. The text says why."""


def meaning(text: str, form: Form) -> Any:
    """Return what a text means. Raises `Unfit` if it is broken."""
    try:
        match form:
            case "toml":
                return toml_text.read(text)
            case "text":
                return text
            case _:
                value = json_text.read(text, comments=form != "json").value
    except (ValueError, RecursionError) as error:
        raise Unfit(str(error)) from error
    if not isinstance(value, dict):
        raise Unfit("it is not an object")
    return value


def lookup(document: Any, path: Path) -> Any:
    """Return the value at a path; None if there is none."""
    for name in path:
        if not isinstance(document, dict) or name not in document:
            return None
        document = document[name]
    return document


def changed_text(text: str, form: Form, operations: Sequence[Operation]) -> str:
    """Return the text after these operations. Raises `Unfit` if they do not fit, or if the text would not mean the result of them."""
    document = meaning(text, form)
    for operation in operations:
        wanted = _applied(document, operation)
        if wanted != document:
            try:
                text = _toml(text, operation) if form == "toml" else _json(text, document, operation, form != "json")
            except json_text.BadText as error:
                raise Unfit(str(error)) from error
            if _comparable(meaning(text, form), form) != _comparable(wanted, form):
                raise Unfit(f"{'.'.join(operation.path)} is written in a form that cannot be changed")
            document = wanted
    return text


def _comparable(document: Any, form: Form) -> Any:
    """Return a document without its empty tables, if it is TOML: there, a table without keys need not be written."""
    if form != "toml" or not isinstance(document, dict):
        return document
    members = {name: _comparable(value, form) for name, value in document.items()}
    return {name: value for name, value in members.items() if value != {}}


def inverse_of(document: Any, operations: Sequence[Operation]) -> list[Operation]:
    """Return the operations that take these back, in the order in which to apply them."""
    inverses: list[Operation] = []
    for operation in operations:
        path = operation.path
        created = [path[:depth] for depth in range(1, len(path) + 1) if lookup(document, path[:depth]) is None]
        after = _applied(document, operation)
        if after != document:
            back: list[Operation]
            match operation:
                case SetMember(_, value):
                    old = lookup(document, path)
                    back = [RemoveMember(path, value)] if old is None else [SetMember(path, old)]
                case RemoveMember():
                    back = [SetMember(path, lookup(document, path))]
                case AddElement(_, value):
                    back = [RemoveElement(path, value)]
                case RemoveElement(_, value):
                    back = [AddElement(path, value)]
            back += [RemoveMember(each) for each in reversed(created)]
            inverses = back + inverses
        document = after
    return inverses


def _applied(document: Any, operation: Operation) -> Any:
    """Return the document after an operation. Raises `Unfit` if a value on the way is of another kind."""
    result = copy.deepcopy(document)
    *way, last = operation.path
    making = isinstance(operation, SetMember | AddElement)
    here = result
    for name in way:
        if not isinstance(here, dict):
            raise Unfit(f"{'.'.join(way)} is not an object")
        if name not in here:
            if not making:
                return result
            here[name] = {}
        here = here[name]
    if not isinstance(here, dict):
        raise Unfit(f"{'.'.join(way) or 'the document'} is not an object")
    match operation:
        case SetMember(_, value):
            here[last] = value
        case RemoveMember(_, value):
            if last in here and (here[last] == value if value is not None else here[last] in ({}, [])):
                del here[last]
        case AddElement(_, value) | RemoveElement(_, value):
            if not isinstance(here.get(last, []), list):
                raise Unfit(f"{'.'.join(operation.path)} is not a list")
            if isinstance(operation, AddElement) and value not in here.get(last, []):
                here[last] = [*here.get(last, []), value]
            elif isinstance(operation, RemoveElement) and value in here.get(last, []):
                at = here[last].index(value)
                here[last] = [*here[last][:at], *here[last][at + 1 :]]
    return result


def _json(text: str, document: Any, operation: Operation, comments: bool) -> str:
    match operation:
        case SetMember(path, value):
            return json_text.with_member(text, path, value, comments=comments)
        case RemoveMember(path, _):
            return json_text.without(text, path, comments=comments)
        case AddElement(path, value):
            return json_text.with_element(text, path, value, comments=comments)
        case RemoveElement(path, value):
            return json_text.without(text, path, lookup(document, path).index(value), comments=comments)


def _toml(text: str, operation: Operation) -> str:
    match operation:
        case SetMember(path, value) if isinstance(value, dict):
            return toml_text.with_table(toml_text.without_table(text, path), path, value)
        case SetMember((key,), value):
            return toml_text.with_key(text, key, value)
        case RemoveMember((key,), value) if not isinstance(value, dict):
            return toml_text.without_key(text, key)
        case RemoveMember(path, _):
            return toml_text.without_table(text, path)
        case _:
            raise Unfit(f"{'.'.join(operation.path)} cannot be changed in TOML")
