"""Measure the search for secrets and personal data: what it finds, plain and under each encoding; how fast it is; what it holds in vain.

    python -m bench.dlp --data DIRECTORY [--peer PYTHON]

The data is made by others and no part of the project; without it, only speed and benign traffic are measured. `--peer` is an interpreter
that has detect-secrets, which is measured on the same text in the same run.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from agent_sandbox.egress.dlp.own_secrets import OwnSecrets
from agent_sandbox.egress.dlp.rules import default_rules
from agent_sandbox.egress.dlp.scanner import Finding, Scanner, Search
from bench.encodings import COMPRESSED, DECLARED, TEXTUAL
from bench.network import data_of
from bench.traffic import benign_requests

ROOT = Path(__file__).parents[1]
OWN = ("correct-Horse/7battery", "9f86d081884c7d65", "Tr0ub4dor&3-staple")
KINDS = {
    "CREDIT_CARD": ("card",),
    "IBAN_CODE": ("iban",),
    "EMAIL_ADDRESS": ("email",),
    "US_SSN": ("us-ssn", "us-ssn-in-context"),
    "IP_ADDRESS": ("ip-address",),
    "PHONE_NUMBER": ("phone", "phone-in-context"),
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
    parser.add_argument("--seed", type=int, default=7, help="what the ordinary requests are made from")
    parser.add_argument("--requests", type=int, default=3300, help="how many ordinary requests are made")
    options = parser.parse_args(arguments)
    search = Search.of(default_rules(), OwnSecrets.of((f"OWN_{number}", value) for number, value in enumerate(OWN)), b"k" * 32)
    for section in (_leaks(search, options.data), _personal(search, options.data), _own(search), _speed(search, options.peer)):
        for line in section:
            print(line, flush=True)
    for line in _benign(search, options.seed, options.requests):
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
                findings = [each for each in found_in(search, data_sent, coding) if each.rule in rules]
                found = _places(findings) if len(rules) > 1 else len(findings)
                right, wrong, missed = right + min(labelled, found), wrong + max(0, found - labelled), missed + max(0, labelled - found)
            yield f"  {kind:14} {encoding:24} {_scores(right, wrong, missed)}"


def _places(findings: list[Finding]) -> int:
    """Return how many places findings are about: two rules may find one number."""
    count = until = 0
    for start, end in sorted((each.start, each.end) for each in findings):
        count += start >= until
        until = max(until, end)
    return count


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
    """Yield the speeds on the same data in turns, so that whatever else the machine does weighs on both."""
    yield "speed (MB a second of processor time, best of three)"
    for kind in ("text", "zip", "random"):
        data = data_of(kind)
        yield f"  agent-sandbox, {kind:10} {len(data) / min(_seconds(search, data) for _ in range(3)) / 1e6:8.2f}"
    text = data_of("text")
    with tempfile.NamedTemporaryFile(suffix=".py") as file:
        file.write(text)
        file.flush()
        ratios, told = [], ""
        for _ in range(3):
            before = _seconds(search, text)
            try:
                told = subprocess.run([peer, "-c", _PEER, file.name], capture_output=True, text=True, check=True, timeout=600).stdout
            except (OSError, subprocess.SubprocessError):
                yield f"  detect-secrets           not measured: {peer} does not have it"
                return
            ratios.append(float(told.split()[0]) / min(before, _seconds(search, text)))
    yield f"  detect-secrets, text     {len(text) / float(told.split()[0]) / 1e6:8.2f}"
    yield f"  ratio, median of three   {sorted(ratios)[1]:8.0f} times"


def _seconds(search: Search, text: bytes) -> float:
    start = time.process_time()
    found_in(search, text)
    return time.process_time() - start


def _benign(search: Search, seed: int, count: int) -> Iterator[str]:
    yield f"holds in {count} ordinary requests, made from a seed and from installed files"
    held = 0
    for number, (kind, request) in enumerate(benign_requests(seed, count)):
        if rules := {each.rule for each in found_in(search, request) if each.action != "alert"}:
            held += 1
            yield f"  request {number}, {kind}: {', '.join(sorted(rules))}"
    yield f"  {held} held, {1000 * held / max(1, count):.2f} in 1,000"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
