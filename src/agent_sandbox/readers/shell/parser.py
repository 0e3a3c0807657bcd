"""Parse the text of a command line into the classes of `syntax`. Raises only `Unreadable`, for text that is no command line."""

from __future__ import annotations

import re

from agent_sandbox.readers.shell.lexer import DEEPEST, Reader
from agent_sandbox.readers.shell.syntax import (
    Command,
    Compound,
    ForLoop,
    FunctionDefinition,
    Part,
    Pipeline,
    Program,
    Redirection,
    Simple,
    Text,
    Unreadable,
    Word,
)

_REDIRECTIONS = frozenset({"<", ">", ">>", ">|", "<>", "<&", ">&", "&>", "&>>", "<<", "<<-", "<<<"})
_BEFORE_COMMAND = frozenset({"!", "time", "-p", "coproc"})
_PARENTHESES = re.compile(r"[ \t]*\([ \t]*\)")  # behind the name of a function
_NAMED = re.compile(r"[ \t]+[A-Za-z_]\w*[ \t]+(?=[{(]|(?:if|while|until|for|case|select|\[\[)[ \t\n])")  # a coprocess that has a name
_NUMBER = re.compile(r"[0-9]+(?=[<>])|\{[A-Za-z_][A-Za-z0-9_]*\}(?=[<>])")  # of a descriptor, or the variable that takes it


def parse(text: str) -> Program:
    """Return the program in the text. Raises `Unreadable`."""
    reader = Reader(text, 0, _program)
    program = _program(reader)
    reader.skip_blanks()
    if reader.at < len(reader.text):
        raise Unreadable(f"{reader.peek(10)!r} stands where no command can")
    return program


