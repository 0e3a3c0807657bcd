"""Crash and recovery: whatever is killed, whenever, nothing is left behind; and the next start makes good what a power cut leaves."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from agent_sandbox.kernel import cgroups
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.ledger.chain import verify
from agent_sandbox.ledger.event import Intent
from tests.e2e.program import PROGRAM, Shell, words
from tests.ledger.samples import read
from tests.leftovers import adopting, claim, left_since, remove, traces
from tests.patience import until
from tests.security.blows import Tally, rain
from tests.security.conftest import Tell
from tests.security.harness import ROOT, case, knows, snapshot
from tests.security.victims import Place, Supervisor, roles, start
from tests.workspace.layers.overlays import in_namespace

SEED = int(os.environ.get("AGENT_SANDBOX_SEED", "20240607"))
SAMPLE = 200 if ROOT else 100  # of the unprivileged half: the way things end is the same, so fewer will do
CHUNKS, CHUNK = 5, 2000
# Grows the ledger to a limit and is killed there. Its SIGXFSZ is the default one; Python starts with it ignored.
KILLED_WRITER = """
import resource, runpy, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
from agent_sandbox.cli.main import main
sys.exit(main(sys.argv[3:]))
"""
VICTIMS = {"supervisor", "zygote", "init", "guest", "terminal"}
STAGES = {("supervisor", "building"), ("supervisor", "with guests"), ("init", "building"), ("init", "with its guest")}


@pytest.fixture
def top() -> Iterator[Path]:
    """A short-lived directory of its own for the supervisors. Not below /tmp, which a sandbox does not see."""
    made = Path(tempfile.mkdtemp(prefix="crash-", dir="/var/tmp" if ROOT else None))
    claim(made)
    yield made
    remove(made)


@pytest.fixture
def _orphans_come_to_us() -> Iterator[None]:
    with adopting():
        yield


def _check(tally: Tally, seed: int) -> None:
    assert tally.left == [], f"seed {seed}, after {tally}; the last blows:\n" + "\n".join(tally.latest)
    assert _covered(tally), f"seed {seed}: some victims were hardly struck, or some stages never: {tally}"


def _covered(tally: Tally) -> bool:
    struck = tally.victims()
    return all(struck[victim] >= tally.kills / 200 for victim in VICTIMS) and tally.hits.keys() >= STAGES


@case(145)
@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.usefixtures("_orphans_come_to_us")
def test_hundreds_of_kills_at_any_moment_leave_nothing(number: int, top: Path, tell: Tell) -> None:
    print(f"seed {SEED}: to repeat, AGENT_SANDBOX_SEED={SEED}")
    tally = rain(SAMPLE, SEED, top, covered=_covered)
    _check(tally, SEED)
    tell(f"{tally.kills} kills of {dict(tally.victims())}, nothing left", control="each kind of leftover is seen when planted")


@case(145)
@pytest.mark.torture
@pytest.mark.timeout(3000)
@pytest.mark.usefixtures("_orphans_come_to_us")
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_ten_thousand_kills_leave_nothing(number: int, chunk: int, top: Path, tell: Tell) -> None:
    seed = SEED + 1 + chunk
    print(f"seed {seed}")
    tally = rain(CHUNK, seed, top, covered=_covered)
    print(tally, dict(tally.kinds))
    _check(tally, seed)
    tell(str(tally), control="each kind of leftover is seen when planted")


def _leave_a_process(top: Path, stack: ExitStack) -> None:
    """Two generations down and in a session of its own, as a daemon would be."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        grandchild = os.fork()
        if grandchild == 0:
            os.setsid()
            signal.pause()
        os.write(writing, str(grandchild).encode())
        os._exit(0)
    os.waitpid(child, 0)
    orphan = int(os.read(reading, 32))
    os.close(reading)
    os.close(writing)
    stack.callback(os.waitpid, orphan, 0)
    stack.callback(os.kill, orphan, signal.SIGKILL)


def _leave_a_file(top: Path, stack: ExitStack) -> None:
    (top / "tmpabc").touch()


