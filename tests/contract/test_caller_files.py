"""Files in a sandbox, as its caller uses them: the same claims for each runtime of Python code."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox import Denied, PolicyError, Sandbox, SandboxError, SandboxSession
from agent_sandbox.engine.file_access import PIECE
from agent_sandbox.ledger.event import Event, Intent, OutcomeEvent

pytestmark = pytest.mark.once

Make = Callable[..., Sandbox]
Events = Callable[[], list[Event]]


@pytest.mark.both
def test_what_the_caller_writes_a_turn_reads_and_the_other_way_round(sandboxes: Make) -> None:
    with sandboxes().session() as session:
        session.files.write("deep/er/in.txt", "grüße\n")
        session.files.write("/tmp/raw", b"\x00\xff")
        turn = session.run("open('deep/er/out.txt', 'w').write('back'); [open('deep/er/in.txt').read(), open('raw', 'rb').read()]")
        assert turn.value == ["grüße\n", b"\x00\xff"], turn
        assert session.files.read("deep/er/out.txt") == "back"
        assert session.files.read_bytes("raw") == b"\x00\xff"
        with pytest.raises(UnicodeDecodeError):
            session.files.read("raw")
        assert session.files.read("raw", errors="replace") == "\0\ufffd"
        session.files.write("deep/er/in.txt", "short")
        assert session.files.read("deep/er/in.txt") == "short", "nothing of the longer text is left"


@pytest.mark.both
def test_entries_are_listed_described_made_and_removed(sandboxes: Make) -> None:
    with sandboxes().session() as session:
        files = session.files
        files.mkdir("a/b")
        files.mkdir("a/b")
        files.write("a/text", "four")
        assert [(each.name, each.path, each.kind) for each in files.list("a")] == [
            ("b", "/tmp/a/b", "directory"),
            ("text", "/tmp/a/text", "file"),
        ]
        assert files.stat("a/text").size == 4 and files.stat("a").is_directory
        assert [files.exists(path) for path in ("a", "a/text", "a/none", "a/text/below", "none/below")] == [True, True, False, False, False]
        with pytest.raises(OSError) as full:
            files.remove("a")
        assert full.value.errno in (errno.ENOTEMPTY, errno.EEXIST) and full.value.filename == "/tmp/a"
        files.remove("a/text")
        files.write("a/b/c/d", "")
        files.remove("a", recursive=True)
        assert not files.exists("a") and files.list() == ()


def test_what_the_file_system_says_is_raised_as_for_a_real_file(sandboxes: Make) -> None:
    with sandboxes().session() as session:
        session.files.write("file", "x")
        for call, kind in (
            (lambda: session.files.read("none"), FileNotFoundError),
            (lambda: session.files.read("/tmp"), IsADirectoryError),
            (lambda: session.files.write("/tmp", "x"), IsADirectoryError),
            (lambda: session.files.write("file/below", "x"), (NotADirectoryError, FileExistsError)),
            (lambda: session.files.list("file"), NotADirectoryError),
            (lambda: session.files.list("none"), FileNotFoundError),
            (lambda: session.files.stat("none"), FileNotFoundError),
            (lambda: session.files.remove("none"), FileNotFoundError),
            (lambda: session.files.mkdir("file"), FileExistsError),
        ):
            with pytest.raises(kind):
                call()
        assert session.run("1").value == 1, "and the session goes on"


def test_a_large_file_comes_in_pieces_and_one_beyond_the_limit_not_at_all(sandboxes: Make) -> None:
    content = bytes(range(256)) * ((PIECE >> 8) + 1)
    with sandboxes(max_memory_mb=512).session() as session:
        session.files.write("large", content)
        assert session.files.stat("large").size == len(content)
        assert session.files.read_bytes("large") == content
        assert session.files.read_bytes("large", max_bytes=len(content)) == content
        with pytest.raises(OSError, match="too large") as refused:
            session.files.read_bytes("large", max_bytes=len(content) - 1)
        assert refused.value.errno == errno.EFBIG


def test_an_operation_leaves_no_name_and_loses_no_output(sandboxes: Make) -> None:
    with sandboxes().session() as session:
        before = session.run("sorted(globals())").value
        session.files.write("x", "1")
        assert session.run("sorted(globals())").value == before
        assert session.files.read("x") == "1"


def test_each_operation_is_judged_and_recorded_without_its_content(sandboxes: Make, events: Events) -> None:
    with sandboxes(denied_paths=["/tmp/private"], allow_file_read=True, allowed_paths=["/usr/share"]).session() as session:
        session.files.write("plan.txt", "CANARY of the content")
        intent, outcome = events()[-2:]
        assert isinstance(intent, Intent) and isinstance(outcome, OutcomeEvent)
        assert {name: intent.action[name] for name in ("kind", "operation", "path", "size")} == {
            "kind": "UseFile",
            "operation": "write",
            "path": "/tmp/plan.txt",
            "size": 21,
        }
        assert "CANARY" not in repr(events())
        with pytest.raises(Denied, match="hides"):
            session.files.read("private/x")
        with pytest.raises(Denied, match="no changes of files"):
            session.files.write("/usr/share/x", "")
        assert [type(each).__name__ for each in events()[-2:]] == ["RefusalEvent", "RefusalEvent"]


@pytest.mark.both
def test_a_sandbox_shows_its_files_and_keeps_none(sandboxes: Make, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "shown.txt").write_text("real")
    sandbox = sandboxes(allow_file_read=True, allowed_paths=[tmp_path / "data"])
    assert sandbox.files.read(tmp_path / "data" / "shown.txt") == "real"
    assert [each.name for each in sandbox.files.list(tmp_path / "data")] == ["shown.txt"]
    with pytest.raises(Denied, match="does not show '/etc/passwd'"):
        sandbox.files.exists("/etc/passwd")
    assert not sandbox.files.exists(tmp_path / "data" / "none")
    writes: tuple[Callable[[], None], ...] = (
        lambda: sandbox.files.write("x", "1"),
        lambda: sandbox.files.mkdir("x"),
        lambda: sandbox.files.remove("x"),
    )
    for write in writes:
        with pytest.raises(SandboxError, match="keeps no files") as refused:
            write()
        assert "session()" in refused.value.hint
    assert sandbox.status.name == "PENDING", "an operation on files is no run"


@pytest.mark.parametrize("path", ["a/../b", "/tmp/../etc/passwd", "", "a\0b"])
def test_a_path_that_could_mean_another_place_is_refused(sandboxes: Make, path: str) -> None:
    with pytest.raises(PolicyError):
        sandboxes().files.read(path)


def test_arguments_of_the_wrong_type_are_mistakes_of_the_caller(sandboxes: Make) -> None:
    with sandboxes().session() as session:
        files: Any = session.files
        wrong: tuple[tuple[Callable[[], object], str], ...] = (
            (lambda: files.read(7), "path is a str or bytes or PathLike, not int"),
            (lambda: files.write("x", 7), "content is a str or bytes"),
            (lambda: files.write("x", None), "not NoneType"),
            (lambda: files.read("x", max_bytes="7"), "max_bytes is an int, not str"),
            (lambda: files.remove("x", recursive=1), "recursive is a bool, not int"),
        )
        for call, said in wrong:
            with pytest.raises(TypeError, match=said):
                call()
        with pytest.raises(ValueError, match="negative"):
            session.files.read("x", max_bytes=-1)


FORGERIES = {
    "nonsense": "{'status': 'done', 'content': 'text'}",
    "no answer": "None",
    "another status": "{'status': 'done 1\\nmore', 'content': b''}",
    "a name that leads elsewhere": "{'status': 'done', 'content': ('file 1 420 0 ' + b'../../etc/passwd'.hex() + '. .\\n').encode()}",
    "more than was asked for": "{'status': 'done', 'content': b'x' * 100}",
}


@pytest.mark.parametrize("forged", FORGERIES.values(), ids=FORGERIES)
def test_an_answer_that_the_guest_forged_is_an_error_and_never_a_path(sandboxes: Make, forged: str) -> None:
    """The interpreter of a session is its program's own: it can replace whatever answers."""
    with sandboxes().session() as session:
        assert session.run(
            f"import builtins\nbuiltins.exec = lambda text, names: names.update(perform_in_turn=lambda words: {forged})"
        ).success
        with pytest.raises((SandboxError, OSError)):
            session.files.list()
        with pytest.raises((SandboxError, OSError)):
            session.files.read("x", max_bytes=10)
    with sandboxes().session() as honest:
        assert honest.files.list() == (), "the control arm"


@pytest.mark.both
def test_a_sandbox_without_space_says_so_and_goes_on(sandboxes: Make) -> None:
    with sandboxes(max_disk_mb=8).session() as session:
        with pytest.raises(OSError) as refused:
            session.files.write("large", b"x" * (20 << 20))
        assert refused.value.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
        assert session.run("6 * 7").value == 42


def test_a_session_that_has_ended_has_no_files(sandboxes: Make) -> None:
    session: SandboxSession = sandboxes().session()
    session.files.write("x", "1")
    session.close()
    with pytest.raises(SandboxError, match="has ended"):
        session.files.read("x")
    dying = sandboxes().session()
    dying.run("import builtins, os\nbuiltins.exec = lambda *_: os._exit(3)")
    with pytest.raises(SandboxError, match="has ended"):
        dying.files.list()
    assert dying.ended
