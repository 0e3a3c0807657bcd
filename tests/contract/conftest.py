"""The boxes that the contract is tried in: one for each runtime."""

from __future__ import annotations

from tests.security.fixtures import box, home, runtime

__all__ = ["box", "home", "runtime"]
