"""Plan the view of a guest: turn file rules and the machine's mounts into a mount plan. Nothing is mounted here.

There are two shapes. A view of the whole machine has one overlay per mounted filesystem (as root), or one per top-level directory
(rootless, where the kernel does not accept `/` as a layer). A view of chosen trees stands on an empty root. Either way denied and masked
paths are hidden by name, so they stay hidden if they appear later or are replaced. Paths that cannot be hidden by name are copied
(`_select`) or refused. `_gate` limits the programs that can be executed (`view.executables`).
"""

from __future__ import annotations

import os
import stat

from agent_sandbox._fast.functions import lru_cache
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, field, replace
from agent_sandbox.errors import PolicyError
from agent_sandbox.kernel import mountinfo
from agent_sandbox.kernel.mount_plan import (
    Bind,
    Copies,
    Devices,
    Directory,
    ExecutableFiles,
    Layers,
    MountPlan,
    NewFile,
    Overlay,
    PathMask,
    Proc,
    SealRoot,
    SkeletonRoot,
    Step,
    Symlink,
    Tmpfs,
    quote_target,
)
from agent_sandbox.kernel.mountinfo import Mount
from agent_sandbox.policy.model import FileRules
from agent_sandbox.policy.paths import Beneath, Glob, Tree, ancestors, anchor, contains
from agent_sandbox.workspace.view.observations import Observations, entries_of, kind_behind, writable_directories_of_others

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from agent_sandbox.workspace.view.executables import Executables

# New for each run. The machine's own content is shown there only if the rules or the project name it.
PRIVATE = ("/tmp", "/run", "/dev", "/proc", "/sys")
RUN_BYTES, SHM_BYTES = 64 << 20, 64 << 20
MOST_ENTRIES, MOST_BYTES = 10_000, 64 << 20  # of the copies made as a run starts
_LONGEST_CHAIN = 40  # links in a row, as in the kernel


@dataclass(frozen=True)
class Needs:
    """The files that a language needs in the view. `links` and `contents` are links and files to create.

    `trees` and `files` are shown read-only, whatever the rules say. `tools` are trees that are shown too, except for parts the rules deny.
    """

    trees: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    contents: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True)
class MachineFacts:
    """The facts about this machine that `plan_view` needs."""

    mounts: tuple[Mount, ...]  # visible mounts only
    privileged: bool

    @classmethod
    def look(cls) -> MachineFacts:
        """Read the present facts about this machine."""
        with open("/proc/self/mountinfo", "rb") as file:
            return cls(_visible_mounts(file.read()), os.geteuid() == 0)


@lru_cache(maxsize=4)  # the table hardly ever changes, and its text is the key
def _visible_mounts(table: bytes) -> tuple[Mount, ...]:
    return mountinfo.visible(mountinfo.parse(table))


@dataclass
class Draft:
    """A mount plan that is still being built."""

    host: MachineFacts
    rules: FileRules
    scratch: int
    steps: list[Step] = field(default_factory=list)
    disk: Observations = field(default_factory=Observations)
    overlays: list[Overlay] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def plan_view(
    rules: FileRules,
    needs: Needs,
    layers: Layers,
    *,
    host: MachineFacts,
    project: str | None = None,
    scratch_bytes: int = 256 << 20,
    executables: Executables | None = None,
    disk: Observations | None = None,
) -> MountPlan:
    """Return the mount plan for these rules on this machine. With `executables`, only these files can be executed in the view.

    `disk` remembers what the plan rests on: while it holds, the same arguments give the same plan. This is not so for a plan with copies.
    Raises PolicyError for a rule that no view can enforce.
    """
    plan = Draft(host, rules, scratch_bytes, disk=disk or Observations())
    if rules.read and any(isinstance(pattern, Tree | Beneath) and pattern.path == "/" for pattern in rules.allowed):
        _whole_machine(plan, project)
    else:
        _chosen_trees(plan, needs)
    _copy_what_cannot_be_masked(plan)
    _make_files_where_copies_are(plan)
    _hide(plan, needs)
    if not host.privileged:
        _stand_in_for_others(plan)
    if executables is not None:
        _gate(plan, executables)
    _make_room_in_copies(plan)
    steps = [*plan.steps, Devices(SHM_BYTES), Proc()]
    if isinstance(steps[0], SkeletonRoot):
        steps.append(SealRoot())
    return MountPlan(layers, tuple(_in_order(steps, plan.overlays)), tuple(plan.notes))


