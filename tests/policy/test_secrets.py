"""Secrets are hidden unless they are asked for by name."""

from __future__ import annotations

import pytest

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.model import cloned
from agent_sandbox.policy.secrets import SHOWN_IN_HOME, FoundMask, Mask, default_masks, names_a_secret, reveal

STATE = "/home/u/.local/state/agent-sandbox"
MASKS = default_masks(
    homes=["/home/u"], homes_of_others=["/root", "/", "/home/v", "/srv/git"], projects=["/home/u/app", "/home/v/lib"], state_dirs=(STATE,)
)
PATHS = [mask.path for mask in MASKS]


@pytest.mark.parametrize(
    "path",
    [
        "/home/u/.ssh",
        "/root",
        "/.ssh",
        "/home/v/.ssh",
        "/srv/git/.bash_history",
        "/etc/shadow",
        "/run/docker.sock",
        "/home/u/app/.env",
        "/home/v/lib/.env",
        STATE,
    ],
)
def test_it_is_masked_by_default(path: str) -> None:
    assert path in PATHS


@pytest.mark.parametrize(
    "path",
    [
        *(".config/mise/age.txt", ".config/pnpm/auth.ini", ".deno/deployctl/credentials.json", ".stack/upload/credentials.json"),
        *(".dotnet/corefx/cryptography/x509stores/my/1.pfx", ".sbt/gpg/secring.asc", ".sbt/sonatype_central_credentials"),
        *(".local/share/cargo/credentials.toml", ".cache/ms-playwright/daemon/1/ud-default-chrome/Default/Cookies"),
        *(".julia/logs/repl_history.jl", ".cache/deno/deno_history.txt", ".java/.userPrefs/x/prefs.xml"),
    ],
)
def test_what_tools_keep_in_a_directory_that_a_home_shows_is_masked(path: str) -> None:
    assert any(f"/home/u/{path}".startswith(f"{masked}/") or masked == f"/home/u/{path}" for masked in PATHS)
    assert any(path.startswith(f"{shown}/") for shown in SHOWN_IN_HOME), "or it would be hidden without a mask of its own"


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "/etc/machine-id",
        "/var/log",
        "/home/u",
        "/home/u/app",
        "/home/u/app/.env.example",
        "/home/u/.config/pip/pip.conf",
        "/home/v/lib",
        "/srv/git",
    ],
)
def test_it_stays_visible(path: str) -> None:
    assert not any(path == masked or path.startswith(masked + "/") for masked in PATHS)


def test_the_home_of_somebody_else_is_there_but_empty() -> None:
    assert [mask.path for mask in MASKS if mask.stays] == ["/root"]


def test_a_project_that_is_the_whole_machine_opens_nobodys_home() -> None:
    assert "/home/v" in [mask.path for mask in default_masks(homes=["/"], homes_of_others=["/home/v"], projects=["/"])]


def test_a_home_that_is_revealed_still_hides_what_ones_own_does() -> None:
    revealed = {mask.path for mask in reveal(MASKS, "/root")}
    assert "/root" not in revealed
    assert {"/root/.ssh", "/root/.bash_history"} <= revealed


def test_masks_are_sorted_unique_and_say_why() -> None:
    assert sorted(set(PATHS)) == PATHS
    assert all(mask.why for mask in MASKS)


def test_revealing_removes_exactly_one() -> None:
    assert set(MASKS) - set(reveal(MASKS, "/home/u/.ssh/")) == {mask for mask in MASKS if mask.path == "/home/u/.ssh"}


def test_revealing_what_is_not_masked_is_an_error_that_names_the_mask_above() -> None:
    with pytest.raises(PolicyError, match=r"reveal that") as refusal:
        reveal(MASKS, "/home/u/.ssh/config")
    assert "/home/u/.ssh;" in refusal.value.hint
    with pytest.raises(PolicyError, match="nothing is masked"):
        reveal(MASKS, "/home/u/readme")


def test_a_variable_that_is_called_like_a_secret_is_taken_for_one() -> None:
    assert [name for name in ("API_KEY", "GITHUB_TOKEN", "DB_PASSWORD", "PWD", "SSH_AUTH_SOCK", "HOME") if names_a_secret(name)] == [
        *("API_KEY", "GITHUB_TOKEN", "DB_PASSWORD")
    ]


@pytest.mark.parametrize("states", [(), (STATE,)], ids=["no state", "a state elsewhere"])
def test_keys_outside_the_state_are_hidden_by_a_mask_of_their_own(states: tuple[str, ...]) -> None:
    masks = default_masks(homes=[], state_dirs=states, keys_dirs=("/home/u/.config/keys",))
    assert "/home/u/.config/keys" in [mask.path for mask in masks]


def test_keys_inside_the_state_are_hidden_with_it() -> None:
    masks = default_masks(homes=[], state_dirs=(STATE,), keys_dirs=(f"{STATE}/keys",))
    assert [mask.path for mask in masks if mask.path.startswith(STATE)] == [STATE]


def test_masks_found_on_the_disk_are_hidden_and_are_no_part_of_the_policys_digest() -> None:
    """A dot-file that appears between a simulation and its carrying out must not make another policy of it."""
    found = FoundMask("/home/u/.newtool", "found", remark="why")
    rules = cloned(masks=MASKS)
    with_found = cloned(masks=(*MASKS, found))
    assert with_found.files.bars("/home/u/.newtool/token") and not rules.files.bars("/home/u/.newtool/token")
    assert with_found.digest() == rules.digest()
    assert cloned(masks=(*MASKS, Mask("/home/u/.newtool", "listed"))).digest() != rules.digest(), "the control arm"


def test_revealing_a_file_that_would_be_hidden_if_it_held_a_secret_is_no_mistake() -> None:
    assert reveal(MASKS, "/home/u/app/web/.env") == MASKS
    assert reveal(MASKS, "/home/u/app/tls.pem") == MASKS
    with pytest.raises(PolicyError, match="nothing is masked"):
        reveal(MASKS, "/home/u/app/main.py")
