"""The egress program: a zygote loads once, and each run with a network gets a fork of it, which confines itself before it gets its orders.

A fork has one socket to its supervisor, and resolves no name itself: it asks the supervisor, after the rules have allowed the name. When
the supervisor goes, so do the zygote and its forks, and with them the network of every run. The zygote reads nothing but the descriptors
that the supervisor sends, and writes one: the file with the compiled rules of the search.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
from contextlib import suppress

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.egress import orders as link_orders
from agent_sandbox.egress.orders import MOST_ORDER_BYTES, Orders
from agent_sandbox.kernel import wire

if TYPE_CHECKING:
    import ssl
    from typing import NoReturn

    from agent_sandbox.egress.dlp.rules import RuleMatcher

    Loaded = tuple[ssl.SSLContext, RuleMatcher]

_LONGEST_TEXT = 1000


def main() -> None:
    """Load, then fork a process for each link that the supervisor sends, until the supervisor has gone."""
    root, control_fd, supervisor_fd, roots_fd, rules_fd, packages = sys.argv[1:]
    sys.path.remove(root)
    sys.path.extend(path for path in packages.split(os.pathsep) if path and path not in sys.path)
    control, supervisor = socket.socket(fileno=int(control_fd)), int(supervisor_fd)
    kept = int(rules_fd) if rules_fd else None
    wire.close_others((control.fileno(), supervisor, int(roots_fd), *([] if kept is None else [kept])))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    loaded: Loaded | BaseException
    try:
        with open(int(roots_fd), "rb") as file:
            loaded = _load(file.read().decode("ascii", "ignore"), kept)
    except BaseException as error:
        loaded = error
    if kept is not None:
        os.close(kept)
    poller = select.poll()
    poller.register(control, select.POLLIN)
    poller.register(supervisor, select.POLLIN)
    while True:
        ready = dict(poller.poll())
        if supervisor in ready:  # even if a fork of the supervisor holds the other end
            os._exit(0)
        data, links = wire.receive_descriptors(control, 1)
        if not data:
            os._exit(0)
        (link,) = (socket.socket(fileno=each) for each in links)
        if os.fork() == 0:
            control.close()
            _live(link, supervisor, loaded)
        link.close()


def _load(roots: str, kept: int | None) -> Loaded:
    """Load whatever serving needs: later there are no files to load from.

    Return a context that verifies servers with these roots, and the compiled rules of the search.
    """
    from agent_sandbox.egress import confinement, search, server, service  # not earlier: what is missing is reported by the caller

    server.new_authority().context_for("localhost")
    "localhost".encode("idna")
    confinement.compiled()
    loaded = service.verifying(roots), search.compiled_rules(kept)
    gc.collect()
    gc.freeze()  # a collection in a fork would touch, and so copy, every object
    return loaded


def _live(link: socket.socket, supervisor: int, loaded: Loaded | BaseException) -> NoReturn:
    """In a fork: confine this process, send `ready` with the certificate of a new authority, wait for the orders, and serve."""
    try:
        link.send(wire.HERE)  # whose credentials tell the supervisor our pid
        if isinstance(loaded, BaseException):
            raise loaded
        upstream, rules = loaded
        from agent_sandbox.egress import confinement, server, service  # loaded by now

        authority = server.new_authority()
        confinement.confine()
        link_orders.send(link, {"kind": "ready", "certificate": authority.certificate.decode("ascii")})
        message, doors = link_orders.receive(link, most=MOST_ORDER_BYTES)
        service.serve(Orders.decoded(message), doors, authority, upstream, rules, link, supervisor)
    except EOFError:  # no run came of it
        pass
    except BaseException as error:
        link.setblocking(True)
        _fail(link, error)
    finally:
        os._exit(0)


def _fail(link: socket.socket, error: BaseException) -> NoReturn:
    """Tell the supervisor why this process ends."""
    with suppress(OSError):
        link_orders.send(link, {"kind": "failed", "why": f"{type(error).__name__}: {error}"[:_LONGEST_TEXT]})
    os._exit(1)