def _whole_machine(plan: Draft, project: str | None) -> None:
    if not plan.rules.allow_hidden:
        raise PolicyError(
            "hidden names cannot be left out of a view of the whole machine: an overlay hides names it knows, not those that appear later",
            hint="set allow_hidden=True, or name allowed_paths",
        )
    shown = [mount for mount in plan.host.mounts if mount.fstype not in mountinfo.PSEUDO and not _private(mount.target, project)]
    if plan.host.privileged:
        for mount in shown:
            _show(plan, mount.target, required=mount.target == "/" or (project is not None and contains(mount.target, project)))
    else:
        plan.steps.append(SkeletonRoot())
        _split(plan, "/", project)
    plan.steps += [Tmpfs("/tmp", plan.scratch, 0o1777), Tmpfs("/run", RUN_BYTES), Tmpfs("/sys", 4096, 0o555)]
    if project is not None and _private(project, None):
        _show(plan, project, required=True)


def _chosen_trees(plan: Draft, needs: Needs) -> None:
    plan.steps.append(SkeletonRoot())
    plan.steps += [Directory("/sys"), *(Symlink(target, to) for target, to in needs.links)]
    allowed = _outermost(anchor(p) for p in plan.rules.allowed if not isinstance(p, Glob) and (plan.rules.read or plan.rules.write))
    for private, size, mode in (("/tmp", plan.scratch, 0o1777), ("/run", RUN_BYTES, 0o755)):
        if private not in allowed:
            plan.steps.append(Tmpfs(private, size, mode))
    shown = _outermost([*needs.trees, *needs.tools, *(path for path in allowed if plan.rules.read and plan.rules.allow_hidden)])
    for tree in shown:
        _show_tree(plan, tree, shown, writable=plan.rules.write and any(contains(path, tree) for path in allowed))
    for tree in allowed:
        if not (plan.rules.read and plan.rules.allow_hidden):
            _copy(plan, tree)
    targets = {overlay.target for overlay in plan.overlays}
    plan.steps += [Bind(path, path) for path in needs.files if not any(contains(target, path) for target in targets)]
    plan.steps += [NewFile(path, content) for path, content in needs.contents if not any(contains(target, path) for target in targets)]


def _show_tree(plan: Draft, path: str, shown: Sequence[str], *, writable: bool) -> None:
    """Show a tree that the rules name, with the filesystems mounted below it. A missing tree is no error; a single file is copied.

    If links lead to a single file, the view also gets each link and the file, at their own paths, unless a tree in `shown` contains them.
    """
    real = plan.disk.real(path)
    kind = plan.disk.ask(kind_behind, real)
    if kind == stat.S_IFREG:
        for place, parent in _on_the_way(path):
            if not plan.rules.bars(place) and (place == path or not any(contains(tree, place) for tree in shown)):
                _copy_file(plan, place, parent, writable=writable)
    elif kind == stat.S_IFDIR and (plan.host.privileged or not _mounted_below(plan.host, real)):
        _show(plan, path, source=real, writable=writable)
        for mount in _mounted_below(plan.host, real):
            if mount.fstype not in mountinfo.PSEUDO:
                _show(plan, path + mount.target[len(real) :], source=mount.target, writable=writable, required=False)
    elif kind == stat.S_IFDIR:
        _split(plan, real, None)


