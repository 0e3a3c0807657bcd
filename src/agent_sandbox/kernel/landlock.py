"""Rules on files that the kernel keeps for a process and all it starts, whatever the mounts say: Landlock.

A second wall behind the view. It makes devices impossible to create and, outside /dev, impossible to command; it keeps writes beneath
named directories where the view is meant to be read-only; it keeps signals and abstract sockets within the run.

Not promised: that only `executable` files run. A program can be started through the loader (`ld.so program`) or from memory, which
Landlock does not see; the rule stops the ordinary execve and no more. Rules hold on to directories, not to names, so a process whose root
is later exchanged loses what was granted. Descriptors opened before keep the rights they were opened with.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Sequence

from agent_sandbox._fast.values import dataclass
from agent_sandbox.kernel import syscalls

# Each right by its name in the kernel's headers: its bit, and the first ABI that has it.
RIGHTS: dict[str, tuple[int, int]] = {
    "EXECUTE": (1 << 0, 1),
    "WRITE_FILE": (1 << 1, 1),
    "REMOVE_DIR": (1 << 4, 1),
    "REMOVE_FILE": (1 << 5, 1),
    "MAKE_CHAR": (1 << 6, 1),
    "MAKE_DIR": (1 << 7, 1),
    "MAKE_REG": (1 << 8, 1),
    "MAKE_SOCK": (1 << 9, 1),
    "MAKE_FIFO": (1 << 10, 1),
    "MAKE_BLOCK": (1 << 11, 1),
    "MAKE_SYM": (1 << 12, 1),
    "REFER": (1 << 13, 2),
    "TRUNCATE": (1 << 14, 3),
    "IOCTL_DEV": (1 << 15, 5),
}
SCOPES: dict[str, tuple[int, int]] = {
    "ABSTRACT_UNIX_SOCKET": (1 << 0, 6),
    "SIGNAL": (1 << 1, 6),
}

# Under the first ABI any ruleset forbids moving a file from one directory to another, which breaks ordinary programs: it is not used.
FIRST_USABLE = 2

_DEVICES = ("MAKE_CHAR", "MAKE_BLOCK")
_WRITES = ("WRITE_FILE", "TRUNCATE", "REMOVE_DIR", "REMOVE_FILE", "MAKE_DIR", "MAKE_REG", "MAKE_SOCK", "MAKE_FIFO", "MAKE_SYM", "REFER")
_OF_A_FILE = ("EXECUTE", "WRITE_FILE", "TRUNCATE", "IOCTL_DEV")  # what can be granted on something that is no directory

_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1


@dataclass(frozen=True)
class Grant:
    """Rights, by name, on a path and everything beneath it."""

    path: str
    rights: tuple[str, ...]

    def describe(self) -> str:
        return f"{' '.join(self.rights)} beneath {self.path}"


@dataclass(frozen=True)
class Ruleset:
    """What becomes forbidden, and where it stays permitted all the same. `left_out` is what this kernel is too old for."""

    handled: tuple[str, ...]
    grants: tuple[Grant, ...]
    scoped: tuple[str, ...]
    left_out: tuple[str, ...]

    def describe(self) -> str:
        """One line per rule."""
        lines = [f"forbid {' '.join(self.handled)}", *(f"permit {grant.describe()}" for grant in self.grants)]
        return "\n".join([*lines, f"keep within the run: {' '.join(self.scoped)}", f"not enforced here: {' '.join(self.left_out)}"])


def abi() -> int:
    """The version of Landlock in this kernel; 0 where there is none, or it is switched off."""
    try:
        return syscalls.landlock_create_ruleset(0, 0, _CREATE_RULESET_VERSION)
    except OSError:
        return 0


def plan(
    *, version: int, writable: Sequence[str] | None, executable: Sequence[str] | None, contents: Sequence[str] | None = None
) -> Ruleset:
    """The rules for a guest on a kernel with this ABI.

    With `writable`, only beneath those paths and /dev may anything be written, made, moved or removed; None leaves writing to the view.
    With `executable`, only those files, and files beneath those directories, may be executed. The loader that a program names and the
    interpreter that a script names count as executed: list them too. Reading is never restricted. With `contents`, and writing left to the
    view, what files hold may be changed beneath those paths only: /proc, through which a process can rewrite its own code, not among them.
    """
    # REFER is special: the kernel forbids it under every ruleset unless it is handled and granted, so it always is.
    changes = _WRITES if writable is not None else ("WRITE_FILE", "TRUNCATE", "REFER") if contents is not None else ("REFER",)
    wanted = [*_DEVICES, "IOCTL_DEV", *changes, *(["EXECUTE"] if executable is not None else [])]
    if version < FIRST_USABLE:
        return Ruleset((), (), (), (*(name for name in wanted if name != "REFER"), *SCOPES))
    handled = tuple(name for name in wanted if RIGHTS[name][1] <= version)
    scoped = tuple(name for name, (_, floor) in SCOPES.items() if floor <= version)
    left_out = (*(name for name in wanted if name not in handled), *(name for name in SCOPES if name not in scoped))

    def grant(path: str, rights: Sequence[str]) -> Grant:
        return Grant(path, tuple(name for name in rights if name in handled))

    if writable is not None:
        writes = [grant(path, _WRITES) for path in (*writable, "/dev")]
    else:
        writes = [grant("/", ["REFER"]), *(grant(path, ["WRITE_FILE", "TRUNCATE"]) for path in contents or ())]
    executes = [grant(path, ["EXECUTE"]) for path in executable or ()]
    grants = (*writes, *executes, grant("/dev", ["IOCTL_DEV"]))
    return Ruleset(handled, tuple(each for each in grants if each.rights), scoped, left_out)


def enforce(ruleset: Ruleset) -> None:
    """Put this thread, and all it starts, under the rules for good. Sets no_new_privs.

    Raises OSError when a path of a grant does not exist or the kernel refuses; nothing is restricted then.
    """
    if not ruleset.handled and not ruleset.scoped:
        return
    attributes = _RulesetAttr(_bits(ruleset.handled), 0, sum(SCOPES[name][0] for name in ruleset.scoped))
    descriptor = syscalls.landlock_create_ruleset(ctypes.addressof(attributes), ctypes.sizeof(attributes), 0)
    try:
        for grant in ruleset.grants:
            _add(descriptor, grant)
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
        syscalls.landlock_restrict_self(descriptor)
    finally:
        os.close(descriptor)


def restrict(*, writable: Sequence[str] | None, executable: Sequence[str] | None) -> tuple[str, ...]:
    """Plan for this kernel and enforce. Returns the names of the protections that it is too old for."""
    ruleset = plan(version=abi(), writable=writable, executable=executable)
    enforce(ruleset)
    return ruleset.left_out


class _RulesetAttr(ctypes.Structure):
    """struct landlock_ruleset_attr. Older kernels know fewer fields and accept the others as long as they are zero."""

    _fields_ = (("handled_access_fs", ctypes.c_uint64), ("handled_access_net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneathAttr(ctypes.Structure):
    """struct landlock_path_beneath_attr."""

    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def _bits(names: Sequence[str]) -> int:
    return sum(RIGHTS[name][0] for name in names)


def _add(ruleset: int, grant: Grant) -> None:
    descriptor = os.open(grant.path, os.O_PATH | os.O_CLOEXEC)
    try:
        directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        rights = [name for name in grant.rights if directory or name in _OF_A_FILE]
        rule = _PathBeneathAttr(_bits(rights), descriptor)
        syscalls.landlock_add_rule(ruleset, _RULE_PATH_BENEATH, ctypes.addressof(rule))
    finally:
        os.close(descriptor)
