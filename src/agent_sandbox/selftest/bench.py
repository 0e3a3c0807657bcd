"""What the self-test plants outside the sandbox, in a private directory of its own, and takes away again.

Nothing of the user's is written, moved or read: secrets, links and a home are made here, and masked by the same rules as the real ones. A
bench that a killed self-test has left is swept by the next one; every process it starts ends by itself with it, or a few seconds later.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from agent_sandbox._fast.values import dataclass
from agent_sandbox.errors import PolicyError
from agent_sandbox.selftest.boxes import ATTEMPTS, Bare, program
from agent_sandbox.workspace.removal import remove_tree

PREFIX = "agent-sandbox-verify-"
VARIABLE = "AGENT_SANDBOX_VERIFY_TOKEN"  # in our own environment while the self-test runs
SCRIPTS = "attempts"
_NOBODY = 65534


@dataclass(frozen=True)
class Surroundings:
    """What of the user's own is tried, and how: nothing of it is read or left changed."""

    hidden: tuple[str, ...] = ()  # places that the policy hides
    elsewhere: tuple[str, ...] = ()  # directories in which a sandboxed program tries to make a file
    system: bool = False  # whether the policy gives capabilities (--system)


@dataclass(frozen=True)
class Bench:
    """A directory with a project, a home and a denied directory in it. `token` is in every secret that is planted, and nowhere else."""

    path: str
    token: str
    around: Surroundings = Surroundings()

    @property
    def bare(self) -> Bare:
        """The machine without a sandbox, to show that an attempt can succeed."""
        return Bare(self.project, f"{self.project}/{SCRIPTS}")

    @property
    def project(self) -> str:
        """A project with a `.env`, and links that lead to secrets."""
        return f"{self.path}/project"

    @property
    def home(self) -> str:
        """Somebody's home with keys in it, hidden by the rules that hide the user's own."""
        return f"{self.path}/home"

    @property
    def denied(self) -> str:
        """A directory that is denied as `--deny` does it."""
        return f"{self.path}/denied"

    @property
    def secrets(self) -> tuple[str, ...]:
        """The files that must not be read."""
        return (f"{self.home}/.ssh/id_ed25519", f"{self.home}/.aws/credentials", f"{self.project}/.env", f"{self.denied}/plans.txt")

    @property
    def links(self) -> tuple[str, ...]:
        """Names in the project that lead to them."""
        return tuple(f"{self.project}/{name}" for name in ("key", "relative-key", "keys/id_ed25519", "plans/plans.txt"))

    @property
    def setuid(self) -> tuple[str, ...]:
        """As root, a program that runs as nobody whoever starts it; others cannot make one."""
        path = f"{self.path}/setuid-id"
        return (path,) if os.path.exists(path) else ()

    def mark(self) -> str:
        """A new name for a process or a file. Short enough for the kernel's name of a thread."""
        return f"vfy{secrets.token_hex(6)}"

    def tree(self) -> str:
        """A new real directory with files to be harmed."""
        top = tempfile.mkdtemp(prefix="tree-", dir=self.path)
        for name in ("overwrite", "append", "truncate", "remove", "rename", "mode"):
            Path(top, name).write_text("as it was\n")
        return top

    @contextmanager
    def bystander(self, mark: str) -> Iterator[subprocess.Popen[bytes]]:
        """A process of the machine, with a word on its command line and the token in its environment. It ends with us, whatever happens."""
        environment = {"PATH": os.environ.get("PATH", os.defpath), "SECRET": self.token}
        command = ["sh", "-c", "echo ready; read -r line", mark]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
            try:
                assert process.stdout is not None
                process.stdout.readline()  # before it has said so, its memory may still be that of our fork
                yield process
            finally:
                process.kill()


