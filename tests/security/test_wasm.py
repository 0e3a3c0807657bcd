"""Attacks from inside WebAssembly: on its host, through what its host does for it, and what is left to one that has broken out."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import wasmtime

from agent_sandbox.engine.work import Outcome
from agent_sandbox.runtime.base import ExitReason
from agent_sandbox.runtime.process.guest_handle import ProcessGuest
from agent_sandbox.runtime.wasm import recipe
from agent_sandbox.runtime.wasm.machine import WasmMachine, configuration
from scripts.compile_wasm import CACHE
from tests.leftovers import children
from tests.patience import given_time, stretched
from tests.security.conftest import Tell
from tests.security.harness import GENEROUS, Box, case, knows, outside, reading, snapshot

MIB = 1 << 20


WAYS = """
import json, os
reached = []
def attempt(name, deed):
    try:
        if (got := deed()) is not False:
            reached.append([name, str(got)])
    except OSError:
        pass
outside = OUTSIDE
project = os.getcwd()
up = "../" * 20
ways = [outside, up + outside, project + "/" + up + outside, outside + "/", "/usr/local/lib/" + up + outside, "//" + outside]
for number, way in enumerate(ways):
    attempt(way, lambda: open(way).read())
    attempt("link to " + way, lambda: (os.symlink(way, f"link{number}"), open(f"link{number}").read()))
    attempt("write " + way, lambda: open(way, "w").write("PWNED"))
    attempt("write through link", lambda: os.path.islink(f"link{number}") and open(f"link{number}", "w").write("PWNED"))
    attempt("hard link", lambda: (os.link(way, f"hard{number}"), open(f"hard{number}").read()))
    attempt("follow", lambda: (os.link(f"link{number}", f"second{number}"), open(f"second{number}").read()))
    attempt("rename", lambda: (os.rename(way, f"moved{number}"), open(f"moved{number}").read()))
    attempt("rename away", lambda: os.rename("greeting.txt", way))
