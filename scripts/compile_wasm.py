"""Compile the WebAssembly interpreter where the program keeps it, for the tests and for everything else. Part of `make setup`.

As root it is compiled for all users of the machine, so the tests of every user find it; otherwise for the user who runs this.
"""

from __future__ import annotations

import sys
from pathlib import Path

from agent_sandbox.assembly import here
from agent_sandbox.cli.commands.setup import compile_wasm
from agent_sandbox.runtime.wasm.runtime import WasmRuntime


def places() -> tuple[tuple[str, str], ...]:
    """The directories of compiled files and of their digests that the tests may use. Those of root's must be open to all users."""
    host = here().host
    return host.compiled[:1] if host.compiles_for_all else host.compiled


def _in_use() -> tuple[Path, Path]:
    """The first pair with something in it, or else the pair that new files go to."""
    directory, records = next((place for place in places() if any(Path(place[1]).glob("*.sha256"))), places()[0])
    return Path(directory), Path(records)


CACHE, RECORDS = _in_use()  # read once: tests have an environment of their own later


def main() -> None:
    """Nothing to do takes no time."""
    written, *others = places()
    if WasmRuntime(*written, others=tuple(others)).ready_to_count:
        return
    outcome, message = compile_wasm()
    if outcome != "ready":
        print(f"setup: WARNING: {message}; the tests of the wasm runtime will fail", file=sys.stderr)


if __name__ == "__main__":
    main()
