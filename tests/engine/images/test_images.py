"""An image is unpacked inside a sandbox, whatever its archive says, and engines only hand out archives."""

from __future__ import annotations

import io
import os
import shutil
import signal
import stat
import subprocess
import tarfile
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import pytest

from agent_sandbox.engine.images import container_engines, machine_packages
from agent_sandbox.engine.images.container_engines import fetch_image
from agent_sandbox.engine.images.make import make_image, remove_image
from agent_sandbox.errors import PolicyError, RuntimeUnavailable, WorkspaceError
from agent_sandbox.policy.image_names import canonical_image
from agent_sandbox.runtime.container.images import NEW, ContainerImage, ImageStore
from tests.images import archive, entry
from tests.patience import until


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(str(tmp_path / "images"))


def made(store: ImageStore, path: str, most_bytes: int = 1 << 30) -> ContainerImage:
    return make_image(store, path, source="a test", most_bytes=most_bytes)


def test_layers_lie_over_one_another_with_their_whiteouts(store: ImageStore, tmp_path: Path) -> None:
    lower = [
        entry("etc", type=tarfile.DIRTYPE, mode=0o755),
        entry("etc/gone", "1"),
        entry("etc/kept", "2", uid=7, gid=8),
        entry("etc/emptied/x", "3"),
        entry("lib", type=tarfile.SYMTYPE, linkname="usr/lib"),
        entry("usr/lib/a", "4"),
        entry("usr/lib/b", type=tarfile.LNKTYPE, linkname="usr/lib/a"),
    ]
    upper = [entry("etc/.wh.gone"), entry("etc/emptied/.wh..wh..opq"), entry("etc/emptied/y", "5"), entry("lib/c", "6")]
    image = made(store, archive(tmp_path, lower, upper))
    root = Path(image.root)
    assert not (root / "etc/gone").exists() and os.listdir(root / "etc/emptied") == ["y"]
    assert (root / "usr/lib/c").read_text() == "6" and (root / "lib").is_symlink(), "a link inside the image is followed inside it"
    assert (root / "usr/lib/a").stat().st_ino == (root / "usr/lib/b").stat().st_ino
    owner = (root / "etc/kept").stat()
    assert (owner.st_uid, owner.st_gid) == ((7, 8) if os.geteuid() == 0 else (os.geteuid(), os.getegid()))
    assert image.names == ("made:1",) and dict(image.env) == {"PATH": "/bin"} and store.find("made:1") == image
    assert stat.S_IMODE(os.stat(store.path).st_mode) == 0o700


