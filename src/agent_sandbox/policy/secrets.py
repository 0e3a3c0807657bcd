"""The paths a view hides by default: credentials, histories, other users' and our own state. Data, and a few pure functions.

These paths are hidden by name, also if they appear during a run. Two more kinds of files are found on the disk before each run: files that
hold secrets (`workspace.secret_search`), and dot-files of a home that are not in `SHOWN_IN_HOME` (`workspace.dot_files`).

Deliberately not listed: `/etc/machine-id` (an identifier that systemd and D-Bus need, no secret), `/var/log` as a whole (package managers
write there; the logs that hold passwords or sessions are listed), `/etc/passwd` (needed to look up names), and `/var/run` (a link to
`/run`, which is private to each run anyway).
"""

from __future__ import annotations

from agent_sandbox._fast.functions import lru_cache
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.paths import contains, normalise
from agent_sandbox.policy.secret_names import NAME, suspicion_of

if TYPE_CHECKING:
    from collections.abc import Iterable

OWN_STATE, OWN_KEYS = "the sandbox's own state and other runs", "the keys of the sandbox's own record"


@dataclass(frozen=True)
class Mask:
    """A hidden path. Everything below it is hidden, too. `why` is the reason, for a person who looks for the path.

    If `stays`, an empty directory is shown in its place.
    """

    path: str
    why: str
    stays: bool = False  # show an empty directory in its place: programs expect a home to exist


@dataclass(frozen=True)
class FoundMask(Mask):
    """A mask for an entry that was found on the disk. It is not part of a policy's digest: the disk changes, the rules do not.

    `remark` explains the mask, if a person may expect to see the entry.
    """

    remark: str = ""


SOMEBODY_ELSE = "the home of somebody else"

# Relative to a home. The key is the reason.
IN_HOME: dict[str, tuple[str, ...]] = {
    "private keys": (
        *(".ssh", ".gnupg", ".pki", ".config/age", ".config/sops", ".config/mise/age.txt", ".minikube", ".sbt/gpg", ".java/deployment"),
        ".dotnet/corefx/cryptography",  # .NET keeps the keys of certificates there, without a password
    ),
    "cloud credentials": (
        *(".aws", ".azure", ".config/gcloud", ".boto", ".s3cfg", ".config/rclone", ".oci", ".aliyun", ".config/doctl", ".config/hcloud"),
        *(".fly", ".kube", ".config/helm/registry", ".databrickscfg", ".snowflake", ".terraform.d", ".terraformrc", ".vault-token"),
    ),
    "registry and forge credentials": (
        *(".docker/config.json", ".config/containers/auth.json", ".netrc", ".npmrc", ".yarnrc.yml", ".pypirc", ".git-credentials"),
        *(".config/git/credentials", ".config/gh", ".config/hub", ".config/glab-cli", ".cargo/credentials", ".cargo/credentials.toml"),
        *(".gem/credentials", ".local/share/gem/credentials", ".bundle/config", ".m2/settings.xml", ".m2/settings-security.xml"),
        *(".gradle/gradle.properties", ".composer/auth.json", ".config/composer/auth.json", ".nuget/NuGet/NuGet.Config"),
        *(".huggingface", ".cache/huggingface/token", ".cache/huggingface/stored_tokens", ".kaggle", ".env", ".config/pypoetry/auth.toml"),
        *(".pulumi/credentials.json", ".subversion/auth", ".local/share/uv/credentials", ".cache/composer/auth.json", ".sbt/.credentials"),
        *(".sbt/1.0/credentials.sbt", ".julia/servers", ".luarocks/upload_config.lua", ".cpan/CPAN/MyConfig.pm", ".sbt/credentials"),
        *(".sbt/sonatype_credentials", ".sbt/sonatype_central_credentials", ".stack/upload", ".deno/deployctl", ".config/pnpm/auth.ini"),
        *(".local/share/cargo/credentials", ".local/share/cargo/credentials.toml", ".config/mise/github_tokens.toml"),
    ),
    "database passwords": (".pgpass", ".my.cnf", ".mylogin.cnf"),
    "password stores": (
        *(".password-store", ".local/share/keyrings", ".gnome2/keyrings", ".local/share/kwalletd", ".config/op", ".config/1Password"),
        *(".config/Bitwarden", ".config/Bitwarden CLI", ".config/keepassxc"),
    ),
    "browser and messenger profiles": (
        *(".mozilla", ".thunderbird", ".config/google-chrome", ".config/chromium", ".config/BraveSoftware", ".config/microsoft-edge"),
        *(".config/vivaldi", ".config/opera", ".config/Slack", ".config/discord", ".config/Signal", "snap/firefox", "snap/chromium"),
        ".cache/ms-playwright/daemon",
    ),
    "agents' own credentials": (
        *(".claude", ".claude.json", ".config/claude", ".codex", ".gemini", ".qwen", ".cursor", ".continue", ".config/github-copilot"),
        *(".config/goose", ".config/opencode", ".local/share/opencode", ".aider.conf.yml"),
    ),
    "shell and tool histories": (
        *(".bash_history", ".zsh_history", ".zhistory", ".sh_history", ".ash_history", ".ksh_history", ".history", ".local/share/fish"),
        *(".python_history", ".ipython/profile_default/history.sqlite", ".node_repl_history", ".irb_history", ".psql_history"),
        *(".mysql_history", ".sqlite_history", ".rediscli_history", ".dbshell", ".mongodb", ".lesshst", ".viminfo", ".wget-hsts"),
        *(".local/state/less/history", ".local/share/mc/history", ".julia/logs", ".cache/deno/deno_history.txt", ".local/share/nvim/shada"),
        *(".cache/deno/location_data", ".vim/.netrwhist", ".emacs.d/history", ".emacs.d/eshell/history"),
    ),
    "what Java programs remember": (".java/.userPrefs",),
    "access to the desktop": (".Xauthority", ".ICEauthority"),
    "the sandbox's own state and keys": (".local/state/agent-sandbox", ".local/share/agent-sandbox"),  # also when others are in use
}

