"""The options of `prune` as typed values, read like those in `options`."""

from __future__ import annotations

from agent_sandbox._fast.values import dataclass
from agent_sandbox.cli.options import read_count
from agent_sandbox.cli.parser import Request, UsageError


@dataclass(frozen=True)
class PruneOptions:
    """Options of `prune`. `names` are sandboxes; without them, the options and the state of their projects choose."""

    names: tuple[str, ...] = ()
    unused_days: int | None = None
    unchanged: bool = False
    yes: bool = False
    dry_run: bool = False

    @classmethod
    def read(cls, request: Request) -> PruneOptions:
        unused, unchanged = request.value("--unused"), request.has("--unchanged")
        if request.words and (unused is not None or unchanged):
            raise UsageError("name sandboxes, or choose them with --unused and --unchanged", hint="see: agent-sandbox help prune")
        days = read_count("--unused", unused.removesuffix("d")) if unused is not None else None
        return cls(request.words, days, unchanged, request.has("--yes"), request.has("--dry-run"))
