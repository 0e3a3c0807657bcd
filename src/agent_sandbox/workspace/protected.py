"""Find protected changes. They need an approval of their own, because programs or agents run, obey or trust the changed file unasked.

Pure. Names, modes and link targets decide; for a file that is only sometimes dangerous, its text decides. This module lists everything that
runs by itself when a person opens, builds, commits or enters a project. Ordinary source code is not listed; the diff is for that. A
`Makefile` or a `setup.py` runs only when somebody runs it.
"""

from __future__ import annotations

import json
import posixpath
import stat
from collections.abc import Callable, Iterable, Mapping

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.policy.files import document
from agent_sandbox.policy.paths import contains
from agent_sandbox.workspace.changes import Change, ChangeSet
from agent_sandbox.workspace.escape import components, folded
from agent_sandbox.workspace.nodes import EntryType

if TYPE_CHECKING:
    from typing import Any


def _of(**kinds: tuple[str, ...]) -> dict[str, str]:
    return {name: kind.replace("_", "-") for kind, names in kinds.items() for name in names}


# Entries of `.git` that only record. All others count as configuration: every git version learns to run new things.
GIT_HISTORY = frozenset(
    {
        *("objects", "refs", "logs", "index", "head", "packed-refs", "orig_head", "fetch_head", "merge_head", "merge_msg", "merge_mode"),
        *("cherry_pick_head", "revert_head", "rebase_head", "auto_merge", "commit_editmsg", "squash_msg", "shallow", "description"),
    }
)

NAMES = _of(
    git_config=(".git", ".gitmodules", ".gitattributes", ".gitconfig"),
    ci=(
        *(".gitlab-ci.yml", ".gitlab-ci.yaml", ".travis.yml", "appveyor.yml", ".appveyor.yml", ".drone.yml", ".woodpecker.yml"),
        *(".cirrus.yml", ".cirrus.star", "bitbucket-pipelines.yml", "cloudbuild.yaml", "cloudbuild.yml", "buildspec.yml"),
    ),
    shell_startup=(
        *(".bashrc", ".bash_profile", ".bash_login", ".bash_logout", ".bash_aliases", ".profile", ".zshrc", ".zshenv", ".zprofile"),
        *(".zlogin", ".zlogout", ".kshrc", ".mkshrc", ".cshrc", ".tcshrc", ".login", ".logout", "config.fish", ".inputrc"),
        *(".xprofile", ".xinitrc", ".xsession", ".xsessionrc", ".pam_environment", "crontab", "bash.bashrc", "ld.so.preload"),
    ),
    editor=(
        *(".devcontainer.json", ".exrc", ".vimrc", ".gvimrc", ".nvimrc", ".nvim.lua", ".lvimrc", ".local.vimrc", ".dir-locals.el"),
        *(".dir-locals-2.el", ".emacs", ".kakrc", ".gdbinit", ".lldbinit"),
    ),
    environment=(".envrc", ".flaskenv", ".dev.vars", ".mise.toml", "mise.toml", ".tool-versions", ".direnvrc"),
    package_scripts=(
        *(".npmrc", ".yarnrc", ".yarnrc.yml", ".pnpmfile.cjs", "pnpmfile.js", "binding.gyp", ".pypirc", "pip.conf", "pip.ini", ".gemrc"),
        *(".pre-commit-config.yaml", ".pre-commit-config.yml", ".pre-commit-hooks.yaml", "lefthook.yml", "lefthook.yaml", ".lefthook.yml"),
        *("bunfig.toml", "gradle-wrapper.properties", "init.gradle", ".overcommit.yml", ".huskyrc", ".simple-git-hooks.json"),
    ),
    interpreter_startup=("conftest.py", "sitecustomize.py", "usercustomize.py", ".rprofile", ".irbrc", ".pryrc", ".pdbrc", ".pythonrc"),
    agent_instructions=(
        *("agents.md", "agents.override.md", "claude.md", "claude.local.md", "gemini.md", "qwen.md", ".mcp.json", "mcp.json"),
        *(".cursorrules", ".windsurfrules", ".clinerules", ".goosehints", ".roomodes", ".roorules", "opencode.json", "opencode.jsonc"),
        *("copilot-instructions.md", ".claude.json", "skill.md"),
    ),
    policy=("agent-sandbox.toml",),
)

