"""The network and secrets of a coding agent that runs inside a sandbox as a whole: the host of its API, and its key.

The key's value stays outside: the program gets a placeholder, and the egress puts the key in on the way to that host only. Settings and
logins in the home directory are hidden inside, like other dot-files that may hold credentials.
"""

from __future__ import annotations

import os

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class Api:
    """The API of a coding agent. `keys` are variables with a key, and the place of the key in a request: empty for `Authorization`.

    The first variable that is set counts.
    """

    host: str
    keys: tuple[tuple[str, str], ...]
    base: str  # the variable with another address of the API


APIS = {
    "claude": Api(
        "api.anthropic.com",
        (("ANTHROPIC_API_KEY", "header:x-api-key"), ("ANTHROPIC_AUTH_TOKEN", ""), ("CLAUDE_CODE_OAUTH_TOKEN", "")),
        "ANTHROPIC_BASE_URL",
    ),
    "codex": Api("api.openai.com", (("OPENAI_API_KEY", ""), ("CODEX_API_KEY", "")), "OPENAI_BASE_URL"),
    "gemini": Api(
        "generativelanguage.googleapis.com",
        (("GEMINI_API_KEY", "header:x-goog-api-key"), ("GOOGLE_API_KEY", "header:x-goog-api-key")),
        "GOOGLE_GEMINI_BASE_URL",
    ),
}


@dataclass(frozen=True)
class Provided:
    """Options of `run` that a coding agent needs, as they are written there, and notes for the person."""

    network: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def provide(command: Sequence[str], environment: Mapping[str, str], *, networked: bool, bound: bool) -> Provided:
    """Return what a coding agent needs. `networked` and `bound` say whether the person named hosts and secrets themselves.

    Raises `PolicyError` if the program is unknown and no hosts were named, or if its key is not set and no secret was named.
    """
    name = os.path.basename(command[0])
    api = APIS.get(name)
    if api is None:
        if networked:
            return Provided()
        raise PolicyError(
            f"the hosts of {name!r} are not known", hint=f"name them: --network HOST --secret KEY@HOST; known are {', '.join(APIS)}"
        )
    base = environment.get(api.base, "")
    host = _host(base, api.base) if base else api.host
    key, place = next(((key, place) for key, place in api.keys if environment.get(key)), ("", ""))
    if not key and not bound:
        raise PolicyError(
            f"{api.keys[0][0]} is not set: {name} would have no key, because logins in your home directory are hidden inside",
            hint=f"set it, or name another: --secret KEY@{host}",
        )
    secret = f"{key}@{host.partition(':')[0]}{place and f'+{place}'}"
    note = f"{name} can reach {host}" + (f"; the value of {key} stays outside" if key else "")
    return Provided((host,), (secret,) if key else (), (api.base,) if base else (), (note,))


def _host(address: str, variable: str) -> str:
    """Return the host of an address. Raises `PolicyError` unless a key can be sent there: only by https."""
    scheme, separator, rest = address.partition("://")
    host = rest.partition("/")[0]
    if scheme != "https" or not separator or not host or "@" in host:
        raise PolicyError(f"{variable} is not the address of an https host: {address!r}", hint="https://HOST, or leave it out")
    return host
