"""Records of what a run exchanged with the hosts that it reached: the file, its writer, and its reader.

A record is lines of JSON: one that names the form and the salt of the keys, one for each exchange, and one at the end with the digest of
all before it. It is written beside its place, and takes it when the run has ended: whoever is killed, or finds the disk full, leaves the
file of before, or none. Only its owner can read it. A record may come from anybody, and permits nothing. Each line is checked when the
file is opened and again when it is used.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import stat
import threading
from contextlib import suppress

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.egress.orders import ExchangeOrders
from agent_sandbox.egress.recorded_exchange import MOST_BODY, RecordedExchange, read_exchange
from agent_sandbox.errors import RecordError
from agent_sandbox.workspace.durable import sync_directory

if TYPE_CHECKING:
    from typing import Any

SCHEMA = "agent-sandbox/exchanges/1"
LARGEST = 256 << 20  # bytes of a record
MOST_EXCHANGES = 20_000
MOST_PORTS = 64  # that the requests of a record are for
_MOST_HEAD = 1 << 20  # bytes of an exchange without its bodies
_LONGEST_LINE = 2 * (MOST_BODY + 2) // 3 * 4 + _MOST_HEAD
_SALT_BYTES = 32
_HINT = "name a file that --record-network wrote, unchanged"
_PARTS = {"head": _MOST_HEAD, "request_body": MOST_BODY, "body": MOST_BODY}


@dataclass(frozen=True)
class ExchangeOptions:
    """Where the exchanges of a run are written to, and which record answers them. Empty: nowhere, and none.

    With `hold`, as in a simulation, no request is sent that may change something at its host.
    """

    record: str = ""
    bodies: bool = False
    replay: str = ""
    hold: bool = False

    def opened(self) -> ExchangeFiles:
        """Open both files. Raises `RecordError`."""
        replay = ExchangeRecord(self.replay) if self.replay else None
        try:
            return ExchangeFiles(ExchangeWriter(self.record, bodies=self.bodies) if self.record else None, replay)
        except BaseException:
            if replay is not None:
                replay.close()
            raise


@dataclass(frozen=True)
class ExchangeFiles:
    """The open files of one run: the record that is written, and the one that answers."""

    writer: ExchangeWriter | None = None
    replay: ExchangeRecord | None = None

    @property
    def orders(self) -> ExchangeOrders:
        """The orders for the egress process."""
        writer, replay = self.writer, self.replay
        return ExchangeOrders(writer.salt if writer else "", bool(writer and writer.bodies), replay.salt if replay else "")

    def finish(self) -> tuple[str, ...]:
        """Put the record in its place, and return notes."""
        return (*(self.writer.finish() if self.writer else ()), *(self.replay.notes() if self.replay else ()))

    def close(self) -> None:
        """Close both files. A record that is not finished is removed. Idempotent."""
        if self.writer is not None:
            self.writer.close()
        if self.replay is not None:
            self.replay.close()


class ExchangeWriter:
    """Writes a record. Whatever goes wrong with the disk is a note, and the run goes on without a record."""

    def __init__(self, path: str, *, bodies: bool) -> None:
        """Open the file beside the place of the record. Raises `RecordError`."""
        self.path, self.bodies = os.path.abspath(path), bodies
        self.salt = os.urandom(_SALT_BYTES).hex()
        self._new = f"{self.path}.new"
        self._file: int | None = _open_new(self.path, self._new)
        self._digest = hashlib.sha256()
        self._size = self._count = 0
        self._parts: dict[str, bytearray] | None = None
        self._left_out: dict[str, int] = {}
        self._failed = ""
        self._redacted: dict[str, None] = {}
        self._put({"schema": SCHEMA, "salt": self.salt, "bodies": bodies})

    def take(self, message: dict[str, Any]) -> None:
        """Take a piece of an exchange from the egress. Raises ValueError if it is none that the egress sends."""
        part, data = message["part"], base64.b64decode(message["data"], validate=True)
        if part == "begin":
            if self._parts is not None:
                self.skip("an exchange that was cut off")
            self._parts = {}
            return
        if self._parts is None:
            raise ValueError("a piece of no exchange")
        if part == "end":
            parts, self._parts = self._parts, None
            self._add(_assembled(parts))
            return
        piece = self._parts.setdefault(part, bytearray())
        if len(piece) + len(data) > _PARTS[part]:
            raise ValueError("an exchange that is too long")
        piece += data

    def skip(self, why: str) -> None:
        """Count something that is not recorded."""
        self._left_out[why[:100]] = self._left_out.get(why[:100], 0) + 1

    def _add(self, exchange: RecordedExchange) -> None:
        line = json.dumps(exchange.plain(), separators=(",", ":"))
        if self._count >= MOST_EXCHANGES or self._size + len(line) + 4096 > LARGEST:
            self.skip(f"an exchange beyond the {LARGEST >> 20} MiB or the {MOST_EXCHANGES:,} exchanges that a record holds")
            return
        self._redacted.update(dict.fromkeys(exchange.redacted))
        self._count += 1
        self._write(line.encode("ascii") + b"\n")

    def _put(self, plain: dict[str, Any]) -> None:
        self._write(json.dumps(plain, separators=(",", ":")).encode("ascii") + b"\n")

    def _write(self, data: bytes) -> None:
        if self._file is None:
            return
        self._digest.update(data)
        self._size += len(data)
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._file, view) :]
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self._failed = self._failed or (error.strerror or str(error))
        self.close()

    def finish(self) -> tuple[str, ...]:
        """Put the record in its place, and return notes: that it could not be written, or what is not in it."""
        if self._parts is not None:
            self.skip("an exchange that was cut off")
        left_out = sum(self._left_out.values())
        self._put({"exchanges": self._count, "left_out": left_out, "sha256": self._digest.hexdigest()})
        if self._file is not None:
            try:
                os.fsync(self._file)
                os.rename(self._new, self.path)
                sync_directory(os.path.dirname(self.path))
            except OSError as error:
                self._fail(error)
        if self._failed:
            return (f"what the run exchanged is not recorded: {self.path!r} cannot be written: {self._failed}",)
        if self._file is not None:
            os.close(self._file)
            self._file = None
        notes = [f"recorded {_counted(self._count, 'exchange')}: {self.path}"]
        notes += [f"not recorded: {why}{f' ({count:,} times)' if count > 1 else ''}" for why, count in self._left_out.items()]
        if self._redacted:
            notes.append(f"replaced by asterisks in the record: {', '.join(sorted(self._redacted)[:10])}")
        return tuple(notes)

    def close(self) -> None:
        """Remove a record that is not finished. Idempotent."""
        if self._file is not None:
            with suppress(OSError):
                os.unlink(self._new)
            os.close(self._file)
            self._file = None


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _open_new(path: str, new: str) -> int:
    """Open the file that becomes the record, for this user alone. Raises `RecordError`."""
    hint = "name a file in a directory of yours"
    with suppress(OSError):  # of one that is not there yet
        if not stat.S_ISREG(os.lstat(path).st_mode):  # a device or a link would be replaced
            raise RecordError(f"no record can be written to {path!r}: it is no ordinary file", hint=hint)
    try:
        file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RecordError(f"no record can be written to {path!r}: {error.strerror}", hint=hint) from error
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
            raise RecordError(f"no record can be written to {path!r}: something else lies at {new!r}", hint="remove it")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(found, os.stat(new, follow_symlinks=False)):
            raise BlockingIOError
        os.fchmod(file, 0o600)
        os.ftruncate(file, 0)
    except BlockingIOError:
        os.close(file)
        raise RecordError(f"another run is recorded to {path!r} now", hint="name another file") from None
    except OSError as error:
        os.close(file)
        raise RecordError(f"no record can be written to {path!r}: {error.strerror}", hint=hint) from error
    except BaseException:
        os.close(file)
        raise
    return file


def _assembled(parts: dict[str, bytearray]) -> RecordedExchange:
    """Return the exchange that its pieces make. Raises ValueError."""
    head = json.loads(bytes(parts.get("head", b"")))
    if not isinstance(head, dict):
        raise ValueError("an exchange without a head")
    bodies = {name: None if name not in parts else base64.b64encode(parts[name]).decode() for name in ("request_body", "body")}
    return read_exchange({**head, **bodies})


@dataclass(frozen=True)
class _Line:
    """Where an exchange stands in the file, and its digest."""

    start: int
    length: int
    digest: bytes


class ExchangeRecord:
    """A record that answers requests: each time the same is asked, the next answer to it. Safe to use from many threads."""

    def __init__(self, path: str) -> None:
        """Open a record and check all of it. Raises `RecordError`."""
        self._path = path
        self._file = _open_record(path)
        self._lock = threading.Lock()
        self._lines: dict[str, list[_Line]] = {}
        self._taken: dict[str, int] = {}
        self._missed = 0
        hosts: dict[tuple[str, int], None] = {}
        try:
            self.salt, self.bodies, self.left_out = self._check(hosts)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            self.close()
            raise RecordError(f"{path!r} is not a valid record of exchanges: {error}"[:500], hint=_HINT) from error
        except OSError as error:
            self.close()
            raise RecordError(f"the record {path!r} cannot be read: {error.strerror}", hint=_HINT) from error
        except BaseException:
            self.close()
            raise
        self.hosts = tuple(hosts)

    def _check(self, hosts: dict[tuple[str, int], None]) -> tuple[str, bool, int]:
        digest, place, count = hashlib.sha256(), 0, 0
        with open(self._file, "rb", closefd=False) as file:
            first = file.readline(_LONGEST_LINE)
            head = json.loads(first)
            if not isinstance(head, dict) or head.get("schema") != SCHEMA:
                raise ValueError(f"its schema is not {SCHEMA}")
            salt, bodies = head["salt"], head["bodies"]
            if not isinstance(salt, str) or len(bytes.fromhex(salt)) != _SALT_BYTES or not isinstance(bodies, bool):
                raise ValueError("its first line is malformed")
            line, place = first, len(first)
            while True:
                digest.update(line)
                line = file.readline(_LONGEST_LINE)
                if not line.endswith(b"\n"):
                    raise ValueError("it ends too early, or holds a line that is too long")
                plain = json.loads(line)
                if isinstance(plain, dict) and "sha256" in plain:
                    break
                exchange = read_exchange(plain)
                count += 1
                if count > MOST_EXCHANGES:
                    raise ValueError("it holds more exchanges than any record")
                hosts[exchange.host] = None
                self._lines.setdefault(exchange.key, []).append(_Line(place, len(line), hashlib.sha256(line).digest()))
                place += len(line)
            if file.read(1):
                raise ValueError("something follows its end")
        if plain["sha256"] != digest.hexdigest() or plain["exchanges"] != count:
            raise ValueError("its content is not what its digest says")
        if not isinstance(plain["left_out"], int) or len({port for _, port in hosts}) > MOST_PORTS:
            raise ValueError("its last line is malformed, or it is for too many ports")
        return salt, bodies, plain["left_out"]

    def answer(self, key: str) -> dict[str, Any] | None:
        """Return the next exchange with this key, as plain values; None if there is none left."""
        with self._lock:
            lines, taken = self._lines.get(key, []), self._taken.get(key, 0)
            if taken >= len(lines) or self._file < 0:
                self._missed += 1
                return None
            self._taken[key] = taken + 1
            line = lines[taken]
            data = os.pread(self._file, line.length, line.start)
        if hashlib.sha256(data).digest() != line.digest:  # somebody has written to the file since it was checked
            raise ValueError("the record has changed while it was used")
        found: dict[str, Any] = json.loads(data)
        return found

    def notes(self) -> tuple[str, ...]:
        """Return notes: how many requests were answered, and how many were not."""
        with self._lock:
            answered, missed = sum(self._taken.values()), self._missed
        notes = [f"answered {_counted(answered, 'request')} from the record {self._path}; nothing left this machine"]
        return (*notes, f"not in the record: {_counted(missed, 'request')}") if missed else tuple(notes)

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1


def _open_record(path: str) -> int:
    """Open a record: a file of this user's or root's, which nobody else can write. Raises `RecordError`."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        why = "it is a link" if os.path.islink(path) else error.strerror
        raise RecordError(f"the record {path!r} cannot be read: {why}", hint=_HINT) from error
    found = os.fstat(file)
    why = ""
    if not stat.S_ISREG(found.st_mode):
        why = "it is no file"
    elif found.st_uid not in (os.geteuid(), 0):
        why = "it belongs to another user; copy it"
    elif found.st_mode & 0o022:
        why = "others can write to it; chmod go-w"
    elif found.st_size > LARGEST:
        why = "it is larger than any record"
    if why:
        os.close(file)
        raise RecordError(f"the record {path!r} is not used: {why}", hint=_HINT)
    return file
