"""How a secret for hosts is written, and what it may be bound to."""

from __future__ import annotations

import pytest

from agent_sandbox import Secret
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.bound_secrets import BoundSecret, check_bound, new_placeholder
from agent_sandbox.policy.network_presets import network_of

VALUE = "tok-4f9a8b7c6d5e4f3a2b1c"


@pytest.mark.parametrize(
    "written, secret",
    [
        ("T@a.example", Secret("T", ["a.example"])),
        ("T@A.Example,*.b.example", Secret("T", ["a.example", "*.b.example"])),
        ("T=file:/x@y/z@a.example", Secret("T", ["a.example"], source="file:/x@y/z")),
        ("T=command:pass show 'a@b'@a.example", Secret("T", ["a.example"], source="command:pass show 'a@b'")),
        ("T=keyring:git/hub/me@a.example", Secret("T", ["a.example"], source="keyring:git/hub/me")),
        ("T=env:OTHER@a.example+query:key", Secret("T", ["a.example"], "query:key", "env:OTHER")),
    ],
)
def test_a_secret_is_written_as_a_line(written: str, secret: Secret) -> None:
    assert Secret.read(written) == secret


@pytest.mark.parametrize(
    "written",
    [
        *("", "T", "T@", "@a.example", "T@*", "1T@a.example", "T=@a.example", "T=ftp:x@a.example", "T=file:@a.example"),
        *("T=keyring:x@a.example", "T@a.example+", "T@a.example+header:", "T@a.example+cookie", "T@https://a.example/", "T@a.example:443"),
    ],
)
def test_a_line_that_is_not_understood_is_refused(written: str) -> None:
    with pytest.raises(PolicyError):
        Secret.read(written)


def test_a_value_that_was_written_for_a_name_is_not_shown() -> None:
    for written in (f"{VALUE}@a.example", VALUE, f"{VALUE}=file:/x@a.example"):
        with pytest.raises(PolicyError) as refused:
            Secret.read(written)
        assert VALUE not in f"{refused.value!r} {refused.value.message} {refused.value.hint}"


def test_no_representation_shows_a_value() -> None:
    assert VALUE not in repr(Secret("T", ["a.example"], value=VALUE))
    assert VALUE not in repr(BoundSecret("T", new_placeholder("T", b"x" * 12), VALUE, ("a.example",)))
    assert VALUE in BoundSecret("T", "p", VALUE, ("a.example",)).value


def test_a_secret_opens_no_host() -> None:
    rules = network_of(["a.example", "*.b.example", "c.example+uninspected"])
    check_bound([Secret("T", ["a.example", "x.b.example", "*.b.example"])], rules)
    for host, why in (("d.example", "--network d.example"), ("c.example", "unread"), ("*.a.example", "does not allow")):
        with pytest.raises(PolicyError, match=why):
            check_bound([Secret("T", [host])], rules)
    with pytest.raises(PolicyError, match="twice"):
        check_bound([Secret("T", ["a.example"])] * 2, rules)
