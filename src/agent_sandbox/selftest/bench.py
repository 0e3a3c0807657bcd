"""The test bench outside the sandbox: decoys in a private directory, and observation of processes and real files.

No file of the user is written, moved or read. The bench makes secrets, links and a home, which are hidden by the same rules as the user's
own. If a self-test is killed, the next self-test removes its bench. Every process of a self-test ends by itself, at the latest a few
seconds after the self-test.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from agent_sandbox._fast.values import dataclass
from agent_sandbox.errors import PolicyError, SandboxError
from agent_sandbox.kernel import forks
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.selftest.boxes import ATTEMPTS, Bare, program
from agent_sandbox.workspace.beneath import remove_tree

PREFIX = "agent-sandbox-verify-"
VARIABLE = "AGENT_SANDBOX_VERIFY_TOKEN"  # set in our own environment while the self-test runs
SCRIPTS = "attempts"
_NOBODY = 65534


@dataclass(frozen=True)
class Surroundings:
    """Real places of the user: hidden paths to open but not to read, and directories in which a sandboxed program tries to make a file."""

    hidden: tuple[str, ...] = ()  # paths that the policy hides
    elsewhere: tuple[str, ...] = ()  # directories in which a sandboxed program tries to create a file
    system: bool = False  # whether the policy gives capabilities (--system)


@dataclass(frozen=True)
class DecoyBench:
    """A directory with a project, a home and a denied directory. `token` is a random text that is part of every planted secret."""

    path: str
    token: str
    around: Surroundings = Surroundings()

    @property
    def bare(self) -> Bare:
        """The machine without a sandbox, to show that an attempt can succeed."""
        return self.behind(None)

    def behind(self, wall: Callable[[], None] | None) -> Bare:
        """Return the machine with a single wall of a sandbox: `wall` puts it around the process that calls it."""
        return Bare(self.project, f"{self.project}/{SCRIPTS}", wall)

    @property
    def project(self) -> str:
        """The project, with a `.env` and links to secrets."""
        return f"{self.path}/project"

    @property
    def home(self) -> str:
        """A home with keys in it, hidden by the same rules as the user's own."""
        return f"{self.path}/home"

    @property
    def denied(self) -> str:
        """A directory that is denied as by `--deny`."""
        return f"{self.path}/denied"

    @property
    def secrets(self) -> tuple[str, ...]:
        """The files that must not be read."""
        return (f"{self.home}/.ssh/id_ed25519", f"{self.home}/.aws/credentials", f"{self.project}/.env", f"{self.denied}/plans.txt")

    @property
    def links(self) -> tuple[str, ...]:
        """Links in the project that lead to the secrets."""
        return tuple(f"{self.project}/{name}" for name in ("key", "relative-key", "keys/id_ed25519", "plans/plans.txt"))

    @property
    def setuid(self) -> tuple[str, ...]:
        """A setuid program that runs as nobody. Only root can make one; empty otherwise."""
        path = f"{self.path}/setuid-id"
        return (path,) if os.path.exists(path) else ()

    def mark(self) -> str:
        """Return a new name for a process or a file, short enough for the kernel's name of a thread."""
        return f"vfy{secrets.token_hex(6)}"

    def tree(self) -> str:
        """Make a new real directory with files that an attempt will try to damage. Returns its path."""
        top = tempfile.mkdtemp(prefix="tree-", dir=self.path)
        for name in ("overwrite", "append", "truncate", "remove", "rename", "mode"):
            Path(top, name).write_text("as it was\n")
        return top

    @contextmanager
    def bystander(self, mark: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a process outside the sandbox during the block, with `mark` on its command line and the token in its environment."""
        environment = {"PATH": os.environ.get("PATH", os.defpath), "SECRET": self.token}
        command = ["sh", "-c", "echo ready; read -r line", mark]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
            try:
                assert process.stdout is not None
                process.stdout.readline()  # before this line, its memory may still be that of our fork
                yield process
            finally:
                process.kill()


@contextmanager
def set_up(places: Sequence[str], around: Surroundings, *, forget: Callable[[DecoyBench], None]) -> Iterator[DecoyBench]:
    """Set up a bench in the first of these directories in which it can be made, and remove the bench after the block.

    `forget` removes data about the bench's project that is stored elsewhere; it is also called for benches that a killed self-test left.
    Raises `PolicyError` if the bench can be made in none of the directories.
    """
    for place in places:
        _sweep(place, forget)
        with suppress(OSError):
            path, lock = _make_locked(place)
            break
    else:
        raise PolicyError(
            f"there is no directory to set up a test in: tried {', '.join(places) or 'none, since all are hidden'}",
            hint="make /var/tmp or your home writable, and do not --deny both",
        )
    bench = DecoyBench(os.path.realpath(path), f"CANARY-{secrets.token_hex(12)}", around)
    os.environ[VARIABLE] = bench.token
    held = -1
    try:
        _plant(bench)
        # Held open, and inheritable, before any sandbox is made: a keeper is forked early, and inherits what is open then.
        held = os.open(bench.secrets[0], os.O_RDONLY)
        os.set_inheritable(held, True)
        yield bench
    finally:
        del os.environ[VARIABLE]
        if held >= 0:
            os.close(held)
        _remove(bench, forget)
        os.close(lock)


def _plant(bench: DecoyBench) -> None:
    for secret in bench.secrets:
        os.makedirs(os.path.dirname(secret), mode=0o700, exist_ok=True)
        Path(secret).write_text(f"{bench.token} {os.path.basename(secret)}\n")
    if os.geteuid() == 0 and (path := shutil.which("id")):
        copy = f"{bench.path}/id"
        shutil.copy(path, copy)
        with suppress(OSError):  # a root inside a user namespace may have no mapping for nobody; then there is no such program
            os.chown(copy, _NOBODY, _NOBODY)
            os.chmod(copy, 0o4755)
            os.rename(copy, f"{bench.path}/setuid-id")
    project = Path(bench.project)
    (project / "key").symlink_to(bench.secrets[0])
    (project / "relative-key").symlink_to("../home/.ssh/id_ed25519")
    (project / "keys").symlink_to(f"{bench.home}/.ssh")
    (project / "plans").symlink_to(bench.denied)
    (project / SCRIPTS).mkdir()
    for module in (path.stem for path in ATTEMPTS.glob("*.py") if path.stem != "__init__"):
        (project / SCRIPTS / f"{module}.py").write_text(f"{program(module)}\nimport sys\nmain(*eval(sys.argv[1]))\n")


def _make_locked(place: str) -> tuple[str, int]:
    """Make a directory and lock it. Returns its path, and the descriptor that holds the lock.

    Before the lock is taken, another self-test may take the directory for an abandoned bench and remove it. Then another directory is made.
    """
    while True:
        path = tempfile.mkdtemp(prefix=PREFIX, dir=place)
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            return path, lock
        os.close(lock)


def _sweep(place: str, forget: Callable[[DecoyBench], None]) -> None:
    """Remove benches of this user that no process has locked. This process locks each bench until the bench is removed."""
    with suppress(OSError):
        for entry in os.scandir(place):
            if entry.name.startswith(PREFIX) and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                with suppress(OSError):
                    lock = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                    try:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        _remove(DecoyBench(entry.path, ""), forget)
                    finally:
                        os.close(lock)


def _remove(bench: DecoyBench, forget: Callable[[DecoyBench], None]) -> None:
    place, name = os.path.split(bench.path)
    directory = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        forget(bench)
    finally:
        remove_tree(directory, name)
        os.close(directory)


@dataclass(frozen=True)
class DecoyListener:
    """One listening socket, and its family and address, with which an attempt can reach it."""

    made: socket.socket
    target: tuple[int, Any]

    def heard(self) -> int:
        """Return the number of connections or datagrams since the last call."""
        count = 0
        while True:
            try:
                if self.made.type == socket.SOCK_STREAM:
                    self.made.accept()[0].close()
                else:
                    self.made.recv(65536)
            except BlockingIOError:
                return count
            count += 1


@contextmanager
def listening(kind: int, **addresses: tuple[int, Any]) -> Iterator[dict[str, DecoyListener]]:
    """Listen at each address for the length of the block, and yield the listeners by name.

    An address is a family, and the address to bind.
    """
    with ExitStack() as stack:
        yield {way: _listen(stack, kind, family, address) for way, (family, address) in addresses.items()}


def _listen(stack: ExitStack, kind: int, family: int, address: Any) -> DecoyListener:
    listener = stack.enter_context(socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC))
    listener.bind(address)
    if kind == socket.SOCK_STREAM:
        listener.listen(16)
    return DecoyListener(listener, (int(family), listener.getsockname()))


def named(mark: str) -> list[int]:
    """Return the pids of all processes with this name on the machine, including those in sandboxes."""
    pids = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if Path("/proc", pid, "comm").read_text().rstrip("\n") == mark:
                pids.append(int(pid))
    return pids


def status_of(pid: int) -> dict[str, str]:
    """Return the status of a process from the machine's own /proc."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def descendants(pid: int) -> dict[int, str]:
    """Return the descendants of a process, each with its start time, to tell it from a later process with the same pid."""
    parents, began = {}, {}
    for other in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if fields := _stat(other):
            parents[other], began[other] = int(fields[1]), fields[19]
    processes: dict[int, str] = {}
    below = [pid]
    while below:
        children = [child for child, parent in parents.items() if parent in below]
        processes |= {child: began[child] for child in children}
        below = children
    return processes


def still_there(processes: dict[int, str]) -> dict[int, str]:
    """Return the processes that still run, of those given by pid and start time."""
    return {pid: began for pid, began in processes.items() if (fields := _stat(pid)) and fields[19] == began and fields[0] != "Z"}


def _stat(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # the name in parentheses may itself contain spaces and parentheses


def session_of(pid: int) -> int:
    """Return the session of a process."""
    return int(_stat(pid)[3])


def environment_address(pid: int) -> int:
    """Return the memory address at which the environment of a process begins."""
    return int(_stat(pid)[47])


def end(pids: Iterable[int]) -> None:
    """Kill processes that an attempt left outside a sandbox."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def until(condition: Callable[[], object], seconds: float) -> bool:
    """Wait for a condition. Returns whether it came true within this time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def snapshot(top: str) -> dict[str, tuple[int, int, str]]:
    """Return mode, link count and content of each file below a directory."""
    entries = {}
    for directory, names, files in os.walk(top):
        for name in (*names, *files):
            path = Path(directory, name)
            status = path.lstat()
            entries[str(path.relative_to(top))] = (status.st_mode, status.st_nlink, path.read_text() if path.is_file() else "")
    return entries


T = TypeVar("T")


@contextmanager
def aside(work: Callable[[], T]) -> Iterator[Callable[[], T]]:
    """Run the work in a forked child, and yield a function that waits for the result of the work.

    That function raises `SandboxError` if the work raised an error, or ended without a result. At the end of the block, the child
    gets SIGTERM and is waited for.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC)
    blocked = forks.hold_signals()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _work(work, writing, blocked)
    os.close(writing)
    try:
        forks.release_signals(blocked)
        with os.fdopen(reading, "rb") as pipe:

            def result() -> T:
                value: T = _received(pipe.read())
                return value

            yield result
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)


def _work(work: Callable[[], Any], writing: int, mask: set[int]) -> None:
    """Do the work in the forked child. Never returns: a return would run the parent's `with` and `finally` blocks in the child."""
    code = 1
    try:
        forks.release_signals(mask)
        sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGTERM)  # unwind, too, if the parent dies
        try:
            answer: tuple[bool, Any] = True, work()
        except SandboxError as error:
            answer = False, (error.message, error.hint)
        except Exception as error:
            answer = False, (f"{type(error).__name__}: {error}", "")
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(answer, pipe)
        code = 0
    except BaseException:  # an interrupt, or a closed pipe: the work is unwound, and the parent sees an empty answer
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
