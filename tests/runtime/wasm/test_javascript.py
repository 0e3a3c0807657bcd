"""JavaScript inside WebAssembly: what a program finds, how it is told from a module, and how it ends."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from shutil import which

import pytest

from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.kernel.mount_plan import ThrowAway
from agent_sandbox.policy.model import MIB, Limits, locked
from agent_sandbox.runtime.base import Completed, ExitReason, JavaScriptCode, Launch, PythonCode
from agent_sandbox.runtime.process.runtime import ProcessRuntime
from agent_sandbox.runtime.router.route import lack_in
from agent_sandbox.runtime.wasm import recipe
from agent_sandbox.runtime.wasm.javascript.module_patch import EXPORTED, Unknown, adapted
from agent_sandbox.runtime.wasm.runtime import WasmRuntime
from agent_sandbox.workspace.view.plan import MachineFacts, Needs, plan_view
from tests import compiled
from tests.runtime.router.snippets import JAVASCRIPT, WASM

LIMITS = Limits(wall_seconds=600, memory_bytes=512 * MIB, output_bytes=MIB, processes=32, open_files=256, disk_bytes=64 * MIB)


@pytest.fixture(scope="module")
def runtime() -> Iterator[WasmRuntime]:
    made = compiled.runtime(warm=2)
    yield made
    made.close()


def launch(source: str, *words: str, stdin: bytes = b"", env: dict[str, str] | None = None) -> Launch:
    plan = plan_view(locked().files, Needs(), ThrowAway(64 * MIB), host=MachineFacts.look(), scratch_bytes=64 * MIB)
    program = JavaScriptCode(source, words)
    return Launch(program, plan, "/tmp", env or {}, LIMITS, locked().requires, stdin=stdin, processes=False, writable=False)


def run(runtime: WasmRuntime, source: str, *words: str, stdin: bytes = b"", env: dict[str, str] | None = None) -> Completed:
    with runtime.launch(launch(source, *words, stdin=stdin, env=env)) as guest:
        return guest.wait()


def printed(runtime: WasmRuntime, source: str, *words: str, stdin: bytes = b"", env: dict[str, str] | None = None) -> str:
    ran = run(runtime, source, *words, stdin=stdin, env=env)
    assert (ran.exit.code, ran.stderr) == (0, b""), ran
    return ran.stdout.decode()


def test_values_are_printed_as_node_prints_them(runtime: WasmRuntime) -> None:
    if which("node") is None:
        pytest.skip("node is not installed")
    samples = Path(__file__).with_name("printed.js")
    node = subprocess.run(["node", str(samples)], capture_output=True, check=True)
    assert printed(runtime, samples.read_text()).splitlines() == node.stdout.decode().splitlines()


def test_a_table_is_printed_with_its_rules(runtime: WasmRuntime) -> None:
    assert printed(runtime, "console.table([{a: 1, b: 'x'}, 2])").splitlines() == [
        "┌─────────┬───┬─────┬────────┐",
        "│ (index) │ a │ b   │ Values │",
        "├─────────┼───┼─────┼────────┤",
        "│ 0       │ 1 │ 'x' │        │",
        "│ 1       │   │     │ 2      │",
        "└─────────┴───┴─────┴────────┘",
    ]


def test_a_program_has_its_arguments_environment_input_and_file(runtime: WasmRuntime) -> None:
    source = """console.log(scriptArgs, std.getenviron(), os.getcwd()[0], std.in.readAsString())
console.log(std.loadFile(scriptArgs[0]).split("\\n").length)"""
    said = printed(runtime, source, "one", "", "two words", "é", stdin="línea\n".encode(), env={"A": "ü", "__proto__": "x"})
    assert said == ("[ '/run/sandbox/main.js', 'one', '', 'two words', 'é' ] { A: 'ü', ['__proto__']: 'x' } /tmp línea\n\n2\n"), said


def test_it_ends_with_the_code_it_asks_for(runtime: WasmRuntime) -> None:
    for code in (0, 1, 42, 255):
        assert run(runtime, f"console.log('said'); std.exit({code}); console.log('never')").exit.code == code


def test_modules_of_its_directory_are_imported(runtime: WasmRuntime) -> None:
    said = printed(
        runtime,
        """
