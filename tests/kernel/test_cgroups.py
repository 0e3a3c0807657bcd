"""Cgroups: found in the texts of different machines, and tried on this one."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent_sandbox.kernel import cgroups, mountinfo
from agent_sandbox.kernel.cgroups import Cgroup, Hierarchy, Part
from tests.kernel.group_probe import probe

MIB = 1 << 20

V2_MOUNTS = b"27 1 8:1 / / rw - ext4 /dev/sda1 rw\n35 27 0:30 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
HYBRID_MOUNTS = b"""\
27 1 8:1 / / rw - ext4 /dev/sda1 rw
31 27 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
36 31 0:33 / /sys/fs/cgroup/devices rw - cgroup cgroup rw,devices
40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
"""
HYBRID_SELF = "6:name=systemd:/init\n5:devices:/\n4:memory:/jobs/7\n2:cpu,cpuacct:/\n0::/\n"


def test_on_v2_the_place_beside_the_caller_is_tried_after_the_callers_own() -> None:
    own = "/user.slice/user-1000.slice/user@1000.service/app.slice/editor.scope"
    (found,) = cgroups.find(f"0::{own}\n", mountinfo.parse(V2_MOUNTS))
    assert found == Hierarchy(2, frozenset(), "/sys/fs/cgroup", "/sys/fs/cgroup" + own)
    assert found.places == (found.own, os.path.dirname(found.own))


def test_at_the_root_of_v2_there_is_no_place_beside() -> None:
    (found,) = cgroups.find("0::/\n", mountinfo.parse(V2_MOUNTS))
    assert found.places == ("/sys/fs/cgroup",)


def test_on_a_hybrid_machine_each_useful_tree_is_found_with_the_callers_place_in_it() -> None:
    found = cgroups.find(HYBRID_SELF, mountinfo.parse(HYBRID_MOUNTS))
    assert {(each.version, each.own) for each in found} == {
        (2, "/sys/fs/cgroup/unified"),
        (1, "/sys/fs/cgroup/memory/jobs/7"),
        (1, "/sys/fs/cgroup/cpu,cpuacct"),
    }
    assert found[0].version == 2
    memory = next(each for each in found if "memory" in each.controllers)
    assert memory.places == (memory.own, "/sys/fs/cgroup/memory")


@pytest.mark.parametrize("text", ["", "garbage\n", HYBRID_SELF, "0::/\n"])
def test_without_mounted_cgroups_nothing_is_found(text: str) -> None:
    assert cgroups.find(text, mountinfo.parse(b"27 1 8:1 / / rw - ext4 /dev/sda1 rw\n")) == ()


@pytest.mark.parametrize(
    ("root", "path", "own"),
    [
        ("/docker/ab", "/docker/ab", "/cg"),
        ("/docker/ab", "/docker/ab/x", "/cg/x"),
        ("/docker/ab", "/docker/abc", "/cg"),  # another container's: not to be seen from here
        ("/", "/../other", "/cg"),  # outside of this cgroup namespace
    ],
)
def test_in_a_container_the_callers_place_is_taken_relative_to_what_is_mounted(root: str, path: str, own: str) -> None:
    mounts = mountinfo.parse(f"27 1 8:1 / / rw - ext4 x rw\n35 27 0:30 {root} /cg rw - cgroup2 cgroup2 rw\n".encode())
    assert cgroups.find(f"0::{path}\n", mounts)[0].own == own


def test_without_any_hierarchy_creating_gives_a_cgroup_that_does_nothing_and_says_why() -> None:
    cgroup = cgroups.create(memory_bytes=MIB, processes=1, hierarchies=())
    assert cgroup.enforces == frozenset()
    assert cgroup.missing.keys() == {"memory", "processes", "sockets"}
    cgroup.join()
    assert cgroup.kill() and cgroup.remove()
    assert cgroup.usage() == cgroups.GroupUsage()


def delegated(directory: Path, *, controllers: str, enabled: str) -> Path:
    """The files of a v2 cgroup, as far as choosing a place reads them."""
    directory.mkdir(parents=True)
    (directory / "cgroup.procs").touch()
    (directory / "cgroup.controllers").write_text(controllers)
    (directory / "cgroup.subtree_control").write_text(enabled)
    return directory


def test_the_place_whose_children_have_the_controllers_is_chosen(tmp_path: Path) -> None:
    # The caller's own cannot pass anything on: a directory in the file's stead refuses the write, as the kernel would.
    slice_ = delegated(tmp_path / "app.slice", controllers="cpu memory pids\n", enabled="memory pids\n")
    scope = delegated(slice_ / "editor.scope", controllers="memory pids\n", enabled="")
    (scope / "cgroup.subtree_control").unlink()
    (scope / "cgroup.subtree_control").mkdir()
    hierarchy = Hierarchy(2, frozenset(), str(tmp_path), str(scope))
    cgroup = cgroups.create(hierarchies=(hierarchy,), unique="place")
    (part,) = cgroup.parts
    assert os.path.dirname(part.path) == str(slice_)
    assert part.controllers == {"memory", "pids"}
    assert part.home == str(scope)
    assert cgroup.remove()


@pytest.mark.needs_user
def test_a_place_that_is_not_delegated_is_named_as_the_reason(tmp_path: Path) -> None:
    scope = delegated(tmp_path / "session.scope", controllers="memory pids\n", enabled="memory pids\n")
    (scope / "cgroup.procs").chmod(0o444)
    cgroup = cgroups.create(memory_bytes=MIB, hierarchies=(Hierarchy(2, frozenset(), str(scope), str(scope)),))
    assert cgroup.parts == ()
    assert cgroup.missing == dict.fromkeys(("memory", "sockets"), f"{scope} is not delegated to this user")


def test_out_of_memory_counts_only_at_the_cgroups_own_limit(tmp_path: Path) -> None:
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 0\noom_kill 1\n")
    cgroup = Cgroup((Part(str(tmp_path), str(tmp_path), 2, frozenset({"memory", "pids"})),))
    assert cgroup.usage().hit == frozenset()  # killed for want of memory elsewhere
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 2\noom_kill 1\n")
    (tmp_path / "pids.events").write_text("max 3\n")
    (tmp_path / "cpu.stat").write_text("usage_usec 1500000\nuser_usec 1\n")
    (tmp_path / "memory.peak").write_text("4096\n")
    reached = frozenset({"memory", "processes"})
    assert cgroup.usage() == cgroups.GroupUsage(cpu_seconds=1.5, peak_memory_bytes=4096, oom_kills=1, hit=reached)


def test_a_name_is_forgotten_only_when_its_keeper_is_gone_and_was_of_our_namespace() -> None:
    mine = cgroups.group_name(os.getpid(), "x-1")
    namespace, pid, started = mine.removeprefix(cgroups.PREFIX).split("-")[:3]
    assert not cgroups.is_forgotten(mine)
    assert cgroups.is_forgotten(f"{cgroups.PREFIX}{namespace}-{pid}-{int(started) + 1}-x")  # the number was given to another
    assert not cgroups.is_forgotten(f"{cgroups.PREFIX}1-{pid}-{int(started) + 1}-x")
    assert not cgroups.is_forgotten(f"{cgroups.PREFIX}something-else")


# From here on: real cgroups.


@pytest.fixture
def make() -> Iterator[Callable[..., Cgroup]]:
    """Make real cgroups with both limits; all are gone afterwards."""
    made: list[Cgroup] = []

    def create(*, memory_bytes: int = 256 * MIB, processes: int = 64, hierarchies: tuple[Hierarchy, ...] | None = None) -> Cgroup:
        unique = f"test{len(made)}"
        made.append(cgroups.create(memory_bytes=memory_bytes, processes=processes, unique=unique, hierarchies=hierarchies))
        if made[-1].missing:
            pytest.skip(f"cgroups cannot be made here: {made[-1].missing}")
        return made[-1]

    yield create
    for cgroup in made:
        assert cgroup.kill() and cgroup.remove()
        assert not any(os.path.exists(part.path) for part in cgroup.parts)


def run_in(cgroup: Cgroup, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script that begins once it is inside."""
    command = [sys.executable, "-c", f"import os, signal, sys; sys.stdin.read()\n{script}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        cgroup.join(process.pid)
        out, err = process.communicate()
        return subprocess.CompletedProcess(command, process.returncode, out, err)


HOG = "block = bytearray(b'x') * ({} << 20); print('held')"


def test_a_memory_hog_is_killed_in_its_cgroup_and_the_counter_says_so(make: Callable[..., Cgroup]) -> None:
    small, large = make(memory_bytes=48 * MIB), make(memory_bytes=256 * MIB)
    assert run_in(small, HOG.format(96)).returncode == -signal.SIGKILL
    assert small.usage().hit == {"memory"}
    assert small.usage().oom_kills == 1
    assert 40 * MIB <= small.usage().peak_memory_bytes <= 48 * MIB
    assert run_in(large, HOG.format(96)).stdout == "held\n"
    assert large.usage().hit == frozenset()
    assert large.usage().peak_memory_bytes > 90 * MIB


def test_a_file_larger_than_the_memory_limit_is_no_hit(make: Callable[..., Cgroup], tmp_path: Path) -> None:
    cgroup = make(memory_bytes=32 * MIB)
    script = f"f = open({str(tmp_path / 'large')!r}, 'wb')\nfor _ in range(64): f.write(bytes(1 << 20))\nf.close(); print('written')"
    assert run_in(cgroup, script).stdout == "written\n"
    assert cgroup.usage().hit == frozenset()


FORKS = """
children = []
try:
    for _ in range({}):
        child = os.fork()
        if child == 0:
            signal.pause()
        children.append(child)
except BlockingIOError:
    print('refused')
print(len(children))
for child in children:
    os.kill(child, signal.SIGKILL)
"""


def test_processes_are_bounded_and_the_counter_says_so(make: Callable[..., Cgroup]) -> None:
    bounded, roomy = make(processes=8), make(processes=64)
    assert run_in(bounded, FORKS.format(20)).stdout == "refused\n7\n"
    assert bounded.usage().hit == {"processes"}
    assert run_in(roomy, FORKS.format(20)).stdout == "20\n"
    assert roomy.usage().hit == frozenset()


BOMB = """
print('begun', flush=True)
while True:
    try:
        os.fork()
    except BlockingIOError:
        pass
"""


@pytest.mark.parametrize("version", [2, 1], ids=["with cgroup.kill", "by v1 signals alone"])
def test_a_fork_bomb_is_bounded_and_ended_as_a_whole(make: Callable[..., Cgroup], version: int) -> None:
    hierarchies = cgroups.here()
    if version == 1:
        hierarchies = tuple(each for each in hierarchies if each.version == 1)
    cgroup = make(processes=12, hierarchies=hierarchies)
    command = [sys.executable, "-c", f"import os, sys; sys.stdin.read()\n{BOMB}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        cgroup.join(process.pid)
        process.stdin.close()
        assert process.stdout.readline() == b"begun\n"
        while "processes" not in cgroup.usage().hit:
            pass
        assert len(cgroup.members()) <= 12
        assert cgroup.kill()
        assert cgroup.members() == frozenset()
        assert process.wait() == -signal.SIGKILL


def test_the_keeper_can_join_fork_and_end_its_run_without_ending_itself(make: Callable[..., Cgroup]) -> None:
    cgroup = make()
    cgroup.join()
    try:
        child = subprocess.Popen(["sleep", "60"])
        assert {os.getpid(), child.pid} <= cgroup.members()
    finally:
        cgroup.leave()
    assert cgroup.members() == {child.pid}
    cgroup.join()
    assert cgroup.kill()  # leaves first
    assert child.wait() == -signal.SIGKILL


def test_cpu_time_of_processes_that_have_ended_is_counted(make: Callable[..., Cgroup]) -> None:
    busy, idle = make(), make()
    run_in(busy, "import time\nwhile time.process_time() < 0.3: pass")
    run_in(idle, "pass")
    assert busy.usage().cpu_seconds >= 0.2 > idle.usage().cpu_seconds


def test_a_sweep_ends_and_removes_what_a_dead_keeper_left_and_nothing_else(make: Callable[..., Cgroup]) -> None:
    mine = make()
    script = (
        "import os, subprocess\nfrom agent_sandbox.kernel import cgroups\n"
        "cgroup = cgroups.create(memory_bytes=1 << 26, processes=8)\ncgroup.join()\n"
        "child = subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "print(child.pid, *(part.path for part in cgroup.parts), flush=True)\nos._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    orphan, *paths = done.stdout.split()
    assert all(os.path.isdir(path) for path in paths)
    handle = os.pidfd_open(int(orphan))
    try:
        assert not select.select([handle], [], [], 0)[0]
        assert cgroups.sweep(cgroups.here()) >= len(paths)
        assert select.select([handle], [], [], 0)[0]  # readable: dead, whoever is to reap it
    finally:
        os.close(handle)
    assert not any(os.path.exists(path) for path in paths)
    assert all(os.path.isdir(part.path) for part in mine.parts)


def test_the_probe_says_what_is_enforced_or_why_not_and_leaves_nothing() -> None:
    hierarchies = cgroups.here()
    found = probe(hierarchies)
    assert found.enforces | found.missing.keys() == {"memory", "processes", "sockets"}
    assert all(found.missing.values())
    name = cgroups.group_name(os.getpid(), "probe")
    assert not any(os.path.exists(f"{place}/{name}") for each in hierarchies for place in each.places)
    assert probe(()).missing.keys() == {"memory", "processes", "sockets"}


@pytest.mark.needs_root
def test_as_root_with_v1_or_v2_mounted_both_limits_are_hard() -> None:
    found = probe(cgroups.here())
    if found.missing:
        pytest.skip(f"this machine gives root no cgroups: {found.missing}")
    assert found.enforces >= {"memory", "processes"}


def test_a_cgroup_made_ahead_gets_its_limits_later_and_moves_no_member_again(
    make: Callable[..., Cgroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = make()
    same = cgroups.create(memory_bytes=64 * MIB, processes=8, unique="test0", ahead=True)  # as `make` has called it
    assert same.parts == ahead.parts and {"memory", "processes"} <= same.enforces
    limits = {"memory.limit_in_bytes": 64 * MIB, "memory.max": 64 * MIB, "pids.max": 8}
    written = {name: cgroups.read(f"{part.path}/{name}").strip() for part in same.parts for name in limits}
    assert all(text in ("", str(limits[name])) for name, text in written.items()) and any(written.values())
    with subprocess.Popen(["sleep", "60"]) as member, subprocess.Popen(["sleep", "60"]) as other:
        ahead.join(member.pid)
        moved: list[tuple[str, str]] = []
        monkeypatch.setattr(cgroups, "write", lambda path, value: moved.append((path, value)))
        same.join(member.pid)
        assert moved == []
        same.join(other.pid)
        assert [value for _, value in moved] == [str(other.pid)] * len(same.parts)
        monkeypatch.undo()
        for process in (member, other):
            process.kill()
