"""The file of a record of exchanges: whole or not at all, private, and refused when it is damaged, hostile or another's."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import resource
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.egress.recorded_exchange import RecordedExchange
from agent_sandbox.engine import exchange_records
from agent_sandbox.engine.exchange_records import ExchangeRecord, ExchangeWriter
from agent_sandbox.errors import RecordError

KEY = "0" * 64


def exchange(number: int = 0, *, body: bytes = b"ok", key: str = KEY) -> RecordedExchange:
    fields = ((b"x-number", str(number).encode()),)
    return RecordedExchange(key, "GET", "https://web.test:443", f"/{number}", fields, 0, 200, fields, (), len(body), body=body)


def put(writer: ExchangeWriter, made: RecordedExchange) -> None:
    """Give a writer an exchange in pieces, as the egress does."""
    parts = [("begin", b""), ("head", json.dumps(made.head()).encode())]
    parts += [("body", (made.body or b"")[place : place + 1000]) for place in range(0, len(made.body or b""), 1000)]
    for part, data in (*parts, ("end", b"")):
        writer.take({"part": part, "data": base64.b64encode(data).decode()})


def written(path: Path, *exchanges: RecordedExchange) -> tuple[str, ...]:
    writer = ExchangeWriter(str(path), bodies=True)
    for each in exchanges:
        put(writer, each)
    return writer.finish()


def test_a_record_is_read_as_it_was_written_and_answers_in_order(tmp_path: Path) -> None:
    path = tmp_path / "record"
    notes = written(path, exchange(1), exchange(2, body=b"x" * 5000), exchange(3, key="f" * 64))
    assert notes == (f"recorded 3 exchanges: {path}",)
    assert path.stat().st_mode & 0o777 == 0o600 and [each.name for each in tmp_path.iterdir()] == ["record"]
    record = ExchangeRecord(str(path))
    assert record.hosts == (("web.test", 443),)
    answers = [record.answer(KEY) for _ in range(3)]
    assert [each and each["target"] for each in answers] == ["/1", "/2", None]
    assert record.answer("f" * 64) == exchange(3, key="f" * 64).plain() | {
        "asked": [["x-number", "3"]],
        "answered": [["x-number", "3"]],
    } | {
        "trailers": [],
        "redacted": [],
    }
    assert any(note == "not in the record: 1 request" for note in record.notes())
    record.close()


def damaged(lines: list[bytes]) -> list[bytes]:
    return [lines[0], lines[1].replace(b"/1", b"/9"), *lines[2:]]


def sealed(lines: list[bytes]) -> list[bytes]:
    """Return lines with an end that fits them, as somebody who means harm would write it."""
    end = {"exchanges": len(lines) - 2, "left_out": 0, "sha256": hashlib.sha256(b"".join(lines[:-1])).hexdigest()}
    return [*lines[:-1], json.dumps(end).encode() + b"\n"]


def changed(**fields: Any) -> Callable[[list[bytes]], list[bytes]]:
    def change(lines: list[bytes]) -> list[bytes]:
        return sealed([lines[0], json.dumps({**json.loads(lines[1]), **fields}).encode() + b"\n", lines[-1]])

    return change


@pytest.mark.parametrize(
    "harm",
    [
        damaged,
        lambda lines: lines[:-1],
        lambda lines: [*lines[:-1], lines[-1][:-1]],
        lambda lines: [*lines, b"{}\n"],
        lambda lines: [lines[0], *lines[2:]],
        lambda lines: [lines[0], lines[2], lines[1], lines[3]],
        lambda lines: [],
        lambda lines: [b"\0" * 100],
        lambda lines: sealed([lines[0], b"[" * 100_000 + b"\n", lines[-1]]),
        lambda lines: sealed([lines[0].replace(b"exchanges/1", b"exchanges/2"), *lines[1:]]),
        lambda lines: sealed([lines[0].replace(b'"salt":"', b'"salt":"zz'), *lines[1:]]),
        changed(extra=1),
        changed(status=99),
        changed(status="200"),
        changed(status=True),
        changed(answered=[["x", "a\r\nSet-Cookie: b"]]),
        changed(answered=[["x y", "a"]]),
        changed(answered=[["content-length", "1, 2"]]),
        changed(answered=[["x", "\u2028"]]),
        changed(answered=[["x", "y"]] * 300),
        changed(answered=[["x", "y" * 70_000]]),
        changed(origin="ftp://web.test:21"),
        changed(origin="https://web.test:99999"),
        changed(key="../../etc/passwd"),
        changed(body="%%%"),
        changed(body={"base64": ""}),
        changed(why=["x"]),
    ],
)
def test_a_damaged_or_hostile_record_is_refused_and_says_so(tmp_path: Path, harm: Callable[[list[bytes]], list[bytes]]) -> None:
    path = tmp_path / "record"
    written(path, exchange(1), exchange(2))
    lines = path.read_bytes().splitlines(keepends=True)
    ExchangeRecord(str(path)).close()  # the control: it can be read
    path.write_bytes(b"".join(harm(lines)))
    with pytest.raises(RecordError, match="not a valid record"):
        ExchangeRecord(str(path))
    path.write_bytes(b"".join(sealed(lines)))
    ExchangeRecord(str(path)).close()  # and so can one that was sealed anew without harm


def test_a_record_for_too_many_ports_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "record"
    ports = [RecordedExchange(**{**vars(exchange(each)), "origin": f"https://web.test:{each + 1}"}) for each in range(100)]
    written(path, *ports)
    with pytest.raises(RecordError, match="too many ports"):
        ExchangeRecord(str(path))


def test_a_link_a_pipe_a_directory_and_a_file_that_others_write_are_no_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record"
    written(path, exchange())
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "pipe")
    for name, why in (("link", "a link"), ("pipe", "no file"), (".", "no file"), ("missing", "No such file")):
        with pytest.raises(RecordError, match=why):
            ExchangeRecord(str(tmp_path / name))
    path.chmod(0o620)
    with pytest.raises(RecordError, match="others can write"):
        ExchangeRecord(str(path))
    path.chmod(0o644)
    ExchangeRecord(str(path)).close()
    monkeypatch.setattr(exchange_records, "LARGEST", 10)
    with pytest.raises(RecordError, match="larger than any record"):
        ExchangeRecord(str(path))


@pytest.mark.needs_root
def test_a_record_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "record"
    written(path, exchange())
    os.chown(path, 12345, 12345)
    with pytest.raises(RecordError, match="another user"):
        ExchangeRecord(str(path))


def test_a_record_that_changes_while_it_is_used_answers_nothing(tmp_path: Path) -> None:
    path = tmp_path / "record"
    written(path, exchange(1), exchange(2))
    record = ExchangeRecord(str(path))
    assert record.answer(KEY) is not None
    path.write_bytes(path.read_bytes().replace(b'"/2"', b'"/9"'))
    with pytest.raises(ValueError, match="changed"):
        record.answer(KEY)
    record.close()


def test_a_writer_that_does_not_finish_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "record"
    written(path, exchange(1))
    before = path.read_bytes()
    writer = ExchangeWriter(str(path), bodies=True)
    put(writer, exchange(2))
    writer.close()
    assert path.read_bytes() == before and [each.name for each in tmp_path.iterdir()] == ["record"]


def test_killed_at_any_step_there_is_the_old_record_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "record"
    written(path, exchange(1))
    before = path.read_bytes()
    after = 0
    for step in range(12):
        child = os.fork()
        if child == 0:
            writer = ExchangeWriter(str(path), bodies=True)
            deeds: list[Callable[[], object]] = [partial(put, writer, exchange(2)) for _ in range(9)]
            for number, deed in enumerate((*deeds, writer.finish)):
                if number == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                deed()
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        after += path.read_bytes() != before
        ExchangeRecord(str(path)).close()
    assert after >= 1, "the last ones got so far"
    assert written(path, exchange(5))[0].startswith("recorded 1 "), "what they left does not stand in the way"


def test_a_full_disk_leaves_no_record_and_a_note(tmp_path: Path) -> None:
    path = tmp_path / "record"
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))  # as a disk that is full after so many bytes
        os.write(write, json.dumps(written(path, *(exchange(each, body=b"x" * 1000) for each in range(9)))).encode())
        os._exit(0)
    os.close(write)
    with open(read) as file:
        (note,) = json.load(file)
    os.waitpid(child, 0)
    assert "is not recorded" in note and "cannot be written" in note
    assert list(tmp_path.iterdir()) == []


def test_what_goes_beyond_the_bounds_is_left_out_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record"
    monkeypatch.setattr(exchange_records, "MOST_EXCHANGES", 2)
    notes = written(path, *(exchange(each) for each in range(5)))
    assert notes[0].startswith("recorded 2 ") and "(3 times)" in notes[1]
    record = ExchangeRecord(str(path))
    assert record.left_out == 3
    record.close()


@pytest.mark.parametrize("messages", [[("head", b"{}")], [("begin", b""), ("end", b"")], [("begin", b""), ("head", b"x" * (2 << 20))]])
def test_pieces_that_no_egress_sends_are_refused(tmp_path: Path, messages: list[tuple[str, bytes]]) -> None:
    writer = ExchangeWriter(str(tmp_path / "record"), bodies=True)
    with pytest.raises(ValueError):  # whatever it says: the egress is ended
        for part, data in messages:
            writer.take({"part": part, "data": base64.b64encode(data).decode()})
    writer.close()


def test_nothing_is_written_through_a_link_or_where_another_run_writes(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "record", tmp_path / "elsewhere"
    elsewhere.write_text("mine\n")
    (tmp_path / "record.new").symlink_to(elsewhere)
    with pytest.raises(RecordError, match="no record can be written"):
        ExchangeWriter(str(path), bodies=True)
    assert elsewhere.read_text() == "mine\n"
    (tmp_path / "record.new").unlink()
    first = ExchangeWriter(str(path), bodies=True)
    with pytest.raises(RecordError, match="another run"):
        ExchangeWriter(str(path), bodies=True)
    assert first.finish()[0].startswith("recorded 0 ")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(elsewhere)
    for wrong in (tmp_path, tmp_path / "missing" / "record", tmp_path / "pipe", tmp_path / "link"):
        with pytest.raises(RecordError, match="no record can be written"):
            ExchangeWriter(str(wrong), bodies=True)
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "link").is_symlink() and elsewhere.read_text() == "mine\n"
