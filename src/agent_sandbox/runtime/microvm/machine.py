"""QEMU: the command line of a machine, and the monitor through which it is saved and restored.

The machine has one processor, a serial port for frames and two 9p devices, and nothing else: no disk, no network card, no display, no
console, no PCI bus. Saved and restored machines must be made of the same words.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from typing import Any

from agent_sandbox._fast.values import dataclass
from agent_sandbox.errors import RuntimeUnavailable

PROGRAM = "qemu-system-x86_64"
EMULATION = "tcg"
HINT = "install the package qemu-system-x86 (apt-get install --no-install-recommends qemu-system-x86)"
_ACCELERATORS = {
    "tcg": "tcg,tb-size=64",  # translated code takes at most 64 MiB; the default is a gigabyte
}
_LONGEST_LINE = 1 << 20
# `mitigations=off`: what they cost under emulation buys nothing there. Without `tsc_early_khz` an emulated kernel hangs while it
# calibrates its clock. `panic=-1` and QEMU's -no-reboot end a machine whose kernel has crashed.
_KERNEL_WORDS = "quiet loglevel=0 panic=-1 reboot=t mitigations=off random.trust_cpu=on cgroup_no_v1=all LANG=C.UTF-8 rdinit=/init"


class MachineFailed(Exception):
    """QEMU refused an order, or ended. The message says why."""


@dataclass(frozen=True)
class Hardware:
    """The fixed properties of a machine: its memory, and how its processor is provided."""

    memory_mib: int
    accelerator: str = EMULATION

    def words(self, *, ram: str, shared: bool, port: int, monitor: int, view: str) -> list[str]:
        """Return QEMU's arguments. `ram` is the file of the memory, `view` the directory that both 9p devices show."""
        return [
            "-M", "microvm,x-option-roms=off,rtc=on,isa-serial=off,memory-backend=ram",
            "-accel", _ACCELERATORS[self.accelerator],
            "-cpu", "max", "-smp", "1", "-m", str(self.memory_mib),
            "-object", f"memory-backend-file,id=ram,size={self.memory_mib}M,mem-path={ram},share={'on' if shared else 'off'}",
            "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
            "-chardev", f"socket,id=port,fd={port}",
            "-device", "virtio-serial-device,max_ports=2", "-device", "virtserialport,chardev=port,name=frames,nr=1",
            "-chardev", f"socket,id=monitor,fd={monitor}", "-mon", "chardev=monitor,mode=control",
            "-fsdev", f"local,id=view,path={view},security_model=passthrough,multidevs=remap",
            "-device", "virtio-9p-device,fsdev=view,mount_tag=view",
            "-fsdev", f"local,id=exact,path={view},security_model=passthrough,multidevs=remap",
            "-device", "virtio-9p-device,fsdev=exact,mount_tag=exact",
        ]  # fmt: skip


def find_program(search_path: str) -> str:
    """Return the path of QEMU. Raises `RuntimeUnavailable` if it is not installed."""
    for directory in search_path.split(os.pathsep):
        path = os.path.join(directory, PROGRAM)
        if os.path.isabs(directory) and os.access(path, os.X_OK):
            return os.path.realpath(path)
    raise RuntimeUnavailable("QEMU is not installed", missing=(PROGRAM,), hint=HINT)


def boot_words(kernel: str, initramfs: str) -> list[str]:
    """Return the arguments with which a machine boots. A restored machine does not read them."""
    return ["-kernel", kernel, "-initrd", initramfs, "-append", f"{_KERNEL_WORDS} tsc_early_khz={_kilohertz()}"]


def _kilohertz() -> int:
    with open("/proc/cpuinfo") as file:
        shown = re.search(r"cpu MHz\s*: ([0-9.]+)", file.read())
    return int(float(shown.group(1)) * 1000) if shown else 2_000_000


class Monitor:
    """The monitor of one machine. Every order has a time limit."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._bytes = sock, b""

    def begin(self, seconds: float) -> None:
        """Wait for QEMU's greeting, and enable its orders."""
        self._deadline = time.monotonic() + seconds
        if "QMP" not in self._message():
            raise MachineFailed("QEMU sent no greeting")
        self._ask("qmp_capabilities")

    def save(self, state: int, seconds: float) -> None:
        """Stop the machine and write the state of its devices to a file. Its memory is in a shared file already."""
        self._deadline = time.monotonic() + seconds
        self._leave_memory_out()
        self._ask("stop")
        self._give("state", state)
        self._ask("migrate", uri="fd:state")
        self._await_migration()

    def restore(self, state: int, seconds: float) -> None:
        """Read the state of the devices from a file, and let the machine run."""
        self._deadline = time.monotonic() + seconds
        self._leave_memory_out()
        self._give("state", state)
        self._ask("migrate-incoming", uri="fd:state")
        self._await_migration()
        self._ask("cont")

    def _leave_memory_out(self) -> None:
        wanted = [{"capability": name, "state": True} for name in ("x-ignore-shared", "events")]
        self._ask("migrate-set-capabilities", capabilities=wanted)

    def _await_migration(self) -> None:
        while True:
            message = self._message()
            if message.get("event") == "MIGRATION" and message["data"]["status"] in ("completed", "failed"):
                if message["data"]["status"] == "failed":
                    raise MachineFailed("QEMU cannot read or write the state of this machine")
                return

    def _give(self, name: str, fd: int) -> None:
        order = json.dumps({"execute": "getfd", "arguments": {"fdname": name}}).encode() + b"\n"
        socket.send_fds(self._socket, [order], [fd])
        self._await_answer("getfd")

    def _ask(self, order: str, **arguments: object) -> None:
        self._socket.sendall(json.dumps({"execute": order, "arguments": arguments}).encode() + b"\n")
        self._await_answer(order)

    def _await_answer(self, order: str) -> None:
        while True:
            message = self._message()
            if "error" in message:
                raise MachineFailed(f"QEMU refuses {order}: {message['error'].get('desc', '')[:200]}")
            if "return" in message:
                return

    def _message(self) -> dict[str, Any]:
        while b"\n" not in self._bytes:
            self._socket.settimeout(max(0.001, self._deadline - time.monotonic()))
            try:
                data = self._socket.recv(65536)
            except TimeoutError:
                raise MachineFailed("QEMU does not answer") from None
            except OSError as error:
                raise MachineFailed(f"QEMU has ended: {error.strerror}") from error
            if not data:
                raise MachineFailed("QEMU has ended")
            self._bytes += data
            if len(self._bytes) > _LONGEST_LINE:
                raise MachineFailed("QEMU sent too long a line")
        line, _, self._bytes = self._bytes.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message
