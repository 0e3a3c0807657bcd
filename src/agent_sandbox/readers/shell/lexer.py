"""The lexer of command lines: it reads words, with all their quoting, and operators. `parser` decides where each may stand."""

from __future__ import annotations

from collections.abc import Callable

from agent_sandbox.readers.shell.syntax import Arithmetic, Part, Program, Substitution, Text, Unreadable, Variable, Word

LONGEST = 1 << 17  # characters; longer than any argument the kernel accepts
MOST_COMMANDS = 2000
DEEPEST = 40  # nested substitutions and groups
OPERATORS = (
    "<<<",
    "<<-",
    "&>>",
    ";;&",
    "&&",
    "||",
    ";;",
    ";&",
    "<<",
    ">>",
    "<&",
    ">&",
    "<>",
    ">|",
    "&>",
    "|&",
    "|",
    "&",
    ";",
    "<",
    ">",
    "(",
    ")",
)
_ENDS_WORD = frozenset(" \t\n|&;<>()")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\x1b", "E": "\x1b"}
_SPECIAL = frozenset("@*#?-$!0123456789")


class Reader:
    """Reads words and operators at a position in a text. `program` is the parser's function for a program within parentheses."""

    def __init__(self, text: str, depth: int, program: Callable[[Reader], Program], counted: list[int] | None = None) -> None:
        if len(text) > LONGEST:
            raise Unreadable(f"it has {len(text)} characters; at most {LONGEST} are read")
        if depth > DEEPEST:
            raise Unreadable("it is nested too deep")
        self.text = text
        self.at = 0
        self.depth = depth
        self.behind_documents = 0  # where the text continues after the here-documents announced on this line
        self._program = program
        self._counted = [0] if counted is None else counted  # commands so far, in this text and in nested ones

    def within(self, text: str) -> Reader:
        """Return a reader for a text nested in this one, which shares the limits on depth and commands."""
        return Reader(text, self.depth + 1, self._program, self._counted)

    def count(self) -> None:
        """Count one command. Raises `Unreadable` beyond MOST_COMMANDS."""
        self._counted[0] += 1
        if self._counted[0] > MOST_COMMANDS:
            raise Unreadable(f"it has more than {MOST_COMMANDS} commands")

    def peek(self, count: int = 1) -> str:
        """Return the next characters; fewer at the end of the text."""
        return self.text[self.at : self.at + count]

    def skip_blanks(self) -> None:
        """Skip blanks, comments and line continuations."""
        while self.at < len(self.text):
            if self.text[self.at] in " \t":
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif self.text[self.at] == "#" and (self.at == 0 or self.text[self.at - 1] in " \t\n;&|()"):
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return

    def operator(self) -> str:
        """Return the operator at this position, or an empty string. Does not consume it."""
        following = self.peek(3)
        return next((each for each in OPERATORS if following.startswith(each)), "")

    def word(self) -> Word | None:
        """Read the word that begins here; None if there is none."""
        parts: list[Part] = []
        while self.at < len(self.text):
            character = self.text[self.at]
            if character in "<>" and self.peek(2)[1:] == "(":
                parts.append(self._pipe())
            elif character in _ENDS_WORD:
                break
            else:
                parts += self._part(character, quoted=False)
        return _merged(parts) or None

    def document(self) -> Word:
        """Read the whole text as the body of a here-document in which variables and substitutions are expanded."""
        parts: list[Part] = []
        while self.at < len(self.text):
            character = self.text[self.at]
            if character == '"':
                self.at += 1
                parts.append(Text(character, True))
            else:
                parts += self._part(character, quoted=True)
        return tuple(parts)

    def _part(self, character: str, *, quoted: bool) -> list[Part]:
        """Read the part of a word that begins with this character. `quoted` means inside double quotes or a here-document."""
        if character == "\\":
            return self._escaped(quoted)
        if character == "$":
            return [self._dollar(quoted)]
        if character == "`":
            return [self._backticks(quoted)]
        if not quoted and character == "'":
            return [Text(self._until("'", self.at + 1), True)]
        if not quoted and character == '"':
            self.at += 1
            return self._double_quoted()
        start = self.at
        while self.at < len(self.text) and self.text[self.at] not in ('"\\$`' if quoted else "\\$`'\" \t\n|&;<>()"):
            self.at += 1
        return [Text(self.text[start : self.at], quoted)]

    def _escaped(self, quoted: bool) -> list[Part]:
        following = self.text[self.at + 1 : self.at + 2]
        self.at += 2
        if following == "\n":
            return []
        if quoted and following not in '$`"\\':
            return [Text("\\" + following, True)]
        return [Text(following or "\\", True)]

    def _double_quoted(self) -> list[Part]:
        parts: list[Part] = [Text("", True)]  # "" is a word, too
        while self.at < len(self.text):
            character = self.text[self.at]
            if character == '"':
                self.at += 1
                return parts
            parts += self._part(character, quoted=True)
        raise Unreadable('a " is not closed')

    def _until(self, end: str, start: int) -> str:
        close = self.text.find(end, start)
        if close < 0:
            raise Unreadable(f"a {end} is not closed")
        self.at = close + len(end)
        return self.text[start:close]

    def _dollar(self, quoted: bool) -> Part:
        following = self.peek(3)[1:]
        if following == "\\\n":
            raise Unreadable("a $ is parted from what follows it by the end of a line")
        if following.startswith("(("):
            number = self.arithmetic(1)
            if number is not None:
                return number
        if following.startswith("("):
            self.at += 2
            return Substitution(self._nested(), quoted)
        if following.startswith("{"):
            return self._braced(quoted)
        if following.startswith("'") and not quoted:
            self.at += 2
            return Text(self._c_text(), True)
        if following.startswith('"') and not quoted:  # $"…" is a text to be translated
            self.at += 1
            return Text("")
        start = self.at + 1
        if following[:1] in _SPECIAL and following:
            self.at += 2
            return Variable(following[0], quoted)
        self.at = start
        while self.at < len(self.text) and (self.text[self.at].isalnum() or self.text[self.at] == "_"):
            self.at += 1
        name = self.text[start : self.at]
        return Variable(name, quoted) if name else Text("$", True)

    def _nested(self) -> Program:
        """Read a program after an opening parenthesis, and the closing parenthesis."""
        inner = self._inner()
        program = self._program(inner)
        inner.skip_blanks()
        if inner.peek() != ")":
            raise Unreadable("a ( is not closed")
        self.at = inner.at + 1
        return program

    def _inner(self) -> Reader:
        inner = self.within(self.text)
        inner.at = self.at
        return inner

    def _pipe(self) -> Substitution:
        self.at += 2
        return Substitution(self._nested(), pipe=True)

    def _backticks(self, quoted: bool) -> Substitution:
        start = end = self.at + 1
        while end < len(self.text) and self.text[end] != "`":
            end += 2 if self.text[end] == "\\" else 1
        if end >= len(self.text):
            raise Unreadable("a ` is not closed")
        text = _without_escapes(self.text[start:end], '`$\\"' if quoted else "`$\\")
        self.at = end + 1
        inner = self.within(text)
        program = self._program(inner)
        if inner.at < len(inner.text):
            raise Unreadable("what stands in backticks is no command line")
        return Substitution(program, quoted)

    def _braced(self, quoted: bool) -> Part:
        start = self.at + 2
        self.at = start
        if self.text[start : start + 1] in (" ", "\t", "\n", "|"):
            raise Unreadable("a ${ holds commands")  # newer shells run them
        if self.text[start : start + 1] in ("!", "#") and self.text[start + 1 : start + 2] not in ("}", ""):
            self.at += 1
        name_at = self.at
        while self.at < len(self.text) and (self.text[self.at].isalnum() or self.text[self.at] == "_"):
            self.at += 1
        if self.at == name_at and self.text[self.at : self.at + 1] in _SPECIAL:
            self.at += 1
        name, rest_at, nested = self.text[start : self.at], self.at, list[Part]()
        while self.at < len(self.text) and self.text[self.at] != "}":
            character = self.text[self.at]
            if character in '\\$`"' or (character == "'" and not quoted):
                nested += self._nested_part(character, quoted)
            else:
                nested.append(Text(character, quoted))
                self.at += 1
        if self.at >= len(self.text):
            raise Unreadable("a ${ is not closed")
        rest = self.text[rest_at : self.at]
        self.at += 1
        return Variable(name, quoted, rest, tuple(nested))

    def _nested_part(self, character: str, quoted: bool) -> list[Part]:
        self.depth += 1
        if self.depth > DEEPEST:
            raise Unreadable("it is nested too deep")
        parts = self._part(character, quoted=quoted and character != '"')
        self.depth -= 1
        return parts

    def arithmetic(self, skip: int, *, three: bool = False) -> Arithmetic | None:
        """Read `((…))` after `skip` characters; None, at an unchanged position, if it is a subshell in a subshell.

        `three` allows the three expressions of a `for`.
        """
        start, level, plain = self.at, 0, list[str]()
        self.at += skip
        nested: list[Part] = []
        while self.at < len(self.text):
            character = self.text[self.at]
            if character in "$`":
                nested += self._nested_part(character, True)
                plain.append("0")
                continue
            plain.append(character)
            level += (character == "(") - (character == ")")
            self.at += 1
            if level > DEEPEST:
                break
            if level == 0:
                if plain[-2:] == [")", ")"] and (three or not _holds_commands("".join(plain))):
                    return Arithmetic(tuple(nested))
                break
        self.at = start
        return None

    def _c_text(self) -> str:
        """Read the text of `$'…'`, after its opening quote."""
        characters: list[str] = []
        while self.at < len(self.text):
            character = self.text[self.at]
            self.at += 1
            if character == "'":
                return "".join(characters)
            characters.append(character if character != "\\" else self._c_escape())
        raise Unreadable("a $' is not closed")

    def _c_escape(self) -> str:
        kind = self.peek()
        self.at += 1
        if kind in _ESCAPES:
            return _ESCAPES[kind]
        if kind == "c":
            self.at += 1
            return chr(ord(self.text[self.at - 1 : self.at] or "@") & 0x1F)
        base, most = (16, {"x": 2, "u": 4, "U": 8}[kind]) if kind and kind in "xuU" else (8, 3) if kind and kind in "01234567" else (0, 0)
        if not base:
            return kind if kind and kind in "'\"\\?" else "\\" + kind
        start = self.at - (base == 8)
        end = start
        while end < len(self.text) and end < start + most and self.text[end] in "0123456789abcdefABCDEF"[: 8 if base == 8 else 22]:
            end += 1
        self.at = end
        number = int(self.text[start:end] or "0", base)
        return chr(number) if number < 0x110000 else "?"


def _holds_commands(text: str) -> bool:
    """Whether a text has two words in a row, or a separator of commands: then it is no arithmetic."""
    import re  # slow to import, and arithmetic is rare

    return re.search(r"[;\n'\"]|[A-Za-z_]\w*[ \t]+[-A-Za-z_/.]", text) is not None


def _merged(parts: list[Part]) -> Word:
    """Return parts, of which plain characters that a line break in the text has parted are one."""
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, Text) and isinstance(last, Text) and not part.quoted and not last.quoted:
            merged[-1] = Text(last.text + part.text)
        else:
            merged.append(part)
    return tuple(merged)


def _without_escapes(text: str, escaped: str) -> str:
    """Return a text without the backslashes before these characters."""
    plain, at = list[str](), 0
    while at < len(text):
        at += text[at] == "\\" and text[at + 1 : at + 2] != "" and text[at + 1] in escaped
        plain.append(text[at])
        at += 1
    return "".join(plain)
