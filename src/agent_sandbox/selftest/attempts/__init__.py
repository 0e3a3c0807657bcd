"""The attempts of the self-test, and the frame that runs an attempt and prints which of its ways got through.

An attempt is a function that returns ways to attack: functions by name. It runs in a sandbox, and on the bare machine to show that it can
succeed. It is sent as text, after the text of this file, and never imported here. Attempts import little: an interpreter starts for each of
them, and json or pathlib would double the time.
"""

from __future__ import annotations

import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Deeds = dict[str, Callable[[], object]]
    Address = tuple[str, int] | str | bytes


def main(name: str, arguments: dict[str, object], stay: float) -> None:
    """Run the attempt of this name, print the result, then stay for some seconds to be observed from outside.

    A way whose function returns got through, and the returned value is the evidence. A way whose function raises was refused.
    """
    reached, refused = {}, {}
    for way, deed in globals()[name](**arguments).items():
        try:
            reached[way] = str(deed())
        except Exception as error:
            refused[way] = getattr(error, "strerror", None) or f"{type(error).__name__} {error}".strip()
    print("answer", {"reached": reached, "refused": refused}, flush=True)
    time.sleep(stay)


def later(deed: Callable[..., object], *arguments: object) -> Callable[[], object]:
    """Return a function without parameters that calls `deed` with these arguments."""
    return lambda: deed(*arguments)


def content(path: str) -> str:
    """Return the text of a file."""
    with open(path, errors="replace") as file:
        return file.read()


def write_to(path: str, text: str) -> str:
    """Write a file and read it back."""
    with open(path, "w") as file:
        file.write(text)
    return content(path)
