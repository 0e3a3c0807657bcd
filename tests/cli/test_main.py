"""A verb that fails unexpectedly prints one sentence and exits with a documented code."""

from __future__ import annotations

import errno
import json

import pytest

from agent_sandbox.cli import main as module
from agent_sandbox.cli.main import main
from agent_sandbox.errors import RuntimeUnavailable

FAULTS = [
    (ValueError("a name in it is too long"), "mistake in agent-sandbox itself: ValueError: a name in it is too long"),
    (RecursionError("deep"), "RecursionError"),
    (MemoryError(), "MemoryError"),
    (UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates"), "UnicodeEncodeError"),
    (OSError(errno.ENOSPC, "No space left on device", "/x"), "the system refused: No space left on device: '/x'"),
    (OSError(errno.EMFILE, "Too many open files"), "the system refused: Too many open files"),
    (OSError(errno.ENAMETOOLONG, "File name too long", b"\xff" * 300), "File name too long"),
    (OSError(errno.ELOOP, "Too many levels of symbolic links", "loop\n\x1b[31m"), "symbolic links: 'loop\\n\\x1b[31m'"),
]


@pytest.fixture(params=FAULTS, ids=lambda fault: type(fault[0]).__name__)
def words(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A verb that ends with an exception that nobody expected; the words for it."""
    error, expected = request.param

    def fail(*anything: object) -> None:
        raise error

    monkeypatch.setattr(module, "_result", fail)
    return str(expected)


def test_no_exception_reaches_a_user_as_a_traceback(words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 125
    said = capfd.readouterr()
    assert not said.out and words in said.err and "AGENT_SANDBOX_DEBUG=1" in said.err
    assert "Traceback" not in said.err and "\x1b" not in said.err


def test_with_json_it_is_a_document(words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "status"]) == 125
    said = capfd.readouterr()
    document = json.loads(said.out)
    assert document["exit"] == 125 and words in document["error"]["message"] and not said.err


def test_a_developer_can_ask_for_the_traceback(words: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_SANDBOX_DEBUG", "1")
    assert main(["status"]) == 125
    assert "Traceback" in capfd.readouterr().err


def test_a_hint_names_the_option_that_can_be_typed(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def unavailable(*anything: object) -> None:
        raise RuntimeUnavailable("no", hint='use runtime="process", or "auto", which chooses it')

    monkeypatch.setattr(module, "_result", unavailable)
    assert main(["run", "--runtime", "wasm", "true"]) == 125
    assert 'hint: use --runtime process, or "auto", which chooses it' in capfd.readouterr().err


def test_an_interrupt_is_no_fault(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def interrupted(*anything: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_result", interrupted)
    assert main(["status"]) == 130 and capfd.readouterr() == ("", "")
