"""Hosts: their canonical form, and patterns of them.

A host is written as in a URL: `api.example.com`, `192.0.2.1`, `[2001:db8::1]`. `*.example.com` is every name beneath `example.com`, at any
depth, but not `example.com` itself. Names are compared in lower case, without a final dot, in their ASCII form.
"""

from __future__ import annotations

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from ipaddress import IPv4Address, IPv6Address

_LOCAL = ("localhost", "*.localhost")
_TRANSLATED = ("64:ff9b::/96", "64:ff9b:1::/48")  # IPv4 inside IPv6, by NAT64
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_")


def canonical_pattern(written: object) -> str:
    """Return the canonical form of a host, of `*.` and a host, or of `*` for every host. Raises `PolicyError` for anything else."""
    if isinstance(written, str) and written == "*":
        return "*"
    if isinstance(written, str) and written.startswith("*."):
        return f"*.{canonical_host(written[2:])}"
    return canonical_host(written)


def canonical_host(written: object) -> str:
    """Return the canonical form of a host.

    Raises `PolicyError` for anything else: a scheme, a port, a path, a space.
    """
    if not isinstance(written, str) or not written:
        raise _refused(written, "is no name of a host", 'write "api.example.com"')
    if written.startswith("[") and written.endswith("]"):
        return _address(written[1:-1], written)
    if "://" in written or "/" in written:
        raise _refused(written, "is an address, not a host", "leave the scheme and the path away")
    if "*" in written:
        raise _refused(written, "holds a * in the middle", 'write "*.example.com", which stands for all names beneath it')
    if written.count(":") > 1:
        return _address(written, written)
    if ":" in written:
        raise _refused(written, "names a port", "name ports in allowed_ports, and the host alone here")
    try:
        name = written.removesuffix(".")
        ascii_name = (name if name.isascii() else name.encode("idna").decode("ascii")).lower()
    except UnicodeError:
        raise _refused(written, "cannot be the name of a host", "check its spelling") from None
    labels = ascii_name.split(".")
    if not all(
        0 < len(label) < 64 and set(label) <= _LETTERS and not label.startswith("-") and not label.endswith("-") for label in labels
    ):
        raise _refused(written, "cannot be the name of a host", "names are letters, digits and - between dots")
    if labels[-1].isdigit() or labels[-1].startswith("0x"):
        return _address(ascii_name, written)
    return ascii_name


def canonical_port(written: object) -> int:
    """Return the port if it is a valid port number. Raises `PolicyError` for anything else."""
    if isinstance(written, bool) or not isinstance(written, int) or not 0 < written < 65536:
        raise PolicyError(f"not a port: {written!r}", hint="ports are whole numbers from 1 to 65535")
    return written


def covers(patterns: Iterable[str], host: str) -> bool:
    """Return whether one of the patterns matches this canonical host."""
    return any(pattern in ("*", host) or (pattern.startswith("*.") and host.endswith(pattern[1:])) for pattern in patterns)


def bracketed(host: str) -> str:
    """Return a host as addresses write it: an address of IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def is_local(host: str) -> bool:
    """Return whether a canonical host is a name or address of this machine, such as `localhost`. Nothing is resolved."""
    return covers(_LOCAL, host) or host.startswith("127.") or host in ("::1", "0.0.0.0", "::")


def is_private(address: str) -> bool:
    """Return whether a canonical address is not one of the public internet."""
    from ipaddress import ip_address  # slow to load, and addresses are rare in policies

    return not ip_address(address).is_global


def canonical_address(text: str) -> IPv4Address | IPv6Address:
    """Return an address in the one form that is judged and dialled: an IPv4 address that is written inside IPv6 is that IPv4 address.

    Raises ValueError for anything else, such as a scope (`fe80::1%eth0`).
    """
    from ipaddress import IPv4Address, IPv6Network, ip_address  # slow to load, and addresses are rare in policies

    if "%" in text:
        raise ValueError(f"an address with a scope: {text}")
    address = ip_address(text)
    if isinstance(address, IPv4Address):
        return address
    embedded = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
    if embedded is None and any(address in IPv6Network(each) for each in _TRANSLATED):
        embedded = IPv4Address(int(address) & 0xFFFFFFFF)
    if embedded is None and int(address) >> 32 == 0 and int(address) > 0xFFFF:  # the deprecated ::a.b.c.d
        embedded = IPv4Address(int(address))
    return embedded or address


def _address(text: str, written: str) -> str:
    try:
        return str(canonical_address(text))  # ::ffff:127.0.0.1 is 127.0.0.1, and must be judged as such
    except ValueError:
        raise _refused(written, "is no address", "write four numbers from 0 to 255, or an IPv6 address in brackets") from None


def _refused(written: object, reason: str, remedy: str) -> PolicyError:
    return PolicyError(f"the host {written!r} {reason}", hint=remedy)
