"""The caller's part of a run: its environment, streams, signals and terminal; also hidden arguments and work in the background."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import struct

from agent_sandbox._fast.contexts import contextmanager, suppress
from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.errors import PolicyError, RuntimeUnavailable
from agent_sandbox.kernel import forks, wire
from agent_sandbox.runtime.base import Guest, Terminal

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from types import FrameType
else:
    import _signal as signal  # without the enumerations of `signal`

# This lists the names to pass, not the names to hold back: nobody knows yet in which variable the next service keeps its token.
PASSED = frozenset(
    {
        # where programs and the user's own files are
        *("PATH", "HOME", "SHELL", "USER", "LOGNAME", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "PYENV_ROOT"),
        *("PYENV_VERSION", "NVM_DIR", "NVM_BIN", "GEM_HOME", "GEM_PATH", "RBENV_ROOT", "GOPATH", "GOROOT", "JAVA_HOME"),
        *("CARGO_HOME", "RUSTUP_HOME"),
        # language, terminal and programs for people
        *("LANG", "LANGUAGE", "TZ", "TERM", "COLORTERM", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "EDITOR"),
        *("VISUAL", "PAGER", "LESS"),
        # settings of common programs
        *("CI", "DEBIAN_FRONTEND", "NODE_ENV", "RAILS_ENV", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "PYTHONUTF8"),
        "SOURCE_DATE_EPOCH",
    }
)
CAPABILITY = "AGENT_SANDBOX_CAPABILITY"  # never passed to the guest: its value is a permission
_FALLBACK = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}


def guest_environment(ours: Mapping[str, str], asked: Iterable[str], *, home: str, bare: bool = False) -> dict[str, str]:
    """Return the complete environment of a guest. `asked` are the values of `--env`: NAME=VALUE, or NAME for the caller's own value.

    With `bare`, only the asked variables are passed: a deterministic run must not depend on the caller's locale or terminal.

    Raises `PolicyError` for an invalid name, and for a variable that the caller does not have.
    """
    passed = {name: value for name, value in ours.items() if not bare and (name in PASSED or name.startswith("LC_"))}
    environment = {**_FALLBACK, "HOME": home, **passed}
    for text in asked:
        name, equals, value = text.partition("=")
        if not name:
            raise PolicyError(f"--env {text!r} has no name before the '='", hint="write --env NAME=VALUE")
        if not is_variable(name):
            raise PolicyError(f"--env {name!r} is not the name of a variable", hint="a name is of letters, digits and _, no digit first")
        if not equals and name not in ours:
            raise PolicyError(f"--env {name}: the variable is not set", hint=f"set it, or write --env {name}=VALUE")
        if name == CAPABILITY:
            raise PolicyError(f"--env {name}: a capability is never passed into the sandbox", hint="leave it out")
        environment[name] = value if equals else ours[name]
    return environment


def is_variable(name: str) -> bool:
    """Whether a shell can use this name of a variable: letters, digits and underscores, no digit first."""
    return name.isascii() and name.isidentifier()


FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

HANG_UP_SECONDS = 1.0  # time for a program to save its work after its terminal has gone


def interactive() -> bool:
    """Whether standard input and output are a terminal, and our process is in the terminal's foreground."""
    try:
        return os.isatty(0) and os.isatty(1) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def pass_on(name: str, data: bytes) -> None:
    """Write output of the guest to our own standard output or error. Raises BrokenPipeError, which ends the run.

    Raises OSError with the name of the stream for any other reason, such as a full disk.
    """
    try:
        write_all(1 if name == "stdout" else 2, data)
    except OSError as error:
        from agent_sandbox.cli.main import STANDARD_ERROR, STANDARD_OUTPUT  # which tells the user of it

        error.filename = STANDARD_OUTPUT if name == "stdout" else STANDARD_ERROR
        raise


