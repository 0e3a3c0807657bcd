"""Git just works: commits made in a sandbox are carried over to the real repository, while people use git outside."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import zlib
from hashlib import sha1
from pathlib import Path
from shutil import copytree, ignore_patterns, rmtree

import pytest

from agent_sandbox import Workspace
from agent_sandbox.engine import git_objects
from agent_sandbox.errors import Denied, PolicyError
from tests.e2e.cutting import cut_off
from tests.e2e.program import Shell, words

pytestmark = pytest.mark.once

YES = ("promote", "--yes", "--approve", "git-history")
TOKEN = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcw\n-----END PRIVATE KEY-----\n"
SETTINGS = (
    '[user]\n\tname = N\n\temail = n@example.org\n[init]\n\tdefaultBranch = main\n[protocol "file"]\n\tallow = always\n[gc]\n\tauto = 0\n'
)


class Repository:
    """A project under git, and somebody who works in it, inside and outside."""

    def __init__(self, shell: Shell) -> None:
        self.shell, self.top = shell, shell.cwd

    def git(self, *line: str, cwd: Path | None = None) -> str:
        """Run git outside, as people do."""
        done = subprocess.run(["git", *line], cwd=cwd or self.top, env=self.shell.environment, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    def inside(self, line: str) -> str:
        """Run a line of shell in the sandbox."""
        done = self.shell("run", f"set -e; {line}")
        assert done.returncode == 0, done.stdout.decode() + words(done)
        return done.stdout.decode()

    def promote(self, *options: str) -> str:
        done = self.shell(*YES, *options)
        assert done.returncode == 0, words(done)
        return done.stdout.decode()

    def refused(self, *options: str) -> str:
        """Promote, and see that nothing changes. Returns the reason."""
        before = self.state()
        done = self.shell(*YES, *options)
        assert done.returncode != 0 and self.state() == before
        return words(done)

    def state(self) -> dict[str, bytes]:
        """The content of every file, without the objects, which nothing needs before a reference does."""
        files = (path for path in self.top.rglob("*") if path.is_file() and ".git/objects" not in str(path))
        return {str(path.relative_to(self.top)): path.read_bytes() for path in files}

    def titles(self, *of: str) -> list[str]:
        return self.git("log", "--format=%s", *of).splitlines()

    def is_whole(self) -> None:
        """See that git finds no fault in the repository, and no difference to the files."""
        self.git("fsck", "--full", "--strict")
        assert self.git("status", "--short") == ""


@pytest.fixture
def repository(shell: Shell, tmp_path: Path) -> Repository:
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text(SETTINGS)
    marker = shell.cwd / ".git"
    if marker.is_dir():
        marker.rmdir()
    for each in shell.cwd.rglob("*"):
        if each.is_symlink():
            each.unlink()
    made = Repository(Shell(shell.cwd, {**shell.env, "HOME": str(home)}))
    made.git("init", "-q")
    (made.top / "src").mkdir(exist_ok=True)
    for number in range(3):
        (made.top / f"src/{number}.txt").write_text(f"line {number}\n")
    made.git("add", "-A")
    made.git("commit", "-qm", "first")
    return made


@pytest.mark.both
def test_commits_branches_and_tags_are_carried_over_and_taken_back(repository: Repository) -> None:
    repository.inside(
        "echo more >> src/0.txt; git commit -qam 'one: more'; echo new > src/new.txt; git add -A; git commit -qm 'two: new'; "
        "git branch later; git tag -am 'a tag' v1"
    )
    assert "# git: 2 commits on main (" in repository.shell("diff", "--stat").stdout.decode()
    shown = repository.promote()
    assert "# git: 2 commits on main (" in shown and "two: new; one: more" in shown and "# git: later appears at" in shown
    assert repository.titles() == repository.titles("later") == repository.titles("v1") == ["two: new", "one: more", "first"]
    repository.is_whole()
    assert repository.shell("undo", "--yes").returncode == 0
    assert repository.titles("--all") == ["first"] and not (repository.top / "src/new.txt").exists()
    repository.is_whole()
    repository.promote()
    assert repository.titles("later") == ["two: new", "one: more", "first"], "after an undo everything is in the sandbox again"
    repository.is_whole()


def test_git_status_and_git_gc_outside_block_neither_a_promotion_nor_an_undo(repository: Repository) -> None:
    repository.inside(
        "echo more >> src/0.txt; git commit -qam 'one'; git checkout -q -b side; echo s > aside; git add aside; git commit -qm s"
    )
    os.utime(repository.top / "src/1.txt", (1, 1))
    before = (repository.top / ".git/index").read_bytes()
    repository.git("status")
    assert (repository.top / ".git/index").read_bytes() != before, "git has written its index anew"
    repository.git("gc", "-q", "--prune=now")
    repository.promote()
    assert repository.titles("main") == ["one", "first"] and repository.titles("side") == ["s", "one", "first"]
    assert repository.git("symbolic-ref", "HEAD").strip() == "refs/heads/side"
    repository.is_whole()
    os.utime(repository.top / "src/1.txt", (2, 2))
    repository.git("status")
    repository.git("pack-refs", "--all")
    repository.git("gc", "-q")
    assert repository.shell("undo", "--yes").returncode == 0
    assert repository.titles("--branches") == ["first"] and repository.git("branch", "--format=%(refname:short)").split() == ["main"]
    repository.is_whole()


def test_git_gc_inside_is_carried_over_as_commits_only(repository: Repository) -> None:
    repository.inside("for n in 1 2 3; do echo $n >> src/0.txt; git commit -qam c$n; done; git gc -q --prune=now; git pack-refs --all")
    repository.promote()
    assert repository.titles() == ["c3", "c2", "c1", "first"] and not (repository.top / ".git/packed-refs").exists()
    assert not list((repository.top / ".git/objects/pack").iterdir()), "no pack of the guest is copied"
    repository.is_whole()


def test_many_objects_come_as_one_pack_of_ours(repository: Repository) -> None:
    repository.inside("for n in $(seq 120); do echo $n > src/many-$n.txt; done; git add -A; git commit -qm many")
    repository.promote()
    packs = [each.suffix for each in (repository.top / ".git/objects/pack").iterdir()]
    assert sorted(packs) == [".idx", ".pack"] and repository.titles() == ["many", "first"]
    repository.is_whole()


def test_amended_commits_and_stashes_come_with_their_logs(repository: Repository) -> None:
    repository.inside(
        "echo a >> src/0.txt; git commit -qam A; echo b >> src/0.txt; git commit -q --amend -am B; "
        "echo s >> src/1.txt; git stash -q; echo t >> src/2.txt; git stash -q"
    )
    repository.promote()
    assert repository.titles() == ["B", "first"] and len(repository.git("stash", "list").splitlines()) == 2
    assert "commit (amend): B" in repository.git("reflog")
    repository.is_whole()
    repository.git("stash", "pop", "-q")
    assert (repository.top / "src/2.txt").read_text() == "line 2\nt\n"


def test_a_commit_outside_is_never_lost(repository: Repository) -> None:
    repository.inside("echo inside >> src/0.txt; git commit -qam inside")
    (repository.top / "src/1.txt").write_text("outside\n")
    repository.git("commit", "-qam", "outside")
    assert "changed in reality" in repository.refused()
    assert "main has moved on in reality" in repository.refused("--merge")
    shown = repository.shell("diff", "--stat").stdout.decode()
    assert "which drops commits that are there now" in shown and "main has content that no file of this review shows: src/1.txt" in shown
    repository.promote("--merge", "--resolve", "theirs")
    assert repository.titles() == ["outside", "first"] and (repository.top / "src/0.txt").read_text() == "line 0\ninside\n"


def test_what_was_staged_on_both_sides_is_staged(repository: Repository) -> None:
    repository.inside("echo in > inside.txt; git add inside.txt")
    (repository.top / "outside.txt").write_text("out\n")
    repository.git("add", "outside.txt")
    repository.promote()
    assert repository.git("status", "--short").splitlines() == ["A  inside.txt", "A  outside.txt"]


@pytest.mark.both
def test_a_linked_worktree_is_committed_to(repository: Repository, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    repository.git("worktree", "add", "-q", "-b", "side", str(linked))
    there = Repository(Shell(linked, repository.shell.env))
    there.inside("echo more >> src/0.txt; git commit -qam 'in the worktree'")
    assert "# git: 1 commit on side (" in there.promote()
    assert repository.titles("side") == ["in the worktree", "first"] and repository.titles() == ["first"]
    there.is_whole()
    repository.is_whole()
    there.git("status")
    assert there.shell("undo", "--yes").returncode == 0 and there.titles() == ["first"]
    there.is_whole()


@pytest.mark.both
def test_a_git_file_that_names_a_repository_of_others_carries_nothing_there(repository: Repository, tmp_path: Path) -> None:
    """A project whose `.git` file names another repository, which does not know it, writes nothing into that one."""
    apart = tmp_path / "apart"
    apart.mkdir()
    (apart / ".git").write_text(f"gitdir: {repository.top}/.git\n")
    there = Repository(Shell(apart, repository.shell.env))
    there.inside("git checkout -q -f HEAD -- . ; echo x > evil.txt; git add evil.txt; git commit -qm evil")
    before = repository.state()
    there.promote()
    assert (apart / "evil.txt").exists() and repository.state() == before and repository.titles() == ["first"]


def test_a_submodule_is_committed_to(repository: Repository, tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    origin.mkdir()
    repository.git("init", "-q", cwd=origin)
    (origin / "lib.txt").write_text("lib\n")
    repository.git("add", "-A", cwd=origin)
    repository.git("commit", "-qm", "lib", cwd=origin)
    repository.git("submodule", "--quiet", "add", str(origin), "lib")
    repository.git("commit", "-qm", "add lib")
    repository.inside("cd lib; echo more >> lib.txt; git commit -qam 'in lib'; cd ..; git commit -qam 'move lib'")
    shown = repository.promote()
    assert "# git in lib: 1 commit on main (" in shown and "# git: 1 commit on main (" in shown
    assert (
        repository.titles()[0] == "move lib" and repository.git("log", "-1", "--format=%s", cwd=repository.top / "lib").strip() == "in lib"
    )
    repository.is_whole()
    assert repository.git("submodule", "status").startswith(" ")


@pytest.mark.both
def test_a_new_repository_is_carried_over(shell: Shell, repository: Repository) -> None:
    top = repository.top / "new"
    repository.inside("mkdir new; cd new; git init -q; echo x > x; git add x; git commit -qm begun")
    refused = repository.refused()
    assert "git-config" in refused, "its configuration needs its own yes"
    repository.promote("--approve", "git-config")
    assert repository.git("log", "--format=%s", cwd=top).strip() == "begun" and repository.git("status", "--short", cwd=top) == ""
    repository.git("fsck", "--full", "--strict", cwd=top)


def test_a_repository_of_another_hash_is_carried_over(shell: Shell, repository: Repository) -> None:
    top = repository.top / "new"
    top.mkdir()
    repository.git("init", "-q", "--object-format=sha256", cwd=top)
    repository.inside("cd new; echo x > x; git add x; git commit -qm begun; git gc -q")
    repository.promote()
    assert repository.git("log", "--format=%s", cwd=top).strip() == "begun"
    repository.git("fsck", "--full", "--strict", cwd=top)


@pytest.mark.both
def test_no_hook_of_the_real_repository_runs(repository: Repository) -> None:
    canary = repository.top.parent / "canary"
    hook = repository.top / ".git/hooks/reference-transaction"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\necho $1 >> {canary}\n")
    hook.chmod(0o755)
    repository.inside("echo more >> src/0.txt; git -c core.hooksPath=/dev/null commit -qam one")
    canary.unlink(missing_ok=True)
    repository.promote()
    assert repository.titles() == ["one", "first"] and not canary.exists()
    repository.git("branch", "control")
    assert canary.exists(), "the control: git itself runs it"


def loose(kind: str, content: bytes, name: str = "") -> tuple[str, str]:
    """The name of an object, and a line of shell that puts it into the repository, under another name if one is given."""
    whole = f"{kind} {len(content)}\0".encode() + content
    name = name or sha1(whole).hexdigest()
    place, data = f".git/objects/{name[:2]}", zlib.compress(whole).hex()
    write = f"import sys; sys.stdout.buffer.write(bytes.fromhex('{data}'))"
    return name, f'mkdir -p {place}; python3 -c "{write}" > {place}/{name[2:]}; '


def commit_of(tree: str) -> bytes:
    return f"tree {tree}\nauthor N <n@example.org> 1 +0000\ncommitter N <n@example.org> 1 +0000\n\nhostile\n".encode()


BLOB = loose("blob", b"x\n")
HOSTILE_TREES = {
    "a tree with .git": b"40000 .git\0" + bytes.fromhex(BLOB[0]),
    "a tree that leads up": b"100644 ..\0" + bytes.fromhex(BLOB[0]),
    "a tree that is cut off": b"100644 a\0" + bytes.fromhex(BLOB[0])[:-4],
}


@pytest.mark.parametrize("tree", HOSTILE_TREES.values(), ids=HOSTILE_TREES)
def test_malformed_objects_are_refused(repository: Repository, tree: bytes) -> None:
    name, line = loose("tree", tree)
    commit, more = loose("commit", commit_of(name))
    repository.inside(f"{BLOB[1]}{line}{more}echo {commit} > .git/refs/heads/hostile; echo x > src/0.txt")
    assert "its commits cannot be carried over" in repository.refused()
    assert "hostile" not in repository.git("branch")
    repository.promote("--skip", ".git")
    assert (repository.top / "src/0.txt").read_text() == "x\n", "the rest can be promoted"


def test_well_formed_objects_made_by_hand_are_carried_over(repository: Repository) -> None:
    """The control of the tests above and below: what they do by hand is enough for a branch."""
    name, line = loose("tree", b"100644 a\0" + bytes.fromhex(BLOB[0]))
    commit, more = loose("commit", commit_of(name))
    repository.inside(f"{BLOB[1]}{line}{more}echo {commit} > .git/refs/heads/fine")
    repository.promote()
    assert repository.titles("fine") == ["hostile"]
    repository.git("fsck", "--full")


@pytest.mark.parametrize(
    "line",
    [
        loose("commit", commit_of("ab" * 20))[1] + f"echo {loose('commit', commit_of('ab' * 20))[0]} > .git/refs/heads/hostile",
        loose("blob", b"lie\n", name="cd" * 20)[1] + f"echo {'cd' * 20} > .git/refs/heads/hostile",
        f"echo {'ef' * 20} > .git/refs/heads/hostile",
        "echo nonsense > .git/refs/heads/hostile",
        "git rev-parse HEAD > '.git/refs/heads/-hostile'",
        "git rev-parse HEAD > .git/refs/heads/hostile..x",
        "echo 'ref: ../../hostile' > .git/HEAD",
        "printf DIRC > .git/index; git rev-parse HEAD > .git/refs/heads/hostile",
    ],
    ids=["no tree", "another content", "no object", "no name", "an option", "no reference", "no branch", "no index"],
)
def test_what_is_not_whole_is_refused(repository: Repository, line: str) -> None:
    repository.inside(line)
    assert "its commits cannot be carried over" in repository.refused()


def test_a_commit_that_deletes_a_hidden_file_is_refused(repository: Repository) -> None:
    """A mask is never a deletion: the guest cannot see the file, so that `git commit -a` would remove it."""
    secret = repository.top / ".env"
    secret.write_text(f"A=1\n{TOKEN}")
    repository.git("add", "-f", ".env")
    repository.git("commit", "-qm", "a secret")
    repository.inside("test ! -s .env; echo more >> src/0.txt; git commit -qam 'all of it'")
    refused = repository.refused()
    assert "deletes it, and the sandbox cannot see it" in refused and "all of it" in refused and secret.exists()
    repository.inside("git reset -q HEAD~1; git add src; git commit -qm 'only mine'; git status")
    repository.promote()
    assert repository.titles() == ["only mine", "a secret", "first"] and TOKEN in secret.read_text()
    assert repository.git("status", "--short") == "", "and the index still has it"


@pytest.mark.both
def test_a_hidden_file_cannot_be_put_under_git(repository: Repository) -> None:
    (repository.top / ".gitignore").write_text(".env\n")
    repository.git("add", "-A")
    repository.git("commit", "-qm", "ignore")
    (repository.top / ".env").write_text(TOKEN)
    repository.inside("rm -f .env 2>/dev/null; echo mine > .env && git add -f .env && git commit -qm forged || true")
    done = repository.shell(*YES)
    assert (repository.top / ".env").read_text() == TOKEN and (done.returncode != 0 or repository.titles() == ["ignore", "first"])


def test_content_that_only_a_commit_has_is_named_and_its_kind_counts(repository: Repository) -> None:
    plant = "git checkout -q -b side; mkdir -p {0}; echo x > {0}/x.yml; git add -A; git commit -qm planted; git checkout -q main"
    repository.inside(plant.format(".github/workflows"))
    shown = repository.shell("diff", "--stat").stdout.decode()
    assert "side has content that no file of this review shows: .github/workflows/x.yml (587be6b, 2 bytes)" in shown
    assert "ci" in repository.refused()
    repository.promote("--approve", "ci")
    repository.inside(plant.format("docs").replace("side", "other"))
    repository.promote(), "the control: an ordinary file needs no more"


def test_a_replacement_of_objects_counts_as_configuration(repository: Repository) -> None:
    repository.inside("echo evil > src/0.txt; git commit -qam evil; git replace HEAD~1 HEAD; git reset -q --hard HEAD~1")
    assert "git-config" in repository.refused()


def test_a_title_cannot_act_on_a_terminal(repository: Repository) -> None:
    repository.inside("echo m >> src/0.txt; git commit -qam \"$(printf 'a\\033[2Jb')\"")
    shown = repository.shell("diff", "--stat").stdout
    assert b"\x1b" not in shown and b"a\\x1b[2Jb" in shown


def test_a_directory_that_has_gone_outside_blocks_nothing_for_good(repository: Repository) -> None:
    repository.inside("echo z > src/new.txt")
    rmtree(repository.top / "src")
    assert "changed in reality" in repository.refused()
    repository.promote("--merge")
    assert (repository.top / "src/new.txt").read_text() == "z\n"
    assert repository.shell("undo", "--yes").returncode == 0 and not (repository.top / "src").exists()


@pytest.mark.slow
def test_a_day_in_a_repository_of_hundreds_of_files(repository: Repository) -> None:
    """Edits, tests, commits, a branch and a clean-up inside; a prompt, edits and a clean-up outside; promotion and undo."""
    library = Path(sysconfig.get_path("stdlib"))
    for package in ("asyncio", "collections", "email", "encodings", "http", "importlib", "json", "logging", "unittest", "xml"):
        copytree(library / package, repository.top / package, ignore=ignore_patterns("__pycache__"))
    (repository.top / ".gitignore").write_text("__pycache__\n")
    repository.git("add", "-A")
    repository.git("commit", "-qm", "the library")
    prompt = ("status", "--short", "--branch")
    repository.inside("sed -i 's/raise TypeError/raise  TypeError/' json/*.py; python3 -c 'import json; json.loads(\"[1]\")'")
    repository.git(*prompt)
    repository.inside("git commit -qam 'json: two blanks'; echo '# more' >> email/utils.py; git add -A; git commit -qm 'email: more'")
    os.utime(repository.top / "http/client.py", (1, 1))
    repository.git(*prompt)
    repository.git("gc", "-q")
    (repository.top / "http/notes.txt").write_text("mine\n")
    repository.inside(
        "git checkout -q -b wip; rm -r xml/sax; git mv http/client.py http/web.py; git commit -qam 'wip: move'; "
        " git checkout -q main; git gc -q"
    )
    repository.git(*prompt)
    shown = repository.promote()
    assert "# git: 2 commits on main (" in shown and "# git: wip appears at" in shown
    assert repository.titles()[:2] == ["email: more", "json: two blanks"] and repository.titles("wip", "--")[0] == "wip: move"
    repository.git("fsck", "--full", "--strict")
    assert repository.git("status", "--short") == "?? http/notes.txt\n"
    repository.git("checkout", "-q", "wip")
    assert (repository.top / "http/web.py").exists()
    repository.git("checkout", "-q", "main")
    repository.git("gc", "-q")
    done = repository.shell("undo", "--yes")
    assert done.returncode == 0, words(done)
    assert repository.titles("--branches") == ["the library", "first"]
    assert repository.git("status", "--short") == "?? http/notes.txt\n"


def test_a_repository_in_which_git_is_at_work_is_left_alone(repository: Repository) -> None:
    repository.inside("echo more >> src/0.txt; git commit -qam one")
    (repository.top / ".git/index.lock").touch()
    assert "git is at work there" in repository.refused()
    (repository.top / ".git/index.lock").unlink()
    repository.promote()
    assert repository.titles() == ["one", "first"]


def test_objects_that_unpack_to_too_much_are_refused(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small pack of zeros must not fill the disk of the host."""
    for name, value in repository.shell.env.items():
        monkeypatch.setenv(name, value)
    repository.inside("head -c 9M /dev/zero > big; git add big; git commit -qm big; rm big")
    workspace = Workspace.over(repository.top)
    monkeypatch.setattr(git_objects, "_MOST_WRITTEN", 8 << 20)
    with pytest.raises(PolicyError, match="larger than 8 MiB"):
        workspace.promote(approve="git-history")
    monkeypatch.setattr(git_objects, "_MOST_WRITTEN", 10 << 20)
    workspace.promote(approve="git-history")
    assert repository.titles() == ["big", "first"], "the control"


