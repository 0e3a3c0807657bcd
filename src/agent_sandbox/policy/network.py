"""The network connections and requests that a policy permits.

Each layer of a policy that speaks of the network is a `Reach`. A connection must be within the reach of every layer, so layers can only
narrow. A layer that says nothing of the network has no reach, and narrows nothing. What a person opens while a run goes on is a second
way, with reaches of its own: a connection must lie within every reach of one way.

A layer may also name hosts that a person is asked for. A connection that one layer of a way asks for, and every other permits or asks for,
needs a yes.
"""

from __future__ import annotations

from agent_sandbox._fast.functions import lru_cache
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, replace
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.hosts import bracketed, canonical_host, canonical_pattern, canonical_port, covers, is_local
from agent_sandbox.policy.search_rules import SearchRules

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from agent_sandbox.policy.intents import Declared, IntentReach
    from agent_sandbox.policy.traffic_budgets import TrafficBudget

WEB_PORTS = (80, 443)  # any other port must be named by a layer
_READING = ("GET", "HEAD", "OPTIONS")  # the methods that change nothing at a host, by RFC 9110
_FETCHING = "/git-upload-pack"  # what git sends to fetch


@dataclass(frozen=True)
class RequestRule:
    """The requests that a host may be sent. Empty `methods` and `paths` are all.

    `/v1/*` is every path that begins with `/v1/`, and `/**/status` is every path that ends with `/status`.

    A host that is covered by rules may be sent what one of them permits. A host that no rule covers may be sent anything.
    """

    host: str
    methods: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reach:
    """The connections and requests that one layer of a policy permits.

    `hosts` are patterns, each with or without a port (`db.example.com:5432`); None is every public host. A pattern without a port means
    `ports`, by default those of the web. Without hosts and ports, a layer says nothing of ports.

    `uninspected` are patterns of hosts whose TLS is passed on unread, `opaque` are hosts with a port whose bytes are passed on whatever
    they are, and `private` are hosts that may lie on a private address. Each holds only if every layer grants it.

    `asked` are patterns like `hosts`, of hosts that may be reached once a person agrees: beyond the list, or among all if there is no list.
    `capable` are those for which a capability of the sandbox answers, and nobody is asked.
    """

    hosts: tuple[str, ...] | None = None
    ports: tuple[int, ...] | None = None
    requests: tuple[RequestRule, ...] = ()
    uninspected: tuple[str, ...] = ()
    opaque: tuple[str, ...] = ()
    private: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()
    capable: tuple[str, ...] = ()

    def permits(self, host: str, port: int | None) -> bool:
        """Return whether a canonical host may be reached at a port without a question; at any port, if None."""
        if self.hosts is None:
            return (port is None or self.ports is None or port in self.ports) and not self._has(self.asked, host, port)
        return self._has(self.hosts, host, port)

    def asks(self, host: str, port: int | None, *, person: bool = False) -> bool:
        """Return whether a canonical host may be reached at a port once a capability or a person agrees; at any port, if None.

        With `person`, a person is asked if no capability does.
        """
        return self._has(self.asked if person else (*self.asked, *self.capable), host, port)

    def names(self, host: str, port: int) -> bool:
        """Return whether this layer names the port for a canonical host, with the host or among `ports`."""
        if self.hosts is None and port in (self.ports or ()):
            return True
        return any(ports is not None and port in ports for ports in self._ports_of(self.entries, host))

    @property
    def entries(self) -> tuple[str, ...]:
        """The entries of this layer: of hosts that may be reached, asked for, or answered for by a capability."""
        return (*(self.hosts or ()), *self.asked, *self.capable)

    def _has(self, entries: Iterable[str], host: str, port: int | None) -> bool:
        return any(port is None or ports is None or port in ports for ports in self._ports_of(entries, host))

    def _ports_of(self, entries: Iterable[str], host: str) -> Iterator[tuple[int, ...] | None]:
        """Return the ports of each entry that covers a host; None for an entry that means every port."""
        ports = WEB_PORTS if self.ports is None and self.hosts is not None else self.ports
        return ((own,) if own else ports for pattern, own in map(split_port, entries) if covers((pattern,), host))

    @property
    def limits(self) -> bool:
        """Whether this layer limits hosts or ports."""
        return self.hosts is not None or self.ports is not None

    @property
    def lists(self) -> bool:
        """Whether this layer lists hosts, instead of permitting every public one."""
        return self.hosts is not None and not any(split_port(each)[0] == "*" for each in self.hosts)

    @property
    def named_ports(self) -> frozenset[int]:
        """The ports that this layer names, for some host or for all."""
        return frozenset(port for _, port in map(split_port, self.entries) if port) | frozenset(self.ports or ())

    def with_capable(self, entries: Iterable[str]) -> Reach:
        """Return the same reach, where a capability may answer for these entries as well, as far as they are not permitted.

        A single host at a port beyond the web's may be sent any bytes, because its protocol is rarely HTTP.
        """
        if self.hosts is None:
            entries = (each for each in entries if (port := split_port(each)[1]) and self.ports is not None and port not in self.ports)
        capable = tuple(dict.fromkeys(entries))
        bare = [each for each in capable if split_port(each)[1] not in (None, *WEB_PORTS) and not each.startswith("*")]
        return replace(self, capable=(*self.capable, *capable), opaque=tuple(dict.fromkeys((*self.opaque, *bare))))

    @property
    def excepts(self) -> bool:
        """Whether this layer decides on exceptions: it lists hosts, ports or requests, or grants one. One that only asks does not."""
        return self != Reach(asked=self.asked, capable=self.capable)


