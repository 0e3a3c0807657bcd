"""Environment variables that name programs, paths or options of programs, so that their values decide what a run does.

An approver is shown these values: with another `PATH`, `GIT_SSH_COMMAND` or `LD_PRELOAD`, a harmless command line is harmless no more. A
variable counts by its name, or by a value that is a path, a list of paths or a function of a shell. A value under a name that suggests a
secret is never shown. Any other value is shown whole: a part that looked like a secret and was left out could hide a command.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from agent_sandbox.policy.secrets import names_a_secret

# Exact names, then beginnings and endings of names. In upper case: some programs also read the lower-case spelling.
_NAMES = frozenset(
    {
        *(
            "PATH",
            "HOME",
            "SHELL",
            "ENV",
            "BASH_ENV",
            "EDITOR",
            "VISUAL",
            "PAGER",
            "BROWSER",
            "TERMINAL",
            "IFS",
            "CDPATH",
            "FPATH",
            "ZDOTDIR",
        ),
        *("SHELLOPTS", "BASHOPTS", "PS0", "PS1", "PS2", "PS4", "TMPDIR", "TMP", "TEMP", "PWD", "OLDPWD", "TERMINFO", "LOCPATH", "NLSPATH"),
        *("CC", "CXX", "CPP", "LD", "AR", "AS", "NM", "FC", "GOBIN", "MAKE", "MAKEFILES", "CLASSPATH", "LESSOPEN", "LESSCLOSE", "LESS"),
        *("INPUTRC", "MAILCAPS", "MANPATH", "HOSTALIASES", "RUBYOPT", "RUBYLIB", "PERLLIB", "PERL5DB", "R_PROFILE", "R_ENVIRON", "EXINIT"),
    }
)
_BEGINNINGS = (
    *("LD_", "DYLD_", "PYTHON", "NODE_", "PERL5", "RUBY", "LUA_", "GIT_", "BASH_FUNC_", "GCONV_", "GLIBC_", "MALLOC_", "OPENSSL_", "JAVA_"),
    *("_JAVA", "JDK_", "RUSTC", "MAVEN_", "GRADLE_", "CMAKE_", "XDG_", "SSH_", "SUDO_"),
)
_ENDINGS = (
    *("_COMMAND", "_CMD", "ASKPASS", "EDITOR", "PAGER", "BROWSER", "_SHELL", "_PROGRAM", "_EXE", "_BIN", "_BINARY", "_EXECUTABLE"),
    *(
        "_WRAPPER",
        "_HOOK",
        "_HANDLER",
        "_LOADER",
        "_PRELOAD",
        "_STARTUP",
        "_PLUGIN",
        "_PLUGINS",
        "_MODULES",
        "PATH",
        "_DIR",
        "_DIRS",
        "_HOME",
    ),
    *("_ROOT", "_PREFIX", "_FILE", "_FILES", "_CONFIG", "OPTIONS", "_OPTS", "OPT", "_ARGS", "FLAGS", "_SOCK", "_SOCKET", "_SUDO"),
    *("_INTERPRETER", "_COMPILER", "_LINKER", "_RUNNER", "_DRIVER", "_INIT", "_PROFILE", "_RC", "_COMMANDS"),
)
_ASKPASS = "ASKPASS"  # names a program, although its name suggests a secret
_STARTS_OF_PATHS = ("/", "./", "../", "~")


def shown_variables(variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the name and value of each variable that an approver is shown, sorted by name."""
    for name, value in sorted(variables.items()):
        key = variables.get(name.replace("_VALUE_", "_KEY_")) if name.startswith("GIT_CONFIG_VALUE_") else None
        if key is not None and (names_a_secret(key) or key.lower().endswith("header")):
            continue  # git's way to pass a header with a token
        if decides_what_runs(name, value):
            yield name, value


def decides_what_runs(name: str, value: str) -> bool:
    """Return whether a variable names a program, a path or options of a program, and may be shown.

    >>> decides_what_runs("GIT_SSH_COMMAND", "sh -c evil"), decides_what_runs("AWS_SECRET_KEY_FILE", "/x"), decides_what_runs("LANG", "C")
    (True, False, False)
    """
    upper = name.upper()
    if upper.endswith(_ASKPASS):
        return True
    if names_a_secret(name):
        return False
    if upper in _NAMES or upper.startswith(_BEGINNINGS) or upper.endswith(_ENDINGS):
        return True
    parts = [part for part in value.split(":") if part]
    return value.lstrip().startswith("() {") or (bool(parts) and all(part.startswith(_STARTS_OF_PATHS) for part in parts))
