"""Files of durable checkpoints: whole or absent, and refused unless every byte is as it was written. No session is needed for that."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from agent_sandbox.errors import CheckpointError
from agent_sandbox.workspace import checkpoint_store
from agent_sandbox.workspace.checkpoint_store import CheckpointFacts, CheckpointStore, CheckpointWriter
from agent_sandbox.workspace.store import Store

FACTS = CheckpointFacts("a name", 1_700_000_000.0, "x86_64", "1" * 64, "plain", "2" * 64, 1 << 26, None)
CONTENT = os.urandom(3000) + bytes(5000)


def writing(content: bytes, facts: CheckpointFacts = FACTS) -> Callable[[CheckpointWriter], None]:
    def write(writer: CheckpointWriter) -> None:
        writer.begin(facts)
        writer.add(content)

    return write


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(Store.open(str(tmp_path / "state")))


@pytest.fixture
def place(tmp_path: Path, store: CheckpointStore) -> Path:
    return tmp_path / "state" / "checkpoints"


def content_of(store: CheckpointStore, digest: str) -> bytes:
    with store.opened(digest) as opened:
        return b"".join(iter(opened.content, b""))


def test_a_checkpoint_is_found_by_name_and_digest_and_is_as_it_was_saved(store: CheckpointStore, place: Path) -> None:
    saved = store.save(writing(CONTENT))
    assert store.all() == (saved,) == (store.find("a name"),) == (store.find(saved.digest[:6].upper()),)
    assert content_of(store, saved.digest) == CONTENT and saved.facts == FACTS
    assert [(path.name, path.stat().st_mode & 0o777, path.stat().st_size) for path in place.iterdir()] == [
        (saved.digest, 0o600, saved.bytes)
    ]
    second = store.save(writing(b"other"))
    with pytest.raises(CheckpointError, match="2 checkpoints are called 'a name'"):
        store.find("a name")
    store.delete(second.digest)
    assert store.find("a name") == saved
    for missing in (second.digest, "no such name", "", "0000", "../" * 8, "a" * 64):
        with pytest.raises(CheckpointError, match="there is no checkpoint"):
            store.find(missing)
    for odd in ("../../etc/passwd", "x" * 64, saved.digest[:20]):
        with pytest.raises(CheckpointError, match="no digest"):
            store.delete(odd)


def test_a_changed_byte_anywhere_is_refused_and_the_untouched_file_is_not(store: CheckpointStore, place: Path, tmp_path: Path) -> None:
    saved = store.save(writing(CONTENT))
    whole = (place / saved.digest).read_bytes()
    offsets = {*range(0, 400, 3), *range(400, len(whole), 211), *range(len(whole) - 40, len(whole), 3)}
    for offset in sorted(offsets):
        damaged = bytearray(whole)
        damaged[offset] ^= 1 << offset % 8
        for path in (place / saved.digest, tmp_path / "exported"):
            path.write_bytes(damaged)
        with pytest.raises(CheckpointError), store.opened(saved.digest):
            pytest.fail(f"a change at {offset} was not noticed")
        with pytest.raises(CheckpointError):
            store.take_in(str(tmp_path / "exported"))
    (place / saved.digest).write_bytes(whole)
    assert content_of(store, saved.digest) == CONTENT
    (tmp_path / "exported").write_bytes(whole)
    assert store.take_in(str(tmp_path / "exported")) == saved


def test_a_shorter_a_longer_and_another_file_are_refused(store: CheckpointStore, place: Path) -> None:
    saved = store.save(writing(CONTENT))
    other = store.save(writing(b"other"))
    whole = (place / saved.digest).read_bytes()
    shorter = [whole[:length] for length in (0, 1, 20, 30, 200, len(whole) // 2, len(whole) - 33, len(whole) - 1)]
    for damaged in (*shorter, whole + b"\0", (place / other.digest).read_bytes()):
        (place / saved.digest).write_bytes(damaged)
        with pytest.raises(CheckpointError), store.opened(saved.digest):
            pytest.fail(f"{len(damaged)} bytes were taken")
    assert content_of(store, other.digest) == b"other"


def sealed(*parts: bytes) -> bytes:
    return b"".join(parts) + sha256(b"".join(parts)).digest()


MAGIC = b"agent-sandbox checkpoint "


def described(**changed: object) -> bytes:
    text = json.dumps({**vars(FACTS), **changed}).encode()
    return struct.pack("!I", len(text)) + text


HOSTILE = {
    "no checkpoint": b"\x7fELF" + bytes(100),
    "format '2'": sealed(MAGIC, b"2\n", described()),
    "beginning is damaged": sealed(MAGIC, b"9" * 1000),
    "too long": sealed(MAGIC, b"1\n", struct.pack("!I", 0xFFFFFFFF), b"{}"),
    "damaged: ": sealed(MAGIC, b"1\n", struct.pack("!I", 60_000), b"[" * 60_000),
    "other fields": sealed(MAGIC, b"1\n", struct.pack("!I", 2), b"{}"),
    "wrong name": sealed(MAGIC, b"1\n", described(name=7)),
    "wrong seed": sealed(MAGIC, b"1\n", described(seed=True)),
    "out of range": sealed(MAGIC, b"1\n", described(memory_bytes=1 << 60)),
    "range": sealed(MAGIC, b"1\n", described(created=float("nan"))),
    "value that is out": sealed(MAGIC, b"1\n", described(name="x" * 201)),
    "is out of range": sealed(MAGIC, b"1\n", described(seed=-1)),
}


@pytest.mark.parametrize("why", HOSTILE)
def test_a_hostile_file_is_refused_before_anything_of_it_is_believed(why: str, store: CheckpointStore, place: Path, tmp_path: Path) -> None:
    (tmp_path / "exported").write_bytes(HOSTILE[why])
    with pytest.raises(CheckpointError, match=why):
        store.take_in(str(tmp_path / "exported"))
    assert store.all() == () and not [*place.parent.glob("checkpoints/*")]
    (tmp_path / "exported").write_bytes(sealed(MAGIC, b"1\n", described(), b"content"))
    assert content_of(store, store.take_in(str(tmp_path / "exported")).digest) == b"content", "the same form is taken if it is right"


def test_what_is_no_file_or_too_large_is_not_read(store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for name, why in (("pipe", "no file"), ("link", "cannot read"), ("missing", "cannot read"), (".", "no file")):
        with pytest.raises(CheckpointError, match=why):
            store.take_in(str(tmp_path / name))
    saved = store.save(writing(CONTENT))
    store.export(saved.digest, str(tmp_path / "exported"))
    monkeypatch.setattr(checkpoint_store, "LARGEST", 5000)
    with pytest.raises(CheckpointError, match="larger than a checkpoint can be"):
        store.take_in(str(tmp_path / "exported"))
    with pytest.raises(CheckpointError, match="would be larger"):
        store.save(writing(CONTENT))
    assert store.save(writing(CONTENT[:4000])).bytes <= 5000


@pytest.mark.needs_root
def test_a_file_of_another_user_is_refused(store: CheckpointStore, place: Path, tmp_path: Path) -> None:
    saved = store.save(writing(CONTENT))
    store.export(saved.digest, str(tmp_path / "exported"))
    for path in (place / saved.digest, tmp_path / "exported"):
        os.chown(path, 12345, 12345)
    with pytest.raises(CheckpointError, match="belongs to user 12345"):
        store.take_in(str(tmp_path / "exported"))
    with pytest.raises(CheckpointError, match="belongs to user 12345"), store.opened(saved.digest):
        pytest.fail("it was opened")
    assert store.all() == () and store.damaged() == (saved.digest,)
    os.chown(place / saved.digest, 0, 0)
    assert content_of(store, saved.digest) == CONTENT


def test_an_exported_file_is_private_and_replaces_none(store: CheckpointStore, tmp_path: Path) -> None:
    saved = store.save(writing(CONTENT))
    target = tmp_path / "exported"
    store.export(saved.digest, str(target))
    assert target.stat().st_mode & 0o777 == 0o600
    target.write_text("mine")
    with pytest.raises(CheckpointError, match="exists already"):
        store.export(saved.digest, str(target))
    assert target.read_text() == "mine" and {path.name for path in tmp_path.iterdir()} == {"state", "exported"}
    with pytest.raises(CheckpointError, match="cannot write"):
        store.export(saved.digest, str(tmp_path / "no" / "such"))


def test_a_failure_while_saving_leaves_nothing(store: CheckpointStore, place: Path) -> None:
    def fail(writer: CheckpointWriter) -> None:
        writing(CONTENT)(writer)
        raise ValueError("cut off")

    with pytest.raises(ValueError, match="cut off"):
        store.save(fail)
    assert [*place.iterdir()] == []


SAVING = """
import os, sys
from agent_sandbox.workspace.checkpoint_store import CheckpointFacts, CheckpointStore
from agent_sandbox.workspace.store import Store
facts = CheckpointFacts(sys.argv[2], 1.0, "x86_64", "1" * 64, "plain", "2" * 64, 1 << 26, None)
store = CheckpointStore(Store.open(sys.argv[1]))
def write(writer):
    writer.begin(facts)
    for number in range(64):
        writer.add(os.urandom(4096))
        print("wrote", number, flush=True)
