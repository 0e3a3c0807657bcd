"""Images that were made to do harm: what they name outside stays as it is, and what they claim is checked before it is believed."""

from __future__ import annotations

import os
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.engine.images.make import make_image
from agent_sandbox.errors import WorkspaceError
from agent_sandbox.runtime.container.images import ContainerImage, ImageStore
from tests.images import archive, entry

MACHINE = os.uname().machine


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(str(tmp_path / "images"))


def made(store: ImageStore, path: str, most_bytes: int = 64 << 20) -> ContainerImage:
    return make_image(store, path, source="a test", most_bytes=most_bytes)


@pytest.mark.parametrize("name", [".wh.", ".wh..", ".wh...", "a/.wh...", "a/b/.wh...", "a/.wh.."])
def test_a_deletion_of_what_is_above_removes_nothing(store: ImageStore, tmp_path: Path, name: str) -> None:
    lower = [entry("a/b/kept", "1"), entry("kept", "2"), entry("a/gone", "3")]
    image = made(store, archive(tmp_path, lower, [entry(name), entry("a/.wh.gone")]))
    root = Path(image.root)
    assert (root / "a/b/kept").read_text() == "1" and (root / "kept").read_text() == "2"
    assert not (root / "a/gone").exists(), "the control arm: a deletion inside is carried out"
    assert image.left_out == ("1 names that leave the image",)


def test_an_opaque_mark_behind_a_link_empties_a_directory_of_the_image_only(store: ImageStore, tmp_path: Path) -> None:
    canary = tmp_path / "outside" / "canary"
    canary.parent.mkdir()
    canary.write_text("untouched")
    lower = [
        entry("link", type=tarfile.SYMTYPE, linkname=str(canary.parent)),
        entry("d/x", "1"),
        entry("to", type=tarfile.SYMTYPE, linkname="d"),
    ]
    image = made(store, archive(tmp_path, lower, [entry("link/.wh..wh..opq"), entry("link/.wh.canary"), entry("to/.wh..wh..opq")]))
    assert canary.read_text() == "untouched"
    assert os.listdir(Path(image.root, "d")) == [], "the control arm: where the link leads inside, the mark counts"


def test_a_deletion_removes_what_lies_below_and_nothing_that_its_own_layer_brings(store: ImageStore, tmp_path: Path) -> None:
    lower = [entry("etc/old", "1"), entry("etc/.cfg", "1"), entry("d/old", "1"), entry("f", "1"), entry("gone", "1")]
    deletions = [entry("etc/.wh..wh..opq"), entry(".wh.d"), entry(".wh.f"), entry(".wh.gone")]
    brought = [entry("etc/.cfg", "2"), entry("etc/sub/new", "2"), entry("d/new", "2"), entry("f", "2")]
    for order in ([*brought, *deletions], [*deletions, *brought]):  # sorted by name, .cfg comes before .wh..wh..opq
        root = Path(made(store, archive(tmp_path, lower, order)).root)
        files = {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}
        assert files == {"etc/.cfg": "2", "etc/sub/new": "2", "d/new": "2", "f": "2"}


def test_a_file_that_is_a_link_to_itself_is_kept(store: ImageStore, tmp_path: Path) -> None:
    twice = [entry("d/a", "1"), entry("d/a", type=tarfile.LNKTYPE, linkname="./d/a")]  # as tar writes a file that it is given twice
    assert Path(made(store, archive(tmp_path, twice)).root, "d/a").read_text() == "1"


