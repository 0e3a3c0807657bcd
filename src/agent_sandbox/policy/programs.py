"""Which programs may be started, by name. The view enforces it: what is not allowed is not there. Here it is written down and explained.

A pattern is a file name, with `*`, `?` and `[a-z]` as in paths: `python*`. Allowed patterns come in groups, one from each layer of policy,
and a name has to be in all of them: so layers can only narrow. What is denied is denied whatever is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from agent_sandbox._fast.values import dataclass
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.paths import Token, literal, scan, spans
from agent_sandbox.readers.shell import POSIX_SHELLS

LINE_SHELLS = ("bash", "sh")  # what runs a line, and what programs that run lines look for
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
    starts is what counts. With `lines`, bash and sh are there in any case.
    """

    groups: tuple[tuple[str, ...], ...] = ()
    denied: tuple[str, ...] = ()
    shell: bool = True
    lines: bool = False

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
        if covers(self.denied, name):
            return False
        return (self.lines and name in LINE_SHELLS) or all(covers(group, name) for group in self.groups)

    def denies(self, *names: str) -> str:
        """Which of the names of one file is denied, or is a shell's where there is to be none; empty if none is."""
        return next((name for name in names if covers(self.denied, name) or (name in SHELLS and not self.shell)), "")

    def narrowed(self, *, allowed: Iterable[str] | None = None, denied: Iterable[str] = (), shell: bool = True) -> ProgramRules:
        """What is permitted here and there."""
        groups = self.groups if allowed is None else (*self.groups, tuple(allowed))
        return ProgramRules(tuple(dict.fromkeys(groups)), tuple(dict.fromkeys((*self.denied, *denied))), self.shell and shell, self.lines)

    def opens(self) -> tuple[str, ...]:
        """The allowed names with which a program can do more than their own work, in the order in which they were written."""
        named = dict.fromkeys(name for group in self.groups for name in group)
        return tuple(name for name in named if self.permits(name) and is_open(name))


def reads_a_line(argv: Sequence[str]) -> bool:
    """Whether a command is a shell that is given a line and nothing else."""
    return len(argv) == 3 and argv[0].rpartition("/")[2] in POSIX_SHELLS and argv[1] == "-c"


def is_open(program: str) -> bool:
    """Whether a program runs what it is given, or starts other programs."""
    return program in STARTERS or interprets(program) or program in INTERPRETERS


def interprets(program: str) -> bool:
    """Whether a program runs what it is given: what it can do is then whatever that can."""
    return program in SHELLS or covers(INTERPRETERS, program)


def is_pattern(name: str) -> bool:
    """Whether a name stands for several."""
    return literal(_scanned(name)) is None


def covers(patterns: Iterable[str], name: str) -> bool:
    """Whether one of the patterns is this name."""
    return any(pattern == name or spans(_scanned(pattern), name) for pattern in patterns)


@lru_cache(maxsize=1024)
def _scanned(pattern: str) -> tuple[Token, ...]:
    return tuple(scan(pattern))


def check_name(pattern: object) -> None:
    """Raise `PolicyError` for what is no pattern of a file name."""
    if not isinstance(pattern, str) or not pattern or "/" in pattern or "\0" in pattern:
        raise PolicyError(f"not the name of a command: {pattern!r}", hint='write the name alone: "git", "python*"')
    try:
        _scanned(pattern)
    except ValueError as error:
        reason, remedy = error.args
        raise PolicyError(f"the command {pattern!r} {reason}", hint=remedy) from None