def _leave_a_namespace(top: Path, stack: ExitStack) -> None:
    """Nobody is in it any more; a descriptor keeps it."""
    arguments = ["unshare", *([] if ROOT else ["--user"]), "--net", "sh", "-c", "echo; read x"]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        stack.callback(os.close, os.open(f"/proc/{process.pid}/ns/net", os.O_RDONLY))


def _leave_a_mount(top: Path, stack: ExitStack) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", top], check=True)
    stack.callback(sc.umount2, str(top), sc.MNT_DETACH)


def _leave_a_loop_device(top: Path, stack: ExitStack) -> None:
    image = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp")), "image")
    claim(image.parent)
    image.write_bytes(bytes(1 << 20))
    attached = subprocess.run(["losetup", "--find", "--show", image], capture_output=True, text=True, check=False)
    if attached.returncode:
        pytest.skip(f"no loop device can be attached here: {attached.stderr.strip()}")
    stack.callback(os.system, f"losetup --detach {attached.stdout.strip()}")


def _leave_a_cgroup(top: Path, stack: ExitStack) -> None:
    """Its keeper lives: one that has a dead keeper may be swept by any start on this machine, before we look."""
    keeper = stack.enter_context(subprocess.Popen(["sleep", "60"]))
    stack.callback(keeper.kill)
    for path in _make_cgroups(keeper.pid):
        stack.callback(os.rmdir, path)


def _make_cgroups(keeper: int) -> list[str]:
    """One in each tree."""
    name = cgroups.group_name(keeper, "planted")
    paths = [f"{hierarchy.places[0]}/{name}" for hierarchy in cgroups.here()]
    for path in paths:
        os.mkdir(path)
    return paths


CONTROLS: dict[str, tuple[Callable[[Path, ExitStack], None], str]] = {
    "process": (_leave_a_process, "process"),
    "file": (_leave_a_file, "file"),
    "namespace": (_leave_a_namespace, "namespace net"),
    "mount": (_leave_a_mount, "mount"),
    "cgroup": (_leave_a_cgroup, "control group"),
    "loop": (_leave_a_loop_device, "loop device"),
}


@pytest.mark.once
@case(145)
@pytest.mark.usefixtures("_orphans_come_to_us")
@pytest.mark.parametrize(
    "leftover", [pytest.param(name, marks=[pytest.mark.needs_root] * (name in ("mount", "cgroup", "loop"))) for name in CONTROLS]
)
def test_what_is_left_is_seen(number: int, leftover: str, top: Path, tell: Tell) -> None:
    """The control arm of every kill: one of each kind is left on purpose."""
    plant, seen = CONTROLS[leftover]
    before = traces(top, adopted=True)
    with ExitStack() as stack:
        plant(top, stack)
        found = left_since(before, top, adopted=True, seconds=0.2)
        assert any(words.startswith(seen) for words in found), found
    tell("seen", control=f"{found[0].split(':')[0]} was left on purpose")


def _moves(pid: int) -> bool:
    try:
        return knows(pid)["State"][0] not in "TZ"
    except FileNotFoundError:
        return False


def _power_cut(supervisor: Supervisor) -> None:
    """Everything of a family at once, zygotes too. Stopped first: nobody is to clear away what another one leaves."""
    try:
        supervisor.stop()
        while moving := [pid for pid in _relatives(supervisor) if not _stands_still(pid)]:
            for pid in moving:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)  # its parent is stopped or the supervisor: the number cannot have passed on
        for pid in _relatives(supervisor):
            with suppress(ProcessLookupError):  # it went with its init
                os.kill(pid, signal.SIGKILL)
    finally:
        supervisor.close()


def _relatives(supervisor: Supervisor) -> list[int]:
    return [pid for pids in roles(supervisor.pid).values() for pid in pids]


