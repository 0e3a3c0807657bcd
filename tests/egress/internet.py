"""A small internet in a network namespace: hosts with public addresses on loopback, which write down every byte that reaches them.

`run_on_internet` runs a command there, as this user. The command finds a resolver, a bundle of trusted roots with one root more, and these
hosts. Nothing else is reachable, and no packet leaves the namespace.

    web.test, *.web.test    HTTP and HTTPS: /, /echo, /to?URL (a redirect), /bytes?N, WebSocket,
                            /simple/ and /npm/ (indexes of packages; below /private/ for whoever has `INDEX_SECRET`),
                            /git/ and /served/ (what lies in directories of these names)
    other.test              the same; for tests it is the host that is not allowed
    false.test              HTTPS with a certificate for another name
    inside.test             a name that resolves to a private address; there is a web server
    meta.test               a name that resolves to the metadata address; there is a web server
    db.test, *.db.test      port 5432: sends back what it gets; port 6379: a Redis that knows PING
    company.test            like web.test, with a certificate of a root that nobody trusts: `company.pem` in the directory of the internet
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import gzip
import hashlib
import io
import json
import os
import socket
import socketserver
import ssl
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote

ADDRESSES = {
    "web.test": "11.0.0.1",
    "other.test": "11.0.0.2",
    "false.test": "11.0.0.3",
    "db.test": "11.0.0.4",
    "inside.test": "10.0.0.5",
    "company.test": "11.0.0.6",
    "meta.test": "169.254.169.254",
}
RESOLVER = "11.0.0.53"
PACKAGE, VERSION = "smallpackage", "1.0"
INDEX_SECRET = "idx-7e6d5c4b3a29181f"
_CREDENTIALS = (f"Bearer {INDEX_SECRET}", "Basic " + base64.b64encode(f"me:{INDEX_SECRET}".encode()).decode())
_NEW_NAMESPACES = 0x00020000 | 0x40000000  # CLONE_NEWNS, CLONE_NEWNET
_NEW_USER = 0x10000000
_BIND, _PRIVATE = 0x1000, 0x4000 | (1 << 18)


@dataclass(frozen=True)
class Visit:
    """How a command ended, and what reached the hosts meanwhile: bytes for each address, and names that the resolver was asked for."""

    code: int
    stdout: str
    stderr: str
    received: dict[str, bytes]
    asked: list[str]


def run_on_internet(
    place: Path, command: Sequence[str], *, env: dict[str, str] | None = None, seconds: float = 300, cwd: Path | None = None
) -> Visit:
    """Run a command on an internet of its own. `place` is an empty directory for what it writes down."""
    place.mkdir(parents=True, exist_ok=True)
    if env is not None and "AGENT_SANDBOX_STATE" in env:
        lay_rules(Path(env["AGENT_SANDBOX_STATE"]))
    argv = [sys.executable, "-m", "tests.egress.internet", str(place), str(cwd or place), "--", *command]
    top = str(Path(__file__).parents[2])
    done = subprocess.run(argv, cwd=top, env=env, capture_output=True, text=True, errors="backslashreplace", timeout=seconds, check=False)
    lines = (
        [json.loads(line) for line in (place / "received.jsonl").read_text().splitlines()] if (place / "received.jsonl").exists() else []
    )
    received: dict[str, bytes] = {}
    for line in lines:
        if line["kind"] == "bytes":
            received[line["at"]] = received.get(line["at"], b"") + base64.b64decode(line["data"])
    return Visit(done.returncode, done.stdout, done.stderr, received, [line["name"] for line in lines if line["kind"] == "asked"])


def lay_rules(state: Path) -> None:
    """Put the compiled rules of the search into a state directory. The product compiles and keeps them itself, with the first run of such
    a directory, which takes longer than most of the runs here."""
    from agent_sandbox.assembly import SEARCHES  # not for the internet itself, which starts for each test
    from agent_sandbox.engine.provisions import COMPILED

    file = state / SEARCHES / COMPILED
    for directory in (state, file.parent):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not file.exists():
        file.touch(0o600)
        file.write_bytes(_rules())


@cache
def _rules() -> bytes:
    from agent_sandbox.egress.search import compiled_rules  # as above

    with tempfile.TemporaryFile() as file:
        compiled_rules(file.fileno())
        file.seek(0)
        return file.read()


class _Record:
    def __init__(self, path: Path) -> None:
        self._file, self._lock = path.open("a", buffering=1), threading.Lock()

    def write(self, **line: Any) -> None:
        with self._lock:
            self._file.write(json.dumps(line) + "\n")


class _Tee(io.RawIOBase):
    """Reads from a file and writes down what was read."""

    def __init__(self, file: Any, record: _Record, at: str) -> None:
        self._from, self._record, self._at = file, record, at

    def readable(self) -> bool:
        return True

    def _seen(self, data: bytes) -> bytes:
        if data:
            self._record.write(kind="bytes", at=self._at, data=base64.b64encode(data).decode())
        return data

    def read(self, size: int = -1) -> bytes:
        return self._seen(self._from.read(size))

    def readline(self, size: int | None = -1) -> bytes:
        return self._seen(self._from.readline(-1 if size is None else size))


class _Web(BaseHTTPRequestHandler):
    """The pages of a host."""

    protocol_version = "HTTP/1.1"
    record: _Record
    repositories: Path
    tls: ssl.SSLContext | None

    def setup(self) -> None:
        if self.tls is not None:
            self.request = self.tls.wrap_socket(self.request, server_side=True)
        super().setup()
        address, port = self.request.getsockname()[:2]
        self.rfile = _Tee(self.rfile, self.record, f"{address}:{port}")  # type: ignore[assignment]

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        private = "/private" if path.startswith("/private/") else ""
        path = path.removeprefix(private)
        if private and self.headers.get("authorization", "") not in _CREDENTIALS:
            self._say(401, b"", [("WWW-Authenticate", 'Basic realm="index"')])
        elif self.headers.get("upgrade", "").lower() == "websocket":
            self._greet()
        elif path.startswith("/git/"):
            self._git(path, query, b"")
        elif path == "/to":
            self._say(302, b"", [("Location", unquote(query))])
        elif path == "/bytes":
            self._say(200, b"x" * int(query))
        elif path == f"/simple/{PACKAGE}/":
            digest = hashlib.sha256(wheel()).hexdigest()
            name = f"{PACKAGE}-{VERSION}-py3-none-any.whl"
            self._say(200, f'<html><body><a href="../../files/{name}#sha256={digest}">{name}</a></body></html>'.encode(), kind="text/html")
        elif path.startswith("/files/"):
            self._say(200, wheel(), kind="application/zip")
        elif path == f"/npm/{PACKAGE}":
            self._say(200, json.dumps(_npm_document(self.headers.get("host", "") + private)).encode(), kind="application/json")
        elif path == f"/npm/{PACKAGE}.tgz":
            self._say(200, tarball(), kind="application/octet-stream")
        elif path.startswith("/served/"):
            self._serve(path.removeprefix("/served/"))
        elif path == "/headers":
            self._say(200, json.dumps(self.headers.items()).encode())
        else:
            self._say(200 if path in ("/", "/page") else 404, b"hello from " + self.headers.get("host", "").encode())

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self._body()
        path, _, query = self.path.partition("?")
        if path.startswith("/git/"):
            self._git(path, query, body)
        else:
            self._say(200, body)

    do_PUT = do_POST

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("content-length", "0")))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _say(self, code: int, body: bytes, headers: Sequence[tuple[str, str]] = (), kind: str = "text/plain") -> None:
        self.send_response(code)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), *headers):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _serve(self, name: str) -> None:
        file = self.repositories.parent / "served" / name
        if file.is_file():
            self._say(200, file.read_bytes(), kind="application/octet-stream")
        else:
            self._say(404, b"")

    def _git(self, path: str, query: str, body: bytes) -> None:
        env = {
            **{"PATH": os.environ["PATH"], "GIT_PROJECT_ROOT": str(self.repositories), "GIT_HTTP_EXPORT_ALL": "1"},
            **{"PATH_INFO": path.removeprefix("/git"), "QUERY_STRING": query, "REQUEST_METHOD": self.command, "REMOTE_ADDR": "-"},
            **{"CONTENT_TYPE": self.headers.get("content-type", ""), "GIT_PROTOCOL": self.headers.get("git-protocol", "")},
            **{"HTTP_CONTENT_ENCODING": self.headers.get("content-encoding", ""), "CONTENT_LENGTH": str(len(body))},
        }
        said = subprocess.run(["git", "http-backend"], input=body, env=env, capture_output=True, check=False).stdout
        head, _, rest = said.partition(b"\r\n\r\n")
        headers = [tuple(line.split(": ", 1)) for line in head.decode().split("\r\n")]
        status = next((int(value.split()[0]) for name, value in headers if name == "Status"), 200)
        kind = next((value for name, value in headers if name == "Content-Type"), "text/plain")
        self._say(status, rest, kind=kind)

    def _greet(self) -> None:
        """Accept a WebSocket, and send each text message back, until the end."""
        key = self.headers["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
        for name, value in (("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Accept", accept)):
            self.send_header(name, value)
        self.end_headers()
        self.close_connection = True
        while len(head := self.rfile.read(2)) == 2:
            length = head[1] & 127
            if length > 125:
                length = int.from_bytes(self.rfile.read(2 if length == 126 else 8), "big")
            mask, data = self.rfile.read(4), self.rfile.read(length)
            plain = bytes(byte ^ mask[place % 4] for place, byte in enumerate(data))
            if head[0] & 15 == 8:
                self.wfile.write(bytes((0x88, len(plain))) + plain)
                return
            self.wfile.write(
                bytes((head[0], 126)) + struct.pack("!H", len(plain)) + plain if len(plain) > 125 else bytes((head[0], len(plain))) + plain
            )


class _Echo(socketserver.BaseRequestHandler):
    """Sends back what it gets."""

    record: _Record

    def handle(self) -> None:
        while data := self.request.recv(65536):
            self.record.write(kind="bytes", at=f"{ADDRESSES['db.test']}:5432", data=base64.b64encode(data).decode())
            self.request.sendall(data)


class _Redis(socketserver.StreamRequestHandler):
    """Answers each command of the protocol of Redis with its last word: what `PING WORD` asks for."""

    record: _Record

    def handle(self) -> None:
        while line := self._line():
            words = [self.rfile.read(int(self._line()[1:]) + 2) for _ in range(int(line[1:]))]
            sizes = (b"$%d\r\n%b" % (len(word) - 2, word) for word in words)
            data = base64.b64encode(line + b"".join(sizes)).decode()
            self.record.write(kind="bytes", at=f"{ADDRESSES['db.test']}:6379", data=data)
            self.wfile.write(b"$%d\r\n%b" % (len(words[-1]) - 2, words[-1]))

    def _line(self) -> bytes:
        return self.rfile.readline()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 512

    def handle_error(self, request: object, client_address: object) -> None:
        pass


def wheel() -> bytes:
    """Return a real wheel, the same bytes each time."""
    files = {
        f"{PACKAGE}.py": "ANSWER = 42\n",
        f"{PACKAGE}-{VERSION}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\n",
        f"{PACKAGE}-{VERSION}.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    names = "".join(f"{name},,\n" for name in (*files, f"{PACKAGE}-{VERSION}.dist-info/RECORD"))
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, text in (*files.items(), (f"{PACKAGE}-{VERSION}.dist-info/RECORD", names)):
            archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), text)
    return made.getvalue()


def tarball() -> bytes:
    """Return a real package of npm, the same bytes each time."""
    files = {
        "package.json": json.dumps({"name": PACKAGE, "version": f"{VERSION}.0", "main": "index.js"}),
        "index.js": "module.exports = 42\n",
    }
    made = io.BytesIO()
    with gzip.GzipFile(fileobj=made, mode="w", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return made.getvalue()


def _npm_document(host: str) -> dict[str, Any]:
    """Return what a registry says of the package."""
    digest = base64.b64encode(hashlib.sha512(tarball()).digest()).decode()
    dist = {"tarball": f"https://{host}/npm/{PACKAGE}.tgz", "integrity": f"sha512-{digest}"}
    version = {"name": PACKAGE, "version": f"{VERSION}.0", "main": "index.js", "dist": dist}
    return {"name": PACKAGE, "dist-tags": {"latest": f"{VERSION}.0"}, "versions": {f"{VERSION}.0": version}}


def _certificates(place: Path) -> dict[str, ssl.SSLContext]:
    """Make a root and a certificate for each host. Return the contexts of the hosts; the root is in `root.pem`."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    now = datetime.now(UTC)

    def issue(names: Sequence[str], key: Any, issuer: Any, signer: Any, *, authority: bool) -> Any:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer or subject).public_key(key.public_key())
        builder = (
            builder.serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=9))
        )
        builder = builder.add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        if not authority:
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
        return builder.sign(signer, hashes.SHA256())

    root_key = ec.generate_private_key(ec.SECP256R1())
    root = issue(["root of the small internet"], root_key, None, root_key, authority=True)
    (place / "root.pem").write_bytes(root.public_bytes(serialization.Encoding.PEM))
    company_key = ec.generate_private_key(ec.SECP256R1())
    company = issue(["root of a company"], company_key, None, company_key, authority=True)
    (place / "company.pem").write_bytes(company.public_bytes(serialization.Encoding.PEM))
    contexts = {}
    for host in ADDRESSES:
        key = ec.generate_private_key(ec.SECP256R1())
        names = ["wrong.test"] if host == "false.test" else [host, f"*.{host}"]
        issuer, signer = (company, company_key) if host == "company.test" else (root, root_key)
        leaf = issue(names, key, issuer.subject, signer, authority=False)
        private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        file = place / f"{host}.pem"
        file.write_bytes(leaf.public_bytes(serialization.Encoding.PEM) + private)
        contexts[host] = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        contexts[host].load_cert_chain(file)
        file.unlink()
    return contexts


