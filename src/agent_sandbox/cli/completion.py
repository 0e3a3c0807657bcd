"""Completion for bash, zsh and fish: scripts, and the words that may stand at the end of a line.

The scripts ask `agent-sandbox completion words -- LINE…` for the words, so that all shells offer the same. They start the program by its
name and not as it was typed: a key that completes must not run a file of the current directory. Only words without any meaning to a shell
are offered. Where there are none, shells offer files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.cli.grammar import COMMON, OPTIONS, VERBS
from agent_sandbox.cli.options import COLOURS
from agent_sandbox.cli.parser import UsageError
from agent_sandbox.cli.render.messages import Console
from agent_sandbox.cli.results import VerbResult

if TYPE_CHECKING:
    from typing import Literal

_BASH = """_agent_sandbox() {
    mapfile -t COMPREPLY < <(command agent-sandbox completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -o default -o nosort -F _agent_sandbox agent-sandbox agentbox
"""
_ZSH = """#compdef agent-sandbox agentbox
_agent-sandbox() {
    local -a found
    found=("${(@f)$(command agent-sandbox completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -n ${found[1]} ]]; then compadd -- "${found[@]}"; else _files; fi
}
if [[ ${funcstack[1]} == _agent-sandbox ]]; then _agent-sandbox "$@"; else compdef _agent-sandbox agent-sandbox agentbox; fi
"""
_FISH = """function __agent_sandbox_words
    set -l line (commandline -opc)
    set -l current (commandline -ct)
    set -e line[1]
    set -l found (command agent-sandbox completion words -- $line "$current" 2>/dev/null)
    if set -q found[1]
        printf '%s\\n' $found
    else
        __fish_complete_path "$current"
    end
end
complete -c agent-sandbox -f -a '(__agent_sandbox_words)'
complete -c agentbox -f -a '(__agent_sandbox_words)'
"""
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
_SAFE = re.compile(r"[A-Za-z0-9._,:/@%+-]+")
_HEX = re.compile(r"[0-9a-f]{12,64}")
_SESSION = re.compile(r"t[0-9a-f]+")
_FIRST_WORDS = {
    "checkpoints": ("show", "delete", "export", "import"),
    "completion": ("bash", "zsh", "fish"),
    "image": ("list", "add", "load", "from-machine", "remove"),
    "log": ("verify", "checkpoint"),
    "policy": ("explain", "lint", "schema", "test", "learn"),
}


@dataclass(frozen=True)
class CompletionResult(VerbResult):
    """A completion script for a shell."""

    kind = "completion"

    shell: Literal["bash", "zsh", "fish"]
    script: str

    def text(self, console: Console) -> None:
        print(self.script, end="")


@dataclass(frozen=True)
class CompletionWordsResult(VerbResult):
    """The words that may stand at the end of a line."""

    kind = "completion-words"

    words: tuple[str, ...]

    def text(self, console: Console) -> None:
        for word in self.words:
            print(word)


def completion(words: Sequence[str]) -> VerbResult:
    """Return the completion script for a shell, or the words for a line. Raises `UsageError` for an unknown shell."""
    what, *line = words
    if what == "words":
        return CompletionWordsResult(candidates(line))
    if line:
        raise UsageError(f"too many arguments: {line[0]!r}", hint="agent-sandbox completion bash")
    match what:
        case "bash" | "zsh" | "fish":
            return CompletionResult(what, _SCRIPTS[what])
        case _:
            raise UsageError(f"there is no completion for {what!r}", hint="use bash, zsh or fish")


def candidates(line: Sequence[str]) -> tuple[str, ...]:
    """Return the words that may take the place of the last word of a line, and begin like it. Returns none if anything fails."""
    words = [word for word in line if word != "="] if line else [""]  # bash makes a word of each = in --color=always
    if line and line[-1] == "=":
        words.append("")
    *before, current = words
    try:
        option, equals, value = current.partition("=")
        if equals and option.startswith("--"):
            return tuple(f"{option}={word}" for word in _chosen(_values(option, value, before), value))
        return _chosen(_words(before, current), current)
    except Exception:  # a person is typing: nothing is better than a traceback
        return ()


def _chosen(words: Iterable[str], current: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word for word in words if word.startswith(current) and _SAFE.fullmatch(word)))


def _words(before: Sequence[str], current: str) -> Iterable[str]:
    verb, arguments, expecting = _read(before)
    if expecting is not None:
        return _values(expecting, current, before)
    if verb is None:
        return tuple(VERBS) if not current.startswith("-") else _spellings((*COMMON, "--version"))
    if verb not in VERBS or "--" in arguments or (VERBS[verb].command and arguments):
        return ()  # the line of a command of its own
    if current.startswith("-"):
        return _spellings(VERBS[verb].every_option)
    return _arguments(verb, arguments, before)


def _spellings(names: Iterable[str]) -> Iterable[str]:
    return (spelling for name in names for spelling in (name, *OPTIONS[name].short))


def _read(before: Sequence[str]) -> tuple[str | None, list[str], str | None]:
    """Return the verb of a line so far, its arguments, and the option that still needs its value."""
    verb: str | None = None
    arguments: list[str] = []
    expecting: str | None = None
    for word in before:
        if expecting is not None:
            expecting = None
        elif word.startswith("-") and word not in ("-", "--") and "--" not in arguments:
            option = OPTIONS.get(word)  # with =VALUE it is none, and complete
            expecting = option.name if option is not None and option.value else None
        elif verb is None:
            verb = word
        else:
            arguments.append(word)
    return verb, arguments, expecting


def _arguments(verb: str, arguments: Sequence[str], before: Sequence[str]) -> Iterable[str]:
    """Return the words that may be an argument of the verb."""
    if verb == "revoke":
        return _names("capabilities", _HEX)
    if verb == "checkpoints" and arguments and arguments[0] in ("show", "delete", "export") and len(arguments) == 1:
        return _names("checkpoints", _HEX)
    if arguments:
        return ()
    match verb:
        case "help":
            return tuple(VERBS)
        case "rollback":
            return _snapshots(before)
        case "carry-out":
            return _names("plans", _HEX)
        case "try":
            return _names("experiments", _HEX)
        case "timeline" | "rewind" | "inspect" | "fork":
            return _names("timelines", _SESSION)
        case "approve" | "deny":
            return _names("approvals", _HEX)
        case _:
            return _FIRST_WORDS.get(verb, ())


def _values(option: str, current: str, before: Sequence[str]) -> Iterable[str]:
    """Return the known values of an option."""
    match option:
        case "--approve":
            from agent_sandbox.workspace.protected import CLASSES  # quick: only where it is needed

            given, comma, _ = current.rpartition(",")
            return (f"{given}{comma}{kind}" for kind in CLASSES if kind not in given.split(","))
        case "--policy":
            from agent_sandbox.policy.files.presets import PRESETS  # quick: only where it is needed

            return PRESETS
        case "--category" | "--level":
            from agent_sandbox.ledger.event import CATEGORIES, LEVELS  # quick: only where it is needed

            return CATEGORIES[:-2] if option == "--category" else LEVELS
        case "--format":
            from agent_sandbox.ledger.export import FORMS  # quick: only where it is needed

            return FORMS
        case "--language":
            from agent_sandbox.policy.action import LANGUAGES  # quick: only where it is needed

            return LANGUAGES
        case "--sandbox":
            return _names("sandboxes", _SAFE)
        case "--in":
            return (*_names("timelines", _SESSION), "last")
        case "--forget":
            return _snapshots(before)
        case "--color":
            return COLOURS
        case "--runtime":
            return ("process", "wasm", "container", "gvisor", "microvm", "auto")
        case "--keep":
            return ("all", "winner", "none")
        case "--live":
            return ("stores", "all", "none")
        case "--resolve":
            return ("ours", "theirs", "markers")
        case _:
            return ()


def _names(directory: str, form: re.Pattern[str]) -> list[str]:
    """Return the names in a directory of the state. Looking makes nothing."""
    from agent_sandbox.assembly import here  # quick: only where it is needed

    return sorted(name for name in os.listdir(os.path.join(here().host.state, directory)) if form.fullmatch(name))


def _snapshots(before: Sequence[str]) -> list[str]:
    """Return the labels and numbers of the project's snapshots."""
    from agent_sandbox.assembly import here  # quick: only where it is needed
    from agent_sandbox.cli.context import project_of  # quick: only where it is needed
    from agent_sandbox.workspace.layers import history  # quick: only where it is needed
    from agent_sandbox.workspace.store import sandbox_id  # quick: only where it is needed

    named = next((value for option, value in pairwise(before) if option == "--project"), None)
    found = history.load(os.path.join(here().host.state, "sandboxes", sandbox_id(project_of(named).path)))
    snapshots = found.snapshots if found is not None else ()
    return [*(each.label for each in snapshots if each.label), *(str(each.id) for each in snapshots)]
