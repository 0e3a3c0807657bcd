"""The program `runsc`: where it is, what it can do, and its command line. What it can do is asked of it, never guessed from its version."""

from __future__ import annotations

import os
import re
import subprocess
from shutil import which

from agent_sandbox._fast.functions import lru_cache
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.errors import RuntimeUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

NAME = "runsc"
SET_UP = "/usr/local/lib/agent-sandbox/runsc"  # where `make setup` puts a current one, where the distribution's is too old
PLATFORMS = (
    "systrap",
    "ptrace",
)  # in the order of preference: systrap is the faster one. kvm would need the device inside the guest's walls
ENOUGH = "0.0~20240729.0"  # the oldest version that was tried, and works
REMEDY = f"install runsc {ENOUGH} or later: on Debian 12, apt-get install -t bookworm-backports runsc"
_SECONDS = 20.0  # after which a program that only has to describe itself counts as hanging
_MOST = 1 << 20  # bytes of what it says about itself


@dataclass(frozen=True)
class Runsc:
    """An installed `runsc`: its path, its version as it says it, and its flags and those of `runsc run`."""

    path: str
    version: str
    flags: frozenset[str]
    run_flags: frozenset[str]

    @property
    def lacks(self) -> str:
        """The abilities that this version lacks and a guest needs; empty if it can be tried."""
        wanted = [f"--{name}" for name in ("platform", "network", "ignore-cgroups", "rootless") if name not in self.flags]
        wanted += [f"run --{name}" for name in ("bundle", "pass-fd") if name not in self.run_flags]
        return f"runsc {self.version} is too old: it has no {', '.join(wanted)}" if wanted else ""

    def command(
        self, path: str, *, platform: str, network: str, state: str, bundle: str, log: str, passed: Sequence[int]
    ) -> tuple[str, ...]:
        """Return the command line that runs the container of a bundle. `path` is where the program lies then, `passed` are descriptors."""
        chosen = {
            "root": state,
            "log": log,
            "platform": platform,
            "network": network,
            "file-access": "shared",  # what is written is in the view at once, and not in the user-space kernel, which may be killed
            "overlay2": "none",  # writes go to the view, which captures them
            "host-uds": "none",
            "host-fifo": "none",
        }
        flags = [f"--{name}={value}" for name, value in chosen.items() if name in self.flags]
        return (
            path,
            "--rootless",
            "--ignore-cgroups",
            *flags,
            "run",
            f"--bundle={bundle}",
            *(f"--pass-fd={number}:{number}" for number in passed),
            "guest",
        )


def find(path: str | None) -> Runsc:
    """Return the `runsc` at this path. Without a path, return the first that can be tried: of the search path, or the one set up for us.

    If none can be tried, return the first that there is: it says what it lacks. Raises `RuntimeUnavailable` if there is none that answers.
    """
    places = [path] if path else [which(NAME), SET_UP]
    found = [_described(*_identified(each)) for each in places if each and os.access(each, os.X_OK)]
    if not found:
        raise RuntimeUnavailable(f"{path or NAME} is not installed", missing=(NAME,), hint=REMEDY)
    return next((each for each in found if not each.lacks), found[0])


def _identified(path: str) -> tuple[str, tuple[int, ...]]:
    real = os.path.realpath(path)
    status = os.stat(real)
    return real, (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=4)
def _described(path: str, identity: tuple[int, ...]) -> Runsc:
    version = re.search(r"version (\S+)", _said(path, "--version"))
    return Runsc(path, version[1] if version else "of an unknown version", _flags(_said(path, "flags")), _flags(_said(path, "help", "run")))


def _flags(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"^\s+-([A-Za-z][\w-]*)", text, re.MULTILINE))


def _said(path: str, *words: str) -> str:
    """Return what the program says about itself. It is the machine's own program, and gets nothing of a guest."""
    try:
        done = subprocess.run(
            [path, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_SECONDS,
            env={},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = "does not answer" if isinstance(error, subprocess.TimeoutExpired) else f"cannot be executed: {error.strerror}"
        raise RuntimeUnavailable(f"{path} {why}", missing=(NAME,), hint=REMEDY) from error
    return done.stdout[:_MOST].decode(errors="replace")
