"""The first lines of the program: let the daemon of this user perform the command line, or perform it here.

The daemon (`server.daemon`) performs it in a process that is ready, with our streams, directory and environment. The result is the same; it
comes sooner, because this process loads almost nothing: this module needs none of ours, and only what the interpreter has built in. What
the daemon cannot do exactly as we would, we do ourselves: it is of another version, lives in other namespaces or has other rights, one of
our streams is a terminal that the program could use, or the line is about this process or a file that only this process has open.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # see `_fast.values`
if TYPE_CHECKING:
    import signal
    from _socket import socket as Link
    from types import FrameType
    from typing import NoReturn
else:
    import _signal as signal

# Verbs that do nothing but their own work: no question to a person, nothing about the caller's own process.
VERBS = frozenset(
    {
        *("run", "code", "sim", "simulate", "diff", "status", "list", "log", "snapshot", "snapshots", "rollback"),
        *("exec", "logs", "ps"),  # not `stop`, which must not wait for its turn behind what it ends
    }
)
PLACE, SOCKET = "daemon", "socket"  # in the directory of state
OFF = "AGENT_SANDBOX_NO_DAEMON"
# What the daemon answers: it performs it; nothing, so that we do; or it has too much to do. In the end, ENDED and the exit code, a byte.
TAKEN, REFUSED, ENDED = b"t", b"r", b"e"
_LOST = 125
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_BEFORE_A_VERB = ("--json", "--quiet", "-q")
_OWN_WORDS = ("--capability",)  # hidden in our own command line, which the daemon cannot do
# Files that are others in another process. A shell hands its `<(…)` over as one.
_OWN_FILES = ("/dev/fd/", "/proc/self/", "/proc/thread-self/")
_FOLLOWING = frozenset({"--follow", "-f"})  # of the logs: it would take one of the daemon's turns for as long as somebody reads
_OWN_VARIABLES = ("AGENT_SANDBOX_CAPABILITY", "AGENT_SANDBOX_DEBUG", OFF)


def program() -> NoReturn:
    """Perform the command line, here or by the daemon, and exit at once."""
    open_closed_streams()
    if (code := _by_daemon(sys.argv[1:])) is not None:
        os._exit(code)
    from agent_sandbox._fast.finder import load_quickly  # after the lines above, which do without it

    load_quickly()
    if sys.argv[1:2] == ["hook"]:  # it starts for every tool call of a coding agent, and needs little of the rest
        from agent_sandbox.cli.commands.hook import program  # now quickly
    else:
        from agent_sandbox.cli.main import program  # the same
    program()


def open_closed_streams() -> None:
    """Open /dev/null for each standard stream that our caller has closed. Else the next file that is opened would get its number.

    Called before anything of ours is open.
    """
    if None not in (sys.stdin, sys.stdout, sys.stderr):
        return
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None and (opened := os.open(os.devnull, os.O_RDWR)) == number:
            os.set_inheritable(opened, True)
            stream = open(number, "w" if number else "r", closefd=False)  # noqa: SIM115  # open as long as we live
            setattr(sys, name, stream)


def stamp() -> tuple[str, int, int]:
    """Return the place and the files of this installation. They differ after another version was installed in the same place."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    status = os.stat(f"{package}/__init__.py")
    return package, status.st_ino, status.st_mtime_ns


def _by_daemon(line: list[str]) -> int | None:
    """Let the daemon perform a command line, and return its exit code. None if this process has to."""
    verb = next((word for word in line if word not in _BEFORE_A_VERB), "")
    if sys.platform != "linux" or verb not in VERBS or any(name in os.environ for name in _OWN_VARIABLES):
        return None
    state = _state()
    if not state or any(word.startswith(_OWN_WORDS) or any(place in word for place in _OWN_FILES) for word in line):
        return None
    if verb in ("log", "logs") and not _FOLLOWING.isdisjoint(line):
        return None
    try:
        place = os.open(f"{state}/{PLACE}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    from _socket import AF_UNIX, SOCK_STREAM, socket  # now that there is a place: most who have none do without it

    try:
        link = socket(AF_UNIX, SOCK_STREAM)
        link.connect(f"/proc/self/fd/{place}/{SOCKET}")  # the path itself may be longer than an address can be
        if not _is_ours(link):
            return None
        here = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        for stream in range(3):
            if (os.isatty(stream) and not _detaches(line, verb)) or not os.fstat(stream):
                return None
    except OSError:  # nobody listens, or a stream is closed
        return None
    finally:
        os.close(place)
    before = {number: signal.getsignal(number) for number in _FORWARDED}
    if any(handler is None or handler is signal.SIG_IGN for handler in before.values()):  # nohup
        return None

    answer = b""

    def forward(number: int, frame: FrameType | None) -> None:
        if answer != TAKEN:  # nothing has begun: end as a program that waits does
            link.close()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        try:
            link.send(bytes([number]))
        except OSError:  # it has ended: so do we, when we read that
            return

    try:
        for number in before:
            signal.signal(number, forward)
        _ask(link, line, here)
        answer = link.recv(1)
    except OSError:
        answer = b""
    if answer == TAKEN:
        return _outcome(link)
    if answer == REFUSED:
        os.write(2, b"agent-sandbox: the daemon performs as much as it may, and too many others wait; try again later\n")
        return _LOST
    for number, handler in before.items():
        signal.signal(number, handler)
    return None


def _is_ours(link: Link) -> bool:
    """Whether a process of this user listens. Another one must not get our environment and streams, wherever its socket lies."""
    from _socket import SO_PEERCRED, SOL_SOCKET  # who performs the command line itself does without

    return int.from_bytes(link.getsockopt(SOL_SOCKET, SO_PEERCRED, 12)[4:8], sys.byteorder) == os.geteuid()  # pid, uid, gid


def _ask(link: Link, line: list[str], here: int) -> None:
    """Send the request: a message of `kernel.wire`, which is not loaded for this, with the streams and the directory."""
    import marshal  # who performs the command line itself does without
    from _socket import SCM_RIGHTS, SOL_SOCKET

    body = marshal.dumps((stamp(), [os.fsencode(word) for word in line], list(os.environb.items()), _mask()))
    message = len(body).to_bytes(4, "big") + body
    descriptors = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2, here))
    sent = link.sendmsg([message], [(SOL_SOCKET, SCM_RIGHTS, descriptors)])
    if sent < len(message):  # sending nothing fails, too, if all of it was performed meanwhile: then we would perform it again
        link.sendall(memoryview(message)[sent:])


def _detaches(line: list[str], verb: str) -> bool:
    """Whether the program goes on in the background, and so has no terminal: where --detach stands beside the verb, and is surely ours."""
    place = line.index(verb)
    return verb == "run" and bool({"--detach", "-d"} & {*line[:place], *line[place + 1 : place + 2]})


def _outcome(link: Link) -> int:
    """Wait until the command line has ended, and return its exit code."""
    try:
        if link.recv(1) == ENDED and (code := link.recv(1)):
            return code[0]
    except OSError:
        pass
    os.write(2, b"agent-sandbox: the daemon ended before this command did; what it ran was ended, too\n")
    return _LOST


def _state() -> str:
    """The directory of state, as `assembly.Host.here` finds it; empty where that takes more than the environment."""
    chosen, home = os.environ.get("AGENT_SANDBOX_STATE"), os.environ.get("HOME", "")
    if chosen:
        return os.path.abspath(chosen)
    named = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(named):
        return os.path.join(named, "agent-sandbox")
    return os.path.join(os.path.normpath(home), ".local/state/agent-sandbox") if os.path.isabs(home) else ""


def _mask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
