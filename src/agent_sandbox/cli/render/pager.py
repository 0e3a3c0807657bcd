"""The user's pager, for output on a terminal that is longer than the screen.

The user's environment names the pager. It gets our text on its standard input; no shell, file or name chosen by a guest is involved.
"""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import contextmanager, suppress

from agent_sandbox._fast.values import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator

_USUAL = "less"
_NONE = ("", "cat")


class _PagerGone(Exception):
    """The user has quit the pager."""


@contextmanager
def output(*, paged: bool = True) -> Iterator[Callable[[bytes], object]]:
    """Yield a function that writes to standard output, or to a pager as soon as the output exceeds a screen.

    If the user quits the pager, the block ends without an error.
    """
    sys.stdout.flush()
    command = _command() if paged and sys.stdout.isatty() else []
    if not command:
        yield sys.stdout.buffer.write
        return
    size = os.get_terminal_size(1)
    sink = _Sink(command, size.lines or 24, size.columns or 80)
    try:
        yield sink.write
    except _PagerGone:
        pass
    except BaseException:
        sink.forget()
        raise
    finally:
        sink.close()


def _command() -> list[str]:
    named = next((value for name in ("AGENT_SANDBOX_PAGER", "PAGER") if (value := os.environ.get(name)) is not None), _USUAL)
    try:
        return [] if named.strip() in _NONE or os.environ.get("TERM") == "dumb" else shlex.split(named)
    except ValueError:  # a quotation mark without its partner
        return []


class _Sink:
    """Buffers output up to the size of a screen. If there is more, starts the pager and writes to it."""

    def __init__(self, command: list[str], rows: int, columns: int) -> None:
        self._command, self._rows, self._columns = command, rows - 1, columns
        self._held: list[bytes] = []
        self._taken = 0
        self._pager: subprocess.Popen[bytes] | None = None
        self._write: Callable[[bytes], object] | None = None
        self._interrupt: Callable[..., object] | int | None = None

    def write(self, data: bytes) -> None:
        if self._write is None:
            self._held.append(data)
            self._taken += data.count(b"\n") + len(data) // self._columns  # a long line takes several rows
            if self._taken <= self._rows:
                return
            self._write = self._start()
            data = b"".join(self._held)
        try:
            self._write(data)
        except BrokenPipeError as error:
            raise _PagerGone from error

    def _start(self) -> Callable[[bytes], object]:
        import signal  # both are slow, and few outputs fill a screen
        import subprocess

        # No shell starts the pager, and `less` may not start a shell: a guest's text on the screen may trick the reader into using it.
        settings = {"LESSSECURE": "1", "LESS": os.environ.get("LESS", "FRX")}
        environment = {name: value for name, value in os.environ.items() if name not in ("LESSOPEN", "LESSCLOSE")} | settings
        command = [*self._command, "-R"] if os.path.basename(self._command[0]) == "less" else self._command
        # From now on only the pager handles Ctrl-C. The handler is a function, because a pager inherits ignored signals.
        self._interrupt = signal.signal(signal.SIGINT, lambda *_: None)
        try:
            self._pager = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
        except OSError:  # there is no such program: print without a pager
            self._take_interrupts_again()
            return sys.stdout.buffer.write
        assert self._pager.stdin is not None
        return self._pager.stdin.write

    def _take_interrupts_again(self) -> None:
        import signal  # slow, and only a pager needs it

        signal.signal(signal.SIGINT, self._interrupt or signal.SIG_DFL)

    def forget(self) -> None:
        """Discard the buffered output after a failure, so that incomplete output is not printed."""
        self._held.clear()

    def close(self) -> None:
        """Print the buffered output, or wait until the user quits the pager."""
        if self._write is None:
            sys.stdout.buffer.write(b"".join(self._held))
            self._held.clear()
        if self._pager is not None:
            assert self._pager.stdin is not None
            with suppress(BrokenPipeError):
                self._pager.stdin.close()
            self._pager.wait()
            self._take_interrupts_again()
