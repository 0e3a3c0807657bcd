"""Run the programs, each on a clone of one project, and hand back a record of each. Also a program of its own, for another user to run."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.records import Record, Recorder, write
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.runtimes import only
from agent_sandbox.engine.work import Code, Work
from agent_sandbox.ledger.writer import Ledger
from agent_sandbox.policy.model import MIB, Limits, locked, repeatable
from agent_sandbox.policy.paths import Tree
from agent_sandbox.runtime.wasm.runtime import WasmRuntime
from tests import compiled
from tests.determinism.programs import FILES, PROGRAMS, STDIN

LIMITS = Limits(wall_seconds=600, memory_bytes=256 * MIB, output_bytes=MIB, disk_bytes=64 * MIB)
SALT = "00" * 16
AS_ANOTHER_USER = (  # one of each kind
    *("a log with times", "many sleeps", "uuid1", "a temporary file", "a set of strings", "identities", "a scan", "a large listing"),
    *("stat of descriptors", "a hard link", "set times", "a tree copied", "an archive", "a changed file", "too much memory"),
    *("input in pieces", "describe", "an abort"),
)


def make_project(place: Path, *, backwards: bool = False) -> None:
    """The project, anew. Made backwards its files have other numbers, and its directories another order."""
    shutil.rmtree(place, ignore_errors=True)
    for name, content in sorted(FILES.items(), reverse=backwards):
        file = place / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        if backwards:
            os.utime(file, (1, 1))


def records(
    runtime: WasmRuntime, project: Path, ledger: Path, names: Iterable[str], *, deterministic: bool = True, seed: int = 7
) -> dict[str, Record]:
    """A record of a run of each program."""
    policy = locked(read=True, write=True, allowed=[Tree(str(project))], allow_hidden=True, limits=LIMITS)
    session = Session(
        Gate(repeatable(policy) if deterministic else policy, Ledger(ledger, clock=time.time), clock=time.time), only(runtime)
    )
    made = {}
    for name in names:
        env = {"HOME": "/tmp", "PATH": "/bin", "LANG": "C.UTF-8"}
        recorder = Recorder(Work(Code("python", PROGRAMS[name]), env, cwd=str(project), stdin=STDIN, seed=seed), salt=SALT)
        made[name] = recorder.record(session.run(recorder.work), policy, {})
    return made


def main() -> None:
    """Run some of the programs as whoever runs this; the arguments are the project, and a directory for the records."""
    project, place = map(Path, sys.argv[1:])
    runtime = compiled.runtime()
    try:
        for number, record in enumerate(records(runtime, project, place / "ledger", AS_ANOTHER_USER).values()):
            write(record, str(place / str(number)))
    finally:
        runtime.close()


if __name__ == "__main__":
    main()
