"""Run them all, write docs/conformance.md, and fail if a difference is ours."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from agent_sandbox.runtime.wasm.runtime import WasmRuntime
from scripts.compile_wasm import CACHE, RECORDS
from scripts.conformance import running, sources
from scripts.conformance.comparing import Compared, compared, differing
from scripts.conformance.report import Versions, document

DOCUMENT = running.CHECKOUT / "docs" / "conformance.md"


def main(modules: Sequence[str]) -> int:
    """The document is written only when every module has run."""
    try:
        package = sources.package()
    except sources.Missing as missing:
        print(f"conformance: NOT RUN: {missing}", file=sys.stderr)
        return 1
    native, newer = sources.running(), next(iter(sources.newer()), None)
    runtime = WasmRuntime(str(CACHE), str(RECORDS))
    done: list[Compared] = []
    try:
        inside, version = running.inside(runtime, package), running.version_of(runtime)
        for module in modules or sources.MODULES:
            outcomes = running.run(running.natively(native.path), package, module), running.run(inside, package, module)
            chosen = differing(*outcomes)
            elsewhere: running.Outcomes = running.run(running.under_its_makers_host(package), package, module, chosen) if chosen else {}
            later = running.run(running.natively(newer.path), package, module, chosen) if newer and chosen else None
            done.append(compared(module, *outcomes, elsewhere, later))
            print(_line(done[-1]), flush=True)
    finally:
        runtime.close()
    if not modules:
        DOCUMENT.write_text(document(Versions(native.version, version, newer and newer.version), done), encoding="utf-8")
    ours = [difference for each in done for difference in each.differences if difference.ours]
    for difference in ours:
        print(f"{difference.test}: {difference.inside.how} inside: {difference.inside.why}\n    {difference.reason}", file=sys.stderr)
    return 1 if ours else 0


def _line(each: Compared) -> str:
    return f"{each.module.removeprefix('test_'):<14}{each.passed:>6} passed natively{each.passed - len(each.differences):>6} inside"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