import * as std from "qjs:std"
const write = (name, text) => std.writeFile(name, text)
write("lib.js", "export const x = 5; export { y } from './sub/inner.js'")
os.mkdir("sub")
write("sub/inner.js", "import data from '../data.json' with { type: 'json' }; export const y = data.list.length")
write("data.json", '{"list": [1, 2, 3]}')
const { x, y } = await import("./lib.js")
console.log(x, y, import.meta.url.endsWith("main.js"), this)
export {}
""",
    )
    assert said == "5 3 true undefined\n"
    assert "could not load" in run(runtime, "import { a } from './absent.js'").stderr.decode()


def test_a_script_is_sloppy_and_a_module_strict(runtime: WasmRuntime) -> None:
    assert printed(runtime, "x = 1; console.log(x, typeof this, 010)") == "1 object 8\n"
    strict = run(runtime, "x = 1; export {}")
    assert strict.exit.code == 1 and strict.stderr.startswith(b"ReferenceError: "), strict
    for source, line in (("let a = 1\nlet b = ;", b"main.js:2:"), ("import x from './y.js'\nlet b = ;", b"main.js:2:")):
        ran = run(runtime, source)
        assert ran.exit.code == 1 and ran.stderr.startswith(b"SyntaxError: ") and line in ran.stderr, ran


def test_what_is_awaited_for_ever_is_said(runtime: WasmRuntime) -> None:
    ran = run(runtime, "console.log(await 5); await new Promise(() => {})")
    assert (ran.exit.code, ran.stdout) == (13, b"5\n") and b"unsettled top-level await" in ran.stderr


def test_what_node_has_is_not_there_and_is_recognised_as_missing(runtime: WasmRuntime) -> None:
    for source in ("require('fs')", "process.exit(0)", "fetch('x')", "import fs from 'fs'", "(async () => { new Buffer('x') })()"):
        ran = run(runtime, source)
        assert lack_in(ran.exit.code, ran.stderr) is not None, ran


@pytest.mark.parametrize(("name", "source"), JAVASCRIPT[WASM], ids=[name for name, _ in JAVASCRIPT[WASM]])
def test_what_the_router_sends_there_runs_there(runtime: WasmRuntime, name: str, source: str) -> None:
    assert printed(runtime, source)


BREAKS = {
    "recursion": "function f() { f() }\nf()",
    "recursion of promises": "async function f() { await f() }\nf()",
    "a chain of getters": "const o = { get a() { return this.a } }\no.a",
    "text too deep to be read": "eval('['.repeat(1e6))",
    "an expression too deep": "new RegExp('('.repeat(1e6))",
    "printing what is too deep": "let x = {}; for (let n = 0; n < 1e6; n++) x = {x}\nconsole.dir(x, {depth: null}); throw 1",
}


@pytest.mark.parametrize("source", BREAKS.values(), ids=BREAKS.keys())
def test_what_is_too_deep_is_an_error_of_that_run(runtime: WasmRuntime, source: str) -> None:
    ran = run(runtime, source)
    assert (ran.exit.code, ran.exit.reason) == (1, ExitReason.EXITED) and ran.stderr, ran
    assert printed(runtime, "console.log('fine')") == "fine\n"


REPEATED = """
console.log(Date.now(), performance.now(), Math.random(), Math.random() < 1, os.readdir('/')[0], std.getenviron())
setTimeout(() => console.log('later', Date.now()), 60_000);
(async () => { await null; console.log(new Date().toString()) })()
"""


def test_a_deterministic_run_is_the_same_twice_and_another_with_another_seed(runtime: WasmRuntime) -> None:
    ran = []
    for seed in (1, 1, 2):
        with runtime.launch(replace(launch(REPEATED, env={"B": "1", "A": "2"}), deterministic=seed)) as guest:
            ran.append(guest.wait())
    assert ran[0].exit.code == 0 and b"later" in ran[0].stdout, ran[0]
    assert (ran[0].stdout, ran[0].exit.usage.fuel) == (ran[1].stdout, ran[1].exit.usage.fuel)
    assert ran[0].stdout != ran[2].stdout and ran[0].exit.usage.fuel


def test_fuel_ends_it(runtime: WasmRuntime) -> None:
    with runtime.launch(replace(launch("while (true);"), limits=replace(LIMITS, fuel=10_000_000))) as guest:
        assert guest.wait().exit.reason is ExitReason.FUEL_LIMIT


def test_an_interrupt_ends_it_while_it_computes(runtime: WasmRuntime) -> None:
    with runtime.launch(launch("while (true);")) as guest:
        guest.interrupt(signal.SIGINT)
        assert guest.wait().exit.signal == signal.SIGINT


def test_one_waiting_guest_serves_either_language(runtime: WasmRuntime) -> None:
    for program, said in ((JavaScriptCode("console.log('js')"), b"js\n"), (PythonCode("print('py')"), b"py\n")) * 3:
        with runtime.launch(replace(launch(""), program=program)) as guest:
            assert guest.wait().stdout == said


def test_the_process_runtime_has_no_interpreter_of_it() -> None:
    process = ProcessRuntime()
    with pytest.raises(RuntimeUnavailable, match="JavaScript"):
        process.launch(launch("1"))
    process.close()


def test_a_module_that_is_another_is_refused_before_it_is_compiled() -> None:
    module = Path(recipe.find_package().javascript).read_bytes()
    changed = adapted(module)
    assert all(name.encode() in changed for name in EXPORTED) and len(changed) > len(module)
    for strange in (b"", module[:1000], module.replace(b"JS_ExecutePendingJob", b"JS_ExecutePendingBoj"), changed):
        with pytest.raises(Unknown):
            adapted(strange)
