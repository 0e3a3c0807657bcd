"""The one remedy that applies, for each kind of machine that refuses."""

from __future__ import annotations

import pytest

from agent_sandbox.cli.remedies import Situation, idmapping_remedy, remedy

HEALTHY = Situation("6.8.0-31-generic", root=False)


def test_where_nothing_is_in_the_way_there_is_no_remedy() -> None:
    assert remedy(HEALTHY) == ""


@pytest.mark.parametrize(
    ("here", "words"),
    [
        (Situation("6.8.0-31-generic", root=False, apparmor_restricts=True), "kernel.apparmor_restrict_unprivileged_userns=0"),
        (Situation("6.1.0", root=False, max_user_namespaces=0), "user.max_user_namespaces="),
        (Situation("5.15.0", root=False, userns_clone=0), "kernel.unprivileged_userns_clone=1"),
        (Situation("6.1.0", root=True, container="docker", filtered=True), "--security-opt seccomp=unconfined"),
        (Situation("6.1.0", root=True, container="docker"), "as an ordinary user"),
        (Situation("4.4.0-19041-Microsoft", root=False, wsl=1), "wsl --set-version"),
        (Situation("5.10.16.3-microsoft-standard-WSL2", root=False, wsl=2), "wsl --update"),
        (Situation("4.19.0-26-amd64", root=False), "too old"),
    ],
)
def test_the_remedy_fits_the_machine(here: Situation, words: str) -> None:
    assert words in remedy(here)


def test_a_container_is_blamed_only_for_what_it_refuses() -> None:
    root, user = (Situation("6.1.0", root=root, container="podman", filtered=True) for root in (True, False))
    assert "seccomp" in remedy(root) and "seccomp" in remedy(user)
    assert "seccomp" not in remedy(root, namespaces_work=True) and "ordinary user" in remedy(root, namespaces_work=True)
    assert "seccomp profile" not in remedy(user, namespaces_work=True)


@pytest.mark.parametrize("container", ["", "docker"])
def test_inside_a_sandbox_of_this_program_no_container_engine_is_blamed(container: str) -> None:
    nested = Situation("6.1.0", root=False, container=container, filtered=True, nested=True)
    assert "a sandbox of agent-sandbox" in remedy(nested) and "docker" not in remedy(nested) + nested.name
    assert "a sandbox of agent-sandbox" in idmapping_remedy(nested)


def test_switches_that_do_not_bind_root_are_not_blamed_for_what_root_meets() -> None:
    assert remedy(Situation("6.8.0", root=True, apparmor_restricts=True, userns_clone=0)) == ""


@pytest.mark.parametrize(("release", "version"), [("6.18.44-fc", (6, 18)), ("5.10", (5, 10)), ("7", (7, 0)), ("odd", (0, 0))])
def test_versions_are_read_from_whatever_uname_says(release: str, version: tuple[int, int]) -> None:
    assert Situation(release, root=True).version == version


def test_this_machine_can_be_looked_at() -> None:
    assert Situation.look().name.startswith("Linux ")
