"""Path patterns, parsed once into typed values. Pure: nothing here looks at the disk.

    /data            the file, or the directory and all beneath it     Tree("/data")
    /data/*          all beneath it, as with /data/**, /data/**/*      Beneath("/data")
    /config/*.json   anything else with a wildcard                     Glob("/config", "*.json")

`*` crosses `/`, as in `fnmatch`. `**` as a whole component matches any number of directories, including none. `?` and `[a-z]` match one
character other than `/`. `[*]` is a literal star. A pattern that matches a directory covers everything beneath it. A leading `~` is the
home given by the caller, and a leading `**/` matches anywhere. A pattern that cannot be understood raises `PolicyError`; nothing is dropped
or guessed.

Symbolic links are not followed here: a pattern is about names, and the view built from it decides where a name leads.
"""

from __future__ import annotations

from agent_sandbox._fast.functions import lru_cache
from agent_sandbox._fast.values import TYPE_CHECKING, Enum, dataclass
from agent_sandbox.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class Wild(Enum):
    """Wildcard tokens. Each matches more than one text."""

    ANY = "*"  # any characters, including none and slashes
    ONE = "?"  # one character other than a slash
    MAYBE_DIRECTORIES = "/**"  # nothing, or a slash; in the second case the ANY after it takes the rest


@dataclass(frozen=True)
class OneOf:
    """A token such as `[a-z]`: one character within any of the ranges or, if negated, within none. Never a slash."""

    ranges: tuple[tuple[str, str], ...]
    negated: bool

    def takes(self, character: str) -> bool:
        """Return whether the token matches this character."""
        inside = any(low <= character <= high for low, high in self.ranges)
        return character != "/" and inside != self.negated


Token = str | Wild | OneOf  # a str is one literal character


def scan(component: str) -> list[Token]:
    """Split one path component into tokens. Raises `ValueError(reason, remedy)` if it cannot be understood."""
    tokens: list[Token] = []
    position = 0
    while position < len(component):
        character = component[position]
        position += 1
        if character == "*":
            if not tokens or tokens[-1] is not Wild.ANY:
                tokens.append(Wild.ANY)
        elif character == "?":
            tokens.append(Wild.ONE)
        elif character == "[":
            token, position = _bracket(component, position)
            tokens.append(token)
        elif character == "\\":
            raise ValueError(
                "holds a backslash, which some programs read as an escape and others as a character", "write [\\] for a backslash"
            )
        else:
            tokens.append(character)
    return tokens


def literal(tokens: Sequence[Token]) -> str | None:
    """Return the text of the tokens; None if one of them is a wildcard."""
    return "".join(token for token in tokens if isinstance(token, str)) if all(isinstance(token, str) for token in tokens) else None


def spans(tokens: Sequence[Token], text: str) -> bool:
    """Return whether the tokens match the whole text, or the path of a directory above it."""
    states = _reached({0}, tokens)
    for character in text:
        if character == "/" and len(tokens) in states:
            return True
        states = _reached(_stepped(states, tokens, character), tokens)
        if not states:
            return False
    return len(tokens) in states


def _stepped(states: Iterable[int], tokens: Sequence[Token], character: str) -> set[int]:
    after = set()
    for state in states:
        token = tokens[state] if state < len(tokens) else None
        if token is Wild.ANY:
            after.add(state)
        elif token is Wild.MAYBE_DIRECTORIES:
            if character == "/":
                after.add(state + 1)
        elif token == character or (token is Wild.ONE and character != "/") or (isinstance(token, OneOf) and token.takes(character)):
            after.add(state + 1)
    return after


def _reached(states: set[int], tokens: Sequence[Token]) -> set[int]:
    """Add the states that are reachable without reading a character. A state is the number of tokens matched so far."""
    waiting = list(states)
    while waiting:
        state = waiting.pop()
        token = tokens[state] if state < len(tokens) else None
        onward = state + 1 if token is Wild.ANY else state + 2 if token is Wild.MAYBE_DIRECTORIES else state
        if onward not in states:
            states.add(onward)
            waiting.append(onward)
    return states


def _bracket(component: str, start: int) -> tuple[Token, int]:
    """Parse `[…]`. Returns its token and the position after it. `start` is the position after the opening bracket."""
    negated = component[start : start + 1] == "!"
    first = start + negated
    end = component.find("]", first + 1)  # a ] in first place is itself a member
    if end < 0:
        raise ValueError("holds a '[' that is not closed", "write [[] for a bracket")
    members = component[first:end]
    if len(members) == 1 and not negated:
        return members, end + 1
    if members.startswith("^"):
        raise ValueError("holds [^…], which shells and fnmatch read differently", "write [!…] for all but these")
    ranges = []
    while members:
        if len(members) >= 3 and members[1] == "-":
            low, high, members = members[0], members[2], members[3:]
        else:
            low, high, members = members[0], members[0], members[1:]
        if low > high:
            raise ValueError(f"holds the empty range {low}-{high}", f"write {high}-{low}")
        ranges.append((low, high))
    return OneOf(tuple(ranges), negated), end + 1


@dataclass(frozen=True)
class Tree:
    """A path, and everything beneath it."""

    path: str


@dataclass(frozen=True)
class Beneath:
    """Everything beneath a directory. The directory itself is visible only as the way there."""

    path: str


