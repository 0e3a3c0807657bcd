"""Learn a policy: propose the smallest one that would have allowed everything that these runs did.

The proposal itself is pure (`policy.learn`). This module finds the facts for it, after the runs and outside the sandbox: the types of the
paths on the machine, and the programs that a list of names leads to. No file that a guest created is opened.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Sequence

from agent_sandbox._fast.values import dataclass, replace
from agent_sandbox.engine import plan_launch
from agent_sandbox.engine.work import Command, Outcome, Work
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.learn import FILE_KINDS, NAMED, Nature, Programs, RunContext, Spent, learn
from agent_sandbox.policy.model import Policy, ProgramRules
from agent_sandbox.policy.paths import contains
from agent_sandbox.policy.programs import LINE_SHELLS, reads_a_line
from agent_sandbox.policy.proposal import Asked, Proposal, name_pattern
from agent_sandbox.readers.shell.analyze import understand, understand_argv
from agent_sandbox.runtime.base import ExitReason
from agent_sandbox.runtime.observe import EXECUTE, WRITE, Observed
from agent_sandbox.workspace.changes import Change, Kind, is_noise
from agent_sandbox.workspace.nodes import EntryType
from agent_sandbox.workspace.view.executables import Executables, find_executables
from agent_sandbox.workspace.view.plan import PRIVATE

_READ_AND_NOT_MISSED = ("/etc/locale.alias",)  # read by every program with a locale, through a link below /usr
_OF_A_PROCESS = ("/proc", "/dev")  # here the same link leads each process to another target
_MOST_NAMES = 200  # programs in a list; for a run that starts more, no list is proposed


@dataclass(frozen=True)
class ObservedRun:
    """A piece of work and the outcome of its observed run."""

    work: Work
    outcome: Outcome


def propose(runs: Sequence[ObservedRun], policy: Policy, *, project: str, home: str, named: bool = False) -> Proposal:
    """Propose the smallest policy that allows everything that the runs did. `policy` is the one they ran under; it bounds the proposal.

    With `named`, files named in a command count as read, because observation does not see a program that only checks that a file exists.
    """
    given = _given()
    changes = [change for ran in runs for change in ran.outcome.changes if not (_in(given, change.path, project) and is_noise(change.path))]
    seen = [each for ran in runs for each in (*ran.outcome.observed, *(_named_files(ran.work, home) if named else ()))]
    behind = _behind_links(seen, {change.path for change in changes})
    leads = {path: real for path, (real, _) in behind.items() if _comes_with(path, real, seen)}
    seen += [each for _, observed in behind.values() for each in observed]
    natures = _natures(seen, changes)
    starts = tuple(dict.fromkeys(ran.work.cwd for ran in runs if ran.work.cwd is not None))
    place = RunContext(project, home, starts, given, policy.files, policy.limits)
    created = {path for path, nature in natures.items() if nature is Nature.MADE}
    made, untold = [each for ran in runs for each in ran.outcome.requests], sum(ran.outcome.untold for ran in runs)
    return learn(seen, natures, place, _programs(runs, project, created), _spent(runs), leads, made, untold)


def difference(first: Outcome, again: Outcome) -> str:
    """Describe how two observed runs of the same work differ; empty if they do not. Contents are not compared: they may hold the time.

    A file that the first run could use and the second could not is a difference, even if both ended the same way.
    """
    if (first.exit.code, first.exit.reason) != (again.exit.code, again.exit.reason):
        return f"it ended with {_end(again)} instead of {_end(first)}"
    had = {replace(each, times=1) for each in first.observed if _nature(each.target) is not Nature.MISSING}
    for kind in Kind:
        before, after = (_files_of(outcome, kind) for outcome in (first, again))
        if len(before) != len(after):
            missing = sorted(before - after)
            return f"{len(after)} files were {kind.value} instead of {len(before)}" + (f"; not {missing[0]}" if missing else "")
    refused = [each for each in again.observed if each.kind in ("read", "write") and not each.allowed]
    return next((f"it may not {each.kind} {each.target}" for each in refused if replace(each, allowed=True, times=1) in had), "")


def _end(outcome: Outcome) -> str:
    return str(outcome.exit.code) if outcome.exit.reason is ExitReason.EXITED else f"{outcome.exit.code} ({outcome.exit.reason.value})"


def _files_of(outcome: Outcome, kind: Kind) -> set[str]:
    """Return the paths of files, not directories, with this kind of change.

    Directories do not count: git makes one for an object only if the object's digest needs it.
    """
    nodes = ((change, change.after or change.before) for change in outcome.changes if change.kind is kind and not is_noise(change.path))
    return {change.path for change, node in nodes if node is None or node.type is not EntryType.DIRECTORY}


def _given() -> tuple[str, ...]:
    """Return the paths that every command can read, whatever the file rules say."""
    needs = plan_launch.tools()
    linked, made = (path for path, _ in needs.links), (path for path, _ in needs.contents)
    return (*PRIVATE, *needs.trees, *needs.tools, *needs.files, *linked, *made, *_READ_AND_NOT_MISSED)


def _in(trees: Iterable[str], path: str, project: str) -> bool:
    return not contains(project, path) and any(contains(tree, path) for tree in trees)


def _named_files(work: Work, home: str) -> list[Observed]:
    """Return an observed read for each word of a command that names an existing file."""
    if not isinstance(work.what, Command):
        return []
    argv = work.what.argv
    words: Iterable[str] = argv[1:]
    if reads_a_line(argv):
        from shlex import shlex  # and with it regular expressions

        try:
            words = list(shlex(argv[2], posix=True, punctuation_chars=True))
        except ValueError:  # a quotation mark that is not closed: a here-document, or a comment
            return []
    places = (word.replace("~", home, 1) if word.startswith("~/") else word for word in words if "\0" not in word)
    paths = (os.path.normpath(os.path.join(work.cwd or "/", place)) for place in places)
    return [Observed("read", path, NAMED, allowed=True) for path in paths if os.path.lexists(path)]


def _behind_links(observed: Iterable[Observed], changed: Collection[str]) -> dict[str, tuple[str, list[Observed]]]:
    """Return the observed paths with a link in them. Each is mapped to a pair: its real path, and the same attempts on the real path.

    Changes of a link itself do not follow it. Paths below /proc and /dev are skipped: the guest's /proc/self is not this process's.
    """
    targets: dict[str, tuple[str, list[Observed]]] = {}
    for each in observed:
        followed = each.kind in FILE_KINDS and not (each.kind == WRITE and each.target in changed)
        if followed and not any(contains(place, each.target) for place in _OF_A_PROCESS):
            real = os.path.realpath(each.target)
            if real != each.target:
                targets.setdefault(each.target, (real, []))[1].append(replace(each, target=real))
    return targets


def _comes_with(path: str, real: str, seen: Iterable[Observed]) -> bool:
    """Return whether a view that shows only the link `path` also shows enough of the link's target, `real`."""
    return (os.path.islink(path) and os.path.isfile(real)) or all(each.target != real for each in seen)


