"""The network connections and requests that a policy permits.

Each layer of a policy that speaks of the network is a `Reach`. A connection must be within the reach of every layer, so layers can only
narrow. A layer that says nothing of the network has no reach, and narrows nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from agent_sandbox._fast.values import dataclass, replace
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.hosts import canonical_host, canonical_pattern, canonical_port, covers, is_local
from agent_sandbox.policy.search_rules import SearchRules

WEB_PORTS = (80, 443)  # any other port must be named by a layer


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
    """What one layer of a policy permits.

    `hosts` are patterns, each with or without a port (`db.example.com:5432`); None is every public host. A pattern without a port means
    `ports`, by default those of the web. Without hosts and ports, a layer says nothing of ports.

    `uninspected` are patterns of hosts whose TLS is passed on unread, `opaque` are hosts with a port whose bytes are passed on whatever
    they are, and `private` are hosts that may lie on a private address. Each holds only if every layer grants it.
    """

    hosts: tuple[str, ...] | None = None
    ports: tuple[int, ...] | None = None
    requests: tuple[RequestRule, ...] = ()
    uninspected: tuple[str, ...] = ()
    opaque: tuple[str, ...] = ()
    private: tuple[str, ...] = ()

    def permits(self, host: str, port: int | None) -> bool:
        """Return whether a canonical host may be reached at a port; at any port, if None."""
        return (port is None and self.hosts is None) or any(
            port is None or ports is None or port in ports for ports in self._ports_of(host)
        )

    def names(self, host: str, port: int) -> bool:
        """Return whether this layer names the port for a canonical host, with the host or among `ports`."""
        return any(ports is not None and port in ports for ports in self._ports_of(host))

    def _ports_of(self, host: str) -> list[tuple[int, ...] | None]:
        """Return the ports of each entry that covers a host; None for an entry that means every port."""
        if self.hosts is None:
            return [self.ports]
        ports = WEB_PORTS if self.ports is None else self.ports
        return [(own,) if own else ports for pattern, own in map(split_port, self.hosts) if covers((pattern,), host)]

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
        return frozenset(port for _, port in map(split_port, self.hosts or ()) if port) | frozenset(self.ports or ())


@dataclass(frozen=True)
class NetworkRules:
    """The network connections that are permitted: those within every reach, and to no denied host. Without `outbound`, none."""

    outbound: bool = False
    inbound: bool = False
    reaches: tuple[Reach, ...] = ()
    denied: tuple[str, ...] = ()
    localhost: bool = False  # whether the sandbox's own loopback may be used
    search: SearchRules = SearchRules()  # what is done about secrets and personal data that leave

    def permits(self, host: str, port: int) -> bool:
        """Return whether a connection may be opened. Judges the host as written, not the addresses it resolves to."""
        name = canonical_host(host)
        if not self.outbound or covers(self.denied, name):
            return False
        return self.localhost if is_local(name) else all(reach.permits(name, port) for reach in self.reaches)

    def objection(self, name: str, port: int | None = None) -> str:
        """Return why a canonical host outside of the sandbox may not be reached, at a port if one is given; empty if it may be."""
        if not self.outbound:
            return "the policy allows no network"
        if covers(self.denied, name):
            return f"the policy denies {name}"
        if is_local(name):
            return f"{name} is this sandbox itself"
        if not all(reach.permits(name, None) for reach in self.reaches):
            inner = name.startswith(("169.254.", "fe80:"))  # nobody should be led to open the metadata service of a cloud
            return f"the policy does not allow {name}" + ("" if inner else f"; --network {name} would")
        if port is not None and not self._opens(name, port):
            return f"the policy does not allow port {port} of {name}; --network {name}:{port} would"
        return ""

    def _opens(self, name: str, port: int) -> bool:
        named = port in WEB_PORTS or any(reach.names(name, port) for reach in self.reaches)
        return named and all(reach.permits(name, port) for reach in self.reaches)

    @property
    def listened(self) -> tuple[int, ...]:
        """The ports at which the sandbox's connections are accepted, sorted: the web's, and those that a layer names."""
        return tuple(sorted(frozenset(WEB_PORTS).union(*(reach.named_ports for reach in self.reaches)))) if self.outbound else ()

    def request_objection(self, name: str, method: str, path: str) -> str:
        """Return why a request with this method and path (without its query) may not be sent to a canonical host; empty if it may be."""
        for reach in self.reaches:
            rules = [rule for rule in reach.requests if covers((rule.host,), name)]
            if rules and not any(_fits(rule, method, path) for rule in rules):
                methods = sorted({each for rule in rules for each in rule.methods if _fits(rule, each, path)})
                if methods:
                    return f"the policy allows only {', '.join(methods)} at {name}, and this is {method}"
                return f"the policy does not allow {method} {path} at {name}"
        return ""

    def passes_uninspected(self, name: str) -> bool:
        """Return whether TLS to this canonical host is passed on unread."""
        return bool(self.reaches) and all(covers(reach.uninspected, name) for reach in self.reaches)

    def passes_opaque(self, name: str, port: int) -> bool:
        """Return whether any bytes may be exchanged with this canonical host at this port."""
        return bool(self.reaches) and all(_names(reach.opaque, name, port) for reach in self.reaches)

    def may_be_private(self, name: str) -> bool:
        """Return whether this canonical host may lie on a private address. A host that is named by its address may."""
        return bool(self.reaches) and all(
            covers(reach.private, name) or (is_address(name) and name in {split_port(each)[0] for each in reach.hosts or ()})
            for reach in self.reaches
        )

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
        return NetworkRules(
            self.outbound and other.outbound,
            self.inbound and other.inbound,
            tuple(dict.fromkeys((*self.reaches, *other.reaches))),
            tuple(dict.fromkeys((*self.denied, *other.denied))),
            self.localhost and other.localhost,
            self.search.narrowed(other.search),
        )

    @property
    def asks(self) -> bool:
        """Whether any network access is asked for."""
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
    localhost: bool = False,
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
    )
    reaches = () if reach == Reach() else (reach,)
    return NetworkRules(outbound, inbound, reaches, tuple(canonical_pattern(each) for each in denied), localhost)


def public_web() -> NetworkRules:
    """Return rules that permit every public host at the ports of the web."""
    return network_rules(outbound=True, ports=WEB_PORTS, localhost=True)


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
            return f"[{pattern}]:{canonical_port(int(port))}" if ":" in pattern else f"{pattern}:{canonical_port(int(port))}"
    return canonical_pattern(written)


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


def _fits(rule: RequestRule, method: str, path: str) -> bool:
    if rule.methods and method not in rule.methods:
        return False
    return not rule.paths or any(_is_path(each, path) for each in rule.paths)


def _is_path(pattern: str, path: str) -> bool:
    if pattern.startswith("/**/"):
        return path.endswith(pattern[3:])
    return path.startswith(pattern[:-1]) if pattern.endswith("*") else path == pattern
