"""The seccomp filters: compile the system call rules into BPF, and install the filter for good.

The filter is a binary search over ranges of system call numbers, so an answer costs about eight comparisons. Since Linux 5.11 the kernel
precomputes the numbers that are always allowed and does not run the filter for them at all. A call from another architecture (`int 0x80`
on x86_64) kills the process. Numbers missing from the table, including x32's, get ENOSYS, as from an older kernel.

The filter checks numbers and register values only. Memory behind a pointer can change after the check, so nothing depends on it: paths are
enforced by the view and Landlock, addresses by the network.
"""

from __future__ import annotations

import ctypes
import errno
import struct

from agent_sandbox._fast.functions import cache
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.kernel import syscall_rules, syscalls
from agent_sandbox.kernel.syscall_rules import Condition, Rule

if TYPE_CHECKING:
    from collections.abc import Mapping

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_RET_KILL_PROCESS, _RET_ERRNO, _RET_USER_NOTIF, _RET_ALLOW = 0x80000000, 0x00050000, 0x7FC00000, 0x7FFF0000
_LONGEST_BRANCH = 255  # a conditional jump stores its distance in one byte

# Offsets in struct seccomp_data. A 64-bit argument is two words, low word first: both machines are little-endian.
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16

Instruction = tuple[int, int, int, int]  # struct sock_filter: code, distance if true, distance if false, constant
Code = list[Instruction]  # self-contained: every path through it ends in a return, so pieces can be concatenated


@dataclass(frozen=True)
class FilterAction:
    """The filter's answer to a system call: allow it if `rule` holds, else refuse it with the error `refusal`.

    The rule None always holds; an empty rule never holds.
    """

    rule: Rule | None
    refusal: int = errno.EPERM

    def describe(self) -> str:
        if self.rule is None:
            return "allow"
        refusal = errno.errorcode[self.refusal]
        if not self.rule:
            return refusal
        return f"allow if {' or '.join(' and '.join(c.describe() for c in group) for group in self.rule)}; else {refusal}"


_ALLOW, _REFUSE, _UNKNOWN = FilterAction(rule=None), FilterAction(rule=()), FilterAction(rule=(), refusal=errno.ENOSYS)


@dataclass(frozen=True)
class Program:
    """A compiled filter and its answers, in the order of the system call numbers."""

    machine: str
    answers: tuple[tuple[str, int, FilterAction], ...]
    code: bytes

    def describe(self) -> str:
        """Return one line per system call with the filter's answer."""
        lines = [f"{name} ({number}): {answer.describe()}" for name, number, answer in self.answers]
        return "\n".join([f"not {self.machine}: kill", *lines, f"any other number: {_UNKNOWN.describe()}"])


def compile_filter(
    *,
    processes: bool,
    execute: bool = True,
    system: bool = False,
    gated: bool = False,
    forks: bool = False,
    outer: bool = False,
    machine: str = syscalls.MACHINE,
) -> Program:
    """Return the filter for a guest. Without `processes` the guest can start threads only; without `execute` it cannot exec.

    `system` permits no additional call, but refuses a socket family with the error of a kernel without that family. Tools that add users
    fail if an audit socket is refused, and go on if the kernel has none. `gated` refuses memfd_create, because no mount option prevents the
    execution of a memfd. `forks` permits the call that makes a fork of a session's state, which the supervisor must answer first. `outer`
    permits what a program of ours needs that makes walls of its own for the guest, such as an OCI runtime.

    A filter is compiled once for each meaning: a zygote compiles it, and its guests inherit it, however they spell the arguments. Raises
    `RuntimeUnavailable` on a machine whose system call numbers are unknown.
    """
    return _compiled(processes, execute, system, gated, forks, outer, machine)


@cache  # its key tells f(gated=False) from f(), so every argument comes by position
def _compiled(processes: bool, execute: bool, system: bool, gated: bool, forks: bool, outer: bool, machine: str) -> Program:
    if machine not in syscall_rules.MACHINES:
        raise RuntimeUnavailable(
            f"cannot filter system calls: their numbers on {machine} are not known",
            missing=("system call filter",),
            hint=f"use a machine of kind {' or '.join(syscall_rules.MACHINES)}",
        )
    numbers = sorted((number, name) for name, number in syscall_rules.numbers(machine).items())
    answers = tuple(
        (name, number, _answer(name, processes=processes, execute=execute, system=system, gated=gated, forks=forks, outer=outer))
        for number, name in numbers
    )
    return _assembled(machine, answers)


