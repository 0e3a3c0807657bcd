"""Expand the words of a command line, as far as its text tells: quotes, braces, variables that it sets, `$(echo …)`.

A field is one argument as the program would get it. Its `text` is None if the command line does not reveal all of it. `printed` computes
the output of simple pipelines, such as `echo … | base64 -d`. `is_command` and `loads` recognise environment variables that run or load
code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from agent_sandbox._fast.values import dataclass
from agent_sandbox.readers.shell.syntax import Command, Part, Program, Redirection, Simple, Substitution, Text, Variable, Word

MOST_FIELDS = 64  # that one word may become; `{1..100000}` is not expanded
_LONGEST_BRACES, _MOST_BRACES = 1024, 32
_UNKNOWN = "\0"  # unknown text; no argument can contain a NUL
_SPLIT = "\1"  # where an unquoted value is split into words
_EMPTY = "\2"  # empty quotes, which still make an argument
_MARKS = dict.fromkeys(map(ord, (_UNKNOWN, _SPLIT, _EMPTY)))  # removed from literal text, which must not contain them
_QUOTED_AT = 0xF0000  # quoted characters are shifted to this plane while braces are expanded
_LONGEST = 1 << 16  # characters of computed output
_BLANKS = str.maketrans("\t\n", "  ")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "e": "\x1b"}

# Variables whose value is a command line.
_COMMANDS = frozenset(
    [
        "GIT_SSH_COMMAND",
        "GIT_SSH",
        "GIT_EXTERNAL_DIFF",
        "GIT_PAGER",
        "GIT_EDITOR",
        "GIT_SEQUENCE_EDITOR",
        "GIT_ASKPASS",
        "GIT_PROXY_COMMAND",
        "SSH_ASKPASS",
        "PAGER",
        "MANPAGER",
        "EDITOR",
        "VISUAL",
        "FCEDIT",
        "BROWSER",
        "PROMPT_COMMAND",
        "LESSOPEN",
        "LESSCLOSE",
        "RSYNC_RSH",
    ]
)
# Variables whose value names something that is loaded or read as code.
_LOADED = frozenset(
    [
        "BASH_ENV",
        "ENV",
        "LD_PRELOAD",
        "LD_AUDIT",
        "LD_LIBRARY_PATH",
        "GCONV_PATH",
        "PYTHONSTARTUP",
        "PYTHONHOME",
        "PERL5OPT",
        "PERL5DB",
        "RUBYOPT",
        "JAVA_TOOL_OPTIONS",
        "GIT_EXEC_PATH",
        "GIT_CONFIG_GLOBAL",
        "GIT_CONFIG_SYSTEM",
        "GIT_CONFIG_COUNT",
        "GIT_TEMPLATE_DIR",
    ]
)
_PROMPTS = frozenset(["PS0", "PS1", "PS2", "PS4"])
_LOADING_OPTIONS = ("-r", "--require", "--import", "--loader", "--experimental-loader")
_WORLD_WRITABLE = ("/tmp", "/var/tmp", "/dev/shm")


@dataclass(frozen=True)
class Field:
    """One argument. `shown` is its text with `…` for unknown parts; `pattern` is whether a shell would match it against file names."""

    shown: str
    known: bool = True
    pattern: bool = False

    @property
    def text(self) -> str | None:
        """The argument, or None if not all of it is known."""
        return self.shown if self.known else None


Outputs = Callable[[Program], str | None]
Variables = Mapping[str, str | None]


def expand(word: Word, variables: Variables, output: Outputs) -> list[Field]:
    """Return the arguments that a word expands to. `output` returns the output of a substituted program, or None if it is unknown."""
    marked = "".join(_marked(part, variables, output) for part in word)
    fields: list[Field] = []
    for text in _braces(marked):
        for piece in text.split(_SPLIT):
            if piece:
                fields.append(_field(piece.replace(_EMPTY, "")))
    return fields[:MOST_FIELDS]


def joined(word: Word, variables: Variables, output: Outputs) -> str | None:
    """Return the expanded text of a word that a shell does not split, such as an assigned value. None if part of it is unknown."""
    text = "".join(_marked(part, variables, output) for part in word).replace(_SPLIT, " ").replace(_EMPTY, "")
    return None if _UNKNOWN in text else "".join(map(_plain, text))


def _field(marked: str) -> Field:
    shown = "".join(_plain(character) if character != _UNKNOWN else "…" for character in marked)
    return Field(shown, _UNKNOWN not in marked, _is_pattern(marked))


def _is_pattern(marked: str) -> bool:
    bracket = marked.find("[")
    return "*" in marked or "?" in marked or (bracket >= 0 and marked.find("]", bracket) > bracket + 1)


def _quoted(text: str) -> str:
    return "".join(chr(ord(character) + _QUOTED_AT) if ord(character) < 0x10000 else character for character in text)


def _plain(character: str) -> str:
    code = ord(character)
    return chr(code - _QUOTED_AT) if code >= _QUOTED_AT and code < _QUOTED_AT + 0x10000 else character


def _marked(part: Part, variables: Variables, output: Outputs) -> str:
    match part:
        case Text(text=text, quoted=quoted):
            return (_quoted(text) or _EMPTY) if quoted else text.translate(_MARKS)
        case Variable():
            return _variable(part, variables)
        case Substitution(program=program, quoted=quoted, pipe=pipe):
            printed = None if pipe or ("IFS" in variables and not quoted) else output(program)
            return _UNKNOWN if printed is None else _value(printed.rstrip("\n"), quoted)
        case _:  # arithmetic, which is not evaluated
            return _UNKNOWN


def _variable(part: Variable, variables: Variables) -> str:
    if part.name == "IFS" and "IFS" not in variables:
        return _quoted(" ") if part.quoted else _SPLIT
    value = variables.get(part.name)
    if value is None:
        return _UNKNOWN
    if part.rest:
        value = _cut(value, part.rest) if part.name not in ("@", "*") else None
    if "IFS" in variables and value and (not part.quoted or part.name == "*"):
        return _UNKNOWN  # splitting and joining by a changed IFS is not evaluated
    return _UNKNOWN if value is None else _value(value, part.quoted and part.name != "@")


def _cut(value: str, rest: str) -> str | None:
    """Apply the operator in `${name:2:3}` or `${name:-…}` to the value of the variable; None if the result is unknown.

    `rest` is the text after the name.
    """
    if rest.startswith((":-", ":=", ":+", ":?", "-", "=", "?")):
        return None if rest.startswith(":+") else value or None
    parts = rest.removeprefix(":").split(":")
    if not rest.startswith(":") or len(parts) > 2 or not all(each.strip().isdecimal() for each in parts):
        return None
    start = int(parts[0])
    return value[start : start + int(parts[1])] if len(parts) == 2 else value[start:]


def _value(text: str, quoted: bool) -> str:
    if quoted:
        return _quoted(text)
    words = text.translate(_BLANKS).split(" ")  # blanks at the ends part the value from what stands beside it
    return _SPLIT.join("".join(_quoted(piece) if piece not in "*?[" else piece for piece in word) for word in words)


def _braces(marked: str) -> list[str]:
    """Expand unquoted braces: `a{b,c}` to `ab` and `ac`, `{1..3}` likewise. If there are too many, returns one unknown text."""
    if "{" not in marked:
        return [marked]
    if len(marked) > _LONGEST_BRACES or marked.count("{") > _MOST_BRACES:
        return [_UNKNOWN]
    waiting, expanded = [marked], list[str]()
    while waiting:
        text = waiting.pop()
        group = _first_group(text)
        if group is None:
            expanded.append(text)
            continue
        start, end, choices = group
        waiting += [text[:start] + choice + text[end:] for choice in reversed(choices)]
        if len(waiting) + len(expanded) > MOST_FIELDS:
            return [_UNKNOWN]
    return expanded


def _first_group(text: str) -> tuple[int, int, list[str]] | None:
    start = text.find("{")
    while start >= 0:
        level, commas, end = 0, [start], start
        for end in range(start, len(text)):
            character = text[end]
            level += (character == "{") - (character == "}")
            if character == "," and level == 1:
                commas.append(end)
            if level == 0:
                break
        if level == 0:
            commas.append(end)
            if len(commas) > 2:
                return start, end + 1, [text[one + 1 : other] for one, other in pairwise(commas)]
            if (numbers := _sequence(text[start + 1 : end])) is not None:
                return start, end + 1, numbers
        start = text.find("{", start + 1)
    return None


def _sequence(text: str) -> list[str] | None:
    first, dots, last = text.partition("..")
    if not dots or len(text) > 20:
        return None
    if ".." in last:  # with a step
        return [_UNKNOWN]
    if first.lstrip("-").isdecimal() and last.lstrip("-").isdecimal():
        low, high = int(first), int(last)
        step = 1 if low <= high else -1
        return [str(number) for number in range(low, high + step, step)] if abs(high - low) < MOST_FIELDS else [_UNKNOWN]
    if len(first) == len(last) == 1 and first.isalpha() and last.isalpha():
        step = 1 if first <= last else -1
        return [chr(code) for code in range(ord(first), ord(last) + step, step)][:MOST_FIELDS]
    return None


def printed(program: Program, variables: Variables) -> str | None:
    """Compute the output of a program that is one pipeline of known commands; None for any other program. Nothing is run."""
    return printed_by(program[0].commands, variables) if len(program) == 1 else None


def printed_by(commands: tuple[Command, ...], variables: Variables) -> str | None:
    """Compute the output of the commands of one pipeline; None if it is unknown. Nothing is run."""
    text: str | None = ""
    for index, command in enumerate(commands):
        if not isinstance(command, Simple) or command.assignments:
            return None
        fields = [field for word in command.words for field in expand(word, variables, lambda inner: printed(inner, variables))]
        words = [field.text for field in fields]
        if not words or None in words or not all(each.operator.startswith("<") for each in command.redirections):
            return None
        stdin = document_of(command.redirections, text, variables, lambda inner: printed(inner, variables))
        text = _step([word or "" for word in words], stdin, first=index == 0 and not command.redirections)
        if text is None or len(text) > _LONGEST:
            return None
    return text


def document_of(redirections: Sequence[Redirection], text: str | None, variables: Variables, output: Outputs) -> str | None:
    """Return what a command with these redirections reads, which would read `text` without them; None if it is unknown."""
    for each in redirections:
        if each.number.strip("0") == "" and (each.number or each.operator.startswith("<")):
            text = joined(each.word, variables, output) if each.operator.startswith("<<") else None
    return text


def _step(words: list[str], text: str | None, *, first: bool) -> str | None:
    name, arguments = words[0].rpartition("/")[2], words[1:]
    if name in ("echo", "printf") and first:
        return _echoed(arguments) if name == "echo" else _formatted(arguments)
    if name == "which" and first and len(arguments) == 1:
        return arguments[0] if "/" in arguments[0] else f"/usr/bin/{arguments[0]}"  # the program, whatever functions there are
    if name == "type" and first and len(arguments) == 1:
        return arguments[0]
    if name == "command" and first and arguments[:1] == ["-v"] and len(arguments) == 2:
        return arguments[1]
    if first or text is None:
        return None
    return _filtered(name, arguments, text)


def _echoed(arguments: list[str]) -> str | None:
    escapes = False
    while arguments and arguments[0].startswith("-") and set(arguments[0][1:]) <= set("neE") and len(arguments[0]) > 1:
        escapes = escapes or "e" in arguments[0]
        arguments = arguments[1:]
    text = " ".join(arguments)
    return _unescaped(text) if escapes else text


def _formatted(arguments: list[str]) -> str | None:
    """Return the output of `printf` with these arguments; None if the format has a directive other than `%s`."""
    if not arguments:
        return None
    form, values = _unescaped(arguments[0]), arguments[1:]
    if form is None or form.count("%") != form.count("%s") or form.count("%s") != len(values):
        return None
    for value in values:
        form = form.replace("%s", value, 1)
    return form


def _unescaped(text: str) -> str | None:
    """Replace backslash escapes by their characters; None if the text has an escape that is not known here."""
    first, *parts = text.split("\\")
    result, escaped = first, False
    for part in parts:
        if escaped:  # the second of two backslashes
            result, escaped = f"{result}{part}", False
        elif not part:
            result, escaped = f"{result}\\", True
        elif part[0] in _ESCAPES:
            result += _ESCAPES[part[0]] + part[1:]
        elif (replaced := _numbered(part)) is not None:
            result += replaced
        else:
            return None
    return result


def _numbered(part: str) -> str | None:
    """Replace the number that begins an escape (the text after a backslash: `x6c`, `154`, `0154`) by its character; None without one."""
    base, digits, at = (16, "0123456789abcdefABCDEF", 1) if part[0] == "x" else (8, "01234567", 0)
    end = at
    while end < len(part) and end < at + (2 if base == 16 else 4 if part[0] == "0" else 3) and part[end] in digits:
        end += 1
    return chr(int(part[at:end], base) & 0xFF) + part[end:] if end > at else None


def _filtered(name: str, arguments: list[str], text: str) -> str | None:
    try:
        if name == "cat" and not arguments:
            return text
        if name == "rev" and not arguments:
            return "\n".join(line[::-1] for line in text.split("\n"))
        if name == "base64" and arguments and arguments[0] in ("-d", "-D", "--decode", "-di"):
            from base64 import b64decode  # few command lines need it

            return b64decode("".join(text.split())).decode("utf-8", "replace")
        if name == "base32" and arguments[:1] in (["-d"], ["--decode"]):
            from base64 import b32decode

            return b32decode("".join(text.split())).decode("utf-8", "replace")
        if name == "xxd" and {*arguments} <= {"-r", "-p", "-ps", "-rp"} and arguments:
            return bytes.fromhex(text).decode("utf-8", "replace")
        if name == "tr" and len(arguments) == 2:
            return _translated(arguments, text)
    except ValueError:  # invalid base64 raises one, too
        return None
    return None


def _translated(arguments: list[str], text: str) -> str | None:
    if arguments[0] == "-d":
        return "".join(each for each in text if each not in _letters(arguments[1]))
    from_, to = _letters(arguments[0]), _letters(arguments[1])
    to += to[-1:] * (len(from_) - len(to))
    return text.translate(dict(zip(map(ord, from_), to, strict=False)))


def _letters(written: str) -> str:
    """Return the characters in an argument of `tr`: ranges such as `a-z` are expanded."""
    letters, at = "", 0
    while at < len(written):
        if at + 2 < len(written) and written[at + 1] == "-" and ord(written[at]) <= ord(written[at + 2]) < 0x100:
            letters += "".join(map(chr, range(ord(written[at]), ord(written[at + 2]) + 1)))
            at += 3
        else:
            letters += written[at]
            at += 1
    return letters


def is_command(name: str, value: str) -> bool:
    """Whether an environment variable with this value hands a command line to the programs that read it.

    A single word does not count: it names an editor, pager or browser, which starts only for interactive use.
    """
    return name in _COMMANDS and not value.replace("-", "").replace(":", "").isalnum() and bool(value)


def loads(name: str, value: Field) -> bool:
    """Whether an environment variable with this value makes programs started later load or run code."""
    text = value.shown
    if name in _LOADED or name.startswith("BASH_FUNC_"):
        return text != ""
    if name in _PROMPTS:
        return not value.known or holds_command(text)
    if name == "NODE_OPTIONS":
        return not value.known or any(word.partition("=")[0] in _LOADING_OPTIONS for word in text.split())
    return name == "PATH" and not all(map(_is_safe, text.split(":")))


def _is_safe(place: str) -> bool:
    """Whether a directory of PATH is absolute and not writable by everybody. An unknown directory counts as safe."""
    return place.startswith(("/", "~", "…", "$")) and not any(place == top or place.startswith(f"{top}/") for top in _WORLD_WRITABLE)


def holds_command(text: str) -> bool:
    """Whether a shell that expands this text starts a command."""
    return "$(" in text or "`" in text


def hides_command(text: str) -> bool:
    """Whether a shell that uses this text in arithmetic starts a command: array indices are expanded there."""
    return holds_command(text.partition("[")[2])