# The dot-files and dot-directories that a home shows. All others are hidden: a tool that nobody here has heard of may keep a token there.
# Of these directories, the named parts are shown.
_SHOWN_BELOW: dict[str, tuple[str, ...]] = {
    ".local": ("bin", "lib", "include", "man", "opt", "pipx", "src"),
    ".local/share": (
        *("pnpm", "fonts", "man", "applications", "icons", "themes", "mime", "uv", "pipx", "virtualenvs", "pypoetry", "hatch", "pdm"),
        *("mise", "rtx", "fnm", "nvm", "gem", "cargo", "rustup", "go", "deno", "nvim", "vim", "zsh-plugins", "bash-completion"),
        *("zsh/site-functions", "zoxide", "sdkman", "jupyter/kernels", "jupyter/lab", "jupyter/nbextensions", "coursier"),
        *("containers/cache", "cmake"),
    ),
    ".local/state": ("nix", "mise"),
    ".config": (
        *("git", "pip", "uv", "nvim", "vim", "fontconfig", "htop", "matplotlib", "ripgrep", "ripgreprc", "clangd", "flake8"),
        *("pycodestyle", "ruff", "black", "pylintrc", "mypy", "yapf", "pypoetry", "pdm", "hatch", "tmux", "bat", "fd", "direnv"),
        *(
            "starship.toml",
            "zsh/.zshrc",
            "zsh/.zshenv",
            "readline",
            "user-dirs.dirs",
            "user-dirs.locale",
            "go",
            "mise",
            "ccache",
            "sccache",
            "cmake",
        ),
        *("locale.conf", "mimeapps.list", "pnpm", "yarn", "agent-sandbox"),
    ),
    ".config/containers": ("registries.conf", "registries.conf.d", "storage.conf", "containers.conf", "policy.json"),
    ".cache": (
        *("pip", "uv", "pipenv", "pypoetry", "pdm", "hatch", "pre-commit", "virtualenv", "ruff", "mypy", "black", "npm", "yarn"),
        *("pnpm", "node", "node-gyp", "electron", "electron-builder", "ms-playwright", "Cypress", "puppeteer", "typescript", "deno"),
        *("bun", "go-build", "golangci-lint", "gopls", "goimports", "staticcheck", "ccache", "sccache", "bazel", "bazelisk", "zig"),
        *("coursier", "composer", "gem", "bundle", "nix", "clangd", "huggingface", "torch", "torch_extensions", "matplotlib", "numba"),
        *("fontconfig", "pytest", "jedi", "parso", "mesa_shader_cache", "nvidia", "R", "julia", "dart", "swiftpm", "helm"),
        *("agent-sandbox", "org.swift.swiftpm"),
    ),
}
SHOWN_IN_HOME = (
    # Shells, editors and terminals. Those in `READ_IN_HOME` are hidden if they hold a token.
    *(".bashrc", ".bash_profile", ".bash_login", ".bash_logout", ".bash_aliases", ".profile", ".zshrc", ".zshenv", ".zprofile"),
    *(".zlogin", ".zlogout", ".inputrc", ".dircolors", ".hushlogin", ".oh-my-zsh", ".p10k.zsh", ".vimrc", ".vim", ".gvimrc"),
    *(".ideavimrc", ".nanorc", ".emacs", ".emacs.d", ".tmux.conf", ".tmux", ".screenrc", ".editorconfig", ".selected_editor"),
    *(".terminfo", ".lesskey", ".ripgreprc", ".gdbinit", ".lldbinit", ".clang-format", ".clang-tidy", ".gitconfig", ".gitignore"),
    *(".gitignore_global", ".gitattributes", ".gitmessage", ".hgrc", ".dockerenv", ".fonts", ".fonts.conf", ".icons", ".themes"),
    *(".face", ".sudo_as_admin_successful"),
    # Languages, their versions and their packages.
    *(".cargo", ".rustup", ".nvm", ".fnm", ".volta", ".n", ".nodenv", ".deno", ".bun", ".pyenv", ".virtualenvs", ".venv", ".venvs"),
    *(".rbenv", ".rvm", ".gem", ".bundle", ".asdf", ".asdfrc", ".tool-versions", ".mise", ".sdkman", ".jenv", ".jabba", ".goenv"),
    *(".gvm", ".gradle/caches", ".gradle/wrapper", ".gradle/jdks", ".gradle/native", ".m2/repository", ".m2/wrapper", ".ivy2/cache"),
    *(".sbt", ".coursier", ".npm", ".npm-global", ".yarn", ".pnpm-store", ".node-gyp", ".electron-gyp", ".nuget/packages", ".dotnet"),
    *(".templateengine", ".opam", ".ghcup", ".cabal/packages", ".cabal/bin", ".cabal/store", ".stack", ".elan", ".juliaup", ".julia"),
    *(".mix", ".hex/packages", ".pub-cache/hosted", ".pub-cache/bin", ".composer/cache", ".composer/vendor", ".conda", ".condarc"),
    *(".mambarc", ".miniconda3", ".ccache", ".bazel", ".bazelrc", ".konan", ".cpan", ".cpanm", ".perl5", ".luarocks", ".swiftpm"),
    *(".zig", ".nix-profile", ".nix-defexpr", ".linuxbrew", ".gemrc", ".irbrc", ".pryrc", ".pdbrc", ".pythonrc", ".pylintrc"),
    *(".flake8", ".Rprofile", ".ipython/profile_default/startup", ".jupyter/lab", ".matplotlib", ".nltk_data", ".keras", ".torch"),
    *(".cmake", ".texlive", ".java"),
    *(f"{directory}/{name}" for directory, names in _SHOWN_BELOW.items() for name in names),
)
# Shown files that people keep tokens in. Each is read, and hidden if it holds one. A `*` stands for any part of a name.
READ_IN_HOME = (
    *(".bashrc", ".bash_profile", ".bash_login", ".bash_aliases", ".profile", ".zshrc", ".zshenv", ".zprofile", ".zlogin"),
    *(".gitconfig", ".hgrc", ".condarc", ".mambarc", ".gemrc", ".vimrc", ".tmux.conf", ".config/git/config", ".config/pip/pip.conf"),
    *(".config/uv/uv.toml", ".config/pnpm/rc", ".config/yarn/config", ".config/pypoetry/config.toml", ".config/pdm/config.toml"),
    *(".config/hatch/config.toml", ".cargo/config", ".cargo/config.toml", ".cargo/env", ".bundle/config", ".config/go/env"),
    *(".Rprofile", ".bazelrc", ".config/mise/config.toml", ".config/zsh/.zshrc", ".config/zsh/.zshenv", ".config/direnv/direnvrc"),
    *(".pip/pip.conf", ".emacs", ".pythonrc", ".irbrc", ".pryrc", ".bash_logout", ".zlogout", ".gvimrc", ".ideavimrc", ".screenrc"),
    *(".conda/.condarc", ".conda/condarc", ".miniconda3/.condarc", ".config/pnpm/config.yaml", ".config/sccache/config"),
    *(".config/ccache/ccache.conf", ".ccache/ccache.conf", ".config/tmux/tmux.conf", ".config/direnv/direnv.toml", ".sbt/repositories"),
    *(".julia/config/startup.jl", ".vim/vimrc", ".emacs.d/init.el", ".emacs.d/early-init.el", ".config/nvim/init.vim"),
    *(".config/nvim/init.lua", ".config/nvim/lua/*.lua", ".config/nvim/lua/config/*.lua", ".config/nvim/lua/plugins/*.lua"),
    *(".config/mise/*.toml", ".config/mise/conf.d/*.toml", ".config/direnv/lib/*.sh", ".oh-my-zsh/custom/*.zsh", ".sbt/1.0/*.sbt"),
    *(".config/git/*", ".sbt/1.0/plugins/*.sbt", ".stack/config.yaml", ".ipython/profile_default/startup/*"),
)
# Found on the disk and hidden, by the reason. A `*` stands for any part of a name.
FOUND_IN_HOME: dict[str, tuple[str, ...]] = {
    "browser and messenger profiles": (".cache/ms-playwright/mcp-*",),  # in these an agent's browser is logged in
}
# Directories of a home that are no dot-directories, and hold what programs keep for themselves: each program has a home of its own there.
HOMES_OF_PROGRAMS = ("snap",)
OF_A_PROGRAM = "what a program keeps for itself"
UNLISTED, WITH_A_TOKEN = "not among the dot-files that a home shows", "settings with a token"

