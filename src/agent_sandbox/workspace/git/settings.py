"""The files that git's real configuration names: hooks, filters, included files, programs in the project.

Git itself is never run. A small parser of our own reads the configuration as text. Every value counts, because new versions of git run new
things; only keys that are known to name no program and no configuration are left out. A value may be a shell command line. It is not parsed
as such; each of its words may be a path.

Not read: configuration by environment variables or `git -c`, and scripts that a named script runs in turn.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Callable, Iterable, Iterator

from agent_sandbox._fast.values import dataclass
from agent_sandbox.policy.paths import contains

Read = Callable[[str], str | None]  # the text of a real file; None if there is none
_LARGEST = 1 << 20  # bytes of one file
_MOST_INCLUDES = 10
_SEPARATORS = "\"'`;|&()<>={},!$\t\n "
_SYSTEM = "/etc/gitconfig"

# Keys whose values are data: names, addresses, text. Sections end with a dot.
_DATA = ("user.", "author.", "committer.", "branch.", "safe.", "maintenance.", "color.", "column.", "url.", "gui.", "advice.")
_DATA_KEYS = frozenset(
    {"core.worktree", "core.excludesfile", "commit.template", "mailmap.file", "blame.ignorerevsfile", "init.defaultbranch"}
)
_DATA_OF_REMOTES = frozenset({"url", "pushurl", "fetch", "push", "tagopt", "branch", "active", "path", "partialclonefilter"})


@dataclass(frozen=True)
class NamedPath:
    """An absolute path that a setting names. The path and everything below it count.

    If `exact`, only the path itself counts; if `flat`, the path and the entries directly in it.
    """

    path: str
    exact: bool = False
    flat: bool = False


def parse(text: str) -> Iterator[tuple[str, str]]:
    """Yield the keys and values of a git configuration. A key is `section.name` or `section.subsection.name`.

    Sections and names are in lower case; subsections are as written. Malformed lines are skipped: git would refuse the whole file.
    """
    section = ""
    lines = iter(text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n"))  # a value may hold what `splitlines` splits at
    for line in lines:
        rest = line.strip()
        while rest.startswith("["):
            section, rest = _section(rest)
        if not rest or rest[0] in "#;":
            continue
        name, equals, value = rest.partition("=")
        name = name.split("#")[0].split(";")[0].strip().lower()
        if name and section:
            yield f"{section}.{name}", _value(value, lines) if equals else "true"


def _section(line: str) -> tuple[str, str]:
    """Parse the section header that a line begins with. Return the name of the section, and the rest of the line."""
    at, quoted, name = 1, False, ""
    while at < len(line):
        character = line[at]
        if quoted and character == "\\":
            at += 1
            name += line[at : at + 1]
        elif character == '"':
            quoted = not quoted
        elif character == "]" and not quoted:
            break
        else:
            name += character
        at += 1
    head, blank, sub = name.partition(" ")
    return (f"{head.strip().lower()}.{sub.strip()}" if blank else head.strip().lower()), line[at + 1 :].strip()


_ESCAPES = {"n": "\n", "t": "\t", "b": "\b"}


def _value(text: str, lines: Iterator[str]) -> str:
    """Return a value without quotes, escapes and comments. If it ends with a backslash, it goes on in the next of `lines`."""
    value, pending, quoted = "", "", False
    text = text.strip()
    at = 0
    while at < len(text):
        character = text[at]
        if character == "\\" and at + 1 == len(text):
            text, at = next(lines, ""), 0
            continue
        if character == "\\":
            at += 1
            value, pending = value + pending + _ESCAPES.get(text[at], text[at]), ""
        elif character == '"':
            quoted = not quoted
        elif character in "#;" and not quoted:
            break
        elif character in " \t" and not quoted:
            pending += character
        else:
            value, pending = value + pending + character, ""
        at += 1
    return value


def read_real(path: str) -> str | None:
    """Return the text of a real file; None if there is none, or if it is larger than any configuration. A FIFO is not waited for."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return None
            text = b""
            while len(text) <= _LARGEST and (piece := os.read(fd, _LARGEST)):
                text += piece
        finally:
            os.close(fd)
    except (OSError, ValueError):  # ValueError: a configuration may name a path with a NUL in it
        return None
    return text.decode(errors="surrogateescape") if len(text) <= _LARGEST else None


