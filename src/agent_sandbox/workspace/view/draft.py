"""The draft of a mount plan: its inputs (the machine's mounts, and the files that an interpreter needs), and the paths hidden in it.

`hide` masks denied and secret paths by name. `select` chooses the entries to copy where a rule cannot be expressed by masks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache

from agent_sandbox._fast.values import dataclass, field, replace
from agent_sandbox.errors import PolicyError
from agent_sandbox.kernel import mountinfo
from agent_sandbox.kernel.mount_plan import (
    Bind,
    Copies,
    Directory,
    Overlay,
    PathMask,
    Step,
)
from agent_sandbox.kernel.mountinfo import Mount
from agent_sandbox.policy.model import FileRules
from agent_sandbox.policy.paths import Beneath, Glob, ancestors
from agent_sandbox.workspace.layers.history import quote_target

MOST_ENTRIES = 10_000
MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Needs:
    """The files of the machine that a language needs. `links` and `contents` are created.

    `trees` and `files` are shown read-only, whatever the rules say. `tools` are shown with them, except for what the rules deny.
    """

    trees: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    contents: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True)
class MachineFacts:
    """The facts about this machine that planning needs."""

    mounts: tuple[Mount, ...]  # visible mounts only
    privileged: bool

    @classmethod
    def look(cls) -> MachineFacts:
        """Return the present facts about this machine."""
        with open("/proc/self/mountinfo", "rb") as file:
            return cls(_visible_mounts(file.read()), os.geteuid() == 0)


@lru_cache(maxsize=4)  # the table hardly ever changes, and its text is the key
def _visible_mounts(table: bytes) -> tuple[Mount, ...]:
    return mountinfo.visible(mountinfo.parse(table))


@dataclass
class Draft:
    """A mount plan in the making."""

    host: MachineFacts
    rules: FileRules
    scratch: int
    steps: list[Step] = field(default_factory=list)
    overlays: list[Overlay] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def contains(directory: str, path: str | None) -> bool:
    """Return whether a path is at or below `directory`."""
    return path is not None and (path == directory or directory == "/" or path.startswith(directory + "/"))


def hide(plan: Draft, needs: Needs) -> None:
    """Hide denied and secret paths wherever they can be reached. Needed trees below them get an overlay of their own."""
    hidden: dict[str, bool] = {}  # path: whether the directory itself stays, emptied
    places = _Places(plan.host)
    for path, stays in _hidden_paths(plan.rules):
        for place in places.of(path):
            hidden[place] = hidden.get(place, False) or stays
    real_needed = {tree: real for tree in needs.trees if os.path.isdir(real := os.path.realpath(tree))}
    kept = [tree for tree, real in real_needed.items() if any(above in hidden for above in ancestors(real))]
    for file in needs.files:
        hidden.pop(file, None)
    files = [path for path in needs.files if _needs_a_bind(path, hidden, plan.steps, [real_needed[tree] for tree in kept])]
    masks: dict[str, list[PathMask]] = {}
    room: dict[str, list[str]] = {}  # mount points below hidden directories
    room_for_files: dict[str, list[str]] = {}
    for path in sorted(hidden, key=lambda path: path.count("/")):
        inside = [real_needed[tree] for tree in kept if contains(path, real_needed[tree])]
        files_inside = [file for file in files if contains(path, file)]
        for overlay in list(plan.overlays):
            if path == overlay.source:
                plan.overlays.remove(overlay)
                plan.steps.append(Directory(overlay.target))
            elif contains(path, overlay.source):  # a filesystem mounted below a hidden path
                plan.overlays.remove(overlay)
            elif contains(overlay.source, path):
                start = len(overlay.source.rstrip("/")) + 1
                masks.setdefault(overlay.target, []).append(PathMask(path[start:], hidden[path] or bool(inside or files_inside)))
                room.setdefault(overlay.target, []).extend(tree[start:] for tree in inside)
                room_for_files.setdefault(overlay.target, []).extend(file[start:] for file in files_inside)
    plan.overlays[:] = [
        replace(
            each,
            masks=tuple(masks.get(each.target, ())),
            places=tuple(room.get(each.target, ())),
            files=tuple(dict.fromkeys(room_for_files.get(each.target, ()))),
        )
        for each in plan.overlays
        if each.source not in {real_needed[tree] for tree in kept}
    ]
    for real in dict.fromkeys(real_needed[tree] for tree in kept):
        plan.overlays.append(Overlay(real, real, quote_target(real), writable=False))
    plan.steps += [Bind(file, file) for file in files]
    plan.steps[:] = _without_hidden_files(plan.steps, hidden, needs.files)


def _needs_a_bind(path: str, hidden: dict[str, bool], steps: Sequence[Step], kept: Sequence[str]) -> bool:
    """Return whether a needed file would vanish with a hidden directory above it."""
    shown = any(contains(tree, path) for tree in kept) or any(isinstance(step, Bind) and step.target == path for step in steps)
    return not shown and os.path.isfile(path) and any(above in hidden for above in ancestors(path))


def _without_hidden_files(steps: Sequence[Step], hidden: dict[str, bool], needed: Sequence[str]) -> Iterator[Step]:
    """Yield the steps without hidden files. Single files are bound and copied by name, past every overlay and its masks."""

    def is_hidden(path: str) -> bool:
        return any(above in hidden and not (above == path and hidden[above]) for above in ancestors(path))

    for step in steps:
        if isinstance(step, Copies):
            yield replace(step, entries=tuple(entry for entry in step.entries if not is_hidden(f"{step.source}/{entry}")))
        elif not isinstance(step, Bind) or step.source in needed or not is_hidden(step.source):
            yield step


def stand_in_for_others(plan: Draft) -> None:
    """Make writable directories of other users, such as /var/tmp, beforehand in a layer of ours. Rootless only.

    A write below such a directory makes the overlay copy it up for an owner who does not exist here, and fails. Only directories right
    below the top of an overlay are covered: finding all of them would take a walk through the machine.
    """
    me = os.geteuid()
    for index, overlay in enumerate(plan.overlays):
        if overlay.writable:
            with suppress(OSError), os.scandir(overlay.source) as entries:
                names = tuple(
                    entry.name
                    for entry in entries
                    if entry.is_dir(follow_symlinks=False)
                    and entry.stat(follow_symlinks=False).st_uid != me
                    and os.access(entry.path, os.W_OK | os.X_OK)
                )
                plan.overlays[index] = replace(overlay, stand_ins=names)


def _hidden_paths(rules: FileRules) -> Iterator[tuple[str, bool]]:
    for pattern in rules.denied:
        if not isinstance(pattern, Glob):
            yield pattern.path, isinstance(pattern, Beneath)
    for mask in rules.masks:
        yield mask.path, mask.stays


class _Places:
    """All paths to the same entry: its own name, behind links, and where its filesystem is mounted again."""

    def __init__(self, host: MachineFacts) -> None:
        devices = [mount.device for mount in host.mounts if mount.fstype not in mountinfo.PSEUDO]
        self._mounts = host.mounts if len(devices) != len(set(devices)) else ()
        self._directories: dict[str, str] = {}  # real paths; hundreds of masks lie in a handful of directories

    def of(self, path: str) -> Iterator[str]:
        if path == "/":
            raise PolicyError("denying / leaves nothing to run in", hint="deny less, or allow nothing at all")
        head, _, name = path.rpartition("/")
        if head not in self._directories:
            self._directories[head] = os.path.realpath(head or "/").rstrip("/")
        named = f"{self._directories[head]}/{name}"
        for place in (named, os.path.realpath(named)) if os.path.islink(named) else (named,):
            yield place
            if self._mounts:
                yield from mountinfo.aliases(self._mounts, place)


def select(rules: FileRules, directory: str, shown_as: str) -> tuple[str, ...]:
    """Return the paths below `directory`, relative to it, that the rules allow, parents first. Links are never followed.

    Raises PolicyError when they are too many or too large to copy at every start.
    """
    chosen: dict[str, None] = {}
    total = 0
    pending = [""]
    seen = 0
    while pending:
        inner = pending.pop()
        try:
            entries = sorted(os.scandir(f"{directory}/{inner}" if inner else directory), key=lambda entry: entry.name)
        except OSError:
            continue  # unreadable for us, so for the guest too
        for entry in entries:
            seen += 1
            relative = f"{inner}/{entry.name}" if inner else entry.name
            is_directory = entry.is_dir(follow_symlinks=False)
            if is_directory:
                pending.append(relative)
            if rules.reaches(f"{shown_as.rstrip('/')}/{relative}"):
                if entry.is_file(follow_symlinks=False):
                    total += entry.stat(follow_symlinks=False).st_size
                elif not is_directory and not entry.is_symlink():
                    continue
                _add_with_parents(chosen, relative)
            if seen > MOST_ENTRIES or total > MOST_BYTES:
                raise PolicyError(
                    f"the rules for {shown_as} would copy more than {MOST_ENTRIES} entries or {MOST_BYTES >> 20} MiB at every start",
                    hint="name whole directories (DIR/*), set allow_hidden=True, or narrow the pattern",
                )
    return tuple(sorted(chosen, key=lambda path: path.split("/")))


def _add_with_parents(chosen: dict[str, None], relative: str) -> None:
    parts = relative.split("/")
    for depth in range(1, len(parts) + 1):
        chosen["/".join(parts[:depth])] = None