def test_of_entries_with_one_name_the_last_counts_and_none_is_a_way_out(store: ImageStore, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.write_text("untouched")
    entries = [
        entry("d", type=tarfile.DIRTYPE, mode=0o755),
        entry("d/file", "1"),
        entry("d", type=tarfile.SYMTYPE, linkname=str(tmp_path)),
        entry("d/canary", "2"),
        entry("f", "3"),
        entry("f", type=tarfile.DIRTYPE, mode=0o755),
        entry("f/x", "4"),
        entry("f", "5"),
        entry("h", type=tarfile.LNKTYPE, linkname="h"),
        entry("r", "6"),
        entry("r/x", "7"),
    ]
    image = made(store, archive(tmp_path, entries))
    root = Path(image.root)
    assert canary.read_text() == "untouched" and canary.stat().st_nlink == 1
    assert (root / "d").is_symlink() and (root / str(tmp_path)[1:] / "canary").read_text() == "2"
    assert (root / "f").read_text() == "5" and (root / "r/x").read_text() == "7" and not (root / "h").exists()


def test_hard_links_lead_only_to_files_of_the_image(store: ImageStore, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.write_text("untouched")
    links = ("/etc/passwd", "../../../../etc/passwd", str(canary), "..", ".", "", "/archive.tar", "/proc/1/root/etc/passwd", "up/../a")
    entries = [entry("a", "1"), entry("up", type=tarfile.SYMTYPE, linkname="../../..")]
    entries += [entry(f"link{number}", type=tarfile.LNKTYPE, linkname=target) for number, target in enumerate(links)]
    image = made(store, archive(tmp_path, entries))
    root = Path(image.root)
    assert sorted(path.name for path in root.glob("link*")) == [f"link{len(links) - 1}"], "only the last leads to a file of the image"
    assert (root / f"link{len(links) - 1}").read_text() == "1" and canary.stat().st_nlink == 1


@pytest.mark.parametrize(
    "config",
    [
        {"architecture": MACHINE, "config": {"Env": 5}},
        {"architecture": MACHINE, "config": {"Env": {"A": "B"}}},
        {"architecture": MACHINE, "config": {"Env": "PATH=/bin"}},
        {"architecture": MACHINE, "config": {"Env": [1, None, ["A=B"], "A", "=B", "1A=B", "A\0=B", "SUR=\ud800", "LONE=\udc80ok", "É=1"]}},
        {"architecture": MACHINE, "config": [1]},
        {"architecture": MACHINE, "config": None},
    ],
    ids=["number", "table", "text", "odd entries", "list", "nothing"],
)
def test_a_configuration_of_the_wrong_types_gives_no_variables(store: ImageStore, tmp_path: Path, config: Any) -> None:
    image = made(store, archive(tmp_path, [entry("a", "1")], config=config))
    assert [name for name, _ in image.env if name != "LONE"] == []
    for name, value in image.env:
        os.fsencode(f"{name}={value}")
    again = {"architecture": MACHINE, "config": {"Env": ["A=B"]}}
    assert made(store, archive(tmp_path, [entry("a", "1")], config=again)).env == (("A", "B"),), "the control arm"


@pytest.mark.parametrize("names", [5, "made:1", {"made:1": 1}, [5, None, "../x", "\ud800:1"], None])
def test_names_of_the_wrong_types_are_no_names(store: ImageStore, tmp_path: Path, names: Any) -> None:
    listed = {"Config": "config.json", "Layers": ["layer0.tar"], "RepoTags": names}
    assert made(store, archive(tmp_path, [entry("a", "1")], manifest=[listed])).names == ()
    assert made(store, archive(tmp_path, [entry("a", "1")])).names == ("made:1",), "the control arm"


def test_an_archive_cannot_call_itself_by_a_digest_or_by_the_id_of_another(store: ImageStore, tmp_path: Path) -> None:
    honest = made(store, archive(tmp_path, [entry("a", "1")]))
    pinned = f"python@sha256:{'0' * 64}"
    names = {"Config": "config.json", "Layers": ["layer0.tar"], "RepoTags": [honest.id, honest.id[:12], pinned, f"x/{pinned}", "new:1"]}
    liar = made(store, archive(tmp_path, [entry("b", "1")], manifest=[names]))
    assert store.find("new:1") == liar, "the control arm: it may have names"
    assert store.find(honest.id) == store.find(honest.id[:12]) == store.find("made:1") == honest
    assert store.find(pinned) is None


def test_a_configuration_that_is_larger_than_what_is_read_of_it_is_refused(store: ImageStore, tmp_path: Path) -> None:
    text = "\u00e9" * 1_900_000  # two bytes each in the archive, and six in what the unpacker prints
    path = archive(tmp_path, [entry("a", "1")], raw_config=f'{{"architecture": "{MACHINE}", "author": "{text}"}}'.encode())
    with pytest.raises(WorkspaceError, match="its configuration is too large"):
        made(store, path)
    assert os.listdir(store.path) == []
    made(store, archive(tmp_path, [entry("a", "1")], raw_config=f'{{"architecture": "{MACHINE}", "author": "{text[:999]}"}}'.encode()))


def test_a_small_archive_that_claims_a_huge_sparse_file_is_refused(store: ImageStore, tmp_path: Path) -> None:
    def sparse(claimed: int) -> str:
        headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "sparse", "GNU.sparse.realsize": str(claimed)}
        data = b"0\n".ljust(512, b"\0")  # no part of it has bytes
        info, _ = entry("GNUSparseFile.0/sparse", size=len(data), pax_headers=headers)
        return archive(tmp_path, [(info, data)])

    path = sparse(1 << 50)
    assert os.path.getsize(path) < 1 << 16
    with pytest.raises(WorkspaceError, match="cannot be unpacked"):
        made(store, path, most_bytes=8 << 20)
    assert os.listdir(store.path) == []
    assert Path(made(store, sparse(1 << 20), most_bytes=8 << 20).root, "sparse").stat().st_size == 1 << 20, "the control arm"


@pytest.mark.parametrize("when", [float("inf"), 1e30, -1e30])
def test_a_time_that_no_clock_shows_is_refused_with_a_reason(store: ImageStore, tmp_path: Path, when: float) -> None:
    with pytest.raises(WorkspaceError, match="not the archive of an image: OverflowError"):
        made(store, archive(tmp_path, [entry("a", "1", mtime=0, pax_headers={"mtime": repr(when)})]))
    assert os.listdir(store.path) == []


def test_no_entry_keeps_a_bit_or_an_owner_that_gives_it_power(store: ImageStore, tmp_path: Path) -> None:
    entries = [
        entry("d", type=tarfile.DIRTYPE, mode=0o7777),
        entry("d/su", "#!", mode=0o4755),
        entry("d/sg", "#!", mode=0o2755),
        entry("late", "1"),
        entry("late", "2", mode=0o6777),
        entry("hard", type=tarfile.LNKTYPE, linkname="d/su", mode=0o4755),
    ]
    image = made(store, archive(tmp_path, entries))
    modes = {path.name: stat.S_IMODE(path.lstat().st_mode) for path in Path(image.root).rglob("*")}
    assert {"d", "su", "sg", "late", "hard"} == modes.keys() and not any(mode & 0o6000 for mode in modes.values())
    assert modes["d"] & 0o1000, "the control arm: a bit without power is kept"
