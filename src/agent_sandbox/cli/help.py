"""Help and version, made from the grammar of the command line."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from agent_sandbox._fast.values import dataclass
from agent_sandbox.cli.grammar import COMMON, OPTIONS, VERBS
from agent_sandbox.cli.manual import MANUAL
from agent_sandbox.cli.parser import unknown_verb
from agent_sandbox.cli.render.messages import Console
from agent_sandbox.cli.results import VerbResult

_OPENING = """Run an agent's commands on an instant copy-on-write clone of this machine, look at what they changed, then decide.

usage: agent-sandbox [OPTION…] VERB …          options stand before or after the verb

  agent-sandbox run "echo 'new content' > file.txt"     the clone is changed, the real file is not
  agent-sandbox diff                                    see what would change
  agent-sandbox promote                                 make it real, after a look; agent-sandbox undo takes it back
  agent-sandbox reset                                   or forget it
  agent-sandbox run -- python3 script.py                a program and its arguments, without a shell
  agent-sandbox doctor                                  what this machine can enforce

verbs:"""


@dataclass(frozen=True)
class OptionHelp:
    """Help about an option: its spellings, the name of its value, and a summary."""

    name: str
    short: tuple[str, ...]
    value: str | None
    summary: str


@dataclass(frozen=True)
class VerbHelp:
    """Help about a verb: its usage, a summary, details and its options."""

    name: str
    usage: str
    summary: str
    details: str
    options: tuple[OptionHelp, ...]


@dataclass(frozen=True)
class HelpResult(VerbResult):
    """Help about one verb, or about all of them."""

    kind = "help"

    verb: str | None
    verbs: tuple[VerbHelp, ...]
    options: tuple[OptionHelp, ...]  # of every verb

    def text(self, console: Console) -> None:
        print(_verb_text(self.verbs[0], self.options) if self.verb is not None else _overview(self.verbs, self.options))


@dataclass(frozen=True)
class VersionResult(VerbResult):
    """The version of this program."""

    kind = "version"

    version: str

    def text(self, console: Console) -> None:
        print(f"agent-sandbox {self.version}")


def help_for(verb: str | None) -> HelpResult:
    """Return help about a verb, or about all of them. Raises `UsageError` if there is no such verb."""
    if verb is not None and verb not in VERBS:
        raise unknown_verb(verb)
    names = [verb] if verb is not None else list(VERBS)
    verbs = (
        VerbHelp(name, v.usage, v.summary, MANUAL.get(name, ""), _options(v.options, v.helps)) for name in names for v in (VERBS[name],)
    )
    common = COMMON if verb is None else VERBS[verb].every_option[len(VERBS[verb].options) :]
    return HelpResult(verb, tuple(verbs), _options(common))


def _options(names: tuple[str, ...], helps: Mapping[str, str] = MappingProxyType({})) -> tuple[OptionHelp, ...]:
    options = (OPTIONS[name] for name in names)
    return tuple(OptionHelp(option.name, option.short, option.value or None, helps.get(option.name, option.help)) for option in options)


def _overview(verbs: tuple[VerbHelp, ...], options: tuple[OptionHelp, ...]) -> str:
    width = max(map(len, VERBS)) + 2
    lines = [f"  {verb.name:<{width}}{verb.summary}" for verb in verbs]
    return "\n".join([_OPENING, *lines, "", "options of every verb:", *map(_line, options), "", "more: agent-sandbox help VERB"])


def _verb_text(verb: VerbHelp, common: tuple[OptionHelp, ...]) -> str:
    lines = [f"usage: agent-sandbox {verb.usage}", "", f"{verb.summary[0].upper()}{verb.summary[1:]}."]
    if verb.details:
        lines += ["", verb.details]
    return "\n".join([*lines, "", "options:", *map(_line, (*verb.options, *common))])


def _line(option: OptionHelp) -> str:
    spellings = f"{', '.join((*option.short, option.name))} {option.value or ''}".rstrip()
    return f"  {spellings:<26}{option.summary}"


def version() -> str:
    """Return the version of this program."""
    from importlib import metadata  # slow to load

    try:
        return metadata.version("entersandbox")
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "of this checkout, not installed"
