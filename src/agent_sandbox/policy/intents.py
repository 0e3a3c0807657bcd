"""Intents: parts of the network that an agent opens by saying what it is about to do.

A person's policy names intents. What an intent opens always lies within the policy's other rules of the network. Where a policy names
intents, only the declared one is open, and those that are always open.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, replace
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.hosts import canonical_port
from agent_sandbox.policy.network import ANYBODY, WEB_PORTS, NetworkRules, Reach, Way, canonical_entry, leads, read_request
from agent_sandbox.policy.network_presets import PRESETS, HostList
from agent_sandbox.policy.network_presets import preset as preset_hosts

if TYPE_CHECKING:
    from typing import Any

DEFAULT_SECONDS = 600.0
LONGEST_SECONDS = 24 * 3600.0
LONGEST_NAME = 80
FIELD = "Agent-Sandbox-Intent"  # of a request that declares the intent of itself
_EVERY = ("*",)


def canonical_intent(written: object) -> str:
    """Return the canonical form of an intent's name: lower case, with single blanks. Raises `PolicyError` for anything else than ASCII."""
    name = " ".join(written.split()).lower() if isinstance(written, str) and written.isascii() else ""
    if not name or len(name) > LONGEST_NAME or not name.isprintable():
        raise PolicyError(
            f"not the name of an intent: {str(written)[:LONGEST_NAME]!r}", hint=f"use up to {LONGEST_NAME} ASCII letters, digits and blanks"
        )
    return name


class NetworkIntent:
    """An intent as a person writes it: its name, what it opens, and for how many seconds a declaration holds.

    `hosts`, `presets`, `ports` and `requests` are written as those of `[network]` in a policy file. An intent that is `always` open needs
    no declaration.

    >>> NetworkIntent("install python packages", presets=["packages"], seconds=600)
    NetworkIntent('install python packages', presets=('packages',), seconds=600)
    """

    def __init__(
        self,
        name: str,
        *,
        hosts: Iterable[str] | None = None,
        presets: Iterable[str] | None = None,
        requests: Iterable[str] = (),
        ports: Iterable[int] | None = None,
        seconds: float | None = None,
        always: bool = False,
    ) -> None:
        """Raises `PolicyError` for a value that cannot be used."""
        self.name = canonical_intent(name)
        self.hosts = None if hosts is None else tuple(canonical_entry(each) for each in _listed("hosts", hosts))
        self.presets = None if presets is None else _listed("presets", presets)
        self.requests = _listed("requests", requests)
        self.ports = None if ports is None else tuple(canonical_port(each) for each in _listed("ports", ports))
        self.seconds = seconds
        self.always = always
        for each in self.requests:
            read_request(each)
        if wrong := [each for each in self.presets or () if each not in PRESETS]:
            raise PolicyError(f"there is no network preset {wrong[0]!r}", hint=f"use one of {', '.join(PRESETS)}")
        if seconds is not None and not _is_time(seconds):
            raise PolicyError(f"an intent holds for a day at most, not for {seconds!r} seconds", hint="seconds=600")
        if not isinstance(always, bool):
            raise PolicyError(f"always must be True or False, not {always!r}", hint="it opens an intent without a declaration")

    def __repr__(self) -> str:
        said = {name: value for name, value in vars(self).items() if name != "name" and value not in (None, (), False)}
        return f"NetworkIntent({', '.join((repr(self.name), *(f'{name}={value!r}' for name, value in said.items())))})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NetworkIntent) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass(frozen=True)
class IntentReach:
    """The part of the network that an intent opens: a connection must lie within each reach. A declaration holds for `seconds`."""

    name: str
    reaches: Way
    seconds: float = DEFAULT_SECONDS
    always: bool = False

    def narrowed(self, other: IntentReach, *, timed: bool = True) -> IntentReach:
        """Return what both open. With `timed`, for the shorter of both times."""
        seconds = min(self.seconds, other.seconds) if timed else self.seconds
        return IntentReach(self.name, tuple(dict.fromkeys((*self.reaches, *other.reaches))), seconds, self.always)


@dataclass(frozen=True)
class Declared:
    """The intent that was declared from outside of the sandbox; until when, on the clock that cannot be set; and whether that is over."""

    name: str
    until: float | None = None
    lapsed: bool = False


def reach_of(intent: NetworkIntent, indexes: Iterable[str] = ()) -> IntentReach:
    """Return what an intent opens. `indexes` are the hosts of this machine's package indexes."""
    listed = HostList(intent.hosts or (), tuple(map(read_request, intent.requests)))
    for name in intent.presets or ():
        listed = listed.joined(preset_hosts(name, indexes))
    lists = intent.hosts is not None or intent.presets is not None
    ports = WEB_PORTS if intent.ports is None and lists else intent.ports
    # Whether a host may be private, opaque or uninspected is for the other rules to say.
    reach = Reach(listed.hosts if lists else None, ports, listed.requests, _EVERY, _EVERY, _EVERY)
    return IntentReach(intent.name, (reach,), DEFAULT_SECONDS if intent.seconds is None else float(intent.seconds), intent.always)


def table_of(intent: NetworkIntent) -> tuple[tuple[str, Any], ...]:
    """Return the keys and values of an intent's table in a policy file."""
    time = None if intent.seconds is None else f"{intent.seconds:.0f}s"
    said = {**{name: getattr(intent, name) for name in ("hosts", "presets", "requests", "ports", "always")}, "for": time}
    return tuple((key, value) for key, value in said.items() if value not in (None, False) and (value or key != "requests"))


