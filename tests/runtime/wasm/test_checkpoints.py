"""Sessions that are saved to disk and resumed: as they were, under the rules of now, and never from a file that was tampered with."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox import AsyncSandbox, CheckpointError, Sandbox, SandboxSession, SessionCheckpoint, import_checkpoint, list_checkpoints
from agent_sandbox.assembly import here
from agent_sandbox.checkpoints import store
from agent_sandbox.ledger.event import Noted
from agent_sandbox.runtime.wasm.recipe import find_package
from agent_sandbox.runtime.wasm.state_stream import StateWriter
from agent_sandbox.workspace.checkpoint_store import CheckpointFacts, CheckpointWriter
from tests import compiled
from tests.ledger.samples import read

Make = Callable[..., Sandbox]


@pytest.fixture(scope="module")
def sandboxes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """What makes sandboxes on the wasm runtime, with a state directory of their own."""
    made: list[Sandbox] = []
    cache, state = tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("state")
    compiled.offer(cache, state)

    def make(**settings: Any) -> Sandbox:
        made.append(Sandbox(**{"runtime": "wasm", "validate_code": False, **settings}))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.setenv("AGENT_SANDBOX_STATE", str(state))
        yield make
        for sandbox in made:
            sandbox.close()
        here().wasm().close()


def noted() -> list[tuple[str, Any]]:
    events = [entry.event for entry in read(here().ledger().path)]
    return [
        (event.what, dict(event.facts)["target"]) for event in events if isinstance(event, Noted) and event.what.startswith("checkpoint.")
    ]


ANALYSIS = """
import os
import pandas as pd
frame = pd.DataFrame({"city": ["A", "B", "A"], "sales": [1.5, 2.0, 4.0]})
totals = frame.groupby("city").sales.sum()
os.makedirs("/tmp/out/deep")
os.chdir("/tmp/out")
open("totals.csv", "w").write(totals.to_csv())
os.symlink("totals.csv", "latest")
os.link("totals.csv", "deep/same")
half = open("totals.csv")
first = half.readline()
log = open("/tmp/log", "a")
log.write("not flushed yet, ")
numbers = iter(range(10)); next(numbers)
def failing(): return 1 / 0
os.environ["SET_INSIDE"] = "yes"
"""
SAVING = """
import sys
from agent_sandbox import Sandbox
with Sandbox(runtime="wasm", validate_code=False).session(env_vars={"OLD": "1"}) as session:
    done = session.run(sys.argv[1])
    assert done.success, done.stderr
    print(session.checkpoint("after loading").digest)
    assert session.run("half.read()").value.count(",") == 2, "the session goes on"
