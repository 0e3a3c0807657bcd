"""Find protected changes. They need an approval of their own, because programs or agents run, obey or trust the changed file unasked.

Pure. Names, modes and link targets decide; for a file that is only sometimes dangerous, its text decides. This module lists everything that
runs by itself when a person opens, builds, commits or enters a project. Ordinary source code is not listed; the diff is for that. A
`Makefile` or a `setup.py` runs only when somebody runs it.

The resulting tree is judged, not the change alone: `aliases` finds the other names of a file, `git.settings` the files that git's real
configuration names, `tool_settings` the texts that name code to run, and `dependencies` the new packages.
"""

from __future__ import annotations

import posixpath
import stat
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import pairwise

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.policy.paths import contains
from agent_sandbox.workspace import tool_settings
from agent_sandbox.workspace.changes import Change, ChangeSet
from agent_sandbox.workspace.escape import components, folded
from agent_sandbox.workspace.nodes import EntryType
from agent_sandbox.workspace.progress import NO_PROGRESS, Progress

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

# The same for other systems of version control. Names that are configuration at any depth are in `_CONFIGURATION`.
RECORDS: dict[str, frozenset[str]] = {
    ".git": GIT_HISTORY,
    ".hg": frozenset({"store", "dirstate", "branch", "bookmarks", "cache", "last-message.txt", "00changelog.i", "undo.dirstate"}),
    ".jj": frozenset({"repo", "working_copy"}),
    ".sl": frozenset({"store", "dirstate", "treestate", "bookmarks", "cache", "blackbox", "last-message.txt", "00changelog.i"}),
    ".svn": frozenset({"wc.db", "wc.db-journal", "pristine", "entries", "format", "tmp"}),
    ".bzr": frozenset({"repository", "checkout"}),
}
_CONFIGURATION = frozenset({"config", "config.toml", "hooks", "git_target", "hgrc", "hgrc-not-shared"})

