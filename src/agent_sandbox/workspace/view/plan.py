"""Plan the view of a guest: turn file rules and the machine's mounts into a mount plan. Nothing is mounted here.

There are two shapes. A view of the whole machine has one overlay per mounted filesystem (as root), or one per top-level directory
(rootless, where the kernel does not accept `/` as a layer). A view of chosen trees stands on an empty root. Either way denied and masked
paths are hidden by name, so they stay hidden if they appear later or are replaced. Paths that cannot be hidden by name are copied
(`view.draft`) or refused. `gate` limits the programs that can be executed (`view.executables`).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from agent_sandbox._fast.values import replace
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
)
from agent_sandbox.kernel.mountinfo import Mount
from agent_sandbox.policy.model import FileRules
from agent_sandbox.policy.paths import Beneath, Glob, Tree, anchor
from agent_sandbox.workspace.layers.history import quote_target
from agent_sandbox.workspace.view.draft import Draft, MachineFacts, Needs, contains, hide, select, stand_in_for_others
from agent_sandbox.workspace.view.executables import Executables

# New for each run. The machine's own content is shown there only if the rules or the project name it.
PRIVATE = ("/tmp", "/run", "/dev", "/proc", "/sys")
RUN_BYTES, SHM_BYTES = 64 << 20, 64 << 20
_LONGEST_CHAIN = 40  # links in a row, as in the kernel


def plan_view(
    rules: FileRules,
    needs: Needs,
    layers: Layers,
    *,
    host: MachineFacts,
    project: str | None = None,
    scratch_bytes: int = 256 << 20,
    executables: Executables | None = None,
) -> MountPlan:
    """Return the mount plan for these rules on this machine; with `executables`, only they can be executed in it.

    Raises PolicyError for a rule that no view can enforce.
    """
    plan = Draft(host, rules, scratch_bytes)
    if rules.read and any(isinstance(pattern, Tree | Beneath) and pattern.path == "/" for pattern in rules.allowed):
        _whole_machine(plan, project)
    else:
        _chosen_trees(plan, needs)
    _copy_what_cannot_be_masked(plan)
    _make_files_where_copies_are(plan)
    hide(plan, needs)
    if not host.privileged:
        stand_in_for_others(plan)
    if executables is not None:
        gate(plan, executables)
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
            _show(plan, mount.target, required=mount.target == "/" or contains(mount.target, project))
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

    If a file's name is a link, the link is shown as a link and its target under its own name, unless the target is `shown` anyway.
    """
    real = os.path.realpath(path)
    try:
        mode = os.stat(real).st_mode
    except OSError:
        return
    if stat.S_ISREG(mode):
        for place, parent in _on_the_way(path):
            if not plan.rules.bars(place) and (place == path or not any(contains(tree, place) for tree in shown)):
                _copy_file(plan, place, parent, writable=writable)
    elif stat.S_ISDIR(mode) and (plan.host.privileged or not _mounted_below(plan.host, real)):
        _show(plan, path, source=real, writable=writable)
        for mount in _mounted_below(plan.host, real):
            if mount.fstype not in mountinfo.PSEUDO:
                _show(plan, path + mount.target[len(real) :], source=mount.target, writable=writable, required=False)
    elif stat.S_ISDIR(mode):
        _split(plan, real, None)


def _on_the_way(path: str) -> Iterator[tuple[str, str]]:
    """Yield the links on the way to a file, and the file last: the real path of each, and the directory to show it in."""
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
    """Copy one file into a directory of its own. Files from the same directory share it: a second mount would hide the first."""
    directory, name = os.path.split(place)
    for index, step in enumerate(plan.steps):
        if isinstance(step, Copies) and (step.source, step.target) == (directory, parent):
            entries = step.entries if name in step.entries else (*step.entries, name)
            plan.steps[index] = replace(step, entries=entries, writable=step.writable or writable)
            return
    plan.steps.append(Copies(directory, parent, quote_target(parent), (name,), writable))


def _split(plan: Draft, directory: str, project: str | None) -> None:
    """Show each entry of a directory by itself. Rootless, a directory with mounts below it cannot be one layer."""
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except PermissionError:
        entries = []  # the guest could not list it either
    except FileNotFoundError:
        return  # gone since its parent was read
    plan.steps.append(Directory(directory))
    targets = {mount.target: mount for mount in plan.host.mounts}
    for entry in entries:
        mount = targets.get(entry.path)
        if entry.path in PRIVATE or (mount is not None and mount.fstype in mountinfo.PSEUDO):
            continue
        if entry.is_symlink():
            with suppress(FileNotFoundError):  # gone since its parent was read, too
                plan.steps.append(Symlink(entry.path, os.readlink(entry.path)))
        elif entry.is_dir(follow_symlinks=False):
            if not os.access(entry.path, os.R_OK | os.X_OK):
                plan.steps.append(Directory(entry.path))
            elif _mounted_below(plan.host, entry.path):
                _split(plan, entry.path, project)
            else:
                _show(plan, entry.path, required=contains(entry.path, project))
        elif entry.is_file(follow_symlinks=False) and os.access(entry.path, os.R_OK):
            plan.steps.append(Bind(entry.path, entry.path, required=False))


