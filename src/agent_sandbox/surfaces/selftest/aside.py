"""Do a piece of work in a fork of this process, at the same time: the controls and the two boxes do not wait for one another.

A fork and not a thread, because `run` forks the process it is called from, which is safe only in one that has a single thread.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from agent_sandbox.errors import SandboxError
from agent_sandbox.kernel import syscalls as sc

T = TypeVar("T")


@contextmanager
def aside(work: Callable[[], T]) -> Iterator[Callable[[], T]]:
    """Begin the work; what is given to the block waits for its result. When the block ends early the work is unwound, and waited for.

    Asking raises `SandboxError` where the work did, and when it ended without a result.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _work(work, writing)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as pipe:

            def result() -> T:
                value: T = _received(pipe.read())
                return value

            yield result
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)


def _work(work: Callable[[], Any], writing: int) -> None:
    """In the fork. Never returns: what its parent has open is not for it to close."""
    code = 1
    try:
        sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGTERM)  # to be unwound too when nobody is left who would ask
        try:
            answer: tuple[bool, Any] = True, work()
        except SandboxError as error:
            answer = False, (error.message, error.hint)
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(answer, pipe)
        code = 0
    except BaseException:  # an interrupt, or a reader that is gone: it has been unwound, and the parent sees that nothing came
        code = 130
    finally:
        os._exit(code)


def _received(data: bytes) -> Any:
    if not data:
        raise SandboxError("a part of the self-test ended without a result", hint="run it again; if it stays, please report it")
    worked, value = pickle.loads(data)  # our own fork wrote it
    if not worked:
        message, hint = value
        raise SandboxError(message, hint=hint)
    return value