def _natures(seen: Iterable[Observed], changes: Iterable[Change]) -> dict[str, Nature]:
    paths = {each.target for each in seen if each.kind in FILE_KINDS}
    natures = {path: _nature(path) for path in (*paths, *map(os.path.dirname, paths))}
    return natures | {change.path: _nature_of(change) for change in changes}


def _nature(path: str) -> Nature:
    try:
        mode = os.lstat(path).st_mode
    except (OSError, ValueError):
        return Nature.MISSING
    return Nature.DIRECTORY if stat.S_ISDIR(mode) else Nature.FILE


def _nature_of(change: Change) -> Nature:
    if change.kind in (Kind.ADDED, Kind.DELETED, Kind.RETYPED) or change.after is None:
        return Nature.MADE
    return Nature.DIRECTORY if change.after.type is EntryType.DIRECTORY else Nature.FILE


def _spent(runs: Sequence[ObservedRun]) -> Spent:
    used = [ran.outcome.exit.usage for ran in runs]
    return Spent(
        max((each.wall_seconds for each in used), default=0.0),
        max((each.cpu_seconds for each in used), default=0.0),
        max((each.peak_memory_bytes for each in used), default=0),
        max((each.peak_processes for each in used), default=0),
        max((sum(change.after.size for change in ran.outcome.changes if change.after) for ran in runs), default=0),
    )


def _programs(runs: Sequence[ObservedRun], project: str, created: Collection[str]) -> Programs:
    """Return the fewest program names that cover every started program and every program named in the commands."""
    lines = all(isinstance(ran.work.what, Command) and reads_a_line(ran.work.what.argv) for ran in runs)
    search_path = next((ran.work.env.get("PATH", os.defpath) for ran in runs), os.defpath)
    started = {each.target: each.program for ran in runs for each in ran.outcome.observed if each.kind == EXECUTE and each.allowed}
    started = {path: by for path, by in started.items() if os.access(path, os.X_OK) or path in created}
    named = {name.rpartition("/")[2] for ran in runs for name in _named(ran.work)}
    reasons: dict[str, str] = {}
    for path, by in started.items():
        reasons.setdefault(os.path.basename(path), f"started by {os.path.basename(by) or by}")
    for name in named:
        reasons.setdefault(name, "named on the command line, and not started")
    if len(reasons) > _MOST_NAMES:
        return Programs(unnameable=f"{len(reasons)} programs were started")
    names = [name for name in reasons if not (lines and name in LINE_SHELLS)]
    if strange := [name for name in names if name_pattern(name) is None]:
        return Programs(unnameable=f"the name of the program {strange[0]!r} cannot be written")

    def found(wanted: Sequence[str]) -> Executables:
        return find_executables(
            ProgramRules((tuple(_pattern(name) for name in wanted),), lines=lines), search_path=search_path, project=project
        )

    try:
        there = found(names)
        if beyond := _not_among(there, started):
            return Programs(unnameable=f"{beyond[0]} was executed, and a list of names does not lead to it")
        for name in [name for name in names if name not in named]:
            fewer = [each for each in names if each != name]
            if not _not_among(found(fewer), started):  # another name brings this program with it, as a compiler brings the assembler
                names, there = fewer, found(fewer)
    except PolicyError as error:
        return Programs(unnameable=error.message)
    return Programs(tuple(Asked(_pattern(name), reasons[name]) for name in sorted(names)), notes=there.notes)


def _pattern(name: str) -> str:
    pattern = name_pattern(name)
    assert pattern is not None
    return pattern


def _named(work: Work) -> tuple[str, ...]:
    """Return the programs that the gate finds in the text of a command."""
    if not isinstance(work.what, Command):
        return ()
    argv = work.what.argv
    return understand(argv[2], effects=False).tools if reads_a_line(argv) else understand_argv(argv, effects=False).tools or argv[:1]


def _not_among(there: Executables, started: Iterable[str]) -> list[str]:
    """Return the started programs that the list `there` does not cover.

    In a PATH directory that shows only listed files, the name under which a program was started must be listed, too.
    """
    links = {path for path, _ in there.links}
    missing = []
    for path in started:
        real = os.path.realpath(path)
        own = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        hidden = os.path.dirname(own) in there.directories
        if real not in there.programs or (hidden and own != real and own not in links):
            missing.append(path)
    return missing
