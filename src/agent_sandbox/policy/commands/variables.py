"""Variables that make other programs run something: what is set decides what is run, whoever is started afterwards."""

from __future__ import annotations

from agent_sandbox.policy.commands.expanding import Field
from agent_sandbox.policy.commands.registry.spec import words

# Their value is a command line.
_COMMANDS = words(
    """
    GIT_SSH_COMMAND GIT_SSH GIT_EXTERNAL_DIFF GIT_PAGER GIT_EDITOR GIT_SEQUENCE_EDITOR GIT_ASKPASS GIT_PROXY_COMMAND SSH_ASKPASS PAGER
    MANPAGER EDITOR VISUAL FCEDIT BROWSER PROMPT_COMMAND LESSOPEN LESSCLOSE RSYNC_RSH
    """
)
# Their value names what is loaded or read as code.
_LOADED = words(
    """
    BASH_ENV ENV LD_PRELOAD LD_AUDIT LD_LIBRARY_PATH GCONV_PATH PYTHONSTARTUP PYTHONHOME PERL5OPT PERL5DB RUBYOPT JAVA_TOOL_OPTIONS
    GIT_EXEC_PATH GIT_CONFIG_GLOBAL GIT_CONFIG_SYSTEM GIT_CONFIG_COUNT GIT_TEMPLATE_DIR
    """
)
_PROMPTS = words("PS0 PS1 PS2 PS4")
_LOADING_OPTIONS = ("-r", "--require", "--import", "--loader", "--experimental-loader")
_ANYBODYS = ("/tmp", "/var/tmp", "/dev/shm")


def is_command(name: str, value: str) -> bool:
    """Whether setting a variable to this gives a command line to who asks it for one. One word is what people set there: an editor, a
    pager, a browser, which is started when there is somebody to use it."""
    return name in _COMMANDS and not value.replace("-", "").replace(":", "").isalnum() and bool(value)


def loads(name: str, value: Field) -> bool:
    """Whether setting a variable to this has something loaded or run by what is started later."""
    text = value.shown
    if name in _LOADED or name.startswith("BASH_FUNC_"):
        return text != ""
    if name in _PROMPTS:
        return not value.known or holds_command(text)
    if name == "NODE_OPTIONS":
        return not value.known or any(word.partition("=")[0] in _LOADING_OPTIONS for word in text.split())
    return name == "PATH" and not all(map(_is_ours, text.split(":")))


def _is_ours(place: str) -> bool:
    """Whether a directory of PATH is one in which not just anybody puts programs; one that is not known is taken for such."""
    return place.startswith(("/", "~", "…", "$")) and not any(place == top or place.startswith(f"{top}/") for top in _ANYBODYS)


def holds_command(text: str) -> bool:
    """Whether a text would start something where a shell expands it."""
    return "$(" in text or "`" in text


def hides_command(text: str) -> bool:
    """Whether a text would start something where a shell computes with it: the index of an array is expanded then."""
    return "[$(" in text or "[`" in text
