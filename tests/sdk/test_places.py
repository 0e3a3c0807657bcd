"""Where things are: asked of the environment, in one place."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from agent_sandbox.assembly import here
from agent_sandbox.ledger.verify import evidence, examine
from agent_sandbox.ledger.writer import Ledger
from tests.ledger.samples import intent


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"AGENT_SANDBOX_STATE": "/s", "XDG_STATE_HOME": "/x", "HOME": "/h"}, "/s"),
        ({"XDG_STATE_HOME": "/x", "HOME": "/h"}, "/x/agent-sandbox"),
        ({"XDG_STATE_HOME": "relative", "HOME": "/h"}, "/h/.local/state/agent-sandbox"),
        ({"HOME": "/h"}, "/h/.local/state/agent-sandbox"),
    ],
)
def test_the_state_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str) -> None:
    for name in ("AGENT_SANDBOX_STATE", "XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert here().host.state == expected
    assert str(here().ledger().path) == f"{expected}/ledger.jsonl"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"AGENT_SANDBOX_KEYS": "/k", "AGENT_SANDBOX_STATE": "/s"}, "/k"),
        ({"AGENT_SANDBOX_STATE": "/s", "XDG_DATA_HOME": "/x"}, "/s/ledger.jsonl.keys"),
        ({"XDG_DATA_HOME": "/x"}, "/x/agent-sandbox/keys"),
        ({"XDG_DATA_HOME": "relative"}, "/h/.local/share/agent-sandbox/keys"),
    ],
)
def test_the_keys_are_away_from_the_ledger_unless_its_place_was_chosen(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str
) -> None:
    for name in ("AGENT_SANDBOX_KEYS", "AGENT_SANDBOX_STATE", "XDG_DATA_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/h", **environment}.items():
        monkeypatch.setenv(name, value)
    assert here().ledger().keys == here().host.keys == expected
    hidden = [mask.path for mask in here().masks_for("/p")]
    assert any(expected == path or expected.startswith(path + "/") for path in hidden)


def test_two_state_directories_have_a_ledger_and_keys_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One anchor for both would say of each that the other's entries are missing."""
    for name in ("AGENT_SANDBOX_KEYS", "AGENT_SANDBOX_STATE", "XDG_DATA_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))

    def use(state: str | None) -> Ledger:
        monkeypatch.setenv("XDG_STATE_HOME", state) if state else monkeypatch.delenv("XDG_STATE_HOME", raising=False)
        ledger = here().ledger()
        ledger.record(intent("a"))
        report = examine(ledger.path, evidence(ledger.keys))
        assert report.complete, report
        hidden = [mask.path for mask in here().masks((str(tmp_path / "p"),), searched=None)]
        assert any(ledger.keys == path or ledger.keys.startswith(path + "/") for path in hidden)
        assert str(tmp_path / ".local/share/agent-sandbox/keys") in hidden, "and so are the keys of the other"
        return ledger

    first = use(None)
    here().second_factor().enroll("me")
    second = use(str(tmp_path / "elsewhere"))
    assert here().second_factor().enrolled, "it is the user's, not the ledger's"
    assert first.keys != second.keys and first.keys == use(None).keys


def test_a_ledger_that_was_begun_with_shared_keys_keeps_to_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AGENT_SANDBOX_KEYS", "AGENT_SANDBOX_STATE", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    shared = str(tmp_path / ".local/share/agent-sandbox/keys")
    Ledger(here().ledger().path, clock=time.time, keys=shared).record(intent("a"))
    assert here().ledger().keys == shared
    here().ledger().record(intent("b"))


@pytest.mark.parametrize("home", ["", "relative"])
def test_a_home_that_the_environment_does_not_know_is_the_accounts(monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    monkeypatch.setenv("HOME", home)
    assert os.path.isabs(here().host.home)


def test_the_accounts_own_home_counts_when_the_environment_names_another(monkeypatch: pytest.MonkeyPatch) -> None:
    account = here().host.home
    monkeypatch.setenv("HOME", "/nonexistent")
    if os.path.isdir(account) and account.startswith(("/home/", "/root")):
        assert here().host.homes == ("/nonexistent", account)
    assert not {*here().host.homes} & {*here().host.homes_of_others}


def test_directories_of_the_system_are_nobodys_home() -> None:
    assert not {"/", "/bin", "/usr/sbin", "/dev"} & set(here().host.homes_of_others)