def compile_only(rules: Mapping[str, Rule | None], *, machine: str = syscalls.MACHINE) -> Program:
    """Return a filter that allows only these calls, each under its rule, and refuses all others with EPERM. For processes of ours."""
    numbers = sorted((number, name) for name, number in syscall_rules.numbers(machine).items())
    return _assembled(machine, tuple((name, number, FilterAction(rules.get(name, ()))) for number, name in numbers))


def _assembled(machine: str, answers: tuple[tuple[str, int, FilterAction], ...]) -> Program:
    search = _search(_ranges({number: answer for _, number, answer in answers}))
    code = [
        _load(_ARCHITECTURE),
        _branch_equal(_AUDIT_ARCH[machine], if_true=1, if_false=0),
        _return(_RET_KILL_PROCESS),
        _load(_NUMBER),
        *search,
    ]
    return Program(machine, answers, b"".join(struct.pack("=HBBI", *instruction) for instruction in code))


def install(program: Program) -> None:
    """Put every thread of this process, and its descendants, under the filter. It cannot be removed. Sets no_new_privs.

    Raises OSError if the kernel refuses; then no thread is under the filter.
    """
    install_code(program.code)


def install_code(code: bytes) -> None:
    """The same with the code of a filter, which may have been compiled elsewhere."""
    thread = _set(code, syscalls.SECCOMP_FILTER_FLAG_TSYNC)
    if thread:
        raise OSError(errno.EBUSY, f"seccomp: thread {thread} is under a filter of its own")


