"""Carry out the steps of a mount plan in a fresh mount namespace, before the guest exists: one function per kind of step.

The current directory is the staging tmpfs (see `mount_plan`). Helpers that several steps share are in `mount_tools`.
"""

from __future__ import annotations

import errno
import os
import stat

from agent_sandbox._fast.contexts import contextmanager, suppress
from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.kernel import loop
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.kernel.mask_layers import fill_mask_layer, link_instead, link_over, make_layer
from agent_sandbox.kernel.mount_plan import (
    DEVICES,
    Bind,
    Copies,
    Devices,
    Directory,
    ExecutableFiles,
    InImage,
    Layers,
    MountPlan,
    NewFile,
    OnDisk,
    Overlay,
    Proc,
    SealRoot,
    SkeletonRoot,
    Step,
    Symlink,
    ThrowAway,
    Tmpfs,
    quote_target,
)
from agent_sandbox.kernel.mount_tools import (
    QUIET,
    MountedBelow,
    Site,
    attach_clone,
    bind_code,
    clone_of,
    copy_entry,
    directory_for,
    file_for,
    mount_overlay,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

# Entries of /proc that reveal or control the whole host. Containers mask them too.
PROC_MASKED = (
    "acpi",
    "asound",
    "kcore",
    "keys",
    "key-users",
    "latency_stats",
    "timer_list",
    "timer_stats",
    "sched_debug",
    "scsi",
    "sysrq-trigger",
    "kmsg",
)
TERMINALS = "newinstance,ptmxmode=0666,mode=0620,max=64"  # options of a run's own devpts
SHARED_PROC = "/proc shows the processes around this sandbox, by name: this machine refuses a /proc of its own (agent-sandbox doctor)"
PROC_READONLY = ("bus", "fs", "irq", "pressure", "sys")  # pressure: a writer makes the kernel watch the whole machine


LINKS_OF_DEV = (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2"), ("ptmx", "pts/ptmx"))

FIRST_GENERATION = "1"  # of the layers of a run with checkpoints


def sized(size_bytes: int) -> str:
    """Return mount options that bound a tmpfs in bytes and in entries.

    Entries are limited too, because an empty file uses no block but costs the kernel a kilobyte of memory. The bound is twice the possible
    number of non-empty files.
    """
    return f"size={size_bytes},nr_inodes={max(1024, size_bytes // 2048)}"


def perform(plan: MountPlan, site: Site) -> None:
    """Carry out the plan. The current directory must be the staging tmpfs. Raises OSError."""
    site.executable = plan.code is None
    for name in ("r", "u", "l", "c", "f"):
        os.mkdir(name)
    site.masks.prepare()
    perform_step(plan.layers, site)
    for site.step, step in enumerate(plan.steps):
        perform_step(step, site)
    site.masks.close()
    if isinstance(plan.layers, InImage):
        with _top() as top:
            loop.take_spare(top)


def perform_step(step: Step | Layers, site: Site) -> None:
    """Carry out one step."""
    _PERFORM[type(step)](step, site)


def _throw_away(layers: ThrowAway, site: Site) -> None:
    sc.mount("layers", "u", "tmpfs", QUIET, f"{sized(layers.size_bytes)},mode=700")
    site.fresh = True
    if site.scenes is not None:
        os.mkdir("s")
        sc.mount("scratch", "s", "tmpfs", QUIET, f"{sized(layers.size_bytes)},mode=700")
        os.mkdir(f"s/{FIRST_GENERATION}")
        _use_generation(FIRST_GENERATION, (), site)
    if site.userxattr:
        try:
            os.setxattr("u", "user.try", b"")
            os.removexattr("u", "user.try")
        except OSError:
            why = "tmpfs takes no user attributes on this kernel (they came with Linux 6.6)"
            site.notes.append(f"{why}: in a throw-away sandbox a directory that was removed cannot be made again")


def _on_disk(layers: OnDisk, site: Site) -> None:
    attach_clone(layers.path, "u", None, writable=True)
    if layers.generation:
        _use_generation(layers.generation, (), site)


def _in_image(layers: InImage, site: Site) -> None:
    if (image := site.image) is None or (image.device, image.backing) != (layers.device, layers.backing):
        image = loop.mount_image(layers.device, layers.backing)
    try:
        sc.move_mount(image.mount, "u")
    finally:
        if image is not site.image:
            os.close(image.mount)
    with _top() as top:
        if layers.limit_bytes is not None:
            loop.restrict(top, layers.limit_bytes)
        loop.make_room_for_directories(top)
    _use_generation(layers.generation, layers.frozen, site)


def _use_generation(generation: str, frozen: tuple[str, ...], site: Site) -> None:
    site.uppers, site.frozen = f"u/{generation}", tuple(f"u/{name}" for name in frozen)
    os.makedirs(site.uppers, mode=0o700, exist_ok=True)


@contextmanager
def _top() -> Iterator[int]:
    top = os.open("u", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield top
    finally:
        os.close(top)


def _overlay(step: Overlay, site: Site) -> None:
    number = site.number()
    lower = f"l/{number}"
    try:
        os.mkdir(lower)
        attach_clone(step.source, lower, site.userns, writable=False)
        if site.masks.given is None or not _mount_on_given_masks(step, lower, site):
            mount_overlay([*_mask_layer(step, lower, site), lower], step.key, step.target, step.writable, site)
    except OSError as error:
        if step.required or isinstance(error, MountedBelow):  # after MountedBelow, a new plan that knows the mount can show the rest
            raise
        if os.path.lexists(step.source):
            site.notes.append(f"not shown: {step.target}: {error.strerror}")


def _mount_on_given_masks(step: Overlay, lower: str, site: Site) -> bool:
    """Mount an overlay on the mask layer that was made for an earlier run. Return False if there is none that fits."""
    layer = site.masks.find(site.step, lower) if needs_masks(step) else ""
    if not layer:
        return False
    try:
        mount_overlay([layer, lower], step.key, step.target, step.writable, site)
    except OSError:  # the kernel may not take such a layer; if there is another reason, it shows again with our own
        site.masks.refuse()
        return False
    return True


def needs_masks(step: Overlay) -> bool:
    """Return whether an overlay needs a mask layer. Without an upper directory it needs two layers in any case."""
    return bool(step.masks or step.places or step.stand_ins or step.links_over or step.links_instead or not step.writable)


def _mask_layer(step: Overlay, lower: str, site: Site) -> list[str]:
    """Make the mask layer of an overlay, if it needs one. Return its path in a list, or an empty list."""
    if not needs_masks(step):
        return []
    layer = f"m/{site.step}"
    make_layer(layer, lower)
    parents = (*step.stand_ins, *(os.path.dirname(place) for place, _ in (*step.links_over, *step.links_instead)))
    findings = fill_mask_layer(layer, lower, step.masks, site.opaque_attribute, stand_ins=parents) if step.masks or parents else {}
    site.masks.note(site.step, lower, findings)
    for place in (*step.places, *map(os.path.dirname, step.files)):
        os.makedirs(f"{layer}/{place}", exist_ok=True)
    for place in step.files:
        os.mknod(f"{layer}/{place}", 0o755 | stat.S_IFREG)
    for place, to in step.links:
        os.symlink(to, f"{layer}/{place}")
    for place, to in step.links_over:
        link_over(f"{layer}/{place}", f"{lower}/{place}", to, site.shift)
    for place, to in step.links_instead:
        link_instead(f"{layer}/{place}", to, site.shift)
    return [layer]


def _copies(step: Copies, site: Site) -> None:
    number = site.number()
    layer, spare = f"c/{number}", f"l/{number}"
    make_layer(layer, step.source, site.shift)
    os.mkdir(spare)
    source = sc.openat2(sc.AT_FDCWD, step.source, os.O_PATH | os.O_DIRECTORY, resolve=sc.RESOLVE_NO_SYMLINKS)
    try:
        for entry in step.entries:
            with suppress(PermissionError, FileNotFoundError):  # unreadable for us, as for the guest, or gone meanwhile
                copy_entry(source, entry, f"{layer}/{entry}", site.shift)
    finally:
        os.close(source)
    for name, content in step.contents:
        with suppress(FileExistsError), open(f"{layer}/{name}", "xb") as file:
            file.write(content)
            os.fchown(file.fileno(), site.shift or -1, site.shift or -1)
    for place in step.places:
        os.makedirs(f"{layer}/{place}", exist_ok=True)
    mount_overlay([layer, spare], step.key, step.target, step.writable, site)


def _bind(step: Bind, site: Site) -> None:
    try:
        with clone_of(step.source, site.userns, writable=False, executable=site.executable) as file:
            if not stat.S_ISREG(os.fstat(file).st_mode):  # a bound directory or socket would be a hole in the view
                raise OSError(errno.EINVAL, "only regular files are bound", step.source)
            with file_for(step.target) as place:
                sc.move_mount(file, place)
    except FileNotFoundError:
        if step.required or os.path.lexists(step.source):
            raise


def _code(step: ExecutableFiles, site: Site) -> None:
    site.programs += bind_code(step.programs, site)
    for _ in bind_code(step.libraries, site):
        pass


def _scratch(target: str, mode: int, site: Site) -> None:
    """Show a private directory as an overlay over nothing, so that its content can be exchanged at a checkpoint."""
    nothing = f"l/{site.number()}"
    os.mkdir(nothing)
    os.chmod(nothing, mode)
    os.chown(nothing, site.shift or -1, site.shift or -1)
    mount_overlay([nothing], quote_target(target), target, True, site, base="s")


def _tmpfs(step: Tmpfs, site: Site) -> None:
    if site.scenes is not None:
        _scratch(step.target, step.mode, site)
        return
    owner = f",uid={site.shift},gid={site.shift}" if site.shift else ""
    with directory_for(step.target) as place:
        sc.mount("private", place, "tmpfs", site.flags, f"{sized(step.size_bytes)},mode={step.mode:o}{owner}")


def _directory(step: Directory, site: Site) -> None:
    with directory_for(step.target):
        pass


def _symlink(step: Symlink, site: Site) -> None:
    with directory_for(os.path.dirname(step.target)) as parent, suppress(FileExistsError):
        os.symlink(step.to, f"{parent}/{os.path.basename(step.target)}")


def _file(step: NewFile, site: Site) -> None:
    with file_for(step.target) as place, open(place, "wb") as file:
        file.write(step.content)
        os.fchmod(file.fileno(), 0o644)


def _skeleton_root(step: SkeletonRoot, site: Site) -> None:
    sc.mount("root", "r", "tmpfs", site.flags, "size=16m,mode=755")
    if site.shift:
        os.chown("r", site.shift, site.shift)


def _seal_root(step: SealRoot, site: Site) -> None:
    with directory_for(step.target) as place:
        sc.mount("", place, None, sc.MS_REMOUNT | sc.MS_BIND | sc.MS_RDONLY | site.flags)


def _devices(step: Devices, site: Site) -> None:
    with directory_for("/dev") as place:
        sc.mount("dev", place, "tmpfs", sc.MS_NOSUID | sc.MS_NOEXEC, "size=64k,mode=755")
    with directory_for("/dev") as dev:
        _fill_devices(dev, step.shm_bytes, site.flags)
    if site.scenes is not None:
        _scratch("/dev/shm", 0o1777, site)


def _fill_devices(dev: str, shm_bytes: int, flags: int) -> None:
    for name in DEVICES:
        _make_device(name, f"{dev}/{name}")
    for name, to in LINKS_OF_DEV:
        os.symlink(to, f"{dev}/{name}")
    os.mkdir(f"{dev}/pts")
    sc.mount("devpts", f"{dev}/pts", "devpts", sc.MS_NOSUID | sc.MS_NOEXEC, TERMINALS)
    os.mkdir(f"{dev}/shm")
    sc.mount("shm", f"{dev}/shm", "tmpfs", flags, f"{sized(shm_bytes)},mode=1777")
    sc.mount("", dev, None, sc.MS_REMOUNT | sc.MS_BIND | sc.MS_RDONLY | sc.MS_NOSUID | sc.MS_NOEXEC)


def _make_device(name: str, place: str) -> None:
    """Make a new device node. A bound node of the machine would share locks and timestamps, and show who else opens it.

    A user namespace may not create device nodes, so without root the machine's node is bound instead. It is first checked to be a character
    device.
    """
    try:
        os.mknod(place, stat.S_IFCHR, os.makedev(*DEVICES[name]))
        os.chmod(place, 0o666)
        return
    except PermissionError:
        fd = sc.open_tree(f"/dev/{name}", sc.OPEN_TREE_CLONE)
    try:
        if not stat.S_ISCHR(os.fstat(fd).st_mode):
            raise OSError(errno.ENODEV, "not a character device", f"/dev/{name}")
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC))
        sc.move_mount(fd, place)
    finally:
        os.close(fd)


def _proc(step: Proc, site: Site) -> None:
    with directory_for("/proc") as place:
        try:
            sc.mount("proc", place, "proc", QUIET | sc.MS_NOEXEC)
        except PermissionError:
            _share_proc(place)
            site.shares_proc = True
            site.notes.append(SHARED_PROC)
    if not step.sealed:
        return
    with directory_for("/proc") as proc:
        seal_proc(proc, shared=site.shares_proc)


def _share_proc(place: str) -> None:
    """Mount a read-only copy of the /proc around us, with everything that lies over it.

    In a user namespace the kernel refuses a new /proc while the old one is partly covered, as container engines do, because a new one would
    uncover it. The copy shows the processes around us, too. Their memory, environment and files stay closed: they are in another user
    namespace and outside the guest's Landlock domain. Read-only, because some of their settings belong to whoever has their uid.
    """
    fd = sc.open_tree("/proc", sc.OPEN_TREE_CLONE | sc.AT_RECURSIVE)
    try:
        quiet = sc.MOUNT_ATTR_NOSUID | sc.MOUNT_ATTR_NODEV | sc.MOUNT_ATTR_NOEXEC
        sc.mount_setattr(fd, set_flags=sc.MOUNT_ATTR_RDONLY | quiet, recursive=True)
        sc.move_mount(fd, place)
    finally:
        os.close(fd)


def seal_proc(proc: str, *, shared: bool, nothing: str = "r/dev/null") -> None:
    """Make the settings of the machine in a /proc read-only, and cover what reveals or controls it. `nothing` is the null device."""
    for name in PROC_READONLY:
        if os.path.isdir(f"{proc}/{name}") and not shared:
            sc.mount(f"{proc}/{name}", f"{proc}/{name}", None, sc.MS_BIND)
            sc.mount("", f"{proc}/{name}", None, sc.MS_REMOUNT | sc.MS_BIND | sc.MS_RDONLY | QUIET | sc.MS_NOEXEC)
    for name in PROC_MASKED:
        if os.path.isdir(f"{proc}/{name}"):
            sc.mount("masked", f"{proc}/{name}", "tmpfs", QUIET | sc.MS_NOEXEC | sc.MS_RDONLY, "size=0,mode=000")
        elif os.path.exists(f"{proc}/{name}"):
            sc.mount(nothing, f"{proc}/{name}", None, sc.MS_BIND)


_PERFORM: dict[type, Callable[[Any, Site], None]] = {
    ThrowAway: _throw_away,
    OnDisk: _on_disk,
    InImage: _in_image,
    Overlay: _overlay,
    Copies: _copies,
    Bind: _bind,
    ExecutableFiles: _code,
    Tmpfs: _tmpfs,
    Directory: _directory,
    Symlink: _symlink,
    NewFile: _file,
    SkeletonRoot: _skeleton_root,
    SealRoot: _seal_root,
    Devices: _devices,
    Proc: _proc,
}
