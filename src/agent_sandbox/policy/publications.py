"""Publications: ports of the machine's loopback that lead to servers of a sandbox.

Only a person's option or an application's setting names one. No policy file does: files can only forbid them (`network.inbound`).
"""

from __future__ import annotations

from collections.abc import Iterable

from agent_sandbox._fast.values import dataclass
from agent_sandbox.errors import PolicyError

HOST = "127.0.0.1"
FIRST_PORT, LAST_PORT = 1024, 65535  # lower ports are those of services of the machine
MOST = 16  # of one run
_FORMS = "write 8000, or 8000:3000 for port 3000 of the sandbox"


@dataclass(frozen=True)
class Publication:
    """A port of the machine, and the port of the sandbox that it leads to."""

    port: int
    inner: int

    @property
    def address(self) -> str:
        """The address at which programs of the machine find it."""
        return f"{HOST}:{self.port}"

    def __str__(self) -> str:
        return f"http://{self.address}"


def read_publications(written: Iterable[object]) -> tuple[Publication, ...]:
    """Return the publications that are written, each as 8000 or "8000:3000". Raises `PolicyError`.

    >>> [(each.port, each.inner) for each in read_publications([8000, "9000:80"])]
    [(8000, 8000), (9000, 80)]
    """
    read = tuple(map(_read, written))
    for place, each in enumerate(read):
        if any(each.port == other.port for other in read[:place]):
            raise PolicyError(f"port {each.port} is published twice", hint="name it once")
    if len(read) > MOST:
        raise PolicyError(f"{len(read)} ports are published, and a run has at most {MOST}", hint="publish fewer")
    return read


def _read(written: object) -> Publication:
    text = str(written) if isinstance(written, int) and not isinstance(written, bool) else written
    outer, colon, inner = text.partition(":") if isinstance(text, str) else ("", "", "")
    numbers = [int(each) if each.isascii() and each.isdigit() and len(each) <= 5 else 0 for each in (outer, inner if colon else outer)]
    if not all(0 < each <= LAST_PORT for each in numbers):
        raise PolicyError(f"not a port to publish: {written!r}", hint=_FORMS)
    port, within = numbers
    if port < FIRST_PORT:
        why = f"port {port} cannot be published: those below {FIRST_PORT} are for services of the machine"
        raise PolicyError(why, hint=f"lead another there: {FIRST_PORT + 7000 + within % 1000}:{within}")
    return Publication(port, within)
