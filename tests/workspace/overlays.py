"""Real overlays for tests, in a child process with a mount namespace of its own, so that no mount can be left behind."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path

from agent_sandbox.kernel import syscalls


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
