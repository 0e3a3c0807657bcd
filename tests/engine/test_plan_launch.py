"""Which program runs a language, and what of the machine it needs."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from agent_sandbox._fast.values import replace
from agent_sandbox.engine.plan_launch import NATIVE, LaunchPlanner, prepare, tools
from agent_sandbox.engine.work import Command, Work
from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.kernel import mountinfo
from agent_sandbox.kernel.elf import loader_of
from agent_sandbox.kernel.mount_plan import Copies, MountPlan, Overlay, ThrowAway
from agent_sandbox.policy.model import CLONED_LIMITS, cloned, locked
from agent_sandbox.policy.paths import parse
from agent_sandbox.policy.secrets import Mask
from agent_sandbox.runtime.base import PythonCode, Script
from agent_sandbox.runtime.process.runtime import TRAITS
from agent_sandbox.workspace.view.plan import MachineFacts

PATH = "/usr/local/bin:/usr/bin:/bin"


def test_python_runs_on_the_callers_own_interpreter_and_packages() -> None:
    prepared = prepare("python", "pass", arguments=("a",), search_path=PATH, processes=False)
    assert prepared.program == PythonCode("pass", ("a",))
    shown = (*prepared.needs.trees, *prepared.needs.files)
    packages = next(path for path in sys.path if path.endswith("-packages"))
    for needed in (os.path.realpath(sys.executable), packages):
        assert any(needed == path or needed.startswith(path + "/") for path in shown), needed


@pytest.mark.parametrize("language", sorted(NATIVE))
def test_a_native_language_runs_its_interpreter_on_a_file(language: str) -> None:
    prepared = prepare(language, "x", arguments=("a",), search_path=PATH, processes=False)
    assert isinstance(prepared.program, Script)
    assert prepared.program.words[0] == os.path.realpath(shutil.which(NATIVE[language].commands[0], path=PATH) or "")
    assert prepared.program.words[0] in prepared.executables


def test_a_missing_interpreter_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(RuntimeUnavailable) as caught:
        prepare("ruby", "x", arguments=(), search_path=str(tmp_path), processes=False)
    assert caught.value.missing == ("ruby",)
    assert "apt-get install ruby" in caught.value.hint


def test_other_programs_of_the_system_are_shown_only_where_processes_are_allowed() -> None:
    assert "/usr" not in prepare("bash", "x", arguments=(), search_path=PATH, processes=False).needs.tools
    assert "/usr" in prepare("bash", "x", arguments=(), search_path=PATH, processes=True).needs.tools
    assert "/usr" in tools().tools


def test_no_home_and_no_configuration_of_the_machine_is_needed() -> None:
    needs = prepare("javascript", "x", arguments=(), search_path=PATH, processes=False).needs
    made = dict(needs.contents)
    assert not any(path.startswith(("/home", "/root", "/etc", "/var/log")) for path in (*needs.trees, *needs.files))
    assert b"/bin/bash" not in made["/etc/passwd"], "the account file is ours, not the machine's"


def test_the_loader_of_a_program_is_found_in_its_header() -> None:
    loaders = loader_of(os.path.realpath("/bin/true"))
    assert loaders
    assert all(os.path.exists(path) for path in loaders)


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\n", b"\x7fELF\x02", b"\x7fELF\x02" + b"\xff" * 59, b"\x7fELF\x01" + b"\0" * 200])
def test_a_file_that_is_no_program_has_no_loader(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    assert loader_of(str(tmp_path / "file")) == ()


def _plan(planner: LaunchPlanner) -> MountPlan:
    return planner.launch(Work(Command(("true",)), {"PATH": PATH}), TRAITS, ThrowAway(1 << 20), CLONED_LIMITS).root


def _masked(plan: MountPlan) -> set[str]:
    overlays = [step for step in plan.steps if isinstance(step, Overlay)]
    return {os.path.join(overlay.target, mask.path) for overlay in overlays for mask in overlay.masks}


def test_a_plan_is_used_again_while_nothing_it_rests_on_has_changed(tmp_path: Path) -> None:
    masks = (Mask(f"{tmp_path}/.ssh", "keys"), Mask(f"{tmp_path}/.config/gh", "tokens"))
    planner = LaunchPlanner(cloned(masks=masks), str(tmp_path), MachineFacts.look)
    plan = _plan(planner)
    assert _plan(planner) is plan
    (tmp_path / "unrelated").write_text("x")
    assert _plan(planner) is plan
    (tmp_path / ".config").mkdir()
    assert _plan(planner) is not plan


def test_a_secret_that_becomes_a_link_is_hidden_where_it_leads_in_the_next_run(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    planner = LaunchPlanner(cloned(masks=(Mask(f"{tmp_path}/.ssh", "keys"),)), str(tmp_path), MachineFacts.look)
    assert f"{tmp_path}/elsewhere" not in _masked(_plan(planner)), "the control arm: it is no secret yet"
    (tmp_path / ".ssh").symlink_to("elsewhere")
    assert f"{tmp_path}/elsewhere" in _masked(_plan(planner))


def test_a_mount_that_comes_or_goes_makes_another_plan(tmp_path: Path) -> None:
    here = MachineFacts(mountinfo.visible(mountinfo.parse(b"1 0 8:1 / / rw - ext4 /dev/sda rw\n")), True)
    disk = mountinfo.parse(b"2 1 8:2 / %s rw - ext4 /dev/sdb rw\n" % os.fsencode(tmp_path))
    facts = [here]
    planner = LaunchPlanner(cloned(masks=()), None, lambda: facts[0])
    plan = _plan(planner)
    facts[0] = replace(here, mounts=(*here.mounts, *disk))
    more = _plan(planner)
    assert [step.target for step in more.steps if isinstance(step, Overlay)] == ["/", str(tmp_path)]
    facts[0] = here
    assert _plan(planner) == plan


def test_a_plan_with_copies_is_made_anew_for_each_run(tmp_path: Path) -> None:
    policy = locked(read=True, allowed=(parse(f"{tmp_path}/*.txt"),), processes=True)
    planner = LaunchPlanner(policy, None, MachineFacts.look)
    (tmp_path / "a.txt").write_text("a")
    _plan(planner)
    (tmp_path / "b.txt").write_text("b")
    (copies,) = (step for step in _plan(planner).steps if isinstance(step, Copies) and step.target == str(tmp_path))
    assert copies.entries == ("a.txt", "b.txt")
