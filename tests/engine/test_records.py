"""Records: what is written is read back, what is read is believed in nothing, and a difference is found where it is."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox._fast.values import fields
from agent_sandbox.engine.records import (
    KEPT,
    LARGEST,
    MOST_PIECES,
    PIECE,
    Record,
    Tape,
    Taping,
    check_place,
    departures,
    digest,
    first_difference,
    read,
    salted,
    write,
)
from agent_sandbox.errors import RecordError
from agent_sandbox.policy.model import Limits

SALT = "ab" * 16


def taped(*pieces: bytes) -> Tape:
    taping = Taping()
    for piece in pieces:
        taping.take(piece)
    return taping.taped()


def a_record(**changes: Any) -> Record:
    limits = Limits()
    made = Record(
        identity={"engine": "1"},
        seed=7,
        language="python",
        code="print(1)",
        code_digest=digest(b"print(1)"),
        arguments=("a", "\udcff"),
        stdin=b"\xff\x00",
        stdin_digest=digest(b"\xff\x00"),
        cwd="/tmp",
        salt=SALT,
        environment={"KEY": salted(SALT, "a secret")},
        rules="0" * 64,
        limits={field.name: getattr(limits, field.name) for field in fields(limits)},
        inputs={"file /a": "1" * 64},
        stdout=taped(b"one\ntwo\n"),
        stderr=taped(),
        changes={"/b\udcff": "2" * 64},
        code_out=0,
        reason="exited",
        limits_hit=(),
        fuel=99,
    )
    return replace(made, **changes)


def test_what_is_written_is_read_back_and_is_nobody_elses(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    write(a_record(), str(file))
    assert read(str(file)) == a_record()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and os.listdir(tmp_path) == ["run.json"]
    assert "a secret" not in file.read_text()
    without = a_record(code=None, stdin=None, fuel=None)
    write(without, str(file))
    assert read(str(file)) == without


def spoilt(change: Callable[[dict[str, Any]], object]) -> str:
    document: dict[str, Any] = json.loads(_TEXT)
    change(document)
    return json.dumps(document)


def _written() -> str:
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        write(a_record(), f"{place}/r")
        return Path(place, "r").read_text()


_TEXT = _written()
SPOILT = {
    "nothing": "",
    "no JSON": "{",
    "a list": "[]",
    "another schema": spoilt(lambda d: d.update(schema="agent-sandbox/record/2")),
    "a field too many": spoilt(lambda d: d.update(allow_network=True)),
    "a field too few": spoilt(lambda d: d.pop("rules")),
    "other code": spoilt(lambda d: d.update(code="import os")),
    "other input": spoilt(lambda d: d["stdin"].update(base64="")),
    "no base64": spoilt(lambda d: d["stdin"].update(base64="?")),
    "a seed that is none": spoilt(lambda d: d.update(seed=-1)),
    "a seed that is true": spoilt(lambda d: d.update(seed=True)),
    "a huge exit code": spoilt(lambda d: d.update(code_out=10**30)),
    "a NUL in a path": spoilt(lambda d: d.update(cwd="/a\0b")),
    "a number for a text": spoilt(lambda d: d.update(cwd=3)),
    "arguments that are none": spoilt(lambda d: d.update(arguments="ab")),
    "a salt that is none": spoilt(lambda d: d.update(salt="zz" * 16)),
    "limits that are none": spoilt(lambda d: d["limits"].update(fuel="all")),
    "a limit that is not there": spoilt(lambda d: d["limits"].update(lifetime=1)),
    "too long a beginning": spoilt(lambda d: d["stdout"]["beginning"].update(base64="AAAA" * KEPT)),
    "too many pieces": spoilt(lambda d: d["stdout"].update(pieces=["0" * 32] * (MOST_PIECES + 1))),
    "depth": "[" * 100_000,
}


@pytest.mark.parametrize("text", SPOILT.values(), ids=SPOILT.keys())
def test_what_is_no_record_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(text)
    with pytest.raises(RecordError):
        read(str(file))


def test_neither_are_pipes_directories_and_endless_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", LARGEST + 1)
    for name in ("pipe", "huge", "", "not there"):
        with pytest.raises(RecordError):
            read(str(tmp_path / name))


def test_where_no_record_can_be_is_known_before_the_run(tmp_path: Path) -> None:
    check_place(str(tmp_path / "run.json"))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "run.json")
    for path in (tmp_path, tmp_path / "not there" / "run.json", tmp_path / "pipe", tmp_path / "link"):
        with pytest.raises(RecordError):
            check_place(str(path))


def test_two_runs_that_are_the_same_depart_nowhere() -> None:
    assert departures(a_record(), a_record(seed=8, salt="cd" * 16)) == ()


DIFFERENCES = {
    "input": ({"inputs": {"file /a": "3" * 64}}, "the file /a has changed"),
    "another input": ({"inputs": {"file /a": "1" * 64, "directory /d": "4" * 64}}, "the directory /d is looked into, and was not then"),
    "stdout": ({"stdout": taped(b"one\n", b"tWo\n")}, r"stdout differs at byte 5: it was 'wo\\n', and is 'Wo\\n'"),
    "stdout that ends early": ({"stdout": taped(b"one\n")}, r"at byte 4: it was 'two\\n', and is at its end"),
    "stderr": ({"stderr": taped(b"x")}, "stderr differs at byte 0: it was at its end, and is 'x'"),
    "change": ({"changes": {}}, "was changed, and is not now"),
    "exit": ({"code_out": 3}, r"it ended with 0 \(exited\), and now with 3 \(exited\)"),
    "limit": ({"limits_hit": ("disk",)}, r"it ended with 0 \(exited\), and now with 0 \(exited, at the limit of disk\)"),
    "fuel": ({"fuel": 100}, "it used 99 units of fuel, and now 100"),
}


@pytest.mark.parametrize(("changes", "said"), DIFFERENCES.values(), ids=DIFFERENCES.keys())
def test_a_difference_is_named(changes: dict[str, Any], said: str) -> None:
    import re

    (found,) = departures(a_record(), a_record(**changes))
    assert re.search(said, found.message), found


def test_a_difference_far_into_the_output_is_found_by_its_piece() -> None:
    long = b"x" * (KEPT + 10 * PIECE)
    other = bytearray(long)
    other[KEPT + 3 * PIECE + 17] = ord("y")
    assert first_difference(taped(long), taped(bytes(other))) == (KEPT + 3 * PIECE, False)
    assert first_difference(taped(long), taped(long[:50_000], long[50_000:])) is None, "however it comes in pieces"
    assert first_difference(taped(long), taped(long + b"z")) is not None
