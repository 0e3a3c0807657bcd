"""Random trees and edits with the real program: all that shows a change agrees with what is promoted."""

from __future__ import annotations

import os
import shutil
from hashlib import sha256
from pathlib import Path
from random import Random
from shlex import quote

import pytest

from agent_sandbox import Workspace
from agent_sandbox.workspace.protected import CLASSES
from tests.e2e.applied import apply
from tests.e2e.program import Shell, tree
from tests.e2e.sitting import sitting

pytestmark = pytest.mark.once

NAMES = ("a.py", "b", "c", "sub/a.py", "sub/d", "deep/er/e", "with blank", "__pycache__/x.pyc", ".npm/hook.js", "q'u\"o")
BINARIES = [bytes([127, 69, 76, 70, 0, 255, number]) * 7 for number in range(4)]
TEXTS = [
    "".join(f"line {number}\n" for number in range(30)),
    "no newline",
    "",
    "one\ntwo\n",
    "".join(f"{number}\n" for number in range(2500)),
]
POOL = {sha256(content).hexdigest(): content for content in (*BINARIES, *(text.encode() for text in TEXTS))}


def make(top: Path, random: Random) -> None:
    """A tree to start from."""
    for name in random.sample(NAMES, 6):
        place = top / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if random.random() < 0.2:
            place.symlink_to("nowhere")
        else:
            place.write_bytes(random.choice((*BINARIES, *(text.encode() for text in TEXTS))))
            place.chmod(random.choice((0o644, 0o755, 0o600)))


def edits(random: Random, top: str) -> str:
    """Lines for bash that change a tree."""
    lines = []
    for _ in range(12):
        one, other = (quote(f"{top}/{name}") for name in random.sample(NAMES, 2))
        binary = "".join(f"\\{byte:03o}" for byte in random.choice(BINARIES))
        lines.append(
            random.choice(
                (
                    f"mkdir -p $(dirname {one}); rm -rf {one}; printf '{binary}' > {one}",
                    f"mkdir -p $(dirname {one}); rm -rf {one}; printf %s {quote(random.choice(TEXTS))} > {one}",
                    f"[ -f {one} ] && sed -i '7s/.*/edited/' {one}",
                    f"[ -f {one} ] && mkdir -p $(dirname {other}) && rm -rf {other} && mv {one} {other} && sed -i '3s/.*/moved/' {other}",
                    f"[ -f {one} ] && [ ! -L {one} ] && chmod {random.choice(('600', '755', '700'))} {one}",
                    f"rm -rf {one}",
                    f"mkdir -p $(dirname {one}); rm -rf {one}; ln -s {quote(random.choice(('a.py', '../x', '/etc/passwd')))} {one}",
                    f"rm -rf $(dirname {one})/er; rm -rf {one}; mkdir -p {one}/inside; echo x > {one}/inside/f",
                )
            )
        )
    return f"cd {quote(top)}\n" + "\n".join(f"{{ {line}; }} 2>/dev/null" for line in lines) + "\ntrue"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("everything", [False, True], ids=["promote", "promote --caches --system"])
def test_applying_what_diff_shows_gives_what_promote_writes(
    shell: Shell, tmp_path: Path, seed: int, everything: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in shell.env.items():
        monkeypatch.setenv(name, value)
    random, beside = Random(seed), tmp_path / "beside"
    make(shell.cwd, random)
    beside.mkdir()
    make(beside, random)
    script = f"{edits(random, str(shell.cwd))}\n{edits(random, str(beside))}"
    assert shell("run", script).returncode == 0
    options, scope = (("--all",), ("--caches", "--system")) if everything else ((), ())
    document = shell.json("diff", *options)
    copies = {top: tmp_path / f"copy of {top.name}" for top in (shell.cwd, beside)}
    for top, copy in copies.items():
        shutil.copytree(top, copy, symlinks=True)
        apply(document, top, copy, POOL)
    digest = document["digest"]
    text = shell("diff", *options).stdout.decode()
    assert text.splitlines()[-1].endswith(f"promote {' '.join(scope)}{' ' * bool(scope)}--expect {digest[:32]}")
    assert shell.json("promote", "--dry-run", *scope)["digest"] == digest
    assert Workspace.over(shell.cwd).diff(everything=everything).digest == digest
    approve = ("--approve", ",".join(CLASSES))
    assert shell("promote", "--yes", *approve, *scope, "--expect", sha256(digest.encode()).hexdigest()).returncode == 3
    while b"another process is promoting to" in (done := shell("promote", "--yes", *approve, *scope, "--expect", digest)).stderr:
        continue  # with --system the whole machine is one tree, and others are at work on it
    assert done.returncode == 0, done.stderr.decode()
    for top, copy in copies.items():
        assert tree(top) == tree(copy)


def test_the_person_who_approves_sees_the_same_changes_and_their_digest(shell: Shell) -> None:
    random = Random(7)
    make(shell.cwd, random)
    (shell.cwd / "agent-sandbox.toml").write_text("[approvals]\npromotions = true\n")
    assert shell("run", edits(random, str(shell.cwd))).returncode == 0
    document = shell.json("diff")
    by_digest = [each for each in document["changes"] if each["place"] == "project" and (each["binary"] or {}).get("after")]
    assert by_digest, "something is shown by its digest"
    with sitting(shell, "promote", "--yes", "--approve", ",".join(CLASSES)) as person:
        person.expect(b"Allow exactly this?")
        person.type(b"n\n")
        seen = person.before.replace(b"\r\n", b"\n")
        assert person.end() == 3
    for each in by_digest:
        assert f"sha256 {each['content_sha256']}".encode() in seen
    for each in (each for each in document["changes"] if each["place"] == "project"):
        for line in (line for hunk in each["hunks"] for line in hunk["lines"] if line["kind"] == "added" and line["text"].isascii()):
            assert f"| +{line['text']}".encode() in seen
    assert f"# Digest of these changes: {document['digest']}".encode() in seen
    assert os.fsencode(document["digest"]) in seen