def _on_the_way(path: str) -> Iterator[tuple[str, str]]:
    """Yield the links on the way to a file, and the file last. Each comes as a real path, and the directory of the view to show it in."""
    parent = os.path.dirname(path)
    for _ in range(_LONGEST_CHAIN):
        directory = os.path.realpath(parent)
        place = os.path.join(directory, os.path.basename(path))
        yield place, parent
        if not os.path.islink(place):
            return
        path = os.path.join(directory, os.readlink(place))
        parent = os.path.realpath(os.path.dirname(path))


def _copy_file(plan: Draft, place: str, parent: str, *, writable: bool) -> None:
    """Plan a copy of the file `place` in the directory `parent` of the view.

    Files from one directory share one step, because the mount of a second step would hide the first.
    """
    directory, name = os.path.split(place)
    for index, step in enumerate(plan.steps):
        if isinstance(step, Copies) and (step.source, step.target) == (directory, parent):
            entries = step.entries if name in step.entries else (*step.entries, name)
            plan.steps[index] = replace(step, entries=entries, writable=step.writable or writable)
            return
    plan.steps.append(Copies(directory, parent, quote_target(parent), (name,), writable))


def _split(plan: Draft, directory: str, project: str | None) -> None:
    """Show each entry of a directory by itself. Rootless, a directory with mounts below it cannot be a single overlay layer."""
    entries = plan.disk.ask(entries_of, directory)
    if entries is None:
        return  # gone since its parent was read
    plan.steps.append(Directory(directory))
    targets = {mount.target: mount for mount in plan.host.mounts}
    for name, kind, found in entries:
        path = f"{directory.rstrip('/')}/{name}"
        mount = targets.get(path)
        if path in PRIVATE or (mount is not None and mount.fstype in mountinfo.PSEUDO):
            continue
        if isinstance(found, str):
            plan.steps.append(Symlink(path, found))
        elif kind == stat.S_IFDIR:
            if not found:
                plan.steps.append(Directory(path))
            elif _mounted_below(plan.host, path):
                _split(plan, path, project)
            else:
                _show(plan, path, required=project is not None and contains(path, project))
        elif found:
            plan.steps.append(Bind(path, path, required=False))


def _show(plan: Draft, target: str, *, source: str = "", writable: bool | None = None, required: bool = True) -> None:
    source = source or target
    if plan.disk.ask(kind_behind, source) == stat.S_IFREG:  # a file mounted over a file, as container engines do with /etc/resolv.conf
        plan.steps.append(Bind(source, target, required=required))
        return
    plan.overlays.append(
        Overlay(source, target, quote_target(target), writable=plan.rules.write if writable is None else writable, required=required)
    )


def _copy_what_cannot_be_masked(plan: Draft) -> None:
    """Replace the directory of each glob pattern by copies of the entries that the rules allow. Masks cannot express a pattern."""
    for pattern in (*plan.rules.allowed, *plan.rules.denied):
        if isinstance(pattern, Glob) and (plan.rules.read or plan.rules.write):
            if pattern.directory == "/":
                raise PolicyError(
                    f"the pattern {pattern.pattern!r} reaches over the whole machine, and a view cannot hide names that appear later",
                    hint="name the directory it is about, as in /project/**/.env, or name whole trees",
                )
            _copy(plan, pattern.directory)


def _make_files_where_copies_are(plan: Draft) -> None:
    """Let the step that copies a directory also create the new files in it, instead of a step for each new file."""
    files = [step for step in plan.steps if isinstance(step, NewFile)]
    for index, step in enumerate(plan.steps):
        if isinstance(step, Copies):
            inside = [file for file in files if os.path.dirname(file.target) == step.target]
            plan.steps[index] = replace(step, contents=tuple((os.path.basename(file.target), file.content) for file in inside))
    copied = {step.target for step in plan.steps if isinstance(step, Copies)}
    plan.steps[:] = [step for step in plan.steps if not (isinstance(step, NewFile) and os.path.dirname(step.target) in copied)]