@cache
def compile_observer(names: tuple[str, ...], *, machine: str = syscalls.MACHINE) -> bytes:
    """Return a second filter that refuses nothing: it notifies a listener before each named call and allows all others.

    The kernel takes the strictest answer of several filters, so a call that the guest's filter refuses is refused without a notification.
    """
    known = syscall_rules.numbers(machine)
    code = [_return(_RET_ALLOW)]
    for name in names:
        if name not in known:
            continue
        notify = [_return(_RET_USER_NOTIF)]
        if name == "sendto":  # without an address it goes to the peer of a connected socket: no notification
            notify = [*_test(Condition(4, syscall_rules.WHOLE, (0,), holds=False), failure=1), *notify, _return(_RET_ALLOW)]
        if name == "clone":  # any other clone is an ordinary one
            notify = [*_test(syscall_rules.FORKS_A_STATE, failure=1), *notify, _return(_RET_ALLOW)]
        code = [_branch_equal(known[name], if_true=0, if_false=len(notify)), *notify, *code]
    # Calls from another architecture are left to the guest's filter, which kills the process.
    code = [_load(_ARCHITECTURE), _branch_equal(_AUDIT_ARCH[machine], if_true=1, if_false=0), _return(_RET_ALLOW), _load(_NUMBER), *code]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def install_observer(code: bytes) -> int:
    """Put this single-threaded process and its descendants under an observer filter. Return the listener, which is closed on exec.

    From now on each observed call waits for the holder of the listener; without a holder the call fails. Since Linux 5.19, only a fatal
    signal interrupts a call that the listener has received. The program's own signal handlers run after such a call. Raises OSError if the
    kernel refuses the filter.
    """
    listener = syscalls.SECCOMP_FILTER_FLAG_NEW_LISTENER
    try:
        return _set(code, listener | syscalls.SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return _set(code, listener)


def _set(code: bytes, flags: int) -> int:
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    header = _SockFprog(len(code) // 8, code)
    return syscalls.seccomp(syscalls.SECCOMP_SET_MODE_FILTER, flags, ctypes.addressof(header))


class _SockFprog(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _answer(name: str, *, processes: bool, execute: bool, system: bool, gated: bool, forks: bool, outer: bool) -> FilterAction:
    if name in syscall_rules.ABSENT or (gated and name in syscall_rules.FILES_IN_MEMORY):
        return _UNKNOWN
    if outer and name in syscall_rules.MAKES_WALLS:
        return _ALLOW
    if name == "clone" and forks:
        return FilterAction((*syscall_rules.CONDITIONAL[name], (syscall_rules.FORKS_A_STATE,)))
    if name == "clone" and not processes:
        return FilterAction(syscall_rules.THREADS_ONLY)
    if name == "socket" and system:
        return FilterAction(syscall_rules.CONDITIONAL[name], refusal=errno.EPROTONOSUPPORT)
    if name in syscall_rules.CONDITIONAL:
        return FilterAction(syscall_rules.CONDITIONAL[name], refusal=syscall_rules.REFUSALS.get(name, errno.EPERM))
    allowed = (
        name in syscall_rules.ALLOWED
        or (processes and name in syscall_rules.STARTS_PROCESSES)
        or (execute and name in syscall_rules.EXECUTES)
    )
    return _ALLOW if allowed else _REFUSE


def _ranges(answers: dict[int, FilterAction]) -> list[tuple[int, FilterAction]]:
    """Return the numbers at which the answer changes, from 0 upwards, each with the new answer."""
    ranges: list[tuple[int, FilterAction]] = []
    for number in range(max(answers) + 2):  # the last one stands for all numbers beyond the table
        answer = answers.get(number, _UNKNOWN)
        if not ranges or ranges[-1][1] != answer:
            ranges.append((number, answer))
    return ranges


def _search(ranges: list[tuple[int, FilterAction]]) -> Code:
    """Return code that finds the range of the loaded system call number by binary search, and returns the answer of that range."""
    if len(ranges) == 1:
        return _reply(ranges[0][1])
    middle = len(ranges) // 2
    below, above = _search(ranges[:middle]), _search(ranges[middle:])
    pivot = ranges[middle][0]
    if len(below) <= _LONGEST_BRANCH:
        return [_branch_at_least(pivot, if_true=len(below), if_false=0), *below, *above]
    return [_branch_at_least(pivot, if_true=0, if_false=1), _jump(len(below)), *below, *above]


def _reply(answer: FilterAction) -> Code:
    if answer.rule is None:
        return [_return(_RET_ALLOW)]
    code = [_return(_RET_ERRNO | answer.refusal)]
    for group in reversed(answer.rule):
        code = _unless(group, code)
    return code


def _unless(group: tuple[Condition, ...], otherwise: Code) -> Code:
    """Return code that allows the call if every condition of the group holds, else continues with `otherwise`."""
    code = [_return(_RET_ALLOW)]
    for condition in reversed(group):
        # `otherwise` follows `code` directly, so a failed condition jumps over the code so far.
        code = [*_test(condition, failure=len(code)), *code]
    return [*code, *otherwise]


def _test(condition: Condition, *, failure: int) -> Code:
    """Return code that continues behind itself if the condition holds, else jumps over `failure` more instructions.

    The upper half of the argument is tested only if the mask covers it.
    """
    low = _ARGUMENTS + 8 * condition.argument
    last = len(condition.values) - 1
    on_match, on_none = (0, failure) if condition.holds else (failure, 0)
    code = [_load(low), _and(condition.mask & 0xFFFFFFFF)]
    for place, value in enumerate(condition.values):
        code.append(_branch_equal(value, if_true=last - place + on_match, if_false=on_none if place == last else 0))
    if condition.mask >> 32:
        code = [_load(low + 4), _and(condition.mask >> 32), _branch_equal(0, if_true=0, if_false=len(code) + on_none), *code]
    return code


def _load(offset: int) -> Instruction:
    return 0x20, 0, 0, offset  # BPF_LD | BPF_W | BPF_ABS


def _and(mask: int) -> Instruction:
    return 0x54, 0, 0, mask  # BPF_ALU | BPF_AND | BPF_K


def _jump(distance: int) -> Instruction:
    return 0x05, 0, 0, distance  # BPF_JMP | BPF_JA


def _branch_equal(value: int, *, if_true: int, if_false: int) -> Instruction:
    return 0x15, if_true, if_false, value  # BPF_JMP | BPF_JEQ | BPF_K


def _branch_at_least(value: int, *, if_true: int, if_false: int) -> Instruction:
    return 0x35, if_true, if_false, value  # BPF_JMP | BPF_JGE | BPF_K


def _return(value: int) -> Instruction:
    return 0x06, 0, 0, value  # BPF_RET | BPF_K
