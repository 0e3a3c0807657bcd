"""Carry a plan out: all of it, or none. Finish interrupted promotions: roll them back, or complete them.

Readers of the tree may see a mixture during a promotion. Three things are promised. After the promotion, or after recovery from an
interruption, the tree has all of the plan or none of it. Nothing outside the tree is written. No change that another program saves
meanwhile is lost: the change stays in the tree, and the promotion is taken back.

Recovery runs before anything else is promoted. It can itself be interrupted and repeated: every step first looks at what is there.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from agent_sandbox._fast.collector import uncollected
from agent_sandbox._fast.encoding import sha256
from agent_sandbox._fast.values import dataclass, replace
from agent_sandbox.errors import Busy, Drift, PolicyError, SandboxError, Unfinished, WorkspaceError
from agent_sandbox.kernel.syscalls import syncfs
from agent_sandbox.workspace.beneath import identity, open_directory, remove_tree
from agent_sandbox.workspace.changes import Contents
from agent_sandbox.workspace.durable import boot_id
from agent_sandbox.workspace.progress import NO_PROGRESS, Progress
from agent_sandbox.workspace.promotion import exchange, staging
from agent_sandbox.workspace.promotion.exchange import take_back
from agent_sandbox.workspace.promotion.journal import (
    Journal,
    PromotionIntent,
    StagedMoves,
    journals,
    keep_olds,
    next_journal,
    rescue,
)
from agent_sandbox.workspace.promotion.plan import Move, Plan, split
from agent_sandbox.workspace.promotion.target import Surprise, TargetTree
from agent_sandbox.workspace.store import Holder, hold

REMEMBERED = 20  # promotions, undos included, whose old entries are kept
TURN_SECONDS, _PAUSE_SECONDS = 60.0, 0.02
_REMEDIES = {
    errno.ENOSPC: "free some space; the changes are still in the sandbox",
    errno.EDQUOT: "your disk quota is used up; the changes are still in the sandbox",
    errno.EROFS: "the filesystem is read-only; the changes are still in the sandbox",
    errno.EACCES: "you may not write there; the changes are still in the sandbox",
    errno.EPERM: "you may not do that there; the changes are still in the sandbox",
}


@dataclass(frozen=True)
class Promotion:
    """A finished promotion. `number` is 0 if there was nothing to do; `digest` identifies the paths and their new entries exactly.

    `undoes` is the number of the promotion that this one undid, or 0.
    """

    number: int
    root: str
    counts: dict[str, int]
    bytes: int
    digest: str
    paths: tuple[str, ...]
    undoes: int = 0
    note: str = ""  # the steps left to do, in words


def promote(
    plan: Plan,
    contents: Contents,
    promotions: str,
    *,
    holder: Holder,
    wait: bool = False,
    undoes: int = 0,
    clock: Callable[[], float] = time.time,
    progress: Progress = NO_PROGRESS,
) -> Promotion:
    """Carry out the plan. The old entries are kept for an undo in `promotions`, the directory of the project's journals.

    `undoes` is the number of the promotion that this one undoes, or 0.

    Raises `PolicyError` for a plan with a refused or held change, `Drift` if the tree is not what the plan expects, `Busy` if another
    process promotes to the tree, `Unfinished` if an earlier promotion cannot be finished, and `WorkspaceError` if the disk refuses. In each
    case the tree is as it was.
    """
    _refuse(plan)
    if not plan.steps:
        return Promotion(0, plan.root, plan.counts(), 0, "", (), undoes)
    with lock(promotions, holder, wait=wait):
        if (recovered := recover_locked(promotions)).problems:
            raise Unfinished(recovered.problems[0], hint="nothing can be promoted before that")
        with TargetTree(plan.root) as anchor, _alone(anchor, wait), uncollected():
            return _PromotionRun(plan, contents, anchor, next_journal(promotions), undoes, clock, progress).run()


def _refuse(plan: Plan) -> None:
    refuse_impossible(plan)
    if plan.held:
        first_held = plan.held[0]
        needed = ", ".join(sorted({name for held in plan.held for name in held.classes}))
        raise PolicyError(f"{len(plan.held)} of the changes need their own approval ({needed}); the first: {first_held.path!r}")


def refuse_impossible(plan: Plan) -> None:
    """Raise `PolicyError` if the plan has changes that can never be promoted, not even with approval."""
    if plan.refused:
        first, count = plan.refused[0], len(plan.refused)
        what = "a change" if count == 1 else f"{count:,} changes"
        raise PolicyError(
            f"{what} cannot be promoted{'' if count == 1 else '; the first'}: {first.path!r}: {first.why}; nothing was changed",
            hint="leave it out: --skip" if count == 1 else "leave them out: --skip",
        )


@contextmanager
def _alone(anchor: TargetTree, wait: bool) -> Iterator[None]:
    """Lock the tree against any other promotion, even one with another state directory. The lock ends when `anchor` closes the root.

    Every promotion outside of a project is one to the whole machine. So they take turns there: each waits for the others for a while.
    """
    give_up_at = time.monotonic() + (TURN_SECONDS if anchor.path == "/" else 0)
    while True:
        try:
            fcntl.flock(anchor.root, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            break
        except BlockingIOError:
            if time.monotonic() >= give_up_at:
                raise Busy(f"another process is promoting to {anchor.path!r}", hint="wait for it, or end that process") from None
        time.sleep(_PAUSE_SECONDS)
    yield


def place_of(plan: Plan) -> str:
    """Return the directory for the staging directory, relative to the plan's root.

    For a project that is the root. For the whole machine it is the deepest directory that contains all changes.
    """
    if plan.place or plan.root != "/":
        return plan.place
    parents = [f"/{split(step.path)[0]}" for step in plan.steps]
    return os.path.commonpath(parents).lstrip("/")


def _room(where: int | str, needed: int, called: str) -> None:
    space = os.statvfs(where)
    free = (space.f_bavail if os.geteuid() else space.f_bfree) * space.f_frsize
    if free < needed:
        raise WorkspaceError(
            f"{needed} bytes are to be written to {called!r}, and {free} are free; nothing was changed", hint=_REMEDIES[errno.ENOSPC]
        )


class _PromotionRun:
    def __init__(
        self,
        plan: Plan,
        contents: Contents,
        anchor: TargetTree,
        journal: Journal,
        undoes: int,
        clock: Callable[[], float],
        progress: Progress,
    ) -> None:
        self.progress = progress
        self.plan = plan
        self.contents = contents
        self.anchor = anchor
        self.journal = journal
        place = place_of(plan)
        name = staging.PREFIX + os.urandom(6).hex()
        self.intent = PromotionIntent(plan.root, anchor.identity, place, name, clock(), boot_id(), undoes, dict(plan.meanings))

    def run(self) -> Promotion:
        self._check_place()
        prepared = self._prepare()
        try:
            done = self._make(prepared)
        except BaseException as error:
            self._take_back(prepared, error)
            raise
        try:
            keep_olds(self.journal, self.anchor.directory(self.intent.place), self.intent.staging)
        except (WorkspaceError, OSError) as error:  # the promotion is done, even if the backup fails
            left = os.path.join(self.plan.root, self.intent.place, self.intent.staging)
            return replace(done, note=f"what was there before is still in {left}, and is put away the next time: {error}")
        self._forget_the_oldest()
        return done

    def _check_place(self) -> None:
        _room(self.anchor.root, self.plan.bytes, self.plan.root)
        if os.stat(self.journal.promotions).st_dev != self.anchor.identity[0]:  # then the old entries are copied
            _room(self.journal.promotions, self.plan.replaced_bytes, self.journal.promotions)
        with self._explained():
            place = self.anchor.directory(self.intent.place)
        left = [name for name in os.listdir(place) if name.startswith(staging.PREFIX)]
        if left:
            path = os.path.join(self.plan.root, self.intent.place, left[0])
            raise Unfinished(
                f"{path!r} was left by a promotion that this state directory does not know",
                hint="finish it with the state directory it was begun with; it may hold the only copy of files that were there before",
            )

    def _prepare(self) -> StagedMoves:
        """Stage all steps of the plan in a new staging directory. After an error the staging directory is removed again."""
        with self._explained():
            try:
                self.journal.begin(self.intent)
                place = self.anchor.directory(self.intent.place)
                self.staging = staging.make(place, self.intent.staging)
                try:
                    self.progress.begin("copying", self.plan.files, self.plan.bytes)
                    moves = [
                        staging.stage(step, str(number), self.anchor, self.staging, self.contents, self.progress)
                        for number, step in enumerate(self.plan.steps)
                    ]
                    for move in moves:
                        exchange.check(move, self.anchor)
                    known = self.anchor.known()
                    known[os.path.join(self.intent.place, self.intent.staging)] = identity(self.staging)
                    prepared = StagedMoves(tuple(moves), known)
                    self.progress.begin("writing to disk", at_once=True)
                    syncfs(self.staging)
                    self.journal.prepare(prepared.moves, prepared.directories)
                except BaseException:
                    os.close(self.staging)
                    raise
            except BaseException:
                self._clear_away()
                raise
        return prepared

    def _make(self, prepared: StagedMoves) -> Promotion:
        with self._explained():
            self.progress.begin("putting everything in place", len(prepared.moves))
            for move in prepared.moves:
                self.progress.advance(files=1)
                try:
                    exchange.make(move, self.anchor, self.staging)
                except OSError as error:  # the error names a slot; name the path instead
                    raise OSError(error.errno, os.strerror(error.errno or 0), move.path) from error
            if moved := self.anchor.moved():
                raise Surprise(moved[0], "it was moved while it was being written to")
            self.progress.begin("writing to disk", at_once=True)
            syncfs(self.staging)
            done = self._result(prepared.moves)
            self.journal.commit({name: value for name, value in vars(done).items() if name not in ("paths", "note")})
        os.close(self.staging)
        return done

    def _result(self, moves: tuple[Move, ...]) -> Promotion:
        digest = sha256()
        for move in moves:
            for path, seen in (("", move.new), *move.within.items()):
                what = (move.path, path, (seen.node.type.value, seen.node.mode, seen.node.target, seen.digest) if seen else "")
                digest.update(f"{what!r}\n".encode())
        paths = tuple(os.path.join(self.plan.root, move.path) for move in moves)
        return Promotion(
            self.journal.number, self.plan.root, self.plan.counts(), self.plan.bytes, digest.hexdigest(), paths, self.intent.undoes
        )

    def _take_back(self, prepared: StagedMoves, error: BaseException) -> None:
        """Take back the moves after `error`. Raises `Unfinished` if that cannot be done now."""
        try:
            self.journal.retract()
            roll_back(self.journal, self.intent, prepared, self.anchor, self.staging)
        finally:
            os.close(self.staging)
        self._clear_away()
        if isinstance(error, Drift) and os.path.isdir(self.journal.kept):
            error.kept = self.journal.kept

    def _forget_the_oldest(self) -> None:
        closed = [journal for journal in journals(self.journal.promotions) if journal.closed]
        for journal in closed[:-REMEMBERED]:
            with suppress(WorkspaceError):  # retried the next time
                journal.drop()

    def _clear_away(self) -> None:
        remove_tree(self.anchor.directory(self.intent.place), self.intent.staging)
        self.journal.drop()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Surprise as error:
            path = os.path.join(self.plan.root, error.path)
            raise Drift(
                f"{path!r} is not as expected: {error.why}; nothing was changed",
                paths=(path,),
                hint="look at the changes again; --merge brings both together",
            ) from error
        except OSError as error:
            hint = _REMEDIES.get(error.errno or 0, "the changes are still in the sandbox")
            what = f"{error.strerror or error}{f': {error.filename!r}' if error.filename else ''}"
            raise WorkspaceError(f"cannot promote to {self.plan.root!r}: {what}; nothing was changed", hint=hint) from error


@dataclass(frozen=True)
class Recovery:
    """The interrupted promotions that were completed (`finished`) or rolled back, by number.

    `problems` describes promotions for which neither was possible yet. They are tried again the next time.
    """

    finished: tuple[int, ...] = ()
    rolled_back: tuple[int, ...] = ()
    kept: tuple[str, ...] = ()  # directories with entries that belong to others
    problems: tuple[str, ...] = ()


def lock(promotions: str, holder: Holder, *, wait: bool) -> AbstractContextManager[None]:
    """Hold the lock on the promotions of one project for the length of a block. Raises `Busy`, naming the holder."""
    os.makedirs(promotions, mode=0o700, exist_ok=True)
    return hold(os.path.join(promotions, "lock"), holder, wait=wait, what="a promotion to this project")


def recover(promotions: str, holder: Holder, *, wait: bool = True) -> Recovery:
    """Complete or roll back interrupted promotions. A promotion for which that fails is reported in the result.

    Raises `Busy` if another process holds the lock and `wait` is not set.
    """
    if all(journal.closed for journal in journals(promotions)):
        return Recovery()
    with lock(promotions, holder, wait=wait):
        return recover_locked(promotions)


def recover_locked(promotions: str) -> Recovery:
    """Complete or roll back interrupted promotions, for a caller that already holds the lock."""
    finished: list[int] = []
    rolled_back: list[int] = []
    kept: list[str] = []
    problems: list[str] = []
    for journal in journals(promotions):
        if journal.closed:
            continue
        try:
            committed = journal.committed
            _finish(journal)
            (finished if committed else rolled_back).append(journal.number)
        except (SandboxError, OSError) as error:
            problems.append(f"promotion {journal.number} cannot be brought to its end yet: {error}")
        if os.path.isdir(journal.kept):
            kept.append(journal.kept)
    return Recovery(tuple(finished), tuple(rolled_back), tuple(kept), tuple(problems))


def _finish(journal: Journal) -> None:
    intent = journal.intent()
    if intent is None:
        journal.drop()
        return
    with TargetTree(intent.root) as anchor:
        restarted = intent.boot != boot_id()
        if anchor.identity != intent.identity and not (restarted and anchor.identity[1] == intent.identity[1]):
            raise Unfinished(
                f"{intent.root!r} is not the directory that was promoted to", hint="put that one back in its place; nothing was changed"
            )
        prepared = journal.prepared(device=anchor.identity[0] if restarted else None)
        if prepared is not None:
            for path, known in prepared.directories.items():
                anchor.expect(path, known)
        place = anchor.directory(intent.place)
        if journal.committed:
            keep_olds(journal, place, intent.staging)
            return
        if prepared is not None:
            staging = _staging(anchor, intent, prepared)
            try:
                roll_back(journal, intent, prepared, anchor, staging)
            finally:
                if staging is not None:
                    os.close(staging)
        remove_tree(place, intent.staging)
        journal.drop()


def roll_back(journal: Journal, intent: PromotionIntent, prepared: StagedMoves, anchor: TargetTree, staging: int | None) -> None:
    """Take back every move. Afterwards the tree is as it was, except for changes that others made meanwhile.

    Raises `Unfinished`, naming the first failure, if an entry cannot be restored; all other entries are restored even then.
    """
    failures: list[str] = []
    keep = _rescuer(journal, staging)
    for move in reversed(prepared.moves):
        try:
            take_back(move, anchor, staging, keep)
        except (Surprise, OSError) as error:
            failures.append(str(error))
    if failures:
        path = os.path.join(intent.root, intent.place, intent.staging)
        raise Unfinished(
            f"{len(failures)} of {len(prepared.moves)} files in {intent.root!r} could not be put back; the first: {failures[0]}",
            hint=f"what was there before is in {path!r}; it is tried again the next time",
        )
    syncfs(anchor.root)
    journal.untouched()


def _staging(anchor: TargetTree, intent: PromotionIntent, prepared: StagedMoves) -> int | None:
    """Open the staging directory; None if it is gone. Raises `WorkspaceError` if another directory is in its place."""
    try:
        fd = open_directory(anchor.directory(intent.place), intent.staging)
    except FileNotFoundError:
        return None
    known = prepared.directories.get(os.path.join(intent.place, intent.staging))
    if known is not None and identity(fd) != known:
        os.close(fd)
        raise WorkspaceError(
            f"the staging directory in {intent.root!r} was replaced by another one", hint="put the first one back; nothing was changed"
        )
    return fd


def _rescuer(journal: Journal, staging: int | None) -> Callable[[Move], None]:
    def keep(move: Move) -> None:
        assert staging is not None
        rescue(journal, staging, move.slot, split(move.path)[1])

    return keep
