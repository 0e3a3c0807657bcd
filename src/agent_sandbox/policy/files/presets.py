"""Preset policies: the three tiers of trust, and the needs of common agents. Each is a document as a user would write it.

Like every layer, a preset can only restrict the policy above it; `high` restricts nothing. A person who names `high` or `medium` asks for
the network as well: every public host, and the hosts that are listed. A list of tools names the programs that the view
shows. What these programs can do is limited by the files, network and processes that the preset permits.
"""

from __future__ import annotations

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.files.document import Document, from_mapping

if TYPE_CHECKING:
    from typing import Any

# Programs for reading. Some can write or start others (`sed`, `find`); the limits above apply to them.
READING = (
    *("base64", "basename", "cat", "cksum", "cmp", "column", "comm", "cut", "date", "diff", "dirname", "du", "echo", "expr", "false"),
    *("file", "find", "fold", "grep", "head", "hexdump", "id", "join", "jq", "ls", "md5sum", "nl", "od", "paste", "printf", "pwd"),
    *("readlink", "realpath", "rev", "rg", "sed", "seq", "sha1sum", "sha256sum", "sort", "stat", "strings", "tac", "tail", "test"),
    *("tr", "tree", "true", "uname", "uniq", "wc", "xxd"),
)
# Programs for work that changes files: building, testing and managing a program.
WORKING = (
    *("[[]", "ar", "as", "awk", "bash", "bunzip2", "bzip2", "c++", "cargo", "cc", "chmod", "clang*", "cmake", "cp", "cpp", "ctest", "env"),
    *("flake8", "g++*", "gawk", "gcc*", "git", "go", "gofmt", "gunzip", "gzip", "install", "java", "javac", "ld*", "ln", "make", "mawk"),
    *("mkdir", "mktemp", "mv", "mypy", "ninja", "nice", "nm", "node", "nodejs", "npm", "npx", "objdump", "patch", "pip", "pip3"),
    *("pkg-config", "pnpm", "poetry", "pytest", "python*", "ranlib", "rm", "rmdir", "ruby*", "ruff", "rustc", "sh", "sleep", "strip"),
    *("tar", "tee", "timeout", "touch", "unxz", "unzip", "uv", "which*", "xargs", "xz", "yarn", "yes", "zip"),
)
_TABLES: dict[str, dict[str, Any]] = {
    # The tiers. High is everything that the machine's own ceiling permits. Medium is for a user: the home directory, listed hosts, and
    # listed programs. Low is for untrusted code: scratch space, no network, and programs for reading.
    "high": {"name": "high", "network": {"outbound": True}},
    "medium": {
        "name": "medium",
        "files": {"allowed": ["~"]},
        "network": {"outbound": True, "listed": True, "inbound": False},
        "processes": {"commands": [*READING, *WORKING], "max": 1024},
        "limits": {"timeout_seconds": 3600, "memory_mb": 4096, "disk_mb": 4096},
    },
    "low": {
        "name": "low",
        "files": {"read": False, "write": False},
        "network": {"outbound": False, "inbound": False},
        "processes": {"commands": list(READING), "max": 32},
        "limits": {"timeout_seconds": 30, "cpu_seconds": 30, "memory_mb": 256, "disk_mb": 64, "output_bytes": 100_000, "open_files": 256},
        "code": {"validate": True},
    },
    # Agents. An agent that writes programs also executes them, so it gets no list of programs.
    "coding-agent": {
        "name": "coding-agent",
        "network": {"inbound": False},
        "processes": {
            "denied_commands": ["sudo", "su", "doas", "pkexec", "ssh", "scp", "docker", "podman", "kubectl", "shutdown", "reboot"]
        },
        "limits": {"timeout_seconds": 1800, "memory_mb": 8192},
    },
    "reviewer": {
        "name": "reviewer",
        "files": {"write": False},
        "network": {"outbound": False, "inbound": False},
        "processes": {"commands": [*READING, "git"], "max": 64},
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
        "processes": {"denied_commands": ["sudo", "su", "doas", "pkexec", "ssh", "scp", "curl", "wget"], "max": 512},
        "limits": {"timeout_seconds": 1800, "memory_mb": 4096, "disk_mb": 4096},
    },
}
TIERS = ("high", "medium", "low")
PRESETS = tuple(_TABLES)


def preset(name: str) -> Document:
    """Return a preset by name. Raises `PolicyError` for an unknown one."""
    if name not in _TABLES:
        raise PolicyError(f"there is no preset {name!r}", hint=f"use one of {', '.join(PRESETS)}")
    return from_mapping(_TABLES[name], origin=f"preset {name}")
