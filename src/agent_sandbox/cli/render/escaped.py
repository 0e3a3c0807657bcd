"""Output of a program without a terminal, on a terminal of ours: control characters are escaped."""

from __future__ import annotations

import codecs
import os

from agent_sandbox.cli.streams import write_all
from agent_sandbox.workspace.escape import visible


class Escaped:
    """Both streams of one run."""

    def __init__(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")
        self._streams = {"stdout": (1, decoder("surrogateescape")), "stderr": (2, decoder("surrogateescape"))}

    def pass_on(self, name: str, data: bytes, *, last: bool = False) -> None:
        """Write it to our own standard output or error; a character in two pieces when it is whole. Raises as `write_all` does."""
        fd, decoder = self._streams[name]
        if not os.isatty(fd):
            write_all(fd, data)
            return
        lines = decoder.decode(data, last).split("\n")
        write_all(fd, "\n".join("\t".join(map(visible, line.split("\t"))) for line in lines).encode())

    def finish(self) -> None:
        """Nothing more comes: show what was left unfinished."""
        for name in self._streams:
            self.pass_on(name, b"", last=True)
