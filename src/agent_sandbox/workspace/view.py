"""Plan what a guest will see: file rules and the machine's mounts in, a mount plan out. Nothing is mounted here.

Two shapes. A view of the whole machine has one overlay per mounted filesystem (as root), or one per top-level directory (rootless, where
the kernel does not let `/` be a layer). A view of chosen trees stands on an empty root. Either way what is denied or masked is not there,
by name, so that it stays hidden when it appears later or is replaced; what cannot be hidden by name is copied (`workspace.selection`) or
refused.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache

from agent_sandbox.errors import PolicyError
from agent_sandbox.kernel import mountinfo
from agent_sandbox.kernel.mountinfo import Mount
from agent_sandbox.kernel.mounts import (
    Bind,
    Copies,
    Devices,
    Directory,
    File,
    MountPlan,
    OnDisk,
    Overlay,
    Proc,
    SealRoot,
    SkeletonRoot,
    Step,
    Symlink,
    ThrowAway,
    Tmpfs,
)
from agent_sandbox.kernel.placing import Mask
from agent_sandbox.policy.model import FileRules
from agent_sandbox.policy.paths import Beneath, Glob, Tree, ancestors, anchor
from agent_sandbox.workspace.layers import quote_target
from agent_sandbox.workspace.selection import select

# Made anew for each run. Nothing of the machine's own is shown there unless the rules or the project name it.
PRIVATE = ("/tmp", "/run", "/dev", "/proc", "/sys")
RUN_BYTES, SHM_BYTES = 64 << 20, 64 << 20


@dataclass(frozen=True)
class Needs:
    """What of the machine a language needs: `trees` and `files` stay whatever the rules, read-only; `links` and `contents` are made.

    `tools` are shown with them, but what the rules deny of those is not there.
    """

    trees: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    contents: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True)
class Host:
    """What planning has to know of this machine."""

    mounts: tuple[Mount, ...]  # visible ones
    privileged: bool

    @classmethod
    def look(cls) -> Host:
        """This machine, now."""
        with open("/proc/self/mountinfo", "rb") as file:
            return cls(_visible_mounts(file.read()), os.geteuid() == 0)


@lru_cache(maxsize=4)  # the table hardly ever changes, and reading it tells whether it has
def _visible_mounts(table: bytes) -> tuple[Mount, ...]:
    return mountinfo.visible(mountinfo.parse(table))


@dataclass
class _Plan:
    """A plan in the making."""

    host: Host
    rules: FileRules
    scratch: int
    steps: list[Step] = field(default_factory=list)
    overlays: list[Overlay] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def plan_view(
    rules: FileRules, needs: Needs, layers: ThrowAway | OnDisk, *, host: Host, project: str | None = None, scratch_bytes: int = 256 << 20
) -> MountPlan:
    """The plan for these rules on this machine. Raises PolicyError for a rule that no view can keep."""
    plan = _Plan(host, rules, scratch_bytes)
    if rules.read and any(isinstance(pattern, Tree | Beneath) and pattern.path == "/" for pattern in rules.allowed):
        _whole_machine(plan, project)
    else:
        _chosen_trees(plan, needs)
    _copy_what_cannot_be_masked(plan)
    _make_files_where_copies_are(plan)
    _mask(plan, needs)
    if not host.privileged:
        _stand_in_for_others(plan)
    steps = [*plan.steps, Devices(SHM_BYTES), Proc()]
    if isinstance(steps[0], SkeletonRoot):
        steps.append(SealRoot())
    return MountPlan(layers, tuple(_in_order(steps, plan.overlays)), tuple(plan.notes))


def _whole_machine(plan: _Plan, project: str | None) -> None:
    if not plan.rules.allow_hidden:
        raise PolicyError(
            "hidden names cannot be left out of a view of the whole machine: an overlay hides names it knows, not those that appear later",
            hint="set allow_hidden=True, or name allowed_paths",
        )
    shown = [mount for mount in plan.host.mounts if mount.fstype not in mountinfo.PSEUDO and not _private(mount.target, project)]
    if plan.host.privileged:
        for mount in shown:
            _show(plan, mount.target, required=mount.target == "/" or _covers(mount.target, project))
    else:
        plan.steps.append(SkeletonRoot())
        _split(plan, "/", project)
    plan.steps += [Tmpfs("/tmp", plan.scratch, 0o1777), Tmpfs("/run", RUN_BYTES), Tmpfs("/sys", 4096, 0o555)]
    if project is not None and _private(project, None):
        _show(plan, project, required=True)


def _chosen_trees(plan: _Plan, needs: Needs) -> None:
    plan.steps.append(SkeletonRoot())
    plan.steps += [Directory("/sys"), *(Symlink(target, to) for target, to in needs.links)]
    allowed = _outermost(anchor(p) for p in plan.rules.allowed if not isinstance(p, Glob) and (plan.rules.read or plan.rules.write))
    for private, size, mode in (("/tmp", plan.scratch, 0o1777), ("/run", RUN_BYTES, 0o755)):
        if private not in allowed:
            plan.steps.append(Tmpfs(private, size, mode))
    for tree in _outermost([*needs.trees, *needs.tools, *(path for path in allowed if plan.rules.read and plan.rules.allow_hidden)]):
        _show_tree(plan, tree, writable=plan.rules.write and any(_covers(path, tree) for path in allowed))
    for tree in allowed:
        if not (plan.rules.read and plan.rules.allow_hidden):
            _copy(plan, tree)
    made = {overlay.target for overlay in plan.overlays}
    plan.steps += [Bind(path, path) for path in needs.files if not any(_covers(target, path) for target in made)]
    plan.steps += [File(path, content) for path, content in needs.contents if not any(_covers(target, path) for target in made)]


def _show_tree(plan: _Plan, path: str, *, writable: bool) -> None:
    """One tree the rules name, with the filesystems mounted below it. What does not exist is no error; a single file is copied."""
    real = os.path.realpath(path)
    try:
        mode = os.stat(real).st_mode
    except OSError:
        return
    if stat.S_ISREG(mode):
        _copy_file(plan, real, os.path.dirname(path), writable=writable)
    elif stat.S_ISDIR(mode) and (plan.host.privileged or not _mounted_below(plan.host, real)):
        _show(plan, path, source=real, writable=writable)
        for mount in _mounted_below(plan.host, real):
            if mount.fstype not in mountinfo.PSEUDO:
                _show(plan, path + mount.target[len(real) :], source=mount.target, writable=writable, required=False)
    elif stat.S_ISDIR(mode):
        _split(plan, real, None)


def _copy_file(plan: _Plan, real: str, parent: str, *, writable: bool) -> None:
    """One file, in a directory of its own. Several files of one directory share it: a second mount would hide the first."""
    directory, name = os.path.split(real)
    for index, step in enumerate(plan.steps):
        if isinstance(step, Copies) and (step.source, step.target) == (directory, parent):
            plan.steps[index] = replace(step, entries=(*step.entries, name), writable=step.writable or writable)
            return
    plan.steps.append(Copies(directory, parent, quote_target(parent), (name,), writable))


def _split(plan: _Plan, directory: str, project: str | None) -> None:
    """Rootless: a directory with mounts below it cannot be one layer, so its entries become one each."""
    plan.steps.append(Directory(directory))
    targets = {mount.target: mount for mount in plan.host.mounts}
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except PermissionError:
        return  # the guest could not look in either
    for entry in entries:
        mount = targets.get(entry.path)
        if entry.path in PRIVATE or (mount is not None and mount.fstype in mountinfo.PSEUDO):
            continue
        if entry.is_symlink():
            plan.steps.append(Symlink(entry.path, os.readlink(entry.path)))
        elif entry.is_dir(follow_symlinks=False):
            if not os.access(entry.path, os.R_OK | os.X_OK):
                plan.steps.append(Directory(entry.path))
            elif _mounted_below(plan.host, entry.path):
                _split(plan, entry.path, project)
            else:
                _show(plan, entry.path, required=_covers(entry.path, project))
        elif entry.is_file(follow_symlinks=False) and os.access(entry.path, os.R_OK):
            plan.steps.append(Bind(entry.path, entry.path))


def _show(plan: _Plan, target: str, *, source: str = "", writable: bool | None = None, required: bool = True) -> None:
    source = source or target
    if os.path.isfile(source):  # a file bound over a file, as container engines do with /etc/resolv.conf
        plan.steps.append(Bind(source, target))
        return
    plan.overlays.append(
        Overlay(source, target, quote_target(target), writable=plan.rules.write if writable is None else writable, required=required)
    )


def _copy_what_cannot_be_masked(plan: _Plan) -> None:
    """Patterns that are not whole trees: the directory they start from is replaced by copies of what the rules let through."""
    for pattern in (*plan.rules.allowed, *plan.rules.denied):
        if isinstance(pattern, Glob) and (plan.rules.read or plan.rules.write):
            if pattern.directory == "/":
                raise PolicyError(
                    f"the pattern {pattern.pattern!r} reaches over the whole machine, and a view cannot hide names that appear later",
                    hint="name the directory it is about, as in /project/**/.env, or name whole trees",
                )
            _copy(plan, pattern.directory)


def _make_files_where_copies_are(plan: _Plan) -> None:
    """A file of ours in a directory that is replaced by copies has to be made among them."""
    files = [step for step in plan.steps if isinstance(step, File)]
    for index, step in enumerate(plan.steps):
        if isinstance(step, Copies):
            inside = [file for file in files if os.path.dirname(file.target) == step.target]
            plan.steps[index] = replace(step, contents=tuple((os.path.basename(file.target), file.content) for file in inside))
    made = {step.target for step in plan.steps if isinstance(step, Copies)}
    plan.steps[:] = [step for step in plan.steps if not (isinstance(step, File) and os.path.dirname(step.target) in made)]


def _copy(plan: _Plan, directory: str) -> None:
    real = os.path.realpath(directory)
    if not os.path.isdir(real) or any(isinstance(step, Copies) and _covers(step.target, directory) for step in plan.steps):
        return
    entries = select(plan.rules, real, directory) if plan.rules.read else ()
    plan.overlays[:] = [overlay for overlay in plan.overlays if not _covers(directory, overlay.target)]
    plan.steps.append(Copies(real, directory, quote_target(directory), entries, plan.rules.write))
    plan.notes.append(f"{directory} is a copy made as the run starts: what changes there meanwhile is not seen")


def _mask(plan: _Plan, needs: Needs) -> None:
    """Hide what is denied or secret wherever it can be reached, and give what must stay an overlay of its own."""
    hidden: dict[str, bool] = {}  # path: whether the directory itself stays
    places = _Places(plan.host)
    for path, stays in _hidden_paths(plan.rules):
        for place in places.of(path):
            hidden[place] = hidden.get(place, False) or stays
    real_needed = {tree: real for tree in needs.trees if os.path.isdir(real := os.path.realpath(tree))}
    kept = [tree for tree, real in real_needed.items() if any(_covers(path, real) for path in hidden)]
    for file in needs.files:
        hidden.pop(file, None)
    files = [path for path in needs.files if _needs_a_bind(path, hidden, plan.steps, [real_needed[tree] for tree in kept])]
    masks: dict[str, list[Mask]] = {}
    room: dict[str, list[str]] = {}  # directories to mount on, below hidden ones
    room_for_files: dict[str, list[str]] = {}
    for path in sorted(hidden, key=lambda path: path.count("/")):
        inside = [real_needed[tree] for tree in kept if _covers(path, real_needed[tree])]
        files_inside = [file for file in files if _covers(path, file)]
        for overlay in list(plan.overlays):
            if path == overlay.source:
                plan.overlays.remove(overlay)
                plan.steps.append(Directory(overlay.target))
            elif _covers(path, overlay.source):  # a filesystem mounted below what is hidden
                plan.overlays.remove(overlay)
            elif _covers(overlay.source, path):
                start = len(overlay.source.rstrip("/")) + 1
                masks.setdefault(overlay.target, []).append(Mask(path[start:], hidden[path] or bool(inside or files_inside)))
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
    """Whether a file that must stay would go with a hidden directory above it."""
    shown = any(_covers(tree, path) for tree in kept) or any(isinstance(step, Bind) and step.target == path for step in steps)
    return not shown and os.path.isfile(path) and any(above in hidden for above in ancestors(path))


def _without_hidden_files(steps: Sequence[Step], hidden: dict[str, bool], needed: Sequence[str]) -> Iterator[Step]:
    """Single files are bound and copied under their own names, past every overlay: what is hidden must be left out of them too."""

    def is_hidden(path: str) -> bool:
        return any(above in hidden and not (above == path and hidden[above]) for above in ancestors(path))

    for step in steps:
        if isinstance(step, Copies):
            yield replace(step, entries=tuple(entry for entry in step.entries if not is_hidden(f"{step.source}/{entry}")))
        elif not isinstance(step, Bind) or step.source in needed or not is_hidden(step.source):
            yield step


def _stand_in_for_others(plan: _Plan) -> None:
    """Rootless: a write below another's directory copies that directory up, for an owner who does not exist here, and fails.

    So directories of others in which we may write, such as /var/tmp, are made beforehand in a layer of ours. Only those right below the
    top of an overlay are looked for: finding all of them would cost a walk through the machine.
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
        yield mask.path, False


