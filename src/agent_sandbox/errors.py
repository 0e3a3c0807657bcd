"""The errors of this package.

    SandboxError
    ├── PolicyError          what was asked for cannot be expressed or enforced; found before anything ran
    ├── Denied               the policy refused an action (carries the verdict)
    ├── RuntimeUnavailable   this host cannot give a guarantee that was asked for (carries what is missing)
    ├── LaunchFailed         the sandbox could not be built; nothing of the guest ran
    │   └── Overtaken        something was mounted on the machine after its view was planned
    ├── WorkspaceError       the stored state of a sandbox cannot be used
    │   ├── Busy             another run holds it
    │   ├── ForeignStore     another version wrote it
    │   └── Unfinished       a promotion was interrupted and cannot be brought to an end yet
    ├── Drift                the real tree has changed meanwhile (carries the paths); nothing was changed
    ├── Conflicted           both sides changed the same file, and somebody has to choose (carries the conflicts); nothing was changed
    ├── RecordError          the record of a run cannot be read, written or replayed
    ├── CheckpointError      a durable checkpoint cannot be saved, read or resumed; nothing of it has run
    ├── LedgerUnavailable    the record cannot be written, so the action was not performed
    └── LedgerBroken         the record has been changed or damaged

`ToolError` is not one of them: a tool of the caller raises it to tell the program in the sandbox why it failed. `SandboxWarning` is a
warning: a setting has no effect here.

A program that fails inside a sandbox raises none of these: its exit is data. Every message says what and why; `hint` says what to do.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # see `values`
if TYPE_CHECKING:
    from typing import Any


class SandboxError(Exception):
    """Base class of all errors of this package. `hint` tells the user how to solve the problem."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class PolicyError(SandboxError):
    """A policy, limit, path or other input that cannot be enforced as written."""


class Denied(SandboxError):
    """The policy refused an action. `verdict` is the `policy.decide.Deny` or `Ask` that gives the rule and the reason."""

    def __init__(self, message: str, *, verdict: Any, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.verdict = verdict


class RuntimeUnavailable(SandboxError):
    """This host cannot enforce what is required. `missing` names each guarantee or feature that is lacking."""

    def __init__(self, message: str, *, missing: tuple[str, ...] = (), hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.missing = missing


class LaunchFailed(SandboxError):
    """The sandbox could not be built. Nothing of the guest ran, and nothing was left behind."""


class Overtaken(LaunchFailed):
    """Something was mounted on the machine after the view had been planned. A new plan takes it into account."""


class WorkspaceError(SandboxError):
    """The stored state of a sandbox cannot be used as it is."""


class Busy(WorkspaceError):
    """Another run holds this sandbox."""


class ForeignStore(WorkspaceError):
    """The store was written by another version of this program, or by something else."""


class Unfinished(WorkspaceError):
    """An interrupted promotion cannot be rolled back or finished yet. Its journal is kept, so that the recovery can be tried again."""


class Drift(SandboxError):
    """The real tree has changed meanwhile. Nothing was promoted, or the changes promoted so far were taken back.

    `paths` are the paths that were not as expected. `kept` is a directory with files of another program that could not be put back into the
    tree; empty if there are no such files.
    """

    def __init__(self, message: str, *, paths: tuple[str, ...] = (), kept: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.paths = paths
        self.kept = kept


class Conflicted(SandboxError):
    """A merge has conflicts. Each of `conflicts` is a `workspace.merge.Conflict` with both sides and the base."""

    def __init__(self, message: str, *, conflicts: tuple[Any, ...] = (), hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.conflicts = conflicts


class RecordError(SandboxError):
    """The record of a run cannot be read, or cannot be replayed with what is here."""


class CheckpointError(SandboxError):
    """A durable checkpoint cannot be saved, read or resumed. Nothing of it has run, and no part of it was kept."""


class LedgerUnavailable(SandboxError):
    """The ledger could not be written. The action it was to record has not been performed."""


class LedgerBroken(SandboxError):
    """The ledger is inconsistent: an entry was changed, removed, reordered or torn."""


class SandboxWarning(UserWarning):
    """A setting has no effect here; the sandbox works without it."""


class ToolError(Exception):
    """Raised by a tool to send its message to the program that called it. Other exceptions stay outside the sandbox."""


def pip_install(packages: str) -> str:
    """Return the command line that installs packages beside this program. A bare `pip` may belong to another Python.

    An environment that uv made has no pip.
    """
    import importlib.util  # only for hints
    import shlex

    python = shlex.quote(sys.executable or "python3")
    has_pip = importlib.util.find_spec("pip") is not None
    return f"{python} -m pip install {packages}" if has_pip else f"uv pip install --python {python} {packages}"


def install_extra(extra: str) -> str:
    """Return the command line that installs the packages of an extra. It names them: an index need not have this program.

    It may have another of its name, too.
    """
    import re  # only for hints
    import shlex
    from importlib.metadata import PackageNotFoundError, requires

    try:
        every = [requirement.partition(";") for requirement in requires("entersandbox") or ()]
    except PackageNotFoundError:  # run from its sources
        every = []
    needed = [package.strip() for package, _, marker in every if re.search(rf"extra\s*==\s*['\"]{re.escape(extra)}['\"]", marker)]
    return pip_install(shlex.join(needed) if needed else f"'entersandbox[{extra}]'")
