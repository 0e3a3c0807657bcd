"""The network of a run: how fast what leaves is searched, how many requests pass the door, and what the permission adds to a start.

The search is measured in processor time, since it waits for nothing: whatever else the machine does weighs less on it.
"""

from __future__ import annotations

import io
import random
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from agent_sandbox import Sandbox
from bench.peers import PRINT, Call, Missing, expect

if TYPE_CHECKING:
    from bench.wire import Load

PROTOCOLS, CONNECTIONS = ("http", "https"), (1, 50, 500)
BYTES = 1_000_000  # of text that both search
_OWN = ("correct-Horse/7battery", "9f86d081884c7d65", "Tr0ub4dor&3-staple")


@dataclass(frozen=True)
class Search:
    """A search of the same bytes again and again. Measured, it gives megabytes a second of processor time."""

    size: int
    run: Callable[[], object]

    def __call__(self) -> None:
        """Search once."""
        self.run()

    def figures(self, *, times: int) -> list[float]:
        """Return megabytes a second, of each of so many times."""
        found = []
        for _ in range(times):
            start = time.process_time()
            self.run()
            found.append(self.size / (time.process_time() - start) / 1e6)
        return found


def searching(kind: str) -> Search:
    """Return our search of data of a kind, with all rules of the product and three secrets of a user."""
    try:
        from agent_sandbox.egress.dlp.own_secrets import OwnSecrets  # of the extra `network`
        from agent_sandbox.egress.dlp.rules import default_rules
        from agent_sandbox.egress.dlp.scanner import Scanner
        from agent_sandbox.egress.dlp.scanner import Search as Rules
    except ImportError as error:
        raise Missing(f"the extra `network` is not installed: {error}") from error
    data = data_of(kind)
    rules = Rules.of(default_rules(), OwnSecrets.of((f"OWN_{number}", value) for number, value in enumerate(_OWN)), b"k" * 32)

    def run() -> None:
        scanner = Scanner(rules)
        for place in range(0, len(data), 64 << 10):  # as it comes from a socket
            scanner.feed(data[place : place + (64 << 10)])
        scanner.finish()

    return Search(len(data), run)


def detecting(kind: str) -> Search:
    """Return detect-secrets' search of the same data, with its default rules."""
    try:
        from detect_secrets.core.scan import scan_file  # type: ignore[import-not-found]
        from detect_secrets.settings import default_settings  # type: ignore[import-not-found]
    except ImportError as error:
        raise Missing("detect-secrets is not installed") from error
    data = data_of(kind)
    file = Path(tempfile.mkdtemp(prefix="agent-sandbox-bench.")) / "text.py"
    file.write_bytes(data)

    def run() -> None:
        with default_settings():
            list(scan_file(str(file)))

    return Search(len(data), run)


@cache
def data_of(kind: str) -> bytes:
    """Return data that this installation has, or that a seed makes. The same for everybody who searches it."""
    if kind == "random":
        return random.Random(17).randbytes(BYTES)
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in modules)[:BYTES]
    if kind == "text":
        return text
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo("text.py"), text, zipfile.ZIP_DEFLATED)
    return file.getvalue()


def loading(way: str, protocol: str, connections: int) -> Load:
    """Return requests to a server on this machine, by one of the ways of `bench.wire`."""
    try:
        from bench.wire import load  # needs the extra `network`
    except ImportError as error:
        raise Missing(f"the extra `network` is not installed: {error}") from error
    return load(way, protocol, connections)


def starting(*hosts: str) -> Call:
    """Return a fresh isolated `print(1)` by the SDK, with the network permission for these hosts; without it, if there are none."""
    sandbox = Sandbox(network=hosts)

    def call() -> None:
        result = sandbox.execute(PRINT.code)
        expect(PRINT.prints, result.stdout, result.stderr or result.error or "")

    return call
