"""Measure the search for secrets and personal data: what it finds, plain and under each encoding; how fast it is; what it holds in vain.

    python -m bench.dlp --data DIRECTORY [--peer PYTHON]

The data is made by others and no part of the project; without it, only speed and benign traffic are measured. `--peer` is an interpreter
that has detect-secrets, which is measured on the same text in the same run.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import random
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from agent_sandbox.egress.dlp.own_secrets import OwnSecrets
from agent_sandbox.egress.dlp.rules import default_rules
from agent_sandbox.egress.dlp.scanner import Finding, Scanner, Search
from bench.encodings import COMPRESSED, DECLARED, TEXTUAL

ROOT = Path(__file__).parents[1]
OWN = ("correct-Horse/7battery", "9f86d081884c7d65", "Tr0ub4dor&3-staple")
KINDS = {
    "CREDIT_CARD": ("card",),
    "IBAN_CODE": ("iban",),
    "EMAIL_ADDRESS": ("email",),
    "US_SSN": ("us-ssn", "us-ssn-in-context"),
    "IP_ADDRESS": ("ip-address",),
    "PHONE_NUMBER": ("phone",),
}
ENCODINGS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    **{name: ("", encode) for name, encode in (TEXTUAL | COMPRESSED).items()},
    **DECLARED,
}
_PEER = """
import sys, time
from detect_secrets.core.scan import scan_file
from detect_secrets.settings import default_settings
with default_settings():
    start = time.process_time()
    found = len(list(scan_file(sys.argv[1])))
    print(time.process_time() - start, found)
