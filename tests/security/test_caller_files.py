"""Attacks on the files that a caller uses: links, FIFOs, devices and secrets that a guest leaves in the way of `Workspace.files`.

What is attacked is the host: it must not be led to its own files, be made to wait, or be made to write outside the sandbox.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox import Denied, Sandbox, SandboxConfig, SandboxError, Workspace, shell
from agent_sandbox.assembly import here
from tests.ledger.samples import read

SECRET = "-----BEGIN OPENSSH PRIVATE KEY-----\nCANARY\n-----END OPENSSH PRIVATE KEY-----\n"


@pytest.fixture(scope="module", autouse=True)
def _no_zygote_is_left() -> Iterator[None]:
    yield
    here().process().close()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AGENT_SANDBOX_STATE", str(tmp_path / "state"))
    made = tmp_path / "project"
    made.mkdir()
    (made / "notes.txt").write_text("one\n")
    (made / ".env").write_text("TOKEN=CANARY\n")
    (made / "id_rsa").write_text(SECRET)
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "real.txt").write_text("real\n")
    return made


@pytest.fixture
def work(project: Path) -> Iterator[Workspace]:
    with Workspace.over(project) as made:
        yield made
        made.reset()


def test_nothing_that_is_written_reaches_the_real_machine(work: Workspace, project: Path, tmp_path: Path) -> None:
    outside = tmp_path / "beside" / "real.txt"
    assert work.run(shell(f"ln -s {outside} out; ln -s {outside.parent} dir; ln -s {tmp_path}/beside/new.txt none")).success
    work.files.write("notes.txt", "changed\n")
    work.files.write("out", "through a link\n")
    work.files.write("dir/more.txt", "through a directory\n")
    work.files.write("none", "through a link to nothing\n")
    work.files.write(outside.parent / "plain.txt", "plainly\n")
    work.files.remove("dir", recursive=True)
    assert work.files.read(outside) == "through a link\n", "inside it is changed"
    assert work.files.read("notes.txt") == "changed\n"
    work.files.remove(outside.parent, recursive=True)
    assert not work.files.exists(outside)
    assert sorted(os.listdir(outside.parent)) == ["real.txt"] and outside.read_text() == "real\n"
    assert (project / "notes.txt").read_text() == "one\n" and sorted(os.listdir(project)) == [".env", "id_rsa", "notes.txt"]
    outside.write_text("the control arm: this is what a write outside looks like\n")
    assert outside.read_text() != "real\n"


def test_a_secret_stays_hidden_on_every_way_to_it(work: Workspace, project: Path, tmp_path: Path) -> None:
    (project / "link-of-the-host").symlink_to(".env")
    assert work.run(shell(f"ln -s {project}/.env way; ln -s .. up; mkdir d; ln -s {project} d/p; ln -s /proc/self/root root")).success
    for path in (".env", "id_rsa"):
        with pytest.raises(Denied, match="hides"):
            work.files.read(path)
        with pytest.raises(Denied, match="hides"):
            work.files.stat(path)
    for way in ("way", "link-of-the-host", "up/project/.env", "d/p/.env", "d/p/id_rsa", f"root{project}/.env"):
        with pytest.raises((FileNotFoundError, PermissionError)):
            work.files.read(way)
    assert not {"id_rsa", ".env"} & {each.name for each in work.files.list()}
    shown = Workspace.over(project, config=SandboxConfig(allow_file_read=True, allow_file_write=True, reveal=[project / ".env"]))
    assert "CANARY" in shown.files.read(".env") and "CANARY" in shown.files.read("way"), "the control arm"
    ledger = "".join(repr(entry) for entry in read(str(tmp_path / "state" / "ledger.jsonl")))
    assert "CANARY" not in ledger and "'operation': 'read'" in ledger


def test_a_fifo_or_a_device_keeps_nobody_waiting(work: Workspace) -> None:
    assert work.run(
        "import os, socket\nos.mkfifo('pipe')\nsocket.socket(socket.AF_UNIX).bind('s')\nos.symlink('/dev/zero', 'zero')"
    ).success
    done = threading.Event()

    def use() -> None:
        for path in ("pipe", "s", "zero", "/dev/zero", "/dev/tty"):
            with pytest.raises(OSError):
                work.files.read(path)
            if not path.startswith("/dev"):
                with pytest.raises(OSError):
                    work.files.write(path, "x")
        with pytest.raises(OSError, match="a FIFO, and no regular file"):
            work.files.read("pipe")
        assert {each.name: each.kind for each in work.files.list()} == {"notes.txt": "file", "pipe": "fifo", "s": "socket", "zero": "link"}
        assert work.files.stat("zero").target == "/dev/zero"
        done.set()

    use()
    assert done.is_set()


def test_an_endless_file_ends_at_the_limit(work: Workspace) -> None:
    """A file of /proc says that it is empty, and a sparse one that it is large."""
    assert work.run(
        "import os\nos.truncate(os.open('sparse', os.O_CREAT | os.O_WRONLY), 100 << 20)\nopen('many', 'w').write('x' * 3000000)"
    ).success
    with pytest.raises(OSError, match="too large"):
        work.files.read("sparse")
    with pytest.raises(OSError, match="too large"):
        work.files.read("/proc/self/maps", max_bytes=10)
    assert len(work.files.read("/proc/self/maps")) > 10, "the control arm"
    assert len(work.files.read_bytes("many")) == 3_000_000, "the limit on a program's output is none on files"


def test_names_are_data(work: Workspace) -> None:
    odd = ["a\nb", "\x1b[2J", "'; import os #", "ü", os.fsdecode(b"\xff\xfe"), "{request}", "%s", " "]
    for name in odd:
        work.files.write(name, name.encode("utf-8", "surrogateescape"))
    assert {each.name for each in work.files.list()} == {*odd, "notes.txt"}
    for name in odd:
        assert work.files.read_bytes(name) == name.encode("utf-8", "surrogateescape")


def test_modules_of_the_guest_change_nothing(work: Workspace) -> None:
    """An operation runs in the interpreter of the host's making: what lies in the project is not imported."""
    for module in ("os", "sys", "stat", "re", "io", "codecs", "posixpath", "__future__", "encodings", "sitecustomize"):
        work.files.write(f"{module}.py", "raise SystemExit('taken over')")
    assert work.files.read("notes.txt") == "one\n"
    assert work.execute("import colorsys").success
    work.files.write("colorsys.py", "raise SystemExit('taken over')")
    assert not work.execute("import colorsys").success, "the control arm"


