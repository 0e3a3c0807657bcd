"""What the zygote runs: import what guests will need, then be the keeper of runs, each forked from here.

Everything imported here is copied, fork by fork, into every init and guest: keep it small. Modules of the supervisor's side do not belong
here.

What guests of one zygote share: the address-space layout and the seed of string hashes. Neither is a wall here.
"""

from __future__ import annotations

import gc
import importlib
import os
import random  # noqa: F401  guests reseed it, and end with the other: better loaded once than in each of them
import socket
import sys
import threading  # noqa: F401

from agent_sandbox.kernel import keeper, seccomp
from agent_sandbox.runtime import guest


def main() -> None:
    """The zygote program. Ends when the supervisor closes the link or dies."""
    root, link_fd, supervisor_fd, packages, *preload = sys.argv[1:]
    sys.path.remove(root)
    sys.path.extend(path for path in packages.split(os.pathsep) if path and path not in sys.path)
    link, supervisor = socket.socket(fileno=int(link_fd)), int(supervisor_fd)
    with open("/proc/self/comm", "w") as comm:  # executed from a descriptor, we would be called by its number
        comm.write(os.path.basename(sys.executable))
    os.set_inheritable(supervisor, False)
    link.set_inheritable(False)
    for name in preload:
        try:
            importlib.import_module(name)
        except BaseException as error:
            link.send(f"preload {name}: {error}".encode(errors="replace")[:4096])
            return
    try:
        identity = keeper.identify()
        for processes in (True, False):
            seccomp.compile_filter(processes=processes, execute=processes, system=False)
    except OSError as error:
        link.send((error.strerror or str(error)).encode(errors="replace")[:4096])
        return
    gc.collect()
    gc.freeze()  # a collection in a guest would touch, and so copy, every object of the zygote
    gc.disable()  # here and in every init, which make no cycles; a guest has it back before its program comes
    link.send(b"ready")
    keeper.Keeper(link, supervisor, identity, guest.run).serve()