"""


def main(arguments: list[str]) -> int:
    """The program. Its exit status says whether it could measure, never whether a target was reached."""
    parser = argparse.ArgumentParser(prog="bench.dlp", description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="where the labelled data is")
    parser.add_argument("--peer", default=str(ROOT / ".bench/venv/bin/python"), help="an interpreter with detect-secrets")
    parser.add_argument("--requests", type=int, default=1000, help="how many benign requests are made")
    options = parser.parse_args(arguments)
    search = Search.of(default_rules(), OwnSecrets.of((f"OWN_{number}", value) for number, value in enumerate(OWN)), b"k" * 32)
    for section in (_leaks(search, options.data), _personal(search, options.data), _own(search), _speed(search, options.peer)):
        for line in section:
            print(line, flush=True)
    for line in _benign(search, options.requests):
        print(line, flush=True)
    return 0


def found_in(search: Search, data: bytes, coding: str = "") -> list[Finding]:
    """Return what the search finds in one stream."""
    scanner = Scanner(search, coding)
    return scanner.feed(data) + scanner.finish()


def _leaks(search: Search, data: Path) -> Iterator[str]:
    archive, truth = data / "leaky_repo.tar.gz", data / "leaky_repo_truth.csv"
    yield "leaky-repo: lines with a risk"
    if not archive.is_file() or not truth.is_file():
        yield f"  not measured: there is no data in {data}"
        return
    risks = {row[0]: (int(row[1]), int(row[2])) for row in csv.reader(truth.read_text().splitlines()) if len(row) > 2 and row[1].isdigit()}
    with tarfile.open(archive) as files:
        contents = {member.name: _content(files, member) for member in files if member.isfile()}
    named = {name: next((content for path, content in contents.items() if path.endswith("/" + name)), b"") for name in risks}
    for encoding, (coding, encode) in {"plain": ENCODINGS["plain"], **ENCODINGS}.items():
        right = excess = 0
        for name, (risk, informative) in risks.items():
            count = _lines_found(search, named[name]) if encoding == "plain" else _encoded_lines(search, named[name], coding, encode)
            right += min(count, risk)
            excess += max(0, count - risk - informative)
        total = sum(risk for risk, _ in risks.values())
        yield f"  {encoding:24} recall {right / total:.3f} ({right} of {total}), {excess} too many"


def _content(files: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = files.extractfile(member)
    return file.read() if file is not None else b""


def _lines_found(search: Search, content: bytes) -> int:
    """Return on how many lines something is found, in the file as a whole or in the line alone; alerts do not count."""
    lines = {content.count(b"\n", 0, each.start) for each in found_in(search, content) if each.action != "alert"}
    alone = {number for number, line in enumerate(content.split(b"\n")) if _is_held(search, line)}
    return len(lines | alone)


def _encoded_lines(search: Search, content: bytes, coding: str, encode: Callable[[bytes], bytes]) -> int:
    return sum(_is_held(search, encode(line), coding) for line in content.split(b"\n") if line)


def _is_held(search: Search, data: bytes, coding: str = "") -> bool:
    return any(_counts(each) for each in found_in(search, data, coding))


def _counts(finding: Finding) -> bool:
    """Return whether a finding holds a request. A single line of a key is a text of its own only here."""
    return finding.action != "alert" and finding.rule != "lone-key"


def _personal(search: Search, data: Path) -> Iterator[str]:
    file = data / "presidio_synth_v2.json"
    yield "presidio: spans of structured kinds"
    if not file.is_file():
        yield f"  not measured: there is no data in {data}"
        return
    samples = json.loads(file.read_text("utf-8"))
    for kind, rules in KINDS.items():
        for encoding, (coding, encode) in ENCODINGS.items() if kind == "CREDIT_CARD" else [("plain", ENCODINGS["plain"])]:
            right = wrong = missed = 0
            for sample in samples:
                labelled = sum(span["entity_type"] == kind for span in sample["spans"])
                data_sent = encode(sample["full_text"].encode("utf-8"))
                found = sum(each.rule in rules for each in found_in(search, data_sent, coding))
                right, wrong, missed = right + min(labelled, found), wrong + max(0, found - labelled), missed + max(0, labelled - found)
            yield f"  {kind:14} {encoding:24} {_scores(right, wrong, missed)}"


def _scores(right: int, wrong: int, missed: int) -> str:
    precision, recall = right / max(1, right + wrong), right / max(1, right + missed)
    return f"precision {precision:.3f}  recall {recall:.3f}  F1 {2 * right / max(1, 2 * right + wrong + missed):.3f}"


def _own(search: Search) -> Iterator[str]:
    yield "own secrets, alone and in the middle of a text"
    for encoding, (coding, encode) in ENCODINGS.items():
        texts = [template % value.encode() for value in OWN for template in (b"%s", b"a letter with %s in it, and more.", b'{"a": "%s"}')]
        right = sum(any(each.rule.startswith("own-secret:") for each in found_in(search, encode(text), coding)) for text in texts)
        yield f"  {encoding:24} recall {right / len(texts):.2f} ({right} of {len(texts)})"


def _speed(search: Search, peer: str) -> Iterator[str]:
    yield "speed on source code (CPU seconds, best of three)"
    text = b"".join(path.read_bytes() for folder in ("src", "tests", "bench") for path in sorted((ROOT / folder).rglob("*.py")))
    seconds = min(_seconds(search, text) for _ in range(3))
    ours = len(text) / seconds / 1e6
    yield f"  agent-sandbox            {ours:8.2f} MB/s"
    with tempfile.NamedTemporaryFile(suffix=".py") as file:
        file.write(text[:1_000_000])
        file.flush()
        try:
            told = subprocess.run([peer, "-c", _PEER, file.name], capture_output=True, text=True, check=True, timeout=600).stdout
        except (OSError, subprocess.SubprocessError):
            yield f"  detect-secrets           not measured: {peer} does not have it"
            return
    theirs = min(1_000_000, len(text)) / float(told.split()[0]) / 1e6
    again = len(text) / min(_seconds(search, text) for _ in range(3)) / 1e6  # before and after: the machine may be busy
    yield f"  detect-secrets           {theirs:8.2f} MB/s"
    yield f"  ratio                    {(ours + again) / 2 / theirs:8.0f} times"


def _seconds(search: Search, text: bytes) -> float:
    start = time.process_time()
    found_in(search, text)
    return time.process_time() - start


def _benign(search: Search, count: int) -> Iterator[str]:
    yield f"holds in {count} benign requests"
    held: dict[str, int] = {}
    for number, request in enumerate(_requests(random.Random(7), count)):
        if rules := {each.rule for each in found_in(search, request) if each.action != "alert"}:
            held[", ".join(sorted(rules))] = held.get(", ".join(sorted(rules)), 0) + 1
            yield f"  request {number}: {', '.join(sorted(rules))}"
    yield f"  {sum(held.values())} held"


def _requests(chance: random.Random, count: int) -> Iterator[bytes]:
    """Yield ordinary requests: to an index of packages, to an API with JSON, with source code, and with a pack of git."""
    sources = sorted((ROOT / "src").rglob("*.py"))
    makers = (_index_request, _api_request, lambda chance: _source_request(chance, sources), lambda chance: _git_request(chance, sources))
    for number in range(count):
        yield makers[number % len(makers)](chance)


def _index_request(chance: random.Random) -> bytes:
    name = chance.choice(("requests", "numpy", "left-pad", "serde", "@types/node", "typing-extensions", "ruff", "esbuild"))
    digest = chance.randbytes(32).hex()
    path = chance.choice(
        (f"/simple/{name}/", f"/{name}/-/{name}-1.{chance.randrange(99)}.0.tgz", f"/packages/{digest[:2]}/{digest[2:]}/x.whl")
    )
    agent = 'pip/24.0 {"ci":null,"cpu":"x86_64","implementation":{"name":"CPython","version":"3.11.2"},"openssl_version":"OpenSSL 3.0.17"}'
    tag = f'If-None-Match: "{chance.randbytes(16).hex()}"\r\n' if chance.random() < 0.5 else ""
    return f"GET {path} HTTP/1.1\r\nHost: index.example.com\r\nUser-Agent: {agent}\r\nAccept: */*\r\n{tag}\r\n".encode()


def _api_request(chance: random.Random) -> bytes:
    body = {
        "id": f"{chance.getrandbits(128):032x}",
        "model": "large-1",
        "created": 1_700_000_000 + chance.randrange(10**8),
        "messages": [{"role": "user", "content": "Sort these words: " + " ".join(chance.choices(("fir", "oak", "elm", "yew"), k=40))}],
        "usage": {"prompt_tokens": chance.randrange(9999), "max_tokens": 4096, "token_count": chance.randrange(10**6)},
        "next_page_token": None,
        "etag": chance.randbytes(20).hex(),
        "image": chance.randbytes(300).hex() if chance.random() < 0.2 else "",
        "scores": [round(chance.random(), 6) for _ in range(20)],
        "at": f"2026-0{chance.randrange(1, 10)}-1{chance.randrange(10)}T10:00:00Z",
    }
    data = json.dumps(body).encode()
    packed = gzip.compress(data) if chance.random() < 0.3 else data
    return b"POST /v1/items HTTP/1.1\r\nHost: api.example.com\r\nContent-Type: application/json\r\n\r\n" + packed


def _source_request(chance: random.Random, sources: list[Path]) -> bytes:
    path = chance.choice(sources)
    return json.dumps({"path": path.name, "content": path.read_text("utf-8")}).encode()


def _git_request(chance: random.Random, sources: list[Path]) -> bytes:
    chosen = chance.choices(sources, k=5)
    pack = b"PACK" + (2).to_bytes(4, "big") + len(chosen).to_bytes(4, "big")
    for path in chosen:
        content = path.read_bytes()
        size, sizes = len(content) >> 4, [0x30 | len(content) & 15]
        while size:
            sizes[-1] |= 0x80
            sizes.append(size & 127)
            size >>= 7
        pack += bytes(sizes) + zlib.compress(content)
    old, new = chance.randbytes(20).hex(), chance.randbytes(20).hex()
    return f"00a8{old} {new} refs/heads/main\0 report-status side-band-64k agent=git/2.39.5\n0000".encode() + pack


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
