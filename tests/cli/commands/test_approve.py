"""`approve` as the one who is asked sees it."""

from __future__ import annotations

import json
import pwd
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from agent_sandbox.assembly import here
from agent_sandbox.cli.main import main
from agent_sandbox.cli.render import messages
from agent_sandbox.engine.approvals.question import Question
from agent_sandbox.engine.gate import Granted, Refused


class Asker:
    """Somebody in a run who waits for an answer."""

    def __init__(self) -> None:
        action = {"kind": "RunCommand", "argv": ["git", "push", "\x1b[2K--force"], "cwd": "/p"}
        now = time.time()
        self.question = Question(action, "p" * 64, "box", "run", "it pushes", now, now + 60)
        self.got: list[Granted | Refused] = []
        self._thread = Thread(target=lambda: self.got.append(here().inbox().ask(self.question)))
        self._thread.start()
        while not (waiting := here().inbox().waiting()):
            continue
        self.digest = waiting[0].digest

    def answer(self) -> Granted | Refused:
        self._thread.join()
        return self.got[0]

    def end(self) -> None:
        if self._thread.is_alive():
            main(["approve", self.digest, "--refuse"])
            self._thread.join()


@pytest.fixture
def asker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asker]:
    monkeypatch.setenv("AGENT_SANDBOX_STATE", str(tmp_path / "state"))
    made = Asker()
    yield made
    made.end()


def at_a_terminal(monkeypatch: pytest.MonkeyPatch, typed: str) -> None:
    import io
    import sys

    monkeypatch.setattr(messages, "at_a_terminal", lambda: True)
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))


def test_what_waits_is_shown_without_one_control_character(asker: Asker, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["approve"]) == 3, "nobody at a terminal: nothing is answered"
    shown = capsys.readouterr().out
    assert "git push '\\x1b[2K--force'" in shown and asker.digest in shown and shown.replace("\n", "").isprintable()


@pytest.mark.parametrize(("typed", "kind", "code"), [("y\n", Granted, 0), ("n\n", Refused, 0)])
def test_who_is_asked_at_a_terminal_answers(asker: Asker, monkeypatch: pytest.MonkeyPatch, typed: str, kind: type, code: int) -> None:
    at_a_terminal(monkeypatch, typed)
    assert main(["approve", asker.digest[:8]]) == code
    assert isinstance(asker.answer(), kind)


def test_enter_leaves_it(asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    at_a_terminal(monkeypatch, "\n")
    assert main(["approve"]) == 3 and len(here().inbox().waiting()) == 1


def test_unseen_only_the_whole_digest_will_do(asker: Asker, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["approve", "--yes"]) == 2 and main(["approve", asker.digest[:32], "--yes"]) == 2
    assert main(["approve", asker.digest, "--yes", "--refuse"]) == 2
    assert main(["approve", asker.digest, "--yes", "--for-run", "--timeout", "none"]) == 2
    assert main(["approve", asker.digest, "--yes", "--for-run", "--timeout", "10m"]) == 0
    assert isinstance(asker.answer(), Granted)


def test_no_is_said_by_a_verb_of_its_own_and_some_letters_will_do(asker: Asker, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deny"]) == 2 and main(["deny", asker.digest[:3]]) == 2 and main(["approve", "--refuse"]) == 2
    assert main(["deny", asker.digest[:8]]) == 0
    assert isinstance(asker.answer(), Refused)
    assert "git push" in capsys.readouterr().out, "it is shown all the same"


def test_another_digest_is_no_question(asker: Asker) -> None:
    assert main(["approve", "0" * 64, "--yes"]) == 2 and main(["approve", "abc"]) == 2
    assert asker.got == []


def test_programs_read_what_waits_and_answer_by_digest(asker: Asker, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["approve", "--json"]) == 0
    (waiting,) = json.loads(capsys.readouterr().out)["waiting"]
    assert waiting["digest"] == asker.digest
    assert main(["approve", asker.digest, "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["answered"] == "once"
    assert isinstance(asker.answer(), Granted)


def test_watching_asks_about_each_as_it_comes(asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    at_a_terminal(monkeypatch, "y\n")

    def enough(seconds: float) -> None:
        if asker.got:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", enough)
    assert main(["approve", "--watch"]) == 130
    assert isinstance(asker.answer(), Granted)


def test_with_nothing_waiting_nothing_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AGENT_SANDBOX_STATE", str(tmp_path / "state"))
    assert main(["approve"]) == 3 and "nothing is waiting" in capfd.readouterr().err
    assert main(["approve", "--watch"]) == 2


def test_who_visits_somebody_who_never_asked_makes_nothing_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    account = pwd.struct_passwd(("bob", "x", 4242, 4242, "", str(tmp_path / "bob"), ""))
    monkeypatch.setattr(pwd, "getpwnam", {"bob": account}.__getitem__)
    (tmp_path / "bob").mkdir()
    for name, what in (("bob", "no approval questions can be read"), ("nobody-at-all", "there is no user")):
        assert main(["approve", "--of", name]) == 2
        assert what in capfd.readouterr().err
    assert list((tmp_path / "bob").iterdir()) == []


def test_who_visits_sees_what_waits_and_answers_it(
    asker: Asker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state, keys = tmp_path / "bob/.local/state", tmp_path / "bob/.local/share/agent-sandbox"
    state.mkdir(parents=True)
    keys.mkdir(parents=True)
    (state / "agent-sandbox").symlink_to(tmp_path / "state")
    (keys / "keys").symlink_to(tmp_path / "state" / "ledger.jsonl.keys")
    account = pwd.struct_passwd(("bob", "x", 4242, 4242, "", str(tmp_path / "bob"), ""))
    monkeypatch.setattr(pwd, "getpwnam", {"bob": account}.__getitem__)
    assert main(["approve", "--of", "bob", asker.digest, "--yes"]) == 0
    assert asker.digest in capsys.readouterr().out and isinstance(asker.answer(), Granted)
