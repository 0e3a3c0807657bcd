"""Signed checkpoints: "entry N has this hash", checked by anybody with the public key and nothing else.

The seals of a ledger need its key, which cannot be given to an auditor without letting them forge. A checkpoint can be given away: kept on
another machine, it also shows later that nothing up to its entry was cut off or written anew. It is one entry of the ledger, which signs
the one before it, and a note of three lines for everybody else.

The private key lies beside the ledger's key, so a checkpoint proves nothing against who can read that directory, except for what was
signed and given away before.
"""

from __future__ import annotations

import os

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.errors import LedgerBroken, LedgerUnavailable
from agent_sandbox.ledger.event import Checkpoint
from agent_sandbox.ledger.keys import make_private, read_private, write_once

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

TITLE = "agent-sandbox ledger checkpoint 1"
_SIGNING_KEY = "signing.key"
_LENGTH = 32


def sign(directory: str, sequence: int, digest: str) -> Checkpoint:
    """Sign the hash of an entry with the key in this directory; it is made on first use. Raises `LedgerUnavailable`, and OSError."""
    key = _private_key(directory)
    public = key.public_key().public_bytes_raw().hex()
    return Checkpoint(sequence, digest, public, key.sign(_message(sequence, digest)).hex())


def public_key(directory: str) -> str | None:
    """The public half of the key in this directory, in hexadecimal; None when there is none yet. Raises as `sign` does."""
    if not os.path.exists(os.path.join(directory, _SIGNING_KEY)):
        return None
    return _private_key(directory).public_key().public_bytes_raw().hex()


def is_genuine(checkpoint: Checkpoint, public: str | None = None) -> bool:
    """Whether the signature fits what it signs and, where a public key is given, is made with that one. Raises `LedgerUnavailable`."""
    _available()
    from cryptography.exceptions import InvalidSignature
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
    """The checkpoint as text to keep elsewhere."""
    return f"{_message(checkpoint.sequence, checkpoint.hash).decode()}{checkpoint.public_key}\n{checkpoint.signature}\n"


def read_note(text: str) -> Checkpoint:
    """The checkpoint in a note. Raises `LedgerBroken` when it is none; its signature is not checked."""
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
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    path = os.path.join(directory, _SIGNING_KEY)
    if not os.path.exists(path):
        make_private(directory)
        write_once(path, os.urandom(_LENGTH))
    return Ed25519PrivateKey.from_private_bytes(read_private(path, _LENGTH))


def _available() -> None:
    try:
        import cryptography  # noqa: F401  # an extra, and slow to load: only whoever signs or checks pays for it
    except ImportError:
        message = "signed checkpoints need the package `cryptography`, which is not installed"
        raise LedgerUnavailable(message, hint="pip install 'entersandbox[sign]'") from None