"""


@pytest.fixture(scope="module")
def analysis(sandboxes: Make) -> SessionCheckpoint:
    """A session with pandas that was saved in another process, which has ended since."""
    ended = subprocess.run([sys.executable, "-c", SAVING, ANALYSIS], stdout=subprocess.PIPE, check=True, text=True)
    (saved,) = list_checkpoints()
    assert saved.digest == ended.stdout.strip() and saved.name == "after loading"
    return saved


def test_a_session_with_pandas_goes_on_in_another_process(sandboxes: Make, analysis: SessionCheckpoint, tmp_path: Path) -> None:
    sandbox = sandboxes()
    with sandbox.resume("after loading", env_vars={"NEW": "2"}, tools={"double": lambda x: 2 * x}) as session:
        found = session.run("[dict(totals), len(frame), first, half.read(), next(numbers), os.getcwd(), sorted(os.listdir())]")
        assert found.value == [
            {"A": 5.5, "B": 2.0},
            3,
            "city,sales\n",
            "A,5.5\nB,2.0\n",
            1,
            "/tmp/out",
            ["deep", "latest", "totals.csv"],
        ], found
        assert session.run("[os.environ.get(name) for name in ('OLD', 'NEW', 'SET_INSIDE')]").value == ["1", "2", "yes"]
        assert session.run("log.write('flushed'); log.close(); open('/tmp/log').read()").value == "not flushed yet, flushed"
        assert session.run("[open('latest').read() == open('deep/same').read(), os.path.samefile('totals.csv', 'deep/same')]").value == [
            True,
            True,
        ]
        assert session.run("double(21)").value == 42, "tools are those of now"
        assert "def failing(): return 1 / 0" in session.run("failing()").stderr, "and lines of earlier turns are known"
        assert session.run("frame['more'] = 1; open('totals.csv', 'w').write('changed')").success
        again = session.checkpoint("later")
    with sandbox.resume(analysis) as session:  # it can be resumed often: nothing of the first time is seen
        assert session.run("[list(frame.columns), half.read().count(',')]").value == [["city", "sales"], 2]
    with sandbox.resume(again.id) as session:
        assert session.run("[list(frame.columns), open('totals.csv').read()]").value == [["city", "sales", "more"], "changed"]
    again.export(tmp_path / "exported")
    again.delete()
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        sandbox.resume(again)
    assert import_checkpoint(tmp_path / "exported") == again
    with sandbox.resume("later") as session:
        assert session.run("open('totals.csv').read()").value == "changed"
    again.delete()
    assert [what for what, digest in noted() if digest == again.digest] == [
        f"checkpoint.{what}" for what in ("saved", "resumed", "exported", "deleted", "imported", "resumed", "deleted")
    ]
    assert ("checkpoint.saved", analysis.digest) in noted()


def rewritten(saved: SessionCheckpoint, change: Callable[[dict[str, Any]], dict[str, Any]], content: bytes | None = None) -> str:
    """Save a checkpoint like this one with other facts or another content, and return its digest, which is right."""
    with store().opened(saved.digest) as opened:
        kept = b"".join(iter(opened.content, b""))
        facts = CheckpointFacts(**change(dict(vars(opened.stored.facts))))

    def write(writer: CheckpointWriter) -> None:
        writer.begin(facts)
        writer.add(kept if content is None else content)

    return store().save(write).digest


def test_a_checkpoint_of_another_machine_program_or_kind_is_refused(sandboxes: Make, analysis: SessionCheckpoint) -> None:
    sandbox = sandboxes()
    for name, value, why in (
        ("machine", "s390x", "a machine of the kind 's390x'"),
        ("interpreter", "0" * 64, "another version"),
        ("image_digest", "0" * 64, "another version"),
        ("image", "nonesuch", "another version"),
        ("seed", 7, "the saved session was deterministic"),
    ):
        digest = rewritten(analysis, lambda facts, name=name, value=value: {**facts, name: value})  # type: ignore[misc]
        with pytest.raises(CheckpointError, match=why):
            sandbox.resume(digest)
        store().delete(digest)
    for settings, why in (({"runtime": "process"}, "on the runtime 'process'"), ({"deterministic": True}, "was not deterministic")):
        with pytest.raises(CheckpointError, match=why):
            sandboxes(**settings).resume(analysis)
    same = rewritten(analysis, lambda facts: {**facts, "name": "the control"})
    with sandbox.resume(same) as session:
        assert session.run("len(frame)").value == 3
    store().delete(same)


def stream(*entries: tuple[dict[str, Any], bytes], state: dict[str, Any] | None = None, pages: tuple[int, ...] = ()) -> bytes:
    pieces: list[bytes] = []
    writer = StateWriter(pieces.append)
    for entry, content in entries:
        writer.file({**entry, "path": entry["path"].encode().hex(), "time": 0, "mode": 0o4777}, len(content), [content])
    if state is not None:
        writer.state(state)
    for page in pages:
        writer.memory(page, [b"\xff" * 4096])
    writer.end()
    return b"".join(pieces)


NO_STATE = {"depth": 0, "open": [], "closed": [], "calls": {"listings": []}}


def entry(path: str, kind: str, to: str = "") -> dict[str, Any]:
    return {"path": path, "is": kind, "to": to.encode().hex()}


HOSTILE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "cut off"),
    "not compressed": (b"no zlib", "damaged"),
    "cut off": (stream(state=NO_STATE)[:-9], "cut off"),
    "more after its end": (stream(state=NO_STATE) + b"more", "follows its end"),
    "no state": (stream(), "damaged"),
    "a path out of the root": (stream((entry("/../proc/self/mem", "file"), b"x"), state=NO_STATE), "not below its root"),
    "a relative path": (stream((entry("tmp/x", "file"), b"x"), state=NO_STATE), "not below its root"),
    "a NUL": (stream((entry("/tmp/\0", "file"), b"x"), state=NO_STATE), "not below its root"),
    **{
        f"a link to {to}": (
            stream((entry("/tmp/out", "symlink", to), b""), (entry("/tmp/out/comm", "file"), b"taken"), state=NO_STATE),
            "'/tmp/out/comm', which cannot be written here",
        )
        # The process around the program may write to the last two: nothing but the check of links keeps a file from there.
        for to in ("../../proc/self", "/proc/self", "../../dev/shm", "/dev/shm")
    },
    "a hard link out of the root": (stream((entry("/tmp/x", "link", "/../compiled/module"), b""), state=NO_STATE), "not below its root"),
    "a file where nothing may be written": (stream((entry("/etc/passwd", "file"), b"x"), state=NO_STATE), "cannot be written here"),
    "an unknown kind": (stream((entry("/tmp/x", "socket"), b""), state=NO_STATE), "unknown kind"),
    "memory beyond its end": (stream(state=NO_STATE, pages=(1 << 30,)), "memory beyond its end"),
    "no session in its memory": (stream(state=NO_STATE), "does not answer"),
    "memory of noise": (stream(state=NO_STATE, pages=tuple(range(4096, 9000))), "cannot be resumed"),
    "a preopened directory": (stream(state={**NO_STATE, "open": [[4, 4, "", 3, 0, 0, 0]]}), "not in order"),
    "a descriptor without a file": (stream(state={**NO_STATE, "open": [[5, 4, b"tmp/none".hex(), 4, 0, 2, 0]]}), "cannot be opened again"),
    "a descriptor out of the root": (stream(state={**NO_STATE, "open": [[5, 4, b"../proc".hex(), 3, 0, 0, 0]]}), "cannot be opened again"),
    "a huge descriptor": (stream(state={**NO_STATE, "open": [[1 << 40, 4, b"tmp".hex(), 3, 0, 0, 0]]}), "cannot be resumed"),
    "numbers that are none": (stream(state={**NO_STATE, "open": [["x"] * 7]}), "damaged"),
}


def test_a_hostile_content_is_refused_in_the_guest_and_reaches_nothing(sandboxes: Make) -> None:
    """Each has a right digest, as a file from somebody else would have. The guest that reads it is as confined as any program."""
    sandbox = sandboxes()
    with sandbox.session() as session:
        session.run("x = 1")
        plain = session.checkpoint("plain")
    for name, (content, why) in HOSTILE.items():
        digest = rewritten(plain, lambda facts: facts, content)
        with pytest.raises(CheckpointError) as refused:
            sandbox.resume(digest)
        assert why in str(refused.value), (name, refused.value)
        store().delete(digest)
    with sandbox.resume(plain) as session:
        assert session.run("x").value == 1


def test_a_resumed_session_brings_no_rights(sandboxes: Make, tmp_path: Path) -> None:
    """Saved where files may be written and a tool be called. Resumed where neither may be, it has lost both."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "old").write_text("old")
    (project / "gone").write_text("gone")
    (project / "tool").write_text("tool")
    (project / "tool").chmod(0o755)
    may = {"allow_file_read": True, "allow_file_write": True, "allowed_paths": [project]}
    called: list[str] = []
    with sandboxes(**may, tools={"ring": called.append}).session() as session:
        session.run(f"import os; os.chdir({str(project)!r}); open('new', 'w').write('n'); open('old', 'a').write('er')")
        assert session.run("os.remove('gone'); os.rename('tool', 'moved')").success
        assert session.run("ring('bell')").success and called == ["bell"]
        saved = session.checkpoint("with rights")
    assert sorted(each.name for each in project.iterdir()) == ["gone", "old", "tool"], "the real tree is as it was"
    look = "[sorted(os.listdir()), open('old').read(), open('new').read()]"
    with sandboxes(**may).resume(saved) as session:
        assert session.run(look).value == [["moved", "new", "old"], "older", "n"]
        assert "PermissionError" in session.run("ring('bell')").stderr and called == ["bell"]
    assert {(Path(each.path).name, each.kind.value) for each in session.changes} >= {
        ("new", "added"),
        ("old", "modified"),
        ("gone", "deleted"),
    }
    for settings in ({}, {"allow_file_read": True, "allowed_paths": [project]}):
        with pytest.raises(CheckpointError, match="cannot be written here"):
            sandboxes(**settings).resume(saved)


