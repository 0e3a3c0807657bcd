"""Signed checkpoints: "entry N has this hash", verified with the public key alone.

The seals of a ledger need its key, and an auditor who has that key could forge entries. A checkpoint can be given away. Kept on another
machine, it also proves later that nothing up to its entry was cut off or rewritten. A checkpoint has two forms: an entry of the ledger that
signs the entry before it, and a note of text to keep elsewhere.

The private key lies beside the ledger's key. So a checkpoint proves nothing against someone who can read that directory, except for entries
that were signed and given away before.
"""

from __future__ import annotations

import os

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.errors import LedgerBroken, LedgerUnavailable, pip_install
from agent_sandbox.ledger.event import Checkpoint
from agent_sandbox.ledger.private_files import make_private, read_private, write_once

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # an optional extra

TITLE = "agent-sandbox ledger checkpoint 1"
_SIGNING_KEY = "signing.key"
_LENGTH = 32


def sign(directory: str, sequence: int, digest: str) -> Checkpoint:
    """Sign the hash of an entry with the private key in this directory, made on first use. Raises `LedgerUnavailable`, and OSError."""
    key = _private_key(directory)
    public = key.public_key().public_bytes_raw().hex()
    return Checkpoint(sequence, digest, public, key.sign(_message(sequence, digest)).hex())


def is_genuine(checkpoint: Checkpoint, public: str | None = None) -> bool:
    """Return whether the signature is valid and, if `public` is given, was made with that key. Raises `LedgerUnavailable`."""
    _available()
    from cryptography.exceptions import InvalidSignature  # an optional extra
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    if public is not None and public != checkpoint.public_key:
        return False
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(checkpoint.public_key))
        key.verify(bytes.fromhex(checkpoint.signature), _message(checkpoint.sequence, checkpoint.hash))
    except (ValueError, InvalidSignature):
        return False
    return True


def note(checkpoint: Checkpoint) -> str:
    """Return the checkpoint as a note: text to keep on another machine."""
    return f"{_message(checkpoint.sequence, checkpoint.hash).decode()}{checkpoint.public_key}\n{checkpoint.signature}\n"


def read_note(text: str) -> Checkpoint:
    """Parse a note. Its signature is not checked. Raises `LedgerBroken` if the text is not a checkpoint."""
    lines = text.splitlines()
    if len(lines) == 4 and lines[0] == TITLE:
        number, _, digest = lines[1].partition(" ")
        if number.isdecimal() and number.isascii() and len(digest) == 64:
            return Checkpoint(int(number), digest, lines[2], lines[3])
    raise LedgerBroken("this is no checkpoint of a ledger", hint="a checkpoint is what `agent-sandbox log checkpoint` prints")


def _message(sequence: int, digest: str) -> bytes:
    return f"{TITLE}\n{sequence} {digest}\n".encode("ascii", "backslashreplace")


def _private_key(directory: str) -> Ed25519PrivateKey:
    _available()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # an optional extra

    path = os.path.join(directory, _SIGNING_KEY)
    if not os.path.exists(path):
        make_private(directory)
        write_once(path, os.urandom(_LENGTH))
    return Ed25519PrivateKey.from_private_bytes(read_private(path, _LENGTH))


def _available() -> None:
    try:
        import cryptography  # noqa: F401  # an optional extra, and slow to load: only signing and verifying pay for it
    except ImportError:
        message = "signed checkpoints need the package `cryptography`, which is not installed"
        raise LedgerUnavailable(message, hint=pip_install("'cryptography>=42'")) from None