def _stands_still(pid: int) -> bool:
    """Whether a process executes nothing. A shell whose child was stopped before its exec waits in the kernel until that goes on."""
    try:
        status = knows(pid)
    except OSError:
        return True
    stopping = bool(int(status["ShdPnd"], 16) & 1 << (signal.SIGSTOP - 1))
    return status["State"][0] in "TZX" or (status["State"][0] == "D" and stopping)


@case(145)
@pytest.mark.usefixtures("_orphans_come_to_us")
@pytest.mark.parametrize("kind", ["kept", "run, kept", "pooled", "code"])
def test_the_next_start_sweeps_what_a_power_cut_left(number: int, kind: str, top: Path, tell: Tell) -> None:
    before = traces(adopted=True)
    place = Place.make(top / "place")
    shell, state, ledger = Shell(place.project, place.environment), top / "place/state", top / "place/state/ledger.jsonl"
    assert shell("run", "--", "sh", "-c", "echo precious > work-of-days").returncode == 0
    supervisor = start(kind, place)
    assert until(lambda: len(roles(supervisor.pid).get("guest", ())) > 0)
    _power_cut(supervisor)
    planted = [name for name in traces(adopted=True) if name not in before]
    with subprocess.Popen(["sleep", "60"]) as keeper:
        planted += _make_cgroups(keeper.pid) if ROOT else []
        keeper.kill()
    (state / "trash/old.0/deep").mkdir(parents=True)
    (state / "trash/old.0/deep/file").write_text("half removed")
    (state / "format.new").write_text("agent-sand")
    next((state / "sandboxes").iterdir()).joinpath("meta.json.new").write_text('{"form')
    with ledger.open("ab") as file:
        file.write(ledger.read_bytes()[:70])
    torn = verify(ledger)
    assert torn.unsealed == 70

    assert shell("run", "--", "cat", "work-of-days").stdout == b"precious\n"
    assert left_since(before, *place.temporary, adopted=True) == []
    assert os.listdir(state / "trash") == []
    healed = verify(ledger)
    assert (healed.torn, healed.unsealed) == (1, 0) and healed.count == torn.count + 3, "the seal, an intent and an outcome"
    assert words(shell("diff")).count("error") == 0 and b"work-of-days" in shell("diff").stdout
    tell("swept, sealed, and the changes are there", control=f"{len(planted)} cgroups, a half-removed sandbox and a torn line were there")


def _ledger_of(shell: Shell) -> Path:
    return Path(shell.environment["AGENT_SANDBOX_STATE"], "ledger.jsonl")


def _intents(ledger: Path) -> int:
    return sum(isinstance(entry.event, Intent) for entry in read(ledger)) if ledger.exists() else 0


@pytest.fixture
def shell(project: Path, tmp_path: Path) -> Shell:
    """Somebody standing in a project, with a state directory of their own."""
    return Shell(project, {"AGENT_SANDBOX_STATE": str(tmp_path / "state")})


@pytest.mark.once
@case(149)
@pytest.mark.parametrize("room", [0, 1, 100])
def test_a_writer_killed_in_the_middle_of_an_entry_has_not_acted(number: int, room: int, shell: Shell, tell: Tell) -> None:
    """The file may grow by so many bytes, and who writes on is killed: the kernel's own way to end a writer in mid-air."""
    assert shell("run", "--", "true").returncode == 0
    ledger = _ledger_of(shell)
    whole = ledger.read_bytes()
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_WRITER, str(len(whole) + room), *PROGRAM[-1:], "run", "--", "sh", "-c", "echo x > proof"],
        cwd=shell.cwd,
        env=shell.environment,
        check=False,
        capture_output=True,
    )
    assert killed.returncode == -signal.SIGXFSZ, killed
    assert ledger.read_bytes()[: len(whole)] == whole and ledger.stat().st_size == len(whole) + room
    assert shell("run", "--", "cat", "proof").returncode == 1, "it had not been done"
    healed = verify(ledger)
    assert (healed.count, healed.torn) == (2 + (room > 0) + 2, int(room > 0)), "nothing lost, nothing twice"
    assert shell("run", "--", "sh", "-c", "echo x > proof").returncode == 0 and shell("run", "--", "cat", "proof").stdout == b"x\n"
    tell("not done; the ledger goes on behind a sealed tear", control="with room in the file it is done and recorded")


