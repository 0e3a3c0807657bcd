"""What is looked for in code, and what was found, as values."""

from __future__ import annotations

from enum import Enum

from agent_sandbox.errors import PolicyError
from agent_sandbox.values import dataclass


class Grant(Enum):
    """A permission that makes a pattern no issue: what a sandbox gives anyway need not be warned of."""

    FILES = "files"
    NETWORK = "network"
    PROCESSES = "processes"
    SHELL = "shell"


@dataclass(frozen=True)
class Rule:
    """A pattern, what it catches, and why that is an issue.

    `names` are spelt as patterns are: `eval(` is the language's own function of that name, `os.system` a name in a module and
    `types.FunctionType(` one that counts only where it is called, `subprocess` a module with all that is in it; a leading
    `!` is an exception. Of Bash, a name is a tool, or one of the default patterns. Without names the pattern is its own. `granted_by` are
    the permissions of which all are needed to lift it; without any, it is lifted only by leaving the rule out.
    """

    pattern: str
    reason: str
    names: tuple[str, ...] = ()
    granted_by: frozenset[Grant] = frozenset()

    def __post_init__(self) -> None:
        for name in (self.pattern, *self.names):
            if not name.strip() or len(name) > 200:
                raise PolicyError(f"not a pattern of code: {name[:80]!r}", hint='write "eval(", "os.system" or "subprocess"')

    @property
    def spelt(self) -> tuple[str, ...]:
        """The names it catches."""
        return self.names or (self.pattern,)


@dataclass(frozen=True)
class Issue:
    """A pattern that was found, where first, and the permissions that together would make it none."""

    pattern: str
    reason: str
    line: int
    granted_by: frozenset[Grant] = frozenset()


@dataclass(frozen=True)
class Validation:
    """What was found, in the order of the text, each pattern once. Without issues the code may still do anything: see the package."""

    issues: tuple[Issue, ...] = ()

    @property
    def valid(self) -> bool:
        """Whether nothing was found."""
        return not self.issues


class Matcher:
    """Rules by the names they catch. Those `apart` are met by other signs than their names."""

    def __init__(self, rules: tuple[Rule, ...], apart: tuple[Rule, ...] = ()) -> None:
        self.rules = rules
        self.patterns = frozenset(rule.pattern for rule in rules)
        self._of: dict[str, Rule | None] = {}
        for rule in rules:
            if rule in apart:
                continue
            for name in rule.spelt:
                self._of[name.removeprefix("!")] = None if name.startswith("!") else rule
        self.words = frozenset(part for name in self._of for part in name.removesuffix("(").split("."))

    def function(self, name: str) -> Rule | None:
        """The rule for a function of the language itself."""
        return self._of.get(f"{name}(")

    def name(self, dotted: str) -> Rule | None:
        """The rule for a dotted name: its own, or else that of what it is in."""
        while dotted:
            if dotted in self._of:
                return self._of[dotted]
            dotted = dotted.rpartition(".")[0]
        return None

    def within(self, module: str) -> bool:
        """Whether some rule is about something in this module."""
        return any(name.startswith(f"{module}.") for name in self._of)


class Findings:
    """Issues as they come up; the first sight of each pattern is kept."""

    def __init__(self) -> None:
        self._found: dict[str, Issue] = {}

    def add(self, rule: Rule, line: int) -> None:
        """Note a rule that was met."""
        before = self._found.get(rule.pattern)
        if before is None or line < before.line:
            self._found[rule.pattern] = Issue(rule.pattern, rule.reason, line, rule.granted_by)

    def result(self) -> Validation:
        """All of them."""
        return Validation(tuple(sorted(self._found.values(), key=lambda issue: (issue.line, issue.pattern))))
