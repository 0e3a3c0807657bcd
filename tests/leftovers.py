"""What a run can leave on a machine, looked at from outside: processes, mounts, control groups, namespaces, loop devices and files.

Others are at work on the same machine, with sandboxes and suites of their own, so only what can be laid at our door counts: processes that
descend from us, mounts in our namespace, control groups whose keeper descends from us, namespaces that our processes or descriptors keep
alive, files below directories that we alone use, and loop devices on such. Where `adopting` is in force descent is exact: no orphan gets
away to pid 1. In a part of `make test` it is exact throughout (`scripts.apart`): orphans go to our parent, and control groups that nobody
keeps any more are ours because they lie below our own. Without that, a mount counts if its name is one of ours, and an orphan if it runs
code of this very checkout as our user.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from agent_sandbox.kernel import cgroups
from agent_sandbox.kernel import syscalls as sc
from scripts.apart import PR_SET_CHILD_SUBREAPER, VARIABLE
from tests.patience import Patience

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
LOOPS = Path("/sys/block")
NAMESPACES = ("net", "mnt", "pid", "user", "ipc", "uts", "cgroup")
LOOK_AGAIN_SECONDS = 0.05
SOURCE = str(Path(cgroups.__file__).parents[2])  # a word on the command line of every helper of this checkout
# Who adopts our orphans: our parent, when it has started us apart, else process 1.
APART = os.environ.get(VARIABLE) == str(os.getppid())
ADOPTER = os.getppid() if APART else 1


class Process(NamedTuple):
    """One of the machine's: who started it, and whether it only waits to be collected."""

    parent: int
    zombie: bool


_claimed: list[str] = []
_still_ours: set[int] = set()  # children that lived when `adopting` ended: orphans among them come to an end later


@contextmanager
def adopting() -> Iterator[None]:
    """For the length of the block, orphans of our descendants become our children, so that whatever descends from us can be found.

    They are collected when `traces` finds them ended. What we start ourselves in the block has to be waited for before that.
    """
    before = set(children(os.getpid()))
    sc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        sc.prctl(PR_SET_CHILD_SUBREAPER, 0)
        _still_ours.update(set(children(os.getpid())) - before)


def traces(*watched: Path, adopted: bool = False) -> dict[str, str]:
    """Everything of ours that is on the machine at this moment: what identifies it, and a description for a person.

    `watched` are directories that nobody else uses. `adopted` says that `adopting` has been in force since anything was started.
    """
    processes = running()
    _collect(processes, None if adopted else _still_ours)
    ours = descendants(os.getpid(), processes)
    if not adopted:
        orphans = {pid for pid, found in processes.items() if found.parent == ADOPTER and pid != os.getpid()}
        ours |= orphans if APART else set(filter(_looks_like_ours, orphans))
        ours |= {pid for orphan in ours & orphans for pid in descendants(orphan, processes)}
    found = {**_mounts(watched), **_cgroups(ours), **_described(ours), **_namespaces(ours), **_loop_devices(), **_files(watched)}
    return {**found, **_share()}


def left_since(before: dict[str, str], *watched: Path, adopted: bool = False, seconds: float = 30.0) -> list[str]:
    """Describe what is there now and was not `before`. What is only just ending has so much time to be gone, more on a busy machine."""
    patience = Patience(seconds)
    left = {name: words for name, words in traces(*watched, adopted=adopted).items() if name not in before}
    while left and not patience.over:
        time.sleep(LOOK_AGAIN_SECONDS)
        still = traces(*watched, adopted=adopted)
        left = {name: words for name, words in left.items() if name in still}
    return sorted(left.values())


def running() -> dict[int, Process]:
    """Every process of the machine, by its number."""
    pids = [int(name) for name in os.listdir(PROC) if name.isdecimal()]
    return {pid: found for pid in pids if (found := process(pid))}


def descendants(ancestor: int, processes: Mapping[int, Process]) -> set[int]:
    """Those that a process, or something that it started, has started."""
    return {pid for pid in processes if _descends(pid, ancestor, processes)}


def children(pid: int) -> list[int]:
    """The processes that any thread of this one has started and that have not been collected."""
    found = []
    with suppress(OSError):  # it ends just now
        for thread in os.listdir(PROC / str(pid) / "task"):
            found += [int(child) for child in (PROC / str(pid) / "task" / thread / "children").read_text().split()]
    return found


def _share() -> dict[str, str]:
    """How much of the processors our session gets: a test that takes from it slows down all that come after."""
    with suppress(OSError):  # a kernel without groups of sessions
        share = (PROC / "self/autogroup").read_text().strip()
        return {f"share {share}": f"the share of processors of our session: {share}"}
    return {}


