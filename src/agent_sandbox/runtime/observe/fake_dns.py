"""A DNS server for observed programs. It answers with made-up addresses, which later show the host name that a connection is meant for.

Pure: a packet in, a packet out. Every packet is hostile. It understands one uncompressed question, as resolvers send it; anything else gets
no answer. The addresses are from the ranges reserved for benchmarks (IPv4) and for documentation (IPv6), which no network uses.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Sequence

MOST_NAMES = 10_000
LARGEST_QUESTION = 1232  # bytes of a packet that is read
_FIRST_V4 = int(ipaddress.IPv4Address("198.18.1.0"))
_FIRST_V6 = int(ipaddress.IPv6Address("2001:db8::100"))
_HEADER = struct.Struct("!6H")
_A, _AAAA, _INTERNET = 1, 28, 1
_IS_ANSWER, _OPCODE, _WANTS_RECURSION = 0x8000, 0x7800, 0x0100
_CAN_RECURSE = 0x0080
_NO_SUCH_NAME, _FAILURE = 3, 2
_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-_")


class FakeDns:
    """Answers DNS queries, and remembers the made-up address of each queried name."""

    def __init__(self, search: Sequence[str] = ()) -> None:
        """Take the search domains that resolvers append to names.

        Names below these domains are answered as nonexistent, so that resolvers query the plain name.
        """
        self._search = tuple(f".{domain}" for domain in search)
        self._places: dict[str, int] = {}
        self._names: list[str] = []

    def answer(self, packet: bytes) -> tuple[bytes, str]:
        """Return the answer to a DNS packet, and the name that it queries; both empty if it is no valid question."""
        question = _question(packet)
        if question is None:
            return b"", ""
        identity, flags, name, kind, end = question
        records, code = b"", 0
        if name.endswith(self._search) and self._search:
            code = _NO_SUCH_NAME
        elif kind in (_A, _AAAA):
            place = self._place(name)
            code = _FAILURE if place is None else 0
            records = b"" if place is None else _record(kind, place)
        head = _HEADER.pack(identity, _IS_ANSWER | flags & _WANTS_RECURSION | _CAN_RECURSE | code, 1, bool(records), 0, 0)
        return head + packet[_HEADER.size : end] + records, name

    def named(self, host: str) -> str:
        """Return the name with this made-up address; `host` itself for any other address."""
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return host
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        place = int(address) - (_FIRST_V4 if address.version == 4 else _FIRST_V6)
        return self._names[place] if 0 <= place < len(self._names) else host

    def _place(self, name: str) -> int | None:
        place = self._places.get(name)
        if place is None and len(self._names) < MOST_NAMES:
            place = self._places[name] = len(self._names)
            self._names.append(name)
        return place


def _record(kind: int, place: int) -> bytes:
    raw = (_FIRST_V4 + place).to_bytes(4, "big") if kind == _A else (_FIRST_V6 + place).to_bytes(16, "big")
    return struct.pack("!HHHIH", 0xC00C, kind, _INTERNET, 0, len(raw)) + raw  # 0xC00C points to the name in the question, at byte 12


def _question(packet: bytes) -> tuple[int, int, str, int, int] | None:
    """Return identity, flags, name, kind and end of the question; None unless it is one uncompressed question of class IN."""
    if not _HEADER.size < len(packet) <= LARGEST_QUESTION:
        return None
    identity, flags, questions, answers, authorities, _ = _HEADER.unpack_from(packet)
    if flags & (_IS_ANSWER | _OPCODE) or (questions, answers, authorities) != (1, 0, 0):
        return None
    labels: list[str] = []
    at, length = _HEADER.size, packet[_HEADER.size]
    while length:
        label = packet[at + 1 : at + 1 + length]
        at += 1 + length
        if length > 63 or len(label) < length or at >= len(packet) or at - _HEADER.size > 254:  # > 63: also a pointer
            return None
        labels.append(_spelt(label.lower()))
        length = packet[at]
    if len(packet) < at + 5 or not labels:
        return None
    kind, network = struct.unpack_from("!HH", packet, at + 1)
    return (identity, flags, ".".join(labels), kind, at + 5) if network == _INTERNET else None


def _spelt(label: bytes) -> str:
    """Return a DNS label as text. Bytes other than letters, digits, `-` and `_` are written as numbers, as in zone files."""
    return "".join(chr(byte) if byte in _PLAIN else f"\\{byte:03d}" for byte in label)
