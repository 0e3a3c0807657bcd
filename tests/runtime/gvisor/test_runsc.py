"""The program `runsc`: what it can do is asked of it, and what it cannot is said before a guest is made."""

from __future__ import annotations

import json
import sys
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from agent_sandbox.cli.commands import doctor
from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.runtime.gvisor import runsc
from agent_sandbox.runtime.gvisor.agent_archive import archive
from agent_sandbox.runtime.gvisor.bundle import Container, configuration
from agent_sandbox.runtime.gvisor.runtime import GvisorRuntime

DISTRIBUTIONS = Path("/usr/bin/runsc")
HOW = {"platform": "systrap", "network": "none", "state": "/run/state", "bundle": "/run/bundle", "log": "/run/log"}


@pytest.fixture
def old() -> runsc.Runsc:
    """The distribution's runsc, if it is one that is too old: Debian 12's is of 2022."""
    if not DISTRIBUTIONS.exists():
        pytest.skip("there is no /usr/bin/runsc (apt-get install runsc)")
    found = runsc.find(str(DISTRIBUTIONS))
    if not found.lacks:
        pytest.skip(f"the distribution's runsc {found.version} is not too old")
    return found


def test_one_that_is_too_old_says_its_version_and_what_it_lacks_and_the_remedy(old: runsc.Runsc) -> None:
    assert old.version in old.lacks and "run --pass-fd" in old.lacks
    with pytest.raises(RuntimeUnavailable, match=old.version) as refusal:
        GvisorRuntime(path=old.path).program()
    assert runsc.ENOUGH in refusal.value.hint
    support = GvisorRuntime(path=old.path).probe()
    assert not support.available and old.version in support.missing["files-confined"]


def test_doctor_says_so_in_its_row(old: runsc.Runsc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(DISTRIBUTIONS.parent))
    monkeypatch.setattr(runsc, "SET_UP", "/nonexistent/runsc")
    row = doctor.gvisor()
    assert (row.name, row.status, row.required) == ("gvisor", "missing", False)
    assert old.lacks == row.found and "bookworm-backports" in row.remedy


def test_where_there_is_none_the_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(runsc, "SET_UP", str(tmp_path / "runsc"))
    row = doctor.gvisor()
    assert row.status == "missing" and row.found == "runsc is not installed" and "apt-get install" in row.remedy


def test_the_one_that_was_set_up_is_taken_where_the_distributions_is_too_old(old: runsc.Runsc, monkeypatch: pytest.MonkeyPatch) -> None:
    if runsc.find(None).lacks:
        pytest.skip("no current runsc was set up (make setup, as root)")
    current = runsc.find(None).path
    monkeypatch.setenv("PATH", str(DISTRIBUTIONS.parent))
    monkeypatch.setattr(runsc, "SET_UP", current)
    assert runsc.find(None).path == current
    monkeypatch.setattr(runsc, "SET_UP", "/nonexistent/runsc")
    assert runsc.find(None).path == old.path, "the control arm"


@pytest.mark.parametrize(("body", "why"), [("sleep 600", "does not answer"), ("exit 1", "")])
def test_one_that_hangs_or_fails_when_it_is_asked_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, why: str) -> None:
    program = tmp_path / "runsc"
    program.write_text(f"#!/bin/sh\nexec {body}\n" if body.startswith("sleep") else f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setattr(runsc, "_SECONDS", 1.0 if why else 20.0)
    with pytest.raises(RuntimeUnavailable, match=why or "of an unknown version is too old"):
        GvisorRuntime(path=str(program)).program()


def test_only_flags_that_it_has_are_on_its_command_line(old: runsc.Runsc) -> None:
    line = old.command("/runsc", **HOW, passed=(3, 4))
    assert line[0] == "/runsc" and "--rootless" in line and "--network=none" in line and line[-3:-1] == ("--pass-fd=3:3", "--pass-fd=4:4")
    bare = runsc.Runsc("/runsc", "1", frozenset({"platform"}), frozenset())
    assert not any(word.startswith(("--overlay2", "--file-access")) for word in bare.command("/runsc", **HOW, passed=()))


def test_a_container_has_the_view_no_capability_and_its_limits() -> None:
    container = Container("/view", ("python", "-c", "pass"), {"HOME": "/"}, "sandbox", 1 << 20, {"RLIMIT_NPROC": 12, "RLIMIT_FSIZE": None})
    config = json.loads(configuration(container))
    process = config["process"]
    assert config["root"] == {"path": "/view", "readonly": False} and process["noNewPrivileges"]
    assert set(map(tuple, process["capabilities"].values())) == {()} and len(process["capabilities"]) == 5
    assert process["rlimits"] == [{"type": "RLIMIT_NPROC", "soft": 12, "hard": 12}]
    assert all(mount["type"] in ("proc", "sysfs", "dev", "devpts", "tmpfs") for mount in config["mounts"]), (
        "nothing of the machine is bound"
    )


def test_the_archive_of_the_agent_imports_nothing_that_is_not_in_it(tmp_path: Path) -> None:
    """In an interpreter that has the archive and the standard library only."""
    import subprocess

    path = tmp_path / "agent.zip"
    path.write_bytes(archive())
    names = zipfile.ZipFile(BytesIO(archive())).namelist()
    assert "agent_sandbox/runtime/gvisor/agent.pyc" in names and not any(name.endswith(".py") for name in names)
    load = f"import sys; sys.path.insert(0, {str(path)!r}); import agent_sandbox.runtime.gvisor.agent as agent; print(agent.__file__)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", load], capture_output=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith(str(path).encode()), done.stderr