ABSOLUTE: dict[str, tuple[str, ...]] = {
    "password hashes": (
        *("/etc/shadow", "/etc/shadow-", "/etc/gshadow", "/etc/gshadow-", "/etc/security/opasswd"),
        *("/var/backups/shadow.bak", "/var/backups/gshadow.bak"),
    ),
    "who may become root": ("/etc/sudoers", "/etc/sudoers.d"),
    "private keys of this machine": (
        *("/etc/ssh/ssh_host_rsa_key", "/etc/ssh/ssh_host_ecdsa_key", "/etc/ssh/ssh_host_ed25519_key", "/etc/ssh/ssh_host_dsa_key"),
        *("/etc/ssl/private", "/etc/pki/tls/private", "/etc/letsencrypt", "/etc/krb5.keytab", "/etc/wireguard", "/etc/ipsec.secrets"),
        *("/etc/ipsec.d/private", "/etc/swanctl", "/etc/openvpn", "/etc/nebula", "/etc/cloudflared", "/var/lib/tailscale"),
        *("/var/lib/zerotier-one/identity.secret", "/var/lib/zerotier-one/authtoken.secret", "/etc/dkimkeys", "/etc/opendkim/keys"),
        *("/etc/dovecot/private", "/etc/cryptsetup-keys.d", "/etc/luks", "/etc/credstore", "/etc/credstore.encrypted"),
        *("/var/lib/systemd/credential.secret", "/etc/rndc.key", "/etc/bind/rndc.key", "/etc/puppetlabs/puppet/ssl", "/etc/salt/pki"),
        *("/etc/chef", "/etc/pve/priv", "/etc/ceph", "/var/lib/bluetooth", "/var/lib/NetworkManager/secret_key"),
    ),
    "network and service passwords": (
        *("/etc/NetworkManager/system-connections", "/etc/netplan", "/etc/wpa_supplicant", "/etc/ppp/chap-secrets", "/etc/ppp/pap-secrets"),
        *("/etc/apt/auth.conf", "/etc/apt/auth.conf.d", "/etc/mysql/debian.cnf", "/etc/postfix/sasl_passwd", "/etc/exim4/passwd.client"),
        *("/var/lib/sss", "/var/lib/samba/private", "/var/lib/cloud", "/var/spool/cron", "/var/lib/iwd", "/var/lib/connman"),
        *("/etc/gitlab-runner", "/etc/gitlab", "/etc/msmtprc", "/etc/ssmtp", "/etc/nullmailer/remotes", "/etc/mail/authinfo"),
        *("/etc/davfs2/secrets", "/etc/samba/credentials", "/etc/smbcredentials", "/etc/ldap.secret", "/etc/pam_ldap.secret"),
        *("/etc/libnss-ldap.secret", "/etc/sssd", "/etc/chrony/chrony.keys", "/etc/chrony.keys", "/etc/hostapd", "/etc/vault.d"),
        *("/etc/consul.d", "/etc/nomad.d", "/etc/borgmatic", "/etc/restic", "/etc/rclone.conf", "/etc/docker/key.json"),
    ),
    "container engines and clusters": (
        *("/run/docker.sock", "/run/podman", "/run/containerd", "/run/crio", "/var/lib/docker", "/var/lib/containers"),
        *("/var/lib/containerd", "/var/lib/kubelet", "/var/lib/rancher", "/etc/kubernetes", "/etc/rancher", "/run/secrets"),
    ),
    # btmp holds passwords that were typed as user names.
    "records of sessions": ("/var/log/auth.log", "/var/log/secure", "/var/log/btmp", "/var/log/audit", "/var/log/journal", "/var/mail"),
    "memory on disk": ("/swapfile", "/swap.img", "/var/lib/systemd/coredump", "/var/crash"),
}

