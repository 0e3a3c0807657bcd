"""Records of deterministic runs: the recorder, the record, and its file, one JSON document that only its owner can read.

A record contains code to run, and may come from somebody else. This module checks its form and size; the replay checks whether the code may
run. A record holds environment variables as salted digests. A digest does not hide a value that somebody can guess.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from agent_sandbox._fast.encoding import canonical_digest, digest_of_form
from agent_sandbox._fast.values import dataclass, field, fields, replace
from agent_sandbox.engine.attachments import Attachment
from agent_sandbox.engine.plan_launch import SCRATCH
from agent_sandbox.engine.work import Code, Outcome, Work
from agent_sandbox.errors import PolicyError, RecordError
from agent_sandbox.policy.model import FileRules, Guarantee, Limits, Policy
from agent_sandbox.workspace.changes import Change, ChangeSet, Contents
from agent_sandbox.workspace.durable import write_atomically
from agent_sandbox.workspace.nodes import EntryType

if TYPE_CHECKING:
    from agent_sandbox.runtime.base import Completed, Guest, Launch

PIECE = 4096
KEPT = 64 << 10  # bytes at the beginning of a stream that a record holds in full
MOST_PIECES = 16384  # digests of pieces: beyond 64 MiB the rest of a stream is one piece
_DIGITS = 32  # hexadecimal digits of each piece's digest
_LONGEST_LINE = 16384


@dataclass(frozen=True)
class Tape:
    """A recorded output stream: size, digest, the first bytes, and a digest of each piece."""

    size: int
    digest: str
    beginning: bytes
    pieces: tuple[str, ...] = field(default=())


class Taping:
    """Records an output stream as it arrives."""

    def __init__(self) -> None:
        self._all = hashlib.sha256()
        self._size = 0
        self._beginning = b""
        self._pieces: list[str] = []
        self._rest = b""

    def take(self, data: bytes) -> None:
        """Record the next bytes."""
        self._all.update(data)
        self._size += len(data)
        self._beginning += data[: KEPT - len(self._beginning)]
        self._rest += data
        while len(self._rest) >= PIECE:
            piece, self._rest = self._rest[:PIECE], self._rest[PIECE:]
            if len(self._pieces) < MOST_PIECES:
                self._pieces.append(_named(piece))

    def taped(self) -> Tape:
        """Return the recorded stream so far."""
        last = [_named(self._rest)] if self._rest and len(self._pieces) < MOST_PIECES else []
        return Tape(self._size, self._all.hexdigest(), self._beginning, (*self._pieces, *last))


def _named(piece: bytes) -> str:
    return hashlib.sha256(piece).hexdigest()[:_DIGITS]


def first_difference(one: Tape, other: Tape) -> tuple[int, bool] | None:
    """Return the offset at which two streams begin to differ; None if they are equal.

    Also return whether that offset is exact, or only the start of the piece that differs.
    """
    if (one.size, one.digest) == (other.size, other.digest):
        return None
    for index, (left, right) in enumerate(zip(one.beginning, other.beginning, strict=False)):
        if left != right:
            return index, True
    shorter = min(len(one.beginning), len(other.beginning))
    if len(one.beginning) != len(other.beginning):
        return shorter, True
    for index, (piece, same) in enumerate(zip(one.pieces, other.pieces, strict=False)):
        if piece != same:
            return index * PIECE, False
    return min(one.size, other.size, MOST_PIECES * PIECE), one.size != other.size


SCHEMA = "agent-sandbox/record/1"
LARGEST = 64 << 20  # bytes of a file that is read
_DIGEST, _PIECE = 64, 32  # hexadecimal digits
_HINT = "it must be one that this version wrote, unchanged"


@dataclass(frozen=True)
class Record:
    """The input and the outcome of a run. `code` and `stdin` are None if only their digests were recorded."""

    identity: Mapping[str, str]  # of the engine, the interpreter and the machine
    seed: int
    language: str
    code: str | None
    code_digest: str
    arguments: tuple[str, ...]
    stdin: bytes | None
    stdin_digest: str
    cwd: str
    salt: str
    environment: Mapping[str, str]  # by name, a digest of the value
    rules: str  # a digest of the file rules
    limits: Mapping[str, float | None]
    inputs: Mapping[str, str]  # the files and directories it opened: "file /path" or "directory /path", with a digest
    stdout: Tape
    stderr: Tape
    changes: Mapping[str, str]  # by path
    code_out: int
    reason: str
    limits_hit: tuple[str, ...]
    fuel: int | None


def digest(data: bytes) -> str:
    """Return the digest of content."""
    return hashlib.sha256(data).hexdigest()


def salted(salt: str, value: str) -> str:
    """Return the salted digest of a value that may be a secret."""
    return hmac.new(bytes.fromhex(salt), value.encode("utf-8", "surrogateescape"), "sha256").hexdigest()


def write(record: Record, path: str) -> None:
    """Write a record, completely or not at all. Raises `RecordError`."""
    content = {"schema": SCHEMA, **{field.name: _plain(getattr(record, field.name)) for field in fields(record)}}
    try:
        write_atomically(os.path.abspath(path), json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise RecordError(f"the record {path!r} cannot be written: {error.strerror}", hint="name a file in a directory of yours") from error


def check_place(path: str) -> None:
    """Raise `RecordError` if a record cannot be written to this path."""
    directory = os.path.dirname(os.path.abspath(path))
    other = os.path.lexists(path) and (os.path.islink(path) or not os.path.isfile(path))  # a device or a link would be replaced
    if other or not os.access(directory, os.W_OK | os.X_OK):
        raise RecordError(f"no record can be written to {path!r}", hint="name a file in a directory of yours")


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, Tape):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return dict(value) if isinstance(value, Mapping) else value


def read(path: str) -> Record:
    """Read a record, and check the form of every field. Raises `RecordError`."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise RecordError(f"{path!r} is no file", hint=_HINT)
            content = file.read(LARGEST + 1)
    except OSError as error:
        raise RecordError(f"the record {path!r} cannot be read: {error.strerror}", hint="name a file that --record wrote") from error
    if len(content) > LARGEST:
        raise RecordError(f"{path!r} is larger than any record", hint=_HINT)
    try:
        document = json.loads(content)
        if not isinstance(document, dict) or document.pop("schema", None) != SCHEMA:
            raise RecordError(f"{path!r} is not a record of this version: its schema is not {SCHEMA}", hint=_HINT)
        return _checked(document)
    except (ValueError, KeyError, TypeError, RecursionError, binascii.Error) as error:
        raise RecordError(f"{path!r} is not a valid record: {error}"[:500], hint=_HINT) from error


