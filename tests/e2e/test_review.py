"""The review tells the truth: whatever shows what a promotion would write shows all of it."""

from __future__ import annotations

import os
import shlex
from hashlib import sha256
from pathlib import Path

import pytest

from agent_sandbox import Workspace
from agent_sandbox.errors import Denied, PolicyError
from agent_sandbox.policy.action import Action
from agent_sandbox.policy.decide import Ask
from tests.e2e.program import Shell, tree, words
from tests.e2e.sitting import sitting

pytestmark = pytest.mark.once

EVIL = "20s/.*/evil()/"
LINES = "".join(f"line_{number} = {number}\n" for number in range(1, 41))


@pytest.fixture
def moved(shell: Shell) -> Shell:
    """A project with a text in it, which a run moves and edits in one line."""
    (shell.cwd / "a.py").write_text(LINES)
    assert shell("run", f'mkdir sub; mv a.py sub/b.py; sed -i "{EVIL}" sub/b.py').returncode == 0
    return shell


def test_an_edit_inside_a_rename_is_shown_wherever_a_change_is(moved: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    for form in (("diff",), ("diff", "--all"), ("diff", "--side-by-side"), ("diff", "--patch")):
        shown = moved(*form).stdout.decode()
        assert "evil()" in shown and "line_20" in shown, form
    assert "A +1 -1 +- sub/b.py (renamed)" in moved("diff", "--stat").stdout.decode()
    assert "A +1 -1 +- sub/b.py (renamed)" in moved("promote", "--dry-run").stdout.decode()
    (edited,) = [each for each in moved.json("diff")["changes"] if each["path"].endswith("b.py")]
    assert (edited["added"], edited["removed"]) == (1, 1) and "evil()" in str(edited["hunks"])
    for name, value in moved.env.items():
        monkeypatch.setenv(name, value)
    shown = Workspace.over(moved.cwd).diff()
    assert "+evil()" in shown and "-line_20 = 20" in shown


def test_a_rename_of_which_only_one_half_is_chosen_is_shown_as_what_it_then_is(moved: Shell) -> None:
    gone = moved("diff", "--only", "a.py").stdout.decode()
    assert "renamed" not in gone and gone.count("\n-line_") == 40
    come = moved("diff", "--only", "sub/*").stdout.decode()
    assert "renamed" not in come and come.count("\n+line_") == 39 and "+evil()" in come
    assert "D +0 -40" in moved("promote", "--dry-run", "--only", "a.py").stdout.decode()


def test_the_person_who_approves_a_rename_sees_the_edit_in_it(shell: Shell) -> None:
    (shell.cwd / "a.py").write_text(LINES)
    (shell.cwd / "agent-sandbox.toml").write_text("[approvals]\npromotions = true\n")
    assert shell("run", f'mv a.py b.py; sed -i "{EVIL}" b.py').returncode == 0
    before = tree(Path(shell.cwd))
    with sitting(shell, "promote", "--yes") as person:
        person.expect(b"+evil()")
        person.type(b"n\n")
        assert person.end() != 0
    assert tree(Path(shell.cwd)) == before


PLANTED = (
    'mkdir -p pkg/__pycache__ .npm; echo "evil()" > pkg/__pycache__/helper.py; echo "evil()" > .npm/hook.js; echo "import x" > pkg/a.py'
)


def test_caches_are_folded_and_left_behind_unless_they_are_asked_for(shell: Shell) -> None:
    before = set(tree(shell.cwd))
    assert shell("run", PLANTED).returncode == 0
    folded = shell("diff").stdout.decode()
    assert "evil" not in folded and "# Caches and scratch files: 4 changes, promoted with --caches, shown with --all" in folded
    done = shell("promote", "--yes")
    assert done.returncode == 0 and "4 changes in caches stay in the sandbox (--caches)" in words(done)
    assert set(tree(shell.cwd)) - before == {"pkg", "pkg/a.py"}
    assert shell.json("status")["changes"] == {"project": 0, "elsewhere": 0, "noise": 4}, "they wait in the sandbox"
    assert shell("promote", "--yes", "--caches").returncode == 0
    assert (shell.cwd / "pkg/__pycache__/helper.py").read_text() == (shell.cwd / ".npm/hook.js").read_text() == "evil()\n"


def test_what_is_asked_for_in_caches_is_shown_line_by_line(shell: Shell) -> None:
    assert shell("run", PLANTED).returncode == 0
    assert shell("diff", "--all").stdout.decode().count("\n+evil()\n") == 2
    assert [each["added"] for each in shell.json("diff", "--all")["changes"] if each["path"].endswith(("helper.py", "hook.js"))] == [1, 1]
    preview = shell("promote", "--dry-run", "--caches").stdout.decode()
    assert "pkg/__pycache__/helper.py" in preview and ".npm/hook.js" in preview
    (shell.cwd / "agent-sandbox.toml").write_text("[approvals]\npromotions = true\n")
    with sitting(shell, "promote", "--yes", "--caches") as person:
        for file in (b".npm/hook.js", b"__pycache__/helper.py"):
            person.expect(file)
            person.expect(b"+evil()")
        person.type(b"n\n")
        assert person.end() != 0


def test_a_cache_that_was_there_before_is_named_when_it_changes(shell: Shell) -> None:
    (shell.cwd / "__pycache__").mkdir()
    (shell.cwd / "__pycache__/a.cpython-311.pyc").write_bytes(b"compiled before")
    assert shell("run", "echo x > code.py; echo again > __pycache__/a.cpython-311.pyc; echo x > __pycache__/new.pyc").returncode == 0
    lines = shell("diff").stdout.decode().splitlines()
    assert f"M {shell.cwd}/__pycache__/a.cpython-311.pyc" in lines and not any("new.pyc" in line for line in lines)
    assert shell("promote", "--yes").returncode == 0, "what an interpreter compiled needs no yes of its own: it is left behind"
    assert (shell.cwd / "code.py").exists() and (shell.cwd / "__pycache__/a.cpython-311.pyc").read_bytes() == b"compiled before"
    refused = shell("promote", "--yes", "--caches")
    assert refused.returncode == 3 and "interpreter-startup" in words(refused), "and with them it does"


def test_a_workspace_shows_what_it_would_promote(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in shell.env.items():
        monkeypatch.setenv(name, value)
    assert shell("run", PLANTED).returncode == 0
    workspace = Workspace.over(shell.cwd)
    assert "evil" not in workspace.diff() and "+import x" in workspace.diff()
    assert workspace.diff(everything=True).count("+evil()") == 2
    assert workspace.promote() is not None and not (shell.cwd / "pkg/__pycache__").exists()
    assert workspace.promote(caches=True) is not None and (shell.cwd / "pkg/__pycache__/helper.py").exists()


def test_what_was_typed_before_a_question_is_no_answer_to_it(shell: Shell) -> None:
    assert shell("run", "echo new > made.txt; mkdir -p .github/workflows; echo x > .github/workflows/ci.yml").returncode == 0
    with sitting(shell, "promote", before="read go;") as person:
        person.type(b"go\ny\ny\ny\n")  # the program starts when the answers are there
        person.expect(b"Promote changes of the protected kind 'ci'? [y/N]")
        person.type(b"y\ny\n")  # the second line is typed before its question is there
        person.expect(b"[y]es [n]o [d]iff [s]elect files")
        person.type(b"n\n")
        assert person.end() == 3
    assert not (shell.cwd / "made.txt").exists()
    with sitting(shell, "promote") as person:
        for question in (b"[y/N]", b"[y]es [n]o [d]iff [s]elect files"):
            person.expect(question)
            person.type(b"y\n")
        assert person.end() == 0
    assert (shell.cwd / "made.txt").exists(), "and what was typed after it is"


FORGED = "printf '\\033[2J\\033[H\\033[8m# Effect plan: low risk\\n'; rm -rf src"


def test_a_program_cannot_paint_over_the_plan_that_is_asked_about(shell: Shell) -> None:
    with sitting(shell, "sim", "--no-pager", FORGED, before="read go;") as person:
        person.type(b"go\ny\n")
        person.expect(b"Carry out the plan")
        seen = person.before
        person.type(b"n\n")
        person.end()
    forged, plan = seen.index(b"low risk"), seen.index(b"high risk")
    assert forged < plan, "the real plan is on the terminal before the question, and after all that the program printed"
    assert b"\\x1b[2J" in seen and b"\x1b[2J" not in seen and b"\x1b[8m" not in seen
    assert (shell.cwd / "src").exists(), "and a yes before the question was none"
    with sitting(shell, "diff", "--no-pager", FORGED) as person:
        person.end()
        assert b"\x1b[2J" not in person.seen and b"\\x1b[2J" in person.seen


BINARY = b"\x7fELF\0\1\2\xff" * 20
HIDDEN = (
    "printf '\\177ELF\\000\\001\\002\\377%.0s' $(seq 20) > tool; seq 5000 > long.txt; head -c 9000 /dev/zero | tr '\\0' x > wide.txt;"
    " chmod 750 script; ln -sfn /etc/hosts link; rm was-a-file; mkdir was-a-file;"
    ' python3 -c \'import os; os.setxattr("noted", "user.note", b"secret")\''
)


@pytest.fixture
def hidden(shell: Shell) -> Shell:
    """A project with changes of which a diff does not show the text."""
    for name in ("script", "was-a-file", "noted"):
        (shell.cwd / name).write_text("x\n")
    (shell.cwd / "link").symlink_to("script")
    assert shell("run", HIDDEN).returncode == 0
    return shell


def digests_of_hidden() -> dict[str, str]:
    contents = {"tool": BINARY, "long.txt": "".join(f"{n}\n" for n in range(1, 5001)).encode(), "wide.txt": b"x" * 9000}
    return {name: sha256(content).hexdigest() for name, content in contents.items()}


def test_content_without_its_text_is_shown_by_size_and_digest(hidden: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    known = digests_of_hidden()
    for text in (hidden("diff").stdout.decode(), hidden("diff", "--side-by-side").stdout.decode()):
        for size, name in (("160", "tool"), ("23,893", "long.txt"), ("9,000", "wide.txt")):
            assert f"new content: {size} bytes, sha256 {known[name]}" in text
        for fact in ("old mode 100644", "new mode 100750", "/etc/hosts", "was a file, is a dir"):
            assert fact in text
        assert f"user.note differs: now 6 bytes, sha256 {sha256(b'secret').hexdigest()}" in text
    whole = hidden("diff", "--all").stdout.decode()
    assert known["tool"] in whole and known["long.txt"] not in whole and "\n+5000\n" in whole, "with --all the text itself is shown"
    listed = {Path(each["path"]).name: each for each in hidden.json("diff")["changes"]}
    assert {name: listed[name]["content_sha256"] for name in known} == known and listed["tool"]["binary"]["after"]["bytes"] == 160
    for summary in (hidden("diff", "--stat").stdout.decode(), hidden("promote", "--dry-run").stdout.decode()):
        assert f"0 → 160 bytes; sha256 {known['tool'][:16]}…" in summary and "mode 0644, now 0750" in summary
        assert "link to /etc/hosts" in summary and "was a file, is a dir" in summary
    for name, value in hidden.env.items():
        monkeypatch.setenv(name, value)
    assert all(digest in Workspace.over(hidden.cwd).diff() for digest in known.values())


def test_only_what_was_shown_is_promoted_with_its_digest(shell: Shell) -> None:
    assert shell("run", "echo harmless > made.txt").returncode == 0
    digest = shell.json("diff")["digest"]
    assert shell("diff").stdout.decode().splitlines()[-1] == f"# Promote exactly this: agent-sandbox promote --expect {digest[:32]}"
    before = tree(shell.cwd)
    for evil in ("echo evil1234 > made.txt", "echo evil > another.txt", "chmod +x made.txt", "ln -sfn /etc/passwd made.txt", "rm -r docs"):
        shell("snapshot", "reviewed")
        (shell.cwd / "docs").mkdir(exist_ok=True)
        before = tree(shell.cwd)
        assert shell("run", evil).returncode == 0
        refused = shell("promote", "--yes", "--approve", "links-out", "--expect", digest)
        assert refused.returncode == 3 and digest in words(refused) and "nothing was changed" in words(refused), evil
        document = shell.json("promote", "--yes", "--expect", digest)
        assert document["error"]["refusal"]["rule"] == "expect" and document["exit"] == 3
        assert tree(shell.cwd) == before, evil
        assert shell("rollback", "reviewed").returncode == 0
        assert shell("snapshots", "--forget", "reviewed", "--yes").returncode == 0
    assert b"expect" in shell("log", "--denied").stdout, "the refusals are recorded"
    assert shell("promote", "--yes", "--expect", digest[:11]).returncode == 2
    assert shell("promote", "--yes", "--expect", "of the last diff").returncode == 2
    assert shell("promote", "--yes", "--expect", "").returncode == 2, "a digest that a script failed to read is none"
    done = shell("promote", "--yes", "--expect", digest[:12].upper())
    assert done.returncode == 0 and (shell.cwd / "made.txt").read_text() == "harmless\n", "the first digits of what was shown are enough"
    assert shell("promote", "--yes", "--expect", digest).returncode == 3, "and now there is nothing that has it"


def test_without_a_digest_what_is_there_is_promoted(shell: Shell) -> None:
    """The control of the test above."""
    assert shell("run", "echo harmless > made.txt").returncode == 0
    assert shell("diff").returncode == 0
    assert shell("run", "echo evil1234 > made.txt").returncode == 0
    assert shell("promote", "--yes").returncode == 0 and (shell.cwd / "made.txt").read_text() == "evil1234\n"


def test_the_same_selection_has_the_same_digest(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in shell.env.items():
        monkeypatch.setenv(name, value)
    assert shell("run", f"{PLANTED}; mkdir -p new/deep; echo x > new/deep/file; echo y > other").returncode == 0
    for only in ((), ("new/deep/file",), ("pkg/*",), ("other", "new")):
        options = [word for pattern in only for word in ("--only", pattern)]
        for shown, scope in (((), ()), (("--all",), ("--caches", "--system"))):
            digest = shell.json("diff", *shown, *options).get("digest")
            assert shell.json("promote", "--dry-run", *scope, *options)["digest"] == digest is not None
            assert Workspace.over(shell.cwd).diff(only, everything=bool(shown)).digest == digest
    assert "new dir mode" in shell("diff", "--only", "new/deep/file").stdout.decode(), "a directory made for a file is part of it"
    assert shell.json("diff")["digest"] != shell.json("diff", "--all")["digest"] != shell.json("diff", "--only", "other")["digest"]
    line = shell("diff", "--all", "--only", "pkg/*").stdout.decode().splitlines()[-1].partition("agent-sandbox ")[2]
    assert shell(*shlex.split(line), "--yes").returncode == 0 and (shell.cwd / "pkg/__pycache__/helper.py").exists()
    assert not (shell.cwd / "other").exists()


def test_a_workspace_promotes_only_what_has_the_expected_digest(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in shell.env.items():
        monkeypatch.setenv(name, value)
    workspace = Workspace.over(shell.cwd)
    assert shell("run", "echo harmless > made.txt").returncode == 0
    diff = workspace.diff()
    assert "+harmless" in diff and str(diff) == diff and len(diff.digest) == 64
    assert shell("run", "echo evil1234 > made.txt").returncode == 0
    with pytest.raises(Denied, match=diff.digest):
        workspace.promote(expect=diff.digest)
    for wrong in ("made.txt", ""):
        with pytest.raises(PolicyError):
            workspace.promote(expect=wrong)
    assert not (shell.cwd / "made.txt").exists()
    assert workspace.promote(expect=workspace.diff().digest) is not None
    assert (shell.cwd / "made.txt").read_text() == "evil1234\n"


def test_no_digest_is_printed_of_a_sandbox_in_use(shell: Shell) -> None:
    assert shell("run", "echo x > made.txt").returncode == 0
    with shell.start("run", "echo started; sleep 600") as running:
        assert running.stdout is not None and running.stdout.readline() == b"started\n"
        text, document = shell("diff").stdout.decode(), shell.json("diff")
        running.terminate()
    assert "+x" in text and "--expect" not in text and "# No digest to promote exactly this: " in text
    assert "digest" not in document and "in use" in document["no_digest"]
    assert "--expect" in shell("diff").stdout.decode()


def test_a_run_while_somebody_reads_the_diff_costs_the_digest(shell: Shell) -> None:
    """Otherwise a run could show other content below the screen that is read, and put the hashed content back."""
    assert shell("run", "seq 100000 > a-long.txt; echo evil > z-last.txt").returncode == 0
    with shell.start("diff", "--all", "--no-pager") as reading:
        assert reading.stdout is not None and reading.stdout.readline().startswith(b"diff --git")  # and the rest waits in the pipe
        assert shell("run", "echo harmless > z-last.txt").returncode == 0
        rest = reading.stdout.read().decode()
    assert "+100000" in rest and "--expect" not in rest and "something used the sandbox" in rest
    with shell.start("diff", "--all", "--no-pager") as reading:
        assert reading.stdout is not None and "--expect" in reading.stdout.read().decode()


def looked_at(shell: Shell, *line: str) -> bytes:
    """Return what is on the terminal of a person who answers every question with no."""
    with sitting(shell, *line) as person:
        if line[0] == "promote" and "--dry-run" not in line:
            person.expect(b"[s]elect files")
            person.type(b"\n")
        person.end()
        return person.before + person.seen


def test_promote_says_what_ran_since_the_last_look(shell: Shell) -> None:
    assert shell("run", "echo 1 > made.txt").returncode == 0
    assert b"since its changes were last shown" not in looked_at(shell, "promote"), "an old store knows of no look: nothing is said"
    assert b"since its changes were last shown" not in looked_at(shell, "promote"), "and nothing ran since that one"
    for number in (2, 3):
        assert shell("run", f"echo {number} > made.txt").returncode == 0
    assert "2 runs used the sandbox since its changes were last shown" in words(shell("promote", "--dry-run"))
    assert shell.json("promote", "--dry-run")["since"] == "2 runs used the sandbox", "what a program reads is no look"
    seen = looked_at(shell, "promote")
    assert seen.index(b"2 runs used the sandbox since") < seen.index(b"Promote 1 change")
    assert b"used the sandbox" not in looked_at(shell, "promote")
    shell("snapshot", "here")
    assert b"since its changes" not in looked_at(shell, "promote"), "a snapshot changes nothing"
    assert shell("run", "echo 4 > made.txt").returncode == 0
    assert b"--expect" in looked_at(shell, "diff", "--no-pager")
    assert b"used the sandbox" not in looked_at(shell, "promote"), "the diff was a look"
    assert shell("rollback", "here").returncode == 0
    assert b"the sandbox was restored to another state since" in looked_at(shell, "promote", "--dry-run")
    with sitting(shell, "promote") as person:
        person.expect(b"[s]elect files")
        person.type(b"y\n")
        assert person.end() == 0
    assert shell("run", "echo 5 > made.txt").returncode == 0
    assert b"1 run used the sandbox since" in looked_at(shell, "promote", "--dry-run")
    (shown,) = Path(shell.env["AGENT_SANDBOX_STATE"]).glob("sandboxes/*/shown.json")
    for damaged in (b"", b"[", b"[[1],[]]", b"{}", b"[[], []]", b'[["x"], [1]]'):
        shown.write_bytes(damaged)
        assert shell("promote", "--dry-run").returncode == 0, damaged


def test_the_question_shows_the_diff_and_lets_files_be_chosen(shell: Shell) -> None:
    assert shell("run", "mkdir -p new/deep; echo one > new/deep/one; echo two > new/two; echo three > three").returncode == 0
    with sitting(shell, "promote") as person:
        person.expect(b"Promote 5 changes to ")
        person.expect(b"[y]es [n]o [d]iff [s]elect files ")
        person.type(b"d\n")
        person.expect(b"+three")
        person.expect(b"# Digest of these changes: ")
        person.expect(b"[s]elect files ")
        person.type(b"s\n")
        person.expect(b"(Enter: ask about each): ")
        person.type(b"new/deep/*\n")
        person.expect(b"Promote 3 changes to ")
        person.type(b"\n")
        assert person.end() == 3, "Enter is no"
    assert not (shell.cwd / "new").exists()
    with sitting(shell, "promote") as person:
        person.expect(b"[s]elect files ")
        person.type(b"s\n")
        person.expect(b"(Enter: ask about each): ")
        person.type(b"\n")
        for name, answer in ((b"A new/deep/one?", b"n"), (b"A new/two?", b"y"), (b"A three?", b"q")):
            person.expect(name)
            person.type(answer + b"\n")
        person.expect(b"Promote 2 changes to ")
        person.type(b"y\n")
        assert person.end() == 0
    assert (shell.cwd / "new/two").read_text() == "two\n" and not (shell.cwd / "new/deep").exists() and not (shell.cwd / "three").exists()
    left = [Path(each["path"]).name for each in shell.json("diff")["changes"]]
    assert left == ["deep", "one", "three"], "the others wait in the sandbox"


def test_with_an_expected_digest_no_files_can_be_left_out(shell: Shell) -> None:
    assert shell("run", "echo one > one; echo two > two").returncode == 0
    with sitting(shell, "promote", "--expect", shell.json("diff")["digest"]) as person:
        person.expect(b"[y]es [n]o [d]iff ")
        person.type(b"s\n")
        assert person.end() == 3
    assert not (shell.cwd / "one").exists()


def test_a_refused_kind_is_left_out_and_the_rest_is_promoted(shell: Shell) -> None:
    made = "echo x > made.txt; mkdir -p .github/workflows; echo evil > .github/workflows/ci.yml; ln -s /etc/passwd out"
    assert shell("run", made).returncode == 0
    with sitting(shell, "promote") as person:
        for kind, answer in ((b"'ci'", b"n"), (b"'links-out'", b"y")):
            person.expect(b"protected kind " + kind + b"? [y/N]")
            person.type(answer + b"\n")
        person.expect(b"left out: 3 changes of the protected kind 'ci'")
        person.expect(b"Promote 2 changes to ")
        person.type(b"y\n")
        assert person.end() == 0
    assert (shell.cwd / "made.txt").exists() and (shell.cwd / "out").is_symlink() and not (shell.cwd / ".github").exists()
    assert "evil" in shell("diff").stdout.decode(), "it waits in the sandbox"
    with sitting(shell, "promote") as person:
        person.expect(b"[y/N]")
        person.type(b"n\n")
        assert person.end() == 3, "and where nothing is left, nothing is promoted"
    assert shell("promote", "--yes").returncode == 3, "off a terminal nothing is left out"
    with sitting(shell, "promote") as person:
        person.expect(b"[y/N]")
        person.type(b"y\n")
        person.expect(b"[s]elect files")
        person.type(b"y\n")
        assert person.end() == 0
    assert (shell.cwd / ".github/workflows/ci.yml").read_text() == "evil\n"


def test_promote_names_the_caches_that_it_leaves_behind(shell: Shell) -> None:
    assert shell("run", PLANTED).returncode == 0
    document = shell.json("promote", "--yes")
    left = [os.path.relpath(each["path"], shell.cwd) for each in document["caches"]]
    assert document["outcome"] == "promoted" and left == [".npm", ".npm/hook.js", "pkg/__pycache__", "pkg/__pycache__/helper.py"]
    assert shell.json("promote", "--yes", "--caches")["caches"] == []


def test_a_person_who_approves_the_promotion_of_a_program_sees_its_diff(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in shell.env.items():
        monkeypatch.setenv(name, value)
    (shell.cwd / "agent-sandbox.toml").write_text("[approvals]\npromotions = true\n")
    asked: list[str] = []

    def answer(action: Action, question: Ask) -> bool:
        asked.append(question.details)
        return len(asked) > 1

    workspace = Workspace.over(shell.cwd, approver=answer)
    assert shell("run", f"echo evil > made.txt; {HIDDEN.split(';')[0]}").returncode == 0
    with pytest.raises(Denied):
        workspace.promote()
    assert "+evil" in asked[0] and sha256(BINARY).hexdigest() in asked[0] and workspace.diff().digest in asked[0]
    assert not (shell.cwd / "made.txt").exists()
    assert workspace.promote() is not None and (shell.cwd / "made.txt").exists()


def test_a_digest_is_that_of_what_is_written_where_reality_has_moved_on(shell: Shell) -> None:
    for name in ("a.txt", "b.txt"):
        (shell.cwd / name).write_text("one\ntwo\n")
    assert shell("run", "echo three >> a.txt; echo three >> b.txt; echo new > n.txt").returncode == 0
    digest = shell.json("diff")["digest"]
    (shell.cwd / "n.txt").write_text("new\n")
    assert shell.json("promote", "--dry-run", "--expect", digest)["settled"], "what reality has already is as it was shown"
    (shell.cwd / "a.txt").write_text("zero\none\ntwo\n")
    refused = shell("promote", "--yes", "--merge", "--expect", digest)
    assert refused.returncode == 3 and (shell.cwd / "b.txt").read_text() == "one\ntwo\n", "nobody was shown the merged file"
    merged = shell.json("promote", "--dry-run", "--merge")["digest"]
    assert shell("promote", "--yes", "--merge", "--expect", merged).returncode == 0
    assert (shell.cwd / "a.txt").read_text() == "zero\none\ntwo\nthree\n"
    (shell.cwd / "d").mkdir()
    (shell.cwd / "d/1").touch()
    assert shell("run", "rm -r d").returncode == 0
    digest = shell.json("diff")["digest"]
    (shell.cwd / "d/2").touch()
    assert shell("promote", "--yes", "--force", "--expect", digest).returncode == 3 and (shell.cwd / "d/2").exists()
    assert shell("promote", "--yes", "--force", "--expect", shell.json("diff")["digest"]).returncode == 0 and not (shell.cwd / "d").exists()


def test_many_deletions_that_are_refused_stay_in_the_sandbox(shell: Shell) -> None:
    (shell.cwd / "many").mkdir()
    for number in range(120):
        (shell.cwd / f"many/{number}").touch()
    assert shell("run", "rm -r many; echo x > made.txt").returncode == 0
    with sitting(shell, "promote") as person:
        person.expect(b"protected kind 'bulk-deletion'? [y/N]")
        person.type(b"n\n")
        person.expect(b"left out: 1 change of the protected kind 'bulk-deletion'")
        person.expect(b"Promote 1 change to ")
        person.type(b"y\n")
        assert person.end() == 0
    assert (shell.cwd / "made.txt").exists() and len(list((shell.cwd / "many").iterdir())) == 120
    assert shell("promote", "--yes", "--approve", "bulk-deletion").returncode == 0 and not (shell.cwd / "many").exists()
