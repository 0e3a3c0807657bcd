"""The files of HEAD are read from git's objects as git reads them, and never from an index."""

from __future__ import annotations

import os
import subprocess
import zlib
from pathlib import Path

import pytest

from agent_sandbox.workspace.git.tracked import UnknownHead, blob_id, head_of, tracked_blobs


def git(top: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main", "-c", "protocol.file.allow=always"]
    return subprocess.run(["git", "-C", str(top), *identity, *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """A repository with three commits, of trees large enough to become deltas."""
    top = tmp_path / "repository"
    (top / "sub/deep").mkdir(parents=True)
    git(top, "init", "-q")
    for commit in range(3):
        for number in range(60):
            (top / f"sub/file{number}.txt").write_text(f"{number} {commit if number == commit else 0}\n" * 20)
        (top / "sub/deep/.env").write_text(f"A={commit}\n")
        git(top, "add", "-A")
        git(top, "commit", "-qm", str(commit))
    return top


def listed(top: Path, commit: str = "HEAD") -> dict[str, str]:
    rows = (line.split("\t") for line in git(top, "ls-tree", "-r", commit).splitlines())
    return {name: facts.split()[2] for facts, name in rows if not facts.startswith("120000")}


def agrees(top: Path) -> bool:
    names = [*listed(top), "sub", "sub/deep", "missing", "sub/missing/x", "sub/file1.txt/x"]
    return tracked_blobs(str(top), names) == listed(top) != {} and head_of(str(top)) == git(top, "rev-parse", "HEAD").strip()


def test_loose_objects(top: Path) -> None:
    assert agrees(top)
    assert blob_id((top / "sub/deep/.env").read_bytes()) == listed(top)["sub/deep/.env"]


def test_packs_with_deltas_and_packed_refs(top: Path) -> None:
    git(top, "gc", "-q", "--aggressive", "--prune=now")
    assert not (top / ".git/refs/heads/main").exists() and list((top / ".git/objects/pack").glob("*.pack"))
    kinds = git(top, "verify-pack", "-v", str(next((top / ".git/objects/pack").glob("*.idx"))))
    assert "chain length" in kinds, "there are deltas"
    assert agrees(top)


def test_deltas_that_name_their_base(top: Path) -> None:
    git(top, "-c", "repack.useDeltaBaseOffset=false", "repack", "-adfq", "--depth=50")
    assert agrees(top)


def test_a_detached_head_and_another_commit(top: Path) -> None:
    git(top, "checkout", "-q", "HEAD~2")
    assert agrees(top)


def test_a_linked_worktree_and_a_borrowed_object_store(top: Path, tmp_path: Path) -> None:
    git(top, "worktree", "add", "-q", str(tmp_path / "linked"), "HEAD~1")
    assert agrees(tmp_path / "linked")
    git(tmp_path, "clone", "-q", "--shared", str(top), str(tmp_path / "clone"))
    assert agrees(tmp_path / "clone")


def test_a_submodule(top: Path, tmp_path: Path) -> None:
    outer = tmp_path / "outer"
    outer.mkdir()
    git(outer, "init", "-q")
    git(outer, "submodule", "add", "-q", str(top), "inner")
    git(outer, "commit", "-qm", "x")
    assert agrees(outer / "inner")
    assert tracked_blobs(str(outer), ["inner", "inner/sub/deep/.env"]) == {}


def test_a_project_below_the_top_of_its_repository(top: Path) -> None:
    assert tracked_blobs(str(top / "sub"), ["deep/.env", "sub/deep/.env"]) == {"deep/.env": listed(top)["sub/deep/.env"]}


def test_links_are_no_files_and_odd_names_are_names(top: Path) -> None:
    (top / "link").symlink_to("/etc/passwd")
    odd = os.fsdecode(b"n\new \xff.env")
    (top / odd).write_text("x")
    git(top, "add", "-A")
    git(top, "commit", "-qm", "odd")
    assert tracked_blobs(str(top), ["link", odd]) == {odd: blob_id(b"x")}


def test_without_a_repository_or_a_commit_nothing_is_tracked(tmp_path: Path) -> None:
    assert (tracked_blobs(str(tmp_path), ["a"]), head_of(str(tmp_path))) == ({}, "")
    git(tmp_path, "init", "-q")
    assert (tracked_blobs(str(tmp_path), ["a"]), head_of(str(tmp_path))) == ({}, "")


def test_what_the_index_says_does_not_count(top: Path) -> None:
    (top / "added").write_text("x")
    git(top, "add", "added")
    git(top, "rm", "-q", "--cached", "sub/deep/.env")
    assert list(tracked_blobs(str(top), ["added", "sub/deep/.env"])) == ["sub/deep/.env"]


def _no_head(top: Path) -> None:
    (top / ".git/HEAD").unlink()
    os.mkfifo(top / ".git/HEAD")


def _damaged_tree(top: Path) -> None:
    tree = git(top, "rev-parse", "HEAD^{tree}").strip()
    place = top / ".git/objects" / tree[:2] / tree[2:]
    place.chmod(0o600)
    place.write_bytes(zlib.compress(b"tree 30\0" + b"100644 name-without-an-end-and-id"))


def _bomb(top: Path) -> None:
    tree = git(top, "rev-parse", "HEAD^{tree}").strip()
    place = top / ".git/objects" / tree[:2] / tree[2:]
    place.chmod(0o600)
    place.write_bytes(zlib.compress(b"tree 1\0" + bytes(40 << 20)))


def _gone(top: Path) -> None:
    commit = git(top, "rev-parse", "HEAD").strip()
    (top / ".git/objects" / commit[:2] / commit[2:]).unlink()


def _cut_pack(top: Path) -> None:
    git(top, "gc", "-q", "--prune=now")
    pack = next((top / ".git/objects/pack").glob("*.pack"))
    pack.chmod(0o600)
    os.truncate(pack, 40)


@pytest.mark.parametrize(
    "harm",
    [
        lambda top: (top / ".git/HEAD").write_text("ref: refs/heads/.invalid\n"),
        lambda top: (top / ".git/HEAD").write_text("ref: ../../outside\n"),
        lambda top: (top / ".git/HEAD").write_text("a" * 64 + "\n"),
        lambda top: (top / ".git/HEAD").write_text("0" * 40 + "\n"),
        *(_damaged_tree, _bomb, _gone, _cut_pack),
    ],
)
def test_what_cannot_be_read_is_unknown(top: Path, harm: object) -> None:
    harm(top)  # type: ignore[operator]
    with pytest.raises(UnknownHead):
        tracked_blobs(str(top), ["sub/deep/.env"])


def test_a_pipe_in_place_of_head_is_not_waited_for(top: Path) -> None:
    _no_head(top)
    assert head_of(str(top)) == ""


def test_objects_of_another_hash_are_unknown(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "--object-format=sha256")
    (tmp_path / "a").write_text("a")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-qm", "a")
    with pytest.raises(UnknownHead):
        tracked_blobs(str(tmp_path), ["a"])
