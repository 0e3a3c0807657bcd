"""A Docker engine for tests and benchmarks: Debian's packages, unpacked, and a daemon with a root and a socket of its own.

Nothing is installed, because the package would start an engine for the whole machine. The daemon has mounts of its own, touches no
firewall and no network, and ends with its block. Only root can have one.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

UNPACKED = Path("/usr/local/lib/agent-sandbox/docker")
PACKAGES = ("docker.io", "containerd", "runc", "tini")
READY_SECONDS, END_SECONDS = 300.0, 60.0  # guards against hanging
_ENDS_WITH_US = ("setpriv", "--pdeathsig", "TERM")
_TOUCHES_NOTHING = ("--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false", "--bridge=none")


class EngineMissing(Exception):
    """Why there is no Docker engine here."""


@contextmanager
def docker_engine() -> Iterator[dict[str, str]]:
    """Run an engine during the block. Yield the variables that lead its clients to it. Raises `EngineMissing`."""
    programs = _programs()
    place = Path(tempfile.mkdtemp(prefix="docker.", dir="/var/tmp"))  # not below /tmp, which may be an overlay or small
    group = f"agent-sandbox-{place.name}"
    variables = {**os.environ, "PATH": os.pathsep.join((*programs, os.environ.get("PATH", os.defpath))), "HOME": str(place)}
    words = [
        f"--config-file={place}/settings.json",  # beside it the engine keeps its key, too
        f"--data-root={place}/root",
        f"--exec-root={place}/exec",
        f"--pidfile={place}/pid",
        f"--host=unix://{place}/socket",
        f"--cgroup-parent=/{group}",
        "--storage-driver=overlay2",
        "--exec-opt=native.cgroupdriver=cgroupfs",
        *_TOUCHES_NOTHING,
    ]
    (place / "settings.json").write_text("{}")
    with open(place / "log", "wb") as log:
        engine = subprocess.Popen(
            [*_ENDS_WITH_US, "unshare", "--mount", "dockerd", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=variables,
            start_new_session=True,
        )
    clients = {"PATH": variables["PATH"], "DOCKER_HOST": f"unix://{place}/socket", "DOCKER_CONFIG": f"{place}/settings"}
    try:
        _await_ready(engine, {**variables, **clients}, place / "log")
        yield clients
    finally:
        with suppress(ProcessLookupError):
            os.kill(engine.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            engine.wait(END_SECONDS)
        with suppress(ProcessLookupError):  # containerd, if the daemon had no time to end it
            os.killpg(engine.pid, signal.SIGKILL)
        engine.wait()
        for made in Path("/sys/fs/cgroup").glob(f"**/{group}"):
            with suppress(OSError):
                made.rmdir()
        shutil.rmtree(place, ignore_errors=True)


def _programs() -> tuple[str, ...]:
    """Return the directories of the engine's programs; none if they are installed. Unpack the packages first if need be."""
    if os.geteuid() != 0:
        raise EngineMissing("only root can run a Docker engine")
    if shutil.which("dockerd") and shutil.which("containerd"):
        return ()
    if not (UNPACKED / "usr/sbin/dockerd").exists():
        _unpack()
    return str(UNPACKED / "usr/sbin"), str(UNPACKED / "usr/bin")


def _unpack() -> None:
    if shutil.which("apt-get") is None:
        raise EngineMissing("no Docker engine is installed, and without apt-get none can be unpacked")
    UNPACKED.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=UNPACKED.parent) as scratch:
        got = subprocess.run(["apt-get", "-qq", "download", *PACKAGES], cwd=scratch, capture_output=True, text=True, check=False)
        archives = sorted(Path(scratch).glob("*.deb"))
        if got.returncode or len(archives) < len(PACKAGES):
            raise EngineMissing(f"the packages {', '.join(PACKAGES)} cannot be had: {got.stderr.strip()[-200:]}")
        for archive in archives:
            subprocess.run(["dpkg", "-x", str(archive), f"{scratch}/unpacked"], check=True)
        with suppress(OSError):  # another has done it meanwhile
            os.rename(f"{scratch}/unpacked", UNPACKED)


def _await_ready(engine: subprocess.Popen[bytes], variables: dict[str, str], log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while subprocess.run(["docker", "info"], stdin=subprocess.DEVNULL, capture_output=True, env=variables, check=False).returncode:
        if engine.poll() is not None or time.monotonic() > deadline:
            raise EngineMissing(f"the Docker engine does not start: {log.read_text(errors='replace').strip()[-300:]}")
        time.sleep(0.1)
