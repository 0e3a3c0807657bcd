"""Make the record of a run while it goes on: its output as it comes, its changes while they can be read, the rest at its end."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Mapping

from agent_sandbox._fast.values import TYPE_CHECKING, fields, replace
from agent_sandbox.engine.attachments import Attachment
from agent_sandbox.engine.plan_launch import SCRATCH
from agent_sandbox.engine.records.record import Record, Taping, check_place, digest, salted, write
from agent_sandbox.engine.work import Code, Outcome, Work
from agent_sandbox.errors import PolicyError, RecordError
from agent_sandbox.policy import canonical
from agent_sandbox.policy.guarantees import Guarantee
from agent_sandbox.policy.model import FileRules, Policy
from agent_sandbox.workspace.changes import Change, ChangeSet, Contents
from agent_sandbox.workspace.nodes import EntryType

if TYPE_CHECKING:
    from agent_sandbox.runtime.base import Completed, Guest, Launch

_LONGEST_LINE = 16384


class Recorder(Attachment):
    """The recorder of one run. Give `work` to the session, and then make the record from its outcome."""

    def __init__(self, work: Work, *, salt: str | None = None) -> None:
        """`salt` is that of another record, to compare with. Raises `RecordError` for work that cannot be recorded."""
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
        """Have the output taped, and the inputs reported."""
        self._pass_on = launch.on_output
        return replace(launch, on_output=self._take, watch_inputs=True)

    def _take(self, stream: str, data: bytes) -> None:
        self._tapes[stream].take(data)
        if self._pass_on is not None:
            self._pass_on(stream, data)

    def _note(self, changes: ChangeSet, contents: Contents) -> None:
        self._changes = {change.path: _named(change, contents) for change in changes}
        if self._given.on_changes is not None:
            self._given.on_changes(changes, contents)

    def record(self, outcome: Outcome, policy: Policy, identity: Mapping[str, str], *, keep: bool = True) -> Record:
        """The record. Without `keep` the code and the input are not in it, only their digests."""
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
            inputs=_inputs(outcome.inputs),
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
    """Return the work with a recorder attached that writes to the file it names. Raises if no record can be made of it."""
    if Guarantee.DETERMINISTIC not in policy.requires:
        raise PolicyError("only deterministic runs are recorded", hint="add deterministic=True, or --deterministic")
    check_place(work.record)
    return RecordWriter(work, policy, identity()).work


def rules_of(files: FileRules) -> str:
    """Names what files a run is shown, without the secrets that are hidden from it: those are another user's on another machine."""
    return canonical.digest(replace(files, masks=()))


def _inputs(report: bytes) -> dict[str, str]:
    """What a guest says that it looked into. Lines that are none are left out: it may say anything."""
    found = {}
    for line in report.splitlines():
        kind, _, rest = line[:_LONGEST_LINE].partition(b" ")
        name, _, path = rest.partition(b" ")
        if kind in (b"file", b"directory") and len(name) == 64 and not name.strip(b"0123456789abcdef"):
            try:
                found[f"{kind.decode()} {os.fsdecode(bytes.fromhex(path.decode('ascii', 'replace')))}"] = name.decode()
            except ValueError:
                continue
    return found


def _named(change: Change, contents: Contents) -> str:
    """A digest of all that a change is, but for whose it is and when it was: users differ, and the disk has the real time."""
    after = change.after
    plain = [change.kind.value, change.renamed_from, change.link_of, *change.xattrs]
    if after is not None:
        plain += [after.type.value, f"{after.mode:o}", str(after.size), after.target, str(after.device)]
        plain += [f"{name}={value.hex()}" for name, value in sorted(after.xattrs.items())]
    if after is not None and after.type is EntryType.FILE:
        with open(contents.open_file(change), "rb") as file:
            plain.append(hashlib.file_digest(file, "sha256").hexdigest())
    return canonical.digest_of_plain(plain)