def _show(plan: Draft, target: str, *, source: str = "", writable: bool | None = None, required: bool = True) -> None:
    source = source or target
    if os.path.isfile(source):  # a file mounted over a file, as container engines do with /etc/resolv.conf
        plan.steps.append(Bind(source, target, required=required))
        return
    plan.overlays.append(
        Overlay(source, target, quote_target(target), writable=plan.rules.write if writable is None else writable, required=required)
    )


def _copy_what_cannot_be_masked(plan: Draft) -> None:
    """Replace the directory of each glob pattern, which masks cannot express, by copies of the entries that the rules allow."""
    for pattern in (*plan.rules.allowed, *plan.rules.denied):
        if isinstance(pattern, Glob) and (plan.rules.read or plan.rules.write):
            if pattern.directory == "/":
                raise PolicyError(
                    f"the pattern {pattern.pattern!r} reaches over the whole machine, and a view cannot hide names that appear later",
                    hint="name the directory it is about, as in /project/**/.env, or name whole trees",
                )
            _copy(plan, pattern.directory)


def _make_files_where_copies_are(plan: Draft) -> None:
    """Move files of ours into the copies of their directory, where they have to be created."""
    files = [step for step in plan.steps if isinstance(step, NewFile)]
    for index, step in enumerate(plan.steps):
        if isinstance(step, Copies):
            inside = [file for file in files if os.path.dirname(file.target) == step.target]
            plan.steps[index] = replace(step, contents=tuple((os.path.basename(file.target), file.content) for file in inside))
    copied = {step.target for step in plan.steps if isinstance(step, Copies)}
    plan.steps[:] = [step for step in plan.steps if not (isinstance(step, NewFile) and os.path.dirname(step.target) in copied)]


def _make_room_in_copies(plan: Draft) -> None:
    """Add mount points to copied directories for everything mounted below: later they are read-only, and nothing can be created."""
    files = [os.path.dirname(step.target) for step in plan.steps if isinstance(step, Bind | NewFile | Symlink)]
    mounted = [step.target for step in (*plan.steps, *plan.overlays) if isinstance(step, Overlay | Copies | Directory | Tmpfs)]
    for index, step in enumerate(plan.steps):
        if isinstance(step, Copies):
            start = len(step.target.rstrip("/")) + 1
            inside = {path[start:] for path in (*files, *mounted) if path != step.target and contains(step.target, path)}
            plan.steps[index] = replace(step, places=tuple(sorted(inside)))


def _copy(plan: Draft, directory: str) -> None:
    real = os.path.realpath(directory)
    if not os.path.isdir(real) or any(isinstance(step, Copies) and contains(step.target, directory) for step in plan.steps):
        return
    entries = select(plan.rules, real, directory) if plan.rules.read else ()
    plan.overlays[:] = [overlay for overlay in plan.overlays if not contains(directory, overlay.target)]
    plan.steps.append(Copies(real, directory, quote_target(directory), entries, plan.rules.write))
    plan.notes.append(f"{directory} is a copy made as the run starts: what changes there meanwhile is not seen")


def _mounted_below(host: MachineFacts, directory: str) -> list[Mount]:
    return [mount for mount in host.mounts if mount.target != directory and contains(directory, mount.target)]


def _private(path: str, project: str | None) -> bool:
    """Return whether a path lies where each run has its own files; the project and mounts in it are shown all the same."""
    return any(contains(private, path) for private in PRIVATE) and not (project is not None and contains(project, path))


def _outermost(paths: Iterable[str]) -> list[str]:
    outermost: list[str] = []
    for path in sorted(set(paths), key=lambda path: path.count("/") if path != "/" else -1):
        if not any(contains(other, path) for other in outermost):
            outermost.append(path)
    return outermost


def _in_order(steps: list[Step], overlays: list[Overlay]) -> Iterator[Step]:
    """Sort outer mounts before inner ones: a mount hides everything mounted below it earlier. Seals come last."""

    def depth(step: Step) -> int:
        if isinstance(step, SkeletonRoot):
            return -2
        if isinstance(step, ExecutableFiles | SealRoot):
            return 10_000 + isinstance(step, SealRoot)
        target = "/dev" if isinstance(step, Devices) else "/proc" if isinstance(step, Proc) else step.target
        return -1 if target == "/" else target.count("/")

    return iter(sorted([*steps, *overlays], key=depth))


def gate(plan: Draft, executables: Executables) -> None:
    """Limit a complete plan to these executables."""
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
    """Return the overlay with its PATH directories emptied, and mount points in them for the allowed files."""
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
