"""A guest, or the agent that runs it, tries to get something else promoted or approved than a person was shown."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from agent_sandbox.engine.approvals.question import shown
from agent_sandbox.engine.work import Command, Work
from agent_sandbox.workspace.contents import SMALLEST_UNREMEMBERED
from agent_sandbox.workspace.digests import ContentDigests
from tests.e2e.program import Shell, tree, words
from tests.engine.approvals.test_question import is_clean, question
from tests.engine.test_review import Steps, entries, promotable
from tests.security.conftest import Tell
from tests.security.harness import case

pytestmark = pytest.mark.once


@pytest.fixture
def shell(project: Path, tmp_path: Path) -> Shell:
    return Shell(project, {"AGENT_SANDBOX_STATE": str(tmp_path / "state")})


@pytest.mark.both
@case(185)
def test_what_is_swapped_after_its_review_is_not_promoted(number: int, shell: Shell, tell: Tell) -> None:
    assert shell("run", "echo harmless > made.txt; echo canary > kept.txt").returncode == 0
    digest = shell.json("diff")["digest"]
    swaps = (
        "echo evil1234 > made.txt",  # as many bytes as before
        "touch -r made.txt /var/tmp/t; echo evil1234 > made.txt; touch -r /var/tmp/t made.txt",  # with the old times
        "mv kept.txt made.txt",
        "chmod 755 made.txt",
        "rm made.txt; ln -s kept.txt made.txt",
        'python3 -c \'import os; os.setxattr("made.txt", "user.evil", b"1")\'',
        "echo x > another.txt",
    )
    before = tree(shell.cwd)
    for swap in swaps:
        assert shell("snapshot", "reviewed").returncode == 0
        assert shell("run", swap).returncode == 0
        refused = shell("promote", "--yes", "--expect", digest)
        assert refused.returncode == 3 and "was expected" in words(refused) and tree(shell.cwd) == before, swap
        assert shell("rollback", "reviewed").returncode == 0 and shell("snapshots", "--forget", "reviewed", "--yes").returncode == 0
    assert shell("run", swaps[0]).returncode == 0
    assert shell("promote", "--yes").returncode == 0 and (shell.cwd / "made.txt").read_text() == "evil1234\n"
    tell(f"{len(swaps)} kinds of swap refused, nothing written", control="without --expect the swapped file is promoted")


@case(185)
def test_the_digest_that_is_compared_is_that_of_the_bytes_that_are_written(
    number: int, monkeypatch: pytest.MonkeyPatch, tell: Tell
) -> None:
    from agent_sandbox.engine.promote import Wanted
    from agent_sandbox.errors import Drift

    large = b"x" * (2 * SMALLEST_UNREMEMBERED)
    steps: Steps = [("write", b"a", b"harmless\n"), ("write", b"large", large)]
    with promotable([], steps[:1]) as work:  # a small file is read once: what was hashed is what is written
        proposal = work.proposal(Wanted())
        assert proposal.digest
        _swap(work.layer, "a", b"evil----\n")
        work.promote(proposal)
        assert (work.project / "a").read_bytes() == b"harmless\n"
    with promotable([], steps) as work:
        proposal = work.proposal(Wanted())
        assert proposal.digest
        _swap(work.layer, "large", b"evil" + large[4:])
        with pytest.raises(Drift):
            work.promote(proposal)
        assert entries(work.project) == {}
        monkeypatch.setattr(ContentDigests, "by_path", lambda self: {})
        work.promote(work.proposal(Wanted()))
        assert (work.project / "large").read_bytes().startswith(b"evil")
    said = "of a file that changes between the comparison and the write, what was compared is written, or it is refused"
    tell(said, control="without the digests in the plan the changed one is written")


def _swap(layer: Path, name: str, content: bytes) -> None:
    (file,) = layer.joinpath("upper").rglob(name)
    file.write_bytes(content)


@case(186)
def test_nothing_that_is_promoted_is_without_its_text_or_its_digest(number: int, shell: Shell, tell: Tell) -> None:
    contents = {
        "binary": b"\x7fELF\0\0\xff\xfe" * 9,
        "long": b"".join(b"%d\n" % line for line in range(3000)) + b"evil\n",
        "wide": b" " * 3000 + b"evil\n",
        "was-text": b"\0\xff\xfe" * 30,
    }
    (shell.cwd / "was-text").write_text("text\n")
    (shell.cwd.parent / "contents").mkdir()
    for name, content in contents.items():
        (shell.cwd.parent / "contents" / name).write_bytes(content)
    assert shell("run", "cp ../contents/* .").returncode == 0
    text, document = shell("diff").stdout.decode(), shell.json("diff")
    listed = {Path(each["path"]).name: each["content_sha256"] for each in document["changes"]}
    for name, content in contents.items():
        digest = sha256(content).hexdigest()
        assert digest in text and listed[name] == digest and "+evil" not in text, name
    assert "-text" in text, "and what goes away is shown as text"
    assert "\n+evil\n" in shell("diff", "--all").stdout.decode()
    tell(f"{len(contents)} kinds are shown by size and digest", control="none of their text is in the diff")


@case(187)
def test_a_variable_that_decides_what_runs_is_on_the_approval_screen(number: int, tell: Tell) -> None:
    hostile = {
        "PATH": "/opt/evil:/usr/bin",
        "GIT_SSH_COMMAND": "sh -c 'password=$(evil)'",  # what looks like a secret hides no command
        "LD_PRELOAD": "/opt/evil.so",
        "GIT_ASKPASS": "/opt/evil-askpass",
        "BASH_FUNC_git%%": "() {  evil\n}",
        "NODE_OPTIONS": "--require /opt/evil.js\x1b[2K",
        "UNHEARD_OF": "/opt/evil",
    }
    work = Work(Command(("git", "push")), {**hostile, "GITHUB_TOKEN": "canary", "LANG": "C"})
    text = shown(question(argv=("git", "push"), details=work.text()))
    assert is_clean(text) and "canary" not in text and "LANG" not in text
    lines = text.splitlines()
    for name, value in hostile.items():
        escaped = value.replace("\n", "\\x0a").replace("\x1b", "\\x1b")
        assert f"  |   {name}={escaped}" in lines, name
    assert "evil" not in shown(question(argv=("git", "push")))
    tell(f"{len(hostile)} values are shown, and no secret", control="the command line alone is the same with and without them")
