"""Ordinary requests, made from a seed and from the files of this installation: what an agent sends all day, and what must not be held."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import random
import struct
import subprocess
import sys
import sysconfig
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlencode

_TEXT = frozenset(
    (".py", ".pyi", ".js", ".ts", ".json", ".md", ".toml", ".cfg", ".css", ".html", ".rst", ".txt", ".h", ".map", ".cjs", ".mjs")
)
_OTHER = frozenset((".so", ".png", ".gif", ".ico", ".woff", ".woff2", ".ttf", ".wasm", ".gz", ".zip", ".whl", ".exe", ".pyc"))
_LEFT_OUT = frozenset(("test", "tests", "testing"))  # they hold keys and passwords on purpose
_LARGEST = 512 << 10
_NAMES = ("requests", "numpy", "left-pad", "serde", "@types/node", "typing-extensions", "ruff", "esbuild", "minipass", "passlib")


def installed_files() -> tuple[list[Path], list[Path]]:
    """Return the files of the interpreter's packages and of node's: those of text, and others. In a fixed order."""
    places = {Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))}
    found = sorted(path for place in places | _node_places() for path in place.rglob("*") if _is_ordinary(path, place))
    return [path for path in found if path.suffix in _TEXT], [path for path in found if path.suffix in _OTHER]


def _node_places() -> set[Path]:
    try:
        told = subprocess.run(["npm", "root", "--global"], capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return set()
    return {Path(told)} if told else set()


def _is_ordinary(path: Path, place: Path) -> bool:
    if path.suffix not in _TEXT | _OTHER or path.is_symlink() or _LEFT_OUT & set(path.relative_to(place).parts):
        return False
    return path.is_file() and 0 < path.stat().st_size <= _LARGEST


def benign_requests(seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """Yield requests with the names of their kinds. The same seed gives the same requests on the same installation."""
    chance = random.Random(seed)
    texts, others = installed_files()
    kinds = [(name, make) for name, make in _KINDS.items() if texts and others]
    for number in range(count):
        name, make = kinds[number % len(kinds)]
        yield name, make(chance, texts, others)


def _head(chance: random.Random, method: str, path: str, kind: str, *more: str) -> bytes:
    session = base64.urlsafe_b64encode(chance.randbytes(24)).decode()
    fields = (
        f"{method} {path} HTTP/1.1",
        "Host: api.example.com",
        "User-Agent: python-requests/2.32.3",
        "Accept: */*",
        f"Content-Type: {kind}",
        f"Cookie: sid={session}; _ga=GA1.2.{chance.randrange(10**9)}.{chance.randrange(10**10)}; theme=dark",
        f"X-Request-Id: {_uuid(chance)}",
        f"traceparent: 00-{chance.randbytes(16).hex()}-{chance.randbytes(8).hex()}-01",
        *more,
    )
    return "\r\n".join(fields).encode() + b"\r\n\r\n"


def _uuid(chance: random.Random) -> str:
    return str(uuid.UUID(int=chance.getrandbits(128), version=4))


def _install(chance: random.Random, *_: list[Path]) -> bytes:
    name, digest = chance.choice(_NAMES), chance.randbytes(32).hex()
    path = chance.choice(
        (
            f"/simple/{name}/",
            f"/{name}/-/{name}-1.{chance.randrange(99)}.0.tgz",
            f"/packages/{digest[:2]}/{digest[2:]}/x-1.0-py3-none-any.whl",
        )
    )
    agent = 'pip/24.0 {"ci":null,"cpu":"x86_64","implementation":{"name":"CPython","version":"3.11.2"},"openssl_version":"OpenSSL 3.0.17"}'
    tag = f'If-None-Match: "{chance.randbytes(16).hex()}"\r\n' if chance.random() < 0.5 else ""
    npm = f"npm-session: {chance.randbytes(8).hex()}\r\nnpm-command: install\r\n" if chance.random() < 0.5 else ""
    return f"GET {path} HTTP/1.1\r\nHost: index.example.com\r\nUser-Agent: {agent}\r\nAccept: */*\r\n{tag}{npm}\r\n".encode()


def _call(chance: random.Random, *_: list[Path]) -> bytes:
    body = {
        "id": _uuid(chance),
        "model": "large-1",
        "created": 1_700_000_000 + chance.randrange(10**8),
        "messages": [{"role": "user", "content": "Sort these words: " + " ".join(chance.choices(("fir", "oak", "elm", "yew"), k=40))}],
        "usage": {"prompt_tokens": chance.randrange(9999), "max_tokens": 4096, "token_count": chance.randrange(10**6)},
        "clientToken": _uuid(chance),
        "next_page_token": None if chance.random() < 0.5 else base64.b64encode(chance.randbytes(33)).decode(),
        "etag": chance.randbytes(20).hex(),
        "image": base64.b64encode(chance.randbytes(3000)).decode() if chance.random() < 0.2 else "",
        "scores": [round(chance.random(), 6) for _ in range(20)],
        "at": f"2026-0{chance.randrange(1, 10)}-1{chance.randrange(10)}T10:00:00Z",
    }
    data = json.dumps(body).encode()
    return _head(chance, "POST", "/v1/items", "application/json") + (gzip.compress(data) if chance.random() < 0.3 else data)


def _telemetry(chance: random.Random, *_: list[Path]) -> bytes:
    lines = [
        json.dumps(
            {
                "trace_id": chance.randbytes(16).hex(),
                "span_id": chance.randbytes(8).hex(),
                "device": _uuid(chance),
                "duration_ns": chance.randrange(10**12),
                "sha256": chance.randbytes(32).hex(),
                "session": base64.urlsafe_b64encode(chance.randbytes(18)).decode(),
                "value": chance.random() * 10 ** chance.randrange(16),
            }
        )
        for _ in range(chance.randrange(5, 200))
    ]
    return _head(chance, "POST", "/v1/traces", "application/x-ndjson") + "\n".join(lines).encode()


def _form(chance: random.Random, *_: list[Path]) -> bytes:
    fields = {
        "csrf_token": base64.urlsafe_b64encode(chance.randbytes(32)).decode(),
        "q": "how to sort a list",
        "page": chance.randrange(99),
    }
    return _head(chance, "POST", "/search", "application/x-www-form-urlencoded") + urlencode(fields).encode()


def _source(chance: random.Random, texts: list[Path], _: list[Path]) -> bytes:
    path = chance.choice(texts)
    content = path.read_bytes().decode("utf-8", "replace")
    return _head(chance, "PUT", f"/contents/{path.name}", "application/json") + json.dumps({"path": path.name, "content": content}).encode()


def _raw(chance: random.Random, texts: list[Path], _: list[Path]) -> bytes:
    return _head(chance, "PUT", "/raw", "text/plain") + chance.choice(texts).read_bytes()


def _push(chance: random.Random, texts: list[Path], _: list[Path]) -> bytes:
    chosen = chance.choices(texts, k=3)
    pack = b"PACK" + struct.pack("!II", 2, len(chosen))
    for path in chosen:
        content = path.read_bytes()
        size, sizes = len(content) >> 4, [0x30 | len(content) & 15]
        while size:
            sizes[-1] |= 0x80
            sizes.append(size & 127)
            size >>= 7
        pack += bytes(sizes) + zlib.compress(content)
    pack += hashlib.sha1(pack, usedforsecurity=False).digest()
    old, new = chance.randbytes(20).hex(), chance.randbytes(20).hex()
    update = f"00a8{old} {new} refs/heads/main\0 report-status side-band-64k agent=git/2.39.5\n0000".encode()
    return _head(chance, "POST", "/a.git/git-receive-pack", "application/x-git-receive-pack-request") + update + pack


def _multipart(chance: random.Random, name: str, content: bytes) -> bytes:
    border = f"----WebKitFormBoundary{chance.randbytes(8).hex()}"
    head = _head(chance, "POST", "/upload", f"multipart/form-data; boundary={border}")
    part = f'--{border}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\nContent-Type: application/octet-stream\r\n\r\n'
    return head + part.encode() + content + f"\r\n--{border}--\r\n".encode()


def _upload(chance: random.Random, _: list[Path], others: list[Path]) -> bytes:
    path = chance.choice(others)
    return _multipart(chance, path.name, path.read_bytes())


def _archive(chance: random.Random, texts: list[Path], others: list[Path]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for number, path in enumerate((*chance.choices(texts, k=2), chance.choice(others))):
            archive.writestr(zipfile.ZipInfo(f"{number}-{path.name}"), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return _multipart(chance, "a.zip", file.getvalue())


def _image(chance: random.Random, *_: list[Path]) -> bytes:
    side = chance.randrange(20, 200)
    rows = zlib.compress(b"".join(b"\0" + chance.randbytes(3 * side) for _ in range(side)))
    content = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", struct.pack("!IIBBBBB", side, side, 8, 2, 0, 0, 0)), (b"IDAT", rows), (b"IEND", b"")):
        content += struct.pack("!I", len(data)) + kind + data + struct.pack("!I", zlib.crc32(kind + data))
    return _multipart(chance, "picture.png", content)


def _lockfile(chance: random.Random, *_: list[Path]) -> bytes:
    packages = {
        f"node_modules/{name}": {
            "version": f"{chance.randrange(20)}.{chance.randrange(30)}.0",
            "resolved": f"https://index.example.com/{name}/-/{name}-1.0.0.tgz",
            "integrity": "sha512-" + base64.b64encode(chance.randbytes(64)).decode(),
            "dependencies": {"minipass": f"^{chance.randrange(9)}.0.{chance.randrange(9)}", "get-token": "~1.2.3"},
        }
        for name in _NAMES
    }
    hashes = "".join(f"{name}==1.{chance.randrange(99)} \\\n    --hash=sha256:{chance.randbytes(32).hex()}\n" for name in _NAMES)
    body = json.dumps({"lockfileVersion": 3, "packages": packages}) if chance.random() < 0.5 else hashes
    return _head(chance, "POST", "/-/npm/v1/security/advisories/bulk", "application/json") + body.encode()


_KINDS: dict[str, Callable[[random.Random, list[Path], list[Path]], bytes]] = {
    "package install": _install,
    "API call": _call,
    "telemetry": _telemetry,
    "form": _form,
    "source as JSON": _source,
    "source": _raw,
    "git push": _push,
    "file upload": _upload,
    "zip upload": _archive,
    "image upload": _image,
    "lockfile": _lockfile,
}

if __name__ == "__main__":
    texts, others = installed_files()
    print(f"{len(texts):,} files of text, {len(others):,} others", file=sys.stderr)
