"""The syntax of a command line as values, before a shell expands or runs anything."""

from __future__ import annotations

from agent_sandbox._fast.values import dataclass


class Unreadable(Exception):
    """The text is no command line, or too large. The message says why, in words for people."""


@dataclass(frozen=True)
class Text:
    """Literal characters. If unquoted, `*`, `?`, `[` and `{…}` among them are patterns."""

    text: str
    quoted: bool = False


@dataclass(frozen=True)
class Variable:
    """`$name` or `${name…}`. `rest` is the text after the name inside the braces, as written."""

    name: str
    quoted: bool = False
    rest: str = ""
    nested: tuple[Part, ...] = ()  # the parts inside the braces, which are expanded as well


@dataclass(frozen=True)
class Substitution:
    """`$(…)` or backticks: the output of a program. For `<(…)` and `>(…)`, the name of a pipe to it."""

    program: Program
    quoted: bool = False
    pipe: bool = False


@dataclass(frozen=True)
class Arithmetic:
    """`$((…))`: a number that is not evaluated. `nested` are the substitutions in it."""

    nested: tuple[Part, ...]


Part = Text | Variable | Substitution | Arithmetic
Word = tuple[Part, ...]


@dataclass(frozen=True)
class Redirection:
    """`operator word`. For `<<` and `<<-` the word is the body of the here-document."""

    operator: str
    word: Word


@dataclass(frozen=True)
class Simple:
    """Assignments, words and redirections: one program started, or none."""

    assignments: tuple[tuple[str, Word], ...] = ()
    words: tuple[Word, ...] = ()
    redirections: tuple[Redirection, ...] = ()


@dataclass(frozen=True)
class Compound:
    """`(…)`, `{ …; }`, `if`, `while`, `until`, `case`, `[[ … ]]`, `((…))`. `words` are expanded, but not run."""

    kind: str
    bodies: tuple[Program, ...]
    words: tuple[Word, ...] = ()
    redirections: tuple[Redirection, ...] = ()


@dataclass(frozen=True)
class ForLoop:
    """`for name in words; do … done`, and `select`. Without `in`, the words are the arguments."""

    name: str
    words: tuple[Word, ...] | None
    body: Program
    redirections: tuple[Redirection, ...] = ()


@dataclass(frozen=True)
class FunctionDefinition:
    """`name() …`: defined here, run where it is called."""

    name: str
    body: Program


Command = Simple | Compound | ForLoop | FunctionDefinition


@dataclass(frozen=True)
class Pipeline:
    """Commands joined by `|`; `background` when followed by `&`."""

    commands: tuple[Command, ...]
    background: bool = False


Program = tuple[Pipeline, ...]
