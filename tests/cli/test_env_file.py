"""`--env-file`: which lines are variables, and which are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_sandbox.assembly import here
from agent_sandbox.cli.env_file import LARGEST, read_env_files
from agent_sandbox.errors import PolicyError


@pytest.mark.parametrize(
    ("line", "variable"),
    [
        ("A=1", "A=1"),
        ("  export A=1  ", "A=1"),
        ("A=", "A="),
        ("A = b c ", "A=b c"),
        ("A=b # comment", "A=b"),
        ("A=b#c", "A=b#c"),
        ("A=# comment", "A="),
        ("A==x=", "A==x="),
        ('A="b # c" # comment', "A=b # c"),
        ('A="b\\n\\"c\\" \\\\ \\$HOME"', 'A=b\n"c" \\ $HOME'),
        ("A='b\\n \"$HOME\"'", 'A=b\\n "$HOME"'),
        ("A=$HOME `id`", "A=$HOME `id`"),
        ("A=it's", "A=it's"),
    ],
)
def test_a_line_is_a_variable(tmp_path: Path, line: str, variable: str) -> None:
    (tmp_path / "file").write_text(f"\ufeff# comment\r\n\n{line}\r\nLAST=1")
    assert read_env_files([str(tmp_path / "file")]) == (variable, "LAST=1")


@pytest.mark.parametrize(
    "line",
    [
        *("CANARY", "1=CANARY", "A B=CANARY", "=CANARY", 'A="CANARY', "A='CANARY", "A='CANARY' B", 'A="x" CANARY', "CANARY-X=1"),
        *("LD_PRELOAD=CANARY", "BASH_ENV=CANARY", "AGENT_SANDBOX_CAPABILITY=CANARY", "BASH_FUNC_ls%%=() { CANARY; }", "CANARY+/==", "Ä=1"),
    ],
)
def test_a_malformed_or_hostile_line_is_refused_by_its_number_and_its_value_is_not_repeated(tmp_path: Path, line: str) -> None:
    (tmp_path / "file").write_text(f"OK=1\n\n{line}\n")
    with pytest.raises(PolicyError, match="line 3") as raised:
        read_env_files([str(tmp_path / "file")])
    assert "CANARY" not in f"{raised.value.message} {raised.value.hint}".replace("AGENT_SANDBOX_CAPABILITY", "")


@pytest.mark.parametrize("content", [b"A=\0", b"A=\xff", b"A" * (LARGEST + 1)])
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    for name in ("file", ".", "missing", "a\0b"):
        with pytest.raises(PolicyError):
            read_env_files([f"{tmp_path}/{name}"])


def test_a_file_that_a_sandbox_wrote_is_refused_by_whichever_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_SANDBOX_STATE", str(tmp_path / "state"))
    layer = Path(here().host.state) / "sandboxes" / "x"
    layer.mkdir(parents=True)
    (layer / "env").write_text("A=1\n")
    os.symlink(layer / "env", tmp_path / "link")
    for name in (layer / "env", tmp_path / "link"):
        with pytest.raises(PolicyError, match="state directory"):
            read_env_files([str(name)])
    (tmp_path / "copy").write_bytes((layer / "env").read_bytes())
    assert read_env_files([str(tmp_path / "copy")]) == ("A=1",), "the control: elsewhere it is read"
