"""`--json`: one document on standard output, with a `schema` field that names its kind and version.

Everything is ASCII, so that nothing a guest wrote can act on a terminal. Bytes that are not UTF-8 are replaced in a text field; a second
field (`…_base64` or `…_hex`) then holds the exact bytes.
"""

from __future__ import annotations

import json
import os
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping

from agent_sandbox._fast.values import fields, is_dataclass, is_member
from agent_sandbox.cli.results import ChangeFacts, Omitted, PathName, VerbResult
from agent_sandbox.workspace.changes import Change

VERSION = 1
Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Write = Callable[[bytes], object]


def document(result: VerbResult) -> dict[str, Json]:
    """Return a result as the JSON document that --json prints."""
    return {"schema": f"agent-sandbox/{result.kind}/{VERSION}", **dict(_fields(result))}


def print_document(result: VerbResult) -> None:
    """Print a result as a JSON document."""
    sys.stdout.write(json.dumps(document(result), indent=2) + "\n")


def begin_document(write: Write, result: VerbResult) -> None:
    """Write the part of a document before its `changes`. The changes follow one by one, because there may be many."""
    before = [(name, value) for name, value in _split(result)[0]]
    lines = "".join(f"  {json.dumps(name)}: {json.dumps(value)},\n" for name, value in before)
    write(f'{{\n{lines}  "changes": ['.encode())


def write_changes(write: Write, changes: Iterator[object]) -> None:
    """Write changes, each on a line of its own."""
    for number, change in enumerate(changes):
        write(f"{',' if number else ''}\n    {json.dumps(encoded(change))}".encode())


def end_document(write: Write, result: VerbResult) -> None:
    """Write the part of a document after its `changes`."""
    write(b"\n  ]")
    for name, value in _split(result)[1]:
        write(f",\n  {json.dumps(name)}: {json.dumps(value)}".encode())
    write(b"\n}\n")


def _split(result: VerbResult) -> tuple[list[tuple[str, Json]], list[tuple[str, Json]]]:
    every = list(document(result).items())
    place = next(number for number, (name, _) in enumerate(every) if name == "changes")
    return every[:place], every[place + 1 :]


def encoded(value: object) -> Json:
    """Return a value of a result as JSON types."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if is_member(value):
        return encoded(value.value)
    if isinstance(value, str):
        return value.encode(errors="surrogateescape").decode(errors="replace")  # other readers of JSON refuse lone surrogates
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, Mapping):
        return {str(encoded(key)): encoded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [encoded(each) for each in value]
    if isinstance(value, Change):
        return encoded(ChangeFacts.of(value))
    return dict(_fields(value))


def _fields(value: object) -> Iterator[tuple[str, Json]]:
    """Return the names and JSON values of a result's fields. Omitted fields are left out; fields of inline values are included directly."""
    for each in fields(value):  # type: ignore[arg-type]  # results are made of values
        name, held = each.name, getattr(value, each.name)
        if isinstance(held, Omitted):
            continue
        if isinstance(held, Change):
            held = ChangeFacts.of(held)
        if is_dataclass(held) and getattr(held, "inline", False):
            yield from _fields(held)
            continue
        yield name, encoded(held)
        if isinstance(held, PathName) and (raw := os.fsencode(held)).decode(errors="replace").encode() != raw:
            yield f"{name}_hex", raw.hex()
        elif isinstance(held, bytes) and held.decode(errors="replace").encode() != held:
            yield f"{name}_base64", b64encode(held).decode()
