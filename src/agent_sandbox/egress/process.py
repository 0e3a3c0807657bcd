"""The egress program: a zygote loads once, and each run with a network gets a fork of it, which confines itself before it gets its orders.

A fork has one socket to its supervisor, and resolves no name itself: it asks the supervisor, after the rules have allowed the name. When
the supervisor goes, so do the zygote and its forks, and with them the network of every run. The zygote reads nothing but the descriptors
that the supervisor sends, and writes one: the file with the compiled rules of the search.

A run waits for the certificate of its authority, and for nothing else. So the first fork is made before the rest is loaded, and loads it
itself while the program starts. The zygote loads it for the second fork, or when nothing else is to be done; if it is told that there will
be `once` a fork, it does not.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from importlib.machinery import PathFinder

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.egress.frames import EQUIP, receive, send
from agent_sandbox.kernel import wire

if TYPE_CHECKING:
    import ssl
    from typing import NoReturn

    from agent_sandbox.egress.dlp.rules import RuleMatcher

    Loaded = tuple[ssl.SSLContext, RuleMatcher]

_NEEDED = ("cryptography", "h2", "re2")  # packages of the extra `network` without which nothing is served
_IDLE_SECONDS = 1.0  # after which the zygote loads what later forks share, unless there will be none
_LONGEST_TEXT = 1000


def main() -> None:
    """Load, and fork a process for each link that the supervisor sends, until the supervisor has gone."""
    gc.disable()  # most of what is made here stays
    root, control_fd, supervisor_fd, packages, *once = sys.argv[1:]
    sys.path.remove(root)
    sys.path.extend(path for path in packages.split(os.pathsep) if path and path not in sys.path)
    control, supervisor = socket.socket(fileno=int(control_fd)), int(supervisor_fd)
    equipment = Equipment()
    wire.close_others((control.fileno(), supervisor))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    with suppress(Exception):  # a fork meets the same error, and reports it
        from agent_sandbox.egress import authority  # noqa: F401  # the forks share it
    poller = select.poll()
    poller.register(control, select.POLLIN)
    poller.register(supervisor, select.POLLIN)
    forked = False
    while True:
        ready = dict(poller.poll(_IDLE_SECONDS * 1000 if equipment.given and not equipment.complete and not once else None))
        if supervisor in ready:  # even if a fork of the supervisor holds the other end
            os._exit(0)
        if not ready:
            equipment.load_shared()
            continue
        order, descriptors = wire.receive_descriptors(control, 1)
        if not order:
            os._exit(0)
        if order == EQUIP:
            equipment.given = tuple(descriptors)
            continue
        (link,) = (socket.socket(fileno=each) for each in descriptors)
        if forked:
            equipment.load_shared()
        forked = True
        if os.fork() == 0:
            control.close()
            _live(link, supervisor, equipment)
        link.close()


class Equipment:
    """Everything that serving needs besides an authority: the modules, a context that verifies servers, and the compiled rules."""

    def __init__(self) -> None:
        self.given: tuple[int, ...] = ()  # descriptors of the certificates that the machine trusts, and of the file with compiled rules
        self._loaded: Loaded | BaseException | None = None

    @property
    def complete(self) -> bool:
        """Whether everything was loaded, or failed to be."""
        return self._loaded is not None

    def load(self) -> Loaded:
        """Load everything, unless that was done. Closes the descriptors. Raises what went wrong, each time."""
        if self._loaded is None:
            try:
                self._loaded = self._load()
            except BaseException as error:
                self._loaded = error
            wire.close_all(self.given)
        if isinstance(self._loaded, BaseException):
            raise self._loaded
        return self._loaded

    def load_shared(self) -> None:
        """Load everything in the zygote, for all later forks. What goes wrong is reported by them."""
        if not self.complete:
            with suppress(BaseException):
                _, rules = self.load()
                rules.compile()
            gc.collect()
            gc.freeze()  # a collection in a fork would touch, and so copy, every object

    def _load(self) -> Loaded:
        from agent_sandbox.egress import confinement, search, service  # not earlier: no run waits for them
        from agent_sandbox.egress.authority import new_authority

        new_authority().context_for("localhost")
        "localhost".encode("idna")
        confinement.compiled()
        roots, *rules = self.given
        text = os.pread(roots, os.fstat(roots).st_size, 0).decode("ascii", "ignore")
        return service.verifying(text), search.compiled_rules(rules[0] if rules else None)


def _live(link: socket.socket, supervisor: int, equipment: Equipment) -> NoReturn:
    """In a fork: send the certificate of a new authority, confine this process, send `ready`, wait for the orders, and serve."""
    try:
        link.send(wire.HERE)  # whose credentials tell the supervisor our pid
        for name in _NEEDED:
            if name not in sys.modules and PathFinder.find_spec(name) is None:
                raise ModuleNotFoundError(f"No module named {name!r}")
        from agent_sandbox.egress.authority import new_authority  # not earlier: what is missing is reported here

        authority = new_authority()
        send(link, {"kind": "authority", "certificate": authority.certificate.decode("ascii")})
        upstream, rules = equipment.load()
        from agent_sandbox.egress import confinement, orders, service  # loaded by now

        gc.freeze()
        gc.enable()
        confinement.confine()
        send(link, {"kind": "ready"})
        service.rehearse(authority, upstream, rules)
        message, doors = receive(link, most=orders.MOST_ORDER_BYTES)
        service.serve(orders.Orders.decoded(message), doors, authority, upstream, rules, link, supervisor)
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
        send(link, {"kind": "failed", "why": f"{type(error).__name__}: {error}"[:_LONGEST_TEXT]})
    os._exit(1)