def test_a_repository_under_another_name_counts_as_configuration(repository: Repository) -> None:
    """git takes any directory with these files for a repository, and runs what its configuration names."""
    repository.inside("git init -q --bare docs; git -C docs config core.fsmonitor 'touch /tmp/x'")
    assert "git-config" in repository.refused()
    repository.inside("rm -r docs; mkdir docs; echo plain > docs/HEAD")
    repository.promote(), "the control"


def test_a_guest_cannot_lead_a_promotion_into_another_repository(repository: Repository, tmp_path: Path) -> None:
    """A directory in the sandbox that names another repository as its own must not have references written there."""
    victim = tmp_path / "victim"
    victim.mkdir()
    repository.git("init", "-q", cwd=victim)
    for number in range(2):
        (victim / "f").write_text(f"{number}\n")
        repository.git("add", "f", cwd=victim)
        repository.git("commit", "-qm", f"v{number}", cwd=victim)
    old = repository.git("rev-parse", "HEAD~1", cwd=victim).strip()
    before = repository.git("rev-parse", "HEAD", cwd=victim)
    repository.inside(
        f"mkdir -p build/x/refs/heads build/x/objects; echo 'ref: refs/heads/main' > build/x/HEAD; echo {victim}/.git > build/x/commondir; "
        f"echo {old} > build/x/refs/heads/main; echo hi > note.txt"
    )
    for options in ((), ("--skip", "build/x/commondir", "--skip", "build/x/HEAD"), ("--approve", "git-config")):
        repository.shell(*YES, *options)
        assert repository.git("rev-parse", "HEAD", cwd=victim) == before, options
    assert (repository.top / "note.txt").exists()


