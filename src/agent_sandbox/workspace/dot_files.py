"""Find the dot-files and dot-directories of a home that a run hides: all but those that `policy.secrets` lists as harmless.

Programs that the caller's PATH names stay visible, with the libraries beside them, and so do projects in a hidden directory. Of such a
directory only the rest is hidden. An entry that appears after the listing is visible until the next run, unless its name is listed.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress

from agent_sandbox._fast.values import dataclass
from agent_sandbox.policy.paths import ancestors, contains
from agent_sandbox.policy.secrets import READ_IN_HOME, SHOWN_IN_HOME, UNLISTED, WITH_A_TOKEN, FoundMask
from agent_sandbox.workspace.secret_search import SearchMemory, content_secret

_BESIDE_PROGRAMS = ("lib", "lib32", "lib64", "libexec", "include", "share", "pyvenv.cfg")  # of the directory that `bin` lies in
_MOST_LINKS = 2000  # in one directory of PATH


def hidden_in_home(
    home: str, memory: SearchMemory, *, projects: Iterable[str], programs: Iterable[str], hidden: Collection[str]
) -> Iterator[FoundMask]:
    """Yield a mask for each hidden entry of a home.

    `projects` stay visible, and the trees and files in `programs`. `hidden` are paths that have a mask already. A home that cannot be
    listed yields nothing: its owner, the guest, is denied the listing, too.
    """
    listed = {os.path.join(home, name) for name in SHOWN_IN_HOME}
    mixed = {above for path in listed for above in ancestors(path)[1:]}  # such as .local/share, of which a part is shown
    projects, programs = _inside(home, projects), _inside(home, programs)
    shown = {*listed, *projects, *(path for path in programs if path not in mixed)}
    way = {above for path in shown for above in ancestors(path)[1:]}
    if home != "/":  # an account without a home
        yield from _unlisted(home, _Shown(home, shown, way), frozenset(hidden), top=True)
    for name in READ_IN_HOME:
        path = os.path.join(home, name)
        if path not in hidden and os.path.lexists(path) and (found := content_secret(path, memory)):
            yield FoundMask(path, WITH_A_TOKEN, remark=f"it holds {found}")


def program_places(search_path: str, *prefixes: str) -> tuple[str, ...]:
    """Return what the programs of a search path need: their directories, the libraries beside them, and the targets of links.

    `prefixes` are whole installations, such as the interpreter's own.
    """
    places = dict.fromkeys(prefixes)
    for directory in search_path.split(os.pathsep):
        if os.path.isabs(directory) and "/." in directory:  # only what lies in a dot-directory could be hidden
            places |= dict.fromkeys((os.path.normpath(directory), *_beside(os.path.normpath(directory))))
            places |= dict.fromkeys(_targets(directory))
    return tuple(places)


def _targets(directory: str) -> Iterator[str]:
    with suppress(OSError), os.scandir(directory) as entries:
        for _, entry in zip(range(_MOST_LINKS), entries, strict=False):
            if entry.is_symlink():
                real = os.path.realpath(entry.path)
                yield real
                if os.path.basename(os.path.dirname(real)) in ("bin", "sbin"):
                    yield from _beside(os.path.dirname(real))


def _beside(directory: str) -> Iterator[str]:
    if os.path.basename(directory) in ("bin", "sbin"):
        yield from (os.path.join(os.path.dirname(directory), name) for name in _BESIDE_PROGRAMS)


def _inside(home: str, paths: Iterable[str]) -> list[str]:
    """Return the paths that lie in a home, as names below it, also if the home is known by a link."""
    real = os.path.realpath(home)
    names = [home + path[len(real) :] if contains(real, path) else path for path in paths]
    return [path for path in names if path.startswith(f"{home}/")]


@dataclass(frozen=True)
class _Shown:
    """What a home shows, and the directories on the way to it."""

    home: str
    paths: set[str]
    way: set[str]

    def hides_target(self, target: str) -> bool:
        """Return whether to hide a link, and with it what it leads to. Not if that is shown, on the way to it, or outside the home.

        Programs and other people's files lie outside the home. There, what a link leads to is as visible as anything beside it.
        """
        return contains(self.home, target) and target not in self.way and not any(above in self.paths for above in ancestors(target))


def _unlisted(directory: str, shown: _Shown, hidden: frozenset[str], *, top: bool) -> Iterator[FoundMask]:
    try:
        with os.scandir(directory) as entries:
            names = sorted(entry.name for entry in entries)
    except OSError:
        return
    for name in names:
        path = f"{directory}/{name}"
        if (top and not name.startswith(".")) or path in shown.paths or path in hidden:
            continue
        if path in shown.way and os.path.isdir(path):
            yield from _unlisted(path, shown, hidden, top=False)
        elif not os.path.islink(path) or shown.hides_target(os.path.realpath(path)):
            yield FoundMask(path, UNLISTED)


__all__ = ["hidden_in_home", "program_places"]
