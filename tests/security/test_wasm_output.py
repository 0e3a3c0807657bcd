"""What a program inside WebAssembly writes, on a terminal of the person who runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import compiled
from tests.e2e.program import Shell
from tests.e2e.sitting import sitting
from tests.security.conftest import Tell
from tests.security.harness import case

pytestmark = pytest.mark.once

TITLE, ASKING = b"\x1b]0;PWNED\x07", b"\x1b[6n"
SOURCE = """
import sys
print("\\x1b]0;PWNED\\x07\\x1b[6n\\x9b31m\\u202e", "tab\\tand é", flush=True)
for byte in "日本\\n".encode(): sys.stdout.buffer.write(bytes([byte])); sys.stdout.buffer.flush()
sys.stdout.buffer.write(b"\\xff\\xe6"); sys.stdout.flush()
print("\\x1b[31merror", file=sys.stderr)
"""


@case(164)
def test_what_would_act_on_a_terminal_is_escaped_there_and_nothing_else_is(number: int, project: Path, tmp_path: Path, tell: Tell) -> None:
    compiled.offer(tmp_path / "cache", tmp_path / "state")
    shell = Shell(project, {"AGENT_SANDBOX_STATE": str(tmp_path / "state"), "XDG_CACHE_HOME": str(tmp_path / "cache")})
    (project / "work.py").write_text(SOURCE)
    with sitting(shell, "code", "work.py", "--runtime", "wasm") as person:
        assert person.end() == 0, person.seen
    assert b"\x1b" not in person.seen.partition(b"agent-sandbox:")[0] and b"\\x1b]0;PWNED\\x07\\x1b[6n\\x9b31m\\u202e" in person.seen
    assert "tab\tand é\r\n日本\r\n".encode() in person.seen and b"\\xff" in person.seen and b"\\x1b[31merror" in person.seen
    assert person.seen.partition(b"agent-sandbox:")[0].count(b"\\xe6") == 1, "a character that never became whole"
    piped = shell("code", "work.py", "--runtime", "wasm").stdout
    assert TITLE + ASKING in piped and piped.endswith(b"\xff\xe6"), "into a pipe it goes as it is"
    with sitting(shell, "code", "work.py", "--deterministic") as person:
        assert person.end() == 0 and TITLE not in person.seen and b"PWNED" in person.seen
    with sitting(shell, "code", "work.py", "--runtime", "process") as person:
        assert person.end() == 0 and TITLE in person.seen
    tell("escaped", control="a program with a terminal of its own writes to it as it likes")
