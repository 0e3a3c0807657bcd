"""Attempts to reach the network."""

from __future__ import annotations

import os
import socket

from agent_sandbox.selftest.attempts import Address, Deeds, later


def connect(targets: dict[str, tuple[int, Address]]) -> Deeds:
    """Return ways to connect a stream socket to each target. A target is a family and an address."""
    return {way: later(_connect, family, address) for way, (family, address) in targets.items()}


def connect_to_file(directory: str, name: str) -> Deeds:
    """Return a way to connect to a socket file. It opens the directory first: a socket path may have at most 107 characters."""
    return {"file": lambda: _connect(socket.AF_UNIX, f"/proc/self/fd/{os.open(directory, os.O_PATH)}/{name}")}


def send(targets: dict[str, tuple[int, Address]], text: str) -> Deeds:
    """Return ways to send a datagram to each target. A target is a family and an address; `text` is hexadecimal."""
    return {way: later(_send, family, address, text) for way, (family, address) in targets.items()}


def make(kinds: dict[str, list[int]]) -> Deeds:
    """Return ways to make a socket of each kind: family, type, protocol."""
    return {way: later(_make, kind) for way, kind in kinds.items()}


def look_around(address: str) -> Deeds:
    """Return ways to find a route to an outside address, without sending anything, and an interface other than loopback."""
    return {f"route to {address}": lambda: _route(address), "interface": _interface}


def _make(kind: list[int]) -> str:
    socket.socket(*kind).close()
    return "made"


def _connect(family: int, address: Address) -> str:
    with socket.socket(family, socket.SOCK_STREAM) as made:
        made.settimeout(1)
        made.connect(address)
    return "connected"


def _send(family: int, address: Address, text: str) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as made:
        made.sendto(bytes.fromhex(text), address)
    return "sent"


def _route(address: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        made.connect((address, 9))
        return str(made.getsockname()[0])


def _interface() -> str:
    names = [name for _, name in socket.if_nameindex() if name != "lo"]
    if not names:
        raise OSError(19, "only its own loopback")
    return ", ".join(names)
