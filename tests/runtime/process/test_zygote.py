"""A zygote that is a fork of its caller makes the init of its first run before the run is ordered.

Each test works in a process of its own, because only a process with one thread may fork itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent_sandbox.errors import LaunchFailed
from agent_sandbox.runtime.process.zygote import Zygote

TOP = Path(__file__).parents[3]
SET_UP = """
import os, signal
from pathlib import Path
from agent_sandbox.kernel import cgroups, wire
from agent_sandbox.runtime.process.zygote import Zygote
from tests.leftovers import children
from tests.patience import until

probe = cgroups.create(unique="probe")
places = [os.path.dirname(part.path) for part in probe.parts]  # none, where no cgroup can be made
probe.remove()
zygote = Zygote(None)
streams = [os.open("/dev/null", os.O_RDWR) for _ in range(3)]

def group(number):
    return [f"{place}/{cgroups.group_name(zygote.pid, str(number))}" for place in places]

def is_init(pid):
    return any(line.startswith("NSpid:") and line.endswith("\\t1") for line in Path(f"/proc/{pid}/status").read_text().splitlines())

def waiting():
    members = [set(map(int, cgroups.read(f"{path}/cgroup.procs").split())) for path in group(1)]
    return [pid for pid in children(zygote.pid) if is_init(pid) and all(pid in each for each in members)]

def pid_of(line):
    line.control.settimeout(60)
    return wire.credentials(line.control)

assert until(waiting)
(init,) = waiting()
"""


def ends_well(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", SET_UP + script], cwd=TOP, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_first_run_gets_the_init_that_waits_in_its_cgroup_and_the_second_a_new_one() -> None:
    ends_well("""
first, second = zygote.start(streams), zygote.start(streams)
assert pid_of(first) == init
assert pid_of(second) not in (0, init)
assert not any(map(os.path.exists, group(2)))  # the supervisor makes this one
""")


def test_an_init_that_nobody_orders_leaves_no_process_and_no_cgroup() -> None:
    ends_well("""
handle, groups = os.pidfd_open(init), group(1)
assert all(map(os.path.exists, groups))
zygote.close()
assert not any(map(os.path.exists, groups))
try:
    signal.pidfd_send_signal(handle, 0)
except ProcessLookupError:
    os._exit(0)
os._exit(1)
""")


def test_a_run_whose_init_was_killed_before_its_order_is_not_begun() -> None:
    ends_well("""
os.kill(init, signal.SIGKILL)
assert until(lambda: Path(f"/proc/{init}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
first, second = zygote.start(streams), zygote.start(streams)
first.control.settimeout(60)
assert first.control.recv(1) == b""
assert pid_of(second) > 0
""")


def test_one_that_cannot_be_started_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_bytes(b"no program")
    (tmp_path / "python").chmod(0o755)
    kept = []  # what a caller may keep of the failure must not keep descriptors
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(LaunchFailed, match="cannot be started") as failure:
            Zygote()
        kept.append(failure)
    assert os.listdir("/proc/self/fd") == before
