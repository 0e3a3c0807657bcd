"""Probe on the ledger: every run is recorded, and the ledger is consistent."""

from __future__ import annotations

import os
from pathlib import Path

from agent_sandbox.assembly import here
from agent_sandbox.errors import LedgerBroken
from agent_sandbox.ledger import chain
from agent_sandbox.ledger.encoding import decode
from agent_sandbox.ledger.event import Entry, Intent, Outcome
from agent_sandbox.selftest.bench import Bench
from agent_sandbox.selftest.boxes import Attempt, Box
from agent_sandbox.selftest.probe import Found, Registry

SUBJECT = Registry("state directory")

_LARGEST_VERIFIED = 64 << 20  # bytes of a ledger verified from the beginning; of a longer one, only this run's entries are read


@SUBJECT.probe(
    "ledger",
    "A run is in the ledger, before and after, and the ledger verifies.",
    "runs something, looks for its intent and its outcome, and checks the chain of hashes",
)
def ledger(bench: Bench, box: Box) -> Found:
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
    outcomes = {entry.event.intent for entry in entries if isinstance(entry.event, Outcome)}
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
