"""Landlock: file access rules that the kernel enforces on a process and its descendants, independent of mounts.

Landlock is a second wall behind the view. It forbids creating devices, and ioctls on devices outside /dev. It keeps writes beneath named
directories where the view should be read-only. It keeps signals and abstract sockets within the run.

Not promised: that only `executable` files run. A program can be started through the loader (`ld.so program`) or from memory, which Landlock
does not see; the rule stops an ordinary execve and no more. Rules refer to directories, not to names, so a process whose root is replaced
later loses its grants. Descriptors opened earlier keep their rights.
"""

from __future__ import annotations

import ctypes
import os
import stat

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.kernel import syscalls

if TYPE_CHECKING:
    from collections.abc import Sequence

# Each right, named as in the kernel's headers: its bit, and the first ABI that has it.
RIGHTS: dict[str, tuple[int, int]] = {
    "EXECUTE": (1 << 0, 1),
    "WRITE_FILE": (1 << 1, 1),
    "READ_FILE": (1 << 2, 1),
    "READ_DIR": (1 << 3, 1),
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

# ABI 1 is not used: any ruleset under it forbids moving a file between directories, which breaks ordinary programs.
FIRST_USABLE = 2

_DEVICES = ("MAKE_CHAR", "MAKE_BLOCK")
_WRITES = ("WRITE_FILE", "TRUNCATE", "REMOVE_DIR", "REMOVE_FILE", "MAKE_DIR", "MAKE_REG", "MAKE_SOCK", "MAKE_FIFO", "MAKE_SYM", "REFER")
OF_A_FILE = ("EXECUTE", "WRITE_FILE", "TRUNCATE", "IOCTL_DEV")  # rights that can be granted on a non-directory

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
    """Landlock rules: the forbidden rights (`handled`), the exceptions (`grants`), and protections that this kernel lacks (`left_out`)."""

    handled: tuple[str, ...]
    grants: tuple[Grant, ...]
    scoped: tuple[str, ...]
    left_out: tuple[str, ...]

    def gaps(self) -> list[str]:
        """Return a note for users about what this kernel lacks, in a list; an empty list if it lacks nothing."""
        return [f"the Landlock of this kernel does not enforce: {', '.join(self.left_out)}"] if self.left_out else []

    def describe(self) -> str:
        """Return one line per rule."""
        lines = [f"forbid {' '.join(self.handled)}", *(f"permit {grant.describe()}" for grant in self.grants)]
        return "\n".join([*lines, f"keep within the run: {' '.join(self.scoped)}", f"not enforced here: {' '.join(self.left_out)}"])


def abi() -> int:
    """Return the Landlock ABI version of this kernel; 0 if absent or switched off."""
    try:
        return syscalls.landlock_create_ruleset(0, 0, _CREATE_RULESET_VERSION)
    except OSError:
        return 0


def plan(
    *, version: int, writable: Sequence[str] | None, executable: Sequence[str] | None, contents: Sequence[str] | None = None
) -> Ruleset:
    """Return the rules for a guest on a kernel with this ABI. Reading is never restricted.

    `writable`: files can be written, created, moved or removed only beneath these paths and /dev. None: only the view decides.
    `executable`: only these files, and files beneath these directories, can be executed. The kernel also executes a program's loader and a
    script's interpreter, so list them too.
    `contents`: used if `writable` is None. File contents can be changed only beneath these paths. Leave out /proc, through which a process
    can rewrite its own code.
    """
    # REFER is special: every ruleset forbids it unless it is handled and granted. So it is always handled and granted.
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


def open_ruleset(ruleset: Ruleset) -> int | None:
    """Return a descriptor of the rules, for `enforce` in a child; None if there is nothing to enforce. It binds nobody yet.

    Raises OSError if a granted path does not exist or the kernel refuses.
    """
    if not ruleset.handled and not ruleset.scoped:
        return None
    attributes = _RulesetAttr(bits(ruleset.handled), 0, sum(SCOPES[name][0] for name in ruleset.scoped))
    descriptor = syscalls.landlock_create_ruleset(ctypes.addressof(attributes), ctypes.sizeof(attributes), 0)
    try:
        for grant in ruleset.grants:
            _add(descriptor, grant)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def enforce(descriptor: int | None) -> None:
    """Put this thread and its descendants under opened rules for good, and close the descriptor. Sets no_new_privs. Raises OSError."""
    if descriptor is None:
        return
    try:
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
        syscalls.landlock_restrict_self(descriptor)
    finally:
        os.close(descriptor)


def restrict(*, writable: Sequence[str] | None, executable: Sequence[str] | None) -> tuple[str, ...]:
    """Plan the rules for this kernel and enforce them. Return the names of the protections that the kernel is too old for."""
    ruleset = plan(version=abi(), writable=writable, executable=executable)
    enforce(open_ruleset(ruleset))
    return ruleset.left_out


class _RulesetAttr(ctypes.Structure):
    """struct landlock_ruleset_attr. Older kernels know fewer fields and accept the others if they are zero."""

    _fields_ = (("handled_access_fs", ctypes.c_uint64), ("handled_access_net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneathAttr(ctypes.Structure):
    """struct landlock_path_beneath_attr."""

    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def bits(names: Sequence[str]) -> int:
    """Return the sum of these rights, as the kernel takes them."""
    return sum(RIGHTS[name][0] for name in names)


def _add(ruleset: int, grant: Grant) -> None:
    descriptor = os.open(grant.path, os.O_PATH | os.O_CLOEXEC)
    try:
        directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        rights = [name for name in grant.rights if directory or name in OF_A_FILE]
        rule = _PathBeneathAttr(bits(rights), descriptor)
        syscalls.landlock_add_rule(ruleset, _RULE_PATH_BENEATH, ctypes.addressof(rule))
    finally:
        os.close(descriptor)