def from_table(name: str, table: Mapping[str, Any]) -> NetworkIntent:
    """Return the intent of one table of a policy file, whose values have the right types. Raises `PolicyError`."""
    known = {key: value for key, value in table.items() if key != "for"}
    return NetworkIntent(name, seconds=seconds_of(table["for"]) if "for" in table else None, **known)


def seconds_of(text: str) -> float:
    """Return the seconds of a text such as `90`, `10m` or `2h`. Raises `PolicyError`."""
    number, unit = (text[:-1], text[-1]) if text[-1:].isalpha() else (text, "s")
    factor = {"s": 1, "m": 60, "h": 3600}.get(unit.lower())
    if factor is None or not (number.isascii() and number.isdigit() and len(number) < 7 and 0 < int(number) * factor <= LONGEST_SECONDS):
        raise PolicyError(f"not a time of a day at most: {text!r}", hint='write for = "10m"')
    return float(int(number) * factor)


def combined(named: Iterable[NetworkIntent], indexes: Iterable[str] = ()) -> tuple[IntentReach, ...]:
    """Return what intents open that a person named. Of two with one name, each narrows the other.

    `indexes` are the hosts of this machine's package indexes. Raises `PolicyError` for an intent that names no hosts.
    """
    indexes = tuple(indexes)
    found: dict[str, IntentReach] = {}
    for each in named:
        if each.hosts is None and each.presets is None:
            raise PolicyError(
                f"the intent {each.name!r} names no hosts", hint='write hosts = ["api.example.com"], or presets; ["*"] is all'
            )
        opened = reach_of(each, indexes)
        found[each.name] = found[each.name].narrowed(opened) if each.name in found else opened
    return tuple(found.values())


def narrowed_intents(
    intents: Iterable[IntentReach], others: Iterable[NetworkIntent], indexes: Iterable[str] = ()
) -> tuple[IntentReach, ...]:
    """Return intents, each narrowed by the others of its name. One that opens nothing any more stays: with none, all would be open."""
    indexes = tuple(indexes)
    found = {each.name: each for each in intents}
    for other in others:
        if other.name in found:
            found[other.name] = found[other.name].narrowed(reach_of(other, indexes), timed=other.seconds is not None)
    return tuple(found.values())


def both(ours: tuple[IntentReach, ...], theirs: tuple[IntentReach, ...]) -> tuple[IntentReach, ...]:
    """Return the intents of rules that lie within two sets of rules. One that only one of both names opens nothing."""
    if not (ours and theirs):
        return ours or theirs
    known = {each.name: each for each in theirs}
    nothing = IntentReach("", (Reach(()),))
    return tuple(
        replace(each.narrowed(known.get(each.name, nothing)), always=each.always and known.get(each.name, nothing).always) for each in ours
    )


def known_intent(rules: NetworkRules, written: object) -> IntentReach:
    """Return the intent of this name, written in any case. Raises `PolicyError` that names those there are."""
    name = canonical_intent(written)
    if not rules.intents:
        raise PolicyError(f"there is no intent {name!r}: the policy names none", hint='name it in your policy: [intents."' + name + '"]')
    found = next((each for each in rules.intents if each.name == name), None)
    if found is None:
        raise PolicyError(f"there is no intent {name!r}; the policy names {names_of(rules)}", hint="declare one of these")
    return found


def names_of(rules: NetworkRules) -> str:
    """Return the names of the intents as a list for people."""
    return ", ".join(repr(each.name) for each in rules.intents)


def for_request(rules: NetworkRules, written: str) -> NetworkRules:
    """Return the rules for a request that declares its own intent. Raises `PolicyError` if it may not.

    A program inside cannot change an intent that was declared from outside: it may be another than the one that was meant.
    """
    name = known_intent(rules, written).name
    if rules.declared is None:
        return replace(rules, declared=Declared(name))
    if rules.declared.name != name:
        why = f"the intent of this run is {rules.declared.name!r}, declared from outside; a request cannot change it to {name!r}"
        raise PolicyError(why, hint="declare it from outside")
    return rules


def objection_of_intents(rules: NetworkRules, name: str, port: int | None) -> str:
    """Return why no open intent leads to a host that the other rules allow; empty if those do not allow it either."""
    if not leads(rules.reaches, name, port, ANYBODY):
        return ""
    target = name if port is None else f"{name}:{port}"
    declared = rules.declared
    if declared is None:
        state = "no intent is declared"
    elif declared.lapsed:
        state = f"the intent {declared.name!r} has expired"
    else:
        state = f"the intent {declared.name!r} does not open {target}"
    others = [f"--intent {each.name!r}" for each in rules.intents if leads((*rules.reaches, *each.reaches), name, port, ANYBODY)]
    return f"{state}; " + (f"{' or '.join(others)} would open {target}" if others else f"no intent of the policy opens {target}")


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= LONGEST_SECONDS


def _listed(name: str, value: Iterable[Any]) -> tuple[Any, ...]:
    if isinstance(value, str | bytes):
        raise PolicyError(f"{name} must be a list, not {value!r}", hint=f"write {name}=[{value!r}]")
    return tuple(value)
