"""A second factor for answers: TOTP codes (RFC 6238). Each code is valid once, and the number of wrong guesses is limited.

The secret lies beside the keys, so any program that can read the keys can make codes. The second factor stops an agent whose only tool is
`agent-sandbox`. Against an agent with a shell of the same user, require the approval of another user.
"""

from __future__ import annotations

import fcntl
import hmac
import os
from base64 import b32encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha1
from urllib.parse import quote

from agent_sandbox.errors import PolicyError
from agent_sandbox.ledger.private_files import make_private, read_private, write_once

STEP = 30  # seconds
MOST_WRONG, PERIOD = 5, 300.0  # wrong guesses in PERIOD seconds: they hit with a chance of 1 in 66,000; a day of such guesses, 1 in 230
_SECRET, _STATE = "second-factor", "second-factor.used"
_BYTES = 20


class SecondFactor:
    """The second factor whose secret is in a directory of keys. Safe for threads and processes at once."""

    def __init__(self, directory: str, *, clock: Callable[[], float]) -> None:
        self._directory = directory
        self._clock = clock

    @property
    def enrolled(self) -> bool:
        """Whether a second factor is set up."""
        return os.path.exists(os.path.join(self._directory, _SECRET))

    def enroll(self, account: str) -> str:
        """Make the secret, and return it as a URI for authenticator apps. Raises `PolicyError` if there is a secret already."""
        if self.enrolled:
            why = "a second factor is set up already"
            raise PolicyError(why, hint=f"remove {os.path.join(self._directory, _SECRET)} by hand, if that is what you want")
        make_private(self._directory)
        write_once(os.path.join(self._directory, _SECRET), os.urandom(_BYTES))
        text = b32encode(self._secret()).decode()
        return f"otpauth://totp/agent-sandbox:{quote(account)}?secret={text}&issuer=agent-sandbox"

    def accepts(self, code: str) -> bool:
        """Return whether a code is valid: unused, and that of the present time step or of a neighbouring one.

        Each guess is counted before it is checked, so that nobody gains another guess by killing the process. Raises `PolicyError` after
        too many wrong guesses, and OSError if the state is unreadable.
        """
        with self._state() as file:
            now = self._clock()
            last, *wrong = [float(word) for word in os.pread(file, 4096, 0).decode("ascii").split()] or [-1.0]
            recent = [each for each in wrong if abs(now - each) < PERIOD]
            if len(recent) >= MOST_WRONG:
                raise PolicyError("too many wrong codes", hint=f"wait for {PERIOD / 60:.0f} minutes")
            _store(file, last, [*recent, now])
            step = int(now // STEP)
            secret = self._secret()
            for each in (step, step - 1, step + 1):
                if each > last and hmac.compare_digest(digits(secret, each).encode(), code.strip().encode("utf-8", "surrogateescape")):
                    _store(file, each, recent)
                    return True
            return False

    def _secret(self) -> bytes:
        return read_private(os.path.join(self._directory, _SECRET), _BYTES)

    @contextmanager
    def _state(self) -> Iterator[int]:
        """Open and lock the state file, which holds the last used time step and the times of wrong codes."""
        path = os.path.join(self._directory, _STATE)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
        finally:
            os.close(file)


def digits(secret: bytes, step: int) -> str:
    """Return the six-digit code of a time step, by RFC 4226."""
    mark = hmac.new(secret, step.to_bytes(8, "big"), sha1).digest()
    at = mark[-1] & 15
    return f"{(int.from_bytes(mark[at : at + 4], 'big') & 0x7FFFFFFF) % 1_000_000:06}"


def _store(file: int, last: float, wrong: list[float]) -> None:
    text = " ".join(repr(float(each)) for each in (last, *wrong)).encode().ljust(256)  # in place, and never shorter than before
    os.pwrite(file, text, 0)
    os.fsync(file)
