"""Probes on what remains of a run: the next run sees nothing of it, no process outlives it or its supervisor, and the ledger records it."""

from __future__ import annotations

import os
import secrets
import subprocess
from contextlib import suppress
from pathlib import Path

from agent_sandbox.assembly import here
from agent_sandbox.errors import LedgerBroken
from agent_sandbox.ledger import chain
from agent_sandbox.ledger.encoding import decode
from agent_sandbox.ledger.event import Entry, Intent, OutcomeEvent
from agent_sandbox.selftest.bench import DecoyBench, descendants, end, named, still_there, until
from agent_sandbox.selftest.boxes import Attempt, AttemptResult, Box, Found, NoAnswer
from agent_sandbox.selftest.probe import RUN, Probes, system_calls

SUBJECT = Probes("namespaces", "pidfd", "a run", "a kept run")
LEDGER = Probes("state directory")

GONE_SECONDS = 2.0  # time for everything of a killed supervisor to be gone
_LINGER_SECONDS = 10.0
_LARGEST_VERIFIED = 64 << 20  # bytes of a ledger verified from the beginning; of a longer one, only this run's entries are read


@SUBJECT.probe(
    "scratch-files",
    "Scratch files of one run are not there in the next.",
    "leaves files in /tmp and /dev/shm, and looks for them in a second run",
)
def scratch_files(bench: DecoyBench, box: Box) -> Found:
    name = bench.mark()
    return _found_again(box, [f"{directory}/{name}" for directory in ("/tmp", "/dev/shm")])


@SUBJECT.probe(
    "throw-away",
    "A throw-away run leaves nothing for the next.",
    "writes into the project and next to it, and looks for that in a second run",
    boxes=(RUN,),
)
def throw_away(bench: DecoyBench, box: Box) -> Found:
    name = bench.mark()
    return _found_again(box, [f"{bench.project}/{name}", f"{bench.path}/{name}"], throw_away=True)


@SUBJECT.probe(
    "shared-memory",
    "Shared memory of one run is not there in the next.",
    "leaves a System V segment, and asks for it in a second run",
)
def shared_memory(bench: DecoyBench, box: Box) -> Found:
    key = secrets.randbits(31) | 1
    numbers = system_calls("shmget", "shmctl")
    find = {"number": numbers["shmget"], "key": key}
    try:
        _must_reach(box.run(Attempt("kernel", "leave_segment", find)))
        ran = box.run(Attempt("kernel", "find_segment", find))
    finally:
        bench.bare.run(Attempt("kernel", "remove_segment", {"find": numbers["shmget"], "control": numbers["shmctl"], "key": key}))
    return ran


@SUBJECT.probe(
    "background",
    "What a run leaves in the background ends with it.",
    "leaves a process in a session of its own, and looks for it on the machine when the run is over",
    boxes=(RUN,),
)
def background(bench: DecoyBench, box: Box) -> Found:
    mark = bench.mark()
    try:
        _must_reach(box.run(Attempt("processes", "stay_behind", {"mark": mark, "seconds": _LINGER_SECONDS})))
        left = named(mark)
    finally:
        end(named(mark))
    return Found({"daemon": f"it lives as process {left[0]}"} if left else {}, {} if left else {"daemon": "it is gone"})


@SUBJECT.probe(
    "killed-supervisor",
    "When its supervisor is killed, nothing of a run lives on.",
    f"starts a second supervisor with a run, kills it with SIGKILL, and looks for what it had started {GONE_SECONDS:.0f} s later",
)
def killed_supervisor(bench: DecoyBench, box: Box) -> Found:
    with subprocess.Popen(
        box.supervisor(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=bench.project
    ) as supervisor:
        started: dict[int, str] = {}
        try:
            assert supervisor.stdout is not None and supervisor.stderr is not None
            if not supervisor.stdout.readline():
                raise NoAnswer(f"a second supervisor did not start: {supervisor.stderr.read().decode(errors='replace').strip()}")
            started = descendants(supervisor.pid)
            supervisor.kill()
            until(lambda: not still_there(started), GONE_SECONDS)
            left = still_there(started)
        finally:
            supervisor.kill()
            end(still_there(started))
    if not started:
        raise NoAnswer("the second supervisor has no process below it")
    if left:
        return Found({"processes": f"{len(left)} of {len(started)} live on"})
    return Found({}, {"processes": f"all {len(started)} are gone"})


def _found_again(box: Box, paths: list[str], *, throw_away: bool = False) -> Found:
    try:
        _must_reach(box.run(Attempt("files", "plant", {"paths": paths}, throw_away=throw_away)))
        ran = box.run(Attempt("files", "open_only", {"paths": paths}, throw_away=throw_away))
    finally:
        for path in paths:
            with suppress(OSError):
                os.unlink(path)
    # Keyed by directory: the names differ each time, and ways shown without a sandbox must match those in one.
    reached, refused = ({os.path.dirname(path): seen for path, seen in ways.items()} for ways in (ran.reached, ran.refused))
    return Found(reached, refused)


def _must_reach(ran: AttemptResult) -> None:
    """Raise `NoAnswer` if the attempt could leave nothing behind: a search for it would then prove nothing."""
    if ran.refused and not ran.reached:
        raise NoAnswer(f"nothing could be left to be found: {next(iter(ran.refused.values()))}")


@LEDGER.probe(
    "ledger",
    "A run is in the ledger, before and after, and the ledger verifies.",
    "runs something, looks for its intent and its outcome, and checks the chain of hashes",
)
def ledger(bench: DecoyBench, box: Box) -> Found:
    path = Path(here().ledger().path)
    size = path.stat().st_size if path.exists() else 0
    attempt = Attempt("files", "nothing", {"note": bench.mark()})
    box.run(attempt)
    try:
        entries = _since(path, size)
        if path.exists() and path.stat().st_size <= _LARGEST_VERIFIED:
            chain.verify(path)
    except LedgerBroken as error:
        return Found({"record": error.message})
    intents = {entry.sequence for entry in entries if isinstance(entry.event, Intent) and _holds(entry.event, box.recorded_as(attempt))}
    outcomes = {entry.event.intent for entry in entries if isinstance(entry.event, OutcomeEvent)}
    if not intents:
        return Found({"record": "there is no entry of it"})
    if not intents <= outcomes:
        return Found({"record": "there is no entry of how it ended"})
    return Found({}, {"record": "it is there, before and after"})


def _since(path: os.PathLike[str], offset: int) -> list[Entry]:
    if not os.path.exists(path):
        return []
    with open(path, "rb") as file:
        file.seek(offset if offset <= os.fstat(file.fileno()).st_size else 0)  # shorter: a new file has been started
        lines = file.read().splitlines()
    try:
        return [decode(line) for line in lines if line]
    except ValueError as error:
        raise LedgerBroken(f"an entry cannot be read: {error}") from error


def _holds(event: Intent, words: str) -> bool:
    return any(words == fact or (isinstance(fact, list | tuple) and words in fact) for fact in event.action.values())
