"""The policy files of the machine, the user and the project, and how they narrow a policy.

The system's file binds every user and every `Sandbox`. The files of the user and of the project are below the system's file. They bind only
the command line and `Workspace`, which work on projects. An option that a person types may permit more than these two files, but not more
than the system's file. No file permits more than the files above it.
"""

from __future__ import annotations

import os
import stat

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, fields, replace
from agent_sandbox.assembly import here
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.model import OFFLINE, Guarantee, Policy, implied, with_network
from agent_sandbox.policy.network import NetworkRules, Reach, network_rules
from agent_sandbox.policy.search_rules import ACTIONS, SearchRules

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent_sandbox.engine.code_check import EarlyLook
    from agent_sandbox.policy.files.document import Document
    from agent_sandbox.policy.files.layers import Effective
    from agent_sandbox.policy.intents import IntentReach

SYSTEM = "/etc/agent-sandbox/policy.toml"
PROJECT_FILES = ("agent-sandbox.toml", "pyproject.toml")
_LARGEST = 1 << 20  # bytes
_TABLE = b"agent-sandbox"  # a pyproject.toml without this text has no settings for us, and is not parsed


@dataclass(frozen=True)
class Layers:
    """The policy documents by authority: the system's on top, then the user's, the project's, and those that an option names."""

    system: tuple[Document, ...] = ()
    user: tuple[Document, ...] = ()
    project: tuple[Document, ...] = ()
    chosen: tuple[Document, ...] = ()

    @property
    def below(self) -> tuple[Document, ...]:
        """The documents below the system's."""
        return (*self.user, *self.project, *self.chosen)

    @property
    def all(self) -> tuple[Document, ...]:
        """All documents: the system's first."""
        return (*self.system, *self.below)


@dataclass(frozen=True)
class Bound:
    """A policy narrowed by the policy files, the rules of the early code check, warnings, and the highest time limit that may be chosen."""

    policy: Policy
    early: EarlyLook | None
    warnings: tuple[str, ...] = ()
    most_seconds: float | None = None


def layers_of(project: str | None, *, system: str | None = None, user: str | None = None) -> Layers:
    """Read the policy files for a project. Without a project, only the system's. Raises `PolicyError` for an invalid or unreadable file."""
    top = _of(SYSTEM if system is None else system)
    if project is None:
        return Layers(top)
    return Layers(top, _of(os.path.join(here().host.config, "policy.toml") if user is None else user), _of_project(project))


def under(
    layers: Layers,
    ceiling: Policy,
    flagged: Mapping[str, float | None] | None = None,
    *,
    typed_network: bool = False,
    typed_ports: bool = False,
    capable: Sequence[str] = (),
    project: str | None = None,
) -> Effective:
    """Return the policy `ceiling`, narrowed by the layers.

    `flagged` are limits from the command line. They replace the limits of the user's and the project's file, up to the system's limits.
    With `typed_network`, the network of the ceiling is from the command line, too: the hosts that those two files deny stay denied, those
    that need approval need it, their budgets hold, and else only the system's file and the chosen documents narrow it. With `typed_ports`,
    likewise published ports. `capable` are hosts of capabilities, which the lists of those two files do not close either. Files of the
    `project` name no package index. Raises `PolicyError` if ports are to be published, and may not be.
    """
    from agent_sandbox.policy.files.layers import effective, network_of_layer

    home, indexes = here().host.home, _indexes(layers, project)
    top = effective(ceiling, layers.system, home=home, indexes=indexes)
    narrowed = effective(top, layers.below, home=home, indexes=indexes)
    # No option sets the output limit. Our own output limit, for JSON documents, must not exceed the limit of a policy file.
    most = {name: getattr((narrowed if name == "output_bytes" else top).policy.limits, name) for name in flagged or ()}
    typed = {name: _within(value, most[name]) for name, value in flagged.items()} if flagged else {}
    limits = replace(narrowed.policy.limits, **typed)  # type: ignore[arg-type]  # as the options were read, which is as Limits wants them
    network = narrowed.policy.network
    inbound = network.inbound
    if (typed_network or typed_ports) and not any(Guarantee.NO_NETWORK.value in layer.get("requires", ()) for layer in layers.below):
        freed = effective(top, layers.chosen, home=home, indexes=indexes).policy.network
        inbound = freed.inbound if typed_ports else inbound
        if typed_network:
            denied, asked = (
                [each for layer in layers.below for each in layer.get(key, ())] for key in ("network.denied_hosts", "approvals.network")
            )
            from agent_sandbox.policy.traffic_budgets import read_budget  # few runs have a network

            budgets = (read_budget(each) for layer in layers.below for each in layer.get("network.budgets", ()))
            network = freed.narrowed(
                network_rules(outbound=True, inbound=True, denied=denied, asked=asked, localhost=True, budgets=budgets)
            )
    if ceiling.network.inbound and not inbound:
        speaking = (*layers.system, *layers.chosen) if typed_ports else layers.all
        closing = [each for each in layers.all if each.get("requires")] + [each for each in speaking if not network_of_layer(each).inbound]
        names = ", ".join(dict.fromkeys(each.origin for each in closing or speaking))
        raise PolicyError(f"no port may be published: {names} forbids it", hint="leave it out (--publish, publish=)")
    network = replace(network, inbound=inbound)
    requires = narrowed.policy.requires | implied(narrowed.policy.processes, limits, narrowed.policy.programs, narrowed.policy.network)
    if network.outbound:
        network = network.with_capable(capable, kept=_reaches(layers.system, indexes)) if capable else network
        network = replace(network, search=search_of(layers, ceiling.network.search), intents=intents_of(layers, ceiling.network, indexes))
    policy = with_network(replace(narrowed.policy, limits=limits, requires=requires), network)
    return replace(narrowed, policy=policy, warnings=(*narrowed.warnings, *_network_warnings(layers, ceiling, policy)))