NAMES = _of(
    git_config=(*RECORDS, ".gitmodules", ".gitattributes", ".gitconfig", ".lfsconfig", ".hgsub", ".hgrc", ".arcconfig", ".arclint"),
    ci=(
        *(".gitlab-ci.yml", ".gitlab-ci.yaml", ".travis.yml", "appveyor.yml", ".appveyor.yml", ".drone.yml", ".woodpecker.yml"),
        *(".cirrus.yml", ".cirrus.star", "bitbucket-pipelines.yml", "cloudbuild.yaml", "cloudbuild.yml", "buildspec.yml"),
        *("bitrise.yml", "codemagic.yaml", "circle.yml", "wercker.yml", ".scrutinizer.yml", ".taskcluster.yml", ".zuul.yaml", "zuul.yaml"),
        *(".build.yml", ".readthedocs.yaml", ".readthedocs.yml", "netlify.toml", "vercel.json", "render.yaml", "action.yml", "action.yaml"),
        *("renovate.json", "renovate.json5", ".renovaterc", ".renovaterc.json", ".woodpecker.yaml", ".drone.star", ".drone.jsonnet"),
        *("vercel.ts", "vercel.js", "vercel.mjs", ".cnb.yml", ".cirun.yml", ".goreleaser.yml", ".goreleaser.yaml", ".mergify.yml"),
        *("codefresh.yml", "screwdriver.yaml", ".vela.yml", ".packit.yaml", ".evergreen.yml", "jitpack.yml", "amplify.yml"),
        *("railway.toml", "railway.json", "dagger.json"),
    ),
    shell_startup=(
        *(".bashrc", ".bash_profile", ".bash_login", ".bash_logout", ".bash_aliases", ".profile", ".zshrc", ".zshenv", ".zprofile"),
        *(".zlogin", ".zlogout", ".kshrc", ".mkshrc", ".cshrc", ".tcshrc", ".login", ".logout", "config.fish", ".inputrc"),
        *(".xprofile", ".xinitrc", ".xsession", ".xsessionrc", ".pam_environment", "crontab", "bash.bashrc", "ld.so.preload"),
        *(".tmux.conf", ".screenrc", ".wezterm.lua", ".lessfilter", ".selected_editor", ".bash_functions", ".xonshrc", "rc.elv"),
        *("config.nu", "env.nu", "starship.toml", "kitty.conf", ".mailcap", ".muttrc", "profile.ps1"),
        *("microsoft.powershell_profile.ps1", "microsoft.vscode_profile.ps1"),
    ),
    editor=(
        *(".devcontainer.json", ".exrc", ".vimrc", ".gvimrc", ".nvimrc", ".nvim.lua", ".lvimrc", ".local.vimrc", ".dir-locals.el"),
        *(".dir-locals-2.el", ".emacs", ".kakrc", ".gdbinit", ".gdbearlyinit", ".lldbinit", ".lazy.lua", ".vimspector.json"),
        *(".ycm_extra_conf.py", ".luarc.json", ".luarc.jsonc", ".luarc", ".clangd", ".solargraph.yml", ".kateproject", ".tern-project"),
        *(".gitpod.yml", ".gitpod.dockerfile", ".replit", "replit.nix", ".stackblitzrc", "devfile.yaml", "omnisharp.json", "hie.yaml"),
        # Language servers run these when a project is opened.
        *("build.rs", "build.gradle", "build.gradle.kts", "settings.gradle", "settings.gradle.kts", "mix.exs", "package.swift"),
        *("directory.build.props", "directory.build.targets", ".project", ".factorypath", "platformio.ini", "directory.build.rsp"),
        *("directory.packages.props", "directory.solution.props", "directory.solution.targets", "msbuild.rsp", "global.json"),
        *("build.zig", "build.mill", "build.sc", "lakefile.lean", "rebar.config", "rebar.config.script", "setup.hs", "setup.lhs"),
        *("config.nims", "project.clj", "cmakelists.txt", "cmakepresets.json", "cmakeuserpresets.json"),
        *(".devfile.yaml", "devfile.yml", ".devfile.yml", ".neoconf.json", ".phpactor.json", ".phpactor.yml"),
    ),
    environment=(
        *(".envrc", ".flaskenv", ".dev.vars", ".mise.toml", "mise.toml", ".tool-versions", ".direnvrc", ".rtx.toml", ".asdfrc"),
        *("flake.nix", "shell.nix", "devbox.json", "devenv.nix", "devenv.yaml", "pixi.toml", ".autoenv", ".autoenv.zsh", ".renviron"),
        *(".curlrc", ".wgetrc", ".netrc", ".user.ini", ".htaccess", "devenv.local.nix", "default.nix", ".versions.conf", ".ondirrc"),
    ),
    package_scripts=(
        *(".npmrc", ".yarnrc", ".yarnrc.yml", ".pnpmfile.cjs", "pnpmfile.js", "binding.gyp", ".pypirc", "pip.conf", "pip.ini", ".gemrc"),
        *(".pre-commit-config.yaml", ".pre-commit-config.yml", ".pre-commit-hooks.yaml", "lefthook.yml", "lefthook.yaml", ".lefthook.yml"),
        *("bunfig.toml", "gradle-wrapper.properties", "init.gradle", ".overcommit.yml", ".huskyrc", ".simple-git-hooks.json"),
        *("uv.toml", "poetry.toml", "pdm.toml", ".pdm.toml", ".condarc", "nuget.config", ".bazelrc", ".bazeliskrc", ".buckconfig"),
        *("gradle.properties", ".sbtopts", ".jvmopts", "pnpm-workspace.yaml", "prek.toml", "hk.pkl", "captainhook.json", ".czrc"),
        *("grumphp.yml", "grumphp.yaml", "grumphp.yml.dist", "dotnet-tools.json"),
    ),
    tool_config=(
        *("rust-toolchain", "rust-toolchain.toml", ".pylintrc", "pylintrc", ".pylintrc.toml", "pylintrc.toml", ".sqlfluff", ".rspec"),
        *(".rubocop.yml", ".standard.yml", ".ruby-lsp.yml", ".simplecov", ".ansible.cfg", "ansible.cfg", ".terraformrc", "terraform.rc"),
        *(".formatter.exs", ".credo.exs", "nx.json", ".nycrc", ".nycrc.json", ".swcrc", ".taprc", ".remarkrc", "hatch.toml"),
        *(".php-cs-fixer.php", ".php-cs-fixer.dist.php", "rector.php", "ecs.php", "phpstan.neon", "phpstan.neon.dist", "psalm.xml"),
        *("psalm.xml.dist", ".tflint.hcl", "nextest.toml", "dprint.json", ".dprint.json", "dprint.jsonc", ".dprint.jsonc"),
    ),
    interpreter_startup=(
        *("conftest.py", "sitecustomize.py", "usercustomize.py", ".rprofile", ".irbrc", ".pryrc", ".pdbrc", ".pdbrc.py", ".pythonrc"),
        *(".ghci", ".iex.exs", ".ocamlinit", ".perldb", ".rdbgrc", ".byebugrc", "ipython_config.py", "jupyter_server_config.py"),
        *("jupyter_notebook_config.py", "jupyter_lab_config.py", "pyvenv.cfg", "entry_points.txt"),  # pytest loads plugins by the last
        *("startup.jl", ".octaverc", ".psqlrc", ".sqliterc", ".mongorc.js", ".mongoshrc.js"),
    ),
    agent_instructions=(
        *("agents.md", "agents.override.md", "claude.md", "claude.local.md", "gemini.md", "qwen.md", ".mcp.json", "mcp.json"),
        *(".cursorrules", ".windsurfrules", ".clinerules", ".goosehints", ".roomodes", ".roorules", "opencode.json", "opencode.jsonc"),
        *("copilot-instructions.md", ".claude.json", "skill.md", "agent.md", ".rules", "warp.md", "crush.md", "crush.json", ".crush.json"),
        *(".augment-guidelines", ".kilocodemodes", ".kilocoderules", "mcp_config.json", "mcp_settings.json", "mcp-config.json"),
        *("codex.md", "iflow.md", "codebuddy.md", "hermes.md", ".hermes.md", "soul.md", "heartbeat.md", "replit.md", "ai_rules.md"),
        *("knowledge.md", "codebuff.json", "gptme.toml", "forge.yaml", "forge.yml", "firebender.json", "conductor.json"),
        *(".continuerules", ".sweep.yaml", "sweep.yaml", ".worktreeinclude"),
    ),
    policy=("agent-sandbox.toml",),
)