def write_all(fd: int, data: bytes) -> None:
    """Write every byte, even if the descriptor is non-blocking."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            select.select([], [fd], [])


class Forwarding:
    """Forwards signals to one guest. A second signal of any kind kills the guest, because the guest may have ignored the first."""

    def __init__(self, woken: int) -> None:
        self.received: list[int] = []
        self._woken = woken
        self._guest: Guest | None = None

    def begin(self, guest: Guest) -> None:
        """Forward signals to this guest from now on."""
        guest.wake_on(self._woken)
        self._guest = guest

    def take(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: forward the first one to the guest; at the second one, kill the guest."""
        if self._guest is None:
            raise KeyboardInterrupt  # nothing of the guest has run: unwind, and leave nothing behind
        self.received.append(number)
        if len(self.received) == 1:
            self._guest.interrupt(number)
            if number == signal.SIGHUP and _hung_up():  # nobody can press Ctrl-C a second time, so a timer kills the guest
                signal.signal(signal.SIGALRM, self._time_is_up)
                signal.setitimer(signal.ITIMER_REAL, HANG_UP_SECONDS)
        else:
            self._guest.kill()

    def _time_is_up(self, number: int, frame: FrameType | None) -> None:
        if self._guest is not None:
            self._guest.kill()


def _hung_up() -> bool:
    """Whether the terminal behind one of our streams was closed. Otherwise another process sent the SIGHUP."""
    for fd in (0, 1, 2):
        try:
            os.tcgetpgrp(fd)
        except OSError as error:
            if error.errno == errno.EIO:
                return True
    return False


@contextmanager
def forwarding() -> Iterator[Forwarding]:
    """Forward signals to the guest during the block, then restore the previous handlers. Ignored signals (nohup) stay ignored."""
    woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    forward = Forwarding(woken)
    waker_before = signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    before = {number: signal.getsignal(number) for number in FORWARDED}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, forward.take)
    try:
        yield forward
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        signal.set_wakeup_fd(waker_before)
        os.close(waker)
        os.close(woken)