class _Places:
    """Everywhere the same thing can be reached: under its own name, behind links, and where its filesystem is mounted again."""

    def __init__(self, host: Host) -> None:
        devices = [mount.device for mount in host.mounts if mount.fstype not in mountinfo.PSEUDO]
        self._mounts = host.mounts if len(devices) != len(set(devices)) else ()
        self._directories: dict[str, str] = {}  # there are hundreds of masks in a handful of directories

    def of(self, path: str) -> Iterator[str]:
        if path == "/":
            raise PolicyError("denying / leaves nothing to run in", hint="deny less, or allow nothing at all")
        directory = os.path.dirname(path)
        if directory not in self._directories:
            self._directories[directory] = os.path.realpath(directory)
        named = os.path.join(self._directories[directory], os.path.basename(path))
        for place in (named, os.path.realpath(named)) if os.path.islink(named) else (named,):
            yield place
            if self._mounts:
                yield from mountinfo.aliases(self._mounts, place)


def _mounted_below(host: Host, directory: str) -> list[Mount]:
    return [mount for mount in host.mounts if mount.target != directory and _covers(directory, mount.target)]


def _private(path: str, project: str | None) -> bool:
    """Whether a path lies where each run has its own; the project and what is mounted in it are shown all the same."""
    return any(_covers(private, path) for private in PRIVATE) and not (project is not None and _covers(project, path))


def _covers(directory: str, path: str | None) -> bool:
    return path is not None and (path == directory or directory == "/" or path.startswith(directory + "/"))


def _outermost(paths: Iterable[str]) -> list[str]:
    kept: list[str] = []
    for path in sorted(set(paths), key=lambda path: path.count("/") if path != "/" else -1):
        if not any(_covers(other, path) for other in kept):
            kept.append(path)
    return kept


def _in_order(steps: list[Step], overlays: list[Overlay]) -> Iterator[Step]:
    """Outer mounts before inner ones: a mount hides what was mounted below it. Seals come last."""

    def depth(step: Step) -> int:
        if isinstance(step, SkeletonRoot):
            return -2
        if isinstance(step, SealRoot):
            return 10_000
        target = "/dev" if isinstance(step, Devices) else "/proc" if isinstance(step, Proc) else step.target
        return -1 if target == "/" else target.count("/")

    return iter(sorted([*steps, *overlays], key=depth))
