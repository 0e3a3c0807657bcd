"""Describe changes of a git repository in sentences, from file names and from the log of HEAD.

git itself is not run: it would execute what the guest's configuration names. Lines of the log are the guest's, and are shown escaped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from agent_sandbox.workspace.changes import Change, ChangeSet, Contents, Kind
from agent_sandbox.workspace.diff.compare import MachineFiles
from agent_sandbox.workspace.nodes import EntryType

OBJECTS = "objects"
_MOST = 64 << 10  # of the end of a log
_MOST_LINES = 20
_LONGEST = 200


def inside(path: str, project: str) -> str:
    """Return a path relative to the project's `.git`; empty for a path elsewhere."""
    top = project.rstrip("/") + "/.git/"
    return path.removeprefix(top) if path.startswith(top) else ""


def words(changes: ChangeSet, everything: ChangeSet, contents: Contents, project: str) -> Iterator[str]:
    """Yield a sentence for each move of HEAD, and for each branch and tag that appears, moves or goes away.

    `changes` are those of the command. `everything` also has the changes that the sandbox held before the command.
    """
    by_name = {name: change for change in changes if (name := inside(change.path, project))}
    branch = _branch(next((each for each in everything if inside(each.path, project) == "HEAD"), None), contents, project)
    steps = list(_steps(by_name["logs/HEAD"], contents)) if "logs/HEAD" in by_name else []
    for old, new, said in steps:
        yield f"git: {_deed(said)}{f' on {branch}' if branch else ''} ({old[:7] if old.strip('0') else 'nothing'} to {new[:7]}): {said}"
    for name, change in by_name.items():
        if name.startswith("refs/") and change.after is None and not change.inside:
            yield f"git: {name.removeprefix('refs/')} would go away"
        elif name.startswith(("refs/tags/", "refs/remotes/")) and change.after is not None and change.after.type is EntryType.FILE:
            yield f"git: {name.removeprefix('refs/')} would {'appear' if change.before is None else 'move'}"
        elif name.startswith("refs/heads/") and not steps and change.after is not None and change.after.type is EntryType.FILE:
            yield f"git: the branch {name.removeprefix('refs/heads/')} would {'appear' if change.before is None else 'move'}"


def _deed(said: str) -> str:
    what = said.partition(":")[0]
    known = {"commit": "would make a commit", "commit (initial)": "would make the first commit", "commit (amend)": "would amend a commit"}
    return known.get(what, "HEAD would move")


def _steps(change: Change, contents: Contents) -> Iterator[tuple[str, str, str]]:
    """Yield the entries added to the log of HEAD: the old commit, the new commit, and the message."""
    if change.after is None or change.after.type is not EntryType.FILE:
        return
    start = change.before.size if change.before is not None and change.before.size <= change.after.size else 0
    start = max(start, change.after.size - _MOST)
    for line in _read(change, contents, start).split(b"\n")[-_MOST_LINES - 1 : -1]:
        head, _, said = line.decode(errors="surrogateescape").partition("\t")
        old, new = [*head.split(" "), "", ""][:2]
        if all(len(each) in (40, 64) and not each.strip("0123456789abcdef") for each in (old, new)):
            yield old, new, said[:_LONGEST]


def _branch(head: Change | None, contents: Contents, project: str) -> str:
    """Return the branch that HEAD is on after the command; empty if unknown. `head` is the change of HEAD, if it changed."""
    real = Change(os.path.join(project, ".git/HEAD"), Kind.MODIFIED, None, None)
    try:
        fd = MachineFiles().open_old(real) if head is None else contents.open_file(head)
    except OSError:
        return ""
    with open(fd, "rb") as file:
        text = file.read(_LONGEST)
    name = text.decode(errors="surrogateescape").strip().removeprefix("ref: refs/heads/")
    return name[:_LONGEST] if name and not name.startswith("ref: ") and name.strip("0123456789abcdef") else ""


def _read(change: Change, contents: Contents, start: int) -> bytes:
    try:
        fd = contents.open_file(change)
    except OSError:
        return b""
    try:
        return os.pread(fd, _MOST, start)
    finally:
        os.close(fd)
