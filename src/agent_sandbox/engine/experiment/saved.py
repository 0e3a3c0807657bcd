"""A comparison as text, for an experiment that is kept, and back."""

from __future__ import annotations

import base64
import json
import os

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, fields, is_dataclass
from agent_sandbox.engine.experiment.model import AttemptOutcome, Comparison, DiffSize, StepEnd
from agent_sandbox.engine.experiment.reports import TestCounts
from agent_sandbox.errors import PolicyError

if TYPE_CHECKING:
    from typing import Any

_FORMAT = 1
_PARTS: dict[str, Any] = {"run": StepEnd, "check": StepEnd, "tests": TestCounts, "diff": DiffSize}


@dataclass(frozen=True)
class SavedExperiment:
    """An experiment as it is kept, without the layers of its attempts."""

    project: str
    created: float
    frozen_ns: int
    comparison: Comparison

    def text(self) -> str:
        """Return it as text. `read_saved` reads it again."""
        comparison = self.comparison
        results = [_plain(each) for each in comparison.results]
        about = {"project_hex": os.fsencode(self.project).hex(), "created": self.created, "frozen_ns": self.frozen_ns}
        ended = {"winner": comparison.winner, "seconds": comparison.seconds, "ended": comparison.ended, "notes": comparison.notes}
        return json.dumps({"format": _FORMAT, **about, **ended, "results": results})


def read_saved(text: str) -> SavedExperiment:
    """Return the experiment that was kept as this text. Raises `PolicyError` for the text of another version."""
    try:
        data = json.loads(text)
        if data["format"] != _FORMAT:
            raise ValueError("it is of another version")
        results = tuple(_result(each) for each in data["results"])
        comparison = Comparison(results, data["winner"], data["seconds"], data["ended"], tuple(data["notes"]))
        return SavedExperiment(os.fsdecode(bytes.fromhex(data["project_hex"])), data["created"], data["frozen_ns"], comparison)
    except (KeyError, TypeError, ValueError) as error:
        raise PolicyError(f"the experiment cannot be read: {error}", hint="run it again") from error


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _result(data: dict[str, Any]) -> AttemptOutcome:
    parts = {name: _part(kind, data[name]) for name, kind in _PARTS.items()}
    return AttemptOutcome(**{**data, **parts, "notes": tuple(data["notes"])})


def _part(kind: Any, data: dict[str, Any] | None) -> Any:
    if data is None:
        return None
    if kind is StepEnd:
        data = {**data, **{name: base64.b64decode(data[name]) for name in ("output", "errors")}}
    return kind(**data)
