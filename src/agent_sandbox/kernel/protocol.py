"""What the processes of a run say to one another, byte for byte. Longer things are messages (`channel`)."""

from __future__ import annotations

import struct

# From the supervisor to the keeper: an order and the number of the run.
START, WATCH, DONE = "start", "watch", "done"

# From the supervisor to init, once there is a guest: GO with the wall time in seconds, SIGNAL with its number.
ORDER = struct.Struct("!cd")
GO, SIGNAL = b"g", b"s"

HERE = b"h"  # init's first byte, and again when it wants its ids
MAPPED = b"m"  # the supervisor's answer when it has moved init into its cgroup and written its id map
# The guest's first byte on the payload socket: everything is in force. In its place, or later and instead of running the program, comes a
# refusal: an exit code, a space and the reason, up to the end of the stream. A refusal begins with a digit, so one byte tells which it is.
READY = b"R"
REFUSAL_BYTES = 4096  # of a refusal that are kept
# From a guest that is observed, before that, and the number of its listener in four bytes; HEARD when the supervisor has a copy of it.
LISTENING, HEARD = b"\x01", b"h"

# From a guest that is our own code to its end, to init: the program in it has ended. Its status, as `wait` would tell, processor time, peak
# of memory in bytes, and the fuel it used, or NOT_COUNTED.
FAREWELL = struct.Struct("!HdQq")
NOT_COUNTED = -1
FAREWELL_FD = 4  # in the guest: after its three streams and the payload
# From a guest that is watched, on the socket where it got its program, before it ends: this, and a line for each.
INPUTS = b"inputs\n"
REPORT_BYTES = 2 << 20  # of such a report that are kept

# Where code lies in a view while it runs.
SCRIPTS = "/run/sandbox"
PYTHON, JAVASCRIPT = "main.py", "main.js"
SCRIPT = f"{SCRIPTS}/{PYTHON}"

# Between the supervisor and a program it talks with while that runs: the length of what follows, and the number of the question.
TALK = struct.Struct("!IQ")
HELLO = TALK.pack(0, 0)  # the guest's first, when it has what it needs and the program is about to start
