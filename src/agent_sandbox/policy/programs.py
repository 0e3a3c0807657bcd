"""Which programs may be started, by name. The view enforces it: what is not allowed is not there. Here it is written down and explained.

A pattern is a file name, with `*`, `?` and `[a-z]` as in paths: `python*`. Allowed patterns come in groups, one from each layer of policy,
and a name has to be in all of them: so layers can only narrow. What is denied is denied whatever is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.wildcards import Token, scan, spans
from agent_sandbox.values import dataclass

POSIX_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "ash", "rbash", "mksh")  # those whose command lines `policy.commands` understands
SHELLS = (*POSIX_SHELLS, "fish", "csh", "tcsh", "busybox", "toybox")
# With one of these a program can do whatever the sandbox permits: the list of programs says nothing about what it runs by itself.
INTERPRETERS = (
    "python*",
    "pypy*",
    "node",
    "nodejs",
    "deno",
    "bun",
    "ruby*",
    "perl*",
    "php*",
    "lua*",
    "Rscript",
    "java",
    "awk",
    "gawk",
    "mawk",
)
STARTERS = ("env", "xargs", "find", "make", "git", "ssh", "tar", "vim", "vi", "nano", "less", "man", "sed", "npm", "npx", "cargo", "go")


@dataclass(frozen=True)
class ProgramRules:
    """Names that may be started. Without groups all that the view shows may, less what is denied.

    Without `shell` no shell may be started. With it, the one that reads a command line is there, also where no group names it: what it
    starts is what counts.
    """

    groups: tuple[tuple[str, ...], ...] = ()
    denied: tuple[str, ...] = ()
    shell: bool = True

    def __post_init__(self) -> None:
        for pattern in (*(name for group in self.groups for name in group), *self.denied):
            check_name(pattern)

    @property
    def restricts(self) -> bool:
        """Whether there is anything for a view to keep out."""
        return bool(self.groups or self.denied) or not self.shell

    def permits(self, program: str) -> bool:
        """Whether a program of this name may be started."""
        name = program.rpartition("/")[2]
        if not self.shell and name in SHELLS:
            return False
        return not covers(self.denied, name) and all(covers(group, name) for group in self.groups)

    def narrowed(self, *, allowed: Iterable[str] | None = None, denied: Iterable[str] = (), shell: bool = True) -> ProgramRules:
        """What is permitted here and there."""
        groups = self.groups if allowed is None else (*self.groups, tuple(allowed))
        return ProgramRules(tuple(dict.fromkeys(groups)), tuple(dict.fromkeys((*self.denied, *denied))), self.shell and shell)

    def opens(self) -> tuple[str, ...]:
        """The allowed names with which a program can do more than their own work, in the order in which they were written."""
        named = dict.fromkeys(name for group in self.groups for name in group)
        return tuple(name for name in named if self.permits(name) and is_open(name))


def is_open(program: str) -> bool:
    """Whether a program runs what it is given, or starts other programs."""
    return program in SHELLS or program in STARTERS or covers(INTERPRETERS, program) or program in INTERPRETERS


def covers(patterns: Iterable[str], name: str) -> bool:
    """Whether one of the patterns is this name."""
    return any(spans(_scanned(pattern), name) for pattern in patterns)


@lru_cache(maxsize=1024)
def _scanned(pattern: str) -> tuple[Token, ...]:
    return tuple(scan(pattern))


def check_name(pattern: object) -> None:
    """Raise `PolicyError` for what is no pattern of a file name."""
    if not isinstance(pattern, str) or not pattern or "/" in pattern or "\0" in pattern:
        raise PolicyError(f"not the name of a command: {pattern!r}", hint='write the name alone: "git", "python*"')
    try:
        scan(pattern)
    except ValueError as error:
        reason, remedy = error.args
        raise PolicyError(f"the command {pattern!r} {reason}", hint=remedy) from None
