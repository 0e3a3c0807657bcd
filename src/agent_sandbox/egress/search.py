"""The search of one run, made of the rules that the zygote has compiled, of what the policy says of them, and of the user's secrets.

Reading and compiling the rules takes far longer than a run waits, so the result is kept in a file: a digest, and what it is of. The
supervisor opens the file, which belongs to its user alone; a file that does not fit these rules and this machine is written anew.
"""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from importlib import import_module

from agent_sandbox.egress.dlp.own_secrets import OwnSecrets
from agent_sandbox.egress.dlp.prefilter import compiling_with
from agent_sandbox.egress.dlp.rules import RuleMatcher, default_rules, read_rules
from agent_sandbox.egress.dlp.scanner import Scanner, Search
from agent_sandbox.egress.orders import Orders

_ENTRY = struct.Struct("!32sI")
_UNPACKERS = ("brotli", "bz2", "lzma", "zstandard")  # which the search imports when it needs them
MOST_BYTES = 64 << 20  # of the file


def compiled_rules(kept: int | None) -> RuleMatcher:
    """Return the matcher of the product's rules, with everything that a scanner needs, with the help of the file `kept` if there is one."""
    store = {} if kept is None else _read(kept)
    before = frozenset(store)
    try:
        matcher = _compiled(store)
    except Exception:  # what the file holds is not for this machine, and each of its faults has an error of its own
        store, before = {}, frozenset()
        matcher = _compiled(store)
    if kept is not None and before != frozenset(store):
        with suppress(OSError):  # the next zygote compiles again
            _write(kept, store)
    return matcher


def _compiled(store: dict[bytes, bytes]) -> RuleMatcher:
    with compiling_with(store):
        matcher = RuleMatcher(default_rules())
        _warm(matcher)
    return matcher


def search_of(orders: Orders, compiled: RuleMatcher) -> Search | None:
    """Return the search that a run's orders ask for; None if the policy has turned it off. Raises `PolicyError` for an invalid table."""
    wanted = orders.rules.search
    if wanted.off:
        return None
    rules = default_rules()
    for path, text in orders.tables:
        rules = read_rules(text, path, rules)
    judged = tuple(replace(rule, action=wanted.action(rule.id, rule.kind, rule.action)) for rule in rules)
    matcher = compiled.with_rules(judged)  # of a user's tables only what is new is compiled, in this process, and kept nowhere
    values = [(each.name, each.value) for each in orders.secrets]
    return Search(matcher, OwnSecrets.of((*values, *orders.own)), os.urandom(32))


def _warm(matcher: RuleMatcher) -> None:
    """Let a scanner look at something, so that a confined process loads and compiles nothing more but the user's secrets."""
    for name in _UNPACKERS:
        with suppress(ImportError):
            import_module(name)
    matcher.compile(1)  # and with it the engine of patterns is loaded
    scanner = Scanner(Search(matcher, OwnSecrets.of([("warm", "some value")]), b"warm"))
    scanner.feed(b"dGhpcyBpcyBhIHRleHQgdGhhdCBpcyBsb25nIGVub3VnaA== %41%42 \\u0041 4141414141414141 a text\n" * 2)
    scanner.finish()


def _machine() -> bytes:
    """Return what the compiled form depends on, besides the expressions."""
    with suppress(ImportError), open("/proc/cpuinfo", "rb") as file:
        import hyperscan  # not every machine can have it

        flags = next((line for line in file if line.startswith((b"flags", b"Features"))), b"")
        return str(getattr(hyperscan, "__version__", "")).encode() + flags
    return b""


def _read(file: int) -> dict[bytes, bytes]:
    """Return the compiled expressions in a file; none if it is not whole, or of another machine."""
    data = os.pread(file, MOST_BYTES, 0)
    digest, body = data[:32], data[32:]
    if not body or sha256(_machine() + body).digest() != digest:
        return {}
    found, place = {}, 0
    while place < len(body):
        key, length = _ENTRY.unpack_from(body, place)
        place += _ENTRY.size
        found[key] = body[place : place + length]
        place += length
    return found


def _write(file: int, store: dict[bytes, bytes]) -> None:
    """Write compiled expressions into a file, unless somebody else does. Who reads meanwhile finds that the digest does not fit."""
    body = b"".join(_ENTRY.pack(key, len(compiled)) + compiled for key, compiled in store.items())
    if len(body) + 32 > MOST_BYTES:
        return
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.ftruncate(file, 0)
    data = sha256(_machine() + body).digest() + body
    written = 0
    while written < len(data):
        written += os.pwrite(file, data[written:], written)
