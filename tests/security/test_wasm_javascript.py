"""Attacks by JavaScript from inside WebAssembly: on files, on the host through what it does for the program, and on the interpreter."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
import wasmtime

from agent_sandbox.runtime.base import ExitReason
from agent_sandbox.runtime.wasm.machine import configuration
from scripts.compile_wasm import CACHE
from tests.patience import stretched
from tests.security.conftest import Tell
from tests.security.harness import GENEROUS, Box, case, snapshot

MIB = 1 << 20


WAYS = """
const reached = [], up = "../".repeat(20)
const attempt = (name, deed) => { try { const got = deed(); if (got) reached.push([name, String(got)]) } catch {} }
for (const outside of OUTSIDE) {
    const ways = [outside, up + outside, os.getcwd()[0] + "/" + up + outside, outside + "/", "//" + outside, "link", "up/" + outside]
    for (const way of ways) {
        attempt("read " + way, () => std.loadFile(way))
        attempt("open " + way, () => { const fd = os.open(way, os.O_RDWR); return fd >= 0 && "descriptor " + fd })
        attempt("write " + way, () => { const file = std.open(way, "r+"); return file && (file.puts("PWNED"), file.close(), "written") })
        attempt("rename " + way, () => os.rename(way, "moved") === 0 && std.loadFile("moved"))
        attempt("import " + way, () => std.loadScript(way))
    }
}
const bytes = new ArrayBuffer(64)
for (let fd = 3; fd < 64; fd++) attempt("descriptor " + fd, () => os.read(fd, bytes, 0, 64) > 0 && fd)
console.log(JSON.stringify(reached))
"""


@case(155, prio="P0")
def test_no_way_of_naming_a_file_leads_out_of_the_view(number: int, inside: Box, tell: Tell) -> None:
    secret = inside.home / ".ssh" / "id_rsa"
    (inside.project / "link").symlink_to(secret)
    (inside.project / "up").symlink_to("../" * 20)
    before = snapshot(inside.home)
    outcome = inside.javascript(WAYS.replace("OUTSIDE", json.dumps([str(secret), "/proc/self/mem", "/dev/mem", "/compiled/module"])))
    assert outcome.exit.code == 0 and json.loads(outcome.stdout) == [], outcome
    assert snapshot(inside.home) == before
    control = inside.unmasked.javascript(WAYS.replace("OUTSIDE", json.dumps([str(secret)])))
    assert "CANARY" in control.stdout.decode()
    tell("JavaScript: nothing reached, nothing real changed", control="where it is in the view it is read")


ENDLESS = {
    "a loop": "while (true);",
    "timers": "setInterval(() => {}, 0)",
    "promises": "(async () => { while (true) await null })()",
    "waiting for input": "std.in.readAsString()",
    "an expression": "/^(a+)+$/.test('a'.repeat(60) + 'b')",
}


@case(156, prio="P0")
@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS.keys())
def test_a_run_that_does_not_end_is_ended_in_time(number: int, inside: Box, source: str, tell: Tell) -> None:
    held, writing = os.pipe()  # input that never comes, and never ends
    try:
        ended = inside.with_(limits=replace(GENEROUS, wall_seconds=0.5)).javascript(source, stdin=held).exit
        assert ended.reason is ExitReason.TIMED_OUT and ended.usage.wall_seconds < 0.5 + stretched(1.0), ended
        assert inside.javascript("1").exit.reason is ExitReason.EXITED
        tell(f"JavaScript: ended after {ended.usage.wall_seconds:.2f} s of 0.50", control="what ends by itself is left to")
    finally:
        os.close(held)
        os.close(writing)


@case(158)
def test_one_that_prints_for_ever_is_ended_for_it(number: int, inside: Box, tell: Tell) -> None:
    endless = inside.with_(limits=replace(GENEROUS, output_bytes=1000)).javascript("while (true) console.log('x'.repeat(100_000))")
    assert endless.exit.reason is ExitReason.OUTPUT_LIMIT and len(endless.stdout) == 1000, endless.exit
    assert inside.javascript("console.log('fine')").stdout == b"fine\n"
    tell("JavaScript: cut, and ended for its output", control="what prints less comes through")


GREEDY = {
    "descriptors": "const held = []; for (let file; (file = std.open('/tmp/x', 'w')); ) held.push(file); throw 1",
    "one enormous write": "std.out.puts('x'.repeat(1 << 28))",
    "memory": "const held = []; while (true) held.push(new Uint8Array(1 << 20).fill(1))",
    "text": "let text = 'x'; while (true) text += text + 'y'",
    "a deep path": "for (let n = 0; n < 5000; n++) { os.mkdir('d'); os.chdir('d') }",
}


@case(158, prio="P0")
@pytest.mark.parametrize("source", GREEDY.values(), ids=GREEDY.keys())
def test_asking_for_too_much_costs_only_that_run(number: int, inside: Box, source: str, tell: Tell) -> None:
    limits = replace(GENEROUS, wall_seconds=2.0, memory_bytes=256 * MIB, output_bytes=MIB, open_files=256)
    outcome = inside.with_(limits=limits).javascript(source, cwd="/tmp")
    assert outcome.exit.reason is not ExitReason.SIGNALLED and b"panicked" not in outcome.stderr, outcome
    assert inside.javascript("console.log('fine')").stdout == b"fine\n"
    tell(f"JavaScript: {outcome.exit.reason.value}", control="asked for less, the same runtime does its work")


@case(162, prio="P0")
def test_the_interpreter_has_nothing_from_the_host_but_a_known_list(number: int, tell: Tell) -> None:
    module = wasmtime.Module.deserialize_file(wasmtime.Engine(configuration()), str(next(CACHE.glob("*-javascript-*"))))
    names = {str(each.name) for each in module.imports}
    assert {each.module for each in module.imports} == {"wasi_snapshot_preview1"}
    assert not [name for name in names if name.startswith("sock_") or name in ("path_symlink", "path_link")], names
    assert "fd_write" in names, "the control arm: what it has is found"
    tell(f"JavaScript: {len(names)} functions, none that links or opens a socket", control="what it may have is in the list")


# Bytes that the engine takes for its own compiled code: it does not check them, so this is a program with the run of its memory.
FORGED = """
import * as bjson from "qjs:bjson"
const compiled = std.evalScript("let x = [1, 'a']; x.map(y => y + 1)", {compile_only: true})
const honest = new Uint8Array(bjson.write(compiled, bjson.WRITE_OBJ_BYTECODE))
let seed = SEED
const draw = most => { seed = (seed * 1103515245 + 12345) % 2147483648; return seed % most }
for (let n = 0; n < 200; n++) {
    const bytes = honest.slice()
    for (let m = 0; m < 4; m++) bytes[8 + draw(bytes.length - 8)] = draw(256)
    try { std.evalScript(bjson.read(bytes.buffer, 0, bytes.length, bjson.READ_OBJ_BYTECODE), {eval_function: true}) } catch {}
}
console.log("came through")
"""


@case(158, 162)
def test_forged_code_of_the_interpreter_breaks_only_itself(number: int, inside: Box, tell: Tell) -> None:
    before = snapshot(inside.home)
    for seed in range(4):
        outcome = inside.with_(limits=replace(GENEROUS, wall_seconds=2.0)).javascript(FORGED.replace("SEED", str(seed)))
        trapped = outcome.exit.signal == 6 and b"the interpreter was ended" in outcome.stderr
        assert trapped or outcome.exit.reason is not ExitReason.SIGNALLED, outcome
    assert inside.javascript("console.log('fine')").stdout == b"fine\n"
    assert snapshot(inside.home) == before
    tell("JavaScript: its own run ended, or an exception", control="honest code runs in the next one")
