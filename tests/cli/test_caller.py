"""Which variables a guest gets."""

from __future__ import annotations

import pytest

from agent_sandbox.cli.caller import guest_environment
from agent_sandbox.errors import PolicyError


def test_a_name_that_nobody_has_listed_is_not_passed_on() -> None:
    ours = {
        "PATH": "/bin",
        "LC_ALL": "C",
        "GITHUB_TOKEN": "x",
        "SSH_AUTH_SOCK": "/s",
        "LD_PRELOAD": "/l.so",
        "BASH_ENV": "/b",
        "HOME": "/h",
    }
    assert guest_environment(ours, (), home="/h") == {"PATH": "/bin", "LC_ALL": "C", "HOME": "/h", "LANG": "C.UTF-8"}


def test_what_is_asked_for_is_given_and_overrides() -> None:
    given = guest_environment({"TOKEN": "x", "PATH": "/bin"}, ["TOKEN", "PATH=/mine", "EMPTY="], home="/h")
    assert (given["TOKEN"], given["PATH"], given["EMPTY"]) == ("x", "/mine", "")


@pytest.mark.parametrize("text", ["", "=", "=value", "UNSET"])
def test_what_is_no_name_or_not_there_is_refused(text: str) -> None:
    with pytest.raises(PolicyError):
        guest_environment({}, [text], home="/h")
