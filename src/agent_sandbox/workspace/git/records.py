"""The meanings of promoted git files. The meaning of a file stays the same when git only rewrites the file.

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
    """Return the meaning of an index file: a digest of its entries."""
    digest = sha256()
    for path in sorted(entries):
        digest.update(f"{(path, [each.meaning for each in entries[path]])!r}\n".encode("utf-8", "surrogatepass"))
    return INDEX, algorithm, digest.hexdigest()


def of_reference(name: str, packed: str, old: str | None, new: str | None) -> Meaning:
    """Return the meaning of a file that holds a reference: the name of the reference, its old value and its new value.

    `packed` is the path of `packed-refs`, where git may move the reference.
    """
    return REFERENCE, name, packed, old or "", new or ""


def means_the_same(meaning: Meaning, content: bytes) -> bool:
    """Return whether `content` is a git index whose entries have this digest. False if `meaning` is of another kind of file."""
    if meaning[0] != INDEX:
        return False
    try:
        return list(of_index(read_index(content, meaning[1]), meaning[1])) == list(meaning)
    except Damaged:
        return False


def relative_meanings(meanings: Mapping[str, Meaning], root: str) -> dict[str, Meaning]:
    """Return the meanings with all paths relative to `root`."""
    start = len(root.rstrip("/")) + 1
    return {
        path[start:]: tuple(each[start:] if kind[0] == REFERENCE and at == 2 else each for at, each in enumerate(kind))
        for path, kind in meanings.items()
    }
