"""The zygote program of machines: load the template into sealed memory, then serve as keeper. Every run is forked from here."""

from __future__ import annotations

import fcntl
import gc
import os

from agent_sandbox.kernel import keeper, seccomp
from agent_sandbox.runtime.microvm.driver import MachineGuest
from agent_sandbox.runtime.microvm.machine import Hardware
from agent_sandbox.runtime.microvm.template import Unusable, read
from agent_sandbox.runtime.process.zygote_program import begin

_LOWEST = 200  # the number of the first descriptor that guests keep: they use lower ones themselves


def main() -> None:
    """Load a template, then serve as keeper. Arguments: those of every zygote, then QEMU's path and the template's directory."""
    link, supervisor, (qemu, directory) = begin()
    try:
        template = read(directory)
        if template is None:
            raise Unusable("it has been removed")
        descriptors = []
        for fd in template.load():
            descriptors.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _LOWEST))
            os.close(fd)
    except (Unusable, OSError) as error:
        link.send(f"unusable {error}".encode(errors="replace")[:4096])
        return
    seccomp.compile_filter(processes=True, execute=True, system=False)
    gc.collect()
    gc.freeze()
    gc.disable()
    guest = MachineGuest(qemu, Hardware(template.memory_mib, template.accelerator), *descriptors)
    keeper.serve(link, supervisor, guest)
