"""What has moved on in reality since a sandbox was cloned from it.

values.py     drift as values, and in words
looking.py    through the whole project, for `status`
judging.py    exactly, for the paths that a promotion is about to touch
"""

from __future__ import annotations

from agent_sandbox.workspace.drift.judging import judge, with_judged
from agent_sandbox.workspace.drift.looking import LookBudget, look_for_drift
from agent_sandbox.workspace.drift.values import Drift, Drifted, DriftKind, Moved, Unmoved, Verdict

__all__ = ["Drift", "DriftKind", "Drifted", "LookBudget", "Moved", "Unmoved", "Verdict", "judge", "look_for_drift", "with_judged"]
