"""Which kernel a machine boots: the newest that has what is needed, and a reason for each that has not."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.runtime.microvm import archive, kernel_package
from agent_sandbox.runtime.microvm.kernel_package import WANTED

DEPENDS = {"virtio_mmio": "virtio", "virtio_console": "virtio", "9pnet_virtio": "9pnet,virtio", "9p": "9pnet,netfs"}


def unpacked(place: Path, version: str, *, without: str = "", compressed: bool = False) -> None:
    """Lay out a kernel package as `dpkg -x` does."""
    (place / "boot").mkdir(parents=True, exist_ok=True)
    (place / "boot" / f"vmlinuz-{version}").write_bytes(b"image")
    modules = place / "lib/modules" / version
    (modules / "kernel/x").mkdir(parents=True)
    names = [name for name in ("virtio", "9pnet", "netfs", *WANTED) if name != without]
    (modules / "modules.order").write_text("".join(f"kernel/x/{name.replace('_', '-')}.ko\n" for name in names))
    for name in names:
        content = b"\0depends=" + DEPENDS.get(name, "").encode() + b"\0"
        file = modules / "kernel/x" / f"{name.replace('_', '-')}.ko"
        if compressed:
            file.with_suffix(".ko.xz").write_bytes(lzma.compress(content))
        else:
            file.write_bytes(content)


@pytest.mark.parametrize("compressed", [False, True])
def test_the_newest_kernel_is_chosen_and_each_module_comes_after_what_it_needs(tmp_path: Path, compressed: bool) -> None:
    unpacked(tmp_path, "6.1.0-9-amd64", compressed=compressed)
    unpacked(tmp_path, "6.1.0-10-amd64", compressed=compressed)
    kernel = kernel_package.find([str(tmp_path / "nothing"), str(tmp_path)])
    assert kernel.version == "6.1.0-10-amd64"
    order = [Path(path).name.partition(".")[0].replace("-", "_") for path in kernel.modules]
    assert sorted(order) == sorted({"virtio", "9pnet", "netfs", *WANTED})
    for name, needed in DEPENDS.items():
        assert all(order.index(each) < order.index(name) for each in needed.split(","))
    assert kernel_package.read_module(kernel.modules[0]).startswith(b"\0depends=")


def test_a_kernel_without_9p_is_passed_over_for_an_older_one_that_has_it(tmp_path: Path) -> None:
    unpacked(tmp_path, "6.1.0-10-cloud", without="9p")
    unpacked(tmp_path, "6.1.0-9-amd64")
    assert kernel_package.find([str(tmp_path)]).version == "6.1.0-9-amd64"


def test_without_a_usable_kernel_the_reason_and_the_package_are_named(tmp_path: Path) -> None:
    unpacked(tmp_path, "6.1.0-10-cloud", without="9p")
    with pytest.raises(RuntimeUnavailable) as refused:
        kernel_package.find([str(tmp_path)])
    assert "it has no module 9p" in refused.value.message and "linux-image-amd64" in refused.value.hint
    assert kernel_package.is_there([str(tmp_path)]) and not kernel_package.is_there([str(tmp_path / "nothing")])


def test_an_archive_holds_files_links_and_the_directories_that_lead_to_them(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("real")
    entries = list(archive.tree_entries([str(tmp_path / "link" / "file")]))
    names = {entry.name: entry for entry in entries}
    top = str(tmp_path)[1:]
    assert names[f"{top}/link"].content == b"real" and names[f"{top}/real/file"].content == b"content"
    packed = archive.pack(entries)
    assert packed.count(b"070701") == len(entries) + 1 and b"TRAILER!!!" in packed and len(packed) % 4 == 0
    at = packed.index(b"file\0")
    assert b"content" in packed[at : at + 32]
