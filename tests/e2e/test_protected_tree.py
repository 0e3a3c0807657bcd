"""Changes at the command line whose kind only the resulting tree shows: git's settings, links, hidden files, new packages."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from agent_sandbox import Workspace
from agent_sandbox.errors import Denied
from tests.e2e.program import Shell, tree, words

pytestmark = pytest.mark.once


def git(shell: Shell, *line: str) -> None:
    env = {**shell.environment, "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"}
    env |= {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    subprocess.run(["git", *line], cwd=shell.cwd, env=env, capture_output=True, check=False)


@pytest.fixture
def repository(shell: Shell) -> Shell:
    """A project with a repository whose hooks lie in the tree, with a link, and with a secret."""
    git(shell, "init", "-q", ".")
    git(shell, "config", "core.hooksPath", "tools/hooks")
    (shell.cwd / "pipelines").mkdir()
    os.symlink("pipelines", shell.cwd / ".github")
    (shell.cwd / "requirements.txt").write_text("requests==2.0\n")
    git(shell, "add", "-A")
    git(shell, "commit", "-qm", "first")
    (shell.cwd / ".env").write_text("TOKEN=canary\n")  # not tracked, so it is hidden
    return shell


def refused(shell: Shell, kind: str) -> str:
    """Promote with --yes, see that it is refused for this kind alone and that nothing has changed; return what was said."""
    before = tree(shell.cwd)
    done = shell("promote", "--yes")
    assert done.returncode == 3 and f"protected changes need approval: {kind}\n" in words(done), words(done)
    assert tree(shell.cwd) == before
    return words(done)


def test_a_hook_that_the_real_configuration_leads_to_runs_only_after_its_own_yes(repository: Shell) -> None:
    canary = repository.cwd.parent / "canary"
    hook = f"#!/bin/sh\\ntouch {canary}\\n"
    assert repository("run", f"mkdir -p tools/hooks; printf '{hook}' > tools/hooks/post-checkout; chmod +x tools/hooks/*").returncode == 0
    refused(repository, "git-config")
    git(repository, "checkout", "-qB", "one")
    assert not canary.exists()
    assert repository("promote", "--yes", "--approve", "git-config").returncode == 0
    git(repository, "checkout", "-qB", "two")
    assert canary.exists(), "the control arm: git runs it"


def test_a_bare_repository_in_two_promotions_needs_a_yes_for_the_second(repository: Shell) -> None:
    canary = repository.cwd.parent / "canary"
    settings = f'[core]\\nrepositoryformatversion = 0\\nbare = false\\nworktree = .\\nfsmonitor = "touch {canary}; false"\\n'
    half = f"mkdir -p docs/objects docs/refs; touch docs/objects/x docs/refs/x; printf '{settings}' > docs/config"
    assert repository("run", half).returncode == 0
    assert repository("promote", "--yes").returncode == 0, "without HEAD it is no repository"
    assert repository("run", "echo 'ref: refs/heads/main' > docs/HEAD").returncode == 0
    refused(repository, "git-config")
    git(Shell(repository.cwd / "docs", repository.env), "status")
    assert not canary.exists()
    assert repository("promote", "--yes", "--approve", "git-config").returncode == 0
    git(Shell(repository.cwd / "docs", repository.env), "status")
    assert canary.exists(), "the control arm: git runs it"


def test_a_workflow_behind_a_real_link_needs_its_own_yes(repository: Shell) -> None:
    assert repository("run", "mkdir pipelines/workflows; echo 'on: push' > pipelines/workflows/x.yml").returncode == 0
    refused(repository, "ci")
    assert repository("promote", "--yes", "--approve", "ci").returncode == 0
    assert (repository.cwd / ".github/workflows/x.yml").read_text() == "on: push\n"


def test_a_link_to_what_is_hidden_needs_its_own_yes(repository: Shell) -> None:
    assert repository("run", "mkdir public; ln -s ../.env public/c.txt; ln -s c.txt public/d.txt; test ! -e .env").returncode == 0
    said = refused(repository, "links-to-secrets")
    assert "public/c.txt" in said and "public/d.txt" in said
    assert repository("promote", "--yes", "--approve", "links-to-secrets").returncode == 0
    assert (repository.cwd / "public/d.txt").read_text() == "TOKEN=canary\n", "the control arm: whoever follows it reads the secret"


def test_a_new_dependency_is_shown_with_the_name_that_it_resembles(repository: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    assert repository("run", "printf 'requests==2.1\\nreqeusts\\n' > requirements.txt").returncode == 0
    sentences = ["requests: ==2.0 becomes ==2.1", "reqeusts: new; one letter from requests"]
    said = refused(repository, "new-dependency")
    assert f"requirements.txt: {'; '.join(sentences)}" in said
    assert "; ".join(sentences) in words(repository("diff"))
    for document in (repository.json("diff"), repository.json("promote", "--dry-run")):
        assert list(document["protected"]) == ["new-dependency"]
        assert document["remarks"] == [{"path": f"{repository.cwd}/requirements.txt", "remarks": sentences}]
    for name, value in repository.env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Denied, match="new-dependency"):
        Workspace.over(repository.cwd).promote()
    assert Workspace.over(repository.cwd).promote(approve="new-dependency") is not None


def test_a_plan_is_judged_in_the_same_way(repository: Shell) -> None:
    plan = repository.json("sim", "mkdir public; ln -s ../.env public/c.txt; mkdir -p tools/hooks; echo x > tools/hooks/pre-commit")
    risks = {effect["path"].removeprefix(f"{repository.cwd}/"): effect["risk"]["level"] for effect in plan["changes"]}
    assert risks["public/c.txt"] == risks["tools/hooks/pre-commit"] == "high" and risks["public"] == "low"
    done = repository("carry-out", plan["digest"], "--yes")
    assert done.returncode == 3 and "git-config, links-to-secrets" in words(done)
    assert not (repository.cwd / "public").exists()
    assert repository("carry-out", plan["digest"], "--yes", "--approve", "git-config,links-to-secrets").returncode == 0


def test_the_same_with_changes_outside_the_project(repository: Shell) -> None:
    elsewhere = repository.cwd.parent / "elsewhere"
    elsewhere.mkdir()
    line = f"echo x > {elsewhere}/x; mkdir -p pipelines/workflows tools/hooks; echo x > pipelines/workflows/x.yml; echo x > tools/hooks/x"
    assert repository("run", line).returncode == 0
    done = repository("promote", "--yes", "--system")
    assert done.returncode == 3 and "need approval: ci, git-config\n" in words(done), words(done)
    assert not (elsewhere / "x").exists()


SETTINGS = (
    '[project]\\nname = "x"\\n[tool.ruff]\\nline-length = 100\\n[tool.pytest.ini_options]\\ntestpaths = ["tests"]\\naddopts = "-q"\\n'
)
SOURCES = "src/app.py src/deep/util.ts tests/test_app.py docs/index.md docs/images/a.svg README.md Makefile CHANGELOG.md"
DAY = f"""
mkdir -p src/deep tests docs/images
for name in {SOURCES}; do echo new > $name; done
printf '# pinned\\nrequests==2.0\\n' > requirements.txt
printf '{SETTINGS}' > pyproject.toml
printf '{{"name": "x", "version": "2"}}' > package.json
ln -s src/app.py main.py
ln -s docs/images images
mv src/deep src/deeper
"""


def test_an_ordinary_day_needs_only_yes(repository: Shell) -> None:
    assert repository("run", DAY).returncode == 0
    done = repository("promote", "--yes")
    assert done.returncode == 0, words(done)
    assert (repository.cwd / "images/a.svg").exists() and (repository.cwd / "src/deeper/util.ts").exists()


@pytest.mark.both
def test_nothing_is_promoted_into_the_programs_own_state(shell: Shell, tmp_path: Path) -> None:
    """Where something is compiled on first use, a file planted beside its digest would be run outside of every sandbox."""
    state, beside = tmp_path / "state", tmp_path / "beside"
    shell("run", f"mkdir -p {state}/wasm {beside}; echo canary > {state}/wasm/planted; echo canary > {beside}/control")
    refused = shell("promote", "--system", "--caches", "--yes")
    assert refused.returncode != 0 and b"own state" in refused.stderr and not (state / "wasm/planted").exists() and not beside.exists()
    taken = shell("promote", "--system", "--caches", "--yes", "--skip", f"{state}/**", "--skip", str(state))
    assert (beside / "control").read_text() == "canary\n", taken.stderr
    assert not (state / "wasm/planted").exists()
