"""Names of files that may hold secrets, in any directory of a project. Pure: a name goes in, a suspicion comes out.

The name alone decides for an environment file or a keystore. For a `.pem` or a file without an extension, the content decides
(`secret_content`). Source code is never suspected: keys written into code are for other tools to find. Templates (`.env.example`) are not
suspected either.
"""

from __future__ import annotations

from agent_sandbox._fast.values import dataclass

NAME, KEY, TOKEN = "name", "key", "token"  # what decides: the name alone; a private key inside; a private key or a token inside


@dataclass(frozen=True)
class Suspicion:
    """The kind of secret that a file may hold (`why`). `by` says what decides whether it does: its name, or a key or token in it."""

    why: str
    by: str = NAME


_ENVIRONMENT = Suspicion("environment files")
_CREDENTIALS = Suspicion("credentials of a project")
_STATE = Suspicion("state and variables of infrastructure")
KEY_STORE = Suspicion("key stores")
_KEY = Suspicion("private keys", KEY)
_TOKENS = Suspicion("tokens in settings", TOKEN)

_NAMES: dict[Suspicion, tuple[str, ...]] = {
    _ENVIRONMENT: (".env", ".envrc", ".dev.vars"),
    _CREDENTIALS: (
        *(".npmrc", ".pypirc", ".netrc", "_netrc", ".git-credentials", ".htpasswd", ".htdigest", ".pgpass", "pgpass.conf", ".my.cnf"),
        *(".dockercfg", ".dockerconfigjson", ".s3cfg", ".boto", ".vault-token", "master.key", "kubeconfig", "credentials", "secrets"),
        *(".secrets", ".credentials", "token.pickle", "jupyter_server_config.json", "terraform.rc"),
        *("jupyter_notebook_config.json", "jupyter_cookie_secret", ".bash_history", ".zsh_history", ".python_history", ".psql_history"),
        *(".databrickscfg", ".terraformrc", "credentials.tfrc.json", "application_default_credentials.json", "proxy.pass"),
        *("wallet.dat", "cwallet.sso", ".pgservice.conf", "recovery-codes.txt"),
    ),
    _TOKENS: (
        *(".yarnrc.yml", ".yarnrc", ".mcp.json", "mcp.json", "settings.local.json", "pip.conf", "pip.ini", "nuget.config", "settings.xml"),
        *(
            ".git/config",
            ".git/credentials",
            "local.settings.json",
            "gradle.properties",
            "local.properties",
            "auth.json",
            ".condarc",
            "bunfig.toml",
            ".gitconfig",
            ".curlrc",
            ".wgetrc",
            ".gemrc",
        ),
        *("rclone.conf", "wg0.conf", "wg1.conf", "sftp-config.json", ".claude.json", "sentry.properties", "appsettings.json"),
        *("appsettings.development.json", "appsettings.staging.json", "appsettings.production.json"),
    ),
}
_EXTENSIONS: dict[Suspicion, tuple[str, ...]] = {
    KEY_STORE: ("p12", "pfx", "pkcs12", "jks", "jceks", "keystore", "bks", "bcfks", "ppk", "kdbx", "kdb", "agekey", "keytab", "snk"),
    _STATE: ("tfstate", "tfvars"),
    _CREDENTIALS: ("kubeconfig", "htpasswd", "netrc"),
    _KEY: ("pem", "key", "der", "p8", "pk8", "asc", "gpg", "pgp", "crt", "cer", "cert", "rsa", "priv", "ovpn", "jwk", "jwks", "sec"),
}
_BY_NAME = {name: suspicion for suspicion, names in _NAMES.items() for name in names}
_BY_EXTENSION = {extension: suspicion for suspicion, extensions in _EXTENSIONS.items() for extension in extensions}
_STARTS: tuple[tuple[str, Suspicion], ...] = (
    (".env", _ENVIRONMENT),
    (".dev.vars", _ENVIRONMENT),
    (".vault-pass", _CREDENTIALS),
    (".vault_pass", _CREDENTIALS),
    ("vault-pass", _CREDENTIALS),
    ("vault_pass", _CREDENTIALS),
    ("client_secret", _CREDENTIALS),
    ("kubeconfig", _CREDENTIALS),
    (".htpasswd", _CREDENTIALS),
    ("id_rsa", _KEY),
    ("id_dsa", _KEY),
    ("id_ecdsa", _KEY),
    ("id_ed25519", _KEY),
)
_STARTING = tuple(start for start, _ in _STARTS)
_TEMPLATES = frozenset({"example", "examples", "sample", "template", "tmpl", "tpl", "dist", "defaults", "schema", "j2", "erb", "pub"})
_BACKUPS = ("~", "#", ".bak", ".old", ".orig", ".save", ".swp", ".swo", ".swn", ".tmp", ".backup", ".copy", ".rej")
_DATA = frozenset({"yml", "yaml", "json", "toml", "ini", "cfg", "conf", "properties", "xml", "csv", "txt", "env", "plist", "config"})
_SECRET_WORDS = frozenset({"secret", "secrets", "credential", "credentials", "creds"})
_HINTS = ("key", "token", "passw", "auth", "private", "account", "adminsdk", "rsa", "ed25519", "login")
# Names without an extension that are common and hold no keys: not read.
_ORDINARY = frozenset(
    {
        *(
            "makefile",
            "kconfig",
            "kbuild",
            "dockerfile",
            "containerfile",
            "gemfile",
            "rakefile",
            "procfile",
            "pipfile",
            "justfile",
            "brewfile",
        ),
        *("vagrantfile", "jenkinsfile", "podfile", "fastfile", "build", "workspace", "license", "licence", "copying", "readme", "authors"),
        *("notice", "changelog", "changes", "news", "todo", "install", "version", "owners", "codeowners", "maintainers", "contributing"),
        *("configure", "gradlew", "mvnw", ".gitignore", ".gitkeep", ".gitattributes", ".gitmodules", ".editorconfig", ".dockerignore"),
        *(".npmignore", ".eslintignore", ".prettierignore", ".prettierrc", ".eslintrc", ".babelrc", ".nvmrc", ".python-version", ".keep"),
        *(
            ".ruby-version",
            ".tool-versions",
            ".clang-format",
            ".clang-tidy",
            ".pylintrc",
            ".flake8",
            ".coveragerc",
            ".gitlab-ci",
            ".ds_store",
        ),
    }
)
_SEPARATORS = str.maketrans("-_ ", "...")
# Every file in such a directory is suspected.
_DIRECTORIES = frozenset({".ssh", ".gnupg", ".aws", ".kube", ".pulumi", ".password-store", ".subversion"})
# In these, data is: a package of source code may have such a name, too.
_FOR_DATA = frozenset({"secrets", ".secrets", ".envs", "credentials", ".credentials"})
IN_SECRET_DIRECTORY = Suspicion("files in a directory for keys and credentials")


