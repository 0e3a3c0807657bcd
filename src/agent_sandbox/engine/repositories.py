"""Carry the commits of a sandbox over to the real repository.

The guest's files below `.git` are never copied. Its new objects are checked (`git_objects`) and written anew. References, HEAD, the index
and the logs are compared by meaning with those of the clone and with the real ones. The host writes them as ordinary changes of the
promotion, so that drift, undo and recovery work for them as for any file. git is not run, so no hook and no setting takes effect.

Hooks, configuration and attributes are no history, because git runs or obeys them. They stay ordinary changes of a protected kind.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import cached_property

from agent_sandbox._fast.values import dataclass, field
from agent_sandbox.engine.git_objects import GuestObjects, RuntimeOf
from agent_sandbox.errors import WorkspaceError
from agent_sandbox.policy.paths import contains
from agent_sandbox.workspace import protected
from agent_sandbox.workspace.changes import Change, ChangeSet, Contents, Kind
from agent_sandbox.workspace.drift import MovedOn
from agent_sandbox.workspace.escape import visible
from agent_sandbox.workspace.git.index import IndexEntry, merge_indexes, read_index, same_entries, write_index
from agent_sandbox.workspace.git.objects import DIRECTORY, LINK, REPOSITORY, Commit, ObjectFiles, hash_name
from agent_sandbox.workspace.git.packs import Damaged
from agent_sandbox.workspace.git.records import LOG, PACKED, Meaning, of_index, of_reference
from agent_sandbox.workspace.git.repository import (
    Files,
    RepositoryPlace,
    added_lines,
    find_repositories,
    is_reference,
    objects_added,
    read_packed,
    references,
    without_packed,
)
from agent_sandbox.workspace.nodes import EntryType, Node
from agent_sandbox.workspace.promotion.plan import Refusal, relative
from agent_sandbox.workspace.promotion.target import Surprise, TargetTree
from agent_sandbox.workspace.reality import Base, Bases

_UNKNOWN = "?"
_OPERATIONS = ("MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD", "REBASE_HEAD", "AUTO_MERGE", "BISECT_HEAD")
_MOST_ANCESTORS = 5_000
_MOST_ENTRIES = 300_000  # of the trees of one branch that are compared
_LONGEST_PATH = 4096
_MARKS = ("/HEAD", "/index", "/refs/", "/objects/", "/packed-refs", "/logs/")  # of paths that may be files of a repository
_MOST_TIPS = 500  # branches whose commits are not new
_NAMED = 5
_TITLES = 3


@dataclass
class CarriedRepositories:
    """The git history of a sandbox, as changes that can be promoted.

    `raw` are the changed git files of the sandbox that are not promoted themselves; `changes` take their place, with the new `contents` by
    path. `moved` are the paths whose real value has changed, too. `words` are sentences about commits and branches. `meanings` are for an
    undo; see `git.records`.
    """

    raw: set[str] = field(default_factory=set)
    changes: dict[str, Change] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)
    moved: dict[str, MovedOn] = field(default_factory=dict)
    classes: dict[str, frozenset[str]] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    objects: list[tuple[str, GuestObjects]] = field(default_factory=list)
    directories: list[str] = field(default_factory=list)  # to be made for references and logs
    meanings: dict[str, Meaning] = field(default_factory=dict)
    facts: list[str] = field(default_factory=list)  # what the sandbox has changed in the history, whatever the real repository has

    def sentences(self) -> tuple[str, ...]:
        """Return sentences for people about the history that is promoted and the history that is refused."""
        return (*self.words, *(visible(f"git: {each.path}: {each.why}") for each in self.refused))

    def prepare(self, root: str) -> None:
        """Write all new objects to the real repositories below a root, and make directories for references. Raises `WorkspaceError`.

        Nothing refers to the new objects yet, so they do no harm if the promotion fails afterwards. Links in paths are not followed.
        """
        if not self.objects:
            return
        try:
            with TargetTree(root) as tree:
                for directory, objects in self.objects:
                    objects.write(tree.directory(relative(directory, root)))
                for path in self.directories:
                    _make_directory(tree.directory(relative(os.path.dirname(path), root)), os.path.basename(path))
        except OSError as error:
            why = f"cannot write the objects of new commits: {error.strerror or error}; no file and no reference was changed"
            raise WorkspaceError(why, hint="the changes are still in the sandbox; see who may write to the repository") from error
        except Surprise as error:
            why = f"{os.path.join(root, error.path)!r}: {error.why}; no file and no reference was changed"
            raise WorkspaceError(f"cannot write the objects of new commits: {why}", hint="look at the changes again") from error

    def drop(self, paths: Collection[str]) -> None:
        """Leave out the changes at these paths."""
        for path in paths:
            self.changes.pop(path, None)


def _make_directory(above: int, name: str) -> None:
    status = os.fstat(above)
    with suppress(FileExistsError):
        os.mkdir(name, status.st_mode & 0o7777, dir_fd=above)
        with suppress(PermissionError):
            os.chown(name, status.st_uid, status.st_gid, dir_fd=above, follow_symlinks=False)


@dataclass(frozen=True)
class HistorySource:
    """The data that the git history of a sandbox is read from: its changes, their contents, and the original files below them.

    `bases` is None if the real files are still the originals. `masks` are the paths that are hidden from the sandbox. `runtime` returns the
    runtime in which objects are read.
    """

    project: str
    changes: ChangeSet
    contents: Contents
    bases: Bases | None
    open_base: Callable[[Base], int]
    masks: Collection[str]
    runtime: RuntimeOf


def carry_history(source: HistorySource, chosen: Callable[[Change], bool], until_the_end: ExitStack) -> CarriedRepositories:
    """Return the git history of a sandbox as changes. `chosen` returns whether a change is to be promoted.

    A repository is carried over as a whole as soon as one of its changed history files is chosen. A repository that cannot be carried over
    is in `refused`. The result can be used until the stack `until_the_end` is closed.
    """
    carried = CarriedRepositories()
    if not any(mark in change.path for change in source.changes for mark in _MARKS):
        return carried
    files = until_the_end.enter_context(Files(source.changes, source.contents, source.bases, source.open_base))
    shared: set[str] = set()
    try:
        places = list(find_repositories(source.project, source.changes, files))
    except (Damaged, OSError) as error:
        carried.refused.append(Refusal(source.project, f"its repositories cannot be read: {error}"))
        return carried
    for place in places:
        mine = {each.path: each for each in source.changes if place.history_of(each.path) and each.path not in carried.raw}
        if not any(chosen(change) for change in mine.values()):
            continue
        part = _Carrier(place, source, files, mine, chosen, has_references=place.common not in shared)
        shared.add(place.common)
        try:
            part.carry(until_the_end)
        except (Damaged, OSError) as error:
            carried.refused.append(Refusal(place.directory, f"its commits cannot be carried over: {error}"))
            carried.raw |= mine.keys()
            continue
        part.add_to(carried)
    return carried


class _TooMuch(Exception):
    """There is more to compare than anybody would read."""


class _Carrier:
    """Collects the changes that carry the git history of one repository over to the real one."""

    def __init__(
        self,
        place: RepositoryPlace,
        source: HistorySource,
        files: Files,
        mine: Mapping[str, Change],
        chosen: Callable[[Change], bool],
        *,
        has_references: bool,
    ) -> None:
        self.place, self.source, self.files, self.mine, self.chosen = place, source, files, mine, chosen
        self.has_references = has_references  # no other worktree of the same repository has carried them over already
        self.is_new = files.real(f"{place.directory}/HEAD") is None
        self.made: dict[str, bytes | None] = {}  # the new content of each file; None if it goes
        self.moved: dict[str, MovedOn] = {}
        self.classes: dict[str, frozenset[str]] = {}
        self.words: list[str] = []
        self.refused: list[Refusal] = []
        self.meanings: dict[str, Meaning] = {}
        self.facts: list[str] = [place.directory]
        self._known_commits: dict[str, list[tuple[str, Commit]]] = {}

    def carry(self, until_the_end: ExitStack) -> None:
        """Compare the repository in the sandbox with the real one, and collect the files to write. Raises `Damaged` and OSError."""
        place, files = self.place, self.files
        for path in (f"{place.directory}/index.lock", f"{place.directory}/HEAD.lock", f"{place.common}/packed-refs.lock"):
            if files.node(path) is not None:
                raise Damaged(f"git is at work there, or has left {path!r} behind")
        values = self._all_references() if self.has_references else {}
        head = self._text("HEAD")
        index = self._index()
        logs = {path: self._log(path) for path in self.mine if f"{place.directory}/logs/" in path or f"{place.common}/logs/" in path}
        wanted = [mine for _, mine, _ in (*values.values(), head) if mine and not mine.startswith("ref: ")]
        wanted += index.wanted
        for name in _OPERATIONS:
            wanted += (files.guest(f"{place.directory}/{name}") or b"").decode("ascii", "replace").split()
        for value in wanted:
            if len(value) != 2 * self._width or value.strip("0123456789abcdef"):
                raise Damaged(f"{value[:80]!r} is no name of an object")
        self.facts += [f"{path} {line.decode('utf-8', 'surrogateescape')}" for path in sorted(logs) for line in logs[path]]
        logged = {name.decode() for lines in logs.values() for line in lines for name in line.split(b" ", 2)[:2] if name.strip(b"0")}
        real = ObjectFiles(place.objects, place.algorithm)
        self.objects = until_the_end.enter_context(GuestObjects(real, place.algorithm))
        missing = self.objects.fill(wanted, logged, list(objects_added(place, self.mine)), self.source.contents, self.source.runtime)
        self._carry_references(values)
        self._carry_head(head)
        self._carry_index(index)
        for path, lines in logs.items():
            self._carry_log(path, [line for line in lines if missing.isdisjoint(part.decode() for part in line.split(b" ", 2)[:2])])
        self._refuse_hidden({mine for _, mine, _ in (*values.values(), head) if mine and not mine.startswith("ref: ")})

    @property
    def _width(self) -> int:
        return 20 if self.place.algorithm == "sha1" else 32

    def _all_references(self) -> dict[str, tuple[str | None, str | None, str | None]]:
        """Return the values of each reference that the sandbox changed: the original one, the sandbox's, and the real one now."""
        before, mine = (references(self.place, read, self.files) for read in (self._base, self.files.guest))
        real = self._real_references
        changed: dict[str, tuple[str | None, str | None, str | None]] = {}
        for name in sorted({*before, *mine, *real}):
            each = before.get(name), mine.get(name), real.get(name)
            if each[1] != each[0]:
                self.facts.append(f"{name} {each[1]}")
            if each[1] not in (each[0], each[2]):
                if not is_reference(name) or ((each[1] or "").startswith("ref: ") and not is_reference((each[1] or "")[5:])):
                    raise Damaged(f"{name!r} is no valid reference")
                changed[name] = each
        return changed

    @cached_property
    def _real_references(self) -> dict[str, str]:
        return references(self.place, self.files.real, self.files)

    def _base(self, path: str) -> bytes | None:
        """Return the original content of a file; `_UNKNOWN` if it is not known."""
        try:
            return self.files.base(path)
        except LookupError:
            return _UNKNOWN.encode()

    def _text(self, name: str) -> tuple[str | None, str | None, str | None]:
        """Return the contents of a small git file: the original one, the sandbox's, and the real one now.

        The second is None if the sandbox did not change the file, or if its content is the real one.
        """
        path = f"{self.place.directory}/{name}"
        contents = self._base(path), self.files.guest(path), self.files.real(path)
        texts = tuple(None if each is None else each.decode("utf-8", "surrogateescape").strip() for each in contents)
        if texts[1] != texts[0]:
            self.facts.append(f"{name} {texts[1]}")
        return (texts[0], None, texts[2]) if texts[1] in (texts[0], texts[2]) else (texts[0], texts[1], texts[2])

    def _index(self) -> _MergedIndex:
        path = f"{self.place.directory}/index"
        change = self.mine.get(path)
        if change is None or change.after is None:
            return _MergedIndex({}, {}, (), ())
        algorithm = self.place.algorithm
        mine = read_index(self.files.guest(path) or b"", algorithm)
        content = self.files.real(path)
        real = read_index(content, algorithm) if content else {}
        try:
            was = self.files.base(path)
            base = read_index(was, algorithm) if was else {}
        except LookupError:
            base = {} if real else mine
        self.facts.append(" ".join(of_index(mine, algorithm)))
        merged, both = merge_indexes(base, mine, real, self._hidden())
        new = tuple(each.name for entries in merged.values() for each in entries if each.mode != 0o160000 and not any(each.status))
        return _MergedIndex(merged, real, tuple(both), new)

    def _hidden(self) -> frozenset[str]:
        """Return the paths in the worktree that are hidden from the sandbox, relative to the worktree."""
        top = self.place.worktree
        return frozenset(mask[len(top) + 1 :] for mask in self.source.masks if top and mask.startswith(f"{top}/"))

    def _log(self, path: str) -> list[bytes]:
        try:
            base = self.files.base(path) or b""
        except LookupError:
            return []
        return added_lines(base, self.files.guest(path) or b"", self._width)

    def _carry_references(self, values: Mapping[str, tuple[str | None, str | None, str | None]]) -> None:
        self._refuse_clashes(values)
        gone: set[str] = set()
        for name, (base, mine, real) in values.items():
            path = f"{self._top_of(name)}/{name}"
            self.meanings[path] = of_reference(name, f"{self.place.common}/packed-refs", real, mine)
            if mine is None:
                gone.add(name)
                self.made[path] = None
                self._drop_log(name)
                self.words.append(f"{_spoken(name)} goes away (it is at {_short(real)})")
            else:
                self.made[path] = f"{mine}\n".encode("utf-8", "surrogateescape")
                self._describe(name, path, base, mine, real)
            if real != base and not (mine and real and self._leads_to(mine, real)):
                short = f"from {_short(base)} to {_short(real)}" if base != _UNKNOWN else f"to {_short(real)}"
                self.moved[path] = MovedOn(Base(path, None), None, reason=f"{_spoken(name)} has moved on in reality, {short}")
        packed = self.files.real(f"{self.place.common}/packed-refs")
        if packed is not None and gone & read_packed(packed).keys():
            self.made[f"{self.place.common}/packed-refs"] = without_packed(packed, frozenset(gone))
            self.meanings[f"{self.place.common}/packed-refs"] = (PACKED,)

    def _refuse_clashes(self, values: Mapping[str, tuple[str | None, str | None, str | None]]) -> None:
        """Raise `Damaged` if a reference would be written below another, or above one: git cannot have both `a` and `a/b`."""
        written = {name for name, (_, mine, _) in values.items() if mine is not None}
        names = {*self._real_references, *written} if written else set()
        for name in names:
            above = name.rpartition("/")[0]
            while above:
                if above in names and not written.isdisjoint((name, above)):
                    raise Damaged(f"{_spoken(above)} and {_spoken(name)} cannot both exist; rename one of them outside")
                above = above.rpartition("/")[0]

    def _drop_log(self, name: str) -> None:
        """Remove the log of a reference that goes away, as git does: it would stand in the way of `name/other`."""
        path = f"{self._top_of(name)}/logs/{name}"
        if self.files.node(path) is not None:
            self.made[path] = None
            self.meanings[path] = (LOG,)

    @cached_property
    def _real_tips(self) -> list[str]:
        """The commits that HEAD and the real branches point to."""
        branches = [value for name, value in self._real_references.items() if name.startswith(("refs/heads/", "refs/remotes/"))]
        head = (self.files.real(f"{self.place.directory}/HEAD") or b"").decode("utf-8", "surrogateescape").strip()
        width = 2 * self._width
        return [each for each in dict.fromkeys((head, *branches[:_MOST_TIPS])) if len(each) == width and self.objects.real.has(each)]

    def _commits(self, tip: str) -> list[tuple[str, Commit]]:
        """Return the commits that lead to a tip and to no real branch."""
        if tip not in self._known_commits:
            self._known_commits[tip] = self.objects.commits_after(tip, self._real_tips)
        return self._known_commits[tip]

    def _top_of(self, name: str) -> str:
        own = name.startswith(("refs/bisect/", "refs/worktree/", "refs/rewritten/"))
        return self.place.directory if own else self.place.common

    def _describe(self, name: str, path: str, base: str | None, mine: str, real: str | None) -> None:
        """Add a sentence about the new value of a reference.

        If its commits have content that no file has after the promotion, add a sentence about that, too, and the protected classes of these
        paths.
        """
        spoken = _spoken(name)
        if name.startswith("refs/replace/"):  # git would show one object in place of another
            self.classes[path] = frozenset({protected.GIT})
        if mine.startswith("ref: "):
            self.words.append(f"{spoken} points to {mine[5:]}")
            return
        commits = self._commits(mine)
        titles = "; ".join(commit.title for _, commit in commits[:_TITLES]) + ("; …" if len(commits) > _TITLES else "")
        number = f"{len(commits):,} commit{'' if len(commits) == 1 else 's'}"
        old = real or (None if base == _UNKNOWN else base)
        if old is None:
            self.words.append(f"{spoken} appears at {_short(mine)}" + (f", with {number}: {titles}" if commits else ""))
        else:
            rewritten = "" if self._leads_to(mine, old) else ", which drops commits that are there now"
            what = f"{number} on {spoken}" if commits else f"{spoken} moves"
            self.words.append(f"{what} ({_short(old)} to {_short(mine)}){rewritten}{f': {titles}' if commits else ''}")
        try:
            unseen = list(self._unseen(commits, mine, old))
        except _TooMuch:
            self.words.append(f"{spoken} has changed more files than are compared")
            self.classes[path] = self.classes.get(path, frozenset()) | {protected.UNEXAMINED}
            return
        if unseen:
            named = ", ".join(text for _, text in unseen[:_NAMED]) + (f" and {len(unseen) - _NAMED:,} more" if len(unseen) > _NAMED else "")
            self.words.append(f"{spoken} has content that no file of this review shows: {named}")
            kinds = frozenset(kind for each, _ in unseen for kind in protected.classes_of_path(each))
            self.classes[path] = self.classes.get(path, frozenset()) | kinds

    def _leads_to(self, tip: str, wanted: str) -> bool:
        """Return whether the commit `wanted` is `tip` or one of its ancestors."""
        todo, seen = [tip], {tip}
        while todo and len(seen) < _MOST_ANCESTORS:
            name = todo.pop(0)
            if name == wanted:
                return True
            try:
                commit = self.objects.commit(name)
            except Damaged:  # beyond the end of a shallow clone
                continue
            new = [parent for parent in commit.parents if parent not in seen] if commit else []
            seen.update(new)
            todo += new
        return False

    def _unseen(self, commits: list[tuple[str, Commit]], mine: str, old: str | None) -> Iterator[tuple[str, str]]:
        """Compare the commit `mine` with the real tree after the promotion. Yield each path that differs, with a text for people.

        Only the paths that the new commits change are compared.
        """
        tip = self.objects.tree_of(mine)
        bottom = old or next((parent for _, commit in commits for parent in commit.parents if parent not in self.objects), None)
        base = self.objects.tree_of(bottom) if bottom else None
        for path, entry in self._compared(tip, base):
            if entry == self._shown(path, entry):
                continue
            if entry is None:
                yield path, f"{path} (deleted)"
            elif entry[0] == REPOSITORY:
                yield path, f"{path} (submodule at {_short(entry[1])})"
            else:
                yield path, f"{path} ({_short(entry[1])}, {self.objects.size(entry[1]):,} bytes)"

    def _compared(self, new: str | None, old: str | None) -> Iterator[tuple[str, tuple[str, str] | None]]:
        """Yield the paths that differ between two trees, with their entry in the new one. Raises `_TooMuch`."""
        todo: list[tuple[str | None, str | None, str]] = [(new, old, "")]
        entries = 0
        while todo:
            new, old, above = todo.pop()
            ours = self.objects.tree(new) if new else {}
            theirs = self.objects.tree(old) if old else {}
            entries += len(ours) + len(theirs) + 1
            if entries > _MOST_ENTRIES or len(above) > _LONGEST_PATH:
                raise _TooMuch
            for name in sorted({*ours, *theirs}):
                mine, real = ours.get(name), theirs.get(name)
                if mine == real:
                    continue
                deep = [each[1] if each is not None and each[0] == DIRECTORY else None for each in (mine, real)]
                if any(deep):
                    todo.append((deep[0], deep[1], f"{above}{name}/"))
                if (mine is not None and mine[0] != DIRECTORY) or (mine is None and real is not None and real[0] != DIRECTORY):
                    yield f"{above}{name}", mine

    def _shown(self, path: str, entry: tuple[str, str] | None) -> tuple[str, str] | None:
        """Return the mode and the object name that git would give the real file at a path after the promotion; None without a file."""
        absolute = f"{self.place.worktree}/{path}" if self.place.worktree else ""
        change = self.files.change(absolute)
        is_chosen = change is not None and self.chosen(change)
        node = change.after if is_chosen and change is not None else self.files.node(absolute) if absolute else None
        if node is None or node.type is EntryType.DIRECTORY:
            return entry if entry is not None and entry[0] == REPOSITORY and node is not None else None
        if node.type is EntryType.SYMLINK:
            return LINK, hash_name("blob", os.fsencode(node.target), self.place.algorithm)
        content = (self.files.guest if is_chosen else self.files.real)(absolute)
        if content is None:
            return None
        return ("100755" if node.mode & 0o100 else "100644"), hash_name("blob", content, self.place.algorithm)

    def _carry_head(self, head: tuple[str | None, str | None, str | None]) -> None:
        base, mine, real = head
        if mine is None:
            return
        path = f"{self.place.directory}/HEAD"
        if mine.startswith("ref: ") and not (is_reference(mine[5:]) and mine.startswith("ref: refs/heads/")):
            raise Damaged("HEAD is no branch")
        self.made[path] = f"{mine}\n".encode("utf-8", "surrogateescape")
        self.words.append(f"HEAD is on {_spoken(mine[5:])}" if mine.startswith("ref: ") else f"HEAD is at {_short(mine)}, on no branch")
        if real != base:
            self.moved[path] = MovedOn(Base(path, None), None, reason="HEAD has moved on in reality")

    def _carry_index(self, index: _MergedIndex) -> None:
        path = f"{self.place.directory}/index"
        if same_entries(index.merged, index.real):
            return
        self.made[path] = write_index(index.merged, self.place.algorithm)
        self.meanings[path] = of_index(index.merged, self.place.algorithm)
        if index.both:
            named = ", ".join(index.both[:_NAMED])
            self.moved[path] = MovedOn(Base(path, None), None, reason=f"these were staged in reality as well: {named}")

    def _carry_log(self, path: str, lines: list[bytes]) -> None:
        if lines:
            self.made[path] = (self.files.real(path) or b"") + b"".join(line + b"\n" for line in lines)
            self.meanings[path] = (LOG,)

    def _refuse_hidden(self, tips: Iterable[str]) -> None:
        """Refuse new commits that change a path which is hidden from the sandbox: the guest has not seen the file that it would replace."""
        hidden = sorted(self._hidden())
        seen: set[str] = set()
        for tip in tips if hidden else ():
            for name, commit in self._commits(tip):
                if name in seen:
                    continue
                seen.add(name)
                parents = [self.objects.commit(parent) for parent in commit.parents]
                for path in hidden:
                    mine = self._entry(commit, path)
                    theirs = [self._entry(parent, path) if parent else None for parent in parents]
                    if (mine in theirs and not (mine is None and any(theirs))) or (mine is None and not theirs):
                        continue
                    deed = "deletes" if mine is None else "adds or changes"
                    remedy = "commit other files alone, or show it to the sandbox with --reveal"
                    why = f"the commit {_short(name)} ({commit.title}) {deed} it, and the sandbox cannot see it; {remedy}"
                    self.refused.append(Refusal(f"{self.place.worktree}/{path}", why))

    def _entry(self, commit: Commit, path: str) -> tuple[str, str] | None:
        entry: tuple[str, str] | None = (DIRECTORY, commit.tree)
        for name in path.split("/"):
            if entry is None or entry[0] != DIRECTORY:
                return None
            entry = self.objects.tree(entry[1]).get(name)
        return entry

    def add_to(self, carried: CarriedRepositories) -> None:
        """Add the collected changes, contents, sentences and refusals to `carried`."""
        raw = set(self.mine)
        if self.is_new:
            keep = {path for path, change in self.mine.items() if _is_directory(change) and not _is_fan(path, self.place.objects)}
            raw -= keep
            for path, content in self.objects.as_files():
                self.made[f"{self.place.objects}/{path}"] = content
        else:
            carried.objects.append((self.place.objects, self.objects))
        for path, made in self.made.items():
            for change in _changes(path, made, self.files, carried.changes, carried.directories, raw):
                if not self.is_new and _is_directory(change):
                    carried.directories.append(change.path)
                else:
                    carried.changes[change.path] = change
            if made is not None:
                carried.contents[path] = made
        for path in self.made:
            if path in carried.changes:
                if path in self.meanings:
                    carried.meanings[path] = self.meanings[path]
                extra = self.classes.get(path, frozenset())
                if not self.is_new:  # the files of a new repository are judged like others: it may be a trap
                    carried.classes[path] = (frozenset() if protected.GIT in extra else frozenset({protected.HISTORY})) | extra
        carried.raw |= raw
        carried.moved.update({path: moved for path, moved in self.moved.items() if path in carried.changes})
        where = "" if self.place.worktree == self.source.project else f" in {self._called()}"
        carried.words += [visible(f"git{where}: {each}") for each in self.words]
        carried.refused += self.refused
        carried.facts += self.facts

    def _called(self) -> str:
        top, project = self.place.worktree or self.place.directory, self.source.project
        return top[len(project) + 1 :] or "the project" if contains(project, top) else top