Way = tuple[Reach, ...]


@dataclass(frozen=True)
class GrantedWay:
    """A way that was opened while a run went on; until when, on the clock that cannot be set. None is to the end of the run."""

    way: Way
    until: float | None = None


@dataclass(frozen=True)
class NetworkRules:
    """The network connections that are permitted: those within every reach of a way, and to no denied host. Without `outbound`, none.

    `reaches` are those of the policy's layers.
    """

    outbound: bool = False
    inbound: bool = False  # whether ports may be published, so that programs of the machine reach servers of the sandbox
    reaches: tuple[Reach, ...] = ()
    denied: tuple[str, ...] = ()
    localhost: bool = False  # whether the sandbox's own loopback may be used
    search: SearchRules = SearchRules()  # what is done about secrets and personal data that leave
    budgets: tuple[TrafficBudget, ...] = ()  # all of which must hold
    granted: tuple[GrantedWay, ...] = ()  # opened besides, while a run went on
    intents: tuple[IntentReach, ...] = ()  # if there are any, only the declared one is open, and those that always are
    declared: Declared | None = None

    @property
    def ways(self) -> tuple[Way, ...]:
        """The ways to the outside. What is judged of one connection or request is judged by the reaches of the same way."""
        own: tuple[Way, ...] = (self.reaches,)
        if self.intents:
            name = self.declared.name if self.declared is not None and not self.declared.lapsed else ""
            own = tuple((*self.reaches, *each.reaches) for each in self.intents if each.always or each.name == name)
        return (*own, *(each.way for each in self.granted))

    def widest(self) -> NetworkRules:
        """Return the rules with every intent open: what can be reached by declaring one."""
        return replace(self, intents=tuple(replace(each, always=True) for each in self.intents)) if self.intents else self

    def declarable(self) -> NetworkRules:
        """Return the rules with every intent open that a request may declare for itself: none beside one that was declared from outside."""
        return self if self.declared is not None else self.widest()

    def at(self, now: float) -> NetworkRules:
        """Return the rules at a later time, without what has expired."""
        granted = tuple(each for each in self.granted if each.until is None or now < each.until)
        declared = self.declared
        if declared is not None and declared.until is not None and now >= declared.until:
            declared = replace(declared, lapsed=True)
        return self if (granted, declared) == (self.granted, self.declared) else replace(self, granted=granted, declared=declared)

    @property
    def expires(self) -> float | None:
        """When the next of what is open expires; None if nothing does."""
        declared = [] if self.declared is None or self.declared.lapsed else [self.declared.until]
        return min((each for each in (*declared, *(each.until for each in self.granted)) if each is not None), default=None)

    def permits(self, host: str, port: int) -> bool:
        """Return whether a connection may be opened. Judges the host as written, not the addresses it resolves to."""
        name = canonical_host(host)
        if not self.outbound or covers(self.denied, name):
            return False
        return self.localhost if is_local(name) else any(all(reach.permits(name, port) for reach in way) for way in self.ways)

    def objection(self, name: str, port: int | None = None) -> str:
        """Return why a canonical host outside of the sandbox may not be reached, at a port if one is given; empty if it may be."""
        if not self.outbound:
            return "the policy allows no network"
        if covers(self.denied, name):
            return f"the policy denies {name}"
        if is_local(name):
            return f"{name} is this sandbox itself"
        if self._free(name, port):
            return ""
        closed = not self._leading(name)
        if self.intents and (closed or (port is not None and not self._leading(name, port))):
            from agent_sandbox.policy.intents import objection_of_intents  # few policies name intents

            if why := objection_of_intents(self, name, port):
                return why
        if closed:
            inner = name.startswith(("169.254.", "fe80:"))  # nobody should be led to open the metadata service of a cloud
            return f"the policy does not allow {name}" + ("" if inner else f"; --network {name} would")
        if port is not None and not self._leading(name, port):
            return f"the policy does not allow port {port} of {name}; --network {name}:{port} would"
        return f"the policy asks before {name} is reached, and nobody has agreed"

    def refusal(self, name: str, port: int | None = None) -> str:
        """Return why a canonical host may not be reached, not even if somebody agrees; empty if it may be."""
        why = self.objection(name, port)
        return "" if why and self.asks_for(name, port) else why

    def asks_for(self, name: str, port: int | None = None, *, person: bool = False) -> bool:
        """Return whether a canonical host may be reached once a capability or a person agrees, and not before.

        With `person`, a person is asked if no capability does.
        """
        if not self.outbound or covers(self.denied, name) or is_local(name) or self._free(name, port):
            return False
        return any(leads(way, name, port, PERSON if person else ANYBODY) for way in self.ways)

    def _free(self, name: str, port: int | None) -> list[Way]:
        """Return the ways that lead to a canonical host without a question."""
        return [way for way in self.ways if leads(way, name, port)]

    def _leading(self, name: str, port: int | None = None) -> list[Way]:
        """Return the ways that lead to a canonical host at a port, at any port if None: those without a question, and else the others."""
        return self._free(name, port) or [way for way in self.ways if leads(way, name, port, ANYBODY)]

    @property
    def listened(self) -> tuple[int, ...]:
        """The ports at which the sandbox's connections are accepted, sorted: the web's, and those that a layer names."""
        if not self.outbound:
            return ()
        return tuple(sorted(frozenset(WEB_PORTS).union(*(reach.named_ports for way in self.widest().ways for reach in way))))

    def request_objection(self, name: str, method: str, path: str, port: int | None = None) -> str:
        """Return why a request with this method and path (without its query) may not be sent to a canonical host; empty if it may be.

        With a port, only the ways that lead to the host at that port count.
        """
        objections = [_objects(way, name, method, path) for way in self._leading(name, port)]
        return objections[0] if objections and all(objections) else "" if objections else self.objection(name, port)

    def passes_uninspected(self, name: str, port: int | None = None) -> bool:
        """Return whether TLS to this canonical host is passed on unread."""
        return any(way and all(covers(reach.uninspected, name) for reach in way) for way in self._excepting(name, port))

    def passes_opaque(self, name: str, port: int) -> bool:
        """Return whether any bytes may be exchanged with this canonical host at this port."""
        return any(way and all(_names(reach.opaque, name, port) for reach in way) for way in self._excepting(name, port))

    def may_be_private(self, name: str, port: int | None = None) -> bool:
        """Return whether this canonical host may lie on a private address. A host that is named by its address may."""
        return any(way and all(_has_private(reach, name) for reach in way) for way in self._excepting(name, port))

    def _excepting(self, name: str, port: int | None) -> list[Way]:
        """Return the ways that lead to a host, each with the layers that decide on exceptions."""
        return [tuple(reach for reach in way if reach.excepts) for way in self._leading(name, port)]

    def with_capable(self, entries: Iterable[str], kept: Iterable[Reach] = ()) -> NetworkRules:
        """Return rules under which a capability may answer for these hosts as well, in every layer but those that are kept.

        This widens rules: the entries come from a capability that a person granted.
        """
        capable = tuple(canonical_entry(each) for each in entries)
        if not capable:
            return self
        if not self.outbound:
            return replace(self, outbound=True, reaches=(Reach(()).with_capable(capable),), localhost=True)
        return replace(self, reaches=tuple(reach if reach in kept else reach.with_capable(capable) for reach in self.reaches))

    @property
    def questions(self) -> bool:
        """Whether a run under these rules may lead to a question: for a host, or about data that was found."""
        return self.outbound and (any(reach.asked or reach.capable for way in self.widest().ways for reach in way) or self.search.asks)

    def grounded(self) -> NetworkRules:
        """Return the same rules with a reach of their own, as those of a policy need it.

        A layer can only narrow rules that have one: it names no port and no exception for a host that these do not name as well.
        """
        if not self.outbound or any(reach.limits for reach in self.reaches):
            return self
        first, *rest = self.reaches or (Reach(),)
        return replace(self, reaches=(replace(first, ports=WEB_PORTS), *rest))

    def narrowed(self, other: NetworkRules) -> NetworkRules:
        """Return rules that permit only what both sets of rules permit."""
        intents = self.intents
        if self.intents or other.intents:
            from agent_sandbox.policy.intents import both  # few policies name intents

            intents = both(self.intents, other.intents)
        return NetworkRules(
            self.outbound and other.outbound,
            self.inbound and other.inbound,
            tuple(dict.fromkeys((*self.reaches, *other.reaches))),
            tuple(dict.fromkeys((*self.denied, *other.denied))),
            self.localhost and other.localhost,
            self.search.narrowed(other.search),
            tuple(dict.fromkeys((*self.budgets, *other.budgets))),
            () if other.intents else tuple(replace(each, way=(*each.way, *other.reaches)) for each in self.granted),
            intents,
            self.declared,
        )

    def opened(self, way: Way, *, until: float | None = None) -> NetworkRules:
        """Return rules that permit what lies within every reach of this way as well. Denied hosts stay denied.

        Whoever opens a way puts the reaches into it that must hold for every way, such as those of the system's policy.
        """
        return replace(self, granted=(*self.granted, GrantedWay(way, until))) if way else self

    @property
    def asks(self) -> bool:
        """Whether connections are asked for, in any direction."""
        return self.outbound or self.inbound


