"""What holds where no cgroup can be had: memory is watched, wherever it is held, and who asks for more is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agent_sandbox import Sandbox
from agent_sandbox.assembly import here
from agent_sandbox.engine.plan_launch import prepare
from agent_sandbox.errors import LaunchFailed
from agent_sandbox.kernel import cgroups, syscalls
from agent_sandbox.kernel.mount_plan import ThrowAway
from agent_sandbox.kernel.syscall_rules import numbers
from agent_sandbox.policy.model import Guarantee, Limits, locked
from agent_sandbox.runtime.base import Launch, PythonCode
from agent_sandbox.workspace.view.plan import MachineFacts, plan_view
from tests.kernel.group_probe import probe

HOLD = "import os, time\n{hold}\ntime.sleep(120)\nprint('it was not noticed')"
MEMFDS = "for _ in range(20):\n  f = os.memfd_create('x'); os.write(f, b'x' * (8 << 20))"
SEGMENTS = """
import ctypes
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
for _ in range(20):
  place = libc.shmat(libc.shmget(0, 8 << 20, 0o1600), None, 0)
  ctypes.memset(place, 1, 8 << 20)
  libc.shmdt(ctypes.c_void_p(place))
"""
BEHIND_MANY_SEGMENTS = SEGMENTS.replace("for _ in range(20):", "for _ in range(300): libc.shmget(0, 4096, 0o600)\nfor _ in range(20):")
SEMAPHORES = "import ctypes\nfor _ in range(80): ctypes.CDLL(None).semget(0, 32000, 0o600)"
MESSAGES = """
import ctypes
libc = ctypes.CDLL(None)
text = ctypes.create_string_buffer(bytes([1]) + bytes(8199), 8200)
for _ in range(7000):  # more rows than the watcher reads would count as too much whatever they hold
  queue = libc.msgget(0, 0o600)
  while libc.msgsnd(queue, text, 8192, 0o4000) == 0: pass
"""
PAGE_TABLES = """
import ctypes
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
size = 80 << 30
place = libc.mmap(None, size, 1, 0x4022, -1, 0)  # private, anonymous, never written: no memory but the tables
libc.madvise(ctypes.c_void_p(place), ctypes.c_size_t(size), 15)
for at in range(0, size, 2 << 20): ctypes.c_char.from_address(place + at).value
"""
ANOTHER_THREAD = f"""
import ctypes, mmap, threading
block = mmap.mmap(-1, 160 << 20)
for page in range(0, len(block), 4096): block[page] = 1
def stay():
  time.sleep(120)
  print('it was not noticed', flush=True)
  os._exit(0)
threading.Thread(target=stay).start()
ctypes.CDLL(None).syscall({numbers(syscalls.MACHINE)["exit"]}, 0)  # the first thread ends, and /proc shows no memory for it
"""
SCRATCH = "for n in range(20):\n  open(f'/tmp/{n}', 'wb').write(b'x' * (8 << 20))"
EMPTY_FILES = "for n in range(100_000): os.close(os.open(f'/tmp/{n}', os.O_CREAT))"
HOLDS = {
    "memfds": MEMFDS,
    "System V segments": SEGMENTS,
    "segments behind many others": BEHIND_MANY_SEGMENTS,
    "semaphores": SEMAPHORES,
    "messages": MESSAGES,
    "page tables": PAGE_TABLES,
    "memory of another thread": ANOTHER_THREAD,
    "scratch files": SCRATCH,
    "empty files": EMPTY_FILES,
}


@pytest.fixture(autouse=True)
def _no_cgroup() -> Iterator[None]:
    if "memory" in probe(cgroups.here(), unique="test").enforces:
        pytest.skip("there is a memory cgroup here, which limits all of this by itself")
    yield
    here().process().close()


@pytest.mark.needs_user
@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS.keys())
def test_memory_that_is_in_no_process_counts(hold: str) -> None:
    result = Sandbox(max_memory_mb=64, validate_code=False).execute(HOLD.format(hold=hold))
    assert result.limits_hit == ("memory",), result
    control = Sandbox(max_memory_mb=512, validate_code=False).execute(HOLD.format(hold=hold).replace("time.sleep(120)", ""))
    assert control.stdout == "it was not noticed\n", ("the control arm: with room for it, it can be held", control)


@pytest.mark.needs_user
def test_turns_that_follow_one_another_quickly_do_not_put_off_the_look_at_memory() -> None:
    # Each takes long enough for the supervisor to tell init its deadline, and not as long as init waits for the first look.
    turn = "import os, time\nheld = globals().setdefault('held', [])\nheld.append(os.memfd_create('m'))\n"
    turn += "os.write(held[-1], bytes(4 << 20))\ntime.sleep(0.008)\n"
    with Sandbox(max_memory_mb=100, validate_code=False).session() as session:
        results = [session.run(turn)]
        while results[-1].exit_code == 0 and len(results) < 500:
            results.append(session.run(turn))
    assert results[-1].limits_hit == ("memory",), (len(results), results[-1])


@pytest.mark.needs_user
def test_a_hard_limit_that_cannot_be_had_is_refused_and_nothing_runs() -> None:
    needs = prepare("python", "", arguments=(), search_path="/usr/bin", processes=False).needs
    plan = plan_view(locked().files, needs, ThrowAway(16 << 20), host=MachineFacts.look())
    launch = Launch(PythonCode("print('ran')"), plan, "/tmp", {}, Limits(), frozenset({Guarantee.MEMORY_HARD}), processes=False)
    with pytest.raises(LaunchFailed, match="a hard memory limit was asked for"):
        here().process().launch(launch)
