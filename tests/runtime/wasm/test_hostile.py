"""A module that is hostile from its first instruction, in the interpreter's place: what its host does with whatever it hands over."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import wasmtime

from agent_sandbox.kernel.mount_plan import ThrowAway
from agent_sandbox.policy.model import MIB, Limits, locked
from agent_sandbox.runtime.base import Completed, ExitReason, Launch, PythonCode
from agent_sandbox.runtime.process.guest_handle import ProcessGuest
from agent_sandbox.runtime.process.pump import Reply
from agent_sandbox.runtime.wasm.machine import PAGE
from agent_sandbox.runtime.wasm.runtime import WasmRuntime
from agent_sandbox.workspace.view.plan import MachineFacts, Needs, plan_view
from scripts.compile_wasm import CACHE
from tests.runtime.wasm import hostile
from tests.runtime.wasm.hostile import FREE, PAGES, Function, Program

LIBRARY, VIEW = 3, 4  # the directories that a guest's engine has opened for it, by number
FOLLOW, CREATE, READING = 1, 1, (1 << 1) | (1 << 14)
# Endless recursion takes 200 MiB of stack and of frames to tell of, and twice that where a rehearsal came first.
LIMITS = Limits(wall_seconds=600, memory_bytes=1024 * MIB, output_bytes=8 * MIB, open_files=256, disk_bytes=16 * MIB)


@pytest.fixture(scope="module")
def functions() -> list[Function]:
    return hostile.imported()


def run(runtime: WasmRuntime) -> Completed:
    plan = plan_view(locked().files, Needs(), ThrowAway(16 * MIB), host=MachineFacts.look(), scratch_bytes=16 * MIB)
    with runtime.launch(Launch(PythonCode(""), plan, "/tmp", {}, LIMITS, locked().requires, processes=False, writable=False)) as guest:
        return guest.wait()


def _hand_over_garbage(directory: Path, count: int, seed: int, deterministic: bool) -> None:
    (directory / "given").mkdir()
    (directory / "canary").write_text("untouched")
    words = [sys.executable, "-m", "tests.runtime.wasm.hostile", str(directory / "given"), str(count), str(seed), str(deterministic)]
    words.append(str(CACHE))
    ran = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False, cwd=Path(__file__).parents[3])
    assert ran.returncode == 0, f"seed {seed}: {ran.stderr.decode()[-2000:]}"
    found = json.loads(ran.stdout)
    assert set(found) == {each.name for each in hostile.imported()} and all(sum(counts) >= 12 for counts in found.values()), found
    assert sum(ended for _, ended in found.values()), "the control: there was something to end a program for"
    assert sorted(entry.name for entry in directory.iterdir()) == ["canary", "given"] and (directory / "canary").read_text() == "untouched"


@pytest.mark.parametrize("deterministic", [False, True], ids=["as ever", "deterministic"])
def test_garbage_for_every_function_of_the_host_is_answered_or_ends_the_program_and_never_its_host(
    tmp_path: Path, deterministic: bool
) -> None:
    _hand_over_garbage(tmp_path, 4, random.randrange(1 << 30), deterministic)


@pytest.mark.torture
@pytest.mark.parametrize("deterministic", [False, True], ids=["as ever", "deterministic"])
def test_very_much_garbage_for_every_function_of_the_host(tmp_path: Path, deterministic: bool) -> None:
    _hand_over_garbage(tmp_path, 300, random.randrange(1 << 30), deterministic)


def _attacks(program: Program) -> dict[int, str]:
    """Every way to name something outside that the engine's own interface has, by the number of its call."""
    made: dict[int, str] = {}

    def attack(words: str, name: str, *arguments: int) -> None:
        made[program.call(name, *arguments)] = words

    def open_(fd: int, path: str, flags: int = 0) -> None:
        attack(f"open {path} from {fd}", "path_open", fd, FOLLOW, *program.text(path), flags, READING, READING, 0, FREE)

    for fd in (LIBRARY, VIEW):
        for path in (
            "/proc/self/mem",
            "../compiled",
            "../proc/self/status",
            "../../proc/self/mem",
            "./../library",
            "//compiled",
            "..",
            "/",
        ):
            open_(fd, path)
        open_(fd, "../made", CREATE)
    for fd in (0, 1, 2, *range(VIEW + 1, 40), -1, 1 << 30):
        open_(fd, "tmp")
        attack(f"preopened {fd}", "fd_prestat_get", fd, FREE)
        if fd > 2:
            attack(f"write to {fd}", "fd_write", fd, 16, 1, FREE)
    for number, target in enumerate(("/proc/self/mem", "../../compiled", "../../proc/self/status", "/../compiled", "../../library")):
        program.call("path_symlink", *program.text(target), VIEW, *program.text(f"tmp/link{number}"))
        open_(VIEW, f"tmp/link{number}")
        attack(f"read through {target}", "path_filestat_get", VIEW, FOLLOW, *program.text(f"tmp/link{number}"), FREE)
        attack(f"link to {target}", "path_link", VIEW, FOLLOW, *program.text(f"tmp/link{number}"), VIEW, *program.text(f"tmp/hard{number}"))
    zipped = "python315.zip"
    attack("link across", "path_link", LIBRARY, 0, *program.text(zipped), VIEW, *program.text("tmp/taken"))
    attack("rename across", "path_rename", LIBRARY, *program.text(zipped), VIEW, *program.text("tmp/taken"))
    attack("rename into", "path_rename", VIEW, *program.text("tmp/mine"), LIBRARY, *program.text("given"))
    attack("write to the library", "path_open", LIBRARY, 0, *program.text(zipped), 8, 1 << 6, 0, 0, FREE)
    attack("make in the library", "path_create_directory", LIBRARY, *program.text("made"))
    attack("rename out", "path_rename", VIEW, *program.text("tmp/mine"), VIEW, *program.text("../mine"))
    attack("link in", "path_link", VIEW, 0, *program.text("../compiled"), VIEW, *program.text("tmp/compiled"))
    attack("remove above", "path_unlink_file", VIEW, *program.text("../compiled"))
    attack("make above", "path_create_directory", VIEW, *program.text("../made"))
    return made