# At the top of the project, also if they appear during a run. Templates such as .env.example hold no secrets and stay visible.
IN_PROJECT: dict[str, tuple[str, ...]] = {
    "environment files": (
        *(".env", ".env.local", ".env.development", ".env.development.local", ".env.dev", ".env.test", ".env.test.local"),
        *(".env.staging", ".env.production", ".env.production.local", ".env.prod", ".envrc", ".dev.vars", ".streamlit/secrets.toml"),
    )
}


# Homes of service accounts, but programs are installed and files are served there too. Only the names above are hidden in them.
_SHARED = ("/opt", "/srv", "/var/www")


def default_masks(
    *,
    homes: Iterable[str],
    homes_of_others: Iterable[str] = (),
    projects: Iterable[str] = (),
    state_dirs: Iterable[str] = (),
    keys_dirs: Iterable[str] = (),
) -> tuple[Mask, ...]:
    """Return everything hidden by default, sorted by path, each path once.

    In the user's own homes, certain names are hidden. Another user's home is hidden as a whole, unless it overlaps one of our homes or a
    project (except `/`), or lies in a shared directory (`/opt`, `/srv`, `/var/www`): then only those names are hidden in it. `state_dirs`
    hold the product's own state: other runs, layers and the ledger. `keys_dirs` have the ledger's key.
    """
    return _default_masks(tuple(homes), tuple(homes_of_others), tuple(projects), tuple(state_dirs), tuple(keys_dirs))