def test_a_deterministic_session_goes_on_as_if_nothing_had_happened(sandboxes: Make) -> None:
    sandbox = sandboxes(deterministic=True, seed=11)
    draw = (
        "import os, time, random, secrets; [time.time(), time.monotonic(), random.random(), secrets.token_hex(4), os.stat('/tmp/f').st_ino]"
    )
    with sandbox.session() as session:
        session.run("handle = open('/tmp/f', 'w'); import os; os.link('/tmp/f', '/tmp/g')")
        before = session.run(draw).value
        saved = session.checkpoint()
        after, later = session.run(draw).value, session.run(draw).value
    other = sandboxes(deterministic=True, seed=12)
    with other.resume(saved) as session:
        assert session.run(draw).value == after != before
        again = session.checkpoint()
    with other.resume(again) as session:
        assert session.run(draw).value == later, "the seed is that of the session"
        assert session.run("[os.stat('/tmp/g').st_ino, handle.write('x')]").value == [before[4], 1]


OPENED = """
import os
os.mkdir("/tmp/many")
for number in range(90): open(f"/tmp/many/{number}", "w").write("x")
library = open([path for path in __import__("sys").path if path.endswith(".zip")][0], "rb"); library.seek(100)
directory = os.open("/tmp/many", os.O_RDONLY)
listing = os.scandir("/tmp/many"); seen = [next(listing).name for _ in range(20)]
both = open("/tmp/a", "w+"); both.write("hello"); both.flush()
reading = open("/tmp/a"); reading.read(2)
adding = open("/tmp/a", "a")
gaps = [open(f"/tmp/many/{number}") for number in range(30)]
for number in range(0, 30, 3): gaps[number].close()
os.rename("/tmp/a", "/tmp/renamed"); os.close(0)
"""
LOOKED_AT = """
[library.tell(), library.read(4), len(os.listdir("/tmp/many")), sorted([*seen, *(each.name for each in listing)], key=int),
 both.tell(), reading.read(), [each.closed or each.fileno() for each in gaps], adding.write("more"), adding.flush(),
 open("/tmp/renamed").read(), os.fstat(directory).st_mode]
"""