class _Parser:
    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def program(self, until: frozenset[str] = frozenset()) -> Program:
        """Parse pipelines up to a word in `until`, a closing parenthesis, `;;` or the end. The terminator is not consumed."""
        pipelines: list[Pipeline] = []
        while True:
            joined = self.lines()
            if (
                self.reader.at >= len(self.reader.text)
                or self.reader.peek() == ")"
                or self.closing() in until
                or self.reader.peek(2) == ";;"
            ):
                return tuple(pipelines)
            before = self.reader.at
            pipelines.append(self.pipeline(joined))
            if self.reader.at == before:
                raise Unreadable(f"{self.reader.peek(10)!r} stands where no command can")

    def lines(self) -> str:
        """Skip blanks, line ends and separators of commands. Return the last `&&` or `||`; empty if there is none."""
        joined = ""
        while True:
            self.reader.skip_blanks()
            if self.reader.peek() == "\n":
                self.line_end()
            elif self.reader.peek() in (";", "&") and self.reader.operator() in (";", "&"):
                self.reader.at += 1
            elif (operator := self.reader.operator()) in ("&&", "||"):
                self.reader.at += 2
                joined = operator
            else:
                return joined

    def line_end(self) -> None:
        """Skip the end of a line and the here-documents that it announced."""
        self.reader.at = max(self.reader.at + 1, self.reader.behind_documents)

    def document(self, delimiter: str, *, tabs: bool, joins: bool) -> str:
        """Return the text of a here-document, up to its delimiter. It begins after this line and the line's earlier here-documents.

        With `tabs`, those at the beginning of lines are left out; with `joins`, a line that ends with a backslash goes on in the next.
        """
        text = self.reader.text
        line_end = text.find("\n", self.reader.at)
        at = max(self.reader.behind_documents, line_end + 1) if line_end >= 0 else len(text)
        lines: list[str] = []
        while at < len(text):
            end = _line_end(text, at, joins)
            line = text[at:end]
            whole = line.replace("\\\n", "") if joins else line  # a backslash before the one at the end makes that one a character
            if (whole.lstrip("\t") if tabs else whole) == delimiter:
                self.reader.behind_documents = min(end + 1, len(text))
                return "".join(lines)
            lines.append("\n".join(each.lstrip("\t") for each in text[at : end + 1].split("\n")) if tabs else text[at : end + 1])
            at = end + 1
        self.reader.behind_documents = len(text)
        return "".join(lines)

    def closing(self) -> str:
        """Return the unquoted text before the next blank, quote, `$` or operator, without consuming it. It may be a reserved word."""
        self.reader.skip_blanks()
        start = self.reader.at
        end = start
        while end < len(self.reader.text) and self.reader.text[end] not in " \t\n|&;<>()`\"'$\\":
            end += 1
        if end > start and self.reader.text.startswith("\\\n", end) and self.reader.text[end + 2 : end + 3] not in (" ", "\t", "\n", ""):
            raise Unreadable("the first word of a command goes on in the next line")
        return self.reader.text[start:end]

    def take(self, word: str) -> None:
        self.lines()
        if self.closing() != word:
            raise Unreadable(f"{word!r} is missing")
        self.reader.at += len(word)

    def pipeline(self, joined: str) -> Pipeline:
        commands = [self.command()]
        while True:
            self.reader.skip_blanks()
            operator = self.reader.operator()
            if operator not in ("|", "|&"):
                break
            self.reader.at += len(operator)
            self.lines_only()
            commands.append(self.command())
        return Pipeline(tuple(commands), background=operator == "&", joined=joined)

    def lines_only(self) -> None:
        self.reader.skip_blanks()
        while self.reader.peek() == "\n":
            self.line_end()
            self.reader.skip_blanks()

    def command(self) -> Command:
        self.reader.count()
        self.deeper()
        try:
            word = self.closing()
            timed = False
            while (word in _BEFORE_COMMAND or (timed and word == "--")) and self.following(len(word), 1) in (" ", "\t"):
                timed = timed or word == "time"
                self.reader.at += len(word)
                if word == "coproc" and (name := _NAMED.match(self.reader.text, self.reader.at)):
                    self.reader.at = name.end()
                word = self.closing()
            compound = self.compound(word)
            return self.simple() if compound is None else compound
        finally:
            self.reader.depth -= 1

    def deeper(self) -> None:
        self.reader.depth += 1
        if self.reader.depth > DEEPEST:
            raise Unreadable("it is nested too deep")

    def following(self, skip: int, count: int) -> str:
        """Return `count` characters that begin `skip` characters ahead, without consuming them."""
        return self.reader.text[self.reader.at + skip : self.reader.at + skip + count]

    def compound(self, word: str) -> Command | None:
        reader = self.reader
        if reader.peek(2) == "((" and (condition := self.arithmetic()) is not None:
            return condition
        if reader.peek() == "(":
            reader.at += 1
            body = self.program()
            if reader.peek() != ")":
                raise Unreadable("a ( is not closed")
            reader.at += 1
            return Compound("(", (body,), (), self.redirections())
        if word == "{":
            return self.group("{", ("}",))
        if word == "if":
            return self.condition()
        if word in ("while", "until"):
            return self.group(word, ("do", "done"))
        if word in ("for", "select"):
            return self.loop(word)
        if word == "case":
            return self.case()
        if word == "[[":
            return self.test()
        if word == "function":
            reader.at += len(word)
            name = self.closing()
            reader.at += len(name)
            reader.skip_blanks()
            if reader.peek(2) == "()":
                reader.at += 2
            return self.function(name)
        if word and (behind := _PARENTHESES.match(reader.text, reader.at + len(word))):
            reader.at = behind.end()
            return self.function(word)
        return None

    def function(self, name: str) -> FunctionDefinition:
        self.lines_only()
        return FunctionDefinition(name, (Pipeline((self.command(),)),))

    def group(self, kind: str, ends: tuple[str, ...]) -> Compound:
        self.reader.at += len(kind)
        bodies = []
        for end in ends:
            bodies.append(self.program(frozenset({end})))
            self.take(end)
        return Compound(kind, tuple(bodies), (), self.redirections())

    def condition(self) -> Compound:
        bodies = []
        self.reader.at += len("if")
        while True:
            bodies.append(self.program(frozenset({"then"})))
            self.take("then")
            bodies.append(self.program(frozenset({"elif", "else", "fi"})))
            word = self.closing()
            self.reader.at += len(word)
            if word == "else":
                bodies.append(self.program(frozenset({"fi"})))
                self.take("fi")
            if word != "elif":
                break
        if word not in ("else", "fi"):
            raise Unreadable("'fi' is missing")
        return Compound("if", tuple(bodies), (), self.redirections())

    def loop(self, kind: str) -> ForLoop:
        reader = self.reader
        reader.at += len(kind)
        reader.skip_blanks()
        name, words = "", None if reader.peek(2) != "((" else tuple[Word, ...]()
        if words is not None and reader.arithmetic(0, three=True) is None:
            raise Unreadable("a (( is not closed")
        if words is not None:
            self.lines()
        else:
            name = self.closing()
            reader.at += len(name)
            self.lines_only()
            if self.closing() == "in":
                reader.at += 2
                words = self.words()
        self.lines()
        end = "}" if self.closing() == "{" else "done"
        self.take("{" if end == "}" else "do")
        body = self.program(frozenset({end}))
        self.take(end)
        return ForLoop(name, words, body, self.redirections(), kind)

    def words(self) -> tuple[Word, ...]:
        words = []
        self.reader.skip_blanks()
        while (word := self.reader.word()) is not None:
            words.append(word)
            self.reader.skip_blanks()
        return tuple(words)

    def case(self) -> Compound:
        reader = self.reader
        reader.at += len("case")
        reader.skip_blanks()
        subject = (reader.word() or (),)
        self.take("in")
        bodies: list[Program] = []
        while True:
            self.lines()
            if self.closing() == "esac":
                reader.at += len("esac")
                return Compound("case", tuple(bodies), subject, self.redirections())
            if reader.peek() == "(":
                reader.at += 1
            while self.words() and reader.operator() == "|":
                reader.at += 1
            if reader.peek() != ")":
                raise Unreadable("a pattern of 'case' is not closed")
            reader.at += 1
            bodies.append(self.program(frozenset({"esac"})))
            if (operator := reader.operator()) in (";;", ";&", ";;&"):
                reader.at += len(operator)

    def test(self) -> Compound:
        """Parse the rest of `[[ … ]]`. Its words are compared, not run."""
        reader, words = self.reader, list[Word]()
        while True:
            reader.skip_blanks()
            word = reader.word()
            if word == (Text("]]"),):
                return Compound("[[", (), tuple(words), self.redirections())
            if word is not None:
                words.append(word)
            elif reader.at < len(reader.text) and (reader.peek() == "\n" or reader.operator()):
                reader.at += len(reader.operator()) or 1
            else:
                raise Unreadable("a [[ is not closed")

    def arithmetic(self) -> Compound | None:
        """Parse `((…))` as a command; None if it is a subshell in a subshell."""
        inner = self.reader.arithmetic(0)
        return None if inner is None else Compound("((", (), ((inner,),), self.redirections())

    def redirections(self) -> tuple[Redirection, ...]:
        place: list[Redirection] = []
        while self.redirection(place):
            self.reader.skip_blanks()
        return tuple(place)

    def redirection(self, place: list[Redirection]) -> bool:
        reader, start = self.reader, self.reader.at
        reader.skip_blanks()
        number = _NUMBER.match(reader.text, reader.at)
        reader.at = number.end() if number else reader.at
        operator = reader.operator()
        if operator not in _REDIRECTIONS or reader.peek(2) in ("<(", ">("):
            reader.at = start
            return False
        reader.at += len(operator)
        reader.skip_blanks()
        before = reader.at
        word = reader.word()
        if word is None:
            raise Unreadable(f"nothing follows {operator!r}")
        if operator in ("<<", "<<-"):
            written = reader.text[before : reader.at]
            if not all(isinstance(part, Text) for part in word) or "$" in written or "\n" in written:
                raise Unreadable("the word that ends a here-document is more than letters and quotes")
            plain = any(isinstance(part, Text) and part.quoted for part in word)
            delimiter = "".join(part.text for part in word if isinstance(part, Text))
            body = self.document(delimiter, tabs=operator == "<<-", joins=not plain)
            word = (Text(body, True),) if plain else reader.within(body).document()
        place.append(Redirection(operator, word, number[0] if number else ""))
        return True

    def simple(self) -> Simple:
        assignments: list[tuple[str, Word]] = []
        words: list[Word] = []
        place: list[Redirection] = []
        while True:
            self.reader.skip_blanks()
            if self.redirection(place):
                continue
            word = self.reader.word()
            if word is None:
                break
            assigned = None if words else _assignment(word)
            if assigned is None:
                words.append(word)
            else:
                if not assigned[1] and self.reader.peek() == "(":
                    assigned = (assigned[0].rstrip("+[") + "[", self.array())
                assignments.append(assigned)
        return Simple(tuple(assignments), tuple(words), tuple(place))

    def array(self) -> Word:
        """Parse the value of `name=(…)`: all its words, joined by blanks."""
        self.reader.at += 1
        parts: list[Part] = []
        while True:
            self.lines_only()
            word = self.reader.word()
            if word is None:
                break
            parts += [*([Text(" ")] if parts else []), *word]
        if self.reader.peek() != ")":
            raise Unreadable("a ( is not closed")
        self.reader.at += 1
        return tuple(parts)


def _assignment(word: Word) -> tuple[str, Word] | None:
    """Split `name=…`, `name+=…` or `name[…]=…` into the name and the assigned value; None for any other word.

    The name ends with `+` where the value is added, and with `[` where it is one of several.
    """
    first = word[0]
    if not isinstance(first, Text) or first.quoted or "=" not in first.text:
        return None
    name, _, value = first.text.partition("=")
    plain, bracket, _ = name.removesuffix("+").partition("[")
    if not plain.isidentifier():
        return None
    rest = word[1:]
    return plain + (bracket or ("+" if name.endswith("+") else "")), (Text(value), *rest) if value else rest


def _line_end(text: str, at: int, joins: bool) -> int:
    """Return where a line ends; with `joins`, that of the last line that it goes on in."""
    while True:
        end = text.find("\n", at)
        if end < 0:
            return len(text)
        line = text[at:end]
        if not joins or (len(line) - len(line.rstrip("\\"))) % 2 == 0:
            return end
        at = end + 1


def _program(reader: Reader) -> Program:
    return _Parser(reader).program()
