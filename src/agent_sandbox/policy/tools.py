"""Which programs may be started inside, by name: the value that the gate explains with and the view enforces.

A name is that of a file in one of the directories of PATH. It may hold wildcards, as in `python*`. What is denied is not there, whatever is
allowed. A tool is its file: its other names, links to the same file, come with it.
"""

from __future__ import annotations

from functools import lru_cache

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.wildcards import Token, literal, scan, spans
from agent_sandbox.values import dataclass

SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "mksh", "fish", "ash", "rbash", "csh", "tcsh"})
LINE_SHELLS = ("bash", "sh")  # what runs a line, and what programs that run lines look for

# Programs that run what they are given. By the start of the file's name; digits and dots of a version may follow.
INTERPRETERS = (
    *("python", "pypy", "node", "deno", "bun", "ruby", "irb", "perl", "php", "lua", "luajit", "tclsh", "Rscript", "java", "jshell"),
    *("awk", "gawk", "mawk", "julia", "elixir", "erl", "ghci", "ocaml", "guile", "sbcl", "emacs", "vim", "vi", "ex", "gdb"),
)


@dataclass(frozen=True)
class ToolRules:
    """The programs that may be started. `allowed=None` is all of them but the denied ones.

    With `shell`, sh and bash are there besides what is allowed, so that a line can be run; without it no pattern brings a shell along, only
    its own name does.
    """

    allowed: tuple[str, ...] | None = None
    denied: tuple[str, ...] = ()
    shell: bool = True

    def __post_init__(self) -> None:
        for name in (*(self.allowed or ()), *self.denied):
            _checked(name)

    @property
    def gated(self) -> bool:
        """Whether these rules leave out anything at all."""
        return self.allowed is not None or bool(self.denied) or not self.shell

    def denies(self, *names: str) -> str:
        """Which name of a program is denied, or is a shell's where there is to be none; empty if none is.

        All of them are names of one file: if it is a shell, it is enough that one of its names is allowed.
        """
        for name in names:
            if any(matches(pattern, name) for pattern in self.denied):
                return name
        shells = [name for name in names if name in SHELLS]
        return shells[0] if shells and not self.shell and not set(shells).intersection(self.allowed or ()) else ""

    def permits(self, name: str) -> bool:
        """Whether a program of this name may be started."""
        if self.denies(name):
            return False
        return self.allowed is None or (self.shell and name in LINE_SHELLS) or any(matches(pattern, name) for pattern in self.allowed)


EVERY_TOOL = ToolRules()


def interprets(name: str) -> bool:
    """Whether a program of this name runs code that it is given: what it can do is then whatever that code can."""
    return name in SHELLS or any(name == known or _is_version(name.removeprefix(known)) for known in INTERPRETERS if name.startswith(known))


def is_pattern(name: str) -> bool:
    """Whether a name stands for several."""
    return literal(_tokens(name)) is None


def matches(pattern: str, name: str) -> bool:
    """Whether the pattern, which may be a plain name, stands for this name."""
    return pattern == name or (is_pattern(pattern) and spans(_tokens(pattern), name))


@lru_cache(maxsize=256)  # the same few patterns are held against every name in PATH
def _tokens(pattern: str) -> tuple[Token, ...]:
    return tuple(scan(pattern))


def _is_version(rest: str) -> bool:
    return rest != "" and all(character in "0123456789.-" for character in rest)


def _checked(name: str) -> None:
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise PolicyError(f"{name!r} is no name of a tool", hint="write the name alone, as in git, and have its directory in PATH")
    try:
        _tokens(name)
    except ValueError as error:
        why, remedy = error.args
        raise PolicyError(f"the name of a tool {name!r} {why}", hint=remedy) from None
