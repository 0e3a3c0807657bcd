"""Attempts to reach the network."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress

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


def leave(streams: dict[str, tuple[int, Address]], datagrams: dict[str, tuple[int, Address]], web: int) -> Deeds:
    """Return ways out of a sandbox that has a network: requests to targets, questions to resolvers, datagrams, and a raw socket.

    All are tried at once: where nobody answers, each waits for a while.
    """
    ways: Deeds = {way: later(_request, family, address) for way, (family, address) in streams.items()}
    ways |= {way: later(_ask, family, address, web, 7 if way == "name" else 3) for way, (family, address) in datagrams.items()}
    ways["raw socket"] = later(_make, [socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP])
    results: dict[str, object] = {}

    def tried(way: str) -> None:
        try:
            results[way] = ways[way]()
        except OSError as error:
            results[way] = error

    threads = {way: threading.Thread(target=tried, args=(way,)) for way in ways}
    for thread in threads.values():
        thread.start()

    def result(way: str) -> object:
        threads[way].join()
        if isinstance(found := results[way], OSError):
            raise found
        return found

    return {way: later(result, way) for way in ways}


def find_egress(words: str) -> Deeds:
    """Return ways to find a process with these words on its command line, and to signal it. Nothing is sent to it."""
    return {"seen": lambda: f"pid {_egress(words)}", "signalled": lambda: os.kill(_egress(words), 0)}


def _egress(words: str) -> int:
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                found = words.encode() in file.read()
        except OSError:
            continue
        if found and int(name) != os.getpid():
            return int(name)
    raise ProcessLookupError(3, "no such process is seen")


def _request(family: int, address: Address) -> str:
    """Send a request, and return the first line of the answer, if there is one."""
    with socket.socket(family, socket.SOCK_STREAM) as made:
        made.settimeout(1)
        made.connect(address)
        assert isinstance(address, tuple)
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        made.sendall(f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        try:
            return made.recv(1000).split(b"\r\n")[0].decode(errors="replace") or "closed"
        except TimeoutError:
            return "no answer"


def _ask(family: int, address: Address, web: int, seconds: float) -> str:
    """Send a question for a name with a secret in it, and go where the answer leads, if there is one within these seconds.

    The door answers once its process has its orders, which takes a while on a busy machine.
    """
    labels = (b"secret", b"tunnel", b"invalid")
    question = b"".join(bytes((len(label),)) + label for label in labels) + b"\0\0\1\0\1"
    with socket.socket(family, socket.SOCK_DGRAM) as made:
        made.settimeout(seconds)
        made.connect(address)
        made.send(b"\0\1\1\0\0\1\0\0\0\0\0\0" + question)
        try:
            answer = made.recv(1000)
        except TimeoutError:
            return "no answer"
    if answer[3] & 15 or not answer[7]:
        return f"no such name: {answer[3] & 15}"
    with socket.socket() as led:
        led.settimeout(5)
        led.connect((socket.inet_ntoa(answer[-4:]), web))
        led.sendall(b"GET / HTTP/1.1\r\nHost: " + b".".join(labels) + b"\r\nConnection: close\r\n\r\n")
        with suppress(TimeoutError):
            led.recv(1000)
    return "it led somewhere"


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
