"""The trust stores of a run with a network: how its programs come to trust the authority of its egress.

The certificates lie in two files of a private directory of the run: as PEM, and as a Java key store. Three things lead programs there, and
none of them can end up in a change set:

- variables, for the programs that read them;
- the system's bundle and Java's key store, and certifi's file where packages of Python lie: in the view, each is a link to ours. The link
  is in a lower layer. Who replaces the file replaces the link, and what is then captured is the new file alone.

A program may also move such a link, or change its owner. The link is then in the upper layer, and is never read as a change: it leads to
a directory that ended with the run.

Not promised: that a program which copies the content of such a file elsewhere copies it without the authority's certificate.
"""

from __future__ import annotations

import os
import time
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from glob import escape, glob
from hashlib import sha1

from agent_sandbox._fast.values import TYPE_CHECKING, replace
from agent_sandbox.engine.provisions import ShownFile
from agent_sandbox.kernel.ids import FIRST_ID
from agent_sandbox.kernel.mount_plan import MountPlan, Overlay, Step, Symlink
from agent_sandbox.kernel.wire import TRUST
from agent_sandbox.policy.paths import contains

if TYPE_CHECKING:
    from hashlib import _Hash as HASH

KNOWN_SECONDS = 5.0  # after this time we notice that a store was installed or removed
BUNDLE, KEY_STORE = f"{TRUST}/ca.pem", f"{TRUST}/cacerts"

# Each names a file of certificates. Ours replace those of the caller: a program that trusted only the caller's file could not speak to
# anybody here.
VARIABLES = (
    "SSL_CERT_FILE",  # OpenSSL, Go, Ruby, rustls; aiohttp, httpx and uv
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "PIP_CERT",
    "NODE_EXTRA_CA_CERTS",
    "npm_config_cafile",  # npm asks for no other where a .npmrc names a file
    "GIT_SSL_CAINFO",
    "AWS_CA_BUNDLE",
    "CARGO_HTTP_CAINFO",
    "DENO_CERT",
    "HTTPLIB2_CA_CERTS",
    "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
    "BUNDLE_SSL_CA_CERT",
    "PERL_LWP_SSL_CA_FILE",
    "NIX_SSL_CERT_FILE",
    "CLOUDSDK_CORE_CUSTOM_CA_CERTS_FILE",
)
# Where libraries for TLS look for the certificates of the system, on the distributions that we know.
SYSTEM = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu, Arch, Alpine
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",  # Fedora, RHEL
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",  # SUSE
    "/var/lib/ca-certificates/ca-bundle.pem",
    "/etc/ssl/cert.pem",  # Alpine, and OpenSSL's own default
)
JAVA = (
    "/etc/ssl/certs/java/cacerts",  # Debian
    "/etc/pki/ca-trust/extracted/java/cacerts",  # Fedora
    "/etc/pki/java/cacerts",
    "/usr/lib/jvm/*/lib/security/cacerts",
    "/opt/java/*/lib/security/cacerts",
)
_PYTHON = ("/usr/lib/python3*", "/usr/lib/python3", "/usr/local/lib/python3*", "/usr/share/python3*")
_ENVIRONMENTS = (".venv", "venv", "env", ".env")  # of a project, by custom
_CERTIFI = ("certifi/cacert.pem", "pip/_vendor/certifi/cacert.pem")
_JKS, _JKS_VERSION, _TRUSTED = b"\xfe\xed\xfe\xed", 2, 2
_PASSWORD = "changeit"  # of every Java key store with public certificates, by custom


def system_roots() -> bytes:
    """Return the certificates that this machine trusts, as PEM; empty if none are found.

    From the system's own files only, never from the environment: an agent may have written that.
    """
    for path in SYSTEM:
        with suppress(OSError):
            found = os.stat(path)
            return _read_roots(path, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))
    return b""


@lru_cache(maxsize=2)
def _read_roots(path: str, version: tuple[int, ...]) -> bytes:
    """Return the content of a file, read once for each of its versions."""
    with open(path, "rb") as file:
        return file.read().rstrip(b"\n") + b"\n"


