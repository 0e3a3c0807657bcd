"""Provisions of the egress of a session, besides the rules of its policy: secrets, values that must not leave, and tables of the search.

It goes to the egress process over its socket and nowhere else. No representation shows a value.
"""

from __future__ import annotations

import os
import stat

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, field

if TYPE_CHECKING:
    from agent_sandbox.policy.bound_secrets import BoundSecret

COMPILED = "dlp-rules"  # the name of the file with the compiled rules of the search


@dataclass(frozen=True)
class ShownFile:
    """A file that a run is shown with another content: `link` is where the content lies in the view, and `path` becomes a link to it."""

    path: str
    link: str
    mode: int
    content: bytes = field(repr=False)


@dataclass(frozen=True)
class Provisions:
    """The secrets that are put in on the way out, names and values that must not leave, and paths and texts of tables of rules.

    `indexes` are secrets that no variable stands for: the run sees their placeholders in `files`. `roots` are hosts, each with the
    certificates that its own is verified with, in PEM. `state` is a directory of the user's own, in which compiled rules are kept; empty:
    nowhere. `notes` are sentences for the caller.
    """

    secrets: tuple[BoundSecret, ...] = ()
    own: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    tables: tuple[tuple[str, str], ...] = ()
    state: str = ""
    indexes: tuple[BoundSecret, ...] = ()
    files: tuple[ShownFile, ...] = ()
    roots: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = ()

    def open_compiled(self) -> int | None:
        """Return a descriptor of the file with the compiled rules; None if there can be none that is this user's alone."""
        if not self.state:
            return None
        try:
            os.makedirs(self.state, mode=0o700, exist_ok=True)
            file = os.open(os.path.join(self.state, COMPILED), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            return None
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022 or found.st_nlink != 1:
            os.close(file)
            return None
        return file


NO_PROVISIONS = Provisions()