@case(149)
@pytest.mark.parametrize("obstacle", ["a directory", "a read-only file", "a link", "a changed entry"])
def test_what_cannot_be_recorded_is_not_done(number: int, obstacle: str, shell: Shell, tell: Tell) -> None:
    assert shell("run", "--", "true").returncode == 0
    ledger = _ledger_of(shell)
    aside = ledger.with_name("aside")
    ledger.rename(aside)
    match obstacle:
        case "a directory":
            ledger.mkdir()
        case "a read-only file":
            ledger.symlink_to("/proc/version")
        case "a link":
            ledger.symlink_to(aside)
        case _:
            ledger.write_bytes(aside.read_bytes().replace(b'"done"', b'"lost"'))  # of the last entry: earlier ones are for `verify`
            assert ledger.read_bytes() != aside.read_bytes()
    before = aside.read_bytes()
    refused = shell("run", "--", "sh", "-c", "echo x > proof; echo RAN")
    assert refused.returncode == 125 and b"RAN" not in refused.stdout and "ledger" in words(refused), refused
    assert aside.read_bytes() == before
    shutil.rmtree(ledger) if obstacle == "a directory" else ledger.unlink()
    aside.rename(ledger)
    assert shell("run", "--", "cat", "proof").returncode == 1
    assert shell("run", "--", "sh", "-c", "echo RAN").stdout == b"RAN\n"
    tell("refused with 125, nothing ran", control="with the ledger back, it runs")


@case(151, prio="P1")
@pytest.mark.parametrize(
    "text", ['{"pid": 1, "command": "make", "since": 1}', '{"pid": %d, "comm', "\0" * 400], ids=["reused", "torn", "zeros"]
)
def test_the_lock_of_a_holder_that_is_gone_blocks_nobody(number: int, text: str, shell: Shell, tell: Tell) -> None:
    """Its number may belong to another process by now, its text may be torn: the kernel's lock alone counts."""
    assert shell("run", "--", "sh", "-c", "echo precious > file").returncode == 0
    (lock,) = Path(shell.environment["AGENT_SANDBOX_STATE"], "locks").iterdir()
    lock.write_text(text)
    done = shell("--no-wait", "run", "--", "cat", "file")
    assert (done.returncode, done.stdout) == (0, b"precious\n"), done
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert shell("--no-wait", "run", "--", "true").returncode == 125
    tell("taken, and the changes are there", control="a lock that somebody does hold refuses")


@case(151, prio="P1")
@pytest.mark.needs_root
def test_a_cgroup_is_told_from_that_of_another_process_with_the_same_number(number: int, tell: Tell) -> None:
    with subprocess.Popen(["sleep", "60"]) as alive:
        name = cgroups.group_name(alive.pid, "reused")
        namespace, pid, started = name.removeprefix(cgroups.PREFIX).split("-")[:3]
        earlier = f"{cgroups.PREFIX}{namespace}-{pid}-{int(started) - 1}-reused"
        places = [hierarchy.places[0] for hierarchy in cgroups.here()]
        for place in places:
            os.mkdir(f"{place}/{name}")
            os.mkdir(f"{place}/{earlier}")
        cgroups.sweep(cgroups.here())
        kept = [os.path.isdir(f"{place}/{name}") for place in places]
        gone = [not os.path.exists(f"{place}/{earlier}") for place in places]
        for place in places:
            os.rmdir(f"{place}/{name}")
        alive.kill()
    assert all(kept) and all(gone) and places
    tell("that of the dead one is removed", control="that of the living one stays")