@lru_cache(maxsize=16)  # every sandbox of a program asks for the same
def _default_masks(
    homes: tuple[str, ...],
    homes_of_others: tuple[str, ...],
    projects: tuple[str, ...],
    state_dirs: tuple[str, ...],
    keys_dirs: tuple[str, ...],
) -> tuple[Mask, ...]:
    own, used = list(map(normalise, homes)), list(map(normalise, projects))
    masks: dict[str, Mask] = {}
    for directory in map(normalise, homes_of_others):
        if any(contains(shared, directory) for shared in _SHARED) or any(
            _related(directory, path) for path in (*own, *used) if path != "/"
        ):
            _add(masks, IN_HOME, directory)
        else:
            masks[directory] = Mask(directory, SOMEBODY_ELSE, stays=True)
    for home in own:
        _add(masks, IN_HOME, home)
    _add(masks, ABSOLUTE, "/")
    for project in used:
        _add(masks, IN_PROJECT, project)
    states = list(map(normalise, state_dirs))
    for path in states:
        masks[path] = Mask(path, OWN_STATE)
    for path in map(normalise, keys_dirs):
        if not any(contains(state, path) for state in states):
            masks[path] = Mask(path, OWN_KEYS)
    return tuple(masks[path] for path in sorted(masks))


def own_places(masks: Iterable[Mask]) -> tuple[str, ...]:
    """Return the hidden directories that hold the product's own state, compiled code and keys."""
    return tuple(mask.path for mask in masks if mask.why in (OWN_STATE, OWN_KEYS))