def network_rules(
    *,
    outbound: bool = False,
    inbound: bool = False,
    hosts: Iterable[str] | None = None,
    denied: Iterable[str] = (),
    ports: Iterable[int] | None = None,
    requests: Iterable[RequestRule] = (),
    uninspected: Iterable[str] = (),
    opaque: Iterable[str] = (),
    private: Iterable[str] = (),
    asked: Iterable[str] = (),
    localhost: bool = False,
    budgets: Iterable[TrafficBudget] = (),
) -> NetworkRules:
    """Return the network rules of one layer. Raises `PolicyError` naming an invalid value.

    Without `hosts`, every public host is allowed; without `ports`, every port, of which those beyond the web's must be named somewhere.
    """
    reach = Reach(
        None if hosts is None else tuple(canonical_entry(each) for each in hosts),
        None if ports is None else tuple(canonical_port(each) for each in ports),
        tuple(requests),
        tuple(canonical_pattern(each) for each in uninspected),
        tuple(canonical_entry(each) for each in opaque),
        tuple(canonical_pattern(each) for each in private),
        tuple(canonical_entry(each) for each in asked),
    )
    reaches = () if reach == Reach() else (reach,)
    denying = tuple(canonical_pattern(each) for each in denied)
    return NetworkRules(outbound, inbound, reaches, denying, localhost, budgets=tuple(budgets))