# A directory, or two nested names: everything in it is protected.
DIRECTORIES = _of(
    git_config=(".config/git", ".pijul", "_darcs"),
    ci=(
        *(".github/workflows", ".github/actions", ".gitea/workflows", ".forgejo/workflows", ".circleci", ".buildkite", ".woodpecker"),
        *(".azure-pipelines", ".semaphore", ".teamcity", ".gitlab/ci", ".ci", ".tekton", ".builds", ".zuul.d", ".github/dependabot.yml"),
        *(".gitlab-ci", ".gitlab-ci.d", ".gitea/actions", ".forgejo/actions", ".github/aw", ".depot/workflows", ".harness", ".pipelines"),
        *(".azuredevops", "bamboo-specs", ".dagger", ".rwx", ".buddy", ".jenkins"),
    ),
    shell_startup=(
        *(".config/fish", ".config/autostart", ".config/systemd", ".config/environment.d", ".ssh", "profile.d", "cron.d", "cron.daily"),
        *("cron.hourly", "cron.weekly", "cron.monthly", "etc/systemd", "etc/init.d", ".gnupg", ".local/bin", ".bashrc.d", ".zsh"),
        *(".oh-my-zsh", ".config/zsh", ".config/bash", ".config/nushell", ".config/elvish", ".config/xonsh", ".config/powershell"),
        *(".config/tmux", ".config/kitty", ".config/wezterm", ".config/ghostty", ".config/alacritty", ".config/i3", ".config/sway"),
        *(".config/hypr", ".config/awesome", ".config/qtile", ".config/xmonad", "bash-completion/completions", ".docker", ".kube", ".aws"),
    ),
    editor=(
        *(".vscode", ".idea", ".devcontainer", ".vim", ".nvim", ".config/nvim", ".emacs.d", ".fleet", ".zed", ".helix", ".nova", ".vs"),
        *(".run", ".bsp", ".metals", ".bloop", ".swiftpm", ".externaltoolbuilders", ".codesandbox", ".theia", ".lapce", ".ona", ".gitpod"),
        *(".ruby-lsp", "buildsrc", ".config/helix", ".config/zed", ".config/code"),
    ),
    environment=(".mise", ".config/mise", ".config/direnv", ".flox", ".shadowenv.d"),
    package_scripts=(
        *(".husky", ".yarn/releases", ".yarn/plugins", ".yarn/sdks", ".cargo", ".bundle", ".mvn", ".git-hooks", ".githooks"),
        *("gradle/wrapper", "tools/bazel", ".config/pip", ".config/uv", ".moon", ".gradle/init.d", ".m2"),
    ),
    tool_config=(".storybook", "node_modules/.bin"),
    interpreter_startup=(".ipython", ".jupyter", ".julia", ".venv/bin", "venv/bin", "env/bin", "bin/activate", "renv/activate.r"),
    agent_instructions=(
        *(".cursor", ".claude", ".codex", ".gemini", ".qwen", ".windsurf", ".cline", ".clinerules", ".roo", ".continue", ".kiro"),
        *(".amazonq", ".junie", ".opencode", ".agents", ".github/instructions", ".github/prompts", ".github/agents", ".goose"),
        *(".github/chatmodes", ".github/skills", ".github/hooks", ".crush", ".factory", ".augment", ".trae", ".openhands", ".devin"),
        *(".warp", ".rovodev", ".kilocode", ".amp", ".serena", ".tabnine", ".mcp", ".agent", ".pi", ".copilot", ".github/copilot"),
        *(".vibe", ".codebuddy", ".iflow", ".qoder", ".zencoder", ".mux", ".kode", ".pochi", ".neovate", ".adal", ".cortex", ".mcpjam"),
        *(".commandcode", ".openclaw", ".clawdbot", ".moltbot", ".bob", ".grok", ".kimi", ".forge", ".antigravity", ".gitlab/duo"),
        *(".claude-plugin", ".codex-plugin", ".cursor-plugin", ".sourcegraph", ".cody", ".lingma", ".comate", ".codeium", ".trae-cn"),
        *(".specify", ".ruler", ".rulesync", ".taskmaster", ".firebender", ".conductor", ".superset", ".plandex", ".lovable", ".bolt"),
        *(".letta", ".deepagents", ".hermes", ".codebuff", ".jules", ".gptme", ".marscode", ".codegeex", ".refact", ".qodo", ".brokk"),
        *(".mastracode", ".nanocoder", ".eca", ".stakpak", ".mentat"),
    ),
    # The user's policy file and the system's. A project may be the directory that holds them, or one that they link into.
    policy=(".config/agent-sandbox", "etc/agent-sandbox", "agent-sandbox/policy.toml"),
)

