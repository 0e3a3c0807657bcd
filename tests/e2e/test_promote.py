"""`promote`, `undo`, `snapshot` and `rollback`, as people type them."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.program import Shell, words
from tests.e2e.sitting import sitting
from tests.patience import until


@pytest.fixture
def changed(shell: Shell) -> Shell:
    (shell.cwd / "keep.txt").write_text("one\ntwo\n")
    assert shell("run", "echo three >> keep.txt; echo new > new.txt").returncode == 0
    return shell


@pytest.mark.once
def test_nothing_is_carried_over_unless_somebody_says_yes(changed: Shell) -> None:
    asked = changed("promote")
    assert asked.returncode == 3 and words(asked).endswith("not promoted: needs --yes\n"), "no kind is protected here"
    assert b"keep.txt" in asked.stdout and not (changed.cwd / "new.txt").exists()
    rehearsed = changed("promote", "--dry-run")
    assert rehearsed.returncode == 0 and not (changed.cwd / "new.txt").exists()
    done = changed("promote", "--yes")
    assert done.returncode == 0 and "promoted 2 changes" in words(done)
    assert (changed.cwd / "keep.txt").read_text() == "one\ntwo\nthree\n" and (changed.cwd / "new.txt").read_text() == "new\n"
    assert changed("promote", "--yes").returncode == 0
    assert "nothing to promote" in words(changed("promote", "--yes"))
    assert changed("undo", "--yes").returncode == 0
    assert (changed.cwd / "keep.txt").read_text() == "one\ntwo\n" and not (changed.cwd / "new.txt").exists()
    nothing = changed("undo", "--yes")
    assert nothing.returncode == 125 and "no promotion to take back" in words(nothing)


@pytest.mark.once
def test_apply_is_the_same_verb(changed: Shell) -> None:
    assert changed("apply", "--yes", "--only", "new.txt").returncode == 0
    assert (changed.cwd / "new.txt").exists() and (changed.cwd / "keep.txt").read_text() == "one\ntwo\n"
    assert changed.json("status")["changes"]["project"] == 1


@pytest.mark.once
def test_a_person_is_asked_and_may_say_no(changed: Shell) -> None:
    with sitting(changed, "promote") as person:
        person.expect(b"Promote 2 changes")
        person.type(b"n\r")
        assert person.end() == 3
    assert not (changed.cwd / "new.txt").exists()
    with sitting(changed, "promote") as person:
        person.expect(b"Promote 2 changes")
        person.type(b"y\r")
        assert person.end() == 0
    assert (changed.cwd / "new.txt").exists()


@pytest.mark.once
def test_yes_does_not_cover_what_is_protected(shell: Shell) -> None:
    shell("run", "mkdir -p .github/workflows; echo 'on: push' > .github/workflows/ci.yml; echo x > x; ln -s /etc/passwd out")
    refused = shell("promote", "--yes")
    assert refused.returncode == 3
    assert "--approve ci" in words(refused) and "--approve links-out" in words(refused)
    assert not (shell.cwd / "x").exists()
    document = shell.json("promote", "--dry-run")
    assert sorted(document["protected"]) == ["ci", "links-out"] and document["carried_over"] is False
    with sitting(shell, "promote", "--yes") as person:
        person.expect(b"protected kind 'ci'?")
        person.type(b"y\r")
        person.expect(b"protected kind 'links-out'?")
        person.type(b"n\r")
        person.expect(b"left out: 1 change of the protected kind 'links-out'")
        assert person.end() == 0
    assert (shell.cwd / "x").exists() and (shell.cwd / ".github/workflows/ci.yml").exists() and not (shell.cwd / "out").is_symlink()
    assert shell("promote", "--yes").returncode == 3
    assert shell("promote", "--yes", "--approve", "ci,links-out").returncode == 0
    assert os.readlink(shell.cwd / "out") == "/etc/passwd"
    unknown = shell("promote", "--yes", "--approve", "everything")
    assert unknown.returncode == 2 and "no protected class 'everything'" in words(unknown)


@pytest.mark.once
def test_reality_that_moved_on_is_refused_and_merged(changed: Shell) -> None:
    (changed.cwd / "keep.txt").write_text("zero\none\ntwo\n")
    refused = changed("promote", "--yes")
    assert refused.returncode == 1 and "changed in reality since" in words(refused) and "--merge" in words(refused)
    assert "moved on, which you changed" in changed("status").stdout.decode()
    assert changed("promote", "--yes", "--merge").returncode == 0
    assert (changed.cwd / "keep.txt").read_text() == "zero\none\ntwo\nthree\n"


@pytest.mark.once
def test_conflicts_are_named_and_can_be_marked(changed: Shell) -> None:
    (changed.cwd / "new.txt").write_text("theirs\n")
    refused = changed("promote", "--yes", "--merge")
    assert refused.returncode == 1 and "both added it" in words(refused)
    assert changed("promote", "--yes", "--merge", "--resolve", "markers").returncode == 0
    marked = (changed.cwd / "new.txt").read_text()
    assert "<<<<<<<" in marked and "new\n" in marked and "theirs\n" in marked
    wrong = changed("promote", "--resolve", "both")
    assert wrong.returncode == 2 and "ours, theirs or markers" in words(wrong)


def test_what_lies_elsewhere_stays_in_the_sandbox(shell: Shell, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shell("run", f"echo x > {elsewhere}/file; echo y > inside")
    done = shell("promote", "--yes")
    assert done.returncode == 0 and "1 change outside the project stays in the sandbox" in words(done)
    assert (shell.cwd / "inside").exists() and not (elsewhere / "file").exists()
    assert shell("promote", "--yes", "--system", "--caches", "--only", str(elsewhere)).returncode == 0
    assert (elsewhere / "file").read_text() == "x\n"


def test_a_fifo_is_never_carried_over_and_the_rest_only_without_it(shell: Shell) -> None:
    shell("run", "mkfifo pipe; echo x > file")
    refused = shell("promote", "--yes")
    assert refused.returncode == 2 and "a FIFO is never promoted" in words(refused)
    assert not (shell.cwd / "file").exists()
    assert shell("promote", "--yes", "--skip", "pipe").returncode == 0
    assert (shell.cwd / "file").exists() and not (shell.cwd / "pipe").exists()


@pytest.mark.once
def test_a_commit_made_inside_can_be_carried_over(shell: Shell) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for line in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *line], cwd=shell.cwd, check=True, capture_output=True)
    made = shell("run", "echo more > more.txt; git add more.txt; git -c user.name=b -c user.email=b@example.org commit -q -m second")
    assert made.returncode == 0, words(made)
    refused = shell("promote", "--yes")
    assert refused.returncode == 3 and "git-history" in words(refused)
    assert shell("promote", "--yes", "--approve", "git-history").returncode == 0
    log = subprocess.run(["git", "log", "--format=%s"], cwd=shell.cwd, check=True, capture_output=True, text=True).stdout
    assert log == "second\nfirst\n"
    assert subprocess.run(["git", "status", "--porcelain"], cwd=shell.cwd, check=True, capture_output=True).stdout == b""
    assert subprocess.run(["git", "fsck", "--strict"], cwd=shell.cwd, capture_output=True, check=False).returncode == 0


def test_a_file_takes_the_new_directories_along_that_it_is_in(shell: Shell) -> None:
    shell("run", "mkdir -p a/b; echo 1 > a/b/wanted; echo 2 > a/b/other; echo 3 > a/third")
    done = shell("promote", "--yes", "--only", "a/b/wanted")
    assert done.returncode == 0, words(done)
    assert [str(path.relative_to(shell.cwd)) for path in sorted((shell.cwd / "a").rglob("*"))] == ["a/b", "a/b/wanted"]
    assert shell.json("status")["changes"]["project"] == 2
    assert shell("run", "cat a/b/wanted a/b/other a/third").stdout == b"1\n2\n3\n"
    assert shell("promote", "--yes").returncode == 0 and (shell.cwd / "a" / "third").exists()
    assert shell("undo", "--yes").returncode == 0 and shell("undo", "--yes").returncode == 0
    assert not (shell.cwd / "a").exists()


def test_a_secret_that_was_hidden_is_not_replaced_and_that_is_said_once(shell: Shell) -> None:
    (shell.cwd / ".env").write_text("KEY=real\n")
    shell("run", "test ! -s .env && echo KEY=guess > .env; echo x > x")
    for more in ((), ("--force",), ("--merge", "--resolve", "ours")):
        refused = shell("promote", "--yes", "--approve", "environment", *more)
        assert refused.returncode == 2 and words(refused).count("hidden from the sandbox") == 2, words(refused)
        assert "1 can never be promoted" in words(refused) and "changed in reality since" not in words(refused)
    assert shell("promote", "--yes", "--skip", ".env").returncode == 0
    assert (shell.cwd / ".env").read_text() == "KEY=real\n" and (shell.cwd / "x").exists()


@pytest.mark.once
def test_what_we_did_ourselves_is_not_told_as_drift(changed: Shell) -> None:
    for line in (("promote", "--yes"), ("undo", "--yes")):
        assert changed(*line).returncode == 0
        assert changed.json("status")["drift"]["moved"] == []
    assert changed("promote", "--yes").returncode == 0 and changed("run", "echo later > later").returncode == 0
    undone = changed("undo", "--yes")
    assert undone.returncode == 0 and "agent-sandbox rollback" in words(undone)
    number = words(undone).split()[-1]
    assert changed("rollback", number).returncode == 0
    assert changed.json("status")["changes"]["project"] == 2, "they wait again"


@pytest.mark.needs_root
@pytest.mark.parametrize(
    ("left", "why"), [(4, "too little room to write to this sandbox"), (128, "bytes are to be written")], ids=["none", "too little"]
)
def test_a_state_directory_without_room_for_the_old_files_is_refused_before_anything_is_done(
    shell: Shell, tmp_path: Path, left: int, why: str
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600m", "tmpfs", small], check=True)
    try:
        there = Shell(shell.cwd, {"AGENT_SANDBOX_STATE": str(small / "state")})
        with (shell.cwd / "big").open("wb") as file:
            file.truncate(128 << 20)
        assert there("run", "--disk", "64M", "echo little > big").returncode == 0
        (image,) = small.glob("state/sandboxes/*/image")
        assert until(lambda: image.stat().st_blocks * 512 <= 16 << 20), "the keeper has returned the room of the image"
        with (small / "fill").open("wb") as fill:
            space = os.statvfs(small)
            os.posix_fallocate(fill.fileno(), 0, space.f_bfree * space.f_frsize - (left << 20))
        assert b"big" in there("promote", "--dry-run").stdout, "what would be promoted can be seen"
        refused = there("promote", "--yes")
        assert refused.returncode == 125 and why in words(refused) and "nothing was changed" in words(refused), words(refused)
        assert (shell.cwd / "big").stat().st_size == 128 << 20 and there.json("status")["changes"]["project"] == 1
        (small / "fill").unlink()
        done = there("promote", "--yes")
        assert done.returncode == 0 and "still holds" not in words(done) and (shell.cwd / "big").read_text() == "little\n"
        assert there("undo", "--yes").returncode == 0 and (shell.cwd / "big").stat().st_size == 128 << 20
    finally:
        subprocess.run(["umount", "-l", small], check=True)


@pytest.mark.needs_root
def test_a_file_that_nobody_may_replace_is_named(changed: Shell) -> None:
    if subprocess.run(["chattr", "+i", changed.cwd / "keep.txt"], check=False, capture_output=True).returncode:
        pytest.skip("this filesystem has no immutable files")
    try:
        refused = changed("promote", "--yes")
        assert refused.returncode == 125 and "Operation not permitted: 'keep.txt'; nothing was changed" in words(refused), words(refused)
        assert not (changed.cwd / "new.txt").exists()
    finally:
        subprocess.run(["chattr", "-i", changed.cwd / "keep.txt"], check=True)
    assert changed("promote", "--yes").returncode == 0


@pytest.mark.once
def test_what_was_changed_under_two_rules_about_files_is_told_and_can_be_left_out(changed: Shell) -> None:
    rules = changed.cwd / "agent-sandbox.toml"
    rules.write_text(f'[files]\nallowed = ["{changed.cwd}"]\n')
    assert changed("run", "echo other >> keep.txt").returncode == 0
    rules.unlink()
    refused = changed("promote", "--yes")
    assert refused.returncode == 2 and "changed under two rules about files" in words(refused)
    assert not (changed.cwd / "new.txt").exists()
    assert changed("promote", "--yes", "--skip", "keep.txt").returncode == 0
    assert (changed.cwd / "new.txt").exists() and (changed.cwd / "keep.txt").read_text() == "one\ntwo\n"


def large(path: Path) -> None:
    """A file larger than what is read at the end of a run. It is nearly all hole."""
    with path.open("wb") as file:
        file.truncate(100 << 20)
        file.write(b"one")


def test_a_large_file_written_right_before_the_run_is_promoted(shell: Shell) -> None:
    large(shell.cwd / "large")
    assert shell("run", "echo more >> large").returncode == 0
    done = shell("promote", "--yes")
    assert done.returncode == 0 and "\r" not in words(done), words(done)
    status = (shell.cwd / "large").stat()
    assert status.st_size == (100 << 20) + 5 and status.st_blocks * 512 < 50 << 20  # it has its holes


def test_a_large_file_rewritten_after_the_run_has_drifted_though_size_and_time_are_the_same(shell: Shell) -> None:
    path = shell.cwd / "large"
    large(path)
    assert shell("run", "echo more >> large").returncode == 0
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"two")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    done = shell("promote", "--yes")
    assert done.returncode == 1 and "changed in reality" in words(done)
    assert path.stat().st_size == 100 << 20 and path.read_bytes().startswith(b"two")


@pytest.mark.once
def test_undo_asks_with_the_time_of_the_promotion_or_without_any(changed: Shell) -> None:
    assert changed("promote", "--yes").returncode == 0
    year = time.strftime("%Y-").encode()
    with sitting(changed, "undo") as person:
        person.expect(b"Take back promotion 1 of " + year)
        person.type(b"n\r")
        assert person.end() == 3
    (begun,) = Path(changed.environment["AGENT_SANDBOX_STATE"]).rglob("begun")
    facts = json.loads(begun.read_text())
    begun.write_text(json.dumps({**facts, "started": 0}))  # the clock of the machine was not set yet
    with sitting(changed, "undo") as person:
        person.expect(b"Take back promotion 1? ")
        person.type(b"y\r")
        assert person.end() == 0


@pytest.mark.needs_root
def test_root_in_a_project_of_another_user_is_told_before_every_write_is_refused(shell: Shell) -> None:
    assert "belongs to" not in words(shell("run", "true"))
    os.chown(shell.cwd, 12345, 12345)
    done = shell("run", "touch new")
    assert done.returncode == 1 and "belongs to user 12345" in words(done) and "sudo -u '#12345'" in words(done)
    shell.cwd.chmod(0o777)
    assert "belongs to" not in words(done := shell("run", "touch new")) and done.returncode == 0