def test_no_call_of_the_engines_own_interface_leads_out_of_the_view(tmp_path: Path, functions: list[Function]) -> None:
    program = Program(functions)
    mine = program.call("path_open", VIEW, 0, *program.text("tmp/mine"), CREATE, READING | 1 << 6, READING, 0, FREE)
    read = program.call("path_open", LIBRARY, 0, *program.text("python315.zip"), 0, READING, READING, 0, FREE)
    for fd in (VIEW + 1, VIEW + 2):
        program.call("fd_close", fd)
    attacks = _attacks(program)
    with hostile.runtime(tmp_path, hostile.module(functions, b""), program.memory()) as runtime:
        ran = run(runtime)
    assert ran.exit.code == 0, ran.exit
    results = program.results(ran.stdout)
    assert (results[mine], results[read]) == (0, 0), "the control: by the same calls it opens what is its own"
    assert not [words for number, words in attacks.items() if results[number] == 0]


TRAPS = {
    "unreachable": "unreachable",
    "a read past its memory": f"(drop (i32.load (i32.const {PAGES * PAGE - 1})))",
    "a write past its memory": "(i32.store (i32.const -4) (i32.const 1))",
    "a division by zero": "(drop (i32.div_u (i32.const 1) (i32.const 0)))",
    "calls without end": "(drop (call $turn (i32.const 0) (i32.const 0)))",
    "a call of nothing": "(call_indirect (type $t) (i32.const 5))",
}


def trap(directory: Path, body: str) -> Completed:
    text = f"""(module (type $t (func)) (memory (export "memory") {PAGES}) (table 8 funcref)
      (func (export "host_alloc") (param i32) (result i32) (i32.const 1024))
      (func $turn (export "turn") (param i32 i32) (result i32) {body} (i32.const 0)))"""
    with hostile.runtime(directory, bytes(wasmtime.wat2wasm(text))) as runtime:
        return run(runtime)


@pytest.mark.parametrize("body", TRAPS.values(), ids=TRAPS.keys())
def test_a_trap_ends_the_run_by_a_signal_and_says_why(tmp_path: Path, body: str) -> None:
    ran = trap(tmp_path, body)
    assert (ran.exit.code, ran.exit.reason) == (134, ExitReason.SIGNALLED) and b"wasm trap" in ran.stderr, ran


@pytest.mark.parametrize("body", TRAPS.values(), ids=TRAPS.keys())
@pytest.mark.parametrize("late", [(Reply, "refusal"), (ProcessGuest, "begin")], ids=["ready is read late", "the program comes late"])
def test_a_trap_in_the_rehearsal_of_a_guest_that_waits_is_told_by_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: tuple[type, str], body: str
) -> None:
    owner, name = late
    prompt = getattr(owner, name)

    def slowly(*given: object) -> object:
        time.sleep(0.3)  # injected: the guest rehearses meanwhile, and the module traps
        return prompt(*given)

    monkeypatch.setattr(owner, name, slowly)
    ran = trap(tmp_path, body)
    assert (ran.exit.code, ran.exit.reason) == (134, ExitReason.SIGNALLED) and b"wasm trap" in ran.stderr, ran


@pytest.mark.parametrize("address", ["-1", str(PAGES * PAGE - 1), "0x7fffffff"])
def test_a_module_that_lies_about_where_its_code_may_lie_ends_its_own_run(tmp_path: Path, address: str) -> None:
    text = f"""(module (memory (export "memory") {PAGES}) (func (export "turn") (param i32 i32) (result i32) (i32.const 3))
      (func (export "host_alloc") (param i32) (result i32) (i32.const {address})))"""
    with hostile.runtime(tmp_path, bytes(wasmtime.wat2wasm(text))) as runtime:
        ran = run(runtime)
    assert (ran.exit.code, ran.exit.reason) == (134, ExitReason.SIGNALLED) and b"was ended" in ran.stderr, ran
