"""The audit names that configuration imports. The audit log itself is a view over `ledger` and is not part of this module yet."""

from __future__ import annotations

from enum import Enum


class AuditLevel(Enum):
    """How serious an entry is, mildest first."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"
