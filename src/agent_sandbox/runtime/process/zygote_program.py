"""The zygote program: import what guests need, then be the keeper of runs, each forked from here.

Everything imported here is copied, fork by fork, into every init and guest: keep it small. Modules of the supervisor's side do not belong
here.

What guests of one zygote share: the address-space layout and the seed of string hashes. Neither is a wall here.
"""

from __future__ import annotations

import contextlib  # noqa: F401  # this and the next of its kind: most programs in Python need it, and find it loaded
import functools  # noqa: F401
import gc
import importlib
import os
import signal  # noqa: F401
import socket
import sys

from agent_sandbox.kernel import keeper, seccomp, setup_helper, wire
from agent_sandbox.runtime.guest import entry


def begin() -> tuple[socket.socket, int, list[str]]:
    """Read the arguments that every zygote has. Return the socket to the supervisor, the supervisor's pidfd, and the remaining words."""
    root, link_fd, supervisor_fd, packages, *words = sys.argv[1:]
    sys.path.remove(root)
    sys.path.extend(path for path in packages.split(os.pathsep) if path and path not in sys.path)
    link, supervisor = socket.socket(fileno=int(link_fd)), int(supervisor_fd)
    wire.close_others((link.fileno(), supervisor))  # an application may hold descriptors that its children inherit
    for fd in (link.fileno(), supervisor):
        os.set_inheritable(fd, False)
    os.chdir("/")
    with open("/proc/self/comm", "w") as comm:  # if we were executed from a descriptor, our name is its number
        comm.write(os.path.basename(sys.executable))
    return link, supervisor, words


def main() -> None:
    """Import the modules to preload, then serve as keeper until the supervisor closes the link or dies."""
    link, supervisor, preload = begin()
    for name in preload:
        try:
            importlib.import_module(name)
        except BaseException as error:
            link.send(f"preload {name}: {error}".encode(errors="replace")[:4096])
            return
    for processes in (True, False):
        seccomp.compile_filter(processes=processes, execute=processes, system=False)
    compile("", "", "exec")  # the first call makes a hundred types, which every guest would make again: 1 ms
    helper = setup_helper.load()
    gc.collect()
    gc.freeze()  # a collection in a guest would touch, and so copy, every object of the zygote
    gc.disable()  # in the zygote and in every init, which make no cycles; a guest turns it on before its program comes
    keeper.serve(link, supervisor, entry.run, helper=helper)
