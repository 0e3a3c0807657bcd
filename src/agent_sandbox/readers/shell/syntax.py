"""The syntax of a command line as values, before a shell expands or runs anything."""

from __future__ import annotations

from agent_sandbox._fast.values import dataclass


class Unreadable(Exception):
    """The text is no command line, or too large. The message says why, in words for people."""


@dataclass(frozen=True)
class Text:
    """Literal characters. If they are unquoted, `*`, `?`, `[` and `{…}` among them are special."""

    text: str
    quoted: bool = False


@dataclass(frozen=True)
class Variable:
    """A variable, `$name` or `${name…}`. `rest` is the text after the name inside the braces, as written."""

    name: str
    quoted: bool = False
    rest: str = ""
    nested: tuple[Part, ...] = ()  # the parts inside the braces, which are expanded as well


@dataclass(frozen=True)
class Substitution:
    """`$(…)` or backticks, which stand for the output of a program; with `pipe`, `<(…)` or `>(…)`, which name a pipe to the program."""

    program: Program
    quoted: bool = False
    pipe: bool = False


@dataclass(frozen=True)
class Arithmetic:
    """`$((…))`, a number that is not evaluated here. `nested` are the variables and substitutions in it."""

    nested: tuple[Part, ...]


Part = Text | Variable | Substitution | Arithmetic
Word = tuple[Part, ...]


@dataclass(frozen=True)
class Redirection:
    """A redirection, such as `> file`. For `<<` and `<<-`, `word` is the body of the here-document.

    `number` is the descriptor before the operator, as written; empty if there is none.
    """

    operator: str
    word: Word
    number: str = ""


@dataclass(frozen=True)
class Simple:
    """A simple command: assignments, words and redirections. It starts one program, or none if it has no words."""

    assignments: tuple[tuple[str, Word], ...] = ()
    words: tuple[Word, ...] = ()
    redirections: tuple[Redirection, ...] = ()


@dataclass(frozen=True)
class Compound:
    """A compound command: `(…)`, `{ …; }`, `if`, `while`, `until`, `case`, `[[ … ]]` or `((…))`. `words` are expanded, but not run."""

    kind: str
    bodies: tuple[Program, ...]
    words: tuple[Word, ...] = ()
    redirections: tuple[Redirection, ...] = ()


@dataclass(frozen=True)
class ForLoop:
    """A loop, `for name in words; do … done` or `select`. Without `in`, `words` is None and the loop goes over the arguments."""

    name: str
    words: tuple[Word, ...] | None
    body: Program
    redirections: tuple[Redirection, ...] = ()
    kind: str = "for"


@dataclass(frozen=True)
class FunctionDefinition:
    """A function, `name() …`. Its body runs only when the function is called."""

    name: str
    body: Program


Command = Simple | Compound | ForLoop | FunctionDefinition


@dataclass(frozen=True)
class Pipeline:
    """Commands joined by `|`. `background` is whether `&` follows; `joined` is the `&&` or `||` before them."""

    commands: tuple[Command, ...]
    background: bool = False
    joined: str = ""


Program = tuple[Pipeline, ...]