STARTS = {".env.": "environment", ".env-": "environment", "jenkinsfile": "ci", "azure-pipelines": "ci", ".aider": "agent-instructions"}
STARTS |= {".lintstagedrc": "package-scripts", "lint-staged.config": "package-scripts", ".agent-sandbox": "policy"}
STARTS |= {".gitlab-ci": "ci", "mise.": "environment", ".mise.": "environment", ".envrc": "environment", ".rvmrc": "environment"}
STARTS |= {"lefthook": "package-scripts", ".lefthook": "package-scripts", ".huskyrc": "package-scripts", ".pnpmfile": "package-scripts"}
STARTS |= {".nano-staged": "package-scripts", "nano-staged.": "package-scripts", ".autoenv": "environment"}
STARTS |= {".pnp.": "package-scripts", ".roorules": "agent-instructions", ".clinerules": "agent-instructions"}
STARTS |= dict.fromkeys(
    (
        *(".proverc", ".rspec", ".rubocop", ".haml-lint", ".yardopts", ".busted", ".gitlint", ".nycrc", "nyc.config.", ".php_cs"),
        *(".phpcs.xml", "phpcs.xml", "phpstan.", "cspell.config.", "rust-analyzer.toml", ".rust-analyzer.toml", ".pyre_configuration"),
        *(".oxlintrc", ".release-it", ".versionrc", ".template-lintrc", ".c8rc", ".dependency-cruiser"),
    ),
    "tool-config",
)
DIRECTORIES |= {".idx": "editor", ".aiassistant": "agent-instructions"}
# Linters, formatters, bundlers and test runners of JavaScript run their configuration; editors start them when a file is saved.
STARTS |= dict.fromkeys(
    (
        *(
            ".eslintrc",
            "eslint.config.",
            ".prettierrc",
            "prettier.config.",
            ".babelrc",
            "babel.config.",
            ".stylelintrc",
            "stylelint.config.",
        ),
        *("jest.config.", "vitest.config.", "vitest.workspace.", "karma.conf.", "cypress.config.", "playwright.config.", "ava.config."),
        *("vite.config.", "webpack.config.", "rollup.config.", "rspack.config.", "rsbuild.config.", "tsup.config.", "metro.config."),
        *("postcss.config.", ".postcssrc", "tailwind.config.", "uno.config.", "next.config.", "nuxt.config.", "svelte.config."),
        *("astro.config.", "vue.config.", "remix.config.", "docusaurus.config.", ".mocharc", ".commitlintrc", "commitlint.config."),
        *(".graphqlrc", "graphql.config.", ".markdownlint-cli2", ".textlintrc", ".releaserc", "release.config.", ".golangci"),
    ),
    "tool-config",
)
NAMES |= {".env": "environment"}
SUFFIXES = {".pth": "interpreter-startup", ".pyc": "interpreter-startup", ".pyo": "interpreter-startup", ".code-workspace": "editor"}
SUFFIXES |= {".sublime-project": "editor", ".env": "environment", ".desktop": "shell-startup", "-gdb.py": "editor"}
SUFFIXES |= dict.fromkeys((".instructions.md", ".prompt.md", ".chatmode.md", ".agent.md"), "agent-instructions")
SUFFIXES |= dict.fromkeys((".gradle", ".gradle.kts", ".sbt", ".cmake", ".nimble"), "editor")
# Whatever the tool is called: a program named like a configuration, such as `drizzle.config.ts` or `.svgrrc.js`, configures by being run.
_SCRIPTS = (".js", ".cjs", ".mjs", ".ts", ".cts", ".mts")
SUFFIXES |= dict.fromkeys((f"{word}{end}" for word in (".config", ".conf") for end in _SCRIPTS), "tool-config")
_DOTTED_ENDS = tuple(f"rc{end}" for end in _SCRIPTS)
_SOURCES = frozenset({"app.config.ts", "app.config.server.ts"})  # of an Angular application: no tool runs them
_ENDS, _BEGINNINGS = tuple(SUFFIXES), tuple(STARTS)

