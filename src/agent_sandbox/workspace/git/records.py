"""The meaning of a promoted file of a repository, for an undo: what git may rewrite without changing it.

`git status` writes the index anew, `git gc` moves references into `packed-refs` and shortens logs. None of these changes what was promoted,
so none of them prevents an undo. A meaning is a tuple of texts that is kept in the journal of a promotion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agent_sandbox._fast.encoding import sha256
from agent_sandbox.workspace.git.index import Entries, read_index
from agent_sandbox.workspace.git.packs import Damaged

INDEX, REFERENCE, PACKED, LOG = "index", "reference", "packed", "log"
Meaning = Sequence[str]


def of_index(entries: Entries, algorithm: str) -> Meaning:
    """Return a digest of the entries of an index, as the meaning of the file."""
    digest = sha256()
    for path in sorted(entries):
        digest.update(f"{(path, [each.meaning for each in entries[path]])!r}\n".encode("utf-8", "surrogatepass"))
    return INDEX, algorithm, digest.hexdigest()


def of_reference(name: str, packed: str, old: str | None, new: str | None) -> Meaning:
    """Return the name of a reference, its old and its new value, as the meaning of its file. `packed` is the path of `packed-refs`."""
    return REFERENCE, name, packed, old or "", new or ""


def means_the_same(meaning: Meaning, content: bytes) -> bool:
    """Return whether an index still has the meaning that was promoted."""
    if meaning[0] != INDEX:
        return False
    try:
        return list(of_index(read_index(content, meaning[1]), meaning[1])) == list(meaning)
    except Damaged:
        return False


def relative_meanings(meanings: Mapping[str, Meaning], root: str) -> dict[str, Meaning]:
    """Return the meanings with all paths relative to a root."""
    start = len(root.rstrip("/")) + 1
    return {
        path[start:]: tuple(each[start:] if kind[0] == REFERENCE and at == 2 else each for at, each in enumerate(kind))
        for path, kind in meanings.items()
    }