# A directory, or two nested names: everything in it is protected.
DIRECTORIES = _of(
    ci=(
        *(".github/workflows", ".github/actions", ".gitea/workflows", ".forgejo/workflows", ".circleci", ".buildkite", ".woodpecker"),
        *(".azure-pipelines", ".semaphore", ".teamcity", ".gitlab/ci", ".ci", ".tekton"),
    ),
    shell_startup=(
        *(".config/fish", ".config/autostart", ".config/systemd", ".config/environment.d", ".ssh", "profile.d", "cron.d", "cron.daily"),
        *("cron.hourly", "cron.weekly", "cron.monthly", "etc/systemd", "etc/init.d"),
    ),
    editor=(".vscode", ".idea", ".devcontainer", ".vim", ".nvim", ".config/nvim", ".emacs.d", ".fleet", ".zed", ".helix"),
    package_scripts=(".husky", ".yarn/releases", ".yarn/plugins", ".cargo", ".bundle", ".mvn", ".git-hooks", ".githooks"),
    agent_instructions=(
        *(".cursor", ".claude", ".codex", ".gemini", ".qwen", ".windsurf", ".cline", ".clinerules", ".roo", ".continue", ".kiro"),
        *(".amazonq", ".junie", ".opencode", ".agents", ".github/instructions", ".github/prompts", ".github/agents", ".goose"),
    ),
    # The user's policy file and the system's. A project may be the directory that holds them, or one that they link into.
    policy=(".config/agent-sandbox", "etc/agent-sandbox", "agent-sandbox/policy.toml"),
)

STARTS = {".env.": "environment", ".env-": "environment", "jenkinsfile": "ci", "azure-pipelines": "ci", ".aider": "agent-instructions"}
STARTS |= {".lintstagedrc": "package-scripts", "lint-staged.config": "package-scripts", ".agent-sandbox": "policy"}
NAMES |= {".env": "environment"}
SUFFIXES = {".pth": "interpreter-startup", ".pyc": "interpreter-startup", ".pyo": "interpreter-startup", ".code-workspace": "editor"}
SUFFIXES |= {".sublime-project": "editor", ".env": "environment", ".desktop": "shell-startup"}

POWERS = "setuid"
LINKS, GIT, HISTORY, COLLISION, BULK = "links-out", "git-config", "git-history", "name-collision", "bulk-deletion"
BULK_LIMIT = 100
_MOST_LINKS = 40  # the kernel's limit

# Class names for --approve, each with its reason.
CLASSES: dict[str, str] = {
    POWERS: "it would run with the rights of its owner or with capabilities, whoever starts it",
    LINKS: "a link leads out of the tree, so whoever follows it reads or writes elsewhere",
    GIT: "git runs programs that its configuration, hooks and attributes name",
    HISTORY: "it changes what git has recorded: commits, branches, the index",
    "ci": "it runs on your build machines, with their secrets",
    "shell-startup": "it runs whenever somebody logs in or opens a shell",
    "editor": "an editor runs it, or takes programs to run from it, when the project is opened",
    "environment": "programs take settings and secrets from it, and some run it",
    "package-scripts": "package managers and hooks run it, or take programs to run from it",
    "interpreter-startup": "an interpreter or a test runner runs it without being asked to",
    "agent-instructions": "agents obey it",
    "policy": "it says what sandboxes may do",
    COLLISION: "its name differs from another one only as some systems do not tell apart",
    BULK: f"more than {BULK_LIMIT} files would be deleted at once",
}

