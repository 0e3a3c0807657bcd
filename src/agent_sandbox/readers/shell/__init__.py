"""Read a command line: the tools it starts and their effects.

It explains and predicts. The view enforces: a tool that is not allowed is not there, however it is spelt. What is not understood is
reported as unknown, never guessed to be harmless.
"""

from __future__ import annotations

POSIX_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "ash", "rbash", "mksh")  # whose command lines are read here
