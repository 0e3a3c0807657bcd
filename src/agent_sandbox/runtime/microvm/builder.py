"""Make a template: boot a machine once, wait until its agent is ready, and save it. It takes some seconds, or a minute on a busy machine.

Nothing untrusted runs here: our own agent, the distribution's kernel, and the modules that the policy preloads.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator

from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.runtime.microvm import frames, initramfs, template
from agent_sandbox.runtime.microvm.frames import Garbled, PortReader
from agent_sandbox.runtime.microvm.libraries import mapped_by
from agent_sandbox.runtime.microvm.machine import Hardware, MachineFailed, Monitor, boot_words
from agent_sandbox.runtime.microvm.template import FACTS, RAM, STATE, Recipe, Template

BOOT_SECONDS = 240.0  # under emulation, on a busy machine
SAVE_SECONDS = 60.0
ARCHIVE = "initramfs"
_FIRMWARE = ("/usr/share/qemu", "/usr/share/seabios", "/usr/lib/ipxe/qemu")


def build(recipe: Recipe, directory: str, progress: Callable[[str], None], *, seconds: float = BOOT_SECONDS) -> None:
    """Make a template in this directory. `progress` is called with a line about each step. Raises `RuntimeUnavailable`, OSError."""
    progress("collecting the interpreter")
    contents = initramfs.collect(recipe.preload)
    archive = os.path.join(directory, ARCHIVE)
    with open(archive, "xb") as file:
        file.write(initramfs.build(recipe.kernel, contents, recipe.preload))
    state, empty = (os.path.join(directory, name) for name in (STATE, "empty"))
    os.mkdir(empty)
    ram = os.memfd_create("microvm-ram", os.MFD_CLOEXEC)  # not a file on disk: when a disk is full, QEMU dies by a bus error
    try:
        os.truncate(ram, recipe.memory_mib << 20)
        libraries = _boot_and_save(recipe, directory, ram, progress, seconds)
        checksum = template.pack_ram(ram, os.path.join(directory, RAM))
    finally:
        os.close(ram)
    os.unlink(archive)
    os.rmdir(empty)
    made = Template(
        directory, recipe.memory_mib, recipe.accelerator, checksum, template.checksum_of(state), os.stat(state).st_size, libraries
    )
    facts = {name: value for name, value in vars(made).items() if name != "directory"}
    with open(os.path.join(directory, FACTS), "x") as words:
        words.write(json.dumps(facts))
        words.flush()
        os.fsync(words.fileno())


def _boot_and_save(recipe: Recipe, directory: str, ram: int, progress: Callable[[str], None], seconds: float) -> tuple[str, ...]:
    """Boot the machine, save its state, and return the files that QEMU uses."""
    archive, state, empty = (os.path.join(directory, name) for name in (ARCHIVE, STATE, "empty"))
    hardware = Hardware(recipe.memory_mib, recipe.accelerator)
    progress(f"booting Linux {recipe.kernel.version} ({'emulated' if recipe.accelerator == 'tcg' else recipe.accelerator})")
    with _started(recipe, hardware, ram, empty, archive) as (process, port, monitor):
        try:
            monitor.begin(seconds)
            _await_agent(port, seconds)
            libraries = _files_of(process.pid)
            progress("saving the machine")
            with open(state, "xb") as file:
                monitor.save(file.fileno(), SAVE_SECONDS)
        except (MachineFailed, Garbled, TimeoutError) as error:
            raise RuntimeUnavailable(f"the virtual machine does not boot: {error}", missing=("template",), hint=_HINT) from error
    return libraries


_HINT = "try another kernel: name its directory in AGENT_SANDBOX_KERNEL"


@contextlib.contextmanager
def _started(
    recipe: Recipe, hardware: Hardware, ram: int, view: str, archive: str
) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket, Monitor]]:
    """Start QEMU, and end it with the block. It ends with us, even if we are killed."""
    port, theirs = socket.socketpair()
    control, other = socket.socketpair()
    with port, theirs, control, other:
        words = hardware.words(ram=f"/proc/self/fd/{ram}", shared=True, port=theirs.fileno(), monitor=other.fileno(), view=view)
        process = subprocess.Popen(
            [recipe.qemu, *words, *boot_words(recipe.kernel.image, archive)],
            env={"PATH": "/usr/bin:/bin"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(ram, theirs.fileno(), other.fileno()),
            preexec_fn=lambda: sc.prctl(sc.PR_SET_PDEATHSIG, 9),
        )
        theirs.close()
        other.close()
        try:
            yield process, port, Monitor(control)
        finally:
            process.kill()
            process.wait()


def _await_agent(port: socket.socket, seconds: float) -> None:
    deadline, reader = time.monotonic() + seconds, PortReader(frames.FROM_AGENT)
    while True:
        port.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            data = port.recv(65536)
        except TimeoutError:
            raise MachineFailed(f"its agent did not answer within {seconds:.0f} seconds") from None
        if not data:
            raise MachineFailed("it ended while it booted")
        reader.feed(data)
        while (each := reader.next()) is not None:
            if each[0] == frames.FAILED:
                raise MachineFailed(each[1].decode(errors="replace"))
            if each[0] == frames.BOOTED:
                return


def _files_of(pid: int) -> tuple[str, ...]:
    """Return the program, libraries and modules that a running QEMU has mapped, and its firmware."""
    firmware = next((path for place in _FIRMWARE if os.path.isfile(path := os.path.join(place, "bios-microvm.bin"))), None)
    return (*sorted(mapped_by(pid)), *([] if firmware is None else [firmware]))