POWERS = "setuid"
LINKS, GIT, HISTORY, COLLISION, BULK = "links-out", "git-config", "git-history", "name-collision", "bulk-deletion"
SECRETS, DEPENDENCY, TOOLS, UNEXAMINED = "links-to-secrets", "new-dependency", "tool-config", "unexamined"
BULK_LIMIT = 100
_MOST_LINKS = 40  # the kernel's limit
_NONE: frozenset[str] = frozenset()

# Class names for --approve, each with its reason.
CLASSES: dict[str, str] = {
    POWERS: "it would run with the rights of its owner or with capabilities, whoever starts it",
    LINKS: "a link leads out of the tree, so whoever follows it reads or writes elsewhere",
    SECRETS: "a link leads to files that are hidden from the sandbox, so whoever follows it reads a secret",
    GIT: "git, or another version control system, runs programs that its configuration, hooks and attributes name",
    HISTORY: "it changes what git has recorded: commits, branches, the index",
    "ci": "it runs on your build machines, with their secrets",
    "shell-startup": "it runs whenever somebody logs in or opens a shell",
    "editor": "an editor runs it, or takes programs to run from it, when the project is opened",
    "environment": "programs take settings and secrets from it, and some run it",
    "package-scripts": "package managers and hooks run it, or take programs to run from it",
    DEPENDENCY: "it names a package that was not installed before, or another version or source of one",
    TOOLS: "linters, formatters, test runners and build tools run it, or take code to run from it",
    "interpreter-startup": "an interpreter or a test runner runs it without being asked to",
    "agent-instructions": "agents obey it",
    "policy": "it says what sandboxes may do",
    COLLISION: "its name differs from another one only as some systems do not tell apart",
    BULK: f"more than {BULK_LIMIT} files would be deleted at once",
    UNEXAMINED: "the project has too many files to find every link that leads to a changed file",
}

Links = Callable[[str], str | None]  # the target of the link that would be at an absolute path; None if there would be no link
Names = Callable[[str], Iterable[str]]  # the names in a real directory
Texts = Callable[[Change], tuple[bytes | None, bytes | None]]  # a file's content before and after, as far as it is available
Judge = Callable[[Change], frozenset[str]]


def no_links(path: str) -> str | None:
    """Return None for every path. It is the `links` function of a tree without links."""
    return None