def suspicion_of(name: str, *, directory: str = "") -> Suspicion | None:
    """Return the suspicion about a file by its name; None for an ordinary file. `directory` is its directory, relative to the project."""
    found = _by_name(name)
    if directory and (found is None or found.by != NAME):
        parts = directory.split("/")
        if not _DIRECTORIES.isdisjoint(parts) or (not _FOR_DATA.isdisjoint(parts) and _is_data(name.lower())):
            return IN_SECRET_DIRECTORY
    return found


def _is_data(lowered: str) -> bool:
    stem, _, extension = lowered.rpartition(".")
    return (not stem or extension in _DATA) and lowered not in _ORDINARY and not is_template(stem or lowered)


def _by_name(name: str) -> Suspicion | None:
    lowered = name.lower()
    stem, dot, extension = lowered.rpartition(".")
    if extension in _DATA or not dot or not stem:
        return _of_data(lowered, extension) if dot and stem else _of_plain(lowered)
    found = _BY_NAME.get(lowered) or _BY_EXTENSION.get(extension)
    if found is None and lowered.startswith(_STARTING):
        found = _started(lowered)
    if found is None and lowered.endswith(_BACKUPS):
        return _of_backup(lowered)
    if found is None and ".tfstate." in lowered:
        return _STATE
    return None if found is None or _is_template(lowered, found) else found


def is_template(name: str) -> bool:
    """Return whether a name says that the file is a template, as `.env.example` does."""
    return name.lower().translate(_SEPARATORS).split(".")[-1] in _TEMPLATES


def _of_plain(lowered: str) -> Suspicion | None:
    """Return the suspicion about a name without an extension. An unknown name may be that of a private key."""
    if lowered.startswith(_STARTING) and (found := _started(lowered)):
        return found
    if lowered in _ORDINARY:
        return None
    return _BY_NAME.get(lowered) or (_of_backup(lowered) if lowered.endswith(_BACKUPS) else _KEY)


def _of_data(lowered: str, extension: str) -> Suspicion | None:
    """Return the suspicion about a name with an extension of data or settings. The words in the name decide."""
    words = lowered.translate(_SEPARATORS).split(".")
    if not _TEMPLATES.isdisjoint(words):
        return None
    if extension == "env":
        return _ENVIRONMENT
    if lowered.startswith(_STARTING) and (found := _started(lowered)):
        return found
    if found := _BY_NAME.get(lowered):
        return found
    if "tfvars" in words or "tfstate" in words:
        return _STATE
    if not _SECRET_WORDS.isdisjoint(words):
        return _CREDENTIALS
    return _TOKENS if any(hint in lowered for hint in _HINTS) else None


def _of_backup(lowered: str) -> Suspicion | None:
    """Return the suspicion about the backup or swap file of an editor. It is the suspicion about the original file."""
    original = lowered
    for end in _BACKUPS:
        original = original.removesuffix(end)
    if original.startswith((".", "#")) and lowered.endswith((".swp", ".swo", ".swn", "#")):
        original = original[1:]
    return _by_name(original) if original and original != lowered else None


def _started(lowered: str) -> Suspicion | None:
    start, found = next(each for each in _STARTS if lowered.startswith(each[0]))
    if start == ".env" and lowered[4:5] not in ("", ".", "-", "_", "~"):  # .environment is something else
        return _BY_NAME.get(lowered)
    return None if _is_template(lowered, found) else found


def _is_template(lowered: str, found: Suspicion) -> bool:
    """Return whether a suspected name is that of a template or a public key. If a private key is suspected, only `.pub` counts."""
    words = lowered.translate(_SEPARATORS).split(".")
    if found.by is KEY:
        return words[-1] == "pub"
    return words[-1] in _TEMPLATES or (found is KEY_STORE and ("debug" in words or "truststore" in words or "cacerts" in words))