def test_open_files_and_directories_have_their_numbers_and_places(sandboxes: Make) -> None:
    with sandboxes().session() as session:
        assert session.run(OPENED).success
        saved = session.checkpoint()
        expected = session.run(LOOKED_AT).value
        assert expected[3] == [str(number) for number in range(90)] and expected[5:10] == ["llo", expected[6], 4, None, "hellomore"], (
            expected
        )
    with sandboxes().resume(saved) as session:
        assert session.run(LOOKED_AT).value == expected
        assert "Bad file descriptor" in session.run("os.read(0, 1)").stderr, "what was closed stays closed"
    saved.delete()


def test_the_same_holds_with_asyncio(sandboxes: Make) -> None:
    async def drawn() -> object:
        async with AsyncSandbox(runtime="wasm", validate_code=False) as sandbox:
            async with sandbox.session() as session:
                await session.run("x = 20")
                saved = await session.checkpoint()
            async with await sandbox.resume(saved, tools={"more": _more}) as session:
                value = (await session.run("more(x)")).value
            saved.delete()
            return value

    assert asyncio.run(drawn()) == 21


async def _more(number: int) -> int:
    return number + 1


def sections(module: bytes) -> Iterator[tuple[int, bytes]]:
    """The sections of a module of WebAssembly, with their numbers."""
    place = 8
    while place < len(module):
        kind, (size, place) = module[place], number_at(module, place + 1)
        yield kind, module[place : place + size]
        place += size


def number_at(data: bytes, place: int) -> tuple[int, int]:
    """A number of variable length, and the place after it."""
    value = shift = 0
    while True:
        byte, place = data[place], place + 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, place


def test_the_interpreter_has_no_state_but_its_memory_and_the_pointer_of_its_stack() -> None:
    """What a checkpoint rests on. Another interpreter that has more must be saved in another way."""
    by_kind = dict(sections(Path(find_package().module).read_bytes()))
    assert by_kind[6] == b"\x02" + b"\x7f\x01\x41\x80\x80\x80\x08\x0b" + b"\x7f\x00\x41\x00\x0b", "one mutable global, and a constant"
    count, place = number_at(by_kind[4], 0)
    least, place = number_at(by_kind[4], place + 2)
    assert count == 1 and by_kind[4][2] == 1 and number_at(by_kind[4], place)[0] == least, "one table, which cannot grow"
    assert number_at(by_kind[5], 0)[0] == 1 and 12 not in by_kind, "one memory, and no data that is used up later"


def test_a_session_that_cannot_be_saved_says_why_and_goes_on(sandboxes: Make) -> None:
    with sandboxes().session() as session:
        with pytest.raises(CheckpointError, match="nothing has run"):
            session.checkpoint()
        session.run("import os; x = 1; lost = open('/tmp/lost', 'w'); os.remove('/tmp/lost')")
        before = list_checkpoints()
        with pytest.raises(CheckpointError, match="descriptor 5 is open on a file that was removed: close it"):
            session.checkpoint()
        with pytest.raises(CheckpointError, match="printable"):
            session.checkpoint("a\nname")
        assert list_checkpoints() == before and session.run("lost.close(); x").value == 1
        session.checkpoint("closed").delete()
    with sandboxes(runtime="process").session() as session:
        session.run("x = 1")
        with pytest.raises(CheckpointError, match="on the runtime 'process' cannot be saved"):
            session.checkpoint()
        assert session.run("x").value == 1


