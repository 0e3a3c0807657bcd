"""Changes that somebody could make to the files of a ledger, at random: each returns what the files hold afterwards."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

Content = list[bytes]  # of each file, oldest first, the one that is written last


def _edit(random: Random, files: Content) -> None:
    number = random.randrange(len(files))
    content = bytearray(files[number])
    for _ in range(random.choice((1, 1, 1, 2, 8))):
        content[random.randrange(len(content))] ^= random.randrange(1, 256)
    files[number] = bytes(content)


def _replace_text(random: Random, files: Content) -> None:
    """An edit by somebody who knows the form: one digit for another."""
    number = random.randrange(len(files))
    places = [place for place, byte in enumerate(files[number]) if 0x30 <= byte <= 0x39]
    place = random.choice(places)
    digit = bytes([0x30 + (files[number][place] - 0x30 + random.randrange(1, 10)) % 10])
    files[number] = files[number][:place] + digit + files[number][place + 1 :]


def _delete_lines(random: Random, files: Content) -> None:
    number = random.randrange(len(files))
    lines = files[number].splitlines(keepends=True)
    start = random.randrange(len(lines))
    del lines[start : start + random.choice((1, 1, 2, 5, len(lines)))]
    files[number] = b"".join(lines)


def _delete_bytes(random: Random, files: Content) -> None:
    number = random.randrange(len(files))
    start = random.randrange(len(files[number]))
    files[number] = files[number][:start] + files[number][start + random.choice((1, 2, 40, 600)) :]


def _reorder(random: Random, files: Content) -> None:
    number = random.randrange(len(files))
    lines = files[number].splitlines(keepends=True)
    one, other = random.sample(range(len(lines)), 2)
    lines[one], lines[other] = lines[other], lines[one]
    files[number] = b"".join(lines)


def _duplicate(random: Random, files: Content) -> None:
    number = random.randrange(len(files))
    lines = files[number].splitlines(keepends=True)
    lines.insert(random.randrange(len(lines) + 1), random.choice(lines))
    files[number] = b"".join(lines)


def _cut_head(random: Random, files: Content) -> None:
    """The beginning of the oldest file, or some whole files."""
    if len(files) > 1 and random.random() < 0.3:
        del files[: random.randrange(1, len(files))]
    else:
        files[0] = files[0][random.randrange(1, len(files[0]) + 1) :]


def _cut_tail(random: Random, files: Content) -> None:
    """Any number of bytes, or exactly at the end of a line."""
    content = files[-1]
    places = [place + 1 for place, byte in enumerate(content[:-1]) if byte == 0x0A]
    files[-1] = content[: random.choice(places) if places and random.random() < 0.5 else random.randrange(len(content))]


def _insert(random: Random, files: Content) -> None:
    """Something between two lines; behind the last one it could be a write that was cut short."""
    number = random.randrange(len(files))
    lines = files[number].splitlines(keepends=True)
    lines.insert(random.randrange(len(lines)), random.choice((b"\n", b"{}\n", b"x" * 50 + b"\n", lines[0][:70] + b"\n")))
    files[number] = b"".join(lines)


MUTATIONS: tuple[Callable[[Random, Content], None], ...] = (
    *(_edit, _replace_text, _delete_lines, _delete_bytes, _reorder, _duplicate, _cut_head, _cut_tail, _insert),
)