@pytest.mark.parametrize("packed", [False, True], ids=["loose", "packed"])
@pytest.mark.parametrize("options", [(), ("--merge", "--resolve", "theirs"), ("--force",)], ids=["plain", "theirs", "force"])
def test_a_branch_below_another_is_never_destroyed(repository: Repository, packed: bool, options: tuple[str, ...]) -> None:
    repository.inside("git branch a; git commit -q --allow-empty -m inside")
    repository.git("checkout", "-q", "-b", "a/b")
    repository.git("commit", "-q", "--allow-empty", "-m", "outside")
    repository.git("checkout", "-q", "main")
    if packed:
        repository.git("pack-refs", "--all")
        rmtree(repository.top / ".git/refs/heads/a", ignore_errors=True)
    assert "a and a/b cannot both exist" in repository.refused(*options)
    assert repository.titles("a/b", "--") == ["outside", "first"]
    repository.is_whole()


def test_a_back_dated_commit_counts(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the history is, and whatever time a commit claims, its content is compared."""
    for name, value in repository.shell.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(git_objects, "_MOST_COMMITS", 2)
    for number in range(5):
        repository.git("commit", "-q", "--allow-empty", "-m", str(number))
    repository.inside(
        "git checkout -q -b evil; mkdir -p .github/workflows; echo x > .github/workflows/x.yml; git add -A; "
        "GIT_COMMITTER_DATE='@1 +0000' git commit -qm evil; git checkout -q main"
    )
    with pytest.raises(Denied, match="ci"):
        Workspace.over(repository.top).promote(approve="git-history")


def test_a_tag_on_a_tree_shows_its_content(repository: Repository) -> None:
    repository.inside(
        "mkdir -p .github/workflows; echo x > .github/workflows/x.yml; git add -A; git tag evil $(git write-tree); git rm -rqf .github"
    )
    assert "ci" in repository.refused()


def test_trees_without_end_are_refused_and_nobody_waits(repository: Repository) -> None:
    rows = "for d in 0 1 2 3 4 5 6 7 8 9; do printf '040000 tree %s\\td%s\\n' $T $d; done"
    line = f"T=$(git mktree < /dev/null); for n in 1 2 3 4 5 6 7 8; do T=$({rows} | git mktree); done; "
    repository.inside(line + "git update-ref refs/heads/bomb $(git commit-tree -m bomb -p HEAD $T)")
    assert "unexamined" in repository.refused()
    repository.inside("git update-ref -d refs/heads/bomb")
    deep = "import subprocess as s\ndef git(*w, i=b''): return s.run(['git', *w], input=i, stdout=s.PIPE, check=True).stdout.strip()\n"
    deep += "t = git('hash-object', '-w', '--stdin', i=b'x')\nkind = b'100644 blob'\n"
    deep += "for n in range(1500): t, kind = git('mktree', i=kind + b' ' + t + b'\\td\\n'), b'040000 tree'\n"
    deep += "git('update-ref', 'refs/heads/deep', git('commit-tree', '-m', 'deep', t.decode()).decode())\n"
    (repository.top / "deep.py").write_text(deep)
    repository.inside("python3 deep.py")
    assert b"Traceback" not in repository.shell("diff", "--stat").stderr
    assert repository.shell(*YES).returncode in (0, 3)


def test_a_reference_with_odd_bytes_is_refused_or_kept(repository: Repository) -> None:
    repository.inside("printf 'ref: refs/heads/b\\377x\\n' > .git/refs/heads/sym")
    assert b"Traceback" not in repository.shell("diff", "--stat").stderr
    done = repository.shell(*YES)
    assert b"Traceback" not in done.stderr
    assert done.returncode != 0 or (repository.top / ".git/refs/heads/sym").read_bytes() == b"ref: refs/heads/b\xffx\n"


def test_a_branch_whose_name_holds_a_line_separator_is_not_taken_for_another(repository: Repository) -> None:
    first = repository.git("rev-parse", "main")
    repository.git("branch", "main\u2028x", repository.git("commit-tree", "main^{tree}", "-m", "other").strip())
    repository.git("pack-refs", "--all")
    repository.inside("echo more >> src/0.txt; git commit -qam second")
    shown = repository.promote()
    assert repository.titles("main") == ["second", "first"] and f"({first[:7]} to " in shown
    repository.shell("undo", "--yes")
    assert repository.git("rev-parse", "main") == first, "the old value is that of main, not of the other branch"


def test_an_undo_never_names_a_commit_that_git_has_removed(repository: Repository) -> None:
    repository.git("checkout", "-q", "-b", "side")
    repository.git("commit", "-q", "--allow-empty", "-m", "side")
    repository.git("checkout", "-q", "main")
    repository.inside("git branch -q -D side")
    repository.promote()
    repository.git("branch", "side/below")  # the log of the branch does not stand in the way
    repository.git("branch", "-D", "side/below")
    repository.git("reflog", "expire", "--expire=now", "--all")
    repository.git("gc", "-q", "--prune=now")
    done = repository.shell("undo", "--yes")
    assert done.returncode != 0 and "has changed since the promotion" in words(done)
    repository.git("log", "--all")
    repository.is_whole()


def test_a_merge_cannot_delete_a_hidden_file_by_an_empty_history(repository: Repository) -> None:
    (repository.top / "secret.pem").write_text(TOKEN)
    repository.git("add", "-f", "secret.pem")
    repository.git("commit", "-qm", "a key")
    repository.inside(
        "T=$(git rev-parse main); git checkout -q --orphan empty; git rm -rq --cached .; git commit -q --allow-empty -m empty; "
        "N=$(git commit-tree -m merged -p $T -p HEAD $(git rev-parse HEAD^{tree})); git update-ref refs/heads/main $N; "
        "git checkout -q -f main"
    )
    assert "secret.pem" in repository.refused() and (repository.top / "secret.pem").exists()


def test_a_worktree_that_is_made_inside_brings_its_branch(repository: Repository) -> None:
    repository.inside("git worktree add -q wt -b side; cd wt; echo x > x; git add x; git commit -qm 'in wt'")
    repository.promote("--skip", ".git/worktrees", "--skip", "wt")
    assert repository.titles("side", "--") == ["in wt", "first"]


@pytest.mark.both
def test_killed_between_objects_and_references_it_is_as_before(repository: Repository) -> None:
    repository.inside("echo more >> src/0.txt; git checkout -q -b deep/er; git commit -qam one")
    before = repository.state()
    cut_off(repository.shell, "agent_sandbox.engine.promote:promote", *YES)
    assert repository.state() == before and repository.titles("--all") == ["first"]
    assert len(list((repository.top / ".git/objects").glob("??/*"))) > 6, "the objects are there, and nothing refers to them"
    repository.is_whole()
    repository.promote()
    assert repository.titles("deep/er", "--") == ["one", "first"]
    repository.is_whole()


def test_the_digest_of_a_review_outlives_a_prompt_and_a_clean_up_outside(repository: Repository) -> None:
    repository.inside("echo more >> src/0.txt; git commit -qam one; git gc -q")
    digest = repository.shell.json("diff")["digest"]
    os.utime(repository.top / "src/1.txt", (1, 1))
    repository.git("status")
    repository.git("gc", "-q")
    repository.promote("--expect", digest)
    assert repository.titles() == ["one", "first"]
    repository.inside("echo again >> src/0.txt; git commit -qam two")
    digest = repository.shell.json("diff")["digest"]
    repository.inside("git commit -q --amend --no-edit --date=2001-01-01T00:00:00")
    assert "was expected" in repository.refused("--expect", digest), "the control"
