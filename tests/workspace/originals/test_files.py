from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox._fast.encoding import sha256
from agent_sandbox.errors import WorkspaceError
from agent_sandbox.workspace.nodes import EntryType, Node
from agent_sandbox.workspace.originals import files, runs
from agent_sandbox.workspace.originals.runs import append
from agent_sandbox.workspace.reality import Base, Fingerprint

NAMES = st.binary(min_size=1, max_size=8).map(lambda raw: os.fsdecode(raw.replace(b"\0", b"0").replace(b"/", b"_")))
NUMBERS = st.integers(0, 2**63)
NODES = st.builds(
    Node,
    st.sampled_from(EntryType),
    st.integers(0, 0o7777),
    NUMBERS,
    NUMBERS,
    NUMBERS,
    NAMES,
    NUMBERS,
    st.dictionaries(NAMES, st.binary(max_size=8), max_size=2),
)
SEEN = st.builds(Fingerprint, NODES, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, st.sampled_from(["", "0" * 64, "ab" * 32]))
BASES = st.builds(Base, NAMES.map(lambda name: f"/{name}"), st.none() | SEEN, st.booleans(), st.sampled_from(["", "3:1024"]))


def a_base(path: str, content: bytes | None = None, generation: int = 1) -> Base:
    digest = sha256(content).hexdigest() if content is not None else ""
    node = Node(EntryType.FILE, 0o644, 0, 0, len(content or b""))
    return Base(path, Fingerprint(node, 1, 2, 3, 4, 5, digest), kept=f"{generation}:3" if content is not None else "")


def keep_content(directory: Path, content: bytes, generation: int = 1) -> None:
    (directory / f"{generation}.content").write_bytes(b"..." + content + b"...")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    runs.begin(str(tmp_path / "bases"), [1], now_ns=1000)
    return tmp_path / "bases"


def add(directory: Path, generation: int, *found: Base) -> None:
    append(str(directory), generation, "".join(map(files.spell_base, found)))


@settings(deadline=None)
@given(BASES)
def test_a_base_is_read_as_it_was_written(base: Base) -> None:
    line = files.spell_base(base).encode().rstrip(b"\n")
    assert files.path_of(line, files.PATH) == base.path
    assert files.read_base(base.path, line, listed=False) == base


@settings(deadline=None)
@given(BASES, st.data())
def test_a_line_that_was_torn_or_has_a_byte_that_is_no_json_is_unknown(base: Base, data: st.DataObject) -> None:
    line = files.spell_base(base).encode().rstrip(b"\n")
    at = data.draw(st.integers(0, len(line) - 1))
    for damaged in (line[:at], line[:at] + b"\0" + line[at + 1 :]):
        assert files.read_base(base.path, damaged, listed=False) == Base(base.path, None, known=False)


def test_the_earliest_generation_has_the_base(directory: Path) -> None:
    add(directory, 1, a_base("/a", b"first"))
    add(directory, 2, a_base("/a", b"second"), a_base("/b", b"other"))
    found = files.recall(str(directory), [1, 2])
    assert found["/a"] == a_base("/a", b"first") and found["/b"] == a_base("/b", b"other")
    assert files.recall(str(directory), [2])["/a"] == a_base("/a", b"second")
    assert "/c" not in found and len(found) == 2 and sorted(found) == ["/a", "/b"]


@pytest.mark.parametrize("tail", [b'{"path":"2f61', b"\0" * 100, b'{"path":"zz","known":true}\n', b"[]\nnull\n"])
def test_a_torn_end_is_no_base_and_takes_no_later_line_with_it(directory: Path, tail: bytes) -> None:
    add(directory, 1, a_base("/before"))
    with open(directory / "1.jsonl", "ab") as file:
        file.write(tail)
    assert sorted(files.recall(str(directory), [1])) == ["/before"]
    add(directory, 1, a_base("/after"))
    assert sorted(files.recall(str(directory), [1])) == ["/after", "/before"]


def test_a_line_that_makes_no_sense_is_a_base_that_is_not_known(directory: Path) -> None:
    append(str(directory), 1, '{"path":"2f61","known":true,"kept":true,"seen":{"type":"cake"}}\n')
    assert files.recall(str(directory), [1])["/a"] == Base("/a", None, known=False)


def test_content_that_was_damaged_or_lost_is_not_given_out(directory: Path) -> None:
    base = a_base("/a", b"content")
    with pytest.raises(WorkspaceError):
        files.open_content(str(directory), base)
    keep_content(directory, b"c0ntent")
    with pytest.raises(WorkspaceError, match="damaged"):
        files.open_content(str(directory), base)
    keep_content(directory, b"content")
    with open(files.open_content(str(directory), base), "rb") as file:
        assert file.read() == b"content"


def test_what_no_generation_needs_is_forgotten_and_the_rest_stays(directory: Path) -> None:
    add(directory, 2, a_base("/b", b"not needed", 2))
    add(directory, 4, a_base("/a", b"needed", 1))
    for generation in (1, 2, 4):
        keep_content(directory, b"", generation)
    (directory / "3.jsonl.new").touch()
    for _ in range(2):
        files.forget(str(directory), [4])
        assert sorted(os.listdir(directory)) == ["1.content", "4.jsonl"]
    files.forget(str(directory / "not-there"), [1])


def test_a_squashed_generation_has_the_bases_of_those_it_stands_for(directory: Path) -> None:
    add(directory, 1, a_base("/a", b"first"), a_base("/promoted"), a_base("/tree"), a_base("/tree/below"), a_base("/treetop"))
    append(str(directory), 1, files.spell_below("/tree") + files.spell_nothing("/new", ["x", "y"]) + runs.spell_done(1000))
    add(directory, 2, a_base("/a", b"second"))
    files.carry(str(directory), [1, 2], 3, without=["/promoted", "/new/x", "/tree"], removed=["/tree"])
    found = files.recall(str(directory), [3])
    assert sorted(found) == ["/a", "/new/y", "/treetop"]
    assert found["/a"] == a_base("/a", b"first") and found["/new/y"] == Base("/new/y", None) and not found.listed
    assert runs.begin(str(directory), [3], now_ns=5000) == 5000


def test_a_squashed_generation_remembers_that_a_run_was_not_kept(directory: Path) -> None:
    files.carry(str(directory), [1], 3)
    assert runs.begin(str(directory), [3], now_ns=5000) == 1000