def named_paths(worktree: str, *, home: str = "", read: Read = read_real) -> frozenset[NamedPath]:
    """Return the paths that the real configuration of the repository with this work tree names.

    `home` is the user's home, whose configuration holds for every repository.
    """
    reader = _Reader(worktree, home, read)
    for path in _files(worktree, home, read):
        reader.read_file(path)
    return frozenset(reader.paths)


def _files(worktree: str, home: str, read: Read) -> Iterator[str]:
    directory = git_directory(worktree, read)
    yield posixpath.join(common_directory(directory, read), "config")
    yield posixpath.join(directory, "config.worktree")
    yield _SYSTEM
    if home:
        yield posixpath.join(home, ".gitconfig")
        yield posixpath.join(home, ".config/git/config")


def git_directory(worktree: str, read: Read = read_real) -> str:
    """Return the directory of a repository: `.git`, or the directory that the file `.git` names."""
    place = posixpath.join(worktree, ".git")
    text = read(place)
    if text is None or not text.startswith("gitdir:"):
        return place
    return posixpath.normpath(posixpath.join(worktree, text.removeprefix("gitdir:").strip()))


def common_directory(directory: str, read: Read = read_real) -> str:
    """Return the directory with the configuration and objects of a repository: `directory`, or the one that its `commondir` file names."""
    text = read(posixpath.join(directory, "commondir"))
    return posixpath.normpath(posixpath.join(directory, text.strip())) if text is not None else directory


class _Reader:
    def __init__(self, worktree: str, home: str, read: Read) -> None:
        self._worktree = worktree
        self._home = home
        self._read = read
        self._seen: set[str] = set()
        self.paths: set[NamedPath] = set()

    def read_file(self, path: str) -> None:
        if path in self._seen or len(self._seen) > _MOST_INCLUDES * 2:
            return
        self._seen.add(path)
        text = self._read(path)
        for key, value in parse(text) if text is not None else ():
            if key == "include.path" or (key.startswith("includeif.") and key.endswith(".path")):
                included = self._absolute(value, posixpath.dirname(path))
                self.paths.add(NamedPath(included))
                self.read_file(included)
            elif key == "core.hookspath":
                hooks = self._absolute(value, self._worktree)
                self.paths.add(NamedPath(hooks, flat=contains(hooks, self._worktree)))
            elif not _is_data(key):
                self.paths.update(self._named(value, (self._worktree, posixpath.dirname(path))))

    def _named(self, value: str, places: Iterable[str]) -> Iterator[NamedPath]:
        for word in {value, *_words(value)}:
            plain = "/" not in word and not word.startswith((".", "~"))
            for place in places:
                path = self._absolute(word, place)
                if not contains(path, self._worktree):  # a word such as "." names no program
                    yield NamedPath(path, exact=plain)

    def _absolute(self, word: str, place: str) -> str:
        if word.startswith("~/") and self._home:
            word = self._home + word[1:]
        return posixpath.normpath(posixpath.join(place, word))


def _words(value: str) -> Iterator[str]:
    """Yield the words of a value that may be paths. If the value has variables, also yield the part of each word after its first slash."""
    for word in value.translate({ord(character): " " for character in _SEPARATORS}).split():
        yield word
        rest = word.partition("/")[2]
        if "$" in value and rest:
            yield rest


def _is_data(key: str) -> bool:
    if key.startswith(("remote.", "submodule.")):
        return key.rpartition(".")[2] in _DATA_OF_REMOTES
    return key.startswith(_DATA) or key in _DATA_KEYS