@contextmanager
def set_up(places: Sequence[str], around: Surroundings, *, forget: Callable[[Bench], None]) -> Iterator[Bench]:
    """A bench in the first of these directories where one can be made, for the length of the block.

    `forget` removes what is kept elsewhere of its project; it is also called for benches that were left behind.
    """
    for place in places:
        _sweep(place, forget)
        with suppress(OSError):
            path, held = _made_in(place)
            break
    else:
        raise PolicyError(
            f"there is no directory to set up a test in: tried {', '.join(places) or 'none, since all are hidden'}",
            hint="make /var/tmp or your home writable, and do not --deny both",
        )
    bench = Bench(os.path.realpath(path), f"CANARY-{secrets.token_hex(12)}", around)
    os.environ[VARIABLE] = bench.token
    try:
        _furnish(bench)
        yield bench
    finally:
        del os.environ[VARIABLE]
        _remove(bench, forget)
        os.close(held)


def _furnish(bench: Bench) -> None:
    for secret in bench.secrets:
        os.makedirs(os.path.dirname(secret), mode=0o700, exist_ok=True)
        Path(secret).write_text(f"{bench.token} {os.path.basename(secret)}\n")
    if os.geteuid() == 0 and (path := shutil.which("id")):
        copy = f"{bench.path}/id"
        shutil.copy(path, copy)
        with suppress(OSError):  # a root that is one only in a user namespace may not know nobody; then there is none
            os.chown(copy, _NOBODY, _NOBODY)
            os.chmod(copy, 0o4755)
            os.rename(copy, f"{bench.path}/setuid-id")
    project = Path(bench.project)
    (project / "key").symlink_to(bench.secrets[0])
    (project / "relative-key").symlink_to("../home/.ssh/id_ed25519")
    (project / "keys").symlink_to(f"{bench.home}/.ssh")
    (project / "plans").symlink_to(bench.denied)
    (project / SCRIPTS).mkdir()
    for module in (path.stem for path in ATTEMPTS.glob("*.py") if path.stem not in ("__init__", "frame")):
        (project / SCRIPTS / f"{module}.py").write_text(f"{program(module)}\nimport sys\nmain(*eval(sys.argv[1]))\n")


def _made_in(place: str) -> tuple[str, int]:
    """Make a directory and lock it. Returns its path, and the descriptor that holds the lock.

    Between the two a sweep may take it for one that was left behind: then another is made.
    """
    while True:
        path = tempfile.mkdtemp(prefix=PREFIX, dir=place)
        held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(held, fcntl.LOCK_EX)
        if os.fstat(held).st_nlink:
            return path, held
        os.close(held)


def _sweep(place: str, forget: Callable[[Bench], None]) -> None:
    """Remove benches of ours that nobody holds any more. Each is locked until it is gone."""
    with suppress(OSError):
        for entry in os.scandir(place):
            if entry.name.startswith(PREFIX) and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                with suppress(OSError):
                    held = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                    try:
                        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        _remove(Bench(entry.path, ""), forget)
                    finally:
                        os.close(held)


def _remove(bench: Bench, forget: Callable[[Bench], None]) -> None:
    place, name = os.path.split(bench.path)
    directory = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        forget(bench)
    finally:
        remove_tree(directory, name)
        os.close(directory)


@dataclass(frozen=True)
class Listener:
    """One socket, and where an attempt finds it: family and address."""

    made: socket.socket
    target: tuple[int, Any]

    def heard(self) -> int:
        """How many connections or datagrams have come since it was last asked."""
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
def listening(kind: int, **addresses: tuple[int, Any]) -> Iterator[dict[str, Listener]]:
    """Listen at each address (a family, and what to bind to) for the length of the block."""
    with ExitStack() as stack:
        yield {way: _listen(stack, kind, family, address) for way, (family, address) in addresses.items()}


def _listen(stack: ExitStack, kind: int, family: int, address: Any) -> Listener:
    made = stack.enter_context(socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC))
    made.bind(address)
    if kind == socket.SOCK_STREAM:
        made.listen(16)
    return Listener(made, (int(family), made.getsockname()))