def _mounts(watched: Iterable[Path]) -> dict[str, str]:
    places = (*_claimed, *map(str, watched))
    lines = [line.split() for line in (PROC / "self/mountinfo").read_text().splitlines()]
    ours = [fields for fields in lines if APART or "agent-sandbox" in fields[4] or fields[4].startswith(places)]
    return {f"mount {fields[0]}": f"mount on {fields[4]} (id {fields[0]})" for fields in ours}


def _cgroups(ours: set[int]) -> dict[str, str]:
    """In each tree, below where we stand, and in version 2 beside it too: where ours are made."""
    tops = {place for hierarchy in cgroups.here() for place in (hierarchy.places if hierarchy.version == 2 else (hierarchy.own,))}
    names = {name for top in tops for name, _, _ in os.walk(top) if os.path.basename(name).startswith(cgroups.PREFIX)}
    return {name: f"control group {name}" for name in names if _answerable(os.path.basename(name), ours)}


def _answerable(cgroup: str, ours: set[int]) -> bool:
    keeper = cgroup.removeprefix(cgroups.PREFIX).split("-")[1:2]
    return (APART and cgroups.is_forgotten(cgroup)) or any(word.isdecimal() and int(word) in ours for word in keeper)


def _described(processes: set[int]) -> dict[str, str]:
    return {f"process {pid}": f"process {pid}: {command(pid) or '(a zombie: nobody waited for it)'}" for pid in processes}


def _namespaces(ours: set[int]) -> dict[str, str]:
    """Those that a process of ours is in or holds a descriptor of. One that a mount keeps alive is in the list of mounts."""
    mine = {_link(PROC / f"self/ns/{kind}") for kind in NAMESPACES}
    held = {_link(PROC / str(pid) / "ns" / kind) for pid in ours for kind in NAMESPACES}
    for pid in (os.getpid(), *ours):
        with suppress(OSError):
            held |= {link for fd in (PROC / str(pid) / "fd").iterdir() if (link := _link(fd)).partition(":")[0] in NAMESPACES}
    return {f"namespace {name}": f"namespace {name}" for name in held - mine - {""}}


def claim(directory: Path) -> None:
    """Nobody else uses this directory: a loop device on a file in it is ours."""
    _claimed.append(f"{directory}/")


def _loop_devices() -> dict[str, str]:
    found = {}
    for path in LOOPS.glob("loop*/loop/backing_file"):
        with suppress(OSError):  # detached just now
            file = path.read_text().strip()
            if file.startswith(tuple(_claimed)):
                found[f"loop {path.parts[3]} {file}"] = f"loop device {path.parts[3]} on {file}"
    return found


def _files(watched: tuple[Path, ...]) -> dict[str, str]:
    paths = (os.path.join(top, name) for root in watched for top, folders, files in os.walk(root) for name in (*folders, *files))
    return {f"file {path}": f"file {path}" for path in paths}


def _collect(processes: dict[int, Process], among: Collection[int] | None) -> None:
    """Wait for orphans that came to us and have ended; only those `among` these, when some are given."""
    for pid in [pid for pid, found in processes.items() if found == (os.getpid(), True) and (among is None or pid in among)]:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        del processes[pid]


def remove(tree: Path) -> None:
    """Remove a tree of ours, with the working directories in it that overlays keep closed to everybody."""
    subprocess.run(["chmod", "-R", "u+rwX", tree], check=True)
    shutil.rmtree(tree)


def _looks_like_ours(orphan: int) -> bool:
    """A helper by the source on its command line; a fork of this very process by having the same one and the same directory."""
    with suppress(OSError):
        if (PROC / str(orphan)).stat().st_uid == os.geteuid():
            line = command(orphan)
            return SOURCE in line.split() or (line == command(os.getpid()) and _link(PROC / str(orphan) / "cwd") == os.getcwd())
    return False


def _descends(pid: int, ancestor: int, processes: Mapping[int, Process]) -> bool:
    while pid in processes:
        pid = processes[pid].parent
        if pid == ancestor:
            return True
    return False


def process(pid: int) -> Process | None:
    """One process; None when there is none of that number."""
    try:
        status = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    state, parent = status.rpartition(")")[2].split()[:2]  # the name in parentheses may itself hold spaces and parentheses
    return Process(int(parent), state in "ZX")


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:  # ended, or somebody else's
        return ""


def command(pid: int) -> str:
    """The command line of a process; nothing for one that has ended."""
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return ""
    return words.replace(b"\0", b" ").decode(errors="replace").strip()
