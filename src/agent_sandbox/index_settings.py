"""The settings of pip, uv, npm and apt as a run sees them: placeholders stand where the credentials of package indexes stood.

The egress puts the credentials in, only towards the index that they are for: its host, below its path, for GET and HEAD. What belongs to
no index, or cannot be put in, is left out of what the run sees. Netrc files and apt's `auth.conf` show the entries of indexes alone.

Files in the project are not read for this, as in `package_indexes`.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from glob import glob
from urllib.parse import unquote

from agent_sandbox._fast.values import replace
from agent_sandbox.engine.provisions import Provisions, ShownFile
from agent_sandbox.errors import PolicyError
from agent_sandbox.kernel.wire import TRUST
from agent_sandbox.package_indexes import PackageIndex, SettingsFile, configured, settings_files, text_outside
from agent_sandbox.policy.bound_secrets import BoundSecret, new_placeholder
from agent_sandbox.policy.hosts import canonical_host
from agent_sandbox.policy.model import Policy
from agent_sandbox.policy.network import split_port
from agent_sandbox.policy.secret_content import token_in

READING = ("GET", "HEAD")
_ADDRESS = re.compile(r"(?i)\b(https?)://([^\s/?#\"'<>]*)@([^\s@/?#\"'<>]+)(/[^\s?#\"'<>]*)?")
_NO_PASSWORDS = ("", "x-oauth-basic", "x")  # beside a token in the place of the user
_NPM_LINE = re.compile(r"\s*(?://([^\s=]*?)/?:)?([\w\-\[\]]+)\s*=\s*(.*?)\s*")
_NPM_CREDENTIALS = ("_authtoken", "_auth", "_password")
_NPM_HIDDEN = (*_NPM_CREDENTIALS, "otp", "key", "keyfile", "cert", "certfile", "ca", "ca[]", "cafile")  # a run has certificates of its own
_APT_CERTIFICATES = re.compile(r'(?i)(\bcainfo\s+")([^"]*)(")')
_SIMPLE = re.compile(r"/\+?simple/$")


@dataclass
class IndexSettings:
    """The credentials of indexes, bound; the files that a run is shown with placeholders; and sentences about what is left out."""

    secrets: list[BoundSecret] = field(default_factory=list)
    files: list[ShownFile] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def with_indexes(given: Provisions, policy: Policy, home: str, *, config: str = "", project: str | None = None) -> Provisions:
    """Return provisions with the credentials of the indexes that a policy allows, and the settings that a run sees in their place."""
    rules, hidden = policy.network, {mask.path for mask in policy.files.masks}

    def permits(host: str) -> bool:
        return not rules.objection(host) and not rules.passes_uninspected(host)

    found = brokered(home, permits=permits, config=config, project=project)
    named = {os.path.join(home, name) for name in (".npmrc", ".netrc")}
    files = tuple(each for each in found.files if each.path not in named or each.path in hidden)  # what is revealed is shown as it is
    return replace(given, indexes=tuple(found.secrets), files=files, notes=(*given.notes, *found.notes))


def brokered(
    home: str,
    *,
    permits: Callable[[str], bool],
    random: Callable[[int], bytes] = os.urandom,
    config: str = "",
    project: str | None = None,
    root: str = "/",
) -> IndexSettings:
    """Return the settings that a run is shown, and the credentials that were taken out of them.

    `permits` says whether a canonical host may be reached over TLS that is read. The other arguments are those of `settings_files`.
    """
    work = _Work(configured(home, config=config, project=project, root=root), permits, random)
    for file in settings_files(home, config=config, project=project, root=root):
        shown = work.shown(file)
        # npm's own file is hidden whatever it holds, so it is shown even if nothing in it had to be changed
        if shown != file.text or file.path == f"{home}/.npmrc":
            work.show(file.path, shown, 0o644)
    apt = os.path.join(root, "etc/apt")
    # The directory auth.conf.d is hidden as a whole, so what its files hold is shown in one.
    of_apt = [f"{apt}/auth.conf", *sorted(glob(f"{apt}/auth.conf.d/*.conf"))]
    for path, parts in ((f"{home}/.netrc", [f"{home}/.netrc"]), (of_apt[0], of_apt)):
        if shown := "".join(work.entries(each, text_outside(each, project)) for each in parts):
            work.show(path, shown, 0o600)
    return work.done


class _Work:
    def __init__(self, indexes: Iterable[PackageIndex], permits: Callable[[str], bool], random: Callable[[int], bytes]) -> None:
        self.done = IndexSettings()
        self._permits, self._random = permits, random
        self._written: list[str] = []  # in the place of credentials
        self._paths: dict[str, dict[str, None]] = {}  # those of the indexes on each host
        for index in indexes:
            self._paths.setdefault(split_port(index.host)[0], {})[prefix_of(index.path)] = None

    def show(self, path: str, text: str, mode: int) -> None:
        """Let the run see this text in the place of a file, unless a token is in it still."""
        others = text
        for ours in self._written:
            others = others.replace(ours, "")
        if token_in(others.encode()):
            self.done.notes.append(f"{path} holds a token that belongs to no index: sandboxes do not see its settings")
            text = ""
        real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        self.done.files.append(ShownFile(real, f"{TRUST}/settings-{len(self.done.files)}", mode, text.encode()))

    def shown(self, file: SettingsFile) -> str:
        """Return the text of a file with placeholders, and without what no run may see."""

        def replaced(found: re.Match[str]) -> str:
            scheme, user, host, path = found[1], found[2], found[3], found[4] or "/"
            left = self._userinfo(file.path, scheme.lower(), user, host, path)
            self._written += [left] if left else []
            return f"{scheme}://{left}{host}{found[4] or ''}"

        text = _ADDRESS.sub(replaced, file.text)
        if file.tool == "npm":
            return "".join(self._npm_lines(file.path, text))
        return _APT_CERTIFICATES.sub(rf"\g<1>{TRUST}/ca.pem\g<3>", text) if file.tool == "apt" else text

    def _userinfo(self, origin: str, scheme: str, written: str, host: str, path: str) -> str:
        """Return what stands before the host of an address, with a placeholder; nothing if the credential cannot be used."""
        user, colon, password = written.partition(":")
        in_user = unquote(password) in _NO_PASSWORDS
        value = unquote(user if in_user else password)
        if not value or value.startswith("$"):
            return ""
        if scheme != "https":
            self._leave_out(origin, host, "they would go over plain HTTP")
            return ""
        holder = self._holder(origin, host, (prefix_of(path),), value)
        if not holder:
            return ""
        return f"{holder}{colon}{password}@" if in_user else f"{user}:{holder}@"

    def _npm_lines(self, origin: str, text: str) -> Iterator[str]:
        for line in text.splitlines(keepends=True):
            found = _NPM_LINE.fullmatch(line.rstrip("\r\n"))
            if found is None or found[2].lower() not in _NPM_HIDDEN:
                yield line
                continue
            scope, key, value = found[1], found[2], found[3].strip("\"'")
            if key.lower() not in _NPM_CREDENTIALS:
                continue
            if "${" in value:  # of a variable, which the run has or has not
                yield line
            elif scope and (shown := self._npm_value(origin, key.lower(), scope, value)):
                self._written.append(shown)
                yield f"//{scope}/:{key}={shown}\n"
            elif not scope:
                self._leave_out(origin, "", f"{key} names no registry")

    def _npm_value(self, origin: str, key: str, scope: str, value: str) -> str:
        """Return what npm is to send as a credential, with a placeholder; nothing if it cannot be used."""
        host, slash, path = scope.partition("/")
        if key == "_authtoken":
            return self._holder(origin, host, (f"{slash}{path}".rstrip("/") + "/",), value)
        try:
            decoded = base64.b64decode(value, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            self._leave_out(origin, host, f"{key} is not in base64")
            return ""
        user, colon, password = decoded.partition(":") if key == "_auth" else ("", "", decoded)
        holder = self._holder(origin, host, (f"{slash}{path}".rstrip("/") + "/",), password)
        return base64.b64encode(f"{user}{colon}{holder}".encode()).decode() if holder else ""

    def entries(self, path: str, text: str) -> str:
        """Return the entries of a netrc file that are for indexes, with placeholders."""
        shown = []
        for machine, login, password in netrc_entries(text):
            if "://" in machine and not machine.startswith("https://"):
                continue
            host, slash, rest = machine.removeprefix("https://").partition("/")
            name = _canonical(host)
            paths = (f"/{rest}".rstrip("/") + "/",) if slash else tuple(self._paths.get(name, ()))
            if holder := self._holder(path, host, paths, password) if paths else "":
                self._written.append(holder)
                shown.append(f"machine {machine} login {login} password {holder}\n")
        return "".join(shown)

    def _holder(self, origin: str, written: str, paths: tuple[str, ...], value: str) -> str:
        """Return the placeholder of a credential for paths of a host; empty if there is no index, or if it cannot be put in."""
        host = _canonical(written)
        if host not in self._paths or not self._permits(host):
            return ""
        for number, known in enumerate(self.done.secrets):
            if known.hosts == (host,) and known.value == value:
                every = tuple(dict.fromkeys((*known.paths, *paths)))
                self.done.secrets[number] = BoundSecret(known.name, known.placeholder, value, (host,), paths=every, methods=READING)
                return known.placeholder
        count = sum(known.hosts == (host,) for known in self.done.secrets)
        name = f"index {host}" + (f" {count + 1}" if count else "")
        holder = new_placeholder("index", self._random(12))
        try:
            self.done.secrets.append(BoundSecret(name, holder, value, (host,), paths=paths, methods=READING))
        except PolicyError as error:
            self._leave_out(origin, host, str(error.hint))
            return ""
        return holder

    def _leave_out(self, origin: str, host: str, why: str) -> None:
        note = f"{origin} names {host + ' with ' if host else ''}credentials that sandboxes do not use: {why}"
        if note not in self.done.notes:
            self.done.notes.append(note)


def prefix_of(path: str) -> str:
    """Return the beginning of the paths of an index: that of its address. The files of a simple index lie beside it.

    >>> prefix_of("/pypi/team/simple/"), prefix_of("/npm")
    ('/pypi/team/', '/npm/')
    """
    return _SIMPLE.sub("/", path.rstrip("/") + "/")


def netrc_entries(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield the machine, login and password of each entry of a netrc file that names a machine and a password."""
    words = iter(re.findall(r'"(?:[^"\\]|\\.)*"|\S+', re.sub(r"(?m)^\s*#.*$", "", text)))
    entries: list[dict[str, str]] = [{}]
    for word in words:
        if word == "macdef":  # what follows are commands
            break
        if word in ("machine", "default"):
            entries.append({})
        if word in ("machine", "login", "password", "account"):
            value = next(words, "")
            entries[-1][word] = re.sub(r"\\(.)", r"\1", value[1:-1]) if value.startswith('"') else value
    for entry in entries:
        if entry.get("machine") and entry.get("password"):
            yield entry["machine"], entry.get("login", ""), entry["password"]


def _canonical(host: str) -> str:
    """Return the canonical host of an authority without a user; empty if it is none."""
    try:
        return canonical_host(re.sub(r":\d+$", "", host) if not host.endswith("]") else host)
    except PolicyError:
        return ""
