"""A signal that arrives while a process forks is neither lost nor printed as an ignored error."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

# The signal arrives at the worst moment: in a function that Python calls after a fork, with a handler that raises.
PROGRAM = """
import os, signal, sys
from agent_sandbox.kernel import forks

def interrupt(number, frame):
    raise KeyboardInterrupt

number, me = int(sys.argv[2]), os.getpid()
signal.signal(number, interrupt)
os.register_at_fork(**{sys.argv[3]: lambda: os.kill(os.getpid(), number)})
interrupted = False
try:
    {"held": forks.fork, "plain": os.fork}[sys.argv[1]]()
except KeyboardInterrupt:
    interrupted = True
if os.getpid() != me:
    os._exit(5)
print("interrupted" if interrupted else "not interrupted", os.waitstatus_to_exitcode(os.wait()[1]))
"""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def said_by(how: str, number: int, where: str) -> tuple[str, str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how, str(int(number)), where], capture_output=True, text=True, check=True)
    return done.stdout.strip(), done.stderr


@pytest.mark.parametrize("number", ENDING, ids=lambda number: number.name)
def test_a_signal_ends_the_child_in_silence(number: signal.Signals) -> None:
    assert said_by("held", number, "after_in_child") == (f"not interrupted {-number}", "")


@pytest.mark.parametrize("number", ENDING, ids=lambda number: number.name)
def test_a_signal_interrupts_the_parent(number: signal.Signals) -> None:
    assert said_by("held", number, "after_in_parent") == ("interrupted 5", "")


@pytest.mark.parametrize("where", ["after_in_child", "after_in_parent"])
def test_a_plain_fork_loses_the_signal_and_prints_an_error(where: str) -> None:
    said, errors = said_by("plain", signal.SIGTERM, where)
    assert said == "not interrupted 5" and "KeyboardInterrupt" in errors