FULL_DISK = """
import os, subprocess
from agent_sandbox import AsyncSandbox, CheckpointError, Sandbox, list_checkpoints
place = os.environ["AGENT_SANDBOX_STATE"] + "/checkpoints"
assert list_checkpoints() == ()  # and the state directory is there
os.makedirs(place)
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", place], check=True)
with Sandbox(runtime="wasm", validate_code=False).session() as session:
    session.run("import os; x = 1; file = open('/tmp/noise', 'wb')")
    session.run("for _ in range(256): file.write(os.urandom(4096))\\nfile.close()")
    try:
        session.checkpoint()
        raise SystemExit("it was saved on a full disk")
    except CheckpointError as error:
        assert "disk is full" in str(error), error
    assert os.listdir(place) == [] and session.run("os.remove('/tmp/noise'); x").value == 1
    session.checkpoint("small enough")
assert [each.name for each in list_checkpoints()] == ["small enough"]
"""


@pytest.mark.needs_root
def test_a_full_disk_ends_neither_the_session_nor_what_was_saved(sandboxes: Make, tmp_path: Path) -> None:
    compiled.offer(tmp_path, tmp_path / "state")
    env = {**os.environ, "AGENT_SANDBOX_STATE": str(tmp_path / "state"), "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run(["unshare", "--mount", sys.executable, "-c", FULL_DISK], env=env, check=True)


def program(generator: random.Random, count: int) -> list[str]:
    """Statements that assign, write, delete, and leave generators and files half used."""
    lines = ["import os, random; random.seed(1); files, names, steps = {}, {}, []"]
    for _ in range(count):
        name, value = f"f{generator.randrange(4)}", generator.randrange(1 << 40)
        lines.append(
            generator.choice(
                (
                    f"names[{name!r}] = [{value}, {{'nested': names.get({name!r})}}, 'x' * {value % 5000}]",
                    f"files.pop({name!r}, None); open('/tmp/{name}', 'w').write('{value}' * {value % 900})",
                    f"files[{name!r}] = open('/tmp/{name}', 'a+'); files[{name!r}].write('{value}')",
                    f"files[{name!r}].seek({value % 7}) if {name!r} in files else None",
                    f"names['read'] = files[{name!r}].read(3) if {name!r} in files else None",
                    f"{name!r} in files and files.pop({name!r}).close(); os.path.exists('/tmp/{name}') and os.remove('/tmp/{name}')",
                    f"os.makedirs('/tmp/d{value % 3}/{name}', exist_ok=True); open('/tmp/d{value % 3}/{name}/x', 'w').write('{value}')",
                    f"names['gen'] = (each * {value} for each in range(50)); next(names['gen'])",
                    "names['drawn'] = next(names['gen'], None) if 'gen' in names else random.random()",
                    f"steps.append(lambda: {value}); names['called'] = [each() for each in steps]",
                    f"names['big'] = bytearray(os.urandom(0) + b'{value}' * {value % 30000})",
                )
            )
        )
    return lines


STATE = """
[repr({name: each for name, each in names.items() if name != 'gen'}), repr(random.random()), [each() for each in steps],
 {name: each.tell() for name, each in files.items()}, [each.flush() for each in files.values()] and None,
 {path + '/' + name: open(path + '/' + name).read() for path, _, inner in os.walk('/tmp') for name in inner},
 next(names['gen'], None) if 'gen' in names else None]
"""


def ran(session: SandboxSession, lines: list[str]) -> list[Any]:
    for line in lines:
        done = session.run(line)
        assert done.success, (line, done.stderr)
    return [session.run(STATE).value]


@pytest.mark.parametrize("seed", [pytest.param(range(3), id="some"), pytest.param(range(100), id="many", marks=pytest.mark.torture)])
def test_a_resumed_random_program_ends_as_one_that_was_never_saved(sandboxes: Make, seed: range) -> None:
    sandbox = sandboxes()
    for each in seed:
        generator = random.Random(each)
        lines = program(generator, 24)
        place = generator.randrange(1, len(lines))
        with sandbox.session() as session:
            ran(session, lines[:place])
            saved = session.checkpoint(f"random {each}")
            expected = ran(session, lines[place:])
        with sandbox.resume(saved) as session:
            assert ran(session, lines[place:]) == expected, (each, place)
        saved.delete()