def _checked(document: dict[str, Any]) -> Record:
    take = _Taking(document)
    record = Record(
        identity=take.names("identity", str),
        seed=take.number("seed", 0, (1 << 64) - 1),
        language=take.text("language"),
        code=None if document["code"] is None else take.text("code"),
        code_digest=take.digest("code_digest"),
        arguments=take.texts("arguments"),
        stdin=None if document["stdin"] is None else take.bytes("stdin"),
        stdin_digest=take.digest("stdin_digest"),
        cwd=take.text("cwd"),
        salt=take.hexadecimal("salt", 32),
        environment=take.names("environment", str),
        rules=take.digest("rules"),
        limits=take.limits("limits"),
        inputs=take.names("inputs", str),
        stdout=_tape(take.document["stdout"]),
        stderr=_tape(take.document["stderr"]),
        changes=take.names("changes", str),
        code_out=take.number("code_out", 0, 255),
        reason=take.text("reason"),
        limits_hit=take.texts("limits_hit"),
        fuel=None if document["fuel"] is None else take.number("fuel", 0, (1 << 64) - 1),
    )
    if strange := set(document) - {field.name for field in fields(record)}:
        raise ValueError(f"unknown fields: {', '.join(sorted(strange))[:100]}")
    for content, named, what in ((record.code, record.code_digest, "code"), (record.stdin, record.stdin_digest, "stdin")):
        if content is not None and digest(content.encode() if isinstance(content, str) else content) != named:
            raise ValueError(f"its {what} is not what its digest says")
    return record


def _tape(document: Any) -> Tape:
    if not isinstance(document, dict) or set(document) != {field.name for field in fields(Tape)}:
        raise ValueError("an output stream is malformed")
    take = _Taking(document)
    beginning, pieces = take.bytes("beginning"), take.texts("pieces")
    if len(beginning) > KEPT or len(pieces) > MOST_PIECES or any(len(piece) != _PIECE for piece in pieces):
        raise ValueError("an output stream is longer than what is kept of one")
    return Tape(take.number("size", 0, 1 << 60), take.digest("digest"), beginning, pieces)


