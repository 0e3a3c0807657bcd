"""Get images from the container engines of this machine, podman and docker. They only hand out archives; they never run anything for us.

An engine may be absent, refuse, or hang: each call has a deadline, and at its end, or after the deadline, everything that
the engine's client has started is killed. As root the client has mounts of its own: podman otherwise leaves one on its storage.
"""

from __future__ import annotations

import os
import secrets
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

from agent_sandbox.engine.images.make import make_image, workplace
from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.policy.image_names import canonical_image
from agent_sandbox.runtime.container.images import ContainerImage, ImageStore, missing

ENGINES = ("podman", "docker")
ANSWER_SECONDS, TRANSFER_SECONDS = 30.0, 1800.0
_CHUNK = 65536
_SAID = 300  # characters of an engine's message that are passed on
ENDING_SECONDS, _PAUSE_SECONDS = 30.0, 0.005
# Indices of fields in /proc/pid/stat; index 0 is the field after the name, which has the number 3.
_FLAGS, _ENVIRONMENT_END = 9 - 3, 51 - 3
_KERNEL_THREAD = 0x200000  # PF_KTHREAD


def fetch_image(
    store: ImageStore, name: str, *, pull: bool = False, announce: Callable[[str], None] = lambda _: None, search_path: str | None = None
) -> ContainerImage:
    """Copy an image from the first engine that has it into the store. With `pull`, an engine may first get it from its registry.

    Raises `RuntimeUnavailable` with what each engine said, and as `make_image` does.
    """
    canonical_image(name)
    reasons = []
    for engine in _present(search_path):
        said = _ask(engine, ANSWER_SECONDS, "image", "inspect", "--format", "{{.Id}}", name)
        if said and pull:
            announce(f"{os.path.basename(engine)} pulls {name}")
            said = _ask(engine, TRANSFER_SECONDS, "pull", "--quiet", name)
        if said:
            reasons.append(f"{os.path.basename(engine)}: {said}")
            continue
        announce(f"{os.path.basename(engine)} exports {name}, which is then unpacked in a sandbox")
        return _copied(store, engine, name)
    raise missing(name, "; ".join(reasons) or f"and neither {' nor '.join(ENGINES)} is installed")


def _present(search_path: str | None) -> Iterator[str]:
    for name in ENGINES:
        if (found := shutil.which(name, path=search_path)) is not None:
            yield found


def _copied(store: ImageStore, engine: str, name: str) -> ContainerImage:
    with workplace(store) as place:
        archive = os.path.join(place, "image.tar")
        if said := _ask(engine, TRANSFER_SECONDS, "save", "--output", archive, name):
            raise RuntimeUnavailable(
                f"{os.path.basename(engine)} cannot export {name!r}: {said}",
                missing=("image",),
                hint="export it yourself, and: image load FILE",
            )
        return make_image(store, archive, names=(name,), source=os.path.basename(engine))


def _ask(engine: str, seconds: float, *words: str) -> str:
    """Run an engine's client. Return "" if it succeeds, else why it does not."""
    mark = f"AGENT_SANDBOX_ASKED={secrets.token_hex(16)}"
    apart = ("unshare", "--mount") if os.geteuid() == 0 and shutil.which("unshare") else ()
    try:
        child = subprocess.Popen(
            [*apart, "/usr/bin/env", mark, engine, *words], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
    except OSError as error:
        return error.strerror or str(error)
    with child:
        try:
            said = _last_words(child, time.monotonic() + seconds)
        except TimeoutError:
            return f"it did not answer within {seconds:.0f} s"
        finally:
            child.kill()  # it may have emptied its environment
            _end_marked(mark.encode())
    if child.returncode == 0:
        return ""
    last = said.decode(errors="replace").strip().rpartition("\n")[2]
    return "".join(each if each.isprintable() else "?" for each in last)[:_SAID] or f"it ended with {child.returncode}"


def _last_words(child: subprocess.Popen[bytes], deadline: float) -> bytes:
    """Wait until a client has ended, and return the end of what it said. Raises `TimeoutError` at the deadline."""
    assert child.stderr is not None
    said, poller = b"", select.poll()
    poller.register(child.stderr, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0:
        if poller.poll(left * 1000):
            data = os.read(child.stderr.fileno(), _CHUNK)
            if not data:
                break
            said = (said + data)[-_CHUNK:]
    try:
        child.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    return said


def _end_marked(mark: bytes) -> None:
    """Kill every process with this variable: the engine's client, and what it has left behind, such as the process that podman pauses.

    One that starts another program just now shows no environment, and one may fork before it is killed. So it is looked until nothing new
    is found, for some seconds.
    """
    give_up_at = time.monotonic() + ENDING_SECONDS
    while not _all_ended(mark) and time.monotonic() < give_up_at:
        time.sleep(_PAUSE_SECONDS)


def _all_ended(mark: bytes) -> bool:
    """Kill the marked processes of one look at the machine. Return whether there was none, and none that may be one."""
    none = True
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            process = os.pidfd_open(int(name))
        except OSError:  # it has gone
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as environment:
                content = environment.read(1 << 20)
            if mark in content.split(b"\0"):
                none = False
                signal.pidfd_send_signal(process, signal.SIGKILL)
            elif not content and _starts_a_program(name):
                none = False
        except OSError:  # it has gone, or is somebody else's
            continue
        finally:
            os.close(process)
    return none


def _starts_a_program(pid: str) -> bool:
    """Whether a process is in the middle of execve(2): it has memory already, and no environment in it yet. Raises OSError."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    state, flags, environment_end = fields[0], int(fields[_FLAGS]), int(fields[_ENVIRONMENT_END])
    return state not in (b"Z", b"X") and not flags & _KERNEL_THREAD and not environment_end
