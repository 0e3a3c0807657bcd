"""Which programs may be started, by name. The rules are stated here; the view enforces them by leaving out other programs.

A pattern is a file name, with `*`, `?` and `[a-z]` as in paths: `python*`. Allowed patterns come in groups, one for each policy layer, and
a name must match all groups: so layers can only narrow. A denied name is denied even if it is also allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from agent_sandbox._fast.values import dataclass
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.paths import Token, literal, scan, spans
from agent_sandbox.readers.shell import POSIX_SHELLS

LINE_SHELLS = ("bash", "sh")  # run command lines, and are looked up by programs that run command lines
SHELLS = (*POSIX_SHELLS, "fish", "csh", "tcsh", "busybox", "toybox")
# With one of these, a program can do whatever the sandbox permits: the list of programs does not limit the code that they run.
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
    """Names that may be started. Without groups: every program that the view shows, except denied ones.

    Without `shell` no shell may be started. With it, the shell that reads a command line is present even if no group names it: the programs
    that it starts are judged. With `lines`, bash and sh are always present.
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
        """Whether the view has any program to leave out."""
        return bool(self.groups or self.denied) or not self.shell

    def permits(self, program: str) -> bool:
        """Return whether a program of this name may be started."""
        name = program.rpartition("/")[2]
        if not self.shell and name in SHELLS:
            return False
        if covers(self.denied, name):
            return False
        return (self.lines and name in LINE_SHELLS) or all(covers(group, name) for group in self.groups)

    def denies(self, *names: str) -> str:
        """Return the first of one file's names that is denied, or is a shell where none is allowed; empty if none."""
        return next((name for name in names if covers(self.denied, name) or (name in SHELLS and not self.shell)), "")

    def narrowed(self, *, allowed: Iterable[str] | None = None, denied: Iterable[str] = (), shell: bool = True) -> ProgramRules:
        """Return rules that permit only what both permit."""
        groups = self.groups if allowed is None else (*self.groups, tuple(allowed))
        return ProgramRules(tuple(dict.fromkeys(groups)), tuple(dict.fromkeys((*self.denied, *denied))), self.shell and shell, self.lines)

    def opens(self) -> tuple[str, ...]:
        """Return the allowed programs that can run other code or programs, in the order written."""
        named = dict.fromkeys(name for group in self.groups for name in group)
        return tuple(name for name in named if self.permits(name) and is_open(name))


def reads_a_line(argv: Sequence[str]) -> bool:
    """Return whether a command is a shell with one command line and nothing else."""
    return len(argv) == 3 and argv[0].rpartition("/")[2] in POSIX_SHELLS and argv[1] == "-c"


def is_open(program: str) -> bool:
    """Return whether a program runs the code it is given, or starts other programs."""
    return program in STARTERS or interprets(program) or program in INTERPRETERS


def interprets(program: str) -> bool:
    """Return whether a program runs the code it is given, and so can do whatever that code can."""
    return program in SHELLS or covers(INTERPRETERS, program)


def is_pattern(name: str) -> bool:
    """Return whether a name matches several programs."""
    return literal(_scanned(name)) is None


def covers(patterns: Iterable[str], name: str) -> bool:
    """Return whether one of the patterns matches this name."""
    return any(pattern == name or spans(_scanned(pattern), name) for pattern in patterns)


@lru_cache(maxsize=1024)
def _scanned(pattern: str) -> tuple[Token, ...]:
    return tuple(scan(pattern))


def check_name(pattern: object) -> None:
    """Raise `PolicyError` unless this is a pattern of a file name."""
    if not isinstance(pattern, str) or not pattern or "/" in pattern or "\0" in pattern:
        raise PolicyError(f"not the name of a command: {pattern!r}", hint='write the name alone: "git", "python*"')
    try:
        _scanned(pattern)
    except ValueError as error:
        reason, remedy = error.args
        raise PolicyError(f"the command {pattern!r} {reason}", hint=remedy) from None
