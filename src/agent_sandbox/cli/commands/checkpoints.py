"""`checkpoints`: list the saved sessions, show or delete one, and carry one to another machine."""

from __future__ import annotations

import time
from typing import Literal

from agent_sandbox._fast.values import dataclass
from agent_sandbox.checkpoints import SessionCheckpoint, delete, described, import_checkpoint, list_checkpoints, store
from agent_sandbox.cli.parser import Request, UsageError
from agent_sandbox.cli.render.messages import Console, human_size, remark, shown
from agent_sandbox.cli.results import VerbResult, declined

Question = Literal["list", "show", "delete", "export", "import"]
_WORDS: dict[str, tuple[Question, int]] = {"show": ("show", 1), "delete": ("delete", 1), "export": ("export", 2), "import": ("import", 1)}


@dataclass(frozen=True)
class CheckpointOptions:
    """Options of `checkpoints`: what is asked for, the checkpoint by name or id, and the file."""

    question: Question = "list"
    name: str = ""
    file: str = ""
    yes: bool = False

    @classmethod
    def read(cls, request: Request) -> CheckpointOptions:
        """Read the words of a request. Raises `UsageError`."""
        what, *rest = request.words or ("list",)
        question, count = _WORDS.get(what, ("list", 0 if not request.words else -1))
        if len(rest) != count:
            why = f"checkpoints takes show ID, delete ID, export ID FILE or import FILE, not {' '.join(request.words)!r}"
            raise UsageError(why, hint="see: agent-sandbox help checkpoints")
        if request.has("--yes") and question != "delete":
            raise UsageError("--yes goes with checkpoints delete", hint="leave it out")
        name = rest[0] if question in ("show", "delete", "export") else ""
        return cls(question, name, rest[-1] if question in ("export", "import") else "", request.has("--yes"))


@dataclass(frozen=True)
class CheckpointListing:
    """A saved session. `memory_bytes` is the size of its memory, `bytes` that of its file."""

    id: str
    digest: str
    name: str
    created: float
    bytes: int
    memory_bytes: int
    machine: str
    deterministic: bool

    @classmethod
    def of(cls, saved: SessionCheckpoint) -> CheckpointListing:
        """Return the facts about a checkpoint."""
        return cls(
            saved.id,
            saved.digest,
            shown(saved.name),
            saved.created,
            saved.bytes,
            saved.memory_bytes,
            shown(saved.machine),
            saved.deterministic,
        )


@dataclass(frozen=True)
class CheckpointsResult(VerbResult):
    """The checkpoints of this user, newest first; those asked for, if one was named. `damaged` are ids of files that cannot be read.

    `done` is what was done with the named one: shown, deleted, exported or imported.
    """

    kind = "checkpoints"

    checkpoints: tuple[CheckpointListing, ...]
    damaged: tuple[str, ...] = ()
    done: str | None = None

    def text(self, console: Console) -> None:
        for each in self.checkpoints:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.created))
            print(f"{each.id}  {when}  {human_size(each.bytes):>9}  {each.name}".rstrip())
            if self.done == "shown":
                kind = ", deterministic" if each.deterministic else ""
                print(f"  digest {each.digest}\n  memory {human_size(each.memory_bytes)}, for {each.machine}{kind}")
        for damaged in self.damaged:
            remark(f"{damaged} is damaged: agent-sandbox checkpoints delete {damaged}")
        if self.done in ("deleted", "exported", "imported"):
            console.note(self.done)
        elif not self.checkpoints and not self.damaged:
            console.note('there are no checkpoints; save a session in Python: session.checkpoint("after loading")')


def checkpoints(options: CheckpointOptions, console: Console) -> VerbResult:
    """Do what is asked for. Raises `CheckpointError`."""
    match options.question:
        case "list":
            saved = list_checkpoints()
            damaged = tuple(digest[:12] for digest in store().damaged())
            return CheckpointsResult(tuple(map(CheckpointListing.of, saved)), damaged)
        case "import":
            return _one(import_checkpoint(options.file), "imported")
        case "delete":
            digest = store().locate(options.name)
            if no := declined("checkpoints delete", f"Delete the checkpoint {digest[:12]}?", console, yes=options.yes):
                return no
            delete(digest)
            return CheckpointsResult((), (), "deleted")
        case "export":
            found = described(store().find(options.name))
            found.export(options.file)
            return _one(found, "exported")
        case "show":
            with store().opened(store().locate(options.name)) as opened:  # which checks its digest
                return _one(described(opened.stored), "shown")


def _one(saved: SessionCheckpoint, done: str) -> CheckpointsResult:
    return CheckpointsResult((CheckpointListing.of(saved),), (), done)
