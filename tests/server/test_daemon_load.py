"""The daemon under load, and where the machine gives way: very many command lines and connections, a full disk, a clock that jumps."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

import pytest

from agent_sandbox.kernel import cgroups
from agent_sandbox.kernel import syscalls as sc
from tests.e2e.program import Shell, words
from tests.e2e.test_daemon import alone, counts, serving
from tests.leftovers import adopting, descendants, left_since, running, traces
from tests.patience import until

QUICK = ("run", "--throw-away", "echo 1")
WARM = 4  # command lines before the first look: workers and caches are there then
# What a daemon may seem to hold more after a soak than before: workers that are ready come and go with their use.
TOLERATED = {"descriptors": 12, "mounts": 0, "control groups": 0, "processes": 8, "KiB": 4096, "files": 2, "KiB on disk": 1024}


def _held(shell: Shell, daemon: int) -> dict[str, int]:
    """What a daemon and its state hold. Workers that are ready do not count: there are more of them after much use."""
    state, ready = Path(shell.env["AGENT_SANDBOX_STATE"]), counts(shell)["ready"]
    ours = traces(adopted=True)
    groups = {Path(name).name for name, what in ours.items() if what.startswith("control group")}
    family = {daemon, *descendants(daemon, running())}
    status = Path(f"/proc/{daemon}/status").read_text().splitlines()
    return {
        "descriptors": len(os.listdir(f"/proc/{daemon}/fd")),
        "mounts": sum(name.startswith("mount ") for name in ours),  # others on this machine have theirs
        "control groups": len(groups) - (ready if _grouped() else 0),
        "processes": len(family) - 3 * ready,  # each has a keeper, and that an init
        "KiB": next(int(line.split()[1]) for line in status if line.startswith("RssAnon:")),
        "files": len(files := [Path(place, name) for place, _, names in os.walk(state) for name in names]),
        "KiB on disk": sum(_blocks(file) for file in files if not file.name.startswith("ledger")) // 2,  # the ledger grows by design
    }


@cache
def _grouped() -> bool:
    """Whether each keeper has a control group here. A user to whom no hierarchy was delegated makes none."""
    made = cgroups.create(unique="asked")
    made.remove()
    return bool(made.parts)


def _blocks(file: Path) -> int:
    with suppress(FileNotFoundError):
        return file.lstat().st_blocks
    return 0


def _is_idle(shell: Shell, daemon: int) -> bool:
    """Whether it performs nothing, and the workers that are ready have their control groups."""
    now = counts(shell)
    return bool(now["performing"] == now["waiting"] == 0 and _held(shell, daemon)["control groups"] == 0)


def _grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: after[name] - before[name] for name, most in TOLERATED.items() if after[name] - before[name] > most}


@pytest.mark.timeout(6000)
@pytest.mark.parametrize("times", [pytest.param(16, id="some"), pytest.param(10_000, id="many", marks=pytest.mark.torture)])
def test_command_lines_leave_nothing_with_the_daemon(shell: Shell, times: int) -> None:
    with adopting():
        at_first = traces(adopted=True)
        with serving(shell) as daemon, ThreadPoolExecutor(4) as crowd:
            looks: list[dict[str, int]] = []
            for count in (WARM, times):
                assert [words(done) for done in crowd.map(lambda _: shell(*QUICK), range(count)) if done.returncode] == []
                assert until(lambda: _is_idle(shell, daemon.pid))
                assert until(lambda: not looks or not _grown(looks[0], _held(shell, daemon.pid))), _grown(
                    looks[0], _held(shell, daemon.pid)
                )
                looks.append(_held(shell, daemon.pid))
            assert counts(shell)["performed"] == WARM + times
            held = [os.pipe() for _ in range(TOLERATED["descriptors"])]
            print(looks)
            assert _grown(looks[0], {**looks[1], "descriptors": looks[1]["descriptors"] + 2 * len(held)}), "the control arm: a leak is seen"
            for ends in held:
                for end in ends:
                    os.close(end)
        assert left_since(at_first, adopted=True) == []


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("many", [pytest.param(6, id="some"), pytest.param(200, id="many", marks=pytest.mark.torture)])
def test_sandboxes_that_are_alive_at_once_are_apart_and_leave_nothing(shell: Shell, many: int) -> None:
    with adopting():
        before = traces(adopted=True)
        with serving(shell, "--most", str(many)) as daemon, ExitStack() as stack:
            assert all(shell(*QUICK).returncode == 0 for _ in range(WARM))
            assert until(lambda: _is_idle(shell, daemon.pid))
            at_first = _held(shell, daemon.pid)
            line = "echo {0} >/tmp/mine; cat /tmp/mine; read line"
            callers = [
                stack.enter_context(shell.start("run", "--throw-away", line.format(number), stdin=subprocess.PIPE))
                for number in range(many)
            ]
            seen = [caller.stdout.readline() if caller.stdout is not None else b"" for caller in callers]
            assert counts(shell)["performing"] == many, "all of them are alive"
            assert seen == [f"{number}\n".encode() for number in range(many)], "each sees its own file"
            alive = _held(shell, daemon.pid)
            assert _grown(at_first, alive), "the control arm: what they hold is seen"
            for caller in callers:
                caller.communicate(b"\n")
            assert {caller.returncode for caller in callers} == {0}
            assert until(lambda: not _grown(at_first, _held(shell, daemon.pid))), _grown(at_first, _held(shell, daemon.pid))
            print(at_first, alive, _held(shell, daemon.pid), sep="\n")
        assert left_since(before, adopted=True) == []


@pytest.fixture
def small(shell: Shell, tmp_path: Path) -> Iterator[Path]:
    """The directory of state on a small file system."""
    place = tmp_path / "state"
    place.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,mode=700", "tmpfs", place], check=True)
    try:
        yield place
    finally:
        sc.umount2(str(place), sc.MNT_DETACH)


@pytest.mark.needs_root
def test_on_a_full_disk_nothing_is_done_and_the_daemon_goes_on(shell: Shell, small: Path) -> None:
    with serving(shell):
        assert shell("run", "echo precious >work").returncode == 0
        with (small / "filler").open("wb") as filler:
            try:
                while filler.write(bytes(1 << 16)):
                    filler.flush()
            except OSError:
                pass
        number, done = 0, shell("run", "echo RAN; touch canary-0")
        while not done.returncode and number < 100:  # an entry of the record may still fit in its last page; what is recorded is done
            number += 1
            done = shell("run", f"echo RAN; touch canary-{number}")
        refused = [done, shell("run", "--throw-away", "echo RAN"), shell("snapshot")]
        assert all(each.returncode == 125 and b"RAN" not in each.stdout for each in refused), refused
        assert all("No space left" in words(each) for each in refused), [words(each) for each in refused]
        assert counts(shell)["running"]
        (small / "filler").unlink()
        assert shell("run", f"cat work; ls canary-{number}").stdout == b"precious\n"
        assert shell("run", f"echo RAN; touch canary-{number}").stdout == b"RAN\n", "the control arm"
        assert shell("log", "verify").returncode == 0


# A daemon whose clock goes a day forth and back with each look.
JUMPING = """
import itertools, sys, time
real, jumps = time.time, itertools.cycle((0, 86400, -86400))
time.time = lambda: real() + next(jumps)
from agent_sandbox.server.daemon import Daemon
Daemon(sys.argv[1]).serve()
"""


@contextmanager
def jumping(shell: Shell) -> Iterator[None]:
    line = [sys.executable, "-c", JUMPING, shell.env["AGENT_SANDBOX_STATE"]]
    with subprocess.Popen(line, cwd=shell.cwd, env=shell.environment) as daemon:
        try:
            assert until(lambda: counts(shell)["running"])
            yield
        finally:
            daemon.terminate()


def test_a_clock_that_jumps_hurts_no_command_line_and_no_record(shell: Shell) -> None:
    with jumping(shell):
        for number in range(2):
            assert shell("run", "--timeout", "60", f"echo {number} >>kept; cat kept | wc -l").stdout == f"{number + 1}\n".encode()
        assert counts(shell)["performed"] == 2
        assert shell("log", "verify").returncode == 0
    times = [entry["time"] for entry in alone(shell).json("log", "--limit", "none")["entries"]]
    assert times != sorted(times), "the control arm: the clock of the record has jumped"
