"""The options of `log` and `log verify`. Apart from `options`, because no other verb needs them."""

from __future__ import annotations

import time
from datetime import datetime

from agent_sandbox._fast.values import dataclass
from agent_sandbox.cli.grammar import COMMON
from agent_sandbox.cli.options import read_count, read_seconds
from agent_sandbox.cli.parser import Request, UsageError
from agent_sandbox.errors import PolicyError
from agent_sandbox.ledger.event import CATEGORIES, LEVELS
from agent_sandbox.ledger.export import FORMS

_OF_VERIFY = ("--keys", "--checkpoint", "--public-key")


@dataclass(frozen=True)
class LogOptions:
    """Options of `log`. `limit` is the number of newest entries; None for all. `collect` keeps the entries for the result.

    With `everywhere`, the entries of all projects are wanted, not only those of one.
    """

    since: float | None = None
    until: float | None = None
    category: str = ""
    level: str = ""
    sandbox: str = ""
    denied: bool = False
    words: str = ""
    limit: int | None = None
    form: str | None = None
    follow: bool = False
    pager: bool = False
    collect: bool = False
    project: str | None = None
    everywhere: bool = False

    @classmethod
    def read(cls, request: Request) -> LogOptions:
        level, form, category = request.value("--level") or "", request.value("--format"), request.value("--category") or ""
        if category and category not in CATEGORIES:
            raise UsageError(f"--category takes {', '.join(CATEGORIES[:-2])}, not {category!r}", hint="without it, all are shown")
        if level and level not in LEVELS:
            raise UsageError(f"--level takes {', '.join(LEVELS)}, not {level!r}", hint="entries of that level and above are shown")
        if form is not None and form not in FORMS:
            raise UsageError(f"--format takes {', '.join(FORMS)}, not {form!r}", hint="without it, lines for people are printed")
        for option in _OF_VERIFY:
            if request.has(option):
                raise UsageError(f"{option} goes with log verify", hint="see: agent-sandbox help log")
        if request.has("--all") and request.has("--project"):
            raise UsageError("--all and --project do not go together", hint="--all shows all projects")
        if request.has("--follow") and request.has("--json"):
            raise UsageError("--follow has no end, and --json is one document", hint="use --format jsonl")
        return cls(
            _moment("--since", request.value("--since")),
            _moment("--until", request.value("--until")),
            category,
            level,
            request.value("--sandbox") or "",
            request.has("--denied"),
            request.value("--grep") or "",
            read_count("--limit", request.value("--limit") or ("none" if form else "100")),
            form,
            request.has("--follow"),
            form is None and not request.has("--no-pager"),
            request.has("--json"),
            request.value("--project"),
            request.has("--all") or (request.value("--project") is None and (form is not None or request.has("--sandbox"))),
        )


@dataclass(frozen=True)
class LogVerifyOptions:
    """Options of `log verify`. Without a file, this user's ledger is verified."""

    file: str | None = None
    keys: str | None = None
    checkpoints: tuple[str, ...] = ()
    public_key: str | None = None

    @classmethod
    def read(cls, request: Request) -> LogVerifyOptions:
        wrong = next((option for option in request.given if option not in (*_OF_VERIFY, *COMMON)), None)
        if wrong is not None:
            raise UsageError(f"{wrong} does not go with log verify", hint="see: agent-sandbox help log")
        file = request.words[1] if len(request.words) > 1 else None
        return cls(file, request.value("--keys"), request.values("--checkpoint"), request.value("--public-key"))


def _moment(option: str, text: str | None) -> float | None:
    """Return a time as seconds since 1970. Reads a date (`2026-11-16`, `2026-11-16T06:30`) or a time ago (`90s`, `30m`, `2h`, `7d`)."""
    if text is None:
        return None
    if text[:4].isdigit() and "-" in text:
        try:
            return datetime.fromisoformat(text).timestamp()
        except ValueError:
            raise PolicyError(f"{option} takes a date or how long ago, not {text!r}", hint=f"write {option} 2h") from None
    try:
        ago = read_seconds(option, text)
    except PolicyError:
        raise PolicyError(f"{option} takes a date or how long ago, not {text!r}", hint=f"write {option} 2h") from None
    return None if ago is None else time.time() - ago
