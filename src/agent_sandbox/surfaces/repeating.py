"""What the options for deterministic runs make of a piece of work."""

from __future__ import annotations

import os
import sys

from agent_sandbox.engine.work import Work
from agent_sandbox.errors import PolicyError
from agent_sandbox.surfaces.arguments import Request, UsageError
from agent_sandbox.values import replace

LARGEST_INPUT = 16 << 20  # bytes of standard input that a record may hold


def check(request: Request) -> None:
    """Raise `UsageError` for options that are empty words without another."""
    for option in ("--seed", "--record"):
        if request.has(option) and not request.has("--deterministic"):
            raise UsageError(f"{option} is for deterministic runs", hint="add --deterministic")
    if request.has("--record") and not request.has("--throw-away"):
        raise UsageError(
            "--record is for throw-away runs: what earlier ones left in the sandbox is not in a record", hint="add --throw-away"
        )


def repeated(request: Request, work: Work) -> Work:
    """The same work, to be the same every time. At a terminal it has no input: what somebody would type is not known."""
    stdin = b"" if isinstance(work.stdin, int) and os.isatty(work.stdin) else work.stdin
    if request.has("--record") and isinstance(stdin, int):
        stdin = sys.stdin.buffer.read(LARGEST_INPUT + 1)
        if len(stdin) > LARGEST_INPUT:
            raise PolicyError(f"standard input is larger than the {LARGEST_INPUT >> 20} MiB that a record holds", hint="put it into a file")
    record = request.value("--record")
    return replace(work, seed=_seed(request.value("--seed")), stdin=stdin, record="" if record is None else os.path.abspath(record))


def _seed(text: str | None) -> int:
    if text is None:
        return 0
    if not (text.isascii() and text.isdigit()) or len(text) > 20 or int(text) >= 1 << 64:
        raise UsageError(f"--seed takes a whole number from 0 to 2**64 - 1, not {text!r}", hint="for example --seed 7")
    return int(text)
