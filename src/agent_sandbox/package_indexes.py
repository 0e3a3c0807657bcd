"""The package indexes that pip, uv, npm and apt use on this machine, for the network preset `packages`.

They are read from the configuration of the system and of the user, before a run. A file inside the project is not read, nor one that a link
there leads to, and neither is the environment: an agent may have written both. Hosts, ports and paths are taken here; what the files hold
besides, credentials and certificates, is for `index_settings` and `company_roots`.

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
from dataclasses import dataclass, field
from glob import glob
from ipaddress import ip_address
from urllib.parse import urlsplit

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.hosts import bracketed, canonical_host, is_local
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
    """The host of one index, with a port if it is neither 80 nor 443, its path, and the file that names it; a default is named by none."""

    host: str
    origin: str
    path: str = "/"


@dataclass(frozen=True)
class SettingsFile:
    """A file with settings of a package manager, and its text, which may hold credentials."""

    tool: str  # "pip", "uv", "npm", "apt-list", "apt-sources" or "apt"
    path: str
    text: str = field(repr=False)


def settings_files(home: str, *, config: str = "", project: str | None = None, root: str = "/") -> tuple[SettingsFile, ...]:
    """Return the settings of the system and of the user with this home that can be read. Those that lie in `project` are left out.

    `config` is the user's XDG directory, by default `~/.config`. `root` is where `/etc` lies.
    """
    etc, config = os.path.join(root, "etc"), config or os.path.join(home, ".config")
    dirs = [os.path.join(etc, "xdg/pip/pip.conf"), os.path.join(etc, "pip.conf"), os.path.join(home, ".pip/pip.conf")]
    apt = os.path.join(etc, "apt")
    named = glob(f"{apt}/apt.conf.d/*")
    places: dict[str, Sequence[str]] = {
        "pip": [*dirs, os.path.join(config, "pip/pip.conf")],
        "uv": [os.path.join(etc, "uv/uv.toml"), os.path.join(config, "uv/uv.toml")],
        "npm": [*(os.path.join(root, each) for each in ("etc/npmrc", "usr/etc/npmrc", "usr/local/etc/npmrc")), f"{home}/.npmrc"],
        "apt-list": [f"{apt}/sources.list", *sorted(glob(f"{apt}/sources.list.d/*.list"))],
        "apt-sources": sorted(glob(f"{apt}/sources.list.d/*.sources")),
        "apt": [f"{apt}/apt.conf", *sorted(each for each in named if "." not in each.rpartition("/")[2] or each.endswith(".conf"))],
    }
    found = (SettingsFile(tool, path, text_outside(path, project)) for tool, paths in places.items() for path in paths)
    return tuple(each for each in found if each.text)


def configured(home: str, *, config: str = "", project: str | None = None, root: str = "/") -> tuple[PackageIndex, ...]:
    """Return the indexes that the system and the user with this home use: see `settings_files`.

    Addresses without a reachable host are left out. The public index of Python packages, and that of npm, are among them unless a file
    names another in their place.
    """
    found: dict[PackageIndex, None] = {}
    replaced: set[str] = set()  # the defaults that some file exchanges for an index of its own
    for file in settings_files(home, config=config, project=project, root=root):
        if file.tool in _MAIN and any(_MAIN[file.tool](file.text)):
            replaced.update(_DEFAULTS[file.tool])
        found |= dict.fromkeys(indexes_in(file))
    left = dict.fromkeys(host for hosts in _DEFAULTS.values() for host in hosts if host not in replaced)
    return (*found, *(PackageIndex(host, "") for host in left))


def indexes_in(file: SettingsFile) -> Iterator[PackageIndex]:
    """Yield the indexes that one file names."""
    yield from _indexes(_ADDRESSES[file.tool](file.text), file.path)


def _indexes(addresses: Iterable[str], origin: str) -> Iterator[PackageIndex]:
    for address in addresses:
        try:
            parts = urlsplit(address.strip())
            host, port = canonical_host(parts.hostname), parts.port
        except (ValueError, PolicyError):
            continue
        if parts.scheme not in ("http", "https") or is_local(host) or _is_never_reached(host):
            continue
        written = bracketed(host)
        entry = host if port is None or port in WEB_PORTS else f"{written}:{port}"
        yield PackageIndex(entry, origin, parts.path or "/")


def _is_never_reached(host: str) -> bool:
    if not is_address(host):
        return False
    address = ip_address(host)
    return address.is_link_local or address.is_multicast or address in _NEVER


def text_outside(path: str, project: str | None) -> str:
    """Return the text of a file; empty if it is missing, unreadable, too large, no regular file, or in the project."""
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


_ADDRESSES: dict[str, Callable[[str], Iterable[str]]] = {
    **{"pip": _of_pip, "uv": _of_uv, "npm": _of_npm},
    **{"apt-list": _of_apt_lists, "apt-sources": _of_apt_sources, "apt": _of_apt_settings},
}
# What is used where no file names another index, the hosts of the packages themselves included; and the settings that do name another.
_DEFAULTS = {"pip": PYPI, "uv": PYPI, "npm": NPM}
_MAIN: dict[str, Callable[[str], Iterable[str]]] = {
    "pip": lambda text: _of_pip(text, ("index-url",)),
    "uv": lambda text: _of_uv(text, main=True),
    "npm": lambda text: _of_npm(text, main=True),
}
