"""Carries out an attempt where it runs, and tells which of its ways got through. Stands in front of the text of each attempt.

Here and in the attempts little is imported: an interpreter starts for each of them, and json or pathlib would double the time it takes.
"""

from __future__ import annotations

import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Deeds = dict[str, Callable[[], object]]
    Address = tuple[str, int] | str | bytes


def main(name: str, arguments: dict[str, object], stay: float) -> None:
    """Do every deed of the attempt: one that returns got through, with what it returns as evidence; one that raises was refused.

    Then, for those who want to look at it from outside, stay for so many seconds.
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
    """The deed with its arguments, to be done by `main`."""
    return lambda: deed(*arguments)


def content(path: str) -> str:
    """What is in a file."""
    with open(path, errors="replace") as file:
        return file.read()


def write_to(path: str, text: str) -> str:
    """Make this the content of a file, and read it again."""
    with open(path, "w") as file:
        file.write(text)
    return content(path)