def classes_of(
    change: Change, project: str, *, links: Links = no_links, texts: Texts | None = None, also: Iterable[str] = ()
) -> frozenset[str]:
    """Return the protected classes of a single change. `project` is the root of the tree, `also` the file's other names, folded.

    Without `texts`, every change to a `package.json` or a `pyproject.toml` counts as protected.
    """
    classes = set(classes_of_path(_below(change.path, project)))
    if lends_power(change):
        classes.add(POWERS)
    node = change.after
    if node is not None and node.type is EntryType.SYMLINK and leaves(change.path, node.target, project, links):
        classes.add(LINKS)
    name = folded(_split(change.path)[1])
    if name in RECORDS and node is not None and node.type is EntryType.DIRECTORY:  # its entries are classified one by one
        classes = (classes - {GIT}) | {HISTORY}
    if name == "agent-sandbox" and (node is None or node.type is not EntryType.DIRECTORY):
        classes.add("policy")  # the directory of a policy file is removed or replaced
    for each in {name, *also} if also else (name,):
        if parts := tool_settings.parts_of(each):
            classes.update(kind for kind, part in (parts if texts is not None else parts[:1]) if _differ(change, texts, part))
    return frozenset(classes)


def classes_of_all(
    changes: ChangeSet,
    project: str,
    *,
    gone: Iterable[str] = (),
    links: Links = no_links,
    names: Names = lambda directory: (),
    texts: Texts | None = None,
    judges: Iterable[Judge] = (),
    repositories: Iterable[str] = (),
    also: Callable[[str], Iterable[str]] = lambda path: (),
    bulk_limit: int = BULK_LIMIT,
    progress: Progress = NO_PROGRESS,
) -> dict[str, frozenset[str]]:
    """Return the protected classes of each change that has any, by path. Classes of the changes as a whole have the path of the project.

    `gone` are the paths of real entries that would be removed, including all entries below a removed directory. `judges` return further
    classes of a change, and `also` returns the other names of a file, folded. `repositories` are directories that real files name as git
    directories; see `promotion.inspect`.
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
    around = _Repositories(changes, project, names, frozenset(repositories))
    for change in changes:
        progress.advance(files=1)
        path = change.path
        mine = classes_of(change, project, links=links, texts=texts, also=also(path)) | around.classes(path)
        for judge in judges:
            mine |= judge(change)
        if path in below:
            mine |= below[path]
        if path in collisions:
            mine |= {COLLISION}
        if mine:
            classes[path] = mine
    if lost + sum(change.after is None for change in changes) > bulk_limit:
        classes[project] = classes.get(project, frozenset()) | {BULK}
    return classes


def classes_of_path(path: str) -> frozenset[str]:
    """Return the protected classes that follow from a path alone. The path is relative to the project, or absolute if it lies outside."""
    directory, _, name = path.lstrip("/").rpartition("/")
    above, at, around = _directory(directory)
    names = components(name)
    if at is None and not RECORDS.keys().isdisjoint(names):
        at = len(above) + next(at for at, each in enumerate(names) if each in RECORDS)
    if at is not None:
        parts = above + names
        return frozenset({_recorded(parts[at], parts[at + 1 :])})
    classes = around | classes_of_name(names[-1])
    if len(names) > 1 or names[0] in DIRECTORIES or (above and f"{above[-1]}/{names[0]}" in DIRECTORIES):
        classes |= _named_directories((*above[-1:], *names))
    return classes


@lru_cache(maxsize=1 << 12)  # the files of a directory come one after the other
def _directory(path: str) -> tuple[tuple[str, ...], int | None, frozenset[str]]:
    """Return the names in a directory's path, folded; the place of the first one that is in `RECORDS`; the classes of what is in it."""
    parts = components(path) if path else ()
    return parts, next((at for at, part in enumerate(parts) if part in RECORDS), None), _named_directories(parts)


def _named_directories(parts: tuple[str, ...]) -> frozenset[str]:
    """Return the protected classes of the directories that are in a path, by one name or by two nested ones."""
    nested = (f"{one}/{other}" for one, other in pairwise(parts))
    return frozenset(kind for names in (*parts, *nested) if (kind := DIRECTORIES.get(names)))


