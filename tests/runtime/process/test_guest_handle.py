"""The supervisor's handle of a guest frees everything of it, whatever interrupts the freeing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from agent_sandbox import Sandbox
from agent_sandbox.runtime.process.runtime import ProcessRuntime
from tests.leftovers import children
from tests.patience import until
from tests.runtime.process.test_pool import launch_of


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("step", ["_take_message", "settle"])
def test_a_second_interrupt_while_a_guest_is_closed_leaves_nothing_else_undone(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first Ctrl-C ends the wait, and the guest is closed; the second comes during that."""
    runtime = ProcessRuntime()
    told: list[str] = []
    try:
        with runtime.launch(launch_of("pass")) as first:  # starts the zygote
            first.wait()
        (zygote,) = runtime._zygotes.values()
        assert until(lambda: not children(zygote.pid))
        before = descriptors()
        guest = runtime.launch(launch_of("import time; time.sleep(1000)"))
        guest.when_closed = lambda: told.append("closed")
        with monkeypatch.context() as patched:
            patched.setattr(guest, step, interrupt)
            with pytest.raises(KeyboardInterrupt):
                guest.close()
        assert told == ["closed"]
        assert until(lambda: not children(zygote.pid)), "the keeper was told that the run is over, and has collected it"
        assert descriptors() <= before
        guest.close()
        assert told == ["closed"]
    finally:
        runtime.close()


def test_a_sandbox_of_a_caller_that_ignores_the_end_of_its_children_starts() -> None:
    code = "import agent_sandbox; print(agent_sandbox.create_sandbox().execute('print(6 * 7)').stdout)"
    ignoring = (
        f"import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.executable, [sys.executable, '-c', {code!r}])"
    )
    done = subprocess.run([sys.executable, "-c", ignoring], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("42", "")


LOOKS = "import os, stat; print([stat.S_ISFIFO(os.fstat(fd).st_mode) for fd in (0, 1, 2)], len(os.listdir('/proc/self/fd')))"


@pytest.mark.parametrize("closed", [(0,), (1, 2), (0, 1, 2)])
def test_a_sandbox_of_a_caller_without_streams_starts(closed: tuple[int, ...]) -> None:
    """Our own descriptors then get the numbers of streams, and are not taken for them."""
    code = f"""
import os
from agent_sandbox import Sandbox
told = os.dup(1)
for fd in {closed}:
    os.close(fd)
with Sandbox() as sandbox:
    seen = sandbox.execute({LOOKS!r})
os.write(told, f"{{seen.stdout}}{{seen.error}}".encode())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    with Sandbox() as sandbox:
        usual = sandbox.execute(LOOKS).stdout
    assert usual.startswith("[True, True, True] ") and done.stdout == f"{usual}None", (done.stdout, done.stderr)
