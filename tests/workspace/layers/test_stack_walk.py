from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.kernel.mount_plan import quote_target
from agent_sandbox.workspace.changes import is_noise
from agent_sandbox.workspace.layers.history import layer_targets
from tests.workspace.layers.overlays import make_layer

AWKWARD = ["/", "/home", "/home/a b", "/home/%2F", "/" + "ü" * 100 + "/x", os.fsdecode(b"/\xff"), "/~x", "/a/.b-c_d"]


def test_layers_are_found_again_by_their_targets(tmp_path: Path) -> None:
    layers = os.open(tmp_path, os.O_RDONLY)
    for target in AWKWARD:
        key = make_layer(layers, target)
        assert make_layer(layers, target) == key
        assert sorted({"upper", "work"} - set(os.listdir(tmp_path / key))) == []
    (tmp_path / "stray").mkdir()
    (tmp_path / "~00").mkdir()
    assert layer_targets(layers) == tuple(sorted(AWKWARD))
    os.close(layers)


@settings(database=None)
@given(st.lists(st.binary(min_size=1).map(lambda raw: b"/" + raw.replace(b"\0", b"0")), max_size=5, unique=True))
def test_no_two_targets_share_a_key_and_every_key_is_a_file_name(targets: list[bytes]) -> None:
    keys = [quote_target(os.fsdecode(target)) for target in targets]
    assert len(set(keys)) == len(targets)
    assert all(len(key) <= 255 and "/" not in key and key not in (".", "..") for key in keys)


def test_a_relative_path_has_no_key() -> None:
    with pytest.raises(ValueError, match="absolute"):
        quote_target("home")


@pytest.mark.parametrize(
    "path",
    ["/p/__pycache__/a.pyc", "/p/.pytest_cache", "/p/node_modules/.cache/x", "/home/a/.cache/pip/x", "/root/.npm/_logs", "/tmp/x", "/run"],
)
def test_caches_and_scratch_are_noise(path: str) -> None:
    assert is_noise(path)


@pytest.mark.parametrize("path", ["/p/a.py", "/home/a/tmp/x", "/tmpfile", "/p/.cache/notes", "/p/pip/x", "/p/node_modules/x/index.js"])
def test_everything_else_is_not(path: str) -> None:
    assert not is_noise(path)
