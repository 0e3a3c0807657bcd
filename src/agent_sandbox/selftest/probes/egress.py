"""Probes on the door of a sandbox with a network: nothing but the allowed host is reached, and nobody is asked for other names.

The attacks run in a world of their own: a network namespace in which the machine's name servers and other people's addresses are sockets of
ours. What gets through is heard there, and no packet leaves the machine. The sandbox may reach one host, whose name nobody has.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress

from agent_sandbox.assembly import check_network
from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.kernel import doors, namespaces, notify
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.selftest.bench import DecoyBench, DecoyListener, aside, listening, until
from agent_sandbox.selftest.boxes import Attempt, Box, Found, NoAnswer
from agent_sandbox.selftest.probe import RUN, Probes, WallAbsent

SUBJECT = Probes("namespaces", "egress-only")

ALLOWED = "verify.invalid"  # a name that no resolver knows (RFC 2606)
_METADATA, _ELSEWHERE, _ELSEWHERE_6 = "169.254.169.254", "192.0.2.1", "2001:db8::1"  # the last two are for documentation
_SECOND_RESOLVER, _WEB, _OTHER_PORT = "192.0.2.53", 80, 8053
_RESOLVER = 53
_PATIENCE_SECONDS = 5.0
_NETWORK = "/proc/self/ns/net"
_EGRESS = "agent_sandbox.egress.process"  # on the command line of the process


@SUBJECT.probe(
    "door",
    "A sandbox with a network reaches the allowed host only.",
    "connects to the metadata address, to other addresses and to loopback, asks resolvers for a name, and sends datagrams",
    boxes=(RUN,),
)
def door(bench: DecoyBench, box: Box) -> Found:
    def attack() -> Found:
        servers = [address for address in notify.configured()[0] if ":" not in address][:1] or ["127.0.0.1"]
        for address in (_METADATA, _ELSEWHERE, _SECOND_RESOLVER, *servers):
            doors.give_loopback(address)
        streams: dict[str, tuple[int, tuple[str, int]]] = {
            "metadata address": (socket.AF_INET, (_METADATA, _WEB)),
            "address": (socket.AF_INET, (_ELSEWHERE, _WEB)),
            "loopback": (socket.AF_INET, ("127.0.0.1", _WEB)),
            "other port": (socket.AF_INET, (_ELSEWHERE, _OTHER_PORT)),
        }
        if _has_sixth_version():
            streams["address of IPv6"] = (socket.AF_INET6, (_ELSEWHERE_6, _WEB))
        datagrams: dict[str, tuple[int, tuple[str, int]]] = {
            "datagram": (socket.AF_INET, (_ELSEWHERE, _OTHER_PORT)),
            "second resolver": (socket.AF_INET, (_SECOND_RESOLVER, _RESOLVER)),
            "name": (socket.AF_INET, (servers[0], _RESOLVER)),
        }
        with listening(socket.SOCK_STREAM, **streams) as heard, listening(socket.SOCK_DGRAM, **datagrams) as received:
            targets = {"streams": _addresses(heard), "datagrams": _addresses(received)}
            ran = box.run(Attempt("network", "leave", {**targets, "web": _WEB}, network=(ALLOWED,)))
            reached = {way: "we heard it" for way, listener in {**heard, **received}.items() if listener.heard()}
        return Found({**reached, **_unheard(ran.reached)}, {**ran.refused, **_silent(ran.reached, reached)})

    return in_world(attack)


@SUBJECT.probe(
    "door-process",
    "The process behind the door is out of a program's reach.",
    "looks for the egress process by its command line, and asks whether it could signal it",
    boxes=(RUN,),
)
def door_process(bench: DecoyBench, box: Box) -> Found:
    def attack() -> Found:
        with bench.bystander(_EGRESS):  # what is found where there is no sandbox
            return box.run(Attempt("network", "find_egress", {"words": _EGRESS}, network=(ALLOWED,)))

    return in_world(attack)


def in_world(attack: Callable[[], Found]) -> Found:
    """Attack in a fork of ours that has a network namespace of its own, with nothing but its loopback.

    Raises `WallAbsent` if sandboxes can have no network here.
    """
    try:
        check_network()
    except RuntimeUnavailable as error:
        raise WallAbsent(f"not covered: {error.message}; {error.hint}") from error

    def live() -> Found | str:
        machine = os.stat(_NETWORK)
        try:
            if os.geteuid() != 0:
                namespaces.enter_own_user_namespace()
            sc.unshare(sc.CLONE_NEWNET)
            namespaces.raise_loopback()
        except OSError as error:
            return f"not covered: this machine lets nobody make a network namespace to try it in: {error.strerror}"
        if os.path.samestat(machine, os.stat(_NETWORK)):  # the addresses of the attack must never be given to the machine
            raise NoAnswer("no world of its own was made for this attack")
        return attack()

    with aside(live) as result:
        found = result()
    if isinstance(found, str):
        raise WallAbsent(found)
    return Found(dict(found.reached), dict(found.refused))


def _has_sixth_version() -> bool:
    """Give the address of IPv6 to loopback, and return whether it can be used. The kernel takes a moment to let it be used."""

    def usable() -> bool:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock, suppress(OSError):
            sock.bind((_ELSEWHERE_6, 0))
            return True
        return False

    try:
        doors.give_loopback(_ELSEWHERE_6)
        return until(usable, _PATIENCE_SECONDS)
    except OSError:  # a kernel without IPv6
        return False


def _addresses(listeners: Mapping[str, DecoyListener]) -> dict[str, object]:
    return {way: listener.target for way, listener in listeners.items()}


def _unheard(told: Mapping[str, str]) -> dict[str, str]:
    """Return the ways that show themselves that they got through: those to which nobody listens."""
    return {way: seen for way, seen in told.items() if way == "raw socket"}


def _silent(told: Mapping[str, str], heard: Mapping[str, str]) -> dict[str, str]:
    """Return the ways that the attempt could go, and that ended at the door."""
    return {way: f"it ended at the door: {seen}" for way, seen in told.items() if way not in heard and way != "raw socket"}