class _Taking:
    """Returns fields of a JSON document. Raises ValueError if a field does not have the requested type."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document

    def text(self, name: str) -> str:
        value = self.document[name]
        if not isinstance(value, str) or "\0" in value:
            raise ValueError(f"{name} is no text")
        return value

    def number(self, name: str, least: int, most: int) -> int:
        value = self.document[name]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"{name} is no number that it can be")
        return value

    def hexadecimal(self, name: str, length: int) -> str:
        value = self.text(name)
        if len(value) != length or value.strip("0123456789abcdef"):
            raise ValueError(f"{name} is no digest")
        return value

    def digest(self, name: str) -> str:
        return self.hexadecimal(name, _DIGEST)

    def bytes(self, name: str) -> bytes:
        value = self.document[name]
        if not isinstance(value, dict) or set(value) != {"base64"} or not isinstance(value["base64"], str):
            raise ValueError(f"{name} is not in base64")
        return base64.b64decode(value["base64"], validate=True)

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.document[name]
        if not isinstance(value, list) or not all(isinstance(each, str) and "\0" not in each for each in value):
            raise ValueError(f"{name} is no list of texts")
        return tuple(value)

    def names(self, name: str, kind: type) -> dict[str, Any]:
        value = self.document[name]
        if not isinstance(value, dict) or not all(isinstance(each, kind) for each in value.values()):
            raise ValueError(f"{name} is no table")
        return value

    def limits(self, name: str) -> dict[str, Any]:
        value = self.document[name]
        known = {field.name for field in fields(Limits)}
        if not isinstance(value, dict) or set(value) != known:
            raise ValueError(f"{name} are not the limits that there are")
        for each in value.values():
            if each is not None and (isinstance(each, bool) or not isinstance(each, int | float)):
                raise ValueError(f"{name} are no numbers")
        return value


_SNIPPET = 40  # bytes that are shown of either side


@dataclass(frozen=True)
class Departure:
    """One difference between two records. `what` is "input", "stdout", "stderr", "change", "exit" or "fuel"; `message` is for people."""

    what: str
    message: str


def departures(recorded: Record, now: Record) -> tuple[Departure, ...]:
    """Return the differences between two records, likely causes first; empty if the runs were the same."""
    return (
        *_inputs(recorded.inputs, now.inputs),
        *_stream("stdout", recorded.stdout, now.stdout),
        *_stream("stderr", recorded.stderr, now.stderr),
        *_changes(recorded.changes, now.changes),
        *_end(recorded, now),
    )


def _inputs(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[Departure]:
    for name in sorted(before.keys() & after.keys()):
        if before[name] != after[name]:
            yield Departure("input", f"the {name} has changed since the record was made")
    for name in sorted(before.keys() - after.keys()):
        yield Departure("input", f"the {name} was looked into, and is not now")
    for name in sorted(after.keys() - before.keys()):
        yield Departure("input", f"the {name} is looked into, and was not then")


def _stream(name: str, before: Tape, after: Tape) -> Iterator[Departure]:
    difference = first_difference(before, after)
    if difference is None:
        return
    at, exact = difference
    if not exact or at >= max(len(before.beginning), len(after.beginning)):
        yield Departure(name, f"{name} differs from byte {at} on{'' if exact else ', or shortly after'}")
        return
    was, now = (tape.beginning[at : at + _SNIPPET] for tape in (before, after))
    yield Departure(name, f"{name} differs at byte {at}: it was {_shown(was)}, and is {_shown(now)}")


def _shown(piece: bytes) -> str:
    return repr(piece)[1:] if piece else "at its end"


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[Departure]:
    for path in sorted(before.keys() | after.keys()):
        if path not in after:
            yield Departure("change", f"{path!r} was changed, and is not now")
        elif path not in before:
            yield Departure("change", f"{path!r} is changed, and was not then")
        elif before[path] != after[path]:
            yield Departure("change", f"{path!r} is changed in another way")


def _end(before: Record, after: Record) -> Iterator[Departure]:
    was, now = _how_it_ended(before), _how_it_ended(after)
    if was != now:
        yield Departure("exit", f"it ended with {was}, and now with {now}")
    if before.fuel != after.fuel:
        yield Departure("fuel", f"it used {before.fuel} units of fuel, and now {after.fuel}")


def _how_it_ended(record: Record) -> str:
    limits = f", at the limit of {' and '.join(record.limits_hit)}" if record.limits_hit else ""
    return f"{record.code_out} ({record.reason}{limits})"


class Recorder(Attachment):
    """The recorder of one run. Run its `work` in a session, and then make the record from the outcome."""

    def __init__(self, work: Work, *, salt: str | None = None) -> None:
        """`salt` is that of an earlier record to compare with; None makes a new one. Raises `RecordError` for unrecordable work."""
        if not isinstance(work.what, Code) or not isinstance(work.stdin, bytes):
            raise RecordError("only code whose input is known beforehand can be recorded", hint="give it code, and its input as bytes")
        self._what, self._stdin = work.what, work.stdin
        self._given = work
        self._salt = salt or secrets.token_hex(16)
        self._tapes = {"stdout": Taping(), "stderr": Taping()}
        self._changes: dict[str, str] = {}
        self._pass_on: Callable[[str, bytes], None] | None = None
        self.work = replace(work, on_changes=self._note, attachments=(*work.attachments, self), record="")

    def before(self, launch: Launch) -> Launch:
        """Return the launch with its output recorded, and with a report of the files that it opens."""
        self._pass_on = launch.on_output
        return replace(launch, on_output=self._take, watch_inputs=True)

    def _take(self, stream: str, data: bytes) -> None:
        self._tapes[stream].take(data)
        if self._pass_on is not None:
            self._pass_on(stream, data)

    def _note(self, changes: ChangeSet, contents: Contents) -> None:
        self._changes = {change.path: _change_digest(change, contents) for change in changes}
        if self._given.on_changes is not None:
            self._given.on_changes(changes, contents)

    def record(self, outcome: Outcome, policy: Policy, identity: Mapping[str, str], *, keep: bool = True) -> Record:
        """Return the record of the run. Without `keep` it has only digests of the code and of standard input."""
        source, end = self._what.source.encode(), outcome.exit
        return Record(
            identity=identity,
            seed=self._given.seed,
            language=self._what.language,
            code=self._what.source if keep else None,
            code_digest=digest(source),
            arguments=self._what.arguments,
            stdin=self._stdin if keep else None,
            stdin_digest=digest(self._stdin),
            cwd=self._given.cwd or SCRATCH,
            salt=self._salt,
            environment={name: salted(self._salt, value) for name, value in sorted(self._given.env.items())},
            rules=rules_of(policy.files),
            limits={field.name: getattr(policy.limits, field.name) for field in fields(policy.limits)},
            inputs=_parse_inputs(outcome.inputs),
            stdout=self._tapes["stdout"].taped(),
            stderr=self._tapes["stderr"].taped(),
            changes=self._changes,
            code_out=end.code,
            reason=end.reason.value,
            limits_hit=end.limits_hit,
            fuel=end.usage.fuel,
        )


class RecordWriter(Recorder):
    """A recorder that writes the record to a file when the run has ended."""

    def __init__(self, work: Work, policy: Policy, identity: Mapping[str, str]) -> None:
        super().__init__(work)
        self._path, self._policy, self._identity = work.record, policy, identity

    def ended(self, guest: Guest, completed: Completed, outcome: Outcome) -> Outcome:
        """Write the record. Raises `RecordError`."""
        write(self.record(outcome, self._policy, self._identity), self._path)
        return outcome


def recorded(work: Work, policy: Policy, identity: Callable[[], Mapping[str, str]]) -> Work:
    """Return the work with a recorder that writes to the file `work.record`. Raises `PolicyError` or `RecordError`."""
    if Guarantee.DETERMINISTIC not in policy.requires:
        raise PolicyError("only deterministic runs are recorded", hint="add deterministic=True, or --deterministic")
    check_place(work.record)
    return RecordWriter(work, policy, identity()).work


def rules_of(files: FileRules) -> str:
    """Return the digest of the file rules without their masks, because another user or machine has other secrets to mask."""
    return canonical_digest(replace(files, masks=()))


def _parse_inputs(report: bytes) -> dict[str, str]:
    """Parse a guest's report of the files that it opened. Malformed lines are ignored: a guest may report anything."""
    inputs = {}
    for line in report.splitlines():
        kind, _, rest = line[:_LONGEST_LINE].partition(b" ")
        name, _, path = rest.partition(b" ")
        if kind in (b"file", b"directory") and len(name) == 64 and not name.strip(b"0123456789abcdef"):
            try:
                inputs[f"{kind.decode()} {os.fsdecode(bytes.fromhex(path.decode('ascii', 'replace')))}"] = name.decode()
            except ValueError:
                continue
    return inputs


def _change_digest(change: Change, contents: Contents) -> str:
    """Return the digest of a change, without owner and times: another user may replay the run, and file times come from the real clock."""
    after = change.after
    plain = [change.kind.value, change.renamed_from, change.link_of, *change.xattrs]
    if after is not None:
        plain += [after.type.value, f"{after.mode:o}", str(after.size), after.target, str(after.device)]
        plain += [f"{name}={value.hex()}" for name, value in sorted(after.xattrs.items())]
    if after is not None and after.type is EntryType.FILE:
        with open(contents.open_file(change), "rb") as file:
            plain.append(hashlib.file_digest(file, "sha256").hexdigest())
    return digest_of_form(plain)