def test_a_hostile_archive_reaches_nothing_outside_and_leaves_no_power_inside(store: ImageStore, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.write_text("untouched")
    up = "../" * 12
    hostile = [
        entry(f"{up}{canary}", "by name"),
        entry("abs", type=tarfile.SYMTYPE, linkname=str(tmp_path)),
        entry("abs/canary", "through an absolute link"),
        entry("rel", type=tarfile.SYMTYPE, linkname=f"{up}{str(tmp_path)[1:]}"),
        entry("rel/canary", "through a relative link"),
        entry("hard", type=tarfile.LNKTYPE, linkname=str(canary)),
        entry("twice", type=tarfile.LNKTYPE, linkname="abs/canary"),
        entry("disk", type=tarfile.BLKTYPE, devmajor=8, devminor=0),
        entry("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
        entry("pipe", type=tarfile.FIFOTYPE),
        entry("root-shell", "#!", mode=0o6755),
        entry("unknown", uid=1 << 30, gid=1 << 30),
    ]
    image = made(store, archive(tmp_path, hostile))
    assert canary.read_text() == "untouched" and canary.stat().st_nlink == 1
    root = Path(image.root)
    assert (root / str(tmp_path)[1:] / "canary").read_text() == "through a relative link", "where the links lead inside the image"
    assert not {"disk", "null", "pipe"} & set(os.listdir(root))
    kinds = [path.lstat().st_mode for path in root.rglob("*")]
    assert not any(mode & 0o6000 for mode in kinds) and {stat.S_IFMT(mode) for mode in kinds} <= {stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK}
    assert {"3 devices and pipes", "1 setuid and setgid bits", "1 names that leave the image"} <= set(image.left_out)


@pytest.mark.parametrize(
    "build",
    [
        lambda place: _written(place, b"not a tar at all"),
        lambda place: _written(place, b""),
        lambda place: archive(place, [entry("a", "1")], manifest=[]),
        lambda place: archive(place, [entry("a", "1")], manifest=[{"Config": "/etc/passwd", "Layers": []}]),
        lambda place: archive(place, [entry("a", "1")], manifest={"Layers": 3}),
        lambda place: archive(place, [entry("a", "1")], config=["no table"]),
        lambda place: archive(place, [entry(f"l{n}", type=tarfile.SYMTYPE, linkname=f"l{1 - n}") for n in (0, 1)] + [entry("l0/x", "1")]),
        lambda place: archive(place, [entry("/".join(["d"] * 300), "deep")]),
        lambda place: _cut(archive(place, [entry("a", os.urandom(1 << 18).hex())])),
    ],
    ids=["text", "empty", "no image", "no configuration", "no list", "no table", "circle", "deep", "cut"],
)
def test_what_is_no_image_is_refused_and_nothing_is_left(store: ImageStore, tmp_path: Path, build: object) -> None:
    with pytest.raises(WorkspaceError, match="cannot be unpacked"):
        made(store, build(tmp_path))  # type: ignore[operator]
    assert list(store) == [] and os.listdir(store.path) == []


def _written(place: Path, data: bytes) -> str:
    path = place / "image.tar"
    path.write_bytes(data)
    return str(path)


def _cut(path: str) -> str:
    os.truncate(path, os.path.getsize(path) // 2)
    return path


@pytest.mark.parametrize("what", ["nothing", "directory", "pipe"])
def test_an_archive_that_is_no_file_is_refused_by_its_name(store: ImageStore, tmp_path: Path, what: str) -> None:
    path = tmp_path / "image.tar"
    if what != "nothing":
        path.mkdir() if what == "directory" else os.mkfifo(path)
    with pytest.raises(WorkspaceError, match=r"the archive '.*/image.tar' (is not a file|cannot be read: No such file)"):
        made(store, str(path))


def test_an_image_that_is_too_large_is_refused_and_its_space_is_given_back(store: ImageStore, tmp_path: Path) -> None:
    path = archive(tmp_path, [entry("zeros", "\0" * (48 << 20))])
    assert os.path.getsize(path) < 1 << 20, "it is small until it is unpacked"
    with pytest.raises(WorkspaceError, match="disk"):
        made(store, path, most_bytes=8 << 20)
    assert os.listdir(store.path) == []
    assert made(store, path).names == ("made:1",), "the control arm: with room it is unpacked"


def test_a_maker_that_is_killed_leaves_nothing_that_the_next_one_does_not_remove(store: ImageStore, tmp_path: Path) -> None:
    os.makedirs(os.path.join(store.path, f"{NEW}dead", "layers"))
    Path(store.path, f"{NEW}dead", "lock").touch()
    made(store, archive(tmp_path, [entry("a", "1")]))
    assert [name for name in os.listdir(store.path) if name.startswith(NEW)] == []


def test_makers_at_the_same_time_make_one_image(store: ImageStore, tmp_path: Path) -> None:
    path = archive(tmp_path, [entry("a", "1"), entry("b", "2" * 100_000)])
    made_by: list[ContainerImage] = []
    threads = [threading.Thread(target=lambda: made_by.append(made(store, path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made_by) == 3 and len({image.id for image in made_by}) == 1 and len(list(store)) == 1
    assert os.listdir(store.path) == [made_by[0].id] and Path(made_by[0].root, "a").read_text() == "1"


def test_a_name_moves_to_the_newer_image_and_an_image_can_be_removed(store: ImageStore, tmp_path: Path) -> None:
    first = made(store, archive(tmp_path, [entry("a", "1")]))
    again = archive(tmp_path, [entry("a", "2")])
    second = made(store, again)
    assert first.id != second.id and store.find("made:1") == second and (store.find(first.id) or second).names == ()
    assert made(store, again).id == second.id, "the same archive is the same image"
    assert remove_image(store, "made:1").id == second.id and store.find("made:1") is None
    with pytest.raises(WorkspaceError, match="there is no image"):
        remove_image(store, "made:1")


@pytest.mark.parametrize("name", ["", "-rf", "a b", "/etc/passwd", "../x", "x:", "a\nb", "x" * 300])
def test_text_that_is_no_name_of_an_image_is_refused(name: str) -> None:
    with pytest.raises(PolicyError, match="not the name of an image"):
        canonical_image(name)


def engine(place: Path, script: str) -> str:
    """A directory with a program called podman."""
    place.mkdir()
    program = place / "podman"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(place)


@pytest.mark.parametrize(
    "hangs",
    [
        pytest.param("setsid sleep 1000 & echo $! >> {pids}; wait", id="with a child"),
        pytest.param("exec env -i /bin/sleep 1000", id="without an environment"),
    ],
)
def test_an_engine_that_hangs_is_killed_with_its_children_and_named(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: str
) -> None:
    monkeypatch.setattr(container_engines, "ANSWER_SECONDS", 0.5)
    pids = tmp_path / "pids"
    hanging = engine(tmp_path / "bin", f"echo $$ > {pids}; {hangs.format(pids=pids)}")
    with pytest.raises(RuntimeUnavailable, match="podman: it did not answer within"):
        fetch_image(store, "some:1", search_path=f"{hanging}:/usr/bin:/bin" if not shutil.which("docker") else hanging)
    for pid in map(int, pids.read_text().split()):
        assert until(lambda pid=pid: not _runs(pid))  # type: ignore[misc]


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_of_an_engine_that_talks_without_end_only_the_end_is_kept(store: ImageStore, tmp_path: Path) -> None:
    talking = engine(tmp_path / "bin", "yes 'pulling a layer' | head -c 64000000 >&2; echo 'no such image here' >&2; exit 125")
    tracemalloc.start()
    try:
        with pytest.raises(RuntimeUnavailable, match="podman: no such image here"):
            fetch_image(store, "some:1", search_path=talking)
        assert tracemalloc.get_traced_memory()[1] < 16_000_000
    finally:
        tracemalloc.stop()


def test_what_an_engine_leaves_behind_is_ended(store: ImageStore, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    leaving = engine(tmp_path / "bin", f"setsid sleep 1000 < /dev/null 2> /dev/null & echo $! > {pids}; exit 125")
    with pytest.raises(RuntimeUnavailable, match="podman: it ended with 125"):
        fetch_image(store, "some:1", search_path=leaving)
    assert until(lambda: not _runs(int(pids.read_text())))


def test_what_an_engine_leaves_behind_is_ended_also_if_it_starts_a_program_just_then(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    looked: set[str] = set()

    def looks(path: str, mode: str) -> IO[bytes]:
        """At the first look, what the kernel shows of a process in the middle of execve(2)."""
        with open(path, mode) as file:
            content: bytes = file.read()
        ours = path.split("/")[2] in pids.read_text().split()
        if ours and path not in looked:
            looked.add(path)
            before, name, rest = content.rpartition(b")")
            fields = rest.split(b" ")
            content = b"" if path.endswith("/environ") else before + name + b" ".join([*fields[:49], b"0", *fields[50:]])
        return io.BytesIO(content)

    monkeypatch.setattr(container_engines, "open", looks, raising=False)
    leaving = engine(tmp_path / "bin", f"setsid sleep 1000 < /dev/null 2> /dev/null & echo $! > {pids}; exit 125")
    with pytest.raises(RuntimeUnavailable, match="podman: it ended with 125"):
        fetch_image(store, "some:1", search_path=leaving)
    pid = int(pids.read_text())
    ended = until(lambda: not _runs(pid), seconds=5)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    assert ended and looked, "it is looked at again"


def test_a_process_that_starts_a_program_is_told_from_one_without_an_environment(tmp_path: Path) -> None:
    again = tmp_path / "again"
    again.write_text('#!/bin/sh\nexec "$0"\n')
    again.chmod(0o755)
    idle = [["sleep", "1000"], ["env", "-i", "sleep", "1000"]]
    with ExitStack() as stack:
        started = [stack.enter_context(subprocess.Popen(words)) for words in (*idle, ["true"], [str(again)])]
        for process in started:
            stack.callback(process.kill)
        *still, ending, starting = [str(each.pid) for each in started]
        for each in (*still, ending, "2"):  # 2 is a thread of the kernel, outside of containers
            assert until(lambda each=each: not container_engines._starts_a_program(each))  # type: ignore[misc]
        assert until(lambda: any(container_engines._starts_a_program(starting) for _ in range(1000))), "one that does so all the time"


def test_an_image_that_nobody_has_is_named_with_what_the_engines_said(store: ImageStore, tmp_path: Path) -> None:
    with pytest.raises(RuntimeUnavailable, match="podman: no such image here") as refusal:
        fetch_image(store, "some:1", search_path=engine(tmp_path / "bin", "echo 'no such image here' >&2; exit 125"))
    assert "never pulled by a run" in refusal.value.hint
    with pytest.raises(RuntimeUnavailable, match="neither podman nor docker is installed"):
        fetch_image(store, "some:1", search_path=str(tmp_path / "none"))


def test_an_image_is_pulled_only_if_that_was_asked_for(store: ImageStore, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    bin_directory = engine(tmp_path / "bin", f'echo "$@" >> {asked}; exit 1')
    for pull in (False, True):
        with pytest.raises(RuntimeUnavailable):
            fetch_image(store, "some:1", pull=pull, search_path=bin_directory)
        assert any(line.startswith("pull") for line in asked.read_text().splitlines()) == pull


@pytest.fixture
def podman(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Podman, with a storage of its own."""
    if os.geteuid() != 0 or (found := shutil.which("podman")) is None:
        pytest.skip("podman is not installed (apt-get install podman), or this is not root")
    settings = tmp_path / "storage.conf"
    settings.write_text(f'[storage]\ndriver = "vfs"\ngraphroot = "{tmp_path}/graph"\nrunroot = "{tmp_path}/run"\n')
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(settings))
    yield found


def test_podman_supplies_an_image_of_its_storage(podman: str, store: ImageStore, tmp_path: Path) -> None:
    layer = tmp_path / "tree.tar"
    with tarfile.open(layer, "w") as tar:
        info, _ = entry("bin/hello", "hello", mode=0o755)
        tar.addfile(info, io.BytesIO(b"hello"))
    subprocess.run([podman, "import", "--quiet", str(layer), "tiny:1"], check=True, capture_output=True)
    image = fetch_image(store, "tiny:1", search_path=os.path.dirname(podman))
    assert Path(image.root, "bin/hello").read_text() == "hello" and image.source == "podman" and image.names == ("tiny:1",)
    with pytest.raises(RuntimeUnavailable, match="podman"):
        fetch_image(store, "tiny:2", search_path=os.path.dirname(podman))


def test_podman_leaves_no_mount_on_its_storage(podman: str, store: ImageStore, tmp_path: Path) -> None:
    settings = Path(os.environ["CONTAINERS_STORAGE_CONF"])
    settings.write_text(settings.read_text().replace("vfs", "overlay"))
    bare = f"{podman} image inspect tiny:2; cat /proc/self/mountinfo"
    alone = subprocess.run(["unshare", "--mount", "sh", "-c", bare], check=True, capture_output=True).stdout.decode()
    if f"{tmp_path}/graph" not in alone:
        pytest.skip("this podman mounts nothing on its storage")
    with pytest.raises(RuntimeUnavailable, match="podman"):
        fetch_image(store, "tiny:2", search_path=os.path.dirname(podman))
    assert f"{tmp_path}/graph" not in Path("/proc/self/mountinfo").read_text()


def test_an_image_of_this_machine_holds_packages_and_nothing_that_somebody_wrote(tmp_path: Path) -> None:
    if shutil.which("dpkg-query") is None:
        pytest.skip("dpkg does not manage the packages of this machine")
    known = machine_packages._Packages.read()
    changed = next((path for path, digest in known.configuration.items() if os.path.isfile(path) and digest), None)
    assert changed is not None
    as_it_is = machine_packages._as_brought(changed, known)
    known.configuration[changed] = "0" * 32
    assert not machine_packages._as_brought(changed, known), "a file of /etc that is not as its package brought it stays out"
    assert as_it_is in (True, False) and not machine_packages._as_brought("/etc/shadow", known)
    with pytest.raises(RuntimeUnavailable, match="not installed"):
        known.closure(("no-such-package",), asked=("no-such-package",))