Links = Callable[[str], str | None]  # the target of the link that would be at an absolute path; None if there would be no link
Names = Callable[[str], Iterable[str]]  # the names in a real directory
Texts = Callable[[Change], tuple[bytes | None, bytes | None]]  # a file's content before and after, as far as it is available


def no_links(path: str) -> str | None:
    """Return None for every path. It is the `links` function of a tree without links."""
    return None


def classes_of(change: Change, project: str, *, links: Links = no_links, texts: Texts | None = None) -> frozenset[str]:
    """Return the protected classes of a single change. `project` is the root of the tree.

    Without `texts`, every change to a `package.json` or a `pyproject.toml` counts as protected.
    """
    classes = set(classes_of_path(_below(change.path, project)))
    if lends_power(change):
        classes.add(POWERS)
    node = change.after
    if node is not None and node.type is EntryType.SYMLINK and leaves(change.path, node.target, project, links):
        classes.add(LINKS)
    name = folded(posixpath.basename(change.path))
    if name == ".git" and node is not None and node.type is EntryType.DIRECTORY:  # its entries are classified one by one
        classes = (classes - {GIT}) | {HISTORY}
    if name == "agent-sandbox" and (node is None or node.type is not EntryType.DIRECTORY):
        classes.add("policy")  # the directory of a policy file is removed or replaced
    if name == "package.json" and _differ(change, texts, _scripts):
        classes.add("package-scripts")
    if name == "pyproject.toml" and _differ(change, texts, _our_policy):
        classes.add("policy")
    return frozenset(classes)


def classes_of_all(
    changes: ChangeSet,
    project: str,
    *,
    gone: Iterable[str] = (),
    links: Links = no_links,
    names: Names = lambda directory: (),
    texts: Texts | None = None,
    bulk_limit: int = BULK_LIMIT,
) -> dict[str, frozenset[str]]:
    """Return the protected classes of each change that has any, by path. A class of the whole set has the path of the project.

    `gone` are the paths of real entries that would be removed, including all entries below a removed directory.
    """
    classes: dict[str, frozenset[str]] = {}
    removed = {change.path for change in changes if _goes(change)}
    below: dict[str, set[str]] = {}
    lost = 0
    for path in gone:
        top = _top(path, removed)
        if top:
            lost += 1
            below.setdefault(top, set()).update(classes_of_path(_below(path, project)))
    collisions = _collisions(changes, names)
    bare = _bare_repositories(changes)
    for change in changes:
        mine = set(classes_of(change, project, links=links, texts=texts)) | below.get(change.path, set())
        if change.path in collisions:
            mine.add(COLLISION)
        if posixpath.dirname(change.path) in bare:
            mine.add(GIT)
        if mine:
            classes[change.path] = frozenset(mine)
    if lost + sum(change.after is None for change in changes) > bulk_limit:
        classes[project] = classes.get(project, frozenset()) | {BULK}
    return classes


def classes_of_path(path: str) -> frozenset[str]:
    """Return the protected classes that follow from a path alone. The path is relative to the project, or absolute if it lies outside."""
    parts = components(path.lstrip("/"))
    last = parts[-1]
    if ".git" in parts:
        inside = parts[parts.index(".git") + 1 :]
        return frozenset({HISTORY if inside and inside[0] in GIT_HISTORY and "config" not in inside else GIT})
    classes = {NAMES[last]} if last in NAMES else set()
    classes |= {kind for suffix, kind in SUFFIXES.items() if last.endswith(suffix)}
    classes |= {kind for start, kind in STARTS.items() if last.startswith(start)}
    for at in range(len(parts)):
        for length in (1, 2):
            if kind := DIRECTORIES.get("/".join(parts[at : at + length])):
                classes.add(kind)
    return frozenset(classes)


def lends_power(change: Change) -> bool:
    """Return whether the new entry has a set-id bit, a sticky bit or a file capability.

    For a directory only added bits count. Its set-group-id bit never counts: the bit only selects the group of new files, and is inherited
    from the directory above, not set by the guest.
    """
    node = change.after
    if node is None or node.type not in (EntryType.FILE, EntryType.DIRECTORY):
        return False
    bits = node.mode & (stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX)
    if node.type is EntryType.DIRECTORY:
        bits &= ~(stat.S_ISGID | (change.before.mode if change.before else 0))
    return bits != 0 or "security.capability" in node.xattrs


