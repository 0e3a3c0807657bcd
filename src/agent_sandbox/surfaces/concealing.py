"""Take words off our own command line, where `ps` and every process that was forked from us would show them.

A guest's first process is such a one: /proc/1/cmdline inside is our own. The kernel reads it from our memory each time, so that is where
the words are overwritten.
"""

from __future__ import annotations

from collections.abc import Iterable

from agent_sandbox.errors import RuntimeUnavailable

_ARGUMENTS_START = 48 - 3  # of the fields of /proc/self/stat, counted from the one after the name, which is the third


def conceal(words: Iterable[str]) -> None:
    """Overwrite these words. Raises `RuntimeUnavailable` when that cannot be done: then nothing may be started with them."""
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        start, end = (int(field) for field in fields[_ARGUMENTS_START : _ARGUMENTS_START + 2])
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(start)
            line = memory.read(end - start)
            for word in sorted({word.encode("utf-8", "surrogateescape") for word in words if word}, key=len, reverse=True):
                line = line.replace(word, b"*" * len(word))
            memory.seek(start)
            memory.write(line)
    except (OSError, ValueError) as error:
        why = f"a secret on the command line cannot be kept from the guest: {error}"
        raise RuntimeUnavailable(why, missing=("/proc/self/mem",), hint="hand it over in AGENT_SANDBOX_CAPABILITY") from None