def _make_room_in_copies(plan: Draft) -> None:
    """Add mount points to copied directories for everything mounted below them, because a finished copy may be read-only."""
    files = [os.path.dirname(step.target) for step in plan.steps if isinstance(step, Bind | NewFile | Symlink)]
    mounted = [step.target for step in (*plan.steps, *plan.overlays) if isinstance(step, Overlay | Copies | Directory | Tmpfs)]
    for index, step in enumerate(plan.steps):
        if isinstance(step, Copies):
            start = len(step.target.rstrip("/")) + 1
            inside = {path[start:] for path in (*files, *mounted) if path != step.target and contains(step.target, path)}
            plan.steps[index] = replace(step, places=tuple(sorted(inside)))


def _copy(plan: Draft, directory: str) -> None:
    real = plan.disk.real(directory)
    copied = any(isinstance(step, Copies) and contains(step.target, directory) for step in plan.steps)
    if copied or plan.disk.ask(kind_behind, real) != stat.S_IFDIR:
        return
    entries = _select(plan.rules, real, directory) if plan.rules.read else ()
    plan.overlays[:] = [overlay for overlay in plan.overlays if not contains(directory, overlay.target)]
    plan.steps.append(Copies(real, directory, quote_target(directory), entries, plan.rules.write))
    plan.notes.append(f"{directory} is a copy made as the run starts: what changes there meanwhile is not seen")


def _mounted_below(host: MachineFacts, directory: str) -> list[Mount]:
    return [mount for mount in host.mounts if mount.target != directory and contains(directory, mount.target)]


def _private(path: str, project: str | None) -> bool:
    """Return whether a path lies in a directory that is new for each run. False for the project and for mounts in the project."""
    return any(contains(private, path) for private in PRIVATE) and not (project is not None and contains(project, path))


def _outermost(paths: Iterable[str]) -> list[str]:
    outermost: list[str] = []
    for path in sorted(set(paths), key=lambda path: path.count("/") if path != "/" else -1):
        if not any(contains(other, path) for other in outermost):
            outermost.append(path)
    return outermost


def _in_order(steps: list[Step], overlays: list[Overlay]) -> Iterator[Step]:
    """Sort outer mounts before inner ones: a mount hides everything mounted below it earlier. The steps that seal the view come last."""

    def depth(step: Step) -> int:
        if isinstance(step, SkeletonRoot):
            return -2
        if isinstance(step, ExecutableFiles | SealRoot):
            return 10_000 + isinstance(step, SealRoot)
        target = "/dev" if isinstance(step, Devices) else "/proc" if isinstance(step, Proc) else step.target
        return -1 if target == "/" else target.count("/")

    return iter(sorted([*steps, *overlays], key=depth))


def _hide(plan: Draft, needs: Needs) -> None:
    """Hide denied and secret paths at every place that leads to them. A needed tree below a hidden path gets an overlay of its own."""
    hidden: dict[str, bool] = {}  # path: whether the directory itself stays, emptied
    places = _Places(plan.host, plan.disk)
    for path, stays in _hidden_paths(plan.rules):
        for place in places.of(path):
            hidden[place] = hidden.get(place, False) or stays
    trees = {tree: plan.disk.real(tree) for tree in needs.trees}
    real_needed = {tree: real for tree, real in trees.items() if plan.disk.ask(kind_behind, real) == stat.S_IFDIR}
    kept = [tree for tree, real in real_needed.items() if any(above in hidden for above in ancestors(real))]
    for file in needs.files:
        hidden.pop(file, None)
    files = [path for path in needs.files if _needs_a_bind(plan, path, hidden, [real_needed[tree] for tree in kept])]
    masks: dict[str, list[PathMask]] = {}
    room: dict[str, list[str]] = {}  # mount points below hidden directories
    room_for_files: dict[str, list[str]] = {}
    showing, above_overlays = _by_source(plan.overlays), {above for overlay in plan.overlays for above in ancestors(overlay.source)}
    for path in sorted(hidden, key=lambda path: path.count("/")):
        inside = [real_needed[tree] for tree in kept if contains(path, real_needed[tree])] if kept else []
        files_inside = [file for file in files if contains(path, file)] if files else []
        if path in above_overlays:
            _drop_overlays(plan, path)
            showing = _by_source(plan.overlays)
        for overlay in (overlay for above in ancestors(path)[1:] for overlay in showing.get(above, ())):
            start = len(overlay.source.rstrip("/")) + 1
            masks.setdefault(overlay.target, []).append(PathMask(path[start:], hidden[path] or bool(inside or files_inside)))
            if inside:
                room.setdefault(overlay.target, []).extend(tree[start:] for tree in inside)
            if files_inside:
                room_for_files.setdefault(overlay.target, []).extend(file[start:] for file in files_inside)
    own = {real_needed[tree] for tree in kept}
    plan.overlays[:] = [
        replace(
            each,
            masks=tuple(masks.get(each.target, ())),
            places=tuple(room.get(each.target, ())),
            files=tuple(dict.fromkeys(room_for_files.get(each.target, ()))),
        )
        for each in plan.overlays
        if each.source not in own
    ]
    for real in dict.fromkeys(real_needed[tree] for tree in kept):
        plan.overlays.append(Overlay(real, real, quote_target(real), writable=False))
    plan.steps += [Bind(file, file) for file in files]
    plan.steps[:] = _without_hidden_files(plan.steps, hidden, needs.files)


