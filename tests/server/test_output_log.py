"""The output of a detached program on disk is bounded, in order, and readable while it grows, also after a crash."""

from __future__ import annotations

import os
from pathlib import Path

from agent_sandbox.server.output_log import OUTPUT, OutputLog, OutputReader, Piece, newest_lines, read_output


def test_it_keeps_the_newest_output_of_both_streams_within_its_bound(tmp_path: Path) -> None:
    log = OutputLog(str(tmp_path), most_bytes=4096, clock=lambda: 1.0)
    for number in range(1000):
        log.write("stderr" if number % 2 else "stdout", f"line {number}\n".encode())
    log.close()
    assert sum(os.stat(tmp_path / name).st_size for name in os.listdir(tmp_path)) <= 4096
    kept = read_output(str(tmp_path))
    numbers = [int(piece.data.split()[1]) for piece in kept]
    assert numbers == list(range(numbers[0], 1000)) and 10 < len(numbers) < 1000
    assert all(piece.stream == ("stderr" if number % 2 else "stdout") for piece, number in zip(kept, numbers, strict=True))
    assert all(os.stat(tmp_path / name).st_mode & 0o077 == 0 for name in os.listdir(tmp_path))


def test_any_bytes_are_kept_as_they_are(tmp_path: Path) -> None:
    log = OutputLog(str(tmp_path))
    content = bytes(range(256)) * 1000
    log.write("stdout", content)
    log.close()
    assert b"".join(piece.data for piece in read_output(str(tmp_path))) == content


def test_a_reader_goes_on_where_it_stopped_also_when_the_file_is_turned_over(tmp_path: Path) -> None:
    log = OutputLog(str(tmp_path), most_bytes=1000)
    reader, seen = OutputReader(str(tmp_path)), list[bytes]()
    assert list(reader.pieces()) == []
    for number in range(100):
        log.write("stdout", b"%d" % number)
        if number % 3 == 0:
            seen += [piece.data for piece in reader.pieces()]
    seen += [piece.data for piece in reader.pieces()]
    reader.close()
    assert seen == [b"%d" % number for number in range(100)]


def test_what_a_crash_cut_off_and_garbage_are_left_out(tmp_path: Path) -> None:
    log = OutputLog(str(tmp_path))
    log.write("stdout", b"whole")
    log.close()
    with (tmp_path / OUTPUT).open("ab") as file:
        file.write(b'[1]\nnull\n{"a": 1}\n[1, "stdout", "no base64!"]\n[1.0,"stdout","aGFs')
    assert [piece.data for piece in read_output(str(tmp_path))] == [b"whole"]


def test_a_full_disk_drops_output_and_counts_it(tmp_path: Path) -> None:
    log = OutputLog(str(tmp_path))
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, log._file)
    os.close(full)
    log.write("stdout", b"dropped")
    assert log.dropped == len(b"dropped")
    log.close()


def test_the_newest_lines_are_those_of_both_streams() -> None:
    pieces = (Piece(0, "stdout", b"a\nb\n"), Piece(1, "stderr", b"c\n"), Piece(2, "stdout", b"d\ne"))
    for most, expected in ((1, b"e"), (2, b"d\ne"), (3, b"c\nd\ne"), (4, b"b\nc\nd\ne"), (9, b"a\nb\nc\nd\ne")):
        assert b"".join(piece.data for piece in newest_lines(pieces, most)) == expected
    assert b"".join(piece.data for piece in newest_lines(pieces[:2], 1)) == b"c\n"


def test_a_line_that_came_in_pieces_is_one_line() -> None:
    told = (("stderr", b"one\nasked"), ("stdout", b"x\ny"), ("stderr", b" "), ("stderr", b""), ("stderr", b"/note\n"), ("stdout", b"z\n"))
    pieces = tuple(Piece(at, *each) for at, each in enumerate(told))
    expected = {
        0: (b"", b""),
        1: (b"yz\n", b""),
        2: (b"yz\n", b"asked /note\n"),
        3: (b"x\nyz\n", b"asked /note\n"),
        4: (b"x\nyz\n", b"one\nasked /note\n"),
        9: (b"x\nyz\n", b"one\nasked /note\n"),
    }
    for most, streams in expected.items():
        newest = newest_lines(pieces, most)
        assert newest == tuple(sorted(newest, key=lambda piece: piece.at))
        kept = tuple(b"".join(each.data for each in newest if each.stream == stream) for stream in ("stdout", "stderr"))
        assert kept == streams, most
