"""Answer for the names that an observed program asks for: addresses that lead nowhere, so that what it does next shows which it meant.

Pure: a packet in, a packet out. Every packet is hostile. What is understood is one question, spelt out, as resolvers ask it; whatever else
comes gets no answer. The addresses are of the ranges set aside for benchmarks (IPv4) and for documents (IPv6), which no network has.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Sequence

MOST_NAMES = 10_000
LARGEST_QUESTION = 1232  # bytes of a packet that are looked at
_FIRST_V4 = int(ipaddress.IPv4Address("198.18.1.0"))
_FIRST_V6 = int(ipaddress.IPv6Address("2001:db8::100"))
_HEADER = struct.Struct("!6H")
_A, _AAAA, _INTERNET = 1, 28, 1
_IS_ANSWER, _OPCODE, _WANTS_RECURSION = 0x8000, 0x7800, 0x0100
_CAN_RECURSE = 0x0080
_NO_SUCH_NAME, _FAILURE = 3, 2
_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-_")


class Names:
    """The names that were asked for, and the address that each was given."""

    def __init__(self, search: Sequence[str] = ()) -> None:
        """`search` is what resolvers append to a name by themselves; what ends with it does not exist, so that the name itself is asked."""
        self._search = tuple(f".{domain}" for domain in search)
        self._places: dict[str, int] = {}
        self._names: list[str] = []

    def answer(self, packet: bytes) -> tuple[bytes, str]:
        """The answer to a packet and the name that it asks for; twice nothing where it is no question."""
        found = _question(packet)
        if found is None:
            return b"", ""
        identity, flags, name, kind, end = found
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
        """The name whose made-up address this is; the address itself where it is another."""
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
    return struct.pack("!HHHIH", 0xC00C, kind, _INTERNET, 0, len(raw)) + raw  # the name is that of the question, at byte 12


def _question(packet: bytes) -> tuple[int, int, str, int, int] | None:
    """Identity, flags, name, kind, and where the question ends; None for what is not one question of the internet, spelt out."""
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
        if length > 63 or len(label) < length or at >= len(packet) or at - _HEADER.size > 254:  # also no pointers: nothing to point back to
            return None
        labels.append(_spelt(label.lower()))
        length = packet[at]
    if len(packet) < at + 5 or not labels:
        return None
    kind, network = struct.unpack_from("!HH", packet, at + 1)
    return (identity, flags, ".".join(labels), kind, at + 5) if network == _INTERNET else None


def _spelt(label: bytes) -> str:
    """As zone files spell it: what is no letter, digit or hyphen by its number, so that no dot in a label is taken for one between two."""
    return "".join(chr(byte) if byte in _PLAIN else f"\\{byte:03d}" for byte in label)
