"""The inbox: questions wait on disk for a person, and answers come back.

Each question has a directory. If the same question waits already, the second asker waits for the same answer, so that a person sees the
question once. The asker keeps the question in memory and accepts only an answer to exactly that question, whatever happens to the file.
One asker uses an answer, once. A question without an answer is refused. So is a question beyond the limit on waiting questions. Each asker
holds a lock beside the question while it waits. The kernel releases the lock of an asker that was killed, and a question for which nobody
holds one is taken off the list.

The directory is hidden from guests. A program of the same user outside a sandbox can read the key and write an answer. Where that matters,
the question needs the answer of another user, or `approvers` names the users whose answers count. The kernel knows who owns an answer file.
Besides the owner, only root can write here. A process of root writes only answers, and only into a directory that belongs to the asker.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress

from agent_sandbox._fast.encoding import Seal
from agent_sandbox._fast.values import dataclass, replace
from agent_sandbox.engine.approvals.question import Answer, Decision, Question, decoded, opened, sealed, shown
from agent_sandbox.engine.gate import EntryWriter, Granted, Refused
from agent_sandbox.errors import PolicyError
from agent_sandbox.ledger.event import Noted
from agent_sandbox.ledger.private_files import hex_names, is_hex, make_private, size_of, sync_directory, write_all, write_once
from agent_sandbox.policy.approval_rules import Word
from agent_sandbox.policy.model import ANOTHER_USER, SECOND_FACTOR

MOST_WAITING = 16  # questions at once; a person answers a few, and more are a flood
MOST_OF_ONE = 8  # questions from one sandbox, so that a flood from one leaves room for others
RUN_SECONDS = 3600.0  # how long an answer for a whole run is valid, unless the person who answers sets another time
_QUESTION, _ANSWER, _TAKEN, _ASKED, _ASKERS, _LOCK = "question", "answer", "taken", "asked", "askers", "lock"
_DIGITS = 64  # hexadecimal digits in the name of a question
_GONE = ".gone"  # suffix of directories that are being removed
_LARGEST = 16 << 20  # bytes of a question with its diff: listing a longer question takes seconds, and no person reads it


@dataclass(frozen=True)
class Waiting:
    """A waiting question: the name to answer it by, the text to show, its digest, how often it was asked, and its deadline."""

    name: str
    text: str
    digest: str
    times: int
    until: float
    needs: str = ""


class Inbox:
    """An inbox in one directory. Safe for many threads and processes. `pause` is called between two checks for an answer."""

    def __init__(
        self,
        directory: str,
        key: Seal,
        ledger: EntryWriter,
        *,
        clock: Callable[[], float],
        pause: Callable[[], None],
        approvers: Collection[int] | None = None,
        factor: Callable[[str], bool] | None = None,
        on_wait: Callable[[Waiting], None] | None = None,
        visiting: bool = False,
    ) -> None:
        """`approvers` are the users whose approvals count; None means all. `factor` returns whether a second factor is valid.

        `on_wait` is called with a question that begins to wait. Set `visiting` to read the inbox of another user, where nothing is swept.
        """
        self._waiting = os.path.join(directory, "waiting")
        self._standing = os.path.join(directory, "standing")
        self._key = key
        self._ledger = ledger
        self._clock = clock
        self._pause = pause
        self._approvers = approvers
        self._factor = factor
        self._on_wait = on_wait
        self._visiting = visiting

    def ask(self, question: Question, wanted: Callable[[], bool] = lambda: True) -> Granted | Refused:
        """Write the question, and wait for an answer to exactly this question. Raises what the ledger raises, and OSError.

        A question that is no longer `wanted` is taken back.
        """
        while self._clock() < question.until and wanted():
            if (found := self._valid(os.path.join(self._standing, question.group()), question)) is not None:
                return Granted(found[0].by, found[1], found[0].until)  # the person answered the same question earlier in this run
            # A new nonce each time: a consumed answer must not count for the same question asked again.
            question = replace(question, nonce=os.urandom(16).hex())
            put = self._put(question)
            if isinstance(put, Refused):
                return put
            waits, lock = put
            try:
                if self._on_wait is not None:
                    self._on_wait(_shown(waits, 1))
                if (answer := self._awaited(waits, wanted)) is not None:
                    return answer
            finally:
                os.close(lock)
        why = "nobody answered in time" if wanted() else "nobody waits for the answer any more"
        self._ledger.record(Noted("approval.unanswered", {"digest": question.digest(), "why": why}, question.sandbox))
        return Refused(why)

    def waiting(self) -> list[Waiting]:
        """Return the waiting questions, the oldest first."""
        if not self._visiting:
            self.sweep()
        found: list[tuple[float, Waiting]] = []
        for name in hex_names(self._waiting, _DIGITS):
            place = os.path.join(self._waiting, name)
            if (question := self._open_question(place)) is not None:
                times = 1 + size_of(os.path.join(place, _ASKED))
                found.append((question.asked, _shown(question, times)))
        return [waiting for _, waiting in sorted(found, key=lambda each: (each[0], each[1].name))]

    def answer(self, name: str, decision: Decision, *, digest: str, by: str, seconds: float = RUN_SECONDS, code: str | None = None) -> None:
        """Answer a question. `digest` is that of the question as the person saw it, so that nobody can swap the question before a yes.

        An approval for the whole run expires after `seconds`. `code` is a second factor. A no needs no second factor.

        The answer is recorded before it counts. Raises `PolicyError` if the question no longer waits, or has another digest now.
        """
        place = os.path.join(self._waiting, name)
        question = self._open_question(place) if is_hex(name, _DIGITS) else None
        if question is None:
            raise PolicyError("there is no such question waiting", hint="list what is waiting, and look again")
        if question.digest() != digest:
            raise PolicyError("the question has changed since it was shown", hint="look at it again before you answer")
        if decision is not Decision.NO:
            self._check_needs(question, code)
        until = self._clock() + seconds if decision is Decision.FOR_THIS_RUN else question.until
        facts = {"digest": digest, "decision": decision.value, "by": by, "until": until, "allowed": decision is not Decision.NO}
        self._ledger.record(Noted("approval.answered", {"target": _target(question), **facts}, question.sandbox), lasting=True)
        try:
            _write_answer(place, sealed(Answer(digest, decision, by, until, SECOND_FACTOR in question.needs), self._key), question.asker)
        except FileNotFoundError:  # the question expired since it was read above
            raise PolicyError("there is no such question waiting any more", hint="list what is waiting, and look again") from None
        except FileExistsError:
            raise PolicyError("somebody else has already answered", hint="list what is waiting, and look again") from None

    def _check_needs(self, question: Question, code: str | None) -> None:
        """Raise `PolicyError` if an approval by this user, with this second factor, would not count."""
        if ANOTHER_USER in question.needs and os.getuid() == question.asker:
            raise PolicyError("this needs the approval of another user than the asker", hint="as root: agent-sandbox approve --of USER")
        if self._approvers is not None and os.getuid() not in self._approvers:
            raise PolicyError("the policy does not accept your approval: it names other approvers", hint="ask one of its approvers")
        if SECOND_FACTOR not in question.needs:
            return
        if self._factor is None:
            raise PolicyError("this needs a second factor, and none is set up", hint="agent-sandbox approve --enroll")
        if code is None or not self._factor(code):
            raise PolicyError("this needs a second factor, and the code is not valid", hint="give a fresh code: --code 123456")

    def end_run(self, run: str) -> None:
        """Revoke the approvals that were given for a run, and record that they ended."""
        for name in hex_names(self._standing, _DIGITS):
            place = os.path.join(self._standing, name)
            question = _question(place)
            if question is None or question.run == run:
                self._take_back(place, question, "the run is over")

    def sweep(self) -> None:
        """Revoke expired approvals. Remove questions that are expired or damaged, or that nobody waits for."""
        for name in hex_names(self._standing, _DIGITS):
            place = os.path.join(self._standing, name)
            if (question := _question(place)) is not None and self._valid(place, question) is None:
                self._take_back(place, question, "its time was over")
        for directory in (self._waiting, self._standing):
            for name in os.listdir(directory) if os.path.exists(directory) else ():
                if name.endswith(_GONE):  # the process that was removing it has died
                    _remove(os.path.join(directory, name))
        if not os.path.exists(self._waiting):
            return
        with self._alone():
            for place in self._places():
                question = _question(place)
                if question is None or self._place(question) != place or not self._clock() < question.until:
                    _clear(place)
                elif not _is_awaited(place):
                    facts = {"digest": question.digest(), "why": "the process that asked has ended"}
                    self._ledger.record(Noted("approval.unanswered", facts, question.sandbox))
                    _clear(place)

    def _put(self, question: Question) -> tuple[Question, int] | Refused:
        """Write the question, unless the same one waits. Return what waits and our lock on it, or a refusal if too many wait."""
        with self._alone():  # two processes that ask the same question at once must see one another
            waiting = [each for place in self._places() if (each := self._open_question(place)) is not None]
            for each in waiting:
                if each.group() == question.group():
                    with suppress(FileNotFoundError):  # a person has just answered, and an asker used the answer: we ask anew
                        _append(os.path.join(self._place(each), _ASKED))
                        return each, _joined(self._place(each))
            own = sum(each.sandbox == question.sandbox for each in waiting)
            if len(waiting) >= MOST_WAITING or own >= MOST_OF_ONE:
                self._ledger.record(Noted("approval.flooded", {"digest": question.digest(), "allowed": False}, question.sandbox))
                return Refused(f"{len(waiting)} questions are waiting already")
            content = question.encoded()
            if len(content) > _LARGEST:
                return Refused("the question is too long to be shown")
            facts = {"digest": question.digest(), "target": _target(question), "why": question.why, "run": question.run}
            self._ledger.record(Noted("approval.asked", facts, question.sandbox), lasting=True)
            make_private(self._place(question))
            lock = _joined(self._place(question))
            try:
                write_once(os.path.join(self._place(question), _QUESTION), content)
            except BaseException:
                os.close(lock)
                raise
            return question, lock

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the inbox's lock for a block, so that no other process writes or sweeps questions."""
        make_private(self._waiting)
        lock = os.open(os.path.join(self._waiting, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _place(self, question: Question) -> str:
        return os.path.join(self._waiting, question.digest())

    def _open_question(self, place: str) -> Question | None:
        """Return the question in this directory if it can still be answered; otherwise None.

        A question cannot be answered if it has an answer or is expired, if nobody waits for one, or if the directory is not named by its
        digest.
        """
        question = _question(place)
        if question is None or self._place(question) != place or not self._clock() < question.until or not _is_awaited(place):
            return None
        return None if os.path.exists(os.path.join(place, _ANSWER)) else question

    def _places(self) -> list[str]:
        return [os.path.join(self._waiting, name) for name in hex_names(self._waiting, _DIGITS)]

    def _awaited(self, question: Question, wanted: Callable[[], bool]) -> Granted | Refused | None:
        """Wait for the answer, and return it; None if no answer came in time, or if another asker of the same question used it."""
        place = self._place(question)
        while self._clock() < question.until and wanted():
            if os.path.exists(os.path.join(place, _ANSWER)):
                answer = self._valid(place, question, refusals=True)
                if answer is not None:
                    return self._taken(place, question, *answer)
                if not os.path.exists(os.path.join(place, _ANSWER)):
                    return None  # another asker used the answer between the two checks
                _clear(place)
                return Refused("the answer is not valid: it is for another question, or by somebody who may not approve")
            if not os.path.exists(os.path.join(place, _QUESTION)):
                return None
            self._pause()
        _clear(place)
        return None

    def _taken(self, place: str, question: Question, answer: Answer, word: Word) -> Granted | Refused | None:
        if ANOTHER_USER in question.needs:  # the approver's ledger is not this one, so the answer is recorded here, too
            facts = {
                "digest": answer.digest,
                "decision": answer.decision.value,
                "by": answer.by,
                "allowed": answer.decision is not Decision.NO,
            }
            self._ledger.record(Noted("approval.received", facts, question.sandbox), lasting=True)
        match answer.decision:
            case Decision.NO:
                return Refused(f"{answer.by} said no")  # the no is for every waiting process, so it stays until the question expires
            case Decision.FOR_THIS_RUN:
                make_private(self._standing)
                with suppress(OSError):  # another waiting process has moved the answer there first
                    os.rename(place, os.path.join(self._standing, question.group()))
                    sync_directory(self._standing)
                return Granted(answer.by, word, answer.until)
            case Decision.ONCE:
                try:  # a mark beside the answer: while the answer file exists, nobody can write a second answer
                    os.close(os.open(os.path.join(place, _TAKEN), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
                except (FileNotFoundError, FileExistsError):
                    return None  # the answer was for one asker, and another asker was first
                with suppress(FileNotFoundError):  # swept already
                    sync_directory(place)
                _clear(place)
                return Granted(answer.by, word)

    def _valid(self, place: str, question: Question, *, refusals: bool = False) -> tuple[Answer, Word] | None:
        """Return the answer in this place if it is valid: sealed, in time, to this question, and by a person whose approval counts.

        A no is returned only with `refusals`. An approval for the whole run may be the answer to an earlier question of the same group.
        """
        try:
            descriptor = _opened(os.path.join(place, _ANSWER))
        except OSError:
            return None
        try:
            status, content = os.fstat(descriptor), os.read(descriptor, 1 << 16)
        finally:
            os.close(descriptor)
        # If other users may write the file, its owner says nothing about who wrote it: they can write it and make a hard link to it here.
        owner = status.st_uid if not status.st_mode & 0o022 else -1
        answer = opened(content, self._key)
        word = Word(owner, answer is not None and answer.factor)
        if answer is None or not self._clock() < answer.until or not self._counts(answer, word, question):
            return None
        if answer.digest == question.digest():
            return (answer, word) if refusals or answer.decision is not Decision.NO else None
        earlier = _question(place)
        stands = answer.decision is Decision.FOR_THIS_RUN and earlier is not None and earlier.digest() == answer.digest
        return (answer, word) if stands and earlier is not None and earlier.group() == question.group() else None

    def _counts(self, answer: Answer, word: Word, question: Question) -> bool:
        """Return whether this person's answer counts. A "no" counts even without a second factor, and even from the asker."""
        needs = question.needs.split(", ") if answer.decision is not Decision.NO else ()
        return word.counts(needs, self._approvers, asker=os.getuid())

    def _take_back(self, place: str, question: Question | None, why: str) -> None:
        if question is not None:
            facts = {"digest": question.digest(), "target": _target(question), "why": why}
            self._ledger.record(Noted("approval.ended", facts, question.sandbox), lasting=True)
        _clear(place)


def _shown(question: Question, times: int) -> Waiting:
    digest = question.digest()
    return Waiting(digest, shown(question), digest, times, question.until, question.needs)


def _write_answer(place: str, content: bytes, asker: int) -> None:
    """Write an answer beside its question, completely or not at all. Raises FileExistsError if the question has an answer already.

    The directory must belong to the user `asker`, so that nobody can make root write into another directory. The asker can read the answer.
    """
    directory = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if asker >= 0 and os.fstat(directory).st_uid != asker:
            raise PolicyError("the directory of the question belongs to another user", hint="look at who owns the directory of approvals")
        new = f"{_ANSWER}.{os.urandom(8).hex()}.new"
        file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
        try:
            write_all(file, content)
            os.fchmod(file, 0o644)
            os.fsync(file)
            os.link(new, _ANSWER, src_dir_fd=directory, dst_dir_fd=directory)
        finally:
            os.close(file)
            with suppress(FileNotFoundError):  # an asker has just used the answer, and removed the directory
                os.unlink(new, dir_fd=directory)
    finally:
        os.close(directory)


def _opened(path: str) -> int:
    """Open a regular file for reading. Raises OSError for anything else, such as a pipe that would block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return descriptor


def _question(place: str) -> Question | None:
    try:
        descriptor = _opened(os.path.join(place, _QUESTION))
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        return decoded(file.read(_LARGEST + 1))


def _joined(place: str) -> int:
    """Join the askers of a question. Return the lock: whoever holds one waits for the answer. The kernel releases it with its process."""
    lock = os.open(os.path.join(place, _ASKERS), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)  # somebody may be trying it right now
    except BaseException:
        os.close(lock)
        raise
    return lock


def _is_awaited(place: str) -> bool:
    """Return whether somebody waits for the answer. A question of an earlier version has no lock, and counts until it expires."""
    try:
        lock = _opened(os.path.join(place, _ASKERS))
    except OSError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(lock)


def _clear(place: str) -> None:
    """Remove the directory of a question."""
    # Rename the directory first. While its files are removed one by one, somebody could answer again, and an asker could use that answer.
    gone = f"{place}.{os.urandom(8).hex()}{_GONE}"
    with suppress(FileNotFoundError):  # another process removes it, too
        os.rename(place, gone)
        _remove(gone)


def _remove(place: str) -> None:
    with suppress(OSError):  # another process removes the directory, too; or it has just put an answer there, which the next sweep removes
        for name in os.listdir(place):  # also files left by a killed process
            os.unlink(os.path.join(place, name))
        os.rmdir(place)


def _append(path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.write(descriptor, b".")
    finally:
        os.close(descriptor)


def _target(question: Question) -> str:
    argv = question.action.get("argv")
    if "host" in question.action:
        return f"{question.action['host']}:{question.action.get('port', '')}"
    return " ".join(map(str, argv)) if isinstance(argv, list) else str(question.action.get("kind", ""))
