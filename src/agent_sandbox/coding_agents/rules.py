"""The lists of a person: commands that run directly, commands and tools that are asked about, tools that are left to the program.

They stand in one file in the person's home, `~/.config/agent-sandbox/coding-agents.toml`. The home is the one of the account, whatever
`$HOME` and `$XDG_CONFIG_HOME` say: a project's settings can set the environment of a coding agent, and must not choose this file. Without
the file, nothing runs directly. A broken file is an error, and the hook refuses.
"""

from __future__ import annotations

import os
import stat

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.coding_agents.shell_words import PLAIN
from agent_sandbox.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Sequence

FILE = ".config/agent-sandbox/coding-agents.toml"
_KEYS = ("direct", "ask", "tools")
_LARGEST = 1 << 20  # bytes


@dataclass(frozen=True)
class PersonRules:
    """The lists of a person. Each entry of `direct` and `ask` is a command; a last word `*` stands for any further words.

    `tools` are names of tools; a last letter `*` stands for any further letters.
    """

    direct: tuple[str, ...] = ()
    ask: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()

    def runs_directly(self, command: str) -> bool:
        """Whether a command may run outside of the sandbox. Only a single program with plain words can be listed."""
        words = _plain_words(command)
        return words is not None and any(_matches(words, entry) for entry in self.direct)

    def asks(self, command: str) -> bool:
        """Whether a person wants to be asked about a command. Every command that begins like an entry counts, whatever follows."""
        return any(_begins(command, entry) for entry in self.ask)

    def leaves(self, tool: str) -> bool:
        """Whether a tool is left to the program's own rules."""
        return any(tool == entry or (entry.endswith("*") and tool.startswith(entry[:-1])) for entry in self.tools)


def _plain_words(command: str) -> list[str] | None:
    """Return the words of a command that every shell reads in the same way; None for all other commands."""
    words = command.strip(" ").split(" ")
    return [word for word in words if word] if words[0] and all(PLAIN.issuperset(word) for word in words) else None


def _matches(words: Sequence[str], entry: str) -> bool:
    wanted = entry.split()
    if wanted[-1] == "*":
        return list(words[: len(wanted) - 1]) == wanted[:-1]
    return list(words) == wanted


def _begins(command: str, entry: str) -> bool:
    words, wanted = command.split(), entry.split()
    if wanted[-1] == "*":
        return words[: len(wanted) - 1] == wanted[:-1]
    return words == wanted


def account_file() -> str:
    """Return the path of the file of the account that runs this process; empty if the account has no home."""
    import pwd  # a module of the interpreter itself, but not on every system

    try:
        home = pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        return ""
    return os.path.join(home, FILE) if os.path.isabs(home) else ""


def read_rules(path: str) -> PersonRules:
    """Read the lists of a person; empty ones if there is no file. Raises `PolicyError` for a file that is broken or not to be trusted."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK) if path else None
    except (FileNotFoundError, NotADirectoryError):
        file = None
    except OSError as error:
        raise PolicyError(f"cannot read {path}: {error.strerror}", hint="make it readable, or remove it") from error
    if file is None:
        return PersonRules()
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
            raise PolicyError(f"{path} is no settings file", hint="remove it")
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
            raise PolicyError(f"others can write {path}", hint=f"chmod go-w {path}")
        data = os.read(file, _LARGEST)
    finally:
        os.close(file)
    return _parsed(data, path)


def _parsed(data: bytes, path: str) -> PersonRules:
    import tomllib  # only for those who have the file

    try:
        document = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise PolicyError(f"{path} is not TOML: {error}", hint="mend it, or remove it") from error
    for key, value in document.items():
        if key not in _KEYS:
            raise PolicyError(f"{path} has an unknown key {key!r}", hint=f"it may have {', '.join(_KEYS)}")
        if not isinstance(value, list) or not all(isinstance(each, str) and each.strip(" *") for each in value):
            raise PolicyError(f"{key!r} in {path} is not a list of names", hint=f'{key} = ["git status"]')
    for entry in document.get("direct", ()):
        if _plain_words(entry.removesuffix("*").rstrip(" ")) is None:
            raise PolicyError(
                f"{entry!r} in {path} cannot run directly", hint="name one program and plain words; a last word * for any others"
            )
    return PersonRules(*(tuple(document.get(key, ())) for key in _KEYS))
