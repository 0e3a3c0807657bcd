"""Granted capabilities: which sandbox has which, how often each was used, which are revoked. Stored on disk, so that a crash loses nothing.

Each capability has a directory, which is named by the signature of the grant. It holds the grant, a file of all uses and one for each
limit on uses, with a byte for each use, and a mark for each revocation. A use is counted, and the count is on disk, before the action: a
crash in between costs a use and never gives one. A revocation takes effect with the next action, and with the next request to a host of
the capability. It does not stop a program that runs already and asks nothing more.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress

from agent_sandbox._fast.encoding import Seal
from agent_sandbox._fast.values import dataclass
from agent_sandbox.engine.gate import EntryWriter
from agent_sandbox.errors import PolicyError
from agent_sandbox.ledger.event import Facts, Noted
from agent_sandbox.ledger.private_files import hex_names, is_hex, make_private, read_private, size_of, sync_directory, write_once
from agent_sandbox.policy import tokens as core
from agent_sandbox.policy.action import Action
from agent_sandbox.policy.approval_rules import Word
from agent_sandbox.policy.tokens import Caveat, ForSandbox, Genuine, Only, Pattern, RefusedToken, Times, Token, Until

PURPOSE = b"capabilities"  # the purpose of the derived key
_FACTOR = "second factor"
_GRANT, _USES, _USED, _REVOKED, _RUNNING = "grant", "uses", "used.", "revoked.", "running."
_LONGEST = 64 << 10
_DIGITS = 32  # of a name


@dataclass(frozen=True)
class Standing:
    """A granted capability: its name, the patterns it permits, by whom and when it was granted, its limits, and the uses so far."""

    name: str
    sandbox: str
    patterns: tuple[Pattern, ...]
    by: str
    granted: float
    until: float
    limit: int | None
    used: int
    revoked: bool
    word: Word = Word(-1)


class Mark:
    """A mark on disk that this process uses a capability. It ends with `end`, or with the process."""

    def __init__(self, path: str) -> None:
        self._path = path
        # A record lock belongs to this process alone. A flock would also belong to processes that this one forks.
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.lockf(self._file, fcntl.LOCK_EX)

    def end(self) -> None:
        """Remove the mark."""
        with suppress(FileNotFoundError):  # forgotten with its capability
            os.unlink(self._path)
        os.close(self._file)


class Capabilities:
    """The capabilities in one directory. `key` signs them, and never leaves the supervisor. Safe for threads and processes at once."""

    def __init__(self, directory: str, key: Seal, ledger: EntryWriter, *, clock: Callable[[], float]) -> None:
        self._directory = directory
        self._key = key
        self._ledger = ledger
        self._clock = clock

    def grant(
        self,
        sandbox: str,
        patterns: tuple[Pattern, ...],
        *,
        seconds: float,
        times: int | None = None,
        by: str,
        factor: bool = False,
    ) -> Token:
        """Make a capability token for a sandbox. The grant is recorded first. The token expires after `seconds`, or after `times` uses.

        `factor` says that the grantor has given a second factor.

        Raises `PolicyError` for invalid patterns or limits, `LedgerUnavailable` if the grant cannot be recorded, OSError if it cannot be
        stored.
        """
        now = self._clock()
        until = now + seconds
        caveats: tuple[Caveat, ...] = (ForSandbox(sandbox), Until(until), Only(patterns), *((Times(times),) if times is not None else ()))
        try:
            if not seconds > 0:
                raise ValueError("it would have ended before it began")
            token = core.mint(self._key, os.urandom(16), caveats)
        except ValueError as error:
            raise PolicyError(
                f"cannot grant this: {error}", hint="name a sandbox, patterns of words, a time and a number above 0"
            ) from None
        name = self._names(token)[0]
        facts: Facts = {"name": name, "target": _shown(patterns), "by": by, "until": until, "times": times}
        self._ledger.record(Noted("capability.granted", facts, sandbox), lasting=True)
        place = os.path.join(self._directory, name)
        make_private(place)
        lines = (repr(now), by.encode("unicode_escape").decode(), core.spell(token), str(os.getuid()), _FACTOR if factor else "")
        write_once(os.path.join(place, _GRANT), "\n".join((*lines, "")).encode())
        sync_directory(self._directory)
        return token

    def use(
        self, token: Token, action: Action, *, sandbox: str, counts: Callable[[Word], bool] | None = None, again: bool = False
    ) -> Genuine | RefusedToken:
        """Return whether the token allows this action, and count the use. Raises OSError if the use cannot be counted.

        `counts` returns whether the grantor's approval counts under the policy. Without `counts`, every grantor's approval counts. An
        action that goes on and is looked at `again` is no other use.
        """
        check = core.check(self._key, token, action, sandbox=sandbox, now=self._clock())
        if isinstance(check, RefusedToken):
            return check
        place = os.path.join(self._directory, check.names[0])
        if not os.path.exists(os.path.join(place, _GRANT)):
            return RefusedToken("unknown capability")
        if any(os.path.exists(os.path.join(place, _REVOKED + name)) for name in check.names):
            return RefusedToken("the capability was revoked")
        if counts is not None and ((standing := self._standing(check.names[0])) is None or not counts(standing.word)):
            return RefusedToken("the capability was granted by somebody who may not approve this")
        return check if again or self._counted(place, check.counts) else RefusedToken("the capability is used up")

    def ended(self, token: Token, action: Action, *, sandbox: str, counts: Callable[[Word], bool] | None = None) -> str:
        """Return why a token of ours that `use` refused, although it speaks of this action, counts no more; else nothing."""
        if not core.speaks_of(self._key, token, action, sandbox=sandbox):
            return ""
        check = self.use(token, action, sandbox=sandbox, again=True)
        if isinstance(check, RefusedToken):
            return check.why
        standing = self._standing(check.names[0])
        return "the capability is used up" if counts is None or (standing is not None and counts(standing.word)) else ""

    def opened(self, token: Token, *, sandbox: str) -> tuple[str, ...]:
        """Return the hosts that a token opens for a sandbox; none if it is no token of ours, for another sandbox, ended or revoked."""
        check = core.genuine(self._key, token)
        if isinstance(check, RefusedToken) or not self._clock() < check.until:
            return ()
        standing = self._standing(check.names[0])
        bound = [each.sandbox for each in core.caveats_of(token) if isinstance(each, ForSandbox)]
        gone = any(os.path.exists(os.path.join(self._directory, check.names[0], _REVOKED + name)) for name in check.names)
        return core.hosts_of(token) if standing is not None and not gone and {*bound} == {sandbox} else ()

    def revoke(self, token_or_name: Token | str, *, by: str) -> None:
        """Revoke a capability. The revocation is recorded first.

        A name revokes the whole grant; a token revokes only itself and the tokens derived from it. Raises `PolicyError` if there is no such
        capability, and as `grant` does.
        """
        names = self._names(token_or_name) if isinstance(token_or_name, Token) else (token_or_name,)
        place = os.path.join(self._directory, names[0])
        if not is_hex(names[0], _DIGITS) or not os.path.exists(os.path.join(place, _GRANT)):
            raise PolicyError(f"there is no capability {names[0][:64]!r}", hint="see: agent-sandbox capabilities")
        standing = self._standing(names[0])
        facts: Facts = {"name": names[-1], "of": names[0], "by": by, "target": _shown(standing.patterns) if standing else ""}
        self._ledger.record(Noted("capability.revoked", facts, standing.sandbox if standing else ""), lasting=True)
        write_once(os.path.join(place, _REVOKED + names[-1]), b"")
        sync_directory(place)

    def mark(self, name: str) -> Mark:
        """Mark a capability as in use by this process. Raises OSError if the mark cannot be written."""
        return Mark(os.path.join(self._directory, name, f"{_RUNNING}{os.getpid()}.{os.urandom(4).hex()}"))

    def going_on(self, name: str) -> list[int]:
        """Return the ids of other processes that use this capability now."""
        place = os.path.join(self._directory, name)
        marks = [each for each in os.listdir(place) if each.startswith(_RUNNING)] if is_hex(name, _DIGITS) and os.path.isdir(place) else []
        return sorted({pid for each in marks if (pid := _holder(os.path.join(place, each))) is not None})

    def standing(self) -> list[Standing]:
        """Return all capabilities that have not expired, oldest first."""
        self.sweep()
        capabilities = [standing for name in hex_names(self._directory, _DIGITS) if (standing := self._standing(name)) is not None]
        return sorted(capabilities, key=lambda each: (each.granted, each.name))

    def sweep(self) -> None:
        """Remove expired capabilities, and record the end of each."""
        for name in hex_names(self._directory, _DIGITS):
            standing = self._standing(name)
            if standing is not None and not self._clock() < standing.until:
                facts: Facts = {"name": name, "target": _shown(standing.patterns), "used": standing.used, "why": "its time was over"}
                self._ledger.record(Noted("capability.ended", facts, standing.sandbox), lasting=True)
                self._forget(name)

    def _names(self, token: Token) -> tuple[str, ...]:
        check = core.genuine(self._key, token)
        if isinstance(check, RefusedToken):
            raise PolicyError(check.why, hint="see: agent-sandbox capabilities")
        return check.names

    def _counted(self, place: str, counts: tuple[tuple[str, int], ...]) -> bool:
        """Count one use under each name, and return True. If a limit is reached, count nothing and return False.

        `counts` are names with their limits, in the order of derivation, in which every process locks them.
        """
        with ExitStack() as stack:
            files: list[int] = []
            for name, _ in counts:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                files.append(os.open(os.path.join(place, _USED + name), flags, 0o600))
                stack.callback(os.close, files[-1])
                fcntl.flock(files[-1], fcntl.LOCK_EX)
            if any(os.fstat(file).st_size >= limit for file, (_, limit) in zip(files, counts, strict=True)):
                return False
            for file in files:
                os.write(file, b".")
                os.fsync(file)
        if counts:
            sync_directory(place)
        # All uses, for people: no limit depends on it, so that a power cut may lose its end.
        file = os.open(os.path.join(place, _USES), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(file, b".")
        finally:
            os.close(file)
        return True

    def _standing(self, name: str) -> Standing | None:
        """Read a capability; None if it is not genuine, or if another process is just writing or removing it."""
        place = os.path.join(self._directory, name)
        try:
            granted, by, text, user, factor, _ = read_private(os.path.join(place, _GRANT), _LONGEST).decode("ascii").split("\n")
            since, word = float(granted), Word(int(user), factor == _FACTOR)
        except (OSError, ValueError):
            return None
        token = core.parse(text)
        check = core.genuine(self._key, token) if token is not None else None
        if token is None or not isinstance(check, Genuine) or check.names[0] != name:
            return None
        caveats = core.caveats_of(token)
        limit = check.counts[0] if check.counts else None
        return Standing(
            name,
            sandbox=next(each.sandbox for each in caveats if isinstance(each, ForSandbox)),
            patterns=next(each.patterns for each in caveats if isinstance(each, Only)),
            by=by.encode().decode("unicode_escape"),
            granted=since,
            until=check.until,
            limit=limit[1] if limit else None,
            used=max(size_of(os.path.join(place, _USES)), size_of(os.path.join(place, _USED + limit[0])) if limit else 0),
            revoked=any(os.path.exists(os.path.join(place, _REVOKED + each)) for each in check.names),
            word=word,
        )

    def _forget(self, name: str) -> None:
        place = os.path.join(self._directory, name)
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(place, _GRANT))  # first: without the grant the other files have no meaning
            for each in os.listdir(place):
                os.unlink(os.path.join(place, each))
            os.rmdir(place)


def _holder(mark: str) -> int | None:
    """Return the id of the process that holds a mark; None if that is this process, or if it is dead.

    The mark of a dead process is removed.
    """
    pid = int(mark.rpartition(_RUNNING)[2].partition(".")[0])
    if pid == os.getpid():  # closing the file, as below, would release this process's own lock on it
        return None
    try:
        file = os.open(mark, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return pid
    finally:
        os.close(file)
    with suppress(FileNotFoundError):
        os.unlink(mark)
    return None


def _shown(patterns: tuple[Pattern, ...]) -> str:
    return ", ".join(" ".join(pattern) for pattern in patterns)
