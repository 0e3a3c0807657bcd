"""Which of the caller's variables a program in the sandbox gets: those on a list of names that hold no secrets, and those asked for.

A list of what is passed, not of what is held back: the name under which the next service keeps its token is not known yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from agent_sandbox.errors import PolicyError

PASSED = frozenset(
    {
        # where programs and the user's own files are
        *("PATH", "HOME", "SHELL", "USER", "LOGNAME", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "PYENV_ROOT"),
        *("PYENV_VERSION", "NVM_DIR", "NVM_BIN", "GEM_HOME", "GEM_PATH", "RBENV_ROOT", "GOPATH", "GOROOT", "JAVA_HOME"),
        *("CARGO_HOME", "RUSTUP_HOME"),
        # how to speak
        *("LANG", "LANGUAGE", "TZ", "TERM", "COLORTERM", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "EDITOR"),
        *("VISUAL", "PAGER", "LESS"),
        # how to behave
        *("CI", "DEBIAN_FRONTEND", "NODE_ENV", "RAILS_ENV", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "PYTHONUTF8"),
        "SOURCE_DATE_EPOCH",
    }
)
CAPABILITY = "AGENT_SANDBOX_CAPABILITY"  # what allows is not for who is allowed
_FALLBACK = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}


def guest_environment(ours: Mapping[str, str], asked: Iterable[str], *, home: str, bare: bool = False) -> dict[str, str]:
    """The complete environment of a guest. `asked` are the values of `--env`: NAME=VALUE, or NAME for the caller's own value.

    With `bare` nothing is passed that was not asked for: a run that is to be the same every time must not see how wide a terminal is.

    Raises `PolicyError` for a name that cannot be one, and for a variable that the caller does not have.
    """
    passed = {name: value for name, value in ours.items() if not bare and (name in PASSED or name.startswith("LC_"))}
    environment = {**_FALLBACK, "HOME": home, **passed}
    for text in asked:
        name, equals, value = text.partition("=")
        if not name:
            raise PolicyError(f"--env {text!r} has no name before the '='", hint="write --env NAME=VALUE")
        if not equals and name not in ours:
            raise PolicyError(f"--env {name}: there is no such variable to pass on", hint=f"set it, or write --env {name}=VALUE")
        if name == CAPABILITY:
            raise PolicyError(f"--env {name}: a capability is for the door, and is never shown inside", hint="leave it out")
        environment[name] = value if equals else ours[name]
    return environment