def _by_source(overlays: Iterable[Overlay]) -> dict[str, list[Overlay]]:
    sources: dict[str, list[Overlay]] = {}
    for overlay in overlays:
        sources.setdefault(overlay.source, []).append(overlay)
    return sources


def _drop_overlays(plan: Draft, hidden: str) -> None:
    """Drop the overlays of a hidden path, which leave an empty directory, and of filesystems mounted below it."""
    plan.steps += [Directory(overlay.target) for overlay in plan.overlays if overlay.source == hidden]
    plan.overlays[:] = [overlay for overlay in plan.overlays if not contains(hidden, overlay.source)]


def _needs_a_bind(plan: Draft, path: str, hidden: dict[str, bool], kept: Sequence[str]) -> bool:
    """Return whether a needed file is below a hidden directory and not shown yet. `kept` are needed trees that stay shown."""
    shown = any(contains(tree, path) for tree in kept) or any(isinstance(step, Bind) and step.target == path for step in plan.steps)
    is_file = not shown and plan.disk.ask(kind_behind, path) == stat.S_IFREG
    return is_file and any(above in hidden for above in ancestors(path))


def _without_hidden_files(steps: Sequence[Step], hidden: dict[str, bool], needed: Sequence[str]) -> Iterator[Step]:
    """Yield the steps without binds and copies of hidden files, unless a file is needed. The masks of overlays do not cover these steps."""

    def is_hidden(path: str) -> bool:
        return any(above in hidden and not (above == path and hidden[above]) for above in ancestors(path))

    for step in steps:
        if isinstance(step, Copies):
            yield replace(step, entries=tuple(entry for entry in step.entries if not is_hidden(f"{step.source}/{entry}")))
        elif not isinstance(step, Bind) or step.source in needed or not is_hidden(step.source):
            yield step


def _stand_in_for_others(plan: Draft) -> None:
    """Plan stand-ins, in our layer, for other users' directories that we may write to, such as /var/tmp. Rootless only.

    For a write below such a directory, the overlay would copy the directory up for an owner who does not exist here, and the write would
    fail. Only directories right below the top of an overlay are covered: finding all such directories would take a walk through the
    machine.
    """
    for index, overlay in enumerate(plan.overlays):
        if overlay.writable and (names := plan.disk.ask(writable_directories_of_others, overlay.source)):
            plan.overlays[index] = replace(overlay, stand_ins=names)


def _hidden_paths(rules: FileRules) -> Iterator[tuple[str, bool]]:
    for pattern in rules.denied:
        if not isinstance(pattern, Glob):
            yield pattern.path, isinstance(pattern, Beneath)
    for mask in rules.masks:
        yield mask.path, mask.stays


