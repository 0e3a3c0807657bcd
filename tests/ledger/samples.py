"""Events and writers that the ledger's tests share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agent_sandbox._fast.encoding import Seal
from agent_sandbox.ledger import private_files
from agent_sandbox.ledger.chain import find_head, walk
from agent_sandbox.ledger.event import Entry, Intent
from agent_sandbox.ledger.writer import PURPOSE, Ledger

SEAL = Seal(b"a key for tests")


def ledger_at(path: Path) -> Ledger:
    """A ledger whose clock stands still."""
    return Ledger(path, clock=lambda: 1.5)


def read(path: str | os.PathLike[str]) -> Iterator[Entry]:
    """Yield the entries of one file in order, each checked against the one before. Raises `LedgerBroken` at the first fault."""
    with open(path, "rb") as file:
        for item in walk(file):
            if isinstance(item, Entry):
                yield item


def intent(note: str = "") -> Intent:
    """An intent that differs by its note."""
    return Intent({"kind": "RunCommand", "argv": ["echo", note]}, "d" * 64, "p" * 64, "command")


def filled(path: Path, count: int) -> Ledger:
    """A ledger with some entries."""
    ledger = ledger_at(path)
    for number in range(count):
        ledger.record(intent(str(number)))
    return ledger


def as_if_it_died(path: Path, content: bytes) -> None:
    """The ledger holds this, because its writer died there: the anchor was not written for what is not whole."""
    path.write_bytes(content)
    ledger = ledger_at(path)
    with path.open("rb") as file:
        head = find_head(file.fileno(), len(content), private_files.load_key(ledger.keys).derived(PURPOSE))
    place = Path(ledger.keys, private_files.ANCHOR)
    place.write_bytes(b"")
    if head.sequence:
        private_files.write_anchor(ledger.keys, head.sequence, head.hash, head.seal, head.end, private_files.boot_id())


def notes_in(path: str) -> list[str]:
    """The notes of all intents, in order."""
    actions: list[Any] = [entry.event.action for entry in read(path) if isinstance(entry.event, Intent)]
    return [action["argv"][1] for action in actions]


def write_many(ledger: Ledger, name: int, count: int, announce: int | None = None) -> None:
    """Record notes `name/0`, `name/1`, …, and announce each on a descriptor once it is recorded."""
    for number in range(count):
        ledger.record(intent(f"{name}/{number}"))
        if announce is not None:
            os.write(announce, f"{name}/{number}\n".encode())


def in_child(work: Callable[[], None]) -> int:
    """Fork a child that does the work and exits with 0, or with 1 when it raised. Returns its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            sys.stderr.write(f"{error!r}\n")
            os._exit(1)
    return pid


def exit_code(pid: int) -> int:
    """Wait for a child."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