def classes_of_name(name: str) -> frozenset[str]:
    """Return the protected classes that the last name of a path implies. `name` is folded."""
    classes = frozenset({NAMES[name]}) if name in NAMES else _NONE
    if name.endswith(_ENDS) and name not in _SOURCES:
        classes |= {kind for suffix, kind in SUFFIXES.items() if name.endswith(suffix)}
    if name.startswith(".") and name.endswith(_DOTTED_ENDS):
        classes |= {TOOLS}
    if name.startswith(_BEGINNINGS):
        classes |= {kind for start, kind in STARTS.items() if name.startswith(start)}
    return classes


def _recorded(system: str, inside: tuple[str, ...]) -> str:
    """Return the protected class of a path in the directory of a version control system. `inside` are the names in the path."""
    names = {"config"} if system == ".git" else _CONFIGURATION
    return HISTORY if inside and inside[0] in RECORDS[system] and names.isdisjoint(inside) else GIT


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
    """Return whether a change would remove or replace a real directory with everything in it."""
    before, after = change.before, change.after
    return before is not None and before.type is EntryType.DIRECTORY and (after is None or after.type is not before.type)


def _top(path: str, directories: set[str]) -> str:
    """Return the directory of `directories` that contains a path; "" if none does."""
    if not directories:
        return ""
    above = posixpath.dirname(path)
    while above not in directories and above not in ("/", ""):
        above = posixpath.dirname(above)
    return above if above in directories else ""


def _split(path: str) -> tuple[str, str]:
    """Split a normalised absolute path into its directory and its name."""
    directory, _, name = path.rpartition("/")
    return directory or "/", name


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
        directory, name = _split(change.path)
        if directory not in spelt:
            spelt[directory] = {folded(each): each for each in names(directory) if f"{directory}/{each}" not in gone}
        if spelt[directory].setdefault(folded(name), name) != name:
            collisions.add(change.path)
    return collisions


class _Repositories:
    """The directories, whatever their names, that git takes for a repository. Git runs the programs that its configuration names.

    A directory with HEAD and either `commondir` or both `objects` and `refs` is one (`is_git_directory` in git's setup.c). Git reads
    `config` and `hooks` in it. A directory counts if it is a repository now or after the changes. `known` are further repositories.
    """

    def __init__(self, changes: ChangeSet, project: str, names: Names, known: frozenset[str]) -> None:
        self._project = project
        self._names = names
        self._real = known
        self._new: dict[str, set[str]] = {}
        self._gone: dict[str, set[str]] = {}
        for change in changes:
            directory, name = _split(change.path)
            (self._new if change.after is not None else self._gone).setdefault(directory, set()).add(name)
        self._known: dict[str, tuple[tuple[str, bool], ...]] = {}

    def classes(self, path: str) -> frozenset[str]:
        """Return the protected classes that a changed path has because of the repositories that it lies in."""
        directory = _split(path)[0]
        around = self._known[directory] if directory in self._known else self._around(directory)
        if not around:
            return _NONE
        return frozenset(_recorded(".git", components(path[len(top.rstrip("/")) + 1 :])) if real else GIT for top, real in around)

    def _around(self, directory: str) -> tuple[tuple[str, bool], ...]:
        """Return the repositories at or above a directory, each with whether it is a real one already."""
        below = []
        while directory not in self._known and contains(self._project, directory):
            below.append(directory)
            if directory == "/":
                break
            directory = posixpath.dirname(directory)
        around = self._known.get(directory, ())
        for directory in reversed(below):
            if folded(posixpath.basename(directory)) in RECORDS:  # those are judged by name
                around = ()
                self._known[directory] = around
                continue
            real = set(self._names(directory))
            after = (real - self._gone.get(directory, set())) | self._new.get(directory, set())
            is_one = directory in self._real or _is_repository(real)
            if is_one or _is_repository(after):
                around = (*around, (directory, is_one))
            self._known[directory] = around
        return around


def _is_repository(names: Iterable[str]) -> bool:
    spelt = {folded(name) for name in names}
    return "head" in spelt and ("commondir" in spelt or {"objects", "refs"} <= spelt)


def _differ(change: Change, texts: Texts | None, part: Callable[[bytes], Any]) -> bool:
    if texts is None or any(node is not None and node.type is EntryType.SYMLINK for node in (change.before, change.after)):
        return True
    try:
        before, after = (part(text) if text is not None else None for text in texts(change))
    except (ValueError, RecursionError, AttributeError, TypeError):  # what we cannot parse may still mean something to a program
        return True
    return bool(before != after)