class _Places:
    """Finds all paths to an entry: its own path, the real path behind links, and the paths where its filesystem is mounted again."""

    def __init__(self, host: MachineFacts, disk: Observations) -> None:
        devices = [mount.device for mount in host.mounts if mount.fstype not in mountinfo.PSEUDO]
        self._table = mountinfo.MountTable(host.mounts) if len(devices) != len(set(devices)) else None
        self._disk = disk
        self._aliases: dict[str, list[str] | None] = {}  # of directories; hundreds of masks lie in a handful of them

    def of(self, path: str) -> Iterator[str]:
        if path == "/":
            raise PolicyError("denying / leaves nothing to run in", hint="deny less, or allow nothing at all")
        head, _, name = path.rpartition("/")
        named = f"{self._disk.real(head).rstrip('/')}/{name}"
        yield from self._everywhere(named)
        if self._disk.kind(named) == stat.S_IFLNK:
            yield from self._everywhere(self._disk.real(named))

    def _everywhere(self, path: str) -> Iterator[str]:
        yield path
        if self._table is None:
            return
        head, _, name = path.rpartition("/")
        if head not in self._aliases:
            self._aliases[head] = self._table.aliases_of_entries(head or "/")
        aliases = self._aliases[head]
        yield from self._table.aliases(path) if aliases is None else (f"{alias.rstrip('/')}/{name}" for alias in aliases)


def _select(rules: FileRules, directory: str, shown_as: str) -> tuple[str, ...]:
    """Return the paths below `directory`, relative to it, that the rules allow, parents first. Links are never followed.

    `shown_as` is the directory's path in the view, by which the rules judge. Raises PolicyError if the entries are too many or too large to
    copy at every start.
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


def _gate(plan: Draft, executables: Executables) -> None:
    """Change a complete plan so that only these executables can be executed."""
    hidden = {place for place in executables.directories if not plan.rules.bars(place)}
    bound = {step.target for step in plan.steps if isinstance(step, Bind)}

    def shown(paths: tuple[str, ...]) -> tuple[str, ...]:
        there = (path for path in paths if path in bound or any(contains(overlay.target, path) for overlay in plan.overlays))
        return tuple(path for path in there if not plan.rules.bars(path))

    code = ExecutableFiles(shown(executables.programs), shown(executables.libraries))
    files = [*code.programs, *code.libraries]
    plan.overlays[:] = [_showing_only(overlay, hidden, files, executables.links) for overlay in plan.overlays]
    plan.steps.append(code)
    plan.notes += executables.notes


def _showing_only(overlay: Overlay, hidden: set[str], files: list[str], links: tuple[tuple[str, str], ...]) -> Overlay:
    """Return the overlay with the `hidden` PATH directories emptied, and with mount points and links in them for the allowed files."""
    inside = [
        place for place in sorted(hidden, key=lambda place: place.count("/")) if place != overlay.source and contains(overlay.source, place)
    ]
    if not inside:
        return overlay
    start = len(overlay.source.rstrip("/")) + 1
    masked = {mask.path for mask in overlay.masks if not mask.keep}
    emptied = {mask.path for mask in overlay.masks}
    masks = [PathMask(place[start:], keep=True) for place in inside if place[start:] not in emptied]
    masks = [mask for mask in masks if not any(contains(path, mask.path) for path in masked)]
    names = {f"{overlay.source.rstrip('/')}/{mask.path}" for mask in masks}
    narrower = [mask for mask in overlay.masks if not any(mask.path != each.path and contains(each.path, mask.path) for each in masks)]
    return replace(
        overlay,
        masks=tuple(sorted([*narrower, *masks], key=lambda mask: mask.path.count("/"))),
        files=(*overlay.files, *(path[start:] for path in files if any(contains(place, path) for place in names))),
        links=tuple((path[start:], to) for path, to in links if os.path.dirname(path) in names),
    )
