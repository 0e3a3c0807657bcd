"""Names: the answering resolver of a sandbox.

Each allowed name gets an address of its own, out of a range that nobody on the internet has; a connection to that address tells which name
was meant. A name that is not allowed does not exist here. Nothing is ever asked of a real resolver on behalf of a query: the egress
resolves a name itself, once, when an allowed connection is opened.

`NameServer` turns the bytes of a query into the bytes of an answer. It opens no socket.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import IPv4Address

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.hosts import canonical_host

FIRST_ADDRESS, LAST_ADDRESS = int(IPv4Address("198.18.1.0")), int(IPv4Address("198.19.255.254"))
LIFETIME = 60  # seconds that a client may keep an answer; the same name has the same address for the whole run
_HEADER = struct.Struct("!HHHHHH")
_A, _AAAA, _INTERNET = 1, 28, 1
_NO_ERROR, _MALFORMED, _NO_SUCH_NAME, _NOT_IMPLEMENTED, _REFUSED = 0, 1, 3, 4, 5
_LONGEST_NAME = 253
_MOST_NAMES = 16384  # that are given an address
_MOST_SUFFIXES = 256  # of refused names that are told apart in the record
_LONGEST_SHOWN = 64


@dataclass(frozen=True)
class Query:
    """A question for one name: the name as sent, and the type of record."""

    identifier: int
    name: str
    kind: int
    question: bytes  # as it came, to be repeated in the answer
    recursion: int


class Malformed(Exception):
    """Bytes that are no query."""


def read_query(data: bytes) -> Query:
    """Return the question of a query. Raises `Malformed`."""
    if len(data) < _HEADER.size:
        raise Malformed("shorter than a header")
    identifier, flags, questions, answers, authorities, _ = _HEADER.unpack_from(data)
    if flags & 0x8000 or flags >> 11 & 15 or questions != 1 or answers or authorities:
        raise Malformed("no plain question")
    labels, place = [], _HEADER.size
    while place < len(data) and (length := data[place]):
        if length > 63:
            raise Malformed("a compressed name in a question")
        labels.append(data[place + 1 : place + 1 + length])
        place += 1 + length
    name = b".".join(labels)
    if place + 5 > len(data) or len(name) > _LONGEST_NAME or any(b"." in label for label in labels):
        raise Malformed("a name that does not end, or is too long")
    kind, network = struct.unpack_from("!HH", data, place + 1)
    if network != _INTERNET:
        raise Malformed("no question about the internet")
    return Query(identifier, name.decode("latin-1"), kind, data[_HEADER.size : place + 5], flags & 0x0100)


@dataclass
class NameServer:
    """The names of one sandbox and the addresses it was told for them. `allows` judges a canonical name."""

    allows: Callable[[str], bool]
    _addresses: dict[str, int] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)
    _refused: set[str] = field(default_factory=set)

    def answer(self, data: bytes) -> tuple[bytes, str, bool]:
        """Return the answer to a query, the name that was asked for in its canonical form, and whether it is allowed.

        The answer is empty for bytes that are no query: nothing is sent back then.
        """
        try:
            query = read_query(data)
        except Malformed:
            return b"", "", False
        try:
            name = canonical_host(query.name)
        except PolicyError:
            return _reply(query, _NO_SUCH_NAME), query.name, False
        if not self.allows(name):
            return _reply(query, _NO_SUCH_NAME), name, False
        if query.kind != _A:
            return _reply(query, _NO_ERROR), name, True  # it exists, and has no such record: clients then take the address of version 4
        address = self.address_of(name)
        if address is None:
            return _reply(query, _REFUSED), name, False
        return _reply(query, _NO_ERROR, struct.pack("!HHHIHI", 0xC00C, _A, _INTERNET, LIFETIME, 4, address)), name, True

    def address_of(self, name: str) -> int | None:
        """Return the address of an allowed name, the same for the whole run; None when all are given away."""
        if name not in self._addresses:
            address = FIRST_ADDRESS + len(self._addresses)
            if address > LAST_ADDRESS or len(self._names) >= _MOST_NAMES:
                return None
            self._addresses[name], self._names[address] = address, name
        return self._addresses[name]

    def news_of(self, name: str, *, withheld: bool = False) -> str:
        """Return how a refused name is recorded, once for all names with the same two last labels; else nothing.

        A program that sends data as names makes one record, not thousands. A long name, or one with `withheld`, is not shown whole.
        """
        suffix = ".".join(name.split(".")[-2:])[:_LONGEST_SHOWN]
        if suffix in self._refused or len(self._refused) > _MOST_SUFFIXES:
            return ""
        self._refused.add(suffix)
        if len(self._refused) > _MOST_SUFFIXES:
            return "(more names)"
        return f"*.{suffix}" if withheld or len(name) > _LONGEST_SHOWN else name

    def name_of(self, address: str) -> str | None:
        """Return the name that was given this address; None if none was: then somebody wrote the address down."""
        try:
            return self._names.get(int(IPv4Address(address)))
        except ValueError:
            return None


def _reply(query: Query, code: int, record: bytes = b"") -> bytes:
    flags = 0x8000 | query.recursion | 0x0080 | code
    return _HEADER.pack(query.identifier, flags, 1, 1 if record else 0, 0, 0) + query.question + record
