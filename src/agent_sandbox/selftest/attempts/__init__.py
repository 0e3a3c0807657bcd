"""The attempts of the self-test, and the frame that runs an attempt and prints which of its ways got through.

Attempts run in a sandbox, and on the bare machine to show that they can succeed. We send them as text, after the text of this file, and
never import them. They import little: an interpreter starts for each attempt, and json or pathlib would double the time.
"""

from __future__ import annotations

import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Deeds = dict[str, Callable[[], object]]
    Address = tuple[str, int] | str | bytes


def main(name: str, arguments: dict[str, object], stay: float) -> None:
    """Do every deed of an attempt and print the result, then stay for some seconds, to be observed from outside.

    A deed that returns got through, and its result is the evidence. A deed that raises was refused.
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
    """Return a deed with its arguments, for `main` to do."""
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