def _answer_names(sock: socket.socket, record: _Record) -> None:
    while True:
        data, sender = sock.recvfrom(4096)
        labels, place = [], 12
        while data[place]:
            labels.append(data[place + 1 : place + 1 + data[place]].decode("latin-1"))
            place += 1 + data[place]
        name, kind = ".".join(labels).lower(), struct.unpack_from("!H", data, place + 1)[0]
        record.write(kind="asked", name=name)
        known = next((host for host in ADDRESSES if name == host or name.endswith(f".{host}")), None)
        question = data[12 : place + 5]
        found = known is not None and kind == 1
        flags = 0x8180 | (0 if known else 3)
        answer = b""
        if found:
            assert known is not None
            answer = struct.pack("!HHHIH", 0xC00C, 1, 1, 60, 4) + socket.inet_aton(ADDRESSES[known])
        sock.sendto(data[:2] + struct.pack("!HHHHH", flags, 1, int(found), 0, 0) + question + answer, sender)


def _enter(place: Path) -> None:
    """Enter namespaces of our own, with every address of this internet on loopback, and its resolver and root in /etc."""
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.geteuid(), os.getegid()

    def check(code: int) -> None:
        if code:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    check(libc.unshare(_NEW_NAMESPACES | (0 if uid == 0 else _NEW_USER)))
    if uid:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    from agent_sandbox.engine.trust import key_store
    from agent_sandbox.kernel import doors, namespaces

    namespaces.raise_loopback()
    for address in (*ADDRESSES.values(), RESOLVER):
        doors.give_loopback(address)
    check(libc.mount(b"none", b"/", None, ctypes.c_ulong(_PRIVATE), None))
    bundle = Path("/etc/ssl/certs/ca-certificates.crt")
    (place / "roots.pem").write_bytes(bundle.read_bytes() + (place / "root.pem").read_bytes())
    (place / "roots.jks").write_bytes(b"".join(key_store((place / "root.pem").read_bytes(), b"")))
    (place / "resolv.conf").write_text(f"nameserver {RESOLVER}\n")
    for source, target in (("roots.pem", bundle.resolve()), ("resolv.conf", Path("/etc/resolv.conf").resolve())):
        check(libc.mount(os.fsencode(place / source), os.fsencode(target), None, ctypes.c_ulong(_BIND), None))


def main() -> int:
    """Run the command of the arguments on an internet of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("place", type=Path)
    parser.add_argument("cwd")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    place: Path = given.place
    contexts = _certificates(place)
    (place / "git").mkdir(exist_ok=True)
    _enter(place)
    record = _Record(place / "received.jsonl")
    resolver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    resolver.bind((RESOLVER, 53))
    threading.Thread(target=_answer_names, args=(resolver, record), daemon=True).start()
    for host, address in ADDRESSES.items():
        for port, tls in ((80, None), (443, contexts[host])):
            handler = type("Handler", (_Web,), {"record": record, "repositories": place / "git", "tls": tls})
            threading.Thread(target=_Server((address, port), handler).serve_forever, daemon=True).start()
    echo = type("Echo", (_Echo,), {"record": record})
    redis = type("Redis", (_Redis,), {"record": record})
    for port, kind in ((5432, echo), (6379, redis)):
        threading.Thread(target=_Server((ADDRESSES["db.test"], port), kind).serve_forever, daemon=True).start()
    return subprocess.run(given.command, cwd=given.cwd, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
