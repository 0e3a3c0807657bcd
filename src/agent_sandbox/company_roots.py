"""The root certificates that pip, npm, apt and git are configured with on this machine, each for the hosts that it is meant for.

They are read from the settings of the system and of the user, outside the project, before a run. The egress verifies those hosts, and no
others, with these roots and the system's. uv uses the system's roots, or variables, which are not read: an agent may have written them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from configparser import Error as IniError
from configparser import RawConfigParser
from urllib.parse import urlsplit

from agent_sandbox._fast.values import replace
from agent_sandbox.engine.provisions import Provisions
from agent_sandbox.engine.trust import SYSTEM, system_roots
from agent_sandbox.errors import PolicyError
from agent_sandbox.package_indexes import configured, indexes_in, settings_files, text_outside
from agent_sandbox.policy.hosts import canonical_host
from agent_sandbox.policy.network import NetworkRules, split_port
from agent_sandbox.policy.network_presets import NPM, PYPI
from agent_sandbox.secret_values import GIT_SETTINGS

_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\s]+-----END CERTIFICATE-----")
_NPM_LINE = re.compile(r"\s*(?://([^/\s:=]+)[^\s=]*?:)?(ca|ca\[\]|cafile)\s*=\s*(.*?)\s*", re.IGNORECASE)
_APT_WORDS = re.compile(r'"[^"]*"|[{};]|[^\s{};"]+')
_APT_COMMENT = re.compile(r"/\*.*?\*/|(?<!:)//[^\n]*|^\s*#[^\n]*", re.DOTALL | re.MULTILINE)
_GIT_SECTION = re.compile(r'\s*\[\s*([\w.-]+)(?:\s+"([^"]*)")?\s*\]')


def with_roots(
    given: Provisions, rules: NetworkRules, home: str, *, packages: bool, config: str = "", project: str | None = None
) -> Provisions:
    """Return provisions with the company's own roots, beside those of the system, for the hosts that these rules allow."""
    found, notes = roots_of(home, packages=packages, config=config, project=project)
    allowed = {host: own for host, own in found.items() if not rules.objection(host)}
    system = system_roots().decode("ascii", "ignore") if allowed else ""
    return replace(given, roots=tuple((host, system + own) for host, own in allowed.items()), notes=(*given.notes, *notes))


def roots_of(
    home: str, *, packages: bool, config: str = "", project: str | None = None, root: str = "/"
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the hosts that have roots of their own, each with its roots in PEM, and sentences about settings that name none.

    With `packages`, the roots of package indexes are among them. The other arguments are those of `package_indexes.settings_files`.
    """
    found: dict[str, dict[str, None]] = {}
    notes: list[str] = []
    named = [*_of_git(home, project, root), *(_of_packages(home, config, project, root) if packages else ())]
    system = frozenset(map(os.path.realpath, SYSTEM))  # with which every host is verified anyway
    texts: dict[str, list[str]] = {}
    for hosts, written, origin in named:
        path = os.path.join(home, written[2:]) if written.startswith("~/") else written
        if os.path.realpath(path) in system:
            continue
        if written not in texts:
            text = written if "-----BEGIN" in written else text_outside(path, project) if os.path.isabs(path) else ""
            texts[written] = _certificates(text.replace("\\n", "\n"))
        certificates = texts[written]
        if not certificates:
            notes.append(f"{origin} names certificates that cannot be read, so that its hosts are verified with the system's alone")
        for host in hosts:
            found.setdefault(host, {}).update(dict.fromkeys(certificates))
    return {host: "\n".join(roots) + "\n" for host, roots in found.items() if roots}, tuple(dict.fromkeys(notes))


Named = Iterator[tuple[Iterable[str], str, str]]  # hosts, a path or certificates themselves, and the file that says so


def _of_packages(home: str, config: str, project: str | None, root: str) -> Named:
    files = settings_files(home, config=config, project=project, root=root)
    every = {split_port(each.host)[0] for each in configured(home, config=config, project=project, root=root)}
    hosts: dict[str, set[str]] = {"pip": every & set(PYPI), "npm": every & set(NPM), "apt": set()}
    for file in files:
        for index in indexes_in(file):
            hosts.setdefault(file.tool.partition("-")[0], set()).add(split_port(index.host)[0])
    for file in files:
        if file.tool == "pip":
            yield from ((hosts["pip"], path, file.path) for path in _pip_certificates(file.text))
        elif file.tool == "npm":
            for line in file.text.splitlines():
                if said := _NPM_LINE.fullmatch(line):
                    yield _canonical(said[1]) & every if said[1] else hosts["npm"], said[3].strip("\"'"), file.path
        elif file.tool == "apt":
            for key, value in apt_settings(file.text):
                if key.startswith("acquire::https::") and key.endswith("cainfo"):
                    host = key.removeprefix("acquire::https::").rpartition("::")[0]
                    yield _canonical(host) & every if host else hosts["apt"], value, file.path


def _pip_certificates(text: str) -> Iterator[str]:
    parser = RawConfigParser(strict=False)
    try:
        parser.read_string(text)
    except IniError:
        return
    yield from (path for section in parser.sections() if (path := parser.get(section, "cert", fallback="")))


def apt_settings(text: str) -> Iterator[tuple[str, str]]:
    """Yield the settings in a configuration of apt, each with its whole name in lower case."""
    above: list[str] = []
    name = ""
    for word in _APT_WORDS.findall(_APT_COMMENT.sub("", text)):
        if word == "{":
            above.append(name)
            name = ""
        elif word == "}":
            del above[-1:]
            name = ""
        elif word == ";":
            name = ""
        elif word.startswith('"') and name:
            yield "::".join((*above, name)), word[1:-1]
        else:
            name = word.lower()


def _of_git(home: str, project: str | None, root: str) -> Named:
    for path in (os.path.join(root, "etc/gitconfig"), *(os.path.join(home, each) for each in GIT_SETTINGS)):
        every: set[str] = set()  # the hosts that this file names
        said: list[tuple[set[str] | None, str]] = []
        section, hosts = "", None
        for line in text_outside(path, project).splitlines():
            if head := _GIT_SECTION.match(line):
                section = head[1].lower()
                hosts = _canonical(urlsplit(head[2]).hostname or "") if head[2] and head[2].startswith("https://") else None
                every |= hosts or set()
                line = line[head.end() :]
            key, equals, value = line.partition("=")
            if section == "http" and key.strip().lower() == "sslcainfo" and equals:
                said.append((hosts, value.strip().strip('"')))
        yield from ((every if hosts is None else hosts, value, path) for hosts, value in said)


def _certificates(text: str) -> list[str]:
    """Return the certificates in a text, in PEM, each as it is written; none that OpenSSL cannot read."""
    found: list[str] = _CERTIFICATE.findall(text)
    return found if not found or _are_certificates("\n".join(found)) else list(filter(_are_certificates, found))


def _are_certificates(pem: str) -> bool:
    import ssl  # slow to load, and few machines come so far

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem)
    except (ssl.SSLError, ValueError):
        return False
    return True


def _canonical(written: str) -> set[str]:
    """Return the canonical host, alone in a set; an empty one if it is no host."""
    try:
        return {canonical_host(written)}
    except PolicyError:
        return set()