def test_a_full_sandbox_says_so_and_goes_on(project: Path) -> None:
    config = SandboxConfig(allow_file_read=True, allow_file_write=True, max_disk_mb=16)
    with Workspace.over(project, config=config) as work:
        with pytest.raises((OSError, SandboxError)):
            for number in range(64):
                work.files.write(f"large-{number}", b"x" * (4 << 20))
        work.reset()
        work.files.write("small", "1")
        assert work.files.read("small") == "1"
        work.reset()


def test_what_is_written_waits_for_promotion(work: Workspace, project: Path) -> None:
    work.files.write("src/new.py", "print(1)\n")
    assert not (project / "src").exists() and "+print(1)" in work.diff()
    work.promote()
    assert (project / "src" / "new.py").read_text() == "print(1)\n"


def test_a_place_that_is_not_kept_is_refused(work: Workspace) -> None:
    for path in ("/tmp/x", "/dev/shm/x"):
        with pytest.raises(SandboxError, match="made anew for each run"):
            work.files.write(path, "lost")


def test_a_locked_sandbox_reads_none_of_the_hosts_files(tmp_path: Path) -> None:
    (tmp_path / "report.txt").write_text("CANARY")
    with Sandbox() as sandbox:
        with pytest.raises(Denied, match="does not show"):
            sandbox.files.read(tmp_path / "report.txt")
        with sandbox.session() as session:
            session.run("import os\nos.symlink('/proc/1/root', 'r')")
            with pytest.raises((FileNotFoundError, PermissionError, Denied)):
                session.files.read(f"r{tmp_path}/report.txt")
    assert Sandbox(allow_file_read=True, allowed_paths=[tmp_path]).files.read(tmp_path / "report.txt") == "CANARY", "the control arm"
