"""How long deciding, recording, checking and reading take, in thousands: one alone is too short to be measured among other things."""

from __future__ import annotations

import os
import tempfile
import time

from agent_sandbox._fast.encoding import Seal
from agent_sandbox.assembly import here
from agent_sandbox.ledger.event import Intent, OutcomeEvent
from agent_sandbox.ledger.writer import Ledger
from agent_sandbox.policy.action import RunCommand
from agent_sandbox.policy.code.validate import validate
from agent_sandbox.policy.decide import decide
from agent_sandbox.policy.model import cloned
from agent_sandbox.policy.tokens import ForSandbox, Only, Until, attenuate, check, mint
from bench.peers import Call, Missing

MANY = 1_000
WRITERS = 16
_ACTION = RunCommand.of(["git", "log", "-n", "3"], cwd="/home/u/project", environment=["HOME", "PATH"])
_FACTS = {"kind": "RunCommand", "argv": list(_ACTION.argv), "cwd": _ACTION.cwd, "environment": list(_ACTION.environment)}
_PROGRAM = """
import json
from collections import defaultdict


def totals(rows, rates, by="month"):
    '''Sum the amounts of each month and kind, in one currency.'''
    found = defaultdict(list)
    for row in rows:
        # Rows without a currency are in ours.
        rate = rates.get(row.get("currency"), 1.0)
        key = (row[by], row["kind"])
        found[key].append(float(row["amount"]) * rate)
    return {key: round(sum(values), 2) for key, values in found.items()}


def main():
    # What was exported last night
    rows = [json.loads(line) for line in LINES]
    print(f"{len(rows)} rows")

    for key, value in sorted(totals(rows, RATES).items()):
        print("/".join(key), value)


if __name__ == "__main__":
    main()
"""
_INTENT = Intent(_FACTS, _ACTION.digest(), "p" * 64, "command", "a-sandbox")


def recording() -> Call:
    """As the gate does for a run, one after the other: an intent, and how it ended. Each is written when `record` returns."""
    ledger = _ledger()

    def call() -> None:
        with ledger.held():
            _record(ledger, MANY)

    return call


def recording_briefly() -> Call:
    """The same by who opens the files for each entry, as a single run does."""
    ledger = _ledger()
    return lambda: _record(ledger, MANY)


def recording_from_many() -> Call:
    """The same from sixteen processes at once, which take turns at the lock."""
    ledger = _ledger()
    writers = [_Writer(ledger) for _ in range(WRITERS)]

    def call() -> None:
        for writer in writers:
            writer.begin()
        for writer in writers:
            writer.finish()

    return call


def checking() -> Call:
    """A capability that was narrowed once, against an action that it covers."""
    key = Seal(os.urandom(32))
    granted = mint(key, os.urandom(16), (ForSandbox("box"), Until(1e12), Only((("run", "git", "**"),))))
    token = attenuate(granted, Only((("run", "git", "log", "**"),)))

    def call() -> None:
        for _ in range(MANY):
            check(key, token, _ACTION, sandbox="box", now=1.0)

    return call


def deciding() -> Call:
    """The verdict on a command, and nothing done about it."""
    policy = cloned(masks=())

    def call() -> None:
        for _ in range(MANY):
            decide(policy, (), _ACTION, now=1.0)

    return call


def reading() -> Call:
    """The early look at a program of a thousand lines, as agents write them: nothing in it is an issue."""
    source = _PROGRAM * (1_000 // _PROGRAM.count("\n"))

    def call() -> None:
        if not validate(source).valid:
            raise Missing("the program meets a pattern")

    return call


class _Writer:
    """A process of its own that records its share whenever it is told to. It ends when we do, and those who were forked after it have."""

    def __init__(self, ledger: Ledger) -> None:
        told, self._tell = os.pipe()
        self._said, say = os.pipe()
        if os.fork() == 0:
            os.close(self._tell)
            with ledger.held():
                while os.read(told, 1):
                    _record(ledger, MANY // WRITERS + 1)
                    os.write(say, b".")
            os._exit(0)
        os.close(told)
        os.close(say)

    def begin(self) -> None:
        os.write(self._tell, b".")

    def finish(self) -> None:
        if not os.read(self._said, 1):
            raise Missing("a writer has ended")


def _record(ledger: Ledger, count: int) -> None:
    for _ in range(count // 2):
        sequence = ledger.record(_INTENT).sequence
        ledger.record(OutcomeEvent(sequence, "done", {"exit_code": 0, "reason": "exited", "changes": 0}, "a-sandbox"))


def _ledger() -> Ledger:
    beside = os.path.dirname(here().host.state)  # on the same disk as the real one, and not in the store
    os.makedirs(beside, exist_ok=True)
    directory = tempfile.mkdtemp(prefix="ledger.", dir=beside)
    ledger = Ledger(os.path.join(directory, "ledger.jsonl"), clock=time.time, segment_bytes=1 << 30)
    ledger.record(_INTENT)
    return ledger
