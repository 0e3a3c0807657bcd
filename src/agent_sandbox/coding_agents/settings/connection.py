"""Connect a coding agent, and take that back: plan the changes of its settings files, make them, and remember how to undo them.

A record of each changed file lies in the state directory. It is written before the file is changed: whatever happens between the two, the
change can be taken back, or was never made.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agent_sandbox.coding_agents.settings import files
from agent_sandbox.coding_agents.settings.operations import (
    AddElement,
    Form,
    Operation,
    RemoveElement,
    RemoveMember,
    SetMember,
    Unfit,
    changed_text,
    inverse_of,
    meaning,
)
from agent_sandbox.errors import PolicyError

_KINDS = {kind.__name__: kind for kind in (SetMember, RemoveMember, AddElement, RemoveElement)}
_EMPTY: dict[Form, str] = {"json": "{}\n", "json with comments": "{}\n", "toml": "", "text": ""}


@dataclass(frozen=True)
class Target:
    """A settings file and what connecting does with it: operations for its meaning, or, for a file that is all ours, its text."""

    path: str
    form: Form
    operations: Callable[[Any], Sequence[Operation]] | None = None
    text: str = ""


@dataclass(frozen=True)
class FileChange:
    """A planned change of a file. `before` None: it is made; `after` None: it is removed."""

    path: str
    before: str | None
    after: str | None
    mode: int
    record: dict[str, Any] | None  # to be kept; None if the record is to be removed

    @property
    def diff(self) -> str:
        """The change as a unified diff."""
        old, new = (text.splitlines(keepends=True) if text else [] for text in (self.before, self.after))
        lines = difflib.unified_diff(
            old, new, self.path if self.before is not None else os.devnull, self.path if self.after is not None else os.devnull
        )
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


class Connections:
    """The records of connected programs, in a directory of the state."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def plan(self, targets: Sequence[Target]) -> list[FileChange]:
        """Return the changes that connect a program. Nothing is changed yet. Raises `PolicyError` for a file that must not be."""
        changes = (self._connected(target) for target in targets)
        return [change for change in changes if change.before != change.after]

    def plan_undo(self, targets: Sequence[Target]) -> list[FileChange]:
        """Return the changes that take a connection back. Raises `PolicyError` for a file that must not be changed."""
        return [change for target in targets if (change := self._undone(target))]

    def make(self, changes: Sequence[FileChange]) -> None:
        """Make planned changes. Raises `PolicyError` if a file is not as it was when the change was planned."""
        for change in changes:
            if files.read(change.path).text != change.before:
                raise PolicyError(f"{change.path} was changed meanwhile", hint="try again")
        for change in changes:
            if change.record is not None:
                files.write(self._record_of(change.path), json.dumps(change.record), 0o600)
            if change.after is None:
                files.remove(change.path)
            else:
                files.write(change.path, change.after, change.mode)
            if change.record is None:
                files.remove(self._record_of(change.path))

    def _connected(self, target: Target) -> FileChange:
        """Return the change that connects one file. What an earlier connection did to it is taken back first."""
        found = files.read(target.path)
        earlier = self._undone(target)
        start = earlier.after if earlier else found.text
        after, inverse = _changed(target, start)
        record = {"path": target.path, "before": start, "after": after, "inverse": [_stored(each) for each in inverse]}
        return FileChange(target.path, found.text, after, found.mode if found.text is not None else 0o600, record)

    def _undone(self, target: Target) -> FileChange | None:
        """Return the change that takes the connection of one file back; None if it is not connected."""
        record = self._read_record(target.path)
        found = files.read(target.path)
        if record is None or found.text is None:
            return None
        if found.text == record["after"]:
            return FileChange(target.path, found.text, record["before"], found.mode, None)
        if target.form == "text":
            raise PolicyError(f"{target.path} was changed since: nothing was taken back", hint="remove it yourself")
        operations = [_KINDS[kind](tuple(path), value) for kind, path, value in record["inverse"]]
        try:
            text = changed_text(found.text, target.form, operations)
        except Unfit as error:
            raise PolicyError(f"{target.path} cannot be changed: {error}", hint="mend it first; it is as it was") from error
        return FileChange(target.path, found.text, text, found.mode, None)

    def _record_of(self, path: str) -> str:
        return os.path.join(self._directory, f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}.json")

    def _read_record(self, path: str) -> dict[str, Any] | None:
        found = files.read(self._record_of(path))
        if found.text is None:
            return None
        try:
            record = dict(json.loads(found.text))
            if record["path"] == path and isinstance(record["inverse"], list) and isinstance(record["after"], str):
                return record
        except (ValueError, KeyError, TypeError):
            pass
        raise PolicyError(f"the record {self._record_of(path)} is broken", hint=f"remove it, and what connect added to {path}")


def _changed(target: Target, start: str | None) -> tuple[str, list[Operation]]:
    """Return the text of a connected file, and the operations that take the change back."""
    if target.operations is None:
        if start is not None and start != target.text:
            raise PolicyError(f"{target.path} is there already, with other text: nothing was changed", hint="move it away")
        return target.text, []
    text = start if start is not None else _EMPTY[target.form]
    try:
        document = meaning(text, target.form)
        operations = target.operations(document)
        return changed_text(text, target.form, operations), inverse_of(document, operations)
    except Unfit as error:
        raise PolicyError(f"{target.path} cannot be changed: {error}", hint="mend it first; it is as it was") from error


def _stored(operation: Operation) -> list[Any]:
    return [type(operation).__name__, *asdict(operation).values()]