@dataclass(frozen=True)
class _MergedIndex:
    merged: Mapping[str, tuple[IndexEntry, ...]]
    real: Mapping[str, tuple[IndexEntry, ...]]
    both: tuple[str, ...]
    wanted: tuple[str, ...]


def _is_directory(change: Change) -> bool:
    return change.after is not None and change.after.type is EntryType.DIRECTORY


def _is_fan(path: str, objects: str) -> bool:
    return path.startswith(f"{objects}/") and path[len(objects) + 1 :] not in ("info", "pack")


def _changes(
    path: str, content: bytes | None, files: Files, made: Mapping[str, Change], existing: Collection[str], raw: Collection[str]
) -> Iterator[Change]:
    """Yield the changes that make the missing directories above a file and give it this content. If it is None, delete the file."""
    real = files.node(path)
    if content is None:
        if real is not None:
            yield Change(path, Kind.DELETED, real, None)
        return
    if real is not None and real.type is EntryType.FILE and files.real(path) == content:
        return
    above, missing = os.path.dirname(path), []
    while files.node(above) is None and above not in made and above not in existing and (above in raw or files.change(above) is None):
        missing.append(above)
        above = os.path.dirname(above)
    owner = os.geteuid(), os.getegid()
    for each in reversed(missing):
        yield Change(each, Kind.ADDED, None, Node(EntryType.DIRECTORY, 0o755, *owner))
    if real is None:
        yield Change(path, Kind.ADDED, None, Node(EntryType.FILE, 0o644, *owner, len(content)))
    else:
        yield Change(path, Kind.MODIFIED, real, Node(EntryType.FILE, real.mode, real.uid, real.gid, len(content)))


def _spoken(name: str) -> str:
    """Return the name of a reference for people, such as "main" or "the tag v1"."""
    for start, word in (("refs/heads/", ""), ("refs/tags/", "the tag "), ("refs/remotes/", "the remote branch ")):
        if name.startswith(start):
            return word + name.removeprefix(start)
    return name


def _short(value: str | None) -> str:
    return "nothing" if not value else value[:7] if not value.startswith("ref: ") else value[5:]