@case(151, prio="P1")
@pytest.mark.parametrize("damage", ["format", "meta.json", "history.json", pytest.param("target", marks=pytest.mark.needs_user)])
def test_half_written_state_is_repaired_or_refused_and_no_change_is_lost(number: int, damage: str, shell: Shell, tell: Tell) -> None:
    first = shell("run", "--", "sh", "-c", "echo precious > file")
    assert first.returncode == 0
    state = Path(shell.environment["AGENT_SANDBOX_STATE"])
    (damaged, *_) = [path for path in state.rglob(damage) if path.is_file()]
    whole = damaged.read_bytes()
    for length in (0, len(whole) // 2, len(whole) - 1):
        damaged.write_bytes(whole[:length])
        layers = {path: path.stat().st_ino for path in (state / "sandboxes").rglob("image" if ROOT else "file")}
        done = shell("run", "--", "cat", "file")
        refused = done.returncode == 125 and damage in ("format", "history.json") and damage.split(".")[0] in words(done)
        assert (done.returncode, done.stdout) == (0, b"precious\n") or refused, done
        assert {path: path.stat().st_ino for path in layers} == layers != {}, words(first)
    damaged.write_bytes(whole)
    assert shell("run", "--", "cat", "file").stdout == b"precious\n"
    tell("repaired, or refused with the reason; the layers stay", control="made whole again, all is there")


@case(151, prio="P1")
def test_a_disk_that_is_full_at_the_start_is_said_and_loses_nothing(number: int, shell: Shell, tmp_path: Path, tell: Tell) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    small = Shell(shell.cwd, {"AGENT_SANDBOX_STATE": str(disk / "state")})

    def body() -> None:
        sc.mount("tmpfs", str(disk), "tmpfs", 0, "size=1m,mode=700")
        assert small("run", "--", "sh", "-c", "echo precious > file").returncode == 0
        fill = disk / "fill"
        with suppress(OSError), fill.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                continue
        ledger = _ledger_of(small)
        with suppress(OSError), ledger.open("ab", buffering=0) as file:  # the last page has room left
            while file.write(b"x"):
                continue
        refused = small("run", "--", "sh", "-c", "echo RAN; rm file")
        assert refused.returncode == 125 and b"RAN" not in refused.stdout and "No space" in words(refused), refused
        fill.unlink()
        assert small("run", "--", "cat", "file").stdout == b"precious\n"
        assert verify(ledger).torn == 1

    in_namespace(body)
    tell("refused with the reason; the change set is there afterwards", control="with room it runs")


def _without_images(state: Path) -> dict[str, object]:
    """What is there, but for the image that a live run writes to."""
    return {path: found for path, found in snapshot(state).items() if os.path.basename(path) != "image"}


@pytest.mark.once
@case(154, prio="P1")
@pytest.mark.parametrize(
    "format", ["agent-sandbox store 1\n", "agent-sandbox store 3\n", "something else\n"], ids=["old", "new", "foreign"]
)
def test_another_state_format_is_refused_while_a_live_run_finishes(number: int, format: str, shell: Shell, tell: Tell) -> None:
    state = Path(shell.environment["AGENT_SANDBOX_STATE"])
    with shell.start("run", "--", "sh", "-c", "echo up; read x; echo precious > file; echo done", stdin=subprocess.PIPE) as live:
        assert live.stdout is not None and live.stdin is not None
        assert live.stdout.readline() == b"up\n"
        assert until(lambda: list(state.glob("sandboxes/*/names"))), "it notes beside the run what there is"
        ours = (state / "format").read_text()
        (state / "format").write_text(format)  # as another version would
        before = _without_images(state)
        for verb in (("run", "--", "true"), ("diff",), ("status",), ("reset",)):
            refused = shell(*verb)
            assert refused.returncode == 125 and "format" in words(refused), (verb, refused)
        assert _without_images(state) == before
        live.stdin.write(b"go\n")
        live.stdin.close()
        assert live.stdout.read() == b"done\n" and live.wait() == 0
    (state / "format").write_text(ours)
    assert shell("run", "--", "cat", "file").stdout == b"precious\n"
    assert verify(_ledger_of(shell)).count == 4
    tell("refused with the reason, the live run finished, nothing lost", control="the version that wrote it goes on")
