"""What was real when a layer first covered a path: the base that a merge stands on, and the measure of drift.

lines.py      how it is written
files.py      where: begin a run, recall, carry over, forget
keeping.py    the look at reality at the end of a run

The order of a run: `since = begin(…)`, the guest runs and ends, `keep(…, since_ns=since)`. A run that is killed in between has no bases,
and the next one knows.
"""

from __future__ import annotations

from agent_sandbox.workspace.bases.files import Recalled, begin, carry, forget, open_content, recall
from agent_sandbox.workspace.bases.keeping import TICK_NS, Budget, Kept, keep

__all__ = ["TICK_NS", "Budget", "Kept", "Recalled", "begin", "carry", "forget", "keep", "open_content", "recall"]
