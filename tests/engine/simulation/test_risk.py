"""How much to mind an effect: pure, and never less for more."""

from __future__ import annotations

import pytest

from agent_sandbox.engine.simulation import risk
from agent_sandbox.engine.simulation.risk import Level, Risk
from agent_sandbox.policy.network_presets import index_hosts
from agent_sandbox.readers.shell.effects import EffectKind as Does
from agent_sandbox.workspace.changes import Change, Kind
from agent_sandbox.workspace.nodes import EntryType, Node
from agent_sandbox.workspace.protected import CLASSES, HISTORY

FILE, DIRECTORY = Node(EntryType.FILE, 0o644, 0, 0, 3), Node(EntryType.DIRECTORY, 0o755, 0, 0)


def level(change: Change, *classes: str, place: str = "project") -> Level:
    return risk.of_change(change, classes, place=place).level


def test_what_a_program_does_all_day_is_low() -> None:
    assert level(Change("/p/a", Kind.ADDED, None, FILE)) is Level.LOW
    assert level(Change("/p/a", Kind.MODIFIED, FILE, FILE)) is Level.LOW
    assert level(Change("/p/a", Kind.DELETED, DIRECTORY, None, inside=1000), place="noise") is Level.LOW


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_what_runs_or_is_trusted_by_itself_is_never_low(name: str) -> None:
    found = risk.of_change(Change("/p/a", Kind.ADDED, None, FILE), (name,), place="project")
    assert found == Risk(Level.MEDIUM if name == HISTORY else Level.HIGH, CLASSES[name])


def test_what_goes_away_counts_by_how_much_it_is() -> None:
    assert level(Change("/p/a", Kind.DELETED, FILE, None)) is Level.MEDIUM
    assert level(Change("/p/d", Kind.DELETED, DIRECTORY, None, inside=3)) is Level.MEDIUM
    assert level(Change("/p/d", Kind.DELETED, DIRECTORY, None, inside=11)) is Level.HIGH
    assert level(Change("/p/d", Kind.RETYPED, DIRECTORY, FILE, inside=11)) is Level.HIGH
    assert [risk.of_deletions(count).level for count in (0, 10, 11, 100, 101)] == [
        Level.LOW,
        Level.LOW,
        Level.MEDIUM,
        Level.MEDIUM,
        Level.HIGH,
    ]


def test_where_it_is_and_what_it_is_count_too() -> None:
    added = {path: Change(path, Kind.ADDED, None, FILE) for path in ("/etc/passwd", "/etcetera", "/home/u/x", "/usr")}
    found = {path: level(change, place="elsewhere") for path, change in added.items()}
    assert found == {"/etc/passwd": Level.HIGH, "/etcetera": Level.MEDIUM, "/home/u/x": Level.MEDIUM, "/usr": Level.HIGH}
    assert level(Change("/p/a", Kind.ADDED, None, Node(EntryType.FILE, 0o666, 0, 0))) is Level.MEDIUM
    assert level(Change("/p/a", Kind.ADDED, None, Node(EntryType.DIRECTORY, 0o1777, 0, 0))) is Level.LOW
    assert level(Change("/p/a", Kind.ADDED, None, Node(EntryType.SYMLINK, 0o777, 0, 0, target="b"))) is Level.LOW
    assert level(Change("/p/a", Kind.ADDED, None, Node(EntryType.DEVICE, 0o600, 0, 0, device=1))) is Level.HIGH
    assert level(Change("/p/a", Kind.OWNER, FILE, FILE)) is Level.MEDIUM
    assert level(Change("/p/a", Kind.ADDED, None, FILE, masks_real=True)) is Level.HIGH


def test_one_class_more_never_makes_it_less() -> None:
    change = Change("/p/a", Kind.DELETED, FILE, None)
    order = list(Level)
    for name in CLASSES:
        assert order.index(level(change, name)) >= order.index(level(change))


def test_the_rest_of_a_plan() -> None:
    assert risk.of_request("connect", "169.254.169.254:80").level is Level.HIGH
    assert risk.of_request("connect", "[fd00:ec2::254]:80").level is Level.HIGH
    assert risk.of_request("resolve", "metadata.google.internal").level is Level.HIGH
    assert risk.of_request("connect", "example.com:443").level is Level.MEDIUM
    assert risk.of_request("listen", "0.0.0.0:80").level is Level.LOW
    assert risk.of_secret("variable", "").level is Level.MEDIUM and risk.of_secret("file", "private keys").level is Level.HIGH
    assert risk.of_end(0, "exited").level is Level.LOW
    assert risk.of_end(1, "exited").level is Level.MEDIUM and risk.of_end(0, "timed-out").level is Level.MEDIUM
    assert risk.of_program(True).level is Level.LOW and risk.of_program(False).level is Level.MEDIUM
    assert {kind for kind in Does if risk.of_prediction(kind).level is Level.HIGH} == {Does.DESTROYS, Does.PRIVILEGE, Does.SYSTEM}
    assert risk.of_unlisted("") == risk.NONE and risk.of_unlisted("too much").level is Level.HIGH
    assert risk.of_unseen("") == risk.NONE and risk.of_unseen("too many").level is Level.MEDIUM
    assert risk.worst([]) == risk.NONE


@pytest.mark.parametrize(
    ("method", "host", "path", "secrets", "level"),
    [
        ("GET", index_hosts()[0], "/simple/x/", (), Level.LOW),
        ("HEAD", next(each for each in index_hosts() if each.startswith("*")).replace("*", "mirror"), "/x", (), Level.LOW),
        ("GET", index_hosts()[0], "/simple/x/", ("KEY",), Level.MEDIUM),
        ("GET", "api.example.com", "/", (), Level.MEDIUM),
        ("GET", "api.example.com", "/", ("KEY",), Level.HIGH),
        ("POST", "git.example.com", "/x/git-upload-pack", (), Level.MEDIUM),
        ("POST", "git.example.com", "/x/git-receive-pack", (), Level.HIGH),
        ("DELETE", index_hosts()[0], "/x", (), Level.HIGH),
        ("PUT", "api.example.com", "/x", ("KEY",), Level.HIGH),
    ],
)
def test_the_risk_of_a_request_is_by_what_it_can_change_where_and_with_what(
    method: str, host: str, path: str, secrets: tuple[str, ...], level: Level
) -> None:
    found = risk.of_http(method, host, path, secrets)
    assert found.level is level and found.why
    assert ("secret" in found.why) is bool(secrets)
