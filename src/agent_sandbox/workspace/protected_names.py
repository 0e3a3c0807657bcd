"""The names that `protected` knows, in the spelling of `confusable`. Data only.

A name counts wherever it is in the tree: the top of one project is a directory in another.
"""

from __future__ import annotations


def _of(**kinds: tuple[str, ...]) -> dict[str, str]:
    return {name: kind.replace("_", "-") for kind, names in kinds.items() for name in names}


# What is in `.git` and only records. All else in there counts as configuration: git learns to run new things with every version.
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

# A directory, or two names one below the other: all that is in it.
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
    # The user's own file and the system's. A project may be the directory that holds them, or the one that they are links into.
    policy=(".config/agent-sandbox", "etc/agent-sandbox", "agent-sandbox/policy.toml"),
)

STARTS = {".env.": "environment", ".env-": "environment", "jenkinsfile": "ci", "azure-pipelines": "ci", ".aider": "agent-instructions"}
STARTS |= {".lintstagedrc": "package-scripts", "lint-staged.config": "package-scripts", ".agent-sandbox": "policy"}
NAMES |= {".env": "environment"}
SUFFIXES = {".pth": "interpreter-startup", ".pyc": "interpreter-startup", ".pyo": "interpreter-startup", ".code-workspace": "editor"}
SUFFIXES |= {".sublime-project": "editor", ".env": "environment", ".desktop": "shell-startup"}
