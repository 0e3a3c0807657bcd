"""The risk of an effect, and the reason: pure functions over values.

There are three levels. Low is for effects that programs in a project have all day. Medium is worth a look. High is for an effect that runs
by itself later, reaches beyond the project, or cannot be undone. A level decides nothing: it only orders the display. The promotion itself
judges its obstacles, by the same protected classes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum

from agent_sandbox._fast.values import dataclass
from agent_sandbox.policy.hosts import covers
from agent_sandbox.policy.network import only_reads
from agent_sandbox.policy.network_presets import index_hosts
from agent_sandbox.readers.shell.effects import EffectKind as Does
from agent_sandbox.workspace.changes import Change, Kind
from agent_sandbox.workspace.nodes import EntryType
from agent_sandbox.workspace.protected import BULK_LIMIT, CLASSES, HISTORY

_SYSTEM = ("/etc", "/usr", "/bin", "/sbin", "/lib", "/lib64", "/boot", "/opt", "/var/lib", "/var/spool")
_OTHERS_MAY_WRITE = 0o002
# Addresses at which machines in a cloud are handed credentials.
_METADATA = ("169.254.169.254", "169.254.170.2", "[fd00:ec2::254]", "metadata.google.internal", "100.100.100.200")
_MANY_DELETIONS = 10


class Level(Enum):
    """Levels of risk."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


_ORDER = tuple(Level)


@dataclass(frozen=True)
class Risk:
    """A level of risk, and the reason in words."""

    level: Level
    why: str


NONE = Risk(Level.LOW, "nothing out of the ordinary")


def worst(risks: Iterable[Risk]) -> Risk:
    """Return the highest risk; of equal ones, the first."""
    return max(risks, key=lambda risk: _ORDER.index(risk.level), default=NONE)


def of_change(change: Change, classes: Collection[str], *, place: str) -> Risk:
    """Return the risk of a change. `classes` are its protected classes; `place` is project, elsewhere or noise."""
    risks = [Risk(Level.MEDIUM if name == HISTORY else Level.HIGH, CLASSES[name]) for name in sorted(classes)]
    if change.masks_real:
        risks.append(Risk(Level.HIGH, "a real file that was hidden from the sandbox is here"))
    if place == "elsewhere":
        system = change.path.startswith(tuple(f"{each}/" for each in _SYSTEM)) or change.path in _SYSTEM
        risks.append(Risk(Level.HIGH, "it belongs to the system") if system else Risk(Level.MEDIUM, "it lies outside the project"))
    risks += _by_kind(change) if place != "noise" else ()
    return worst((*risks, NONE))


def _by_kind(change: Change) -> Iterable[Risk]:
    before, after = change.before, change.after
    if before is not None and (after is None or after.type is not before.type):
        going = change.inside + 1 if before.type is EntryType.DIRECTORY else 1
        many = going > _MANY_DELETIONS
        what = f"a directory is deleted, with {change.inside:,} entries in it" if change.inside else "it is deleted"
        yield Risk(Level.HIGH if many else Level.MEDIUM, "its content moves elsewhere" if change.renamed_from else what)
    if after is not None and after.type is EntryType.DEVICE:
        yield Risk(Level.HIGH, "it is a device")
    if after is not None and after.type is not EntryType.SYMLINK and after.mode & _OTHERS_MAY_WRITE and not after.mode & 0o1000:
        yield Risk(Level.MEDIUM, "everybody on the machine can write to it")
    if change.kind is Kind.OWNER:
        yield Risk(Level.MEDIUM, "it gets another owner")


def of_deletions(count: int) -> Risk:
    """Return the risk of deleting this many files and directories."""
    if count > BULK_LIMIT:
        return Risk(Level.HIGH, f"{count:,} files and directories are deleted")
    return Risk(Level.MEDIUM, f"{count:,} files and directories are deleted") if count > _MANY_DELETIONS else NONE


_PREDICTED = {
    Does.DESTROYS: Risk(Level.HIGH, "the same tool cannot undo it"),
    Does.PRIVILEGE: Risk(Level.HIGH, "it changes its user or privileges"),
    Does.SYSTEM: Risk(Level.HIGH, "it is about services, mounts, accounts or the kernel"),
    Does.NETWORK: Risk(Level.MEDIUM, "it uses the network"),
    Does.PROCESSES: Risk(Level.MEDIUM, "it signals or traces other processes"),
    Does.UNKNOWN: Risk(Level.MEDIUM, "not all effects are visible in the text of the command"),
}


def of_prediction(kind: Does) -> Risk:
    """Return the risk of a predicted effect of this kind."""
    return _PREDICTED.get(kind, NONE)


def of_program(allowed: bool) -> Risk:
    """Return the risk of a started program. `allowed` says whether the policy allows it."""
    return NONE if allowed else Risk(Level.MEDIUM, "the policy does not allow it")


def of_request(kind: str, target: str, *, listed: bool = False) -> Risk:
    """Return the risk of a connection, a looked-up name or an opened port. If its requests are `listed`, they have the risk."""
    host = target if kind == "resolve" else target.rpartition(":")[0]
    if host in _METADATA:
        return Risk(Level.HIGH, "the machine's credentials are handed out there")
    if kind == "listen":
        return Risk(Level.LOW, "it waits for others to connect, inside the sandbox")
    return NONE if listed else Risk(Level.MEDIUM, "it would use the network")


def of_http(method: str, host: str, path: str, secrets: Collection[str]) -> Risk:
    """Return the risk of a request over HTTP.

    Reading from a public index of packages is low, reading elsewhere medium, because the address itself may say something, and whatever may
    change something at the host is high. A secret in the request makes it a level higher.
    """
    if not only_reads(method, path):
        return Risk(Level.HIGH, f"it may change something at the host ({method}){', with a secret' if secrets else ''}")
    index = covers(index_hosts(), host)
    if secrets:
        return Risk(Level.MEDIUM if index else Level.HIGH, "it reads with a secret" + (" from an index of packages" if index else ""))
    return Risk(Level.LOW, "it reads from an index of packages") if index else Risk(Level.MEDIUM, "it reads from a host")


def of_secret(kind: str, why: str) -> Risk:
    """Return the risk of a secret: a variable given to the run, or a hidden file that the run tried to read."""
    if kind == "variable":
        return Risk(Level.MEDIUM, "it was handed in, and could be written or sent anywhere it reaches")
    return Risk(Level.HIGH, f"it tried to read a hidden file: {why}")


def of_unlisted(why: str) -> Risk:
    """Return the risk of changes that cannot be listed, for the reason `why`; none if `why` is empty."""
    return Risk(Level.HIGH, f"not all of its changes can be listed: {why}") if why else NONE


def of_unseen(why: str) -> Risk:
    """Return the risk that attempts were not observed, for the reason `why`; none if `why` is empty."""
    return Risk(Level.MEDIUM, f"not all of its attempts were observed: {why}") if why else NONE


def of_end(code: int, reason: str) -> Risk:
    """Return the risk that a run which failed or was cut off leaves incomplete changes."""
    if reason != "exited":
        return Risk(Level.MEDIUM, "it was cut off, so its changes may be incomplete")
    return Risk(Level.MEDIUM, "it failed, so its changes may be incomplete") if code else NONE
