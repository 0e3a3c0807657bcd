"""Doors: the sockets in a guest's network namespace through which everything leaves, and the routes that lead there.

The namespace has only its loopback device. Init makes every address of the world local to it, opens a listener for each port that the
policy names, and hands the listeners to the supervisor. Who accepts on them is outside of the namespace, so nothing of ours runs beside the
guest, and no packet ever leaves the namespace. A connection to any other port, and every datagram but a query for a name, is refused at
once by the kernel, because nobody listens.

Two more listeners are there: for queries over TCP at every address, and for programs that use a proxy, at `OWN_ADDRESS` alone. The kernel
gives a port of all addresses to one listener. So a server of the guest cannot have a port that the policy names, not even on 127.0.0.1.
"""

from __future__ import annotations

import errno
import os
import struct

from agent_sandbox._fast.contexts import suppress
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.kernel.wire import TRUST, close_all

if TYPE_CHECKING:
    import socket
    from collections.abc import Collection
else:
    from agent_sandbox._fast import sockets as socket

OWN_ADDRESS = "198.18.0.1"  # of the range for tests (RFC 2544): with it, the C library asks for names although only loopback is there
RESOLVER_PORT, PROXY_PORT = 53, 3128
MOST_PORTS = 100  # whose listeners still fit into one message to the supervisor
_BACKLOG = 128
_NEW_ADDRESS, _NEW_ROUTE = 20, 24  # RTM_NEWADDR, RTM_NEWROUTE
_REQUEST = 0x1 | 0x4 | 0x400  # NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE
_LOCAL_TABLE, _BY_BOOT, _HOST_SCOPE, _LOCAL = 255, 3, 254, 2  # RT_TABLE_LOCAL, RTPROT_BOOT, RT_SCOPE_HOST, RTN_LOCAL
_OUT_INTERFACE = 4  # RTA_OIF
FOURTH, SIXTH = b"4", b"6"  # ask for a socket of IPv4, and of IPv6
_FAMILIES = {FOURTH: socket.AF_INET, SIXTH: socket.AF_INET6}
_IP_PKTINFO, _IPV6_RECVPKTINFO, _IPV6_FREEBIND = 8, 49, 78


@dataclass(frozen=True)
class Doors:
    """Descriptors of a guest's network: sockets that receive queries for names, listeners for connections, and a directory.

    The directory is in the guest's view, for the certificates that its programs are to trust.
    """

    resolvers: tuple[int, ...] = ()
    listeners: tuple[int, ...] = ()
    trust: int = -1

    @property
    def sockets(self) -> tuple[int, ...]:
        """The sockets, resolvers first."""
        return (*self.resolvers, *self.listeners)

    @property
    def all(self) -> tuple[int, ...]:
        """Every descriptor, as `received` expects them."""
        return (*self.sockets, self.trust) if self.trust >= 0 else self.sockets

    @property
    def counts(self) -> tuple[int, int]:
        """The number of resolvers, and of listeners."""
        return len(self.resolvers), len(self.listeners)

    @classmethod
    def received(cls, counts: tuple[int, int], descriptors: list[int]) -> Doors | None:
        """Take doors from the front of a list of received descriptors; None if these are the counts of no doors."""
        resolvers, every = counts[0], sum(counts)
        if not every:
            return None
        doors = cls(tuple(descriptors[:resolvers]), tuple(descriptors[resolvers:every]), descriptors[every])
        del descriptors[: every + 1]
        return doors

    def close(self) -> None:
        """Close every descriptor."""
        close_all(self.all)


def open_doors(ports: tuple[int, ...], trust: int = -1) -> Doors:
    """In init, which still owns the network namespace: lead all addresses here, and listen on these ports. Raises OSError."""
    if len(ports) > MOST_PORTS:
        raise OSError(errno.E2BIG, f"the policy names {len(ports)} ports, and a sandbox has at most {MOST_PORTS}")
    give_loopback(OWN_ADDRESS)
    opened: list[int] = []
    try:
        _lead_here(socket.AF_INET)
        with suppress(OSError):  # a kernel without IPv6 has no such addresses to lead anywhere
            _lead_here(socket.AF_INET6)
        resolvers = [_resolver(socket.AF_INET, "0.0.0.0", opened)]
        with suppress(OSError):
            resolvers.append(_resolver(socket.AF_INET6, "::", opened))
        listeners = [_listener(port, opened) for port in dict.fromkeys((*ports, RESOLVER_PORT))]
        return Doors(tuple(resolvers), (*listeners, _proxy(proxy_port(ports), opened)), trust)
    except OSError:
        for each in opened:
            os.close(each)
        raise


