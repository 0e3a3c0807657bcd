"""What a program would print, where its text tells: `echo` and `printf` of constants, through filters that only turn letters around."""

from __future__ import annotations

from agent_sandbox.policy.commands.expanding import Variables, expand, joined
from agent_sandbox.policy.commands.syntax import Command, Program, Simple

_LONGEST = 1 << 16
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "e": "\x1b"}


def printed(program: Program, variables: Variables) -> str | None:
    """The output of a program that is one pipeline of such commands; None for any other."""
    return printed_by(program[0].commands, variables) if len(program) == 1 else None


def printed_by(commands: tuple[Command, ...], variables: Variables) -> str | None:
    """The same for the commands of a pipeline."""
    text: str | None = ""
    for index, command in enumerate(commands):
        if not isinstance(command, Simple) or command.assignments:
            return None
        fields = [field for word in command.words for field in expand(word, variables, lambda inner: printed(inner, variables))]
        words = [field.text for field in fields]
        if not words or None in words:
            return None
        given = _given(command, variables) if command.redirections else text
        text = _step([word or "" for word in words], given, first=index == 0 and not command.redirections)
        if text is None or len(text) > _LONGEST:
            return None
    return text


def _given(command: Simple, variables: Variables) -> str | None:
    last = command.redirections[-1]
    return joined(last.word, variables, lambda inner: printed(inner, variables)) if last.operator.startswith("<<") else None


def _step(words: list[str], text: str | None, *, first: bool) -> str | None:
    name, arguments = words[0].rpartition("/")[2], words[1:]
    if name in ("echo", "printf") and first:
        return _echoed(arguments) if name == "echo" else _formatted(arguments)
    if name in ("which", "type") and first and len(arguments) == 1:
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
    """printf with nothing but %s: widths would make as much text as they say."""
    if not arguments:
        return None
    form, values = _unescaped(arguments[0]), arguments[1:]
    if form is None or form.count("%") != form.count("%s") or form.count("%s") != len(values):
        return None
    for value in values:
        form = form.replace("%s", value, 1)
    return form


def _unescaped(text: str) -> str | None:
    """With what the escapes stand for; None where one is not known here."""
    first, *parts = text.split("\\")
    made, escaped = first, False
    for part in parts:
        if escaped:  # the second of two
            made, escaped = f"{made}{part}", False
        elif not part:
            made, escaped = f"{made}\\", True
        elif part[0] in _ESCAPES:
            made += _ESCAPES[part[0]] + part[1:]
        elif (found := _numbered(part)) is not None:
            made += found
        else:
            return None
    return made


def _numbered(part: str) -> str | None:
    r"""What begins with the number of a character, as in \x6c, \154 and \0154."""
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
            from base64 import b64decode  # few command lines hold any

            return b64decode("".join(text.split())).decode("utf-8", "replace")
        if name == "base32" and arguments[:1] in (["-d"], ["--decode"]):
            from base64 import b32decode

            return b32decode("".join(text.split())).decode("utf-8", "replace")
        if name == "xxd" and {*arguments} <= {"-r", "-p", "-ps", "-rp"} and arguments:
            return bytes.fromhex(text).decode("utf-8", "replace")
        if name == "tr" and len(arguments) == 2:
            return _translated(arguments, text)
    except ValueError:  # what is no base64 is one, too
        return None
    return None


def _translated(arguments: list[str], text: str) -> str | None:
    if arguments[0] == "-d":
        return "".join(each for each in text if each not in _letters(arguments[1]))
    from_, to = _letters(arguments[0]), _letters(arguments[1])
    to += to[-1:] * (len(from_) - len(to))
    return text.translate(dict(zip(map(ord, from_), to, strict=False)))


def _letters(written: str) -> str:
    """`a-z` written out."""
    made, at = "", 0
    while at < len(written):
        if at + 2 < len(written) and written[at + 1] == "-" and ord(written[at]) <= ord(written[at + 2]) < 0x100:
            made += "".join(map(chr, range(ord(written[at]), ord(written[at + 2]) + 1)))
            at += 3
        else:
            made += written[at]
            at += 1
    return made
