"""Find the dot-files and dot-directories of a home that a run hides: all but those that `policy.secrets` lists as harmless.

Other files directly in the home are hidden only if they hold a secret.

Programs in the caller's PATH, the libraries beside them, and projects stay visible. If they lie in a hidden directory, only the rest of
that directory is hidden. An entry that appears after the listing is visible until the next run, unless its name is listed.
"""

from __future__ import annotations

import os

from agent_sandbox._fast.contexts import suppress
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.policy.secret_names import suspicion_of
from agent_sandbox.policy.secrets import (
    FOUND_IN_HOME,
    HOMES_OF_PROGRAMS,
    OF_A_PROGRAM,
    READ_IN_HOME,
    SHOWN_IN_HOME,
    UNLISTED,
    WITH_A_TOKEN,
    FoundMask,
)
from agent_sandbox.workspace.secret_search import SearchMemory, content_secret, holds_secret

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

_BESIDE_PROGRAMS = ("lib", "lib32", "lib64", "libexec", "include", "share", "pyvenv.cfg")  # of the directory that `bin` lies in
_MOST_LINKS = 2000  # in one directory of PATH
_MOST_NAMED = 2000  # entries to compare with a name that has a `*`


def hidden_in_home(
    home: str, memory: SearchMemory, *, projects: Iterable[str], programs: Iterable[str], hidden: Collection[str]
) -> Iterator[FoundMask]:
    """Yield a mask for each hidden entry of a home.

    `projects` stay visible, and the trees and files in `programs`. `hidden` are paths that have a mask already. A home that cannot be
    listed yields nothing: the guest, who is the same user, cannot list it either.
    """
    projects = tuple(projects)
    if home != "/":  # an account without a home
        kept = {*_inside(home, projects), *(name for name in _inside(home, programs) if name not in _MIXED)}
        shown = _Shown(home, _LISTED | kept, _MIXED | _parents(kept))
        yield from _unlisted("", shown, hidden)
        for directory in HOMES_OF_PROGRAMS:
            if directory not in shown.names:
                yield from _unlisted(directory, shown, hidden, why=OF_A_PROGRAM)
        if home not in projects:
            yield from _secrets_at_top(home, memory, hidden)
    for why, patterns in FOUND_IN_HOME.items():
        yield from (FoundMask(path, why) for pattern in patterns for path in _named(home, pattern) if path not in hidden)
    read = dict.fromkeys(path for pattern in READ_IN_HOME for path in _named(home, pattern))
    for path in read:
        if path not in hidden and (found := content_secret(path, memory)):
            yield FoundMask(path, WITH_A_TOKEN, remark=f"it holds {found}")


def program_places(search_path: str, *prefixes: str) -> tuple[str, ...]:
    """Return the paths that the programs of a search path need: their directories, the libraries beside them, and the targets of links.

    Paths outside dot-directories are left out, because they are never hidden. `prefixes` are added as given: whole installations, such as
    that of the interpreter.
    """
    places = dict.fromkeys(prefixes)
    for directory in search_path.split(os.pathsep):
        if os.path.isabs(directory) and "/." in directory:  # only what lies in a dot-directory could be hidden
            places |= dict.fromkeys((os.path.normpath(directory), *_beside(os.path.normpath(directory)), *_targets(directory)))
    return tuple(places)


def _targets(directory: str) -> Iterator[str]:
    seen: set[str] = set()
    with suppress(OSError), os.scandir(directory) as entries:
        for _, entry in zip(range(_MOST_LINKS), entries, strict=False):
            if entry.is_symlink() and "/." in (real := os.path.realpath(entry.path)):
                yield real
                if (parent := os.path.dirname(real)) not in seen:
                    seen.add(parent)
                    yield from _beside(parent)


def _beside(directory: str) -> Iterator[str]:
    if os.path.basename(directory) in ("bin", "sbin"):
        yield from (os.path.join(os.path.dirname(directory), name) for name in _BESIDE_PROGRAMS)


def _named(home: str, pattern: str) -> Iterator[str]:
    """Yield the entries of a home that a name stands for. Its last part may have one `*`."""
    directory, _, name = f"{home}/{pattern}".rpartition("/")
    start, star, end = name.partition("*")
    if not star:
        if os.path.lexists(f"{directory}/{name}"):
            yield f"{directory}/{name}"
        return
    with suppress(OSError), os.scandir(directory) as entries:
        for _, entry in zip(range(_MOST_NAMED), entries, strict=False):
            if entry.name.startswith(start) and entry.name.endswith(end):
                yield entry.path


def _secrets_at_top(home: str, memory: SearchMemory, hidden: Collection[str]) -> Iterator[FoundMask]:
    with suppress(OSError), os.scandir(home) as entries:
        for entry in entries:
            if entry.name.startswith(".") or entry.path in hidden or not entry.is_file(follow_symlinks=False):
                continue
            suspicion = suspicion_of(entry.name)
            if suspicion is not None and holds_secret(entry.path, suspicion, memory):
                yield FoundMask(entry.path, suspicion.why)


def _inside(home: str, paths: Iterable[str]) -> Iterator[str]:
    """Yield those of the paths that lie in a home, relative to it. The home may be a link."""
    tops = dict.fromkeys((f"{home}/", f"{os.path.realpath(home)}/"))
    for path in paths:
        yield from (path[len(top) :] for top in tops if path.startswith(top))


def _parents(names: Iterable[str]) -> frozenset[str]:
    parents: set[str] = set()
    for name in names:
        while (name := name.rpartition("/")[0]) and name not in parents:
            parents.add(name)
    return frozenset(parents)


_LISTED = frozenset(SHOWN_IN_HOME)
_MIXED = _parents(SHOWN_IN_HOME)  # such as .local/share, of which a part is shown


@dataclass(frozen=True)
class _Shown:
    """The visible names in a home (`names`), and the directories above them (`way`). Both are relative to the home."""

    home: str
    names: frozenset[str]
    way: frozenset[str]

    def hides_target(self, target: str) -> bool:
        """Return whether to hide a link: its target lies in the home, is not visible, and has nothing visible below it.

        Targets outside the home do not count: programs and files of other people lie there, and are as visible as anything beside them.
        """
        return any(
            name not in self.way and name not in self.names and self.names.isdisjoint(_parents((name,)))
            for name in _inside(self.home, (target,))
        )


def _unlisted(directory: str, shown: _Shown, hidden: Collection[str], *, why: str = UNLISTED) -> Iterator[FoundMask]:
    """Yield the masks for entries of one directory of the home. "" is the home itself, in which only dot-files are hidden."""
    try:
        with os.scandir(f"{shown.home}/{directory}") as entries:
            names = sorted(entry.name for entry in entries)
    except OSError:
        return
    for entry in names:
        name = f"{directory}/{entry}" if directory else entry
        path = f"{shown.home}/{name}"
        if not (directory or entry.startswith(".")) or name in shown.names or path in hidden:
            continue
        if name in shown.way and os.path.isdir(path):
            yield from _unlisted(name, shown, hidden, why=why)
        elif not os.path.islink(path) or shown.hides_target(os.path.realpath(path)):
            yield FoundMask(path, why)


__all__ = ["hidden_in_home", "program_places"]
