"""Real overlays for tests, in a child process with a mount namespace of its own, so that no mount can be left behind."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from agent_sandbox.kernel import syscalls
from agent_sandbox.kernel.mount_plan import quote_target


def in_namespace(body: Callable[[], None]) -> None:
    """Run `body` in a child with private mounts, in a user namespace too unless we are root. Fails if it raises."""
    uid, gid = os.geteuid(), os.getegid()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            syscalls.unshare(syscalls.CLONE_NEWNS | (0 if uid == 0 else syscalls.CLONE_NEWUSER))
            if uid != 0:
                Path("/proc/self/setgroups").write_text("deny")
                Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
                Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
            syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
            body()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "see the traceback of the child above"


def userxattr() -> bool:
    """Whether overlays made by `edit` keep their attributes in the user's namespace."""
    return os.geteuid() != 0


def edit(base: Path, layer: Path, body: Callable[[Path], None]) -> None:
    """Let `body` change an overlay over `base`, whose writes go to `layer`/{upper,work}."""
    merged = layer / "merged"
    merged.mkdir(exist_ok=True)
    options = f"lowerdir={base},upperdir={layer}/upper,workdir={layer}/work,redirect_dir=nofollow,metacopy=off,index=off"
    if userxattr():
        options = f"lowerdir={base},upperdir={layer}/upper,workdir={layer}/work,userxattr"

    def mounted() -> None:
        syscalls.mount("overlay", str(merged), "overlay", 0, options)
        body(merged)

    in_namespace(mounted)


def make_layer(layers: int, target: str) -> str:
    """The directories for one overlay as `kernel.mount_tools` makes them, and their key."""
    key = quote_target(target)
    for path in (key, f"{key}/upper", f"{key}/work"):
        with suppress(FileExistsError):
            os.mkdir(path, 0o755 if path.endswith("/upper") else 0o700, dir_fd=layers)
    with open(os.open(f"{key}/target", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600, dir_fd=layers), "wb") as file:
        file.write(os.fsencode(target))
    return key