def public_web() -> NetworkRules:
    """Return rules that permit every public host at the ports of the web."""
    return network_rules(outbound=True, ports=WEB_PORTS, localhost=True)


def only_reads(method: str, path: str) -> bool:
    """Return whether a request changes nothing at its host: by its method, or because git fetches with it."""
    return method in _READING or (method == "POST" and path.endswith(_FETCHING))


def read_request(written: object) -> RequestRule:
    """Return the rule that a text writes: methods, a host, and a path if only some are meant. Raises `PolicyError`.

    >>> read_request("GET,HEAD *.example.com/v1/*")
    RequestRule(host='*.example.com', methods=('GET', 'HEAD'), paths=('/v1/*',))
    """
    words = written.split() if isinstance(written, str) else []
    methods, target = words if len(words) == 2 else ("", "")
    names = () if methods == "*" else tuple(each.upper() for each in methods.split(","))
    host, slash, rest = target.partition("/")
    path = slash + rest
    if not (methods and all(each.isascii() and each.isalpha() for each in names) and path.isascii() and "?" not in path):
        raise PolicyError(f"not a rule for requests: {written!r}", hint='write "GET,HEAD api.example.com/v1/*", or "* api.example.com"')
    if "*" in path.removeprefix("/**/" if path.startswith("/**/") else "").removesuffix("" if path.startswith("/**/") else "*"):
        raise PolicyError(
            f"the path {path!r} holds a * in the middle", hint='end it with * ("/v1/*"), or begin it with /**/ ("/**/status")'
        )
    return RequestRule(canonical_pattern(host), names, (path,) if path else ())


