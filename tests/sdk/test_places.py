"""Where things are: asked of the environment, in one place."""

from __future__ import annotations

import os

import pytest

from agent_sandbox.assembly import here


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
