"""Patterns of program names, and the names of programs that run other code.

A pattern is a file name, with `*`, `?` and `[a-z]` as in paths: `python*`. `model.ProgramRules` says which programs may be started.
"""

from __future__ import annotations

from agent_sandbox._fast.functions import lru_cache
from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.paths import Token, literal, scan, spans
from agent_sandbox.readers.shell import POSIX_SHELLS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LINE_SHELLS = ("bash", "sh")  # run command lines, and are looked up by programs that run command lines
SHELLS = (*POSIX_SHELLS, "fish", "csh", "tcsh", "busybox", "toybox")
# These programs run code, which can do whatever the sandbox permits: the list of programs does not limit that code.
INTERPRETERS = (
    *("python*", "pypy*", "node", "nodejs", "deno", "bun", "ruby*", "perl*"),
    *("php*", "lua*", "Rscript", "java", "awk", "gawk", "mawk"),
)
STARTERS = ("env", "xargs", "find", "make", "git", "ssh", "tar", "vim", "vi", "nano", "less", "man", "sed", "npm", "npx", "cargo", "go")


def reads_a_line(argv: Sequence[str]) -> bool:
    """Return whether a command is a shell, `-c` and one command line, and nothing else."""
    return len(argv) == 3 and argv[0].rpartition("/")[2] in POSIX_SHELLS and argv[1] == "-c"


def is_open(program: str) -> bool:
    """Return whether a program runs the code it is given, or starts other programs."""
    return program in STARTERS or interprets(program) or program in INTERPRETERS


def interprets(program: str) -> bool:
    """Return whether a program runs the code it is given, and so can do whatever that code can."""
    return program in SHELLS or covers(INTERPRETERS, program)


def is_pattern(name: str) -> bool:
    """Return whether a name contains a wildcard, so that it may match several programs."""
    return literal(_scanned(name)) is None


def covers(patterns: Iterable[str], name: str) -> bool:
    """Return whether one of the patterns matches this name."""
    return any(pattern == name or spans(_scanned(pattern), name) for pattern in patterns)


@lru_cache(maxsize=1024)
def _scanned(pattern: str) -> tuple[Token, ...]:
    return tuple(scan(pattern))


def check_name(pattern: object) -> None:
    """Raise `PolicyError` unless this is a valid pattern of program names."""
    if not isinstance(pattern, str) or not pattern or "/" in pattern or "\0" in pattern:
        raise PolicyError(f"not the name of a command: {pattern!r}", hint='write the name alone: "git", "python*"')
    try:
        _scanned(pattern)
    except ValueError as error:
        reason, remedy = error.args
        raise PolicyError(f"the command {pattern!r} {reason}", hint=remedy) from None
