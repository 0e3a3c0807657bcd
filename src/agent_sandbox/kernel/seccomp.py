"""Compile the rules on system calls into a filter, and put the calling process under it for good.

The filter is a binary search over ranges of system call numbers, so an answer costs about eight comparisons; and since Linux 5.11 the
kernel works out beforehand which numbers are always allowed and does not run the filter for those at all. A call from another
architecture (`int 0x80` on x86_64) ends the process. Numbers the table does not know, x32's among them, get ENOSYS, as from an older
kernel.

It looks at numbers and register values only. What a pointer points to can change after the look, so nothing here rests on it: paths are
the view's and Landlock's matter, addresses the network's.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import struct

from agent_sandbox._fast.values import dataclass
from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.kernel import syscall_rules, syscalls
from agent_sandbox.kernel import syscall_rules as rules
from agent_sandbox.kernel.syscall_rules import Condition, Rule

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_RET_KILL_PROCESS, _RET_ERRNO, _RET_USER_NOTIF, _RET_ALLOW = 0x80000000, 0x00050000, 0x7FC00000, 0x7FFF0000
_LONGEST_BRANCH = 255  # a conditional jump holds its distance in a byte

# struct seccomp_data, and its 64-bit arguments as two words: both machines are little-endian
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16

Instruction = tuple[int, int, int, int]  # struct sock_filter: code, distance if true, distance if false, constant
Code = list[Instruction]  # complete in itself: each way through it ends in a return, so pieces can be put side by side


@dataclass(frozen=True)
class Answer:
    """What becomes of a call: allowed where `rule` holds (an empty one never does, None always), else refused with `refusal`."""

    rule: Rule | None
    refusal: int = errno.EPERM

    def describe(self) -> str:
        if self.rule is None:
            return "allow"
        refusal = errno.errorcode[self.refusal]
        if not self.rule:
            return refusal
        return f"allow if {' or '.join(' and '.join(c.describe() for c in group) for group in self.rule)}; else {refusal}"


_ALLOW, _REFUSE, _UNKNOWN = Answer(rule=None), Answer(rule=()), Answer(rule=(), refusal=errno.ENOSYS)


@dataclass(frozen=True)
class Program:
    """A compiled filter and the answers it was compiled from, in the order of the numbers."""

    machine: str
    answers: tuple[tuple[str, int, Answer], ...]
    code: bytes

    def describe(self) -> str:
        """One line per system call, as the filter will answer it."""
        lines = [f"{name} ({number}): {answer.describe()}" for name, number, answer in self.answers]
        return "\n".join([f"not {self.machine}: kill", *lines, f"any other number: {_UNKNOWN.describe()}"])


@functools.cache
def compile_filter(
    *, processes: bool, execute: bool = True, system: bool = False, gated: bool = False, machine: str = syscalls.MACHINE
) -> Program:
    """The filter for a guest. Without `processes` it can start threads only; without `execute` it cannot become another program.

    With `system` it permits no more, but refuses kinds of sockets as a kernel without them would: the tools that add users take a refused
    audit socket as a reason to stop, and an absent one as normal. With `gated` there are no files in memory, which no mount keeps from
    being executed. Raises `RuntimeUnavailable` on a machine whose system call numbers are
    not known.
    """
    if machine not in syscall_rules.MACHINES:
        raise RuntimeUnavailable(
            f"cannot filter system calls: their numbers on {machine} are not known",
            missing=("system call filter",),
            hint=f"use a machine of kind {' or '.join(syscall_rules.MACHINES)}",
        )
    numbers = sorted((number, name) for name, number in syscall_rules.numbers(machine).items())
    answers = tuple(
        (name, number, _answer(name, processes=processes, execute=execute, system=system, gated=gated)) for number, name in numbers
    )
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
    """Put every thread of this process under the filter, and what they start. It cannot be taken off. Sets no_new_privs.

    Raises OSError when the kernel refuses it, in which case no thread is under it.
    """
    thread = _set(program.code, syscalls.SECCOMP_FILTER_FLAG_TSYNC)
    if thread:
        raise OSError(errno.EBUSY, f"seccomp: thread {thread} is under a filter of its own")


@functools.cache
def compile_observer(names: tuple[str, ...], *, machine: str = syscalls.MACHINE) -> bytes:
    """A filter beside the other that refuses nothing: these calls are told to a listener before they are made, every other is allowed.

    Of the answers of several filters the kernel takes the strictest, so what the other one refuses is refused, and not told.
    """
    known = syscall_rules.numbers(machine)
    code = [_return(_RET_ALLOW)]
    for name in names:
        if name not in known:
            continue
        tell = [_return(_RET_USER_NOTIF)]
        if name == "sendto":  # without an address it goes where the socket was connected to
            tell = [*_test(Condition(4, rules.WHOLE, (0,), holds=False), failure=1), *tell, _return(_RET_ALLOW)]
        code = [_branch_equal(known[name], if_true=0, if_false=len(tell)), *tell, *code]
    # A call from another architecture is the other filter's, which ends the process.
    code = [_load(_ARCHITECTURE), _branch_equal(_AUDIT_ARCH[machine], if_true=1, if_false=0), _return(_RET_ALLOW), _load(_NUMBER), *code]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def install_observer(code: bytes) -> int:
    """Put this process, of one thread, and what it starts under such a filter. Returns the listener, which is closed on exec.

    From here on each of those calls waits for who holds the listener, and when nobody does it fails. A call that has been heard of is then
    interrupted by what ends the process only, where the kernel can (5.19): a handler of the program's runs after it, as it would have.
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
    held = ctypes.create_string_buffer(code, len(code))
    header = _SockFprog(len(code) // 8, ctypes.addressof(held))
    return syscalls.seccomp(syscalls.SECCOMP_SET_MODE_FILTER, flags, ctypes.addressof(header))


class _SockFprog(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def _answer(name: str, *, processes: bool, execute: bool, system: bool, gated: bool) -> Answer:
    if name in rules.ABSENT or (gated and name in rules.FILES_IN_MEMORY):
        return _UNKNOWN
    if name == "clone" and not processes:
        return Answer(rules.THREADS_ONLY)
    if name == "socket" and system:
        return Answer(rules.CONDITIONAL[name], refusal=errno.EPROTONOSUPPORT)
    if name in rules.CONDITIONAL:
        return Answer(rules.CONDITIONAL[name])
    allowed = name in rules.ALLOWED or (processes and name in rules.STARTS_PROCESSES) or (execute and name in rules.EXECUTES)
    return _ALLOW if allowed else _REFUSE


def _ranges(answers: dict[int, Answer]) -> list[tuple[int, Answer]]:
    """The numbers at which the answer changes, from 0 upwards, with the new answer."""
    ranges: list[tuple[int, Answer]] = []
    for number in range(max(answers) + 2):  # the last one stands for every number beyond
        answer = answers.get(number, _UNKNOWN)
        if not ranges or ranges[-1][1] != answer:
            ranges.append((number, answer))
    return ranges


def _search(ranges: list[tuple[int, Answer]]) -> Code:
    """With the number loaded: find the range it lies in, by halves, and answer."""
    if len(ranges) == 1:
        return _reply(ranges[0][1])
    middle = len(ranges) // 2
    below, above = _search(ranges[:middle]), _search(ranges[middle:])
    pivot = ranges[middle][0]
    if len(below) <= _LONGEST_BRANCH:
        return [_branch_at_least(pivot, if_true=len(below), if_false=0), *below, *above]
    return [_branch_at_least(pivot, if_true=0, if_false=1), _jump(len(below)), *below, *above]


def _reply(answer: Answer) -> Code:
    if answer.rule is None:
        return [_return(_RET_ALLOW)]
    code = [_return(_RET_ERRNO | answer.refusal)]
    for group in reversed(answer.rule):
        code = _unless(group, code)
    return code


def _unless(group: tuple[Condition, ...], otherwise: Code) -> Code:
    """Allow when every condition of the group holds, else go on with `otherwise`."""
    code = [_return(_RET_ALLOW)]
    for condition in reversed(group):
        # `code` and `otherwise` stay side by side, so failing is a jump over what has been laid down so far.
        code = [*_test(condition, failure=len(code)), *code]
    return [*code, *otherwise]


def _test(condition: Condition, *, failure: int) -> Code:
    """Fall through when the condition holds, else jump `failure` instructions further. The upper word counts where the mask reaches it."""
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
