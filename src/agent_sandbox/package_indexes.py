"""The package indexes that pip, uv, npm and apt use on this machine, for the network preset `packages`.

They are read from the configuration of the system and of the user, before a run. A file inside the project is not read, nor one that a link
there leads to, and neither is the environment: an agent may have written both. Only hosts and ports are taken. Credentials in an address
are never passed to a sandbox; the caller is told whose they are.

Where nothing names another index, pip, uv and npm use the public ones. Those are this machine's indexes then, wherever its resolver leads
them: a company may serve their names from an address of its own.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from configparser import Error as IniError
from configparser import RawConfigParser
from dataclasses import dataclass
from glob import glob
from ipaddress import ip_address
from urllib.parse import urlsplit

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.hosts import canonical_host, is_local
from agent_sandbox.policy.network import WEB_PORTS, is_address
from agent_sandbox.policy.network_presets import NPM, PYPI
from agent_sandbox.policy.paths import contains

_LARGEST = 1 << 20  # bytes of one file
_PIP_KEYS = ("index-url", "extra-index-url", "find-links", "proxy")
_UV_MAIN_KEYS = ("index-url", "default-index")
_UV_KEYS = (*_UV_MAIN_KEYS, "extra-index-url", "find-links")
_APT_PROXY = re.compile(r'\bproxy(?:::[\w.-]+)?\s+"([^"]+)"', re.IGNORECASE)
_APT_COMMENT = re.compile(r"/\*.*?\*/|(?<!:)//[^\n]*|#[^\n]*", re.DOTALL)
# Link-local, and the addresses of metadata services outside of it.
_NEVER = frozenset(map(ip_address, ("100.100.100.200", "168.63.129.16", "fd00:ec2::254")))


@dataclass(frozen=True)
class PackageIndex:
    """The host of one index, with a port if that is neither 80 nor 443, and the file that names it; a default is named by none."""

    host: str
    origin: str
    credentials: bool = False


def configured(home: str, *, config: str = "", project: str | None = None, root: str = "/") -> tuple[PackageIndex, ...]:
    """Return the indexes that the system and the user with this home use.

    `config` is the user's XDG directory, by default `~/.config`. Files that lie in `project` are left out. `root` is where `/etc` lies.
    Unreadable files and addresses without a reachable host are left out, too. The public index of Python packages, and that of npm, are
    among them unless a file names another in their place.
    """
    etc, config = os.path.join(root, "etc"), config or os.path.join(home, ".config")
    dirs = [os.path.join(etc, "xdg/pip/pip.conf"), os.path.join(etc, "pip.conf"), os.path.join(home, ".pip/pip.conf")]
    apt = os.path.join(etc, "apt")
    sources: list[tuple[Callable[[str], Iterable[str]], Sequence[str]]] = [
        (_of_pip, [*dirs, os.path.join(config, "pip/pip.conf")]),
        (_of_uv, [os.path.join(etc, "uv/uv.toml"), os.path.join(config, "uv/uv.toml")]),
        (_of_npm, [*(os.path.join(root, each) for each in ("etc/npmrc", "usr/etc/npmrc", "usr/local/etc/npmrc")), f"{home}/.npmrc"]),
        (_of_apt_lists, [f"{apt}/sources.list", *sorted(glob(f"{apt}/sources.list.d/*.list"))]),
        (_of_apt_sources, sorted(glob(f"{apt}/sources.list.d/*.sources"))),
        (
            _of_apt_settings,
            [f"{apt}/apt.conf", *sorted(each for each in glob(f"{apt}/apt.conf.d/*") if "." not in each.rpartition("/")[2])],
        ),
    ]
    found: dict[tuple[str, str], PackageIndex] = {}
    replaced: set[str] = set()  # the defaults that some file exchanges for an index of its own
    for addresses_of, paths in sources:
        for path in paths:
            text = _text(path, project)
            if any(_MAIN[addresses_of](text) if addresses_of in _MAIN else ()):
                replaced.update(_DEFAULTS[addresses_of])
            for index in _indexes(addresses_of(text), path):
                same = found.get((index.host, index.origin))
                found[index.host, index.origin] = index if same is None or index.credentials else same
    left = dict.fromkeys(host for hosts in _DEFAULTS.values() for host in hosts if host not in replaced)
    return (*found.values(), *(PackageIndex(host, "") for host in left))


def credential_notes(indexes: Iterable[PackageIndex]) -> tuple[str, ...]:
    """Return a sentence for each index whose address holds credentials."""
    return tuple(
        f"{each.origin} names {each.host} with credentials: sandboxes may reach the host, and do not get them"
        for each in indexes
        if each.credentials
    )


def _indexes(addresses: Iterable[str], origin: str) -> Iterator[PackageIndex]:
    for address in addresses:
        try:
            parts = urlsplit(address.strip())
            host, port = canonical_host(parts.hostname), parts.port
        except (ValueError, PolicyError):
            continue
        if parts.scheme not in ("http", "https") or is_local(host) or _is_never_reached(host):
            continue
        written = f"[{host}]" if ":" in host else host
        entry = host if port is None or port in WEB_PORTS else f"{written}:{port}"
        yield PackageIndex(entry, origin, "@" in parts.netloc)


def _is_never_reached(host: str) -> bool:
    if not is_address(host):
        return False
    address = ip_address(host)
    return address.is_link_local or address.is_multicast or address in _NEVER


def _text(path: str, project: str | None) -> str:
    """Return the text of a configuration file; empty if it is missing, unreadable, too large, no regular file, or in the project."""
    real = os.path.realpath(path)
    if project is not None and contains(os.path.realpath(project), real):
        return ""
    try:
        fd = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with open(fd, "rb") as file:
            data = file.read(_LARGEST + 1) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    except OSError:
        return ""
    return data.decode("utf-8", "replace") if len(data) <= _LARGEST else ""


def _of_pip(text: str, keys: Sequence[str] = _PIP_KEYS) -> Iterator[str]:
    parser = RawConfigParser(strict=False)
    try:
        parser.read_string(text)
    except IniError:
        return
    for section in parser.sections():
        for key in keys:
            yield from (parser.get(section, key, fallback="") or "").split()


def _of_uv(text: str, *, main: bool = False) -> Iterator[str]:
    import tomllib  # few machines have this file

    try:
        settings = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return
    listed = settings.get("index")
    for table in (settings, settings.get("pip"), *(listed if isinstance(listed, list) else ())):
        if not isinstance(table, dict):
            continue
        for key in (*_UV_MAIN_KEYS, *(["url"] if table.get("default") is True else [])) if main else (*_UV_KEYS, "url"):
            value = table.get(key)
            yield from (each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str))


def _of_npm(text: str, *, main: bool = False) -> Iterator[str]:
    for line in text.splitlines():
        key, _, value = line.partition("=")
        name = key.strip().lower()
        others = ("proxy", "https-proxy", "http-proxy")
        if name == "registry" or (not main and (name in others or (name.startswith("@") and name.endswith(":registry")))):
            yield value.strip().strip("\"'")


def _of_apt_lists(text: str) -> Iterator[str]:
    for line in text.splitlines():
        words = re.sub(r"\[[^]]*\]", " ", line.partition("#")[0]).split()
        if len(words) > 1 and words[0] in ("deb", "deb-src"):
            yield _plain(words[1])


def _of_apt_sources(text: str) -> Iterator[str]:
    for stanza in re.split(r"\n\s*\n", text):
        fields: dict[str, str] = {}
        name = ""
        for line in stanza.splitlines():
            if line.startswith("#"):
                continue
            if not line.startswith((" ", "\t")):
                name, _, line = line.partition(":")
                name = name.strip().lower()
            fields[name] = f"{fields.get(name, '')} {line}"
        if fields.get("enabled", "yes").strip().lower() not in ("no", "false", "0"):
            yield from map(_plain, fields.get("uris", "").split())


def _of_apt_settings(text: str) -> Iterator[str]:
    yield from _APT_PROXY.findall(_APT_COMMENT.sub("", text))


def _plain(address: str) -> str:
    """Return an address of apt without the method around it, such as `mirror+`."""
    return address.rpartition("+")[2] if "+" in address.partition(":")[0] else address


# What is used where no file names another index, the hosts of the packages themselves included; and the settings that do name another.
_DEFAULTS: dict[Callable[..., Iterable[str]], tuple[str, ...]] = {_of_pip: PYPI, _of_uv: PYPI, _of_npm: NPM}
_MAIN: dict[Callable[..., Iterable[str]], Callable[[str], Iterable[str]]] = {
    _of_pip: lambda text: _of_pip(text, ("index-url",)),
    _of_uv: lambda text: _of_uv(text, main=True),
    _of_npm: lambda text: _of_npm(text, main=True),
}
