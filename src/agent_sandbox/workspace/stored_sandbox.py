"""The stored sandbox of a project: its changes, its snapshots, and its layers for a run.

The command line and the SDK share it. Methods that change anything take the sandbox's lock, and raise `Busy` during a run; methods that
only read do not.
"""

from __future__ import annotations

import errno
import math
import os
import time

from agent_sandbox._fast.contexts import ExitStack, contextmanager, suppress
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, replace
from agent_sandbox.errors import WorkspaceError
from agent_sandbox.kernel.ids import FIRST_ID
from agent_sandbox.kernel.mount_plan import InImage, OnDisk, quote_target
from agent_sandbox.policy.paths import contains
from agent_sandbox.workspace.durable import explained
from agent_sandbox.workspace.layers import history
from agent_sandbox.workspace.layers.history import History, HistoryStep, Present, Snapshot, layer_targets
from agent_sandbox.workspace.layers.image import LEAST_CAPACITY, TRASH, Growth, NoRoom, acknowledge_loss, attach, opened
from agent_sandbox.workspace.originals.runs import TICK_NS, await_file_clock, begin, end, file_clock_ns, has_run
from agent_sandbox.workspace.store import SandboxState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from agent_sandbox.policy.model import Policy
    from agent_sandbox.workspace.changes import ChangeSet
    from agent_sandbox.workspace.drift import DriftReport
    from agent_sandbox.workspace.layers.change_list import Witnesses
    from agent_sandbox.workspace.layers.stack import Stack
    from agent_sandbox.workspace.originals.files import Recalled
    from agent_sandbox.workspace.progress import Progress
    from agent_sandbox.workspace.reality import Base, Bases

TIDYING_SECONDS = 0.05  # spent at the end of a run
# A run that is the first to change so many paths, and as many as all runs before it, writes the list of changes at its end. So the end
# costs in proportion to what the run did, and a short run in a sandbox with many changes pays nothing.
WORTH_A_LIST = 500
MOST_AT_END = 100_000  # paths: the values of a longer list would fill the memory of a caller who may not want it
LOST = "the machine stopped while this sandbox was in use: what was written to it last may be lost"


@dataclass(frozen=True)
class ForRun:
    """The layers for one run. `growth` enlarges the image of the layers during the run; None without an image."""

    layers: InImage | OnDisk
    present: Present
    notes: tuple[str, ...] = ()
    growth: Growth | None = None
    since_ns: int = 0  # start of this run, or of an earlier run whose bases were not kept: see `originals.runs.begin`
    began_ns: int = 0  # start of this run


@dataclass(frozen=True)
class Rollback:
    """A finished rollback to the snapshot `to`. `kept` is the automatic snapshot of the state before; None if nothing had run."""

    to: Snapshot
    kept: Snapshot | None = None


