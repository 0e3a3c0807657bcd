"""Under what commands are learnt: the system's policy file, and nothing that it does not leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_sandbox import policy_files
from agent_sandbox.cli.context import ceiling_of, project_of
from agent_sandbox.cli.options import PolicyOptions
from agent_sandbox.policy.model import MIB


def test_what_is_learnt_is_learnt_under_the_systems_file_alone(tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_files, "SYSTEM", str(tmp_path / "system.toml"))
    (tmp_path / "system.toml").write_text('[files]\ndenied = ["/srv"]\n[limits]\nmemory_mb = 512\n')
    (project / "agent-sandbox.toml").write_text("[files]\nwrite = false\n[limits]\ntimeout_seconds = 5\n")
    policy = ceiling_of(PolicyOptions(limits=(("wall_seconds", 60),)), project_of(str(project)))
    assert policy.files.write and policy.files.bars("/srv/x")
    assert (policy.limits.memory_bytes, policy.limits.wall_seconds) == (512 * MIB, 60)