def canonical_entry(written: object) -> str:
    """Return the canonical form of a pattern of hosts with or without a port. Raises `PolicyError`."""
    if isinstance(written, str):
        host, colon, port = written.rpartition(":")
        if colon and port.isdigit() and (":" not in host or host.endswith("]")):
            pattern = canonical_pattern(host)
            return f"{bracketed(pattern)}:{canonical_port(int(port))}"
    return canonical_pattern(written)


@lru_cache(maxsize=4096)  # the same few are read for every request
def split_port(entry: str) -> tuple[str, int | None]:
    """Return the pattern and the port of a canonical entry."""
    host, colon, port = entry.rpartition(":")
    if host.endswith("]"):
        return host[1:-1], int(port)
    return (host, int(port)) if colon and ":" not in host else (entry, None)


def is_address(host: str) -> bool:
    """Return whether a canonical host is an address, not a name."""
    return ":" in host or host.rpartition(".")[2].isdigit()


def _names(entries: Iterable[str], name: str, port: int) -> bool:
    return any(covers((pattern,), name) and own in (None, port) for pattern, own in map(split_port, entries))


PERSON, ANYBODY = "person", "anybody"


def leads(way: Way, name: str, port: int | None, asked: str = "") -> bool:
    """Return whether a way leads to a host; with `asked`, perhaps after a question to a person, or to anybody."""
    if port is not None and port not in WEB_PORTS and not any(reach.names(name, port) for reach in way):
        return False
    return all(reach.permits(name, port) or (asked and reach.asks(name, port, person=asked == PERSON)) for reach in way)


def _objects(way: Way, name: str, method: str, path: str) -> str:
    """Return why a way does not permit a request to a host that it leads to; empty if it does."""
    for reach in way:
        rules = [rule for rule in reach.requests if covers((rule.host,), name)]
        if rules and not any(_fits(rule, method, path) for rule in rules):
            methods = sorted({each for rule in rules for each in rule.methods if _fits(rule, each, path)})
            if methods:
                return f"the policy allows only {', '.join(methods)} at {name}, and this is {method}"
            return f"the policy does not allow {method} {path} at {name}"
    return ""


def _has_private(reach: Reach, name: str) -> bool:
    return covers(reach.private, name) or (is_address(name) and name in {split_port(each)[0] for each in reach.entries})


def _fits(rule: RequestRule, method: str, path: str) -> bool:
    if rule.methods and method not in rule.methods:
        return False
    return not rule.paths or any(_is_path(each, path) for each in rule.paths)


def _is_path(pattern: str, path: str) -> bool:
    if pattern.startswith("/**/"):
        return path.endswith(pattern[3:])
    return path.startswith(pattern[:-1]) if pattern.endswith("*") else path == pattern
