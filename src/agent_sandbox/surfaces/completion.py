"""`completion`: scripts that let a shell complete verbs and options, made from the tables that the command line is read with."""

from __future__ import annotations

from agent_sandbox.surfaces.arguments import Request, UsageError
from agent_sandbox.surfaces.verbs import COMMON, OPTIONS, VERBS

_BASH = """_agent_sandbox() {
    local current=${COMP_WORDS[COMP_CWORD]} word verb=
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        case $word in @PATTERN@) verb=$word; break ;; esac
    done
    case $verb in
        "") COMPREPLY=($(compgen -W "@VERBS@ @COMMON@" -- "$current")) ;;
@CASES@
    esac
}
complete -o default -F _agent_sandbox agent-sandbox agentbox
"""

_ZSH = """#compdef agent-sandbox agentbox
autoload -U +X bashcompinit && bashcompinit
"""


def completion(request: Request) -> int:
    """The verb `completion`."""
    shell = request.words[0]
    if shell not in ("bash", "zsh"):
        raise UsageError(f"there is no completion for {shell!r}", hint="there is one for bash and for zsh")
    print((_ZSH if shell == "zsh" else "") + bash_script(), end="")
    return 0


def bash_script() -> str:
    """The script for bash; zsh reads it too."""
    verbs = {name: verb for name, verb in VERBS.items() if not verb.later}
    cases = []
    for name, verb in verbs.items():
        spellings = " ".join(spelling for option in (*verb.options, *COMMON) for spelling in (option, *OPTIONS[option].short))
        words = {"help": " ".join(verbs), "completion": "bash zsh"}.get(name, "")
        cases.append(f'        {name}) COMPREPLY=($(compgen -W "{f"{words} " if words else ""}{spellings}" -- "$current")) ;;')
    return (
        _BASH.replace("@PATTERN@", "|".join(verbs))
        .replace("@VERBS@", " ".join(verbs))
        .replace("@COMMON@", " ".join(COMMON))
        .replace("@CASES@", "\n".join(cases))
    )