def _reaches(layers: Sequence[Document], indexes: Sequence[str]) -> set[Reach]:
    """Return what these documents, and the presets that they extend, permit of the network."""
    from agent_sandbox.policy.files.layers import network_of_layer
    from agent_sandbox.policy.files.presets import preset

    parts = (*layers, *(preset(layer.get("extends")) for layer in layers if layer.get("extends")))
    return {reach for part in parts for reach in network_of_layer(part, indexes).reaches}


def search_of(layers: Layers, asked: SearchRules) -> SearchRules:
    """Return what the layers say of the search of what leaves, for a caller that asks for this.

    A person's documents (the user's own, and those that an option names) may turn it off, choose milder actions, and name tables of rules.
    The system's and the project's only make actions stricter; the system's keeps the search on if it says `off = false`.
    """
    persons, others = (*layers.user, *layers.chosen), (*layers.system, *layers.project)
    kept_on = any(layer.get("dlp.off") is False for layer in layers.system)
    return SearchRules(
        not kept_on and (asked.off or any(layer.get("dlp.off", False) for layer in persons)),
        tuple({name: action for layer in persons for action in ACTIONS for name in layer.get(f"dlp.{action}", ())}.items()),
        tuple(dict.fromkeys((name, action) for layer in others for action in ACTIONS for name in layer.get(f"dlp.{action}", ()))),
        tuple(dict.fromkeys(path for layer in (*layers.system, *persons) for path in layer.get("dlp.rules", ()))),
    )


def intents_of(layers: Layers, asked: NetworkRules, indexes: Sequence[str] = ()) -> tuple[IntentReach, ...]:
    """Return the intents in force, for a caller whose rules name some, or none.

    A person's documents (the user's own, and those that an option names) name intents. If the caller's rules do, only those exist. Every
    other document narrows the ones of the same name, and names none.
    """
    persons = [each for layer in (*layers.user, *layers.chosen) for each in layer.intents]
    others = [each for layer in (*layers.system, *layers.project) for each in layer.intents]
    if not (asked.intents or persons):
        return ()
    from agent_sandbox.policy.intents import combined, narrowed_intents  # few policies name intents

    if asked.intents:
        return narrowed_intents(asked.intents, (*persons, *others), indexes)
    return narrowed_intents(combined(persons, indexes), others, indexes)


def asked_network(layers: Layers, project: str) -> NetworkRules:
    """Return the network that documents of a person ask for: the user's own, and those that an option names. No other opens one."""
    from agent_sandbox.policy.files.layers import asks_for_network, network_of_layer

    indexes = _indexes(layers, project)
    asked = [network_of_layer(each, indexes) for each in (*layers.user, *layers.chosen) if asks_for_network(each)]
    network = asked[0] if asked else OFFLINE
    for each in asked[1:]:
        network = network.narrowed(each)
    return replace(network, inbound=False)


def _indexes(layers: Layers, project: str | None) -> tuple[str, ...]:
    """Return the hosts of this machine's package indexes, if a layer names the preset that they belong to."""
    if not any(layer.get("network.presets") or any(each.presets for each in layer.intents) for layer in layers.all):
        return ()
    return tuple(each.host for each in here().package_indexes(project))


def _network_warnings(layers: Layers, ceiling: Policy, policy: Policy) -> tuple[str, ...]:
    """Return sentences about a network that was asked for and is not there, and about a search that a project cannot turn off."""
    if policy.network.outbound:
        asking = [each.origin for each in layers.project if each.get("dlp.off")] if not policy.network.search.off else []
        known = {each.name for each in policy.network.intents}
        added = [(layer.origin, each.name) for layer in layers.project for each in layer.intents if each.name not in known]
        return (
            *(f"what leaves is searched all the same: a project's file ({each}) cannot turn that off" for each in asking),
            *(f"the intent {name!r} is left out: a project's file ({origin}) narrows intents, and names none" for origin, name in added),
        )
    if ceiling.network.outbound:
        closing = [each for each in layers.all if each.get("network.outbound") is False or each.get("requires") or each.get("extends")]
        return (f"no network: {', '.join(each.origin for each in closing or layers.all)} closes it",)
    asking = [each.origin for each in layers.project if each.get("network.outbound") is True]
    return tuple(f"no network: a project's file ({each}) narrows one, and opens none; --network HOST does" for each in asking)


