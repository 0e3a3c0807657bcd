"""Objects, packs and the index, side by side with git itself."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.workspace.git.index import IndexEntry, merge_indexes, read_index, same_entries, write_index
from agent_sandbox.workspace.git.objects import ObjectFiles, as_loose, as_pack, check, hash_name, read_commit, tree_entries
from agent_sandbox.workspace.git.packs import Damaged, Pack, PackIndex, apply_delta, read_loose

IDENTITY = ("-c", "user.name=N", "-c", "user.email=n@example.org", "-c", "init.defaultBranch=main", "-c", "gc.auto=0")


def git(top: Path, *words: str, stdin: bytes = b"") -> bytes:
    return subprocess.run(["git", *IDENTITY, *words], cwd=top, input=stdin, stdout=subprocess.PIPE, check=True).stdout


def repository(top: Path, *options: str) -> Path:
    """A repository whose files were changed a little in each of eight commits, so that a pack of them has deltas."""
    top.mkdir()
    git(top, "init", "-q", *options)
    (top / "src").mkdir()
    for number in range(8):
        (top / "long.txt").write_text("".join(f"line {line} {line * number // 7}\n" for line in range(400)))
        (top / f"src/{number}.py").write_text(f"print({number})\n")
        (top / "run.sh").write_text("#!/bin/sh\n")
        (top / "run.sh").chmod(0o755)
        git(top, "add", "-A")
        git(top, "commit", "-q", "-m", f"commit {number}\n\nbody")
    git(top, "tag", "-a", "-m", "a tag", "v1")
    return top


def all_objects(top: Path) -> dict[str, tuple[str, bytes]]:
    """Every object, as git reads it."""
    names = [line.split()[0] for line in git(top, "cat-file", "--batch-all-objects", "--batch-check").decode().splitlines()]
    kinds = {name: git(top, "cat-file", "-t", name).decode().strip() for name in names}
    return {name: (kinds[name], git(top, "cat-file", kinds[name], name)) for name in names}


@pytest.mark.parametrize("algorithm", ["sha1", "sha256"])
@pytest.mark.parametrize("packed", [False, True], ids=["loose", "packed"])
def test_every_object_is_read_as_git_reads_it(tmp_path: Path, algorithm: str, packed: bool) -> None:
    top = repository(tmp_path / "r", f"--object-format={algorithm}")
    if packed:
        git(top, "gc", "-q", "--aggressive", "--prune=now")
        assert not list((top / ".git/objects").glob("[0-9a-f][0-9a-f]")), "everything is in the pack"
    expected = all_objects(top)
    with ObjectFiles(str(top / ".git/objects"), algorithm) as objects:
        for name, (kind, content) in expected.items():
            assert objects.has(name) and objects.read(name) == (kind, content)
            assert hash_name(kind, content, algorithm) == name
            assert set(check(kind, content, objects.width)) <= expected.keys()
        assert not objects.has("ab" * objects.width) and objects.read("ab" * objects.width) is None
        assert len(objects.packed_names()) == (len(expected) * objects.width if packed else 0)


@pytest.mark.parametrize("algorithm", ["sha1", "sha256"])
def test_git_reads_what_is_written(tmp_path: Path, algorithm: str) -> None:
    expected = all_objects(repository(tmp_path / "r", f"--object-format={algorithm}"))
    for way in ("loose", "packed"):
        other = tmp_path / way
        other.mkdir()
        git(other, "init", "-q", f"--object-format={algorithm}")
        objects = other / ".git/objects"
        if way == "packed":
            name, pack, index = as_pack(((name, *each) for name, each in expected.items()), algorithm)
            (objects / f"pack/pack-{name}.pack").write_bytes(pack)
            (objects / f"pack/pack-{name}.idx").write_bytes(index)
            git(other, "verify-pack", str(objects / f"pack/pack-{name}.idx"))
        for name, each in expected.items() if way == "loose" else ():
            (objects / name[:2]).mkdir(exist_ok=True)
            (objects / name[:2] / name[2:]).write_bytes(as_loose(*each))
        assert all_objects(other) == expected
        git(other, "fsck", "--full", "--strict")


def test_borrowed_objects_count_as_there(tmp_path: Path) -> None:
    top = repository(tmp_path / "r")
    git(tmp_path, "clone", "-q", "--shared", str(top), "copy")
    with ObjectFiles(str(tmp_path / "copy/.git/objects")) as objects:
        assert objects.has(git(top, "rev-parse", "HEAD").decode().strip())


def test_a_commit_is_taken_apart(tmp_path: Path) -> None:
    top = repository(tmp_path / "r")
    commit = read_commit(git(top, "cat-file", "commit", "HEAD"), 20)
    assert commit.tree == git(top, "rev-parse", "HEAD^{tree}").decode().strip()
    assert commit.parents == (git(top, "rev-parse", "HEAD~1").decode().strip(),) and commit.title == "commit 7"
    assert commit.time == int(git(top, "log", "-1", "--format=%ct"))


def entry(mode: bytes, name: bytes, target: str = "ab" * 20) -> bytes:
    return mode + b" " + name + b"\0" + bytes.fromhex(target)


@pytest.mark.parametrize(
    "tree",
    [
        entry(b"100644", b".git"),
        entry(b"40000", b".GIT"),
        entry(b"100644", b"git~1"),
        entry(b"100644", ".g\u200cit".encode()),
        entry(b"100644", b".."),
        entry(b"100644", b"."),
        entry(b"100644", b""),
        entry(b"100644", b"a/b"),
        entry(b"100777", b"a"),
        entry(b"100644", b"b") + entry(b"100644", b"a"),
        entry(b"100644", b"a") + entry(b"100644", b"a"),
        entry(b"100644", b"a")[:-1],
        b"100644 a",
    ],
)
def test_a_tree_that_git_would_not_write_is_refused(tree: bytes) -> None:
    with pytest.raises(Damaged):
        check("tree", tree, 20)
    assert check("tree", entry(b"100644", b"a") + entry(b"40000", b"b"), 20) == ["ab" * 20] * 2, "the control"


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("commit", b"tree " + b"a" * 40 + b"\n\nno people"),
        ("commit", b"parent " + b"a" * 40 + b"\nauthor A <a> 1 +0\ncommitter A <a> 1 +0\n\n"),
        ("commit", b"tree " + b"a" * 39 + b"\nauthor A <a> 1 +0\ncommitter A <a> 1 +0\n\n"),
        ("commit", b"tree " + b"a" * 40 + b"\nauthor A\0 <a> 1 +0\ncommitter A <a> 1 +0\n\n"),
        ("tag", b"object " + b"a" * 40 + b"\ntype nothing\ntag t\n\n"),
        ("tag", b""),
    ],
)
def test_a_malformed_commit_or_tag_is_refused(kind: str, content: bytes) -> None:
    with pytest.raises(Damaged):
        check(kind, content, 20)


@pytest.mark.parametrize("version", ["2", "3", "4"])
def test_an_index_is_read_and_written_as_git_does(tmp_path: Path, version: str) -> None:
    top = repository(tmp_path / "r")
    git(top, "update-index", "--index-version", version)
    if version == "3":
        git(top, "update-index", "--skip-worktree", "run.sh")
    entries = read_index((top / ".git/index").read_bytes())
    listed = git(top, "ls-files", "--stage", "-z").split(b"\0")[:-1]
    assert [f"{each.mode:o} {each.name} {each.stage}\t{path}".encode() for path, (each,) in sorted(entries.items())] == listed
    (top / ".git/index").write_bytes(write_index(entries))
    assert git(top, "ls-files", "--stage", "-z").split(b"\0")[:-1] == listed and git(top, "status", "-s") == b""
    assert git(top, "ls-files", "-v", "run.sh").startswith(b"S" if version == "3" else b"H")


def test_an_index_without_facts_about_files_is_clean(tmp_path: Path) -> None:
    top = repository(tmp_path / "r")
    bare = {path: (IndexEntry(each.mode, each.name, 0),) for path, (each,) in read_index((top / ".git/index").read_bytes()).items()}
    (top / ".git/index").write_bytes(write_index(bare))
    assert git(top, "status", "-s") == b""
    (top / "long.txt").write_text("other\n")
    assert git(top, "status", "-s") == b" M long.txt\n", "the control"


def test_a_refreshed_index_has_the_same_entries(tmp_path: Path) -> None:
    top = repository(tmp_path / "r")
    before = (top / ".git/index").read_bytes()
    os.utime(top / "long.txt", (1, 1))
    git(top, "status")
    after = (top / ".git/index").read_bytes()
    assert before != after and same_entries(read_index(before), read_index(after))


def one(name: str, **fields: int) -> tuple[IndexEntry, ...]:
    return (IndexEntry(0o100644, name * 20, 0, **fields),)  # type: ignore[arg-type]


def test_indexes_are_merged_by_path() -> None:
    base = {"same": one("aa"), "ours": one("aa"), "theirs": one("aa"), "both": one("aa"), "gone": one("aa"), ".env": one("aa")}
    ours = {"same": one("aa"), "ours": one("bb"), "theirs": one("aa"), "both": one("bb"), "new": one("bb"), ".env/x": one("bb")}
    theirs = {"same": one("aa"), "ours": one("aa"), "theirs": one("cc"), "both": one("cc"), "gone": one("aa"), ".env": one("aa")}
    merged, both = merge_indexes(base, ours, theirs, frozenset({".env"}))
    assert both == ["both"]
    expected = {"same": "aa", "ours": "bb", "theirs": "cc", "both": "bb", "new": "bb", ".env": "aa"}
    assert {path: each[0].name[:2] for path, each in merged.items()} == expected


def test_a_guest_cannot_hide_a_file_from_git() -> None:
    ours = {"a": (IndexEntry(0o100644, "bb" * 20, 0, assumed=True, flags=0x4000),)}
    merged, _ = merge_indexes({"a": one("aa")}, ours, {"a": one("aa")}, frozenset())
    assert merged["a"][0].flags == 0 and not merged["a"][0].assumed


@pytest.mark.parametrize("path", ["../a", ".git/config", "a/.GIT/x", "/a", "a//b", "", "a/."])
def test_an_index_with_a_path_that_leads_elsewhere_is_refused(path: str) -> None:
    with pytest.raises(Damaged):
        read_index(write_index({path: one("aa")}))
    assert read_index(write_index({"a/b": one("aa")})), "the control"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes, bytes, bytes]:
    """A pack, its index, an object by itself, and the index of a repository."""
    top = repository(tmp_path_factory.mktemp("files") / "r")
    loose = next((top / ".git/objects").glob("[0-9a-f][0-9a-f]/*")).read_bytes()
    git(top, "gc", "-q", "--prune=now")
    (pack,) = (top / ".git/objects/pack").glob("*.pack")
    return pack.read_bytes(), pack.with_suffix(".idx").read_bytes(), loose, (top / ".git/index").read_bytes()


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_whatever_is_damaged_is_refused_and_nothing_else_happens(files: tuple[bytes, bytes, bytes, bytes], data: st.DataObject) -> None:
    pack, index, loose, staged = (bytearray(each) for each in files)
    for _ in range(data.draw(st.integers(1, 4))):
        victim = (pack, index, loose, staged)[data.draw(st.integers(0, 3))]
        at = data.draw(st.integers(0, len(victim) - 1))
        if data.draw(st.booleans()):
            victim[at] = data.draw(st.integers(0, 255))
        else:
            del victim[at : at + data.draw(st.integers(1, 64))]
    names = [files[1][1032 + 20 * at : 1052 + 20 * at] for at in range(20)]
    for deed in (
        lambda: read_loose(bytes(loose)),
        lambda: read_index(bytes(staged)),
        lambda: [Pack(memoryview(pack), PackIndex(memoryview(index), 20), 20).read(name) for name in names],
    ):
        with suppress(Damaged):
            deed()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=80), st.binary(max_size=40))
def test_any_delta_is_applied_or_refused(base: bytes, delta: bytes) -> None:
    with suppress(Damaged):
        apply_delta(base, bytes([len(base)]) + delta)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=120))
def test_any_tree_is_read_or_refused(content: bytes) -> None:
    with suppress(Damaged):
        list(tree_entries(content, 20))