def leaves(path: str, target: str, project: str, links: Links) -> bool:
    """Return whether a link at `path` with this target leads out of the project at any step. Too many links in a row count as leaving."""
    inside = [part for part in posixpath.dirname(path)[len(project.rstrip("/")) :].split("/") if part]
    todo = _steps(target, project, inside)
    followed = 0
    while todo is not None and todo:
        step = todo.pop()
        if step == "..":
            if not inside:
                return True
            inside.pop()
            continue
        inside.append(step)
        further = links(posixpath.join(project, *inside))
        if further is not None:
            inside.pop()
            followed += 1
            onward = _steps(further, project, inside)
            if onward is None or followed > _MOST_LINKS:
                return True
            todo += onward
    return todo is None


def _steps(target: str, project: str, inside: list[str]) -> list[str] | None:
    """Return the names in a link's target, last first; None for an absolute target outside the project.

    An absolute target inside the project also clears `inside`, because its names start at the root of the project.
    """
    if target.startswith("/"):
        if not contains(project, target):
            return None
        inside.clear()
        target = target[len(project.rstrip("/")) :]
    return [part for part in reversed(target.split("/")) if part not in ("", ".")]


def _goes(change: Change) -> bool:
    """Return whether the change would remove or replace a real directory with everything in it."""
    before, after = change.before, change.after
    return before is not None and before.type is EntryType.DIRECTORY and (after is None or after.type is not before.type)


def _top(path: str, directories: set[str]) -> str:
    """Return the directory of `directories` that contains a path; "" if none does."""
    above = posixpath.dirname(path)
    while above not in directories and above not in ("/", ""):
        above = posixpath.dirname(above)
    return above if above in directories else ""


def _below(path: str, project: str) -> str:
    return path[len(project.rstrip("/")) :].lstrip("/") or path if contains(project, path) else path


def _collisions(changes: ChangeSet, names: Names) -> set[str]:
    """Return the added paths whose name may be confused with another name in the same directory, existing or added."""
    gone = {change.path for change in changes if change.after is None}
    spelt: dict[str, dict[str, str]] = {}
    collisions: set[str] = set()
    for change in changes:
        if change.after is None or change.before is not None:
            continue
        directory, name = posixpath.split(change.path)
        if directory not in spelt:
            spelt[directory] = {folded(each): each for each in names(directory) if f"{directory}/{each}" not in gone}
        if spelt[directory].setdefault(folded(name), name) != name:
            collisions.add(change.path)
    return collisions


def _bare_repositories(changes: ChangeSet) -> set[str]:
    """Return directories not called .git that git would take for a bare repository, and whose configured programs git would run."""
    there = {change.path for change in changes if change.after is not None}
    heads = (posixpath.dirname(path) for path in there if posixpath.basename(path) == "HEAD")
    return {top for top in heads if f"{top}/objects" in there and f"{top}/refs" in there}


def _differ(change: Change, texts: Texts | None, part: Callable[[bytes], Any]) -> bool:
    if texts is None:
        return True
    try:
        before, after = (part(text) if text is not None else None for text in texts(change))
    except (ValueError, RecursionError, AttributeError):  # text that we cannot parse may still mean something to the program that obeys it
        return True
    return bool(before != after)


def _scripts(text: bytes) -> Mapping[str, object] | None:
    manifest = json.loads(text)
    hooks = ("scripts", "husky", "lint-staged", "simple-git-hooks", "pre-commit", "gypfile", "packageManager")
    return {name: value for name in hooks if (value := manifest.get(name)) is not None} or None


def _our_policy(text: bytes) -> object:
    return document.loads(text.decode()).get("tool", {}).get("agent-sandbox")
