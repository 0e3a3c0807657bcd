"""The state of a shell while it reads a command line: its variables and functions, as far as the text tells.

Much of a command line may or may not be done: what follows `&&`, the body of an `if`. After it, a variable that it sets has an unknown
value, and a function that it defines may be this or that.
"""

from __future__ import annotations

from agent_sandbox._fast.values import dataclass, field
from agent_sandbox.readers.shell.syntax import Program

# Variables that a shell sets by itself, so that an assigned value may not be the one that is read.
_SET_BY_SHELL = frozenset(
    [
        *("REPLY", "MAPFILE", "OPTARG", "OPTIND", "BASH_REMATCH", "RANDOM", "SRANDOM", "SECONDS", "LINENO", "PWD", "OLDPWD"),
        *("PIPESTATUS", "FUNCNAME", "DIRSTACK", "COPROC", "GROUPS", "_"),
    ]
)
_LONGEST_VALUE = 4096  # of a variable: `x=$x$x` doubles it each time
Bodies = tuple[Program | None, ...]  # what a name may be; None is no function


@dataclass
class LineState:
    """The values of variables, None if unknown, and the functions that each name may be."""

    variables: dict[str, str | None] = field(default_factory=dict)
    functions: dict[str, Bodies] = field(default_factory=dict)
    odd: set[str] = field(default_factory=set)  # variables whose values are changed when they are assigned, as by `declare -l`

    def copy(self) -> LineState:
        """Return a copy, to compare with later or to go back to."""
        return LineState(dict(self.variables), dict(self.functions), self.odd)

    def put_back(self, earlier: LineState) -> None:
        """Take the values of an earlier copy: what has changed them was another process."""
        self.variables, self.functions = dict(earlier.variables), dict(earlier.functions)

    def doubt(self, earlier: LineState) -> None:
        """Let what has changed since an earlier copy be unknown: it may have been done or not."""
        for name, value in self.variables.items():
            if earlier.variables.get(name, "\0") != value:
                self.variables[name] = None
        for name in {*self.functions, *earlier.functions}:
            self.functions[name] = either(earlier.functions.get(name, (None,)), self.functions.get(name, (None,)))

    def is_like(self, earlier: LineState) -> bool:
        """Whether nothing has changed since an earlier copy."""
        return self.variables == earlier.variables and self.functions == earlier.functions

    def assign(self, name: str, value: str | None, *, add: bool = False) -> None:
        """Set a variable, or add to its value."""
        earlier = self.variables.get(name) if add else ""
        known = None if value is None or earlier is None else earlier + value
        self.variables[name] = None if known is None or len(known) > _LONGEST_VALUE or name in self.odd | _SET_BY_SHELL else known

    def forget(self, *names: str) -> None:
        """Let these variables have unknown values."""
        self.variables.update(dict.fromkeys(names))


def either(one: Bodies, other: Bodies) -> Bodies:
    """Return what a name may be that is one or the other."""
    return tuple({id(body): body for body in (*one, *other)}.values())