@dataclass(frozen=True)
class Glob:
    """Paths beneath `directory` that match `pattern`. A view applies it to the paths that exist when the view is built."""

    directory: str
    pattern: str


PathPattern = Tree | Beneath | Glob


def anchor(pattern: PathPattern) -> str:
    """Return the part of the pattern before its first wildcard, which is a path."""
    return pattern.directory if isinstance(pattern, Glob) else pattern.path


def normalise(path: str | bytes) -> str:
    """Return an absolute path without `//`, `.` and a trailing slash.

    Raises `PolicyError` for a path that is relative or empty, or contains `..` or NUL. Names that are not UTF-8 may be bytes or
    surrogateescape text; both give the same `str`.
    """
    text = _text(path)
    if not text.startswith("/"):
        raise _refused(text, "is not absolute", "write the whole path, from /")
    return _joined(_components(text))


def parse(pattern: str | bytes, *, home: str | None = None) -> PathPattern:
    """Parse a pattern. Raises `PolicyError` naming the pattern, the reason and the remedy."""
    text = _text(pattern)
    rest, start = text, "/"
    if text == "~" or text.startswith("~/"):
        if home is None:
            raise _refused(text, "starts with ~ and no home is known", "write the whole path, from /")
        rest, start = text[1:], normalise(home)
    elif not text.startswith(("/", "**/")):
        remedy = "write ~/… or the whole path" if text.startswith("~") else "write the whole path, from /, or **/NAME for anywhere"
        raise _refused(text, "is not absolute", remedy)
    parts = _components(rest, text)
    names = [literal(_scanned(part, text)) for part in parts]
    if "." in names or ".." in names:  # written as [.][.]
        raise _refused(text, "holds an escaped '.' or '..'", "write the path without it")
    return _shaped(start, parts, names)


def covering(texts: Iterable[str], *, project: str, home: str) -> Callable[[str], bool]:
    """Return a function that tells whether one of the patterns covers a normalised path.

    Relative patterns are relative to the project. Raises PolicyError as `parse` does.
    """
    absolute = [text if text.startswith(("/", "~", "**/")) else f"{project.rstrip('/')}/{text.removeprefix('./')}" for text in texts]
    parsed = [parse(text, home=home) for text in absolute]
    return lambda path: any(matches(pattern, path) for pattern in parsed)


def matches(pattern: PathPattern, path: str) -> bool:
    """Return whether the pattern covers a normalised path."""
    match pattern:
        case Tree(path=top):
            return path == top or path.startswith(_slashed(top))
        case Beneath(path=top):
            return path != top and path.startswith(_slashed(top))
        case _:
            top = pattern.directory
            prefix = _slashed(top)
            return path != top and path.startswith(prefix) and spans(_compiled(pattern), "/" + path[len(prefix) :])


def ancestors(path: str) -> tuple[str, ...]:
    """Return a normalised path and the directories above it, up to /."""
    parts = [] if path == "/" else path[1:].split("/")
    return tuple("/" + "/".join(parts[:depth]) for depth in range(len(parts), -1, -1))


def contains(directory: str, path: str) -> bool:
    """Return whether a path is at or below a directory."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _shaped(start: str, parts: list[str], names: list[str | None]) -> PathPattern:
    depth = names.index(None) if None in names else len(names)
    directory = _joined([*_components(start), *(name for name in names[:depth] if name is not None)])
    rest = parts[depth:]
    if not rest:
        return Tree(directory)
    if all(part == "**" for part in rest[:-1]) and rest[-1] in ("*", "**"):
        return Beneath(directory)
    return Glob(directory, "/".join(rest))


@lru_cache(maxsize=1024)
def _compiled(pattern: Glob) -> tuple[Token, ...]:
    tokens: list[Token] = []
    for part in pattern.pattern.split("/"):
        tokens += [Wild.MAYBE_DIRECTORIES, Wild.ANY] if part == "**" else ["/", *_scanned(part, pattern.pattern)]
    return tuple(tokens)


def _scanned(part: str, whole: str) -> list[Token]:
    try:
        return scan(part)
    except ValueError as error:
        reason, remedy = error.args
        raise _refused(whole, reason, remedy) from None


def _components(text: str, whole: str = "") -> list[str]:
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise _refused(whole or text, "holds '..', which means another place once a link is in the way", "write the path without it")
    return parts


def _text(path: str | bytes) -> str:
    try:
        # Encode and decode, because two surrogates may stand for bytes that are valid UTF-8: one name, one form.
        raw = path if isinstance(path, bytes) else path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise _refused(path, "holds a lone surrogate, which no file name can", "pass the name as bytes") from None
    text = raw.decode("utf-8", "surrogateescape")
    if not text:
        raise _refused(text, "is empty", "write the whole path, from /")
    if "\0" in text:
        raise _refused(text, "holds a NUL character, which no file name can", "remove it")
    return text


def _joined(parts: list[str]) -> str:
    return "/" + "/".join(parts)


def _slashed(path: str) -> str:
    return path if path == "/" else path + "/"


def _refused(path: str | bytes, reason: str, remedy: str) -> PolicyError:
    return PolicyError(f"the path {path!r} {reason}", hint=remedy)