class Stored:
    """The stored sandbox of a project. If none exists yet, there are no changes and no snapshots."""

    def __init__(self, state: SandboxState) -> None:
        self.state = state

    @contextmanager
    def opened(self, *, reading: bool = True) -> Iterator[Stack]:
        """Open the present layers for the length of a block, also while a run writes to them. Raises `WorkspaceError`.

        Without `reading`, raises `NoRoom` if the disk has no room to write to them: what is called in the block can then write.
        """
        from agent_sandbox.workspace.layers.stack import stacked

        layers = self.state.history().layers
        with ExitStack() as ends:
            top = ends.enter_context(self._top(reading=reading)) if self.state.exists else -1
            yield ends.enter_context(stacked(top, layers if top >= 0 else (), userxattr=_userxattr(), owner_shift=_owner_shift()))

    def open_for_promotion(self, until_the_end: ExitStack, *, drops: bool) -> tuple[Stack, NoRoom | None]:
        """Open the layers so that a promotion can drop changes from them, if it `drops` any. On a full disk, only to read: return why."""
        if drops:
            try:
                return until_the_end.enter_context(self.opened(reading=False)), None
            except NoRoom as full:
                return until_the_end.enter_context(self.opened()), full
        return until_the_end.enter_context(self.opened()), None

    def changes(self, policy: Policy) -> ChangeSet:
        """Return the changes that the sandbox would make on the machine. They are cached while nothing runs in the sandbox."""
        masks = _masks(policy)
        key = self._key(masks)
        if (known := self._listed(key)) is not None:
            return known
        with self.opened() as stack:
            return self._list(stack, masks, key)

    def changes_in(self, stack: Stack, policy: Policy, progress: Progress | None = None) -> ChangeSet:
        """Return the changes in layers that are already open, as `changes` does."""
        if progress is not None:
            progress.begin("listing the changes")
        masks = _masks(policy)
        key = self._key(masks) if stack.numbers == self.state.history().layers else None
        known = self._listed(key)
        return self._list(stack, masks, key, progress) if known is None else known

    def _key(self, masks: Collection[str]) -> str | None:
        from agent_sandbox.workspace.layers.change_list import key_of

        return key_of(self.state.path, self.state.bases, self.state.history().layers, masks)

    def _listed(self, key: str | None) -> ChangeSet | None:
        """Return the list that was kept under this key; None if there is none."""
        from agent_sandbox.workspace.layers.change_list import load_changes

        return None if key is None else load_changes(self.state.path, key)

    def _list(self, stack: Stack, masks: Collection[str], key: str | None, progress: Progress | None = None) -> ChangeSet:
        """Read the changes from the layers, and keep the list under this key, if there is one."""
        from agent_sandbox.workspace.layers.change_list import Witnesses, save_changes

        witnesses = Witnesses()
        changes = _read_changes(stack, masks, self.bases(stack), witnesses, progress)
        if key is not None:
            with suppress(OSError):  # then it is read again the next time
                save_changes(self.state.path, key, changes, witnesses)
        return changes

    def bases(self, stack: Stack | None = None) -> Recalled:
        """Return the originals of the paths that the layers cover. `stack` are these layers, if they are already open."""
        from agent_sandbox.workspace.originals.files import recall

        return recall(self.state.bases, (self.state.history().layers if stack is None else stack.numbers)[::-1])

    def open_base(self, base: Base) -> int:
        """Return a descriptor of a file's original content. Raises `WorkspaceError` when it was not kept."""
        from agent_sandbox.workspace.originals.files import open_content

        return open_content(self.state.bases, base)

    def read_base(self, base: Base) -> bytes:
        """Return a file's original content. Raises `WorkspaceError` when it was not kept."""
        from agent_sandbox.workspace.originals.files import read_content

        return read_content(self.state.bases, base)

    def drift(self, changes: ChangeSet, masks: Collection[str] = ()) -> DriftReport:
        """Return the drift of the project since the clone. `changes` are the sandbox's own. Raises OSError if the project is gone."""
        from agent_sandbox.workspace import clone_inventory, read_tracking
        from agent_sandbox.workspace.drift import judge, look_for_drift, with_judged
        from agent_sandbox.workspace.promotion.inspect import look_at

        known = clone_inventory.recall(self.state.names)
        cloned_ns = known.began_ns if isinstance(known, clone_inventory.Inventory) else int((self.state.created() or self._now()) * 1e9)
        read, bases, inside = read_tracking.recall(self.state.reads), self.bases(), changes.within(self.state.project)
        drift = look_for_drift(self.state.project, cloned_ns, known, changes, bases, masks=masks, reads=read)
        # A promotion makes a new clone. Reality may have moved on before the promotion, at paths that stayed in the sandbox.
        return with_judged(drift, judge(inside, bases, look_at(self.state.project, inside)))

    def remember_names(self, masks: Collection[str], cloned_ns: int | None = None) -> None:
        """Make the inventory of the project. `cloned_ns` is the time of the clone, by default now. Takes a second for a million entries."""
        from agent_sandbox.workspace.clone_inventory import remember

        with suppress(OSError):  # without an inventory, drift reports that it cannot find removed entries
            remember(self.state.project, self.state.names, cloned_ns=cloned_ns, skip=masks)

    @property
    def names_are_known(self) -> bool:
        """Whether there is an inventory of the project."""
        return os.path.exists(self.state.names)

    def snapshots(self) -> History:
        """Return the history of the sandbox: the snapshots and the present state."""
        return self.state.history()

    def snapshot(self, label: str = "") -> Snapshot:
        """Take a snapshot of the present state. In an image the cost does not depend on the size; in a directory everything is copied."""
        with self.state.lock(command="snapshot"):
            self.state.prepare(LEAST_CAPACITY)
            move = history.take(self.state.history(), label, now=self._now(), stacking=self.state.stacking)
            self._perform(move)
            assert move.snapshot is not None
            return move.snapshot

    def rollback(self, to: str | int | None = None) -> Rollback:
        """Go back to a snapshot, given by id or label, by default the last snapshot. An automatic snapshot keeps the present state.

        Raises `PolicyError` if no snapshot or several match.
        """
        with self.state.lock(command="rollback"):
            before = self.state.history()
            target = history.find(before, to)
            move = history.go_back(before, target, now=self._now(), stacking=self.state.stacking)
            self._perform(move)
            return Rollback(target, move.snapshot)

    def forget(self, which: str | int) -> Snapshot:
        """Delete a snapshot, and the layers that no other state needs. Raises `PolicyError` as `rollback` does."""
        with self.state.lock(command="forget"):
            before = self.state.history()
            target = history.find(before, which)
            after = history.forget(before, target)
            self._save(after)
            with suppress(NoRoom), self._top() as top:  # on a full disk, the next run removes what nothing refers to
                self._tidy(top, after)
            return target

    def drop(self, paths: Collection[str], label: str, masks: Collection[str] = (), *, places: Collection[str] = ()) -> Snapshot | None:
        """Drop promoted paths from the layers, so that the sandbox sees the real entries there. Return a snapshot of the layers before.

        `places` are promoted directories that stay in the layers, because other changes lie in them. Call it with the lock held.
        """
        began = time.monotonic()
        before = self.state.history()
        move, generation = history.replaced(before, label, now=self._now(), stacking=self.state.stacking)
        with self._top() as top:
            self._squash(top, before.layers, generation, without=paths, places=places)
        self._save(move.history)
        self._clone_anew(masks, began)
        with suppress(FileNotFoundError):
            for name in os.listdir(self.state.reads):
                os.unlink(os.path.join(self.state.reads, name))
        return move.snapshot

    def _clone_anew(self, masks: Collection[str], changed: float) -> None:
        """Set the clone time to now and renew the inventory. Waits until writes made before `changed` are older than the new clone."""
        time.sleep(max(0.0, TICK_NS / 1e9 - (time.monotonic() - changed)))
        self.remember_names(masks)

    def restore(self, label: str, masks: Collection[str] = ()) -> Snapshot | None:
        """Make the automatic snapshot with this label the present state again. Call it with the lock held.

        Returns None, and changes nothing, if there is no such snapshot or if something has run since it was taken.
        """
        began = time.monotonic()
        before = self.state.history()
        matches = [each for each in before.snapshots if each.automatic and each.label == label]
        if not matches or before.head != matches[-1].id or has_run(self.state.bases, before.active):
            return None
        self._save(history.restored(before, matches[-1], stacking=self.state.stacking))
        self._clone_anew(masks, began)
        return matches[-1]

    def copy_to(self, other: SandboxState, limit_bytes: int | None) -> None:
        """Copy the present state into another, new sandbox of the same project. Call it with the lock of this sandbox held."""
        from shutil import copyfile

        from agent_sandbox.workspace.layers.squash import squash
        from agent_sandbox.workspace.layers.stack import new_generation
        from agent_sandbox.workspace.originals.files import carry

        before = self.state.history()
        into = before.next
        other.prepare(limit_bytes)
        with explained(f"copy the sandbox of {self.state.project!r}"), self.opened() as stack:
            top = os.open(other.layers, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                with new_generation(top, into) as generation:
                    squash(stack, generation, link=False)
            finally:
                os.close(top)
            os.makedirs(other.bases, mode=0o700, exist_ok=True)
            with suppress(FileNotFoundError):  # not before the first run
                for name in os.listdir(self.state.bases):
                    copyfile(os.path.join(self.state.bases, name), os.path.join(other.bases, name))
            carry(other.bases, before.layers[::-1], into)
        history.save(other.path, history.History(active=into, used=True, next=into + 1))

    def begin_step(self, label: str, limit_bytes: int | None) -> int:
        """Keep the state before a run as a step of the sandbox's timeline. Call it with the lock held. Return the snapshot's number."""
        self.state.prepare(limit_bytes)
        move = history.begin_step(self.state.history(), label, now=self._now(), stacking=self.state.stacking)
        self._perform(move)
        assert move.snapshot is not None
        return move.snapshot.id

    def end_step(self, number: int, outcome: str) -> None:
        """Note how the run of a step ended. Call it with the lock held."""
        self._save(history.end_step(self.state.history(), number, outcome))

    @contextmanager
    def stacks(self) -> Iterator[Callable[[tuple[int, ...]], Stack]]:
        """For the length of a block, yield a function that opens any generations of this sandbox, uppermost first."""
        from agent_sandbox.workspace.layers.stack import stacked

        with self._top(reading=True) as top, ExitStack() as ends:
            yield lambda numbers: ends.enter_context(stacked(top, numbers, userxattr=_userxattr(), owner_shift=_owner_shift()))

    def changes_of(self, stack: Stack, policy: Policy) -> ChangeSet:
        """Return the changes in generations that are open, of any state of this sandbox."""
        return _read_changes(stack, _masks(policy), self.bases(stack))

    def for_run(self, limit_bytes: int | None, until_the_end: ExitStack, asked_ns: int | None = None) -> ForRun:
        """Prepare the layers for a run with this disk limit. Call it with the lock held. The exit stack closes the image after the run.

        `asked_ns` is when the run was asked for, by `file_clock_ns`; now if None. Files written before that are older than the run.
        """
        asked = file_clock_ns() if asked_ns is None else asked_ns
        prepared = self.state.prepare(limit_bytes)
        present = prepared.present
        if not present.used:
            # Before anything can be written: a rollback has to know that there may be a state to keep.
            present = self._save(replace(self.state.history(), used=True))
        if len(present.chain) > history.LONGEST_CHAIN:
            present = self._shorten()
        now = await_file_clock(asked)  # everything written before this call is older than the run
        since = begin(self.state.bases, (*present.chain[::-1], present.active), now_ns=now)
        if not self.state.stacking:
            return ForRun(OnDisk(self.state.layers, str(present.active)), present, prepared.notes, None, since, now)
        image = attach(self.state.image)
        until_the_end.callback(image.close)
        frozen = tuple(map(str, present.chain))
        layers = InImage(self.state.image, image.loop.device, image.identity, str(present.active), frozen, limit_bytes)
        notes = prepared.notes
        if image.lost:
            notes += (LOST,)
            acknowledge_loss(image)
        return ForRun(layers, present, notes, Growth(image, limit_bytes), since, now)

    def after_run(self, top: int, run: ForRun, masks: Collection[str]) -> None:
        """Capture the originals of paths that the run was the first to change, and remove unreferenced generations.

        Call it when nothing writes any more. `top` is the directory of generations. After a `WorkspaceError` or OSError, the next run does
        the rest. Raises `WorkspaceError`, and touches nothing, if `top` is not the directory of this sandbox.
        """
        self._check_top(top, run)
        generation = run.present.active
        uppers = _written(top, generation)
        if uppers:
            from agent_sandbox.workspace.originals.capture import keep

            prefix, already = "user.overlay." if _userxattr() else "trusted.overlay.", self.bases()
            try:
                captured = keep(
                    *(self.state.bases, generation, uppers),
                    since_ns=run.since_ns,
                    began_ns=run.began_ns,
                    already=already,
                    prefix=prefix,
                    masks=masks,
                    handles=not self.state.over_a_copy,
                )
            finally:
                for _, upper in uppers:
                    os.close(upper)
            if max(WORTH_A_LIST, len(already)) <= captured.added <= MOST_AT_END:
                self._list_at_end(top, masks)
        else:
            end(self.state.bases, generation, run.since_ns)
        self._tidy_for_a_moment(top, run.present)
        if run.growth is not None:
            run.growth.put_back(top)

    def _list_at_end(self, top: int, masks: Collection[str]) -> None:
        """Write the list of changes while the layers are open and in memory. To open an image again takes as long as to read it.

        Call it when the end of the run is recorded. Does nothing if the layers cannot be listed: whoever asks for the list is told why.
        """
        from agent_sandbox.workspace.layers.stack import stacked

        with suppress(WorkspaceError, OSError), ExitStack() as ends:
            stack = ends.enter_context(stacked(top, self.state.history().layers, userxattr=_userxattr(), owner_shift=_owner_shift()))
            self._list(stack, masks, self._key(masks))

    def _check_top(self, top: int, run: ForRun) -> None:
        """Raise `WorkspaceError` unless the directory that the guest's side sent holds the layers of this sandbox."""
        if run.growth is not None:
            run.growth.check(top)
        elif not os.path.samestat(os.fstat(top), os.stat(self.state.layers)):
            raise WorkspaceError(f"the layers of this run are not in {self.state.layers!r}", hint="please report this")

    def _tidy_for_a_moment(self, top: int, present: Present) -> None:
        """Remove unreferenced generations within a short time limit. Usually there are none, and no further module is loaded."""
        known = {str(number) for number in (present.active, *present.chain, *present.others)}
        names = os.listdir(top)
        waiting = os.listdir(f"/proc/self/fd/{top}/{TRASH}") if TRASH in names else []
        if waiting or any(name.isdecimal() and name not in known for name in names):
            self._tidy(top, self.state.history(), until=time.monotonic() + TIDYING_SECONDS)

    def _tidy(self, top: int, after: History, *, until: float = math.inf) -> None:
        """Remove the generations that the history `after` does not refer to, and their bases."""
        from agent_sandbox.workspace.layers.stack import tidy
        from agent_sandbox.workspace.originals.files import forget

        forget(self.state.bases, history.referenced(after))
        tidy(top, after, until=until)

    @contextmanager
    def _top(self, *, reading: bool = False) -> Iterator[int]:
        """Open the directory of generations for the length of a block, perhaps only for reading. The sandbox must exist."""
        if self.state.stacking:
            with opened(self.state.image, reading=reading) as (_, top):
                yield top
            return
        with explained(f"open the layers of the sandbox of {self.state.project!r}"):
            top = os.open(self.state.layers, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield top
        finally:
            os.close(top)

    def _perform(self, move: HistoryStep) -> None:
        if move.copies:
            with self._top() as top:
                for source, copy in move.copies:
                    self._squash(top, (source,), copy)
        self._save(move.history)

    def _save(self, after: History) -> Present:
        history.save(self.state.path, after)
        return Present.of(after)

    def _shorten(self) -> Present:
        """Squash a long chain of generations into one. Files are hard links, because snapshots still need the old generations."""
        before = self.state.history()
        after, generation = history.squashed(before)
        with self._top() as top:
            self._squash(top, before.chain, generation)
        return self._save(after)

    def _squash(
        self, top: int, numbers: tuple[int, ...], into: int, *, without: Collection[str] = (), places: Collection[str] = ()
    ) -> None:
        """Merge these generations, uppermost first, and their bases into the new generation `into`, leaving out the paths `without`.

        The bases of `places` are taken from the present real entries.
        """
        from agent_sandbox.workspace.layers.squash import squash
        from agent_sandbox.workspace.layers.stack import new_generation, stacked
        from agent_sandbox.workspace.originals.capture import bases_now
        from agent_sandbox.workspace.originals.files import carry

        with stacked(top, numbers, userxattr=_userxattr(), owner_shift=_owner_shift()) as stack, new_generation(top, into) as generation:
            squash(stack, generation, without=without, link=self.state.stacking)
        if os.path.isdir(self.state.bases):  # not before the first run
            carry(self.state.bases, numbers[::-1], into, without=without, removed=without, anew=bases_now(places))

    def _now(self) -> float:
        return self.state.store.clock()


def _written(top: int, generation: int) -> list[tuple[str, int]]:
    """Return the overlay targets for which a generation holds anything, with descriptors of their upper directories."""
    uppers: list[tuple[str, int]] = []
    try:
        here = os.open(str(generation), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
    except FileNotFoundError:
        return uppers
    try:
        for target in layer_targets(here):
            with suppress(FileNotFoundError):
                upper = os.open(f"{quote_target(target)}/upper", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
                if os.listdir(upper):
                    uppers.append((target, upper))
                else:
                    os.close(upper)
    finally:
        os.close(here)
    return uppers


def stack_in(layers: int, generations: Sequence[str] = ()) -> Stack:
    """Return the stack of a throw-away run. `layers` is a descriptor of its one generation, or of the directory of `generations`."""
    from agent_sandbox.workspace.layers.stack import Stack  # only when changes are asked for

    opened: list[int] = []
    try:
        for name in generations:
            opened.append(os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=layers))
        return Stack.of(opened or [layers], userxattr=_userxattr(), owner_shift=_owner_shift())
    finally:
        for fd in opened:
            os.close(fd)


def changes_of(stack: Stack, policy: Policy, bases: Bases | None = None) -> ChangeSet:
    """Return the changes in layers that were written under a policy, renames included."""
    return _read_changes(stack, _masks(policy), bases or {})


def _read_changes(
    stack: Stack, masks: Collection[str], bases: Bases, witnesses: Witnesses | None = None, progress: Progress | None = None
) -> ChangeSet:
    from agent_sandbox.workspace.layers.readback import read_stack
    from agent_sandbox.workspace.layers.renames import find_renames

    return find_renames(read_stack(stack, masks=masks, bases=bases, witnesses=witnesses, progress=progress), stack)


def _masks(policy: Policy) -> list[str]:
    return [mask.path for mask in policy.files.masks]


def _userxattr() -> bool:
    return os.geteuid() != 0


def _owner_shift() -> int:
    return FIRST_ID if os.geteuid() == 0 else 0


def unseen(top: int, generations: Iterable[int], shown: Collection[str]) -> tuple[str, ...]:
    """Return the trees that have changes in these generations and are not in a view that consists of the trees `shown`. Raises OSError."""
    hidden: set[str] = set()
    for generation in generations:
        with suppress(FileNotFoundError):
            here = os.open(str(generation), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
            try:
                for target in layer_targets(here):
                    if target not in shown:
                        hidden.update(_parts(here, target, shown))
            finally:
                os.close(here)
    return tuple(sorted(hidden))


def _parts(generation: int, target: str, shown: Collection[str]) -> list[str]:
    """Return the trees in which a generation's layer over `target` holds changes that a view of the trees `shown` would hide.

    These are `target` itself if a shown tree contains it, else the shown trees inside it.
    """
    upper = f"{quote_target(target)}/upper"
    if _is_empty(generation, upper):  # of a filesystem that was mounted once, and nothing was written there
        return []
    if any(contains(tree, target) for tree in shown):
        return [target] if _holds(generation, upper) else []
    inner = [tree for tree in shown if contains(target, tree)]
    return [tree for tree in inner if _holds(generation, upper + tree[len(target.rstrip("/")) :])]


def _is_empty(generation: int, upper: str) -> bool:
    """Return whether a layer holds nothing at all. Both parts of its path are ours, so no link of a guest can lead elsewhere."""
    try:
        directory = os.open(upper, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=generation)
    except OSError:
        return False
    try:
        return not os.listdir(directory)
    finally:
        os.close(directory)


def _holds(generation: int, path: str) -> bool:
    """Return whether a generation has anything at a path: entries in a directory, or something else in its place."""
    from agent_sandbox.workspace import beneath  # slow to load, and nearly all runs of a sandbox are under the same rules

    try:
        directory = beneath.open_directory(generation, path)
    except OSError as error:
        return error.errno in (errno.ENOTDIR, errno.ELOOP)  # a whiteout, or something else that stands in its place
    try:
        return bool(os.listdir(directory))
    finally:
        os.close(directory)