attempt("through a directory", lambda: (os.symlink("/".join(outside.split("/")[:-1]), "directory"), os.listdir("directory")))
attempt("from the library", lambda: os.rename("/usr/local/lib/python315.zip", project + "/taken"))
attempt("into the library", lambda: os.rename(project + "/greeting.txt", "/usr/local/lib/given"))
print(json.dumps(reached))
"""


@case(155, prio="P0")
def test_no_way_of_naming_a_file_leads_out_of_the_view(number: int, inside: Box, tell: Tell) -> None:
    secret = inside.home / ".ssh" / "id_rsa"
    before = snapshot(inside.home)
    source = WAYS.replace("OUTSIDE", repr(str(secret)))
    found = inside.probe(source)
    assert not [entry for entry in found if "CANARY" in entry[1]], found
    assert not [entry for entry in inside.probe(WAYS.replace("OUTSIDE", "'/proc/self/mem'")) if "write" in entry[0]]
    assert snapshot(inside.home) == before
    assert "CANARY" in str(outside(source, cwd=inside.project))
    tell("not found, not permitted or its own file; nothing real changed", control="without a sandbox it is read, by most of the names")


ENDLESS = {
    "a loop": "while True: pass",
    "cheap calls of the host": "import time\nwhile True: time.time()",
    "short sleeps": "import time\nwhile True: time.sleep(0.0001)",
    "one long sleep": "import time; time.sleep(10 ** 8)",
    "waiting for input": "import sys; sys.stdin.read()",
}


@case(156, prio="P0")
@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS.keys())
def test_a_run_that_does_not_end_is_ended_in_time(number: int, inside: Box, source: str, tell: Tell) -> None:
    held, writing = os.pipe()  # input that never comes, and never ends
    try:
        ended = inside.with_(limits=replace(GENEROUS, wall_seconds=0.5)).python(source, stdin=held).exit
        assert ended.reason is ExitReason.TIMED_OUT and ended.usage.wall_seconds < 0.5 + stretched(1.0), ended
        assert inside.python("print(1)").exit.reason is ExitReason.EXITED
        tell(f"ended after {ended.usage.wall_seconds:.2f} s of 0.50", control="what ends by itself is left to")
    finally:
        os.close(held)
        os.close(writing)


GREEDY = {
    "descriptors": "held = []\nwhile True: held.append(open('/tmp/x', 'w'))",
    "one enormous write": "import os; os.write(1, bytes(1 << 28))",
    "randomness": "import os; os.urandom((1 << 32) - 1)",
    "directory entries": "import os\nfor n in range(30_000): os.close(os.open(f'/tmp/{n}', os.O_CREAT | os.O_WRONLY))\nos.listdir('/tmp')",
    "a deep path": "import os\nfor n in range(5_000): os.mkdir('d'); os.chdir('d')",
    "memory": "x = []\nwhile True: x.append(bytearray(1 << 20))",
}


@case(158, prio="P0")
@pytest.mark.slow
@pytest.mark.parametrize("source", GREEDY.values(), ids=GREEDY.keys())
def test_asking_the_host_for_too_much_costs_only_that_run(number: int, inside: Box, source: str, tell: Tell) -> None:
    limits = replace(GENEROUS, wall_seconds=4.0, memory_bytes=512 * MIB, output_bytes=MIB, open_files=256)
    outcome = inside.with_(limits=limits).python(source, cwd="/tmp")
    crashed = outcome.exit.reason is ExitReason.SIGNALLED
    assert not crashed and b"panicked" not in outcome.stderr, outcome
    assert inside.python("print('fine')").stdout == b"fine\n"
    words = (outcome.stderr.decode().strip().splitlines() or [outcome.exit.reason.value])[-1]
    tell(words, control="asked for less, the same runtime does its work")


@case(162, prio="P0")
def test_the_interpreter_has_nothing_from_the_host_but_a_known_list(number: int, tell: Tell) -> None:
    engine = wasmtime.Engine(configuration())
    module = wasmtime.Module.deserialize_file(engine, str(next(CACHE.glob("*-module"))))
    imported = {(each.module, each.name) for each in module.imports}
    assert {name for name, _ in imported} == {"wasi_snapshot_preview1", "host"}
    assert {name for module, name in imported if module == "host"} == {"call"}
    with pytest.raises(wasmtime.WasmtimeError, match="unknown import"):
        WasmMachine(engine, wasmtime.Module(engine, '(module (import "host" "system" (func)))'))
    tell(f"{len(imported)} functions, all of WASI but one", control="a module that asks for another is not loaded")


@case(162, 165)
def test_bridges_to_native_code_do_not_lead_anywhere(number: int, inside: Box, tell: Tell) -> None:
    for source in ("import ctypes; ctypes.CDLL(None)", "import _ctypes", "import cffi", "import js", "import host; print(host.call(b'x'))"):
        outcome = inside.python(source)
        assert outcome.exit.code == 1 and outcome.exit.reason is ExitReason.EXITED, (source, outcome)
    assert outside("import ctypes, json; print(json.dumps(ctypes.CDLL(None).getpid()))")
    tell("an exception for each", control="without a sandbox ctypes calls the C library")


@case(165)
def test_the_process_around_it_is_confined_like_any_other_guest(number: int, inside: Box, tell: Tell) -> None:
    """What somebody has who breaks out of the engine: looked at from outside, while it runs."""
    guests: list[ProcessGuest] = []
    arrived = threading.Event()
    held, writing = os.pipe()
    source = "print('ready'); input()"
    thread = threading.Thread(target=lambda: inside.python(source, stdin=held, on_start=guests.append, on_output=lambda *_: arrived.set()))
    thread.start()
    try:
        assert arrived.wait()
        (guest,) = children(guests[0].init)
        status = knows(guest)
        assert (status["NoNewPrivs"], status["Seccomp"], int(status["CapEff"], 16), int(status["CapBnd"], 16)) == ("1", "2", 0, 0)
        for kind in ("net", "mnt", "pid", "ipc", "uts", "user"):
            assert os.readlink(f"/proc/{guest}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")
        files = {os.readlink(f"/proc/{guest}/fd/{fd}") for fd in os.listdir(f"/proc/{guest}/fd")}
        assert not [name for name in files if name.startswith(str(CACHE))], "no descriptor of the real file of the compiled module"
        assert sorted(os.listdir(f"/proc/{guest}/root")) == ["compiled", "dev", "library", "proc", "view"]
        assert int(knows()["CapBnd"], 16), "the control arm"
        tell("no capability, filtered, in namespaces of its own", control="the process that started it has none of this")
    finally:
        os.close(writing)
        thread.join()
        os.close(held)


@case(1)
def test_secrets_are_not_there_by_their_names(number: int, inside: Box, tell: Tell) -> None:
    names = [str(path) for path in (inside.home / ".ssh" / "id_rsa", inside.home / ".aws" / "credentials", Path("/etc/shadow"))]
    source = reading(*names)
    assert not [text for text in inside.probe(source) if "CANARY" in text]
    seen = [text for text in inside.unmasked.probe(source) if "CANARY" in text]
    assert seen
    tell("not found", control=f"with nothing masked {len(seen)} are read")


LEFT = "import sys; found = hasattr(sys, 'left'); sys.left = open('/tmp/left', 'w'); print(found)\nwhile True: pass"


@case(159)
def test_no_instance_serves_again_after_a_call_was_broken_off(number: int, inside: Box, tell: Tell) -> None:
    """Each is a process of its own, and goes with its run: whether it was ended by its deadline, from outside, or by a trap."""
    numbers = []
    for ending in (lambda guest: guest.kill(), lambda guest: guest.interrupt(signal.SIGINT), lambda guest: None):
        guests: list[ProcessGuest] = []

        def attempt(limit: float, ending: Callable[[ProcessGuest], None] = ending, guests: list[ProcessGuest] = guests) -> Outcome:
            guests.clear()
            limits = replace(GENEROUS, wall_seconds=limit)
            return inside.with_(limits=limits).python(LEFT, on_start=guests.append, on_output=lambda *_: ending(guests[0]))

        ran = given_time(attempt, lambda made: made.stdout, seconds=2.0)
        assert ran.exit.code != 0 and ran.stdout == b"False\n", ran
        numbers.append(guests[0].init)
    assert len(set(numbers)) == 3
    code = "import sys; print(hasattr(sys, 'left')); sys.left = 1"
    assert inside.python("import os; os.abort()").exit.reason is ExitReason.SIGNALLED
    assert inside.python(code).stdout == b"False\n"
    tell("every run finds an interpreter that nobody has used", control=_used_again(code))


_AGAIN = """
import sys
from agent_sandbox.runtime.wasm.machine import WasmMachine
module, library, code = sys.argv[1:]
instance = WasmMachine.load(module).instance(((library, "/usr/local/lib"),))
for _ in range(2):
    instance.run(code)
"""


def _used_again(code: str) -> str:
    """The control: one instance that serves twice keeps what the first call left."""
    found = recipe.find_package()
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copyfile(found.library, f"{scratch}/{found.library_name}")
        words = [sys.executable, "-c", _AGAIN, str(next(CACHE.glob("*-module"))), scratch, code]
        said = subprocess.run(words, capture_output=True, check=False)
    assert said.stdout.split() == [b"False", b"True"], said
    return "an instance that serves twice has what the first call left"


@case(161)
def test_nobody_has_a_module_compiled_by_us(number: int, inside: Box, tell: Tell) -> None:
    ran = inside.python("import wasmtime")
    assert ran.exit.code == 1 and b"ModuleNotFoundError" in ran.stderr
    ran = inside.python("open('/tmp/module.wasm', 'wb').write(b'\\0asm\\1\\0\\0\\0'); import module")
    assert ran.exit.code == 1 and b"ModuleNotFoundError" in ran.stderr
    assert wasmtime.Module(wasmtime.Engine(), b"\0asm\1\0\0\0").exports == []
    tell("no way to; ours is compiled in a process of its own, by its digest", control="outside the engine compiles the same bytes")
