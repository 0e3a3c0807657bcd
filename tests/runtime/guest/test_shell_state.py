"""What a shell writes about itself, read as data: whatever it is, it becomes a state or is refused."""

from __future__ import annotations

import random

import pytest

from agent_sandbox.runtime.guest.shell_state import ShellScript, ShellState, UnkeptState, quoted, read_state, read_status, records

NUMBERS = {name: 250 - place for place, name in enumerate(("state", "loading", "command", "errors", "trouble"))}
KEY = "00ff"
FIELDS = (
    b"7",
    b"3  :braceexpand :extglob ",
    b"alias a='b'\n",
    b"set -o braceexpand\n",
    b"shopt -s extglob\n",
    b"0022\n",
    b"/tmp\n",
    b"1",
    b"/tmp",
)
WRITTEN = (
    b"trap -- 'x' INT\ntrap -- - TERM\n\0\0" + KEY.encode() + b"\0" + b"\0".join((*FIELDS, b"2", b"skipped", b"one")) + b"\0"
    b'declare -f f\0f () \n{ \n    :\n}\n\0\0declare -- v="1"\ndeclare -ir n="2"\n\0turn_' + KEY.encode() + b"\0"
)


def first() -> tuple[ShellState, ShellScript]:
    state = ShellState(b"/", (), {b"A": b"it's"})
    return state, ShellScript(state, NUMBERS, KEY)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (b'declare -- a="1"\ndeclare -x b\n', [b'declare -- a="1"', b"declare -x b"]),
        (b'declare -- a="two\nlines \\" \\$ \\` \\\\"\ndeclare -- b\n', [b'declare -- a="two\nlines \\" \\$ \\` \\\\"', b"declare -- b"]),
        (
            b"declare -- a=$'\\'\\n'\ndeclare -a b=([0]=\"x\ny\" [1]=$'z')\n",
            [b"declare -- a=$'\\'\\n'", b"declare -a b=([0]=\"x\ny\" [1]=$'z')"],
        ),
        (b"trap -- 'a\n'\\''b' INT\nalias x='$(y)'\n", [b"trap -- 'a\n'\\''b' INT", b"alias x='$(y)'"]),
        (b"", []),
    ],
)
def test_a_quoted_end_of_line_ends_no_record(text: bytes, parts: list[bytes]) -> None:
    assert records(text) == parts


def test_what_was_written_is_read() -> None:
    state, exited, remarks = read_state(WRITTEN, KEY, *first())
    assert (exited, remarks, state.status, state.directory, state.arguments) == (False, [], 3, b"/tmp", [b"one"])
    assert (state.traps, state.aliases) == ({b"INT": b"'x'"}, {b"a": b"'b'"})
    assert state.variables == {b"v": b'declare -- v="1"', b"n": b'declare -ir n="2"'}
    assert state.functions == {b"f": (b"-f", b"f () \n{ \n    :\n}\n")}
    assert read_status(WRITTEN, KEY) == 3 and read_status(b"", KEY) is None


def test_whatever_else_was_written_is_refused_or_read_and_raises_nothing_else() -> None:
    chance, refused = random.Random(0), 0
    for _ in range(3000):
        data = bytearray(WRITTEN)
        for _ in range(chance.randint(1, 6)):
            at = chance.randrange(len(data))
            data[at : at + chance.randint(0, 9)] = chance.choice((b"", b"\0", b"\n", b"'", b"x" * 5, bytes([chance.randrange(256)])))
        try:
            read_state(bytes(data), KEY, *first())
        except UnkeptState:
            refused += 1
    assert 0 < refused < 3000


def test_a_value_is_quoted_for_a_shell() -> None:
    assert quoted(b"it's\n$(x)") == b"'it'\\''s\n$(x)'"
    assert b"declare -x A='it'\\''s'\n" in first()[1].loading()