def reveal(masks: tuple[Mask, ...], path: str | bytes) -> tuple[Mask, ...]:
    """Return the masks without the mask on exactly this path. If it is another user's home, certain names in it stay hidden.

    Raises `PolicyError` if there is no such mask. If a mask above hides the path, the error names that mask.
    """
    wanted = normalise(path)
    remaining = {mask.path: mask for mask in masks}
    revealed = remaining.pop(wanted, None)
    if revealed is None:
        if _may_be_masked(wanted) and not any(wanted.startswith(mask.path + "/") for mask in masks):
            return masks  # hidden when it exists and holds a secret
        above = next((mask.path for mask in masks if wanted.startswith(mask.path + "/")), None)
        hint = f"it lies beneath {above}; reveal that" if above else "reveal a path exactly as the list of masks spells it"
        raise PolicyError(f"nothing is masked at {wanted!r}", hint=hint)
    if revealed.why == SOMEBODY_ELSE:
        _add(remaining, IN_HOME, wanted)
    return tuple(remaining[path] for path in sorted(remaining))


# Parts of variable names that suggest a secret, in lower case; and names with such a part that hold none.
_IN_NAMES = ("pass", "pwd", "secret", "token", "credential", "cookie", "apikey", "api_key", "access_key", "private_key", "auth")
_NO_SECRETS = frozenset({"PWD", "OLDPWD", "SSH_AUTH_SOCK", "XAUTHORITY", "GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_AUTHOR_DATE"})


def names_a_secret(variable: str) -> bool:
    """Return whether the name of an environment variable suggests a secret."""
    return variable not in _NO_SECRETS and any(part in variable.lower() for part in _IN_NAMES)


def _add(masks: dict[str, Mask], names: dict[str, tuple[str, ...]], directory: str) -> None:
    start = directory.rstrip("/")
    for why, relative in names.items():
        for name in relative:
            path = f"{start}/{name.lstrip('/')}"
            masks[path] = Mask(path, why)


def _may_be_masked(path: str) -> bool:
    """Return whether a file of this name would be hidden if it held a secret, so that a request to reveal it is no mistake."""
    name = path.rpartition("/")[2]
    suspicion = suspicion_of(name)
    return suspicion is not None and (suspicion.by == NAME or "." in name)


def _related(one: str, other: str) -> bool:
    return contains(other, one) or contains(one, other)
