"""Find the other names that symbolic links give to a file.

With the link `.github -> ci`, the file `ci/workflows/x.yml` is a workflow. A protected name counts through links, too, so each changed path
is judged by all its names. Pure: the caller gives all links of the tree after the promotion, real and new.

Links may form a dense graph, and loops, so names are not listed one by one. Instead, each entry has a state, which sums up all its names.
It is computed from the states of the directories that contain the entry or a link to it, until no state changes any more.

Names are compared folded, as everywhere in `protected`. Links outside the project that lead back into it are not followed, except real
ones, which the caller resolves.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable, Mapping

from agent_sandbox._fast.values import dataclass
from agent_sandbox.policy.paths import contains
from agent_sandbox.workspace.changes import Change
from agent_sandbox.workspace.escape import components
from agent_sandbox.workspace.nodes import EntryType
from agent_sandbox.workspace.protected import DIRECTORIES, GIT, HISTORY, RECORDS, classes_of_name, classes_of_path

_MOST_LINKS = 40  # the kernel's limit
_MOST_STEPS = 500_000  # links followed, for all links together: a guest may make long chains
_SECOND: dict[str, tuple[tuple[str, str], ...]] = {}  # by the first of two nested names: the second ones, with their classes
for _nested, _kind in DIRECTORIES.items():
    if "/" in _nested:
        _first, _, _name = _nested.partition("/")
        _SECOND[_first] = (*_SECOND.get(_first, ()), (_name, _kind))


@dataclass(frozen=True)
class Followed:
    """The result of following a link. `path` is its absolute end; None if it leads out of the project.

    `via` are all links on the way, the first one included.
    """

    path: str | None
    via: frozenset[str]
    outside: str = ""  # for a link that leads out: the path at which it left, with the rest of its target


@dataclass(frozen=True)
class _State:
    """The facts that decide the protected classes of an entry, collected from all its names.

    `last` are the last components of the names, `around` the classes of the directories that it lies in, and `systems` the version control
    systems whose directory it is.
    """

    last: frozenset[str] = frozenset()
    around: frozenset[str] = frozenset()
    systems: frozenset[str] = frozenset()  # systems of version control whose directory it is, by one of its names

    def joined(self, other: _State) -> _State:
        return _State(self.last | other.last, self.around | other.around, self.systems | other.systems)

    def entered(self, label: str) -> _State:
        """Return the state of the entry called `label` in this directory."""
        state = self
        for name in components(label):
            around = set(state.around)
            around.update(kind for each in state.last if (kind := DIRECTORIES.get(f"{each}/{name}")))
            if kind := DIRECTORIES.get(name):
                around.add(kind)
            around.update(HISTORY if name in RECORDS[system] else GIT for system in state.systems)
            if HISTORY in around and name == "config":
                around.add(GIT)
            told = name in _SECOND or classes_of_name(name)  # other names would only make states large
            state = _State(frozenset({name} if told else ()), frozenset(around), frozenset({name} & RECORDS.keys()))
        return state

    def classes(self) -> frozenset[str]:
        return self.around.union(*(classes_of_name(name) for name in self.last if name not in RECORDS))


class LinkedNames:
    """Finds the other names that links give to the entries of a tree, and the protected classes of these names.

    `links` has the target of each link of the tree after the promotion, by absolute path. `names` returns the names in a directory. `back`
    returns the real end of a link that leaves the project.
    """

    def __init__(
        self,
        project: str,
        links: Mapping[str, str],
        names: Callable[[str], Iterable[str]],
        back: Callable[[str], str | None] = lambda path: None,
    ) -> None:
        self._project = project
        self._links = links
        self._names = names
        self._back = back
        self._followed: dict[str, Followed] = {}
        self._to: dict[str, list[str]] = {}
        self._through: dict[str, list[str]] = {}
        self.complete = True  # whether every link was followed
        steps = 0
        for path in links:
            end = self._followed[path] = self._resolved(path)
            steps += len(end.via)
            if steps > _MOST_STEPS:
                self.complete = False
                break
            if end.path is not None:
                self._to.setdefault(self._key(end.path), []).append(path)
            for other in end.via:
                self._through.setdefault(other, []).append(path)
        self._linked: dict[str, bool] = {"": "" in self._to}
        self._states: dict[str, _State] = {}
        self._names_given: dict[str, frozenset[str]] = {}

    def follow(self, path: str, target: str | None = None) -> Followed:
        """Follow all links in a path, and return its end. With `target`, the path itself counts as a link to this target."""
        return (self._followed.get(path) if target is None else None) or self._resolved(path, target)

    def through(self, path: str) -> list[str]:
        """Return all links that lead through the link at `path`, this link included."""
        return self._through.get(path, [])

    def called(self, path: str) -> frozenset[str]:
        """Return the folded file names of the links that lead to an entry."""
        return (
            frozenset(components(posixpath.basename(link))[-1] for link in self._to.get(self._key(path), ())) if self._to else frozenset()
        )

    def classes(self, change: Change) -> frozenset[str]:
        """Return the protected classes of a change under its other names. For a link, add the classes of the names that it gives."""
        if not self._links and not is_link(change):
            return frozenset()
        key = self._key(change.path)
        classes: set[str] = set()
        if self._is_linked(key):
            state = self._state(key)
            classes |= state.classes()
            classes |= _of_system(state, change)
        if is_link(change):
            classes |= self._given(change)
        return frozenset(classes)

    def _given(self, change: Change) -> set[str]:
        """Return the protected classes of the further names under which entries can be reached through a changed link."""
        classes: set[str] = set()
        for path in self.through(change.path):
            if path not in self._names_given:
                self._names_given[path] = self._given_by(path, self._followed[path])
            classes |= self._names_given[path]
        if change.before is not None and change.before.type is EntryType.SYMLINK:
            classes |= self._given_by(change.path, self._resolved(change.path, change.before.target))
        return classes

    def _given_by(self, path: str, end: Followed) -> frozenset[str]:
        """Return the protected classes that an entry (`end`) gets because the link at `path` leads to it."""
        directory, label = posixpath.split(path)
        state = self._state(self._key(directory)).entered(label)
        classes = {*state.classes(), *classes_of_path(self._key(path) or "/")}
        seconds = [pair for last in state.last for pair in _SECOND.get(last, ())]
        if seconds and end.path is not None:
            there = {components(name)[-1] for name in self._names(end.path)}
            classes.update(kind for name, kind in seconds if name in there)
        return frozenset(classes)

    def _resolved(self, path: str, target: str | None = None) -> Followed:
        inside = [part for part in posixpath.dirname(path)[len(self._project.rstrip("/")) :].split("/") if part]
        if not contains(self._project, path):
            return Followed(None, frozenset())
        todo = [posixpath.basename(path)] if path != self._project else []
        via: set[str] = set()
        if target is not None:
            via.add(path)
            begun = self._steps(target, inside)
            if begun is None:
                return self._left(path, target, inside, [], via)
            todo = begun
        followed = 0
        while todo:
            step = todo.pop()
            if step == "..":
                if not inside:
                    return self._left(path, "..", inside, todo, via)
                inside.pop()
                continue
            inside.append(step)
            here = posixpath.join(self._project, *inside)
            onward = self._links.get(here)
            if onward is None:
                continue
            inside.pop()
            via.add(here)
            followed += 1
            steps = self._steps(onward, inside)
            if steps is None:
                return self._left(here, onward, inside, todo, via)
            if followed > _MOST_LINKS:
                return Followed(None, frozenset(via))
            todo += steps
        return Followed(posixpath.join(self._project, *inside), frozenset(via))

    def _left(self, link: str, target: str, inside: list[str], todo: list[str], via: set[str]) -> Followed:
        outside = posixpath.normpath(posixpath.join(self._project, *inside, target, *reversed(todo)))
        back = self._back(link)
        if back is not None and contains(self._project, back):
            return Followed(posixpath.normpath(posixpath.join(back, *reversed(todo))), frozenset(via), outside)
        return Followed(None, frozenset(via), outside)

    def _steps(self, target: str, inside: list[str]) -> list[str] | None:
        if target.startswith("/"):
            if not contains(self._project, target):
                return None
            inside.clear()
            target = target[len(self._project.rstrip("/")) :]
        return [part for part in reversed(target.split("/")) if part not in ("", ".")]

    def _key(self, path: str) -> str:
        """Return the folded path relative to the project; "" for the project itself."""
        below = path[len(self._project.rstrip("/")) :].strip("/") if contains(self._project, path) else path.strip("/")
        return "/".join(components(below)) if below else ""

    def _is_linked(self, key: str) -> bool:
        """Return whether a link leads to an entry, or to a directory above it."""
        entry, below = key, list[str]()
        while entry not in self._linked and entry not in self._to:
            below.append(entry)
            entry = posixpath.dirname(entry)
        linked = self._linked.setdefault(entry, True)
        self._linked |= dict.fromkeys(below, linked)
        return linked

    def _state(self, key: str) -> _State:
        """Return the state of an entry, and compute the states of all entries that it depends on."""
        if key in self._states:
            return self._states[key]
        entries: dict[str, list[tuple[str, str]]] = {}
        todo = [key]
        while todo:
            entry = todo.pop()
            if entry in entries or entry in self._states:
                continue
            ways = [(self._key(posixpath.dirname(link)), posixpath.basename(link)) for link in self._to.get(entry, ())]
            entries[entry] = [*ways, posixpath.split(entry)] if entry else ways
            todo += [directory for directory, _ in entries[entry]]
        found = dict.fromkeys(entries, _State())
        inside: dict[str, list[tuple[str, str]]] = {}
        for entry, ways in entries.items():
            for directory, label in ways:
                inside.setdefault(directory, []).append((entry, label))
        waiting = list(inside)
        while waiting:
            directory = waiting.pop()
            above = found.get(directory) or self._states[directory]
            for entry, label in inside.get(directory, ()):
                state = found[entry].joined(above.entered(label))
                if state != found[entry]:
                    found[entry] = state
                    waiting.append(entry)
        self._states |= found
        return self._states[key]


def is_link(change: Change) -> bool:
    """Return whether a change makes, changes or removes a symbolic link."""
    return any(node is not None and node.type is EntryType.SYMLINK for node in (change.before, change.after))


def _of_system(state: _State, change: Change) -> set[str]:
    if not state.systems:
        return set()
    directory = change.after is not None and change.after.type is EntryType.DIRECTORY
    return {HISTORY if directory else GIT}
