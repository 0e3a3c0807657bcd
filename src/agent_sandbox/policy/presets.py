"""Policies to begin with: the three tiers of trust, and what common agents need. Each is a document as a user would write it.

A preset only takes away from the ceiling it is laid on, like every layer: `high` takes nothing. Their lists of tools are names that the
view keeps; what those tools could do beyond reading is bounded by the files, the network and the processes that the same preset leaves.
"""

from __future__ import annotations

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.document import Document, from_mapping
from agent_sandbox.values import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

READING = (
    *("awk", "base64", "basename", "cat", "cmp", "comm", "column", "cut", "date", "diff", "dirname", "du", "echo", "expr", "file", "find"),
    *("fold", "grep", "head", "join", "jq", "ls", "md5sum", "nl", "od", "paste", "printf", "pwd", "readlink", "realpath", "rg", "sed"),
    *("seq", "sha256sum", "sort", "stat", "strings", "tail", "test", "tr", "tree", "true", "uniq", "wc", "which", "xxd"),
)
_TABLES: dict[str, dict[str, Any]] = {
    # The tiers: high is what the machine's own ceiling permits, medium a user's home, low nothing but scratch space and reading.
    "high": {"name": "high"},
    "medium": {
        "name": "medium",
        "files": {"allowed": ["~"]},
        "network": {"inbound": False},
        "limits": {"timeout_seconds": 3600, "memory_mb": 4096, "disk_mb": 4096},
        "processes": {
            "denied_commands": ["sudo", "su", "doas", "pkexec", "mount", "umount", "mkfs*", "dd", "shutdown", "reboot"],
            "max": 1024,
        },
    },
    "low": {
        "name": "low",
        "files": {"read": False, "write": False},
        "network": {"outbound": False, "inbound": False, "localhost": False},
        "processes": {"commands": list(READING), "shell": False, "max": 32},
        "limits": {"timeout_seconds": 30, "cpu_seconds": 30, "memory_mb": 256, "disk_mb": 64, "output_bytes": 100_000, "open_files": 256},
        "code": {"validate": True},
    },
    # Agents.
    "coding-agent": {
        "name": "coding-agent",
        "network": {"inbound": False},
        "files": {"denied": ["**/*.pem", "**/*.key", "**/id_rsa", "**/id_ed25519"]},
        "processes": {"denied_commands": ["sudo", "su", "doas", "ssh", "scp", "docker", "kubectl", "shutdown", "reboot"]},
        "limits": {"timeout_seconds": 1800, "memory_mb": 8192},
    },
    "reviewer": {
        "name": "reviewer",
        "files": {"write": False},
        "network": {"outbound": False, "inbound": False},
        "processes": {"commands": [*READING, "git"], "shell": False, "max": 64},
        "limits": {"timeout_seconds": 300, "memory_mb": 1024},
    },
    "data-analyst": {
        "name": "data-analyst",
        "network": {"outbound": False, "inbound": False},
        "processes": {"allow": False},
        "limits": {"timeout_seconds": 600, "memory_mb": 4096, "disk_mb": 2048},
        "code": {"validate": True},
    },
    "test-runner": {
        "name": "test-runner",
        "network": {"outbound": False, "inbound": False, "localhost": True},
        "processes": {"denied_commands": ["sudo", "su", "ssh", "scp", "curl", "wget"], "max": 512},
        "limits": {"timeout_seconds": 1800, "memory_mb": 4096, "disk_mb": 4096},
    },
}
TIERS = ("high", "medium", "low")
PRESETS = tuple(_TABLES)


def preset(name: str) -> Document:
    """A preset by its name. Raises `PolicyError` for one that there is none of."""
    if name not in _TABLES:
        raise PolicyError(f"there is no preset {name!r}", hint=f"use one of {', '.join(PRESETS)}")
    return from_mapping(_TABLES[name], origin=f"preset {name}")
