"""Durable checkpoints: sessions of the wasm runtime on disk. They outlive every process, and resume on other machines of the same kind.

A checkpoint holds everything that the session knew: its memory, its open files and its own files. Guard it as you guard those. Errors are
as in `session`; a checkpoint that is damaged, of another version or of another machine is a `CheckpointError`, and nothing of it has run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from agent_sandbox._calls import check_type
from agent_sandbox._fast.values import dataclass
from agent_sandbox.assembly import here
from agent_sandbox.engine.state_transfer import Resumption, StateSink
from agent_sandbox.errors import CheckpointError
from agent_sandbox.ledger.event import Noted
from agent_sandbox.session import SandboxSession
from agent_sandbox.workspace.checkpoint_store import LONGEST_NAME, CheckpointFacts, CheckpointStore, CheckpointWriter, StoredCheckpoint
from agent_sandbox.workspace.store import Store

if TYPE_CHECKING:
    from agent_sandbox.engine.turns import InterpreterTurns
    from agent_sandbox.sandbox import Sandbox

__all__ = ["SessionCheckpoint", "import_checkpoint", "list_checkpoints"]


@dataclass(frozen=True)
class SessionCheckpoint:
    """A saved session. `bytes` is its size on disk, `memory_bytes` that of its memory, `created` in seconds since the epoch.

    `machine` is the kind of processor it resumes on. `deterministic` is whether its session was.
    """

    digest: str
    name: str
    created: float
    bytes: int
    memory_bytes: int
    machine: str
    deterministic: bool

    @property
    def id(self) -> str:
        """The beginning of the digest, by which the checkpoint can be named."""
        return self.digest[:12]

    def delete(self) -> None:
        """Delete it. Raises `CheckpointError` if it is gone already."""
        delete(self.digest)

    def export(self, path: str | os.PathLike[str]) -> None:
        """Copy it to a new file, which can be imported elsewhere. Raises `CheckpointError`, also if the file exists."""
        note("exported", self.digest)
        store().export(self.digest, os.fspath(path))


def list_checkpoints() -> tuple[SessionCheckpoint, ...]:
    """Return the checkpoints of this user, newest first. A damaged one is left out."""
    return tuple(map(described, store().all()))


def import_checkpoint(path: str | os.PathLike[str]) -> SessionCheckpoint:
    """Copy a file that was exported into the state directory. Raises `CheckpointError` if it is damaged or of another user.

    A checkpoint is a program: it can do what the sandbox that resumes it permits, and nothing else.
    """
    return described(store().take_in(os.fspath(path), lambda taken: note("imported", taken.digest)))


def store() -> CheckpointStore:
    """Return the checkpoints of this user."""
    return CheckpointStore(Store.open(here().host.state))


def delete(digest: str) -> None:
    """Delete a checkpoint, also a damaged one. Raises `CheckpointError` if there is none."""
    checkpoints = store()
    checkpoints.locate(digest)
    note("deleted", digest)
    checkpoints.delete(digest)


def note(what: str, digest: str) -> None:
    """Record in the ledger what is done with a checkpoint, before it is done."""
    here().ledger().record(Noted(f"checkpoint.{what}", {"target": digest}))


def described(stored: StoredCheckpoint) -> SessionCheckpoint:
    """Return a checkpoint of the store, for programs."""
    facts = stored.facts
    return SessionCheckpoint(
        stored.digest, facts.name, facts.created, stored.bytes, facts.memory_bytes, facts.machine, deterministic=facts.seed is not None
    )


def save(turns: InterpreterTurns, sandbox: Sandbox, name: str, seed: int | None, idle: float | None) -> SessionCheckpoint:
    """Save a session that waits for its next turn. `seed` is that of a deterministic one; `idle` is how long it may wait afterwards."""
    check_type("name", name, str, write='session.checkpoint("after loading")')
    if len(name) > LONGEST_NAME or not name.isprintable():
        raise CheckpointError(f"a name has at most {LONGEST_NAME} printable characters", hint="choose another")

    def write(writer: CheckpointWriter) -> None:
        def begin(image: str, size: int) -> None:
            identity = sandbox._session.runtimes.identity
            digest = identity.get(f"image {image}", "")
            facts = {"machine": identity["machine"], "interpreter": identity["interpreter"], "image": image, "image_digest": digest}
            writer.begin(CheckpointFacts.of({"name": name, "created": time.time(), "memory_bytes": size, "seed": seed, **facts}))

        turns.save(StateSink(begin, writer.add), idle)
        if writer.facts is None:
            raise CheckpointError("the session was not saved: it did not send its state", hint="open another session")

    return described(store().save(write, lambda saved: turns.note("checkpoint.saved", {"target": saved.digest, "bytes": saved.bytes})))


def resume(
    sandbox: Sandbox, checkpoint: SessionCheckpoint | str, env_vars: Mapping[str, str] | None, options: dict[str, object]
) -> SandboxSession:
    """Return a session of the sandbox that goes on from a checkpoint. Everything is judged by the sandbox's own rules."""
    if not isinstance(checkpoint, SessionCheckpoint | str):
        check_type("checkpoint", checkpoint, SessionCheckpoint, write='Sandbox(runtime="wasm").resume(checkpoint)')
    if sandbox.config.runtime not in ("wasm", "auto"):
        raise CheckpointError(
            f"a checkpoint cannot be resumed on the runtime {sandbox.config.runtime!r}", hint='use Sandbox(runtime="wasm")'
        )
    checkpoints = store()
    digest = checkpoint.digest if isinstance(checkpoint, SessionCheckpoint) else checkpoints.find(checkpoint).digest
    with checkpoints.opened(digest) as opened:
        facts = opened.stored.facts
        _check_that_it_fits(facts, here().wasm().identity, deterministic=sandbox.config.deterministic)
        added = {**sandbox.config.env_vars, **(env_vars or {})}
        resumption = Resumption(facts.image, facts.memory_bytes, opened.content, added)
        session = SandboxSession(sandbox, env_vars=env_vars, resumes=(resumption, facts.seed), **options)  # type: ignore[arg-type]
        try:
            session._resume(digest)
        except BaseException:
            session.close()
            raise
    return session


def _check_that_it_fits(facts: CheckpointFacts, identity: Mapping[str, str], *, deterministic: bool) -> None:
    """Raise `CheckpointError` if a checkpoint is of another machine, interpreter or kind of session."""
    if facts.machine != identity["machine"]:
        why = f"the checkpoint was saved on a machine of the kind {facts.machine!r}, and this one is {identity['machine']!r}"
        raise CheckpointError(why, hint="resume it on a machine of that kind")
    if facts.interpreter != identity["interpreter"] or facts.image_digest != identity.get(f"image {facts.image}"):
        why = "the checkpoint was saved with another version of this program or of its interpreter"
        raise CheckpointError(why, hint="install the versions it was saved with")
    if deterministic != (facts.seed is not None):
        kind = "deterministic" if facts.seed is not None else "not deterministic"
        raise CheckpointError(f"the saved session was {kind}", hint=f"use Sandbox(deterministic={facts.seed is not None})")
