"""The list of attack cases: what each is, how much hangs on it, and, where nothing tries it, why.

One place for it, because a table of what ran is worth nothing without the list of what should have. `P0` must hold before any release,
`P1` before the first stable one, `P2` is documented. Numbers are fixed: documents, tests and people refer to them. A case names the
runtimes that it is about; `host` is our own side, and `process` stands for every runtime of native programs.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal, NamedTuple

Priority = Literal["P0", "P1", "P2"]
# How the reason of a skip begins, if an attack means nothing on a runtime, and if this machine lacks the runtime.
INAPPLICABLE, UNAVAILABLE = "does not apply: ", "not on this machine: "


class Surface(Enum):
    """Where an attack comes in."""

    FILES = "Filesystem"
    KERNEL = "Process and kernel"
    PROMOTION = "Promotion"
    EXHAUSTION = "Resource exhaustion"
    CRASH = "Crash and recovery"
    WASM = "WASM"
    SUPPLY = "Supply chain"
    AUDIT = "Audit"
    POLICY = "Policy and approval"


# The surfaces of which every case is tried, or has a reason why not. Of another one some would be tried, and the rest not listed yet.
COMPLETE = frozenset(Surface)


class Case(NamedTuple):
    """One attack. `untried` is the reason why no test tries it; a case with neither a test nor a reason fails the table. `lacking` is the
    part of a case that is left open, and is in the table beside its tests."""

    number: int
    surface: Surface
    priority: Priority
    runtimes: tuple[str, ...]
    title: str
    untried: str = ""
    lacking: str = ""


_PROCESS, _HOST, _BOTH = ("process",), ("host",), ("process", "host")
_FILES, _KERNEL, _EXHAUSTION = Surface.FILES, Surface.KERNEL, Surface.EXHAUSTION
_CRASH, _SUPPLY, _PROMOTION, _WASM = Surface.CRASH, Surface.SUPPLY, Surface.PROMOTION, Surface.WASM
_AUDIT, _POLICY = Surface.AUDIT, Surface.POLICY
_INSIDE = ("wasm",)

_ALL = (
    Case(1, _FILES, "P0", _PROCESS, "secrets by their names"),
    Case(2, _FILES, "P0", _PROCESS, "secrets and real files through links in the project"),
    Case(4, _FILES, "P0", _BOTH, "a directory that becomes a link while we resolve below it"),
    Case(5, _FILES, "P0", _PROCESS, "the magic links of /proc"),
    Case(7, _FILES, "P0", _PROCESS, "rewriting the program that confines it"),
    Case(10, _FILES, "P0", _BOTH, "making a protected file that is not there yet"),
    Case(11, _FILES, "P0", _PROCESS, "deny rules with odd characters"),
    Case(13, _FILES, "P0", _PROCESS, "undoing the view in a namespace of its own"),
    Case(14, _FILES, "P0", _PROCESS, "a deny inside an allow"),
    Case(16, _FILES, "P0", _PROCESS, "other system calls that open files"),
    Case(17, _FILES, "P1", _PROCESS, "hard links to real files"),
    Case(19, _FILES, "P1", _BOTH, "forged marks of the overlay"),
    Case(20, _FILES, "P1", _PROCESS, "devices, pipes and sockets in the project"),
    Case(22, _FILES, "P1", _PROCESS, "files of another run", lacking="rootless, devices are the machine's: runs can signal through locks"),
    Case(23, _FILES, "P0", _HOST, "our own file tools as a way out"),
    Case(25, _KERNEL, "P0", _PROCESS, "typing into a terminal"),
    Case(26, _KERNEL, "P0", _PROCESS, "tracing and reading other processes"),
    Case(28, _KERNEL, "P0", _PROCESS, "signals, limits and priorities of others"),
    Case(29, _KERNEL, "P0", _PROCESS, "new namespaces of every kind"),
    Case(31, _KERNEL, "P0", _PROCESS, "dangerous system calls"),
    Case(32, _KERNEL, "P0", _PROCESS, "system calls of other architectures"),
    Case(34, _KERNEL, "P0", _PROCESS, "unusual socket families"),
    Case(35, _KERNEL, "P0", _PROCESS, "abstract sockets of the machine"),
    Case(37, _KERNEL, "P0", _PROCESS, "racing whoever mediates a connection"),
    Case(38, _KERNEL, "P1", _BOTH, "descriptors sent to or had from our side"),
    Case(40, _KERNEL, "P0", _BOTH, "a decision that cannot be made in time"),
    Case(41, _KERNEL, "P2", _PROCESS, "programs that no list of programs knows"),
    Case(43, _KERNEL, "P0", _HOST, "fake helpers early in PATH"),
    Case(44, _KERNEL, "P1", _HOST, "a process id used again"),
    Case(46, _KERNEL, "P0", _PROCESS, "setuid programs"),
    Case(47, _KERNEL, "P0", _PROCESS, "capabilities left over"),
    Case(49, _KERNEL, "P1", _PROCESS, "what inspection tools find inside"),
    Case(55, _KERNEL, "P0", _HOST, "tricks inside the interpreter"),
    Case(91, _POLICY, "P0", _HOST, "changing what was shown after somebody looked"),
    Case(92, _POLICY, "P0", _HOST, "an answer used twice, elsewhere, or too late"),
    Case(94, _POLICY, "P0", _BOTH, "looking for tokens, and using one of another run"),
    Case(95, _POLICY, "P0", _BOTH, "answering its own question"),
    Case(97, _POLICY, "P0", _HOST, "escape sequences in what somebody is asked"),
    Case(98, _POLICY, "P0", _HOST, "what cannot be seen, or looks like something else, in what somebody is asked"),
    Case(100, _POLICY, "P0", _HOST, "changes that a diff would not show"),
    Case(101, _POLICY, "P1", _HOST, "a flood of questions"),
    Case(103, _POLICY, "P0", _HOST, "a policy that came with the repository"),
    Case(104, _POLICY, "P0", _HOST, "what runs before anybody has agreed to anything"),
    Case(106, _POLICY, "P0", _HOST, "a description that says something else than what is done"),
    Case(107, _AUDIT, "P0", _HOST, "line ends, quotes, huge fields and bytes that are no text in what is recorded"),
    Case(108, _AUDIT, "P1", _HOST, "escape sequences in what the log shows"),
    Case(110, _AUDIT, "P0", _HOST, "entries edited, reordered, repeated, or of another session"),
    Case(111, _AUDIT, "P0", _HOST, "the whole chain written anew"),
    Case(113, _AUDIT, "P0", _HOST, "the disk refusing while an entry is written"),
    Case(114, _AUDIT, "P1", _HOST, "a flood of entries"),
    Case(116, _AUDIT, "P1", _HOST, "a clock that jumps, several writers, files that are closed"),
    Case(117, _PROMOTION, "P0", _HOST, "change sets with paths that lead out of the tree"),
    Case(118, _PROMOTION, "P0", _HOST, "links that lead out of the tree, alone or in chains"),
    Case(120, _PROMOTION, "P0", _HOST, "changes of type and removals that take real files along"),
    Case(121, _PROMOTION, "P0", _HOST, "devices, pipes and sockets in a change set"),
    Case(123, _PROMOTION, "P0", _HOST, "files of the guest with another name elsewhere"),
    Case(124, _PROMOTION, "P0", _HOST, "files that are run without being asked for"),
    Case(126, _PROMOTION, "P0", _HOST, "names that are .git on another machine"),
    Case(127, _PROMOTION, "P0", _BOTH, "going on to write after the diff was shown"),
    Case(129, _PROMOTION, "P0", _HOST, "the disk refusing in the middle"),
    Case(130, _PROMOTION, "P0", _HOST, "two promotions at once, and one that died"),
    Case(132, _PROMOTION, "P1", _HOST, "change sets of absurd size"),
    Case(133, _PROMOTION, "P0", _HOST, "links and mounts left for whoever clears away"),
    Case(211, _PROMOTION, "P0", _HOST, "git running code that is no file of .git"),
    Case(212, _PROMOTION, "P0", _HOST, "links that give a file a protected name, in either order"),
    Case(213, _PROMOTION, "P0", _HOST, "links that show a hidden secret to others"),
    Case(214, _PROMOTION, "P1", _HOST, "new dependencies, and names that imitate others"),
    Case(215, _PROMOTION, "P1", _HOST, "settings of tools that name code to run"),
    Case(135, _EXHAUSTION, "P0", _PROCESS, "bombs of processes and threads"),
    Case(136, _EXHAUSTION, "P0", _PROCESS, "bombs of memory of every kind"),
    Case(138, _EXHAUSTION, "P0", _PROCESS, "endless output to a slow reader"),
    Case(139, _EXHAUSTION, "P0", _PROCESS, "staying past the deadline"),
    Case(141, _EXHAUSTION, "P1", _PROCESS, "what the kernel counts for each user"),
    Case(301, _EXHAUSTION, "P0", _PROCESS, "socket buffers, which only the whole machine bounds"),
    Case(302, _EXHAUSTION, "P0", _PROCESS, "open files of the whole machine, by descriptors and by mappings"),
    Case(303, _EXHAUSTION, "P0", _PROCESS, "asynchronous requests, filters and huge pages of the whole machine"),
    Case(304, _EXHAUSTION, "P1", _PROCESS, "connections closed with data still to send"),
    Case(142, _EXHAUSTION, "P1", _PROCESS, "orphans and zombies"),
    Case(144, _EXHAUSTION, "P2", _PROCESS, "enormous command lines"),
    Case(145, _CRASH, "P0", _HOST, "a supervisor killed at any moment"),
    Case(146, _CRASH, "P0", _HOST, "a crash at any step of a promotion"),
    Case(148, _CRASH, "P0", _HOST, "the n-th call of ours failing, for every n"),
    Case(149, _CRASH, "P0", _HOST, "our parts killed one by one"),
    Case(151, _CRASH, "P1", _HOST, "stale locks, half-written state, a full disk"),
    Case(152, _CRASH, "P1", _HOST, "very many runs, after and beside each other"),
    Case(154, _CRASH, "P1", _HOST, "an upgrade between runs"),
    Case(155, _WASM, "P0", _INSIDE, "paths and links that lead out of the view"),
    Case(156, _WASM, "P0", _INSIDE, "loops and waits without end"),
    Case(158, _WASM, "P0", _INSIDE, "asking the host for far too much"),
    Case(159, _WASM, "P1", _INSIDE, "an instance used again after a call broke off"),
    Case(161, _WASM, "P1", _INSIDE, "a module that takes for ever to compile"),
    Case(162, _WASM, "P0", _INSIDE, "bridges to native code"),
    Case(164, _WASM, "P1", _INSIDE, "escape sequences in output"),
    Case(165, _WASM, "P1", _INSIDE, "an engine that has been broken out of"),
    Case(166, _SUPPLY, "P0", _PROCESS, "install scripts of packages"),
    Case(167, _SUPPLY, "P1", _PROCESS, "a poisoned cache for the next run"),
    Case(169, _SUPPLY, "P0", _HOST, "engines and helpers with known holes", lacking="no floors of versions for runsc and QEMU"),
    Case(170, _SUPPLY, "P1", _HOST, "a helper swapped on disk", lacking="no digest of our own interpreter is kept"),
    Case(181, _FILES, "P0", _PROCESS, "secrets at any depth of a project, under any name that keys have"),
    Case(182, _FILES, "P0", _PROCESS, "credentials that unknown tools keep in a home"),
    Case(183, _FILES, "P0", _BOTH, "making git track a secret, so that it is shown"),
    Case(184, _FILES, "P0", _HOST, "odd trees for whoever searches them for secrets"),
    Case(172, _SUPPLY, "P1", _HOST, "our own wheel", lacking="no signature, list of parts or hash-pinned tools: unreleased"),
    Case(185, _PROMOTION, "P0", _HOST, "changes swapped between their review and their promotion"),
    Case(186, _PROMOTION, "P0", _HOST, "content that a review shows neither as text nor by its digest"),
    Case(187, _POLICY, "P0", _HOST, "a variable that makes another command of an approved one"),
    Case(340, _KERNEL, "P1", _PROCESS, "the processes around a sandbox that shares their /proc"),
)  # fmt: skip

CASES = {each.number: each for each in _ALL}


def priority(*numbers: int) -> Priority:
    """The highest priority among these cases: a test that tries several counts as much as the gravest of them."""
    ranks: tuple[Priority, ...] = ("P0", "P1", "P2")
    return min((CASES[number].priority for number in numbers), key=ranks.index)
