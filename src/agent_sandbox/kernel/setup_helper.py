"""The compiled helper that sets most guests up: find it, load it, and start inits with it. See `helper/setup.c`.

It is compiled when the package is installed, if there is a C compiler. Without it everything works, and a sandbox costs more processor
time.
"""

from __future__ import annotations

import ctypes
import os

from agent_sandbox._fast.encoding import sha256
from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.kernel import landlock, seccomp
from agent_sandbox.kernel.setup_script import PROTOCOL, filter_number

if TYPE_CHECKING:
    from collections.abc import Sequence

_HERE = os.path.dirname(os.path.abspath(__file__))
LIBRARY, SOURCES = os.path.join(_HERE, "libsetup_helper.so"), os.path.join(_HERE, "helper")
GUEST, WATCH = 2, 3  # kinds of a handover, as in helper/helper.h; any other is a request that is no script
_MOST_DESCRIPTORS = 128


class _Seat(ctypes.Structure):
    """struct seat."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("control", "payload", "supervisor", "keeper", "userns")),
        ("stdio", ctypes.c_int32 * 3),
        ("handled", ctypes.c_uint64),
    )


class Handover(ctypes.Structure):
    """struct handover: where a child of the helper goes on in Python."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("kind", "python", "guest", "layers")),
        ("length", ctypes.c_uint32),
        ("count", ctypes.c_int32),
        ("_descriptors", ctypes.c_int32 * _MOST_DESCRIPTORS),
        ("began", ctypes.c_double),
        ("deadline", ctypes.c_double),
        ("_notes", ctypes.c_void_p),
        ("_notes_length", ctypes.c_uint32),
    )
    kind: int
    python: int
    guest: int
    layers: int
    length: int
    count: int
    began: float
    deadline: float

    @property
    def in_guest(self) -> bool:
        """Whether this child is a confined guest, which waits for its program."""
        return self.kind == GUEST

    @property
    def in_run(self) -> bool:
        """Whether this child is the init of a guest that runs; else it is one whose request is not a script."""
        return self.kind == WATCH

    @property
    def descriptors(self) -> list[int]:
        """The descriptors that came with a message that is not a script."""
        return list(self._descriptors[: self.count])

    @property
    def notes(self) -> bytes:
        """The settings of the watch over a longer run."""
        return ctypes.string_at(self._notes, self._notes_length)


class Helper:
    """The helper, loaded into a keeper."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._begin = library.setup_begin
        self._begin.argtypes = (ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p)
        self._begin.restype = ctypes.c_long
        self._keep_filter = library.setup_keep_filter
        self._keep_filter.argtypes = (ctypes.c_uint32, ctypes.c_char_p, ctypes.c_uint32)
        self.abi = landlock.abi()
        for processes, execute in ((True, True), (False, False)):
            code = seccomp.compile_filter(processes=processes, execute=execute, system=False).code
            if self._keep_filter(filter_number(processes=processes, execute=execute), code, len(code) // 8) != 0:
                raise OSError(f"the setup helper keeps no filter of {len(code)} bytes")

    def begin(
        self, namespaces: int, descriptors: tuple[int, int, int, int], userns: int | None, stdio: Sequence[int], handled: int
    ) -> tuple[int, Handover]:
        """Fork an init into these namespaces. Return its pid; 0 in a child that goes on in Python, as the handover says. Raises OSError.

        `descriptors` are those of a `Seat`, in its order; `handled` are the signals that have handlers, a bit for each.
        """
        streams = (ctypes.c_int32 * 3)(*(stdio or (-1, -1, -1)))
        seat = _Seat(*descriptors, -1 if userns is None else userns, streams, handled)
        handover = Handover()
        child = self._begin(ctypes.addressof(seat), namespaces, ctypes.addressof(handover))
        if child < 0:
            raise OSError(-child, os.strerror(-child))
        return child, handover


def load() -> Helper | None:
    """Return the helper; None if it was not compiled, or not from these sources."""
    try:
        library = ctypes.PyDLL(LIBRARY)
        library.setup_sources.restype = ctypes.c_char_p
        fits = library.setup_protocol() == PROTOCOL and library.setup_sources() == sources_digest().encode()
        return Helper(library) if fits else None
    except (OSError, AttributeError):
        return None


def sources_digest() -> str:
    """Return the digest of the helper's sources. Raises OSError."""
    digest = sha256()
    for name in sorted(os.listdir(SOURCES)):
        if name.endswith((".c", ".h")):
            with open(os.path.join(SOURCES, name), "rb") as file:
                digest.update(b"%b\0%b\0" % (name.encode(), file.read()))
    return str(digest.hexdigest())
