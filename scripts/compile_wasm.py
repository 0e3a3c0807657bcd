"""Compile the WebAssembly interpreter once for this checkout, where the tests of every user find it. Part of `make setup`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from agent_sandbox.runtime.wasm.runtime import WasmRuntime

PLACE = Path(__file__).resolve().parents[1] / ".venv" / "wasm"
CACHE, RECORDS = PLACE / "cache", PLACE / "records"


def main() -> None:
    """Nothing to do takes no time."""
    runtime = WasmRuntime(str(CACHE), str(RECORDS))
    if runtime.ready_to_count:
        return
    print("setup: compiling the WebAssembly interpreter for the tests; a minute or two", file=sys.stderr)
    if subprocess.run(runtime.building(counting=True), check=False).returncode:
        print("setup: WARNING: it could not be compiled, so the tests of the wasm runtime will fail", file=sys.stderr)
        return
    for directory, _, names in os.walk(PLACE):  # for the unprivileged half: to be read by anybody, and written by nobody else
        os.chmod(directory, 0o755)
        for name in names:
            os.chmod(Path(directory, name), 0o644)


if __name__ == "__main__":
    main()
