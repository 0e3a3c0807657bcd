"""Code inside WebAssembly where nothing of the kernel's stands behind it: what one wall holds by itself, and what it does not promise."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox._fast.values import replace
from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.kernel.mount_plan import MountPlan, ThrowAway
from agent_sandbox.policy.model import MIB, Guarantee, Limits
from agent_sandbox.runtime.base import Argv, Completed, ExitReason, Launch, PythonCode
from agent_sandbox.runtime.wasm.one_wall import NOTE, OneWall, remove
from agent_sandbox.runtime.wasm.one_wall_program import written
from scripts.compile_wasm import CACHE, RECORDS

LIMITS = Limits(wall_seconds=600, memory_bytes=256 * MIB, output_bytes=MIB, disk_bytes=32 * MIB)
RUNTIME = OneWall(str(CACHE), str(RECORDS))


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert os.listdir(tmp_path) == []


def launch(source: str, limits: Limits = LIMITS, **more: object) -> Launch:
    plan = MountPlan(ThrowAway(MIB), ())
    made = Launch(
        PythonCode(source, ("one",)), plan, "/tmp", {"A": "b"}, limits, RUNTIME.traits.guarantees, processes=False, writable=False
    )
    return replace(made, **more)  # type: ignore[arg-type]  # whichever fields they are


def run(source: str, limits: Limits = LIMITS, **more: object) -> Completed:
    with RUNTIME.launch(launch(source, limits, **more)) as guest:
        assert guest.notes == (NOTE,), "which wall is missing is said each time"
        return guest.wait()


LOOK_AROUND = """
import os, sys
print(sys.argv[1:], dict(os.environ), os.getcwd(), os.listdir(), input(), sorted(os.listdir("/")))
def refused(deed):
    try:
        deed()
    except Exception:
        return True
    return False
library = "/usr/local/lib/" + sys.path[1].rpartition("/")[2]
print(all(refused(lambda: open(path)) for path in ("/etc/passwd", "/../report", "/../../told", "/tmp/../../told", "/proc/self/mem")))
os.symlink("../../../../../../../../etc/passwd", "/tmp/up")
print(refused(lambda: open("/tmp/up")), refused(lambda: os.symlink("/etc/passwd", "/tmp/absolute")))
print(os.path.exists(library), refused(lambda: open(library, "ab")))
print(refused(lambda: os.unlink(library)), refused(lambda: os.rename(library, "/tmp/z")))
print(refused(lambda: os.fork()), refused(lambda: __import__("socket").create_connection(("127.0.0.1", 1), timeout=2)))
"""


def test_it_reaches_what_it_was_lent_and_nothing_else() -> None:
    ran = run(LOOK_AROUND, stdin=b"given\n")
    assert ran.exit.code == 0 and ran.stderr == b"", ran
    first, *rest = ran.stdout.decode().splitlines()
    assert first == "['one'] {'A': 'b'} /tmp [] given ['run', 'tmp']"
    assert rest == ["True", "True True", "True True", "True True", "True True"]


def test_a_program_that_fails_says_why_and_where() -> None:
    ran = run("import sys\nprint('before')\nraise SystemExit(3) if len(sys.argv) == 5 else ValueError('no')")
    assert (ran.exit.code, ran.exit.reason, ran.stdout) == (1, ExitReason.EXITED, b"before\n")
    assert b'File "/run/sandbox/main.py", line 3' in ran.stderr and ran.stderr.endswith(b"ValueError: no\n")


ENDLESS = {
    "time": ("while True: pass", replace(LIMITS, wall_seconds=0.3), ExitReason.TIMED_OUT, ("wall",)),
    "processor": ("while True: pass", replace(LIMITS, cpu_seconds=0.3), ExitReason.CPU_LIMIT, ("cpu",)),
    "disk": ("f = open('x', 'wb')\nwhile True: f.write(bytes(1 << 20)); f.flush()", LIMITS, ExitReason.DISK_LIMIT, ("disk",)),
    "output": ("while True: print('x' * 4096)", replace(LIMITS, output_bytes=1000), ExitReason.OUTPUT_LIMIT, ("output",)),
}


@pytest.mark.parametrize(
    ("source", "limits", "reason", "hit"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.torture] if name in ("processor", "output") else [])
        for name, case in ENDLESS.items()
    ],
)
def test_what_has_no_end_is_ended_with_its_reason(source: str, limits: Limits, reason: ExitReason, hit: tuple[str, ...]) -> None:
    ended = run(source, limits).exit
    assert (ended.reason, ended.limits_hit) == (reason, hit), ended


def test_files_and_memory_beyond_the_limit_are_refused() -> None:
    files = "held = []\ntry:\n    for n in range(500): held.append(open(str(n), 'w'))\nexcept OSError: print(40 < len(held) <= 64 + 16)\n"
    ran = run(files + "x = []\nwhile True: x.append(bytearray(1 << 20))", replace(LIMITS, open_files=64))
    assert ran.stdout == b"True\n", ran
    assert ran.exit.code == 1 and b"MemoryError" in ran.stderr, ran


def test_it_can_be_ended_from_outside() -> None:
    with RUNTIME.launch(launch("print('here', flush=True)\nwhile True: pass")) as guest:
        guest.launch = replace(guest.launch, on_output=lambda *_: guest.kill())
        assert guest.wait().exit.reason is ExitReason.KILLED


def test_what_one_wall_cannot_give_is_refused() -> None:
    for guarantee in (Guarantee.MEMORY_HARD, Guarantee.SEPARATE_KERNEL):
        with pytest.raises(RuntimeUnavailable, match=guarantee.value):
            RUNTIME.launch(launch("", requires=frozenset({guarantee})))
    for more in ({"program": Argv(("true",))}, {"writable": True}, {"cwd": "/etc"}, {"preload": ("csv",)}, {"talk": object()}):
        with pytest.raises(RuntimeUnavailable):
            RUNTIME.launch(launch("", **more))


@pytest.mark.needs_root
def test_started_by_root_it_does_not_promise_to_be_another() -> None:
    assert Guarantee.NOT_HOST_ROOT not in RUNTIME.traits.guarantees


def test_what_was_not_compiled_here_is_not_loaded(tmp_path: Path) -> None:
    records = tmp_path / "records"
    records.mkdir()
    for record in RECORDS.iterdir():
        (records / record.name).write_text("0" * 64)
    try:
        with OneWall(str(CACHE), str(records)).launch(launch("print(1)")) as guest:
            ran = guest.wait()
        assert ran.exit.code != 0 and ran.stdout == b"" and b"not what was made here" in ran.stderr, ran
    finally:
        remove(str(records))


def test_a_tree_of_any_depth_is_counted_and_removed(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    here = os.getcwd()
    try:
        os.chdir(top)
        for _ in range(500):
            os.mkdir("d" * 10)
            os.chdir("d" * 10)
        Path("file").write_bytes(b"x" * 5000)
    finally:
        os.chdir(here)
    with pytest.raises(OSError, match="too long"):
        written(str(top), 1 << 40)
    assert written(str(top), 100_000) > 100_000
    remove(str(top))
    assert not top.exists()
