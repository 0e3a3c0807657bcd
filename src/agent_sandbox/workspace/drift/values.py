"""What has moved on in reality since a clone was made, as values and in words."""

from __future__ import annotations

from enum import Enum

from agent_sandbox.values import dataclass
from agent_sandbox.workspace.seen import Base, Seen

_UNITS = ((86_400, "day"), (3_600, "hour"), (60, "minute"), (1, "second"))


class DriftKind(Enum):
    """What happened to a real path since the clone."""

    CHANGED = "changed"
    APPEARED = "appeared"
    GONE = "gone"
    GIT = "git"  # something inside a repository's own directory, which is not listed one by one


@dataclass(frozen=True)
class Drifted:
    """A real path that has moved on. `yours` says that the sandbox changed it too, `read` that a run opened it (None: nobody watched).

    `files` are those that it stands for: more than one for a directory that has appeared as a whole, and for a repository's own.
    """

    path: str
    kind: DriftKind
    yours: bool = False
    read: bool | None = None
    files: int = 1


@dataclass(frozen=True)
class Drift:
    """All that has moved on. `untold` says, in sentences, what could not be found out and why."""

    cloned_ns: int
    looked_ns: int
    entries: tuple[Drifted, ...] = ()
    untold: tuple[str, ...] = ()

    @property
    def age_seconds(self) -> float:
        """How long ago the clone was made."""
        return max(0, self.looked_ns - self.cloned_ns) / 1e9

    @property
    def files(self) -> int:
        """How many files have moved on."""
        return sum(entry.files for entry in self.entries)

    @property
    def yours(self) -> tuple[Drifted, ...]:
        """Those that the sandbox changed as well: where promotion needs a merge or a decision."""
        return tuple(entry for entry in self.entries if entry.yours)

    def sentence(self) -> str:
        """In one line, such as "15 minutes behind; 3 files moved on, 1 of them you changed"."""
        if not self.entries:
            return f"{age(self.age_seconds)} old; nothing has moved on" + (" as far as can be told" if self.untold else "")
        read = sum(entry.files for entry in self.entries if entry.read)
        parts = [_of_them(sum(entry.files for entry in self.yours), self.files, "changed")]
        if any(entry.read is not None for entry in self.entries):
            parts.append(_of_them(read, self.files, "read"))
        return f"{age(self.age_seconds)} behind; {_counted(self.files, 'file')} moved on, {' and '.join(parts)}"


def _of_them(count: int, whole: int, verb: str) -> str:
    if whole == 1:
        return f"{'which you' if count else 'which you have not'} {verb}"
    return f"{count if count else 'none'} of them you {verb}"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def age(seconds: float) -> str:
    """A length of time as people say it, in its largest unit.

    >>> age(0.2), age(61), age(7200)
    ('0 seconds', '1 minute', '2 hours')
    """
    size, unit = next((each for each in _UNITS if seconds >= each[0]), _UNITS[-1])
    return _counted(int(seconds // size), unit)


@dataclass(frozen=True)
class Unmoved:
    """What is real at a path is its base still. `seen` is what a promotion may expect there."""

    seen: Seen | None


@dataclass(frozen=True)
class Moved:
    """What is real at a path is not its base, or there is none. `below` are the paths in a directory that make the difference."""

    base: Base
    seen: Seen | None
    below: tuple[str, ...] = ()

    def why(self) -> str:
        """In a few words."""
        if self.below:
            return f"{'an entry' if len(self.below) == 1 else f'{len(self.below):,} entries'} below it moved on, first {self.below[0]!r}"
        if not self.base.known:
            return "what it was when the sandbox first changed it is not known"
        if self.base.seen is None:
            return "it has appeared in reality"
        return "it has gone in reality" if self.seen is None else "it has changed in reality"


Verdict = Unmoved | Moved
