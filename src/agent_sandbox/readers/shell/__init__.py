"""Read a command line: the tools it starts and their effects.

These readers explain and predict; they enforce nothing. The sandbox's view of the file system enforces: it lacks every tool that is not
allowed, however the name of the tool is spelt. Anything not understood is reported as unknown, never guessed to be harmless.
"""

from __future__ import annotations

POSIX_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "ash", "rbash", "mksh")  # shells whose command lines are read here
