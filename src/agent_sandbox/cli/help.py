"""Help, version, and shell completion, made from the tables that the command line is read with."""

from __future__ import annotations

from agent_sandbox.cli.options import COMMON, OPTIONS, VERBS
from agent_sandbox.cli.parser import Request, UsageError, describe

_OPENING = """Run an agent's commands on an instant copy-on-write clone of this machine, look at what they changed, then decide.

usage: agent-sandbox [OPTION…] VERB …          options stand before or after the verb

  agent-sandbox run "echo 'new content' > file.txt"     the clone is changed, the real file is not
  agent-sandbox diff                                    see what would change
  agent-sandbox promote                                 make it real, after a look; agent-sandbox undo takes it back
  agent-sandbox reset                                   or forget it
  agent-sandbox run -- python3 script.py                a program and its arguments, without a shell
  agent-sandbox doctor                                  what this machine can enforce

verbs:"""


def show_help(verb: str | None) -> int:
    """Print help for a verb, or for the whole program."""
    print(verb_help(verb) if verb else overview())
    return 0


def overview() -> str:
    """What the program is and which verbs there are."""
    width = max(map(len, VERBS)) + 2
    verbs = [f"  {name:<{width}}{verb.summary}" for name, verb in VERBS.items() if not verb.later]
    return "\n".join([_OPENING, *verbs, "", "options of every verb:", *_options(COMMON), "", "more: agent-sandbox help VERB"])


def verb_help(name: str) -> str:
    """What one verb does."""
    verb = VERBS[name]
    lines = [f"usage: agent-sandbox {verb.usage}", "", f"{verb.summary[0].upper()}{verb.summary[1:]}."]
    if verb.details:
        lines += ["", verb.details]
    return "\n".join([*lines, "", "options:", *_options((*verb.options, *COMMON))])


def _options(names: tuple[str, ...]) -> list[str]:
    return [f"  {describe(OPTIONS[name]):<26}{OPTIONS[name].help}" for name in names]


def version() -> str:
    """Which version this is."""
    from importlib import metadata

    try:
        return metadata.version("entersandbox")
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "of this checkout, not installed"


def help_or_version(request: Request) -> int:
    """The verbs `help` and `version`."""
    if request.verb == "version":
        number = version()
        if request.has("--json"):
            from agent_sandbox.cli.render.json import print_document

            print_document("version", {"version": number})
        else:
            print(f"agent-sandbox {number}")
        return 0
    name = request.words[0] if request.words else None
    if name is not None and name not in VERBS:
        raise UsageError(f"there is no verb {name!r}", hint="see: agent-sandbox help")
    if name is not None and VERBS[name].later:
        raise UsageError(f"{name!r} is not there yet: it arrives with {VERBS[name].later}", hint="see: agent-sandbox help")
    return show_help(name)


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