for _ in range(int(sys.argv[3])):
    store.save(write)
"""


def saver(state: Path, name: str, count: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", SAVING, str(state), name, str(count)], stdout=subprocess.PIPE)


def test_a_killed_process_leaves_a_whole_checkpoint_or_none(store: CheckpointStore, place: Path) -> None:
    """It is killed at several points, the last of them near or after the rename; whatever it leaves is swept by the next one that saves."""
    for lines in (1, 30, 63, 64, 70, 129):
        process = saver(place.parent, "killed", 3)
        assert process.stdout is not None
        for _ in range(lines):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        for each in store.all():
            assert len(content_of(store, each.digest)) == 64 * 4096
        assert store.damaged() == ()
    assert [path for path in place.iterdir() if path.name.startswith(".new-")], "a killed one was in the middle, so this shows something"
    saved = store.save(writing(CONTENT))
    assert not [path for path in place.iterdir() if path.name.startswith(".new-")]
    assert content_of(store, saved.digest) == CONTENT


def test_two_processes_save_at_once(store: CheckpointStore, place: Path) -> None:
    savers = [saver(place.parent, name, 5) for name in ("one", "other")]
    for process in savers:
        process.communicate()
        assert process.returncode == 0
    assert sorted(each.facts.name for each in store.all()) == ["one"] * 5 + ["other"] * 5
    assert all(len(content_of(store, each.digest)) == 64 * 4096 for each in store.all()) and len([*place.iterdir()]) == 10


def test_a_file_that_changes_while_it_is_resumed_is_noticed(store: CheckpointStore, place: Path) -> None:
    saved = store.save(writing(bytes(4 << 20)))
    with store.opened(saved.digest) as opened:
        opened.content()
        with open(place / saved.digest, "r+b") as file:
            file.seek(3 << 20)
            file.write(b"changed")
        with pytest.raises(CheckpointError, match="was changed while it was read"):
            while opened.content():
                continue


def test_times_and_names_do_not_depend_on_the_clock_of_the_file(store: CheckpointStore) -> None:
    before = time.time()
    first = store.save(writing(b"1", CheckpointFacts("one", before, "m", "i", "plain", "d", 1 << 16, 7)))
    second = store.save(writing(b"2", CheckpointFacts("two", before - 9, "m", "i", "plain", "d", 1 << 16, None)))
    assert store.all() == (first, second)