@contextmanager
def unwound_by_signals(received: list[int], *, once: bool = False) -> Iterator[None]:
    """Turn signals that would end the program into `KeyboardInterrupt`, so that nothing is left behind.

    With `once`, only the first does, SIGINT included, so that a second one does not interrupt the clearing away.
    """

    def unwind(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if not once or len(received) == 1:
            raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    for number, handler in before.items():
        if handler is signal.SIG_DFL or (once and handler is signal.default_int_handler):
            signal.signal(number, unwind)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


class EscapedOutput:
    """Prints the output of a guest that has no terminal of its own on our terminal, with control characters escaped.

    With `aside`, all output of the guest goes to standard error. Standard output is for a diff or a plan, which the guest must not hide.
    """

    def __init__(self, *, aside: bool = False) -> None:
        import codecs

        decoder = codecs.getincrementaldecoder("utf-8")
        self._streams = {"stdout": (2 if aside else 1, decoder("surrogateescape")), "stderr": (2, decoder("surrogateescape"))}

    def pass_on(self, name: str, data: bytes, *, last: bool = False) -> None:
        """Write output of the guest to our own standard output or error. A split character is held until complete. Raises as `write_all`
        does."""
        from agent_sandbox.workspace.escape import visible  # few runs need this module

        fd, decoder = self._streams[name]
        if not os.isatty(fd):
            write_all(fd, data)
            return
        lines = decoder.decode(data, last).split("\n")
        write_all(fd, "\n".join("\t".join(map(visible, line.split("\t"))) for line in lines).encode())

    def finish(self) -> None:
        """Write the held bytes of incomplete characters, at the end of the output."""
        for name in self._streams:
            self.pass_on(name, b"", last=True)


def terminal_size() -> Terminal:
    """Return the size of our terminal; 24 by 80 if it is unknown."""
    from termios import TIOCGWINSZ

    rows, columns, _, _ = struct.unpack("HHHH", fcntl.ioctl(0, TIOCGWINSZ, bytes(8)))
    return Terminal(rows or 24, columns or 80)


def make_raw() -> None:
    """Let our terminal pass every key to whoever reads from it, Ctrl-C too."""
    import termios  # most callers have no terminal
    import tty

    tty.setraw(0, termios.TCSADRAIN)


@contextmanager
def terminal_kept(resized: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Restore the settings of our terminal at the end of the block. Meanwhile `resized` handles changes of its size."""
    import termios  # most callers have no terminal

    before = termios.tcgetattr(0)
    handler = signal.signal(signal.SIGWINCH, resized)
    try:
        yield
    finally:
        with suppress(termios.error):  # the terminal has gone
            termios.tcsetattr(0, termios.TCSADRAIN, before)
        signal.signal(signal.SIGWINCH, handler)


class LentTerminal:
    """Our terminal, lent to a guest that has a terminal of its own.

    Our terminal is raw while the guest runs: every key, Ctrl-C too, reaches the guest's terminal. The guest never has a descriptor of our
    terminal. We pass bytes and changes of size between the two terminals.
    """

    def __init__(self) -> None:
        self._theirs: int | None = None

    def begin(self, guest: Guest) -> None:
        """Make our terminal raw, so that the guest gets every key from now on. Before this call, Ctrl-C ends our own program.

        We copy the descriptor of the guest's terminal, because the original is closed together with the guest's streams.
        """
        make_raw()
        if guest.terminal is not None:
            self._theirs = os.dup(guest.terminal)
            self.resize(signal.SIGWINCH, None)  # the size may have changed while the guest was made

    def resize(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGWINCH: give the guest's terminal the size of ours. The kernel then notifies the programs in it."""
        if self._theirs is not None:
            from termios import TIOCSWINSZ

            with suppress(OSError):
                size = terminal_size()
                fcntl.ioctl(self._theirs, TIOCSWINSZ, struct.pack("HHHH", size.rows, size.columns, 0, 0))

    def end(self) -> None:
        """Close our copy of the guest's terminal."""
        if self._theirs is not None:
            os.close(self._theirs)
            self._theirs = None


@contextmanager
def lent_terminal() -> Iterator[LentTerminal]:
    """Yield a `LentTerminal`, and restore the settings of our terminal at the end of the block."""
    loan = LentTerminal()
    with terminal_kept(loan.resize):
        try:
            yield loan
        finally:
            loan.end()


_NICE = 10


def in_a_child(do: Callable[[], None]) -> None:
    """Call a function in a forked child, at low priority, and return at once.

    The child closes our descriptors, so that it holds no lock and keeps no pipe open.
    """
    if forks.fork():
        return
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for standard in (0, 1, 2):
            os.dup2(nothing, standard)
        wire.close_others(())
        os.nice(_NICE)
        do()
    finally:
        os._exit(0)


_ARGUMENTS_START = 48 - 3  # index of this field in /proc/self/stat; index 0 is the field after the name, which has the number 3


def conceal(words: Iterable[str]) -> None:
    """Overwrite these words in our own command line, so that `ps` does not show them.

    Raises `RuntimeUnavailable` on failure. The caller must then start nothing.
    """
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        start, end = (int(field) for field in fields[_ARGUMENTS_START : _ARGUMENTS_START + 2])
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(start)
            line = memory.read(end - start)
            for word in sorted({word.encode("utf-8", "surrogateescape") for word in words if word}, key=len, reverse=True):
                line = line.replace(word, b"*" * len(word))
            memory.seek(start)
            memory.write(line)
    except (OSError, ValueError) as error:
        why = f"--capability cannot be hidden from the guest: {error}"
        raise RuntimeUnavailable(why, missing=("/proc/self/mem",), hint="pass the token in AGENT_SANDBOX_CAPABILITY") from None
