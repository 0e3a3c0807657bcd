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
READY = b"R"  # the guest's one byte: everything is in force

# From a guest that is our own code to its end, to init: the program in it has ended. Its code, processor time, peak of memory in bytes.
FAREWELL = struct.Struct("!BdQ")
FAREWELL_FD = 4  # in the guest: after its three streams and the payload

# Where code lies in a view while it runs.
SCRIPTS = "/run/sandbox"
PYTHON, JAVASCRIPT = "main.py", "main.js"
SCRIPT = f"{SCRIPTS}/{PYTHON}"