def proxy_port(ports: Collection[int]) -> int:
    """Return the port of the proxy at `OWN_ADDRESS`: the first that the policy does not name."""
    return next(port for port in range(PROXY_PORT, PROXY_PORT + MOST_PORTS + 1) if port not in ports)


def make_trust_directory(root: str = "") -> int:
    """In init, in the view: make the directory for the certificates that programs are to trust. Return it. Raises OSError.

    `root` is the directory of the view that is the root of the guest's program, if there is an outer program around it.
    """
    os.mkdir(root + TRUST, 0o755)
    return os.open(root + TRUST, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def give_sockets(link: socket.socket) -> bool:
    """In init: send an unconnected socket of this namespace for a byte that asks for one. Return False once nobody asks any more.

    If none can be made, the byte goes back alone. A socket stays in the namespace that it was made in, so who receives it can connect to
    servers of the guest, and to nothing else.
    """
    try:
        asked = link.recv(1)
        if asked not in _FAMILIES:
            return False
        try:
            made = socket.socket(_FAMILIES[asked], socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError:
            link.send(asked, socket.MSG_DONTWAIT)
            return True
        with made:
            socket.send_fds(link, [asked], [made.fileno()], socket.MSG_DONTWAIT)
    except OSError:  # nobody is there, or takes what it asked for
        return False
    return True


def give_loopback(address: str) -> None:
    """Add one address to the loopback device: rtnetlink(7), RTM_NEWADDR. Nothing else becomes reachable. Raises OSError."""
    family, length = (socket.AF_INET6, 128) if ":" in address else (socket.AF_INET, 32)
    raw = socket.inet_pton(family, address)
    body = struct.pack("=BBBBI", family, length, 0, 0, socket.if_nametoindex("lo"))
    _ask(_NEW_ADDRESS, body + b"".join(struct.pack("=HH", 4 + len(raw), kind) + raw for kind in (1, 2)))  # IFA_ADDRESS, IFA_LOCAL


def _lead_here(family: int) -> None:
    """Make every address of a family local: `ip route add local default dev lo`."""
    body = struct.pack("=BBBBBBBBI", family, 0, 0, 0, _LOCAL_TABLE, _BY_BOOT, _HOST_SCOPE, _LOCAL, 0)
    _ask(_NEW_ROUTE, body + struct.pack("=HHI", 8, _OUT_INTERFACE, socket.if_nametoindex("lo")))


def _ask(kind: int, body: bytes) -> None:
    """Send one request to the kernel and read its answer. Raises OSError; what is there already is no error."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as link:
        link.send(struct.pack("=IHHII", 16 + len(body), kind, _REQUEST, 1, 0) + body)
        (code,) = struct.unpack_from("=i", link.recv(4096), 16)
    if code not in (0, -errno.EEXIST):
        raise OSError(-code, os.strerror(-code))


def _resolver(family: int, address: str, opened: list[int]) -> int:
    """Open a socket that receives every query for a name, and knows the address that each was sent to, so as to answer from there."""
    sock = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    with sock:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_RECVPKTINFO, 1)
            sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_FREEBIND, 1)  # else it may not answer from an address that is only led here
        else:
            sock.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
        sock.bind((address, RESOLVER_PORT))
        opened.append(sock.detach())
    return opened[-1]


def _listener(port: int, opened: list[int]) -> int:
    """Listen on a port of every address of both families."""
    try:
        sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        everywhere = "::"
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    except OSError:
        sock, everywhere = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK), "0.0.0.0"
    return _listening(sock, everywhere, port, opened)


def _proxy(port: int, opened: list[int]) -> int:
    """Listen on a port of our own address."""
    return _listening(socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK), OWN_ADDRESS, port, opened)


def _listening(sock: socket.socket, address: str, port: int, opened: list[int]) -> int:
    with sock:
        sock.bind((address, port))
        sock.listen(_BACKLOG)
        opened.append(sock.detach())
    return opened[-1]