def trusting(plan: MountPlan, project: str | None, env: Mapping[str, str], files: Iterable[ShownFile] = ()) -> MountPlan:
    """Return the plan of a view in which the trust stores that it shows are links to ours, and so are these files, hidden or not."""
    named = tuple(env[name] for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if os.path.isabs(env.get(name, "")))
    instead = {file.path: file.link for file in files}
    known = {**_known_stores(project, named, int(time.monotonic() / KNOWN_SECONDS)), **instead}
    places = {step.target: step for step in plan.steps if hasattr(step, "target") and step.target not in known}
    above = {path: max((target for target in places if contains(target, path)), key=len, default="") for path in known}
    added: dict[str, tuple[list[tuple[str, str]], list[tuple[str, str]]]] = {}
    for path, ours in known.items():
        added.setdefault(above[path], ([], []))[path in instead].append((os.path.relpath(path, above[path] or "/"), ours))

    def changed(step: Step) -> Iterator[Step]:
        target = getattr(step, "target", None)
        if target not in known:
            over, shown = (tuple(each) for each in added.get(str(target), ((), ())))
            yield replace(step, links_over=over, links_instead=shown) if isinstance(step, Overlay) and (over or shown) else step
        elif not isinstance(places.get(above[target]), Overlay):  # a file on its own, in a directory that the view makes
            yield Symlink(target, known[target])

    return replace(plan, steps=tuple(new for step in plan.steps for new in changed(step)))


@lru_cache(maxsize=8)
def _known_stores(project: str | None, environments: tuple[str, ...], moment: int) -> dict[str, str]:
    return dict(stores(project, environments))


def stores(project: str | None, environments: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield the real path of each trust store on this machine, with the file of ours that takes its place.

    `environments` are virtual environments of Python besides those that a project has by custom.
    """
    for path in filter(os.path.isfile, SYSTEM):
        yield os.path.realpath(path), BUNDLE
    for pattern in JAVA:
        for path in _files(pattern):
            yield path, KEY_STORE
    for packages in _packages(project, environments):
        for name in _CERTIFI:
            for path in _files(f"{packages}/{name}"):
                yield path, BUNDLE


def _packages(project: str | None, named: tuple[str, ...]) -> Iterator[str]:
    """Yield patterns of the directories where packages of Python lie: the system's, our own, the project's, and the caller's."""
    for prefix in _PYTHON:
        yield f"{prefix}/dist-packages"
        yield f"{prefix}/site-packages"
    for environment in (*(os.path.join(project, name) for name in _ENVIRONMENTS if project is not None), *named):
        yield f"{escape(environment)}/lib/python3*/site-packages"


def _files(pattern: str) -> Iterable[str]:
    return sorted({os.path.realpath(path) for path in glob(pattern) if os.path.isfile(path)})


def write_trust(directory: int, roots: bytes, authority: bytes, files: Iterable[ShownFile] = ()) -> None:
    """Write the files of a run into its private directory: the roots of the machine with the certificate of its egress, and these files.

    Raises OSError.
    """
    certificates = ((BUNDLE, 0o644, (roots, authority)), (KEY_STORE, 0o644, key_store(roots, authority)))
    for name, mode, pieces in (*certificates, *((each.link, each.mode, (each.content,)) for each in files)):
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(os.path.basename(name), flags, mode, dir_fd=directory), "wb", buffering=0) as file:
            os.fchmod(file.fileno(), mode)
            if os.geteuid() == 0:  # the guest's own root may write to them, as tools that add certificates do: it is lost with the run
                os.fchown(file.fileno(), FIRST_ID, FIRST_ID)
            for piece in pieces:
                _write(file.fileno(), piece)


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def key_store(roots: bytes, authority: bytes) -> tuple[bytes, bytes]:
    """Return certificates as a Java key store (JKS), which every Java reads: a count, an entry each, and a digest with the password.

    In two pieces: the roots of the machine are the same for every run, and so is most of the digest.
    """
    own = _certificates_in(authority)
    first, digest, count = _key_store_of(roots, len(own))
    digest = digest.copy()
    last = b"".join(_entry(count + number, content) for number, content in enumerate(own))
    digest.update(last)
    return first, last + digest.digest()


@lru_cache(maxsize=2)
def _key_store_of(roots: bytes, more: int) -> tuple[bytes, HASH, int]:
    """Return the beginning of a key store that has so many entries more, its digest so far, and the number of its entries."""
    entries = _certificates_in(roots)
    store = _JKS + _JKS_VERSION.to_bytes(4, "big") + (len(entries) + more).to_bytes(4, "big")
    store += b"".join(_entry(number, content) for number, content in enumerate(entries))
    return store, sha1(_PASSWORD.encode("utf-16-be") + b"Mighty Aphrodite" + store, usedforsecurity=False), len(entries)


def _entry(number: int, content: bytes) -> bytes:
    return _TRUSTED.to_bytes(4, "big") + _utf(f"c{number}") + bytes(8) + _utf("X.509") + len(content).to_bytes(4, "big") + content


def _certificates_in(pem: bytes) -> list[bytes]:
    """Return the content of each certificate."""
    blocks = [block.partition(b"-----END CERTIFICATE-----")[0] for block in pem.split(b"-----BEGIN CERTIFICATE-----")[1:]]
    return [b64decode(each) for each in blocks]


def _utf(text: str) -> bytes:
    return len(text).to_bytes(2, "big") + text.encode("ascii")
