"""Probes on the network: nothing outside is reached."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from agent_sandbox.selftest.bench import DecoyBench, DecoyListener, listening
from agent_sandbox.selftest.boxes import Attempt, AttemptResult, Box, Found
from agent_sandbox.selftest.probe import Probes

SUBJECT = Probes("namespaces", "seccomp", "Landlock")

_LOOPBACK = (socket.AF_INET, ("127.0.0.1", 0))
_ELSEWHERE = "192.0.2.1"  # an address reserved for documentation; nothing is sent to it
# A DNS query for the address of verify.invalid.
_QUESTION = "000101000001000000000000" + "06766572696679" + "07696e76616c6964" + "00" + "0001" + "0001"
_KINDS = {
    "packets": [17, 3, 0x0300],
    "raw ICMP": [2, 3, 1],
    "netlink of devices": [16, 3, 15],
    "netlink of the audit": [16, 3, 9],
    "netlink of the firewall": [16, 3, 12],
    "virtual machines": [40, 1, 0],
    "kernel cryptography": [38, 5, 0],
    "bluetooth": [31, 3, 1],
}


@SUBJECT.probe("tcp", "No listener of the machine is reached over TCP.", "connects to a listener of ours on the loopback of the machine")
def tcp(bench: DecoyBench, box: Box) -> Found:
    with listening(socket.SOCK_STREAM, tcp=_LOOPBACK) as listeners:
        return _heard(listeners, box.run(Attempt("network", "connect", {"targets": _targets(listeners)})))


@SUBJECT.probe("udp", "No listener of the machine is reached over UDP.", "sends to a socket of ours on the loopback of the machine")
def udp(bench: DecoyBench, box: Box) -> Found:
    with listening(socket.SOCK_DGRAM, udp=_LOOPBACK) as listeners:
        return _heard(listeners, box.run(Attempt("network", "send", {"targets": _targets(listeners), "text": "76"})))


@SUBJECT.probe("dns", "No resolver is reached.", "asks a resolver of ours on the loopback of the machine for a name")
def dns(bench: DecoyBench, box: Box) -> Found:
    with listening(socket.SOCK_DGRAM, question=_LOOPBACK) as listeners:
        return _heard(listeners, box.run(Attempt("network", "send", {"targets": _targets(listeners), "text": _QUESTION})))


@SUBJECT.probe("unix-names", "No abstract unix socket of the machine is reached.", "connects to a listener of ours by its abstract name")
def unix_names(bench: DecoyBench, box: Box) -> Found:
    with listening(socket.SOCK_STREAM, abstract=(socket.AF_UNIX, f"\0{bench.mark()}")) as listeners:
        return _heard(listeners, box.run(Attempt("network", "connect", {"targets": _targets(listeners)})))


@SUBJECT.probe(
    "unix-files",
    "No unix socket of the machine is reached through its file.",
    "connects to a listener of ours whose socket is a file in the project",
)
def unix_files(bench: DecoyBench, box: Box) -> Found:
    name = bench.mark()
    directory = os.open(bench.project, os.O_PATH | os.O_CLOEXEC)
    try:
        # Through its directory: the path of a socket may have at most 107 characters.
        with listening(socket.SOCK_STREAM, file=(socket.AF_UNIX, f"/proc/self/fd/{directory}/{name}")) as listeners:
            attempt = Attempt("network", "connect_to_file", {"directory": bench.project, "name": name}, project=True)
            return _heard(listeners, box.run(attempt))
    finally:
        os.close(directory)


@SUBJECT.probe(
    "route",
    "There is no way out to other machines.",
    f"asks for the way to {_ELSEWHERE}, sending nothing, and for interfaces other than its own loopback",
    excuse="this machine has no way out and no interface itself",
)
def route(bench: DecoyBench, box: Box) -> Found:
    return box.run(Attempt("network", "look_around", {"address": _ELSEWHERE}))


@SUBJECT.probe(
    "socket-kinds",
    "Sockets are of the ordinary kinds.",
    "makes packet, raw, netlink, vsock, bluetooth and kernel-cryptography sockets",
    excuse="this machine lets you make none of them",
)
def socket_kinds(bench: DecoyBench, box: Box) -> Found:
    return box.run(Attempt("network", "make", {"kinds": _KINDS}))


def _targets(listeners: Mapping[str, DecoyListener]) -> dict[str, object]:
    return {way: listener.target for way, listener in listeners.items()}


def _heard(listeners: Mapping[str, DecoyListener], ran: AttemptResult) -> Found:
    """Return the findings by what our own sockets received, not by what the attempt reports."""
    counts = {way: listener.heard() for way, listener in listeners.items()}
    return Found({way: f"we heard it {count} times" for way, count in counts.items() if count}, ran.refused)
