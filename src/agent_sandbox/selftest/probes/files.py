"""Probes on files: hidden files are not read, real files are not written."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from agent_sandbox.selftest.bench import DecoyBench, snapshot
from agent_sandbox.selftest.boxes import Attempt, AttemptResult, Bare, Box, Found, NoAnswer
from agent_sandbox.selftest.probe import RUN, Probes

SUBJECT = Probes("user namespaces", "mount copies", "overlay", "Landlock")

# Only devices that can be opened without side effects: opening a watchdog would start it.
_DEVICES = tuple(
    f"/dev/{name}" for name in ("mem", "kmsg", "kvm", "fuse", "net/tun", "loop-control", "vda", "sda", "nvme0n1", "dm-0", "input/event0")
)


@SUBJECT.probe(
    "read-by-path",
    "A secret cannot be read by its path.",
    "opens planted keys, credentials, a .env and a denied file by their paths, and through descriptors that only name them",
)
def read_by_path(bench: DecoyBench, box: Box) -> Found:
    return _secrets(bench, box.run(Attempt("files", "read", {"paths": bench.secrets}, project=True)))


@SUBJECT.probe(
    "read-through-link",
    "A link in the project does not lead to a secret.",
    "opens planted secrets through links in the project: to files and to directories, absolute and relative",
)
def read_through_link(bench: DecoyBench, box: Box) -> Found:
    return _secrets(bench, box.run(Attempt("files", "read", {"paths": bench.links}, project=True)))


@SUBJECT.probe(
    "read-through-proc",
    "/proc does not lead to a secret.",
    "opens a planted key below the root and the working directory of every process in /proc",
)
def read_through_proc(bench: DecoyBench, box: Box) -> Found:
    return _secrets(bench, box.run(Attempt("files", "read_through_proc", {"path": bench.secrets[0]}, project=True)))


@SUBJECT.probe(
    "hidden-places",
    "What your policy hides on this machine is not there.",
    "opens every place that the policy hides and that you can open: keys, credentials, histories, denied trees. It reads none",
    boxes=(RUN,),
    excuse="none of the places that the policy hides is there, or you cannot open them yourself",
)
def hidden_places(bench: DecoyBench, box: Box) -> Found:
    paths = [path for path in bench.around.hidden if _can_be_opened(path)]
    return box.run(Attempt("files", "open_only", {"paths": paths}))


@SUBJECT.probe(
    "write",
    "Whatever is written inside, no real file changes.",
    "overwrites, appends, truncates, removes, renames, links and changes the mode of planted files; makes files in the project, in your "
    "home and where you stand; then compares the real ones",
)
def write(bench: DecoyBench, box: Box) -> Found:
    tree, name = bench.tree(), bench.mark()
    directories = [bench.project, *(place for place in bench.around.elsewhere if os.access(place, os.W_OK) and box.name != Bare.name)]
    before = snapshot(tree)
    try:
        ran = box.run(Attempt("files", "write", {"tree": tree, "directories": directories, "name": name}))
        after = snapshot(tree)
        planted = [directory for directory in directories if Path(directory, name).exists()]
    finally:
        for directory in directories:
            with suppress(OSError):
                os.unlink(f"{directory}/{name}")
    if box.writes and "overwrite" not in ran.reached:
        raise NoAnswer("nothing could be written inside, so it is not shown that writes are captured")
    reached = {path: "not as it was" for path in sorted(before.keys() | after.keys()) if before.get(path) != after.get(path)}
    return Found({**reached, **{f"new file in {directory}": "it is there" for directory in planted}}, ran.refused)


@SUBJECT.probe(
    "devices",
    "Devices of the machine cannot be opened or made.",
    "opens disks, memory, the kernel's log, virtual machines and other devices; makes device nodes",
    excuse="you cannot open or make any of these devices yourself",
)
def devices(bench: DecoyBench, box: Box) -> Found:
    return box.run(Attempt("files", "use_devices", {"paths": _DEVICES}))


def _secrets(bench: DecoyBench, ran: AttemptResult) -> Found:
    """Return the findings, with only those ways that reached a planted secret. Any other content is the guest's own."""
    reached = {way: "its content" for way, seen in ran.reached.items() if bench.token in seen}
    return Found(reached, ran.refused)


def _can_be_opened(path: str) -> bool:
    """Return whether this user can open the path, and it hides something: an empty directory may stand there inside as well."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not stat.S_ISDIR(os.fstat(opened).st_mode) or bool(os.listdir(opened))
    finally:
        os.close(opened)