def bound(policy: Policy, early: EarlyLook | None, project: str | None = None) -> Bound:
    """Return the policy and the early code check (`early`) that a caller of the SDK asks for, narrowed by the policy files."""
    layers = layers_of(project)
    if not layers.all:  # the usual case, in which nothing more is loaded
        return Bound(policy, early)
    narrowed = under(layers, policy, project=project)
    endless = replace(policy, limits=replace(policy.limits, wall_seconds=None))
    most = under(Layers(layers.system), endless).policy.limits.wall_seconds
    return Bound(narrowed.policy, early_look(narrowed, early), narrowed.warnings, most)


def network_within_files(policy: Policy, network: NetworkRules, project: str | None) -> NetworkRules:
    """Return network rules that a program asks for under a policy, narrowed by every policy file."""
    layers = layers_of(project)
    asked = with_network(policy, network)
    return under(layers, asked, project=project).policy.network if layers.all else asked.network


def _within(value: float | None, most: float | None) -> float | None:
    return most if value is None or (most is not None and value > most) else value


def chosen(names: Sequence[str]) -> tuple[Document, ...]:
    """Return the policy documents that a person names, each a preset or a file. Raises `PolicyError` for any other name."""
    from agent_sandbox.policy.files.presets import PRESETS, preset

    documents: list[Document] = []
    for name in names:
        data = None if name in PRESETS else _trusted(name)
        if data is None and name not in PRESETS:
            raise PolicyError(f"there is no preset and no file {name!r}", hint=f"name a file, or one of {', '.join(PRESETS)}")
        documents.append(preset(name) if data is None else _parsed(name, data))
    return tuple(documents)


def early_look(narrowed: Effective, own: EarlyLook | None = None) -> EarlyLook | None:
    """Return the rules of the early code check: those of the policy files, combined with `own`; None if there are none."""
    if not (narrowed.validate or narrowed.blocked):
        return own
    from agent_sandbox.engine.code_check import IN_A_FILE, EarlyLook

    if own is None:
        return EarlyLook(None if narrowed.validate else (), narrowed.blocked, IN_A_FILE)
    return replace(own, rules=None if narrowed.validate else own.rules, more=(*own.more, *narrowed.blocked))


def _of(path: str) -> tuple[Document, ...]:
    data = _trusted(path)
    return () if data is None else (_parsed(path, data),)


def _trusted(path: str) -> bytes | None:
    """Read a policy file of the system or the user, following links; None if it does not exist."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(path, error) from error
    return _content(fd, path)


def _of_project(project: str) -> tuple[Document, ...]:
    """Read the project's policy file. An agent may have written it, so no link is followed, and only a regular file is opened."""
    for name in PROJECT_FILES:
        path = os.path.join(project, name)
        if not os.path.lexists(path):
            continue
        from agent_sandbox.workspace.beneath import open_file  # slow to load, and most projects have no such file

        try:
            directory = os.open(project, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                data = _content(open_file(directory, name), path)
            finally:
                os.close(directory)
        except OSError as error:
            raise _unreadable(path, error) from error
        if name == PROJECT_FILES[0] or _TABLE in data:
            return (_parsed(path, data),)
    return ()


def _content(fd: int, path: str) -> bytes:
    """Read an open file, and close it. Raises `PolicyError` if it is not a regular file, or is too large."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise PolicyError(f"{path} is no regular file", hint="put a file there, or remove it")
    with open(fd, "rb") as file:
        data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise PolicyError(f"{path} has more than {_LARGEST} bytes", hint="a policy is short")
    return data


def _parsed(path: str, data: bytes) -> Document:
    from agent_sandbox.policy.files.document import parse_toml

    try:
        return parse_toml(data.decode("utf-8"), origin=path)
    except UnicodeDecodeError:
        raise PolicyError(f"{path} is not UTF-8, which TOML has to be", hint="save it as UTF-8") from None


def _unreadable(path: str, error: OSError) -> PolicyError:
    return PolicyError(f"the policy file {path} cannot be read: {error.strerror}", hint="make it readable, or remove it")


def changed_limits(before: object, after: object) -> dict[str, float | None]:
    """Return the fields of `after` that differ from `before`, by name."""
    names = [each.name for each in fields(after)]  # type: ignore[arg-type]
    return {name: getattr(after, name) for name in names if getattr(before, name) != getattr(after, name)}
