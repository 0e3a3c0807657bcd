"""From names of tools to files: on a small PATH of our own, and for the machine's own tools held against their loader."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.model import ProgramRules
from agent_sandbox.workspace.view.executables import Executables, denied_files, find_executables

TRUE = os.path.realpath("/bin/true")


@pytest.fixture
def bin_(tmp_path: Path) -> Path:
    """A directory of tools."""
    place = tmp_path / "bin"
    place.mkdir()
    for name in ("mine", "other", "busybox"):
        shutil.copy(TRUE, place / name)
    (place / "alias").symlink_to("hop")
    (place / "hop").symlink_to("../bin/mine")
    (place / "applet").symlink_to("busybox")
    return place


def script(path: Path, first: str) -> Path:
    path.write_text(f"{first}\n")
    path.chmod(0o755)
    return path


def found(
    bin_: Path, *allowed: str, denied: tuple[str, ...] = (), shell: bool = True, lines: bool = False, project: str | None = None
) -> Executables:
    return find_executables(ProgramRules((allowed,), denied, shell, lines=lines), search_path=f"{bin_}:relative:", project=project)


def test_a_tool_is_its_file_with_its_loader_and_libraries(bin_: Path) -> None:
    box = found(bin_, "mine")
    assert box.programs[0] == str(bin_ / "mine") and "ld" in os.path.basename(box.programs[1])
    assert len(box.programs) == 2 and any("libc.so" in path for path in box.libraries)
    assert all(path == os.path.realpath(path) for path in (*box.programs, *box.libraries))
    assert str(bin_) in box.directories and "/usr/bin" in box.directories


def test_links_that_lead_to_a_tool_are_kept(bin_: Path) -> None:
    box = found(bin_, "alias")
    assert str(bin_ / "mine") in box.programs
    assert dict(box.links) == {str(bin_ / "alias"): "hop", str(bin_ / "hop"): "../bin/mine"}


def test_a_tool_is_not_there_by_another_name_of_what_is_denied(bin_: Path) -> None:
    box = found(bin_, "alias", denied=("mine",))
    assert str(bin_ / "mine") not in box.programs and "same file as mine" in " ".join(box.notes)


def test_who_asks_for_one_tool_of_many_in_one_file_has_to_ask_for_the_file(bin_: Path) -> None:
    with pytest.raises(PolicyError, match="everything in that") as refusal:
        found(bin_, "applet")
    assert "busybox" in refusal.value.hint
    assert str(bin_ / "busybox") in found(bin_, "busybox", "applet").programs
    assert str(bin_ / "busybox") not in found(bin_, "app*").programs, "a pattern does not"


def test_a_script_brings_its_interpreter_if_that_is_not_denied(bin_: Path) -> None:
    script(bin_ / "tool", f"#!/usr/bin/env -S {'mine'} --flag")
    box = found(bin_, "tool")
    assert {str(bin_ / "tool"), str(bin_ / "mine"), os.path.realpath("/usr/bin/env")} < set(box.programs)
    assert "tool is a script of mine, which is therefore allowed, too" in box.notes
    without = found(bin_, "tool", denied=("mine",))
    assert str(bin_ / "tool") not in without.programs and "tool is not there" in " ".join(without.notes)


def test_a_script_brings_no_env_that_is_denied(bin_: Path) -> None:
    script(bin_ / "tool", "#!/usr/bin/env mine")
    env = os.path.realpath("/usr/bin/env")
    assert {str(bin_ / "tool"), env} < set(found(bin_, "tool").programs), "the control arm: it does when that is not denied"
    box = found(bin_, "tool", denied=("env",))
    assert not {str(bin_ / "tool"), env} & set(box.programs) and "script of env, which is not allowed" in " ".join(box.notes)


def test_a_script_brings_no_file_with_many_tools_unless_that_is_allowed_by_name(bin_: Path) -> None:
    script(bin_ / "tool", f"#!{bin_}/applet")
    script(bin_ / "found", "#!/usr/bin/env applet")
    for name in ("tool", "found"):
        allowed = found(bin_, name, "busybox").programs
        assert {str(bin_ / name), str(bin_ / "busybox")} < set(allowed), "the control arm: it does when that is allowed"
        box = found(bin_, name)
        assert not {str(bin_ / name), str(bin_ / "busybox")} & set(box.programs) and "allow busybox by its name" in " ".join(box.notes)


def test_no_shell_is_there_where_there_is_to_be_none_by_whatever_name(bin_: Path) -> None:
    script(bin_ / "tool", "#!/bin/sh")
    (bin_ / "disguise").symlink_to(os.path.realpath("/bin/sh"))
    shell = os.path.realpath("/bin/sh")
    for names in (("tool",), ("disguise",), ("sh",), ("*",)):
        assert not {shell, str(bin_ / "tool")}.intersection(found(bin_, *names, shell=False, lines=True).programs), names
    assert shell in found(bin_, "tool").programs, "a script brings its shell along like any other interpreter"
    assert shell not in found(bin_, "mine").programs and shell in found(bin_, "mine", lines=True).programs
    assert shell not in found(bin_, "sh", denied=(os.path.basename(shell),)).programs


def test_a_tool_has_to_be_in_every_group(bin_: Path) -> None:
    box = find_executables(ProgramRules((("*",), ("mine", "other"), ("m*", "alias"))), search_path=str(bin_))
    assert str(bin_ / "mine") in box.programs and str(bin_ / "other") not in box.programs


def test_the_shims_of_a_version_manager_are_no_tools(tmp_path: Path, bin_: Path) -> None:
    shims = tmp_path / "shims"
    shims.mkdir()
    script(shims / "mine", "#!/bin/sh")
    box = find_executables(ProgramRules((("mine",),), lines=True), search_path=f"{shims}:{bin_}")
    assert str(shims / "mine") not in box.programs and str(bin_ / "mine") in box.programs
    assert str(shims) in box.directories, "so that the real one is found behind it"


def test_a_name_that_nothing_has_is_said(bin_: Path) -> None:
    (bin_ / "data").write_text("no program")
    for name in ("nobody-has-this", "data"):
        assert f"{name} is allowed, but there is no such program here" in found(bin_, name).notes


def test_what_interprets_says_what_that_opens(bin_: Path) -> None:
    shutil.copy(TRUE, bin_ / "python9.9")
    assert any("python9.9" in note and "runs what it is given" in note for note in found(bin_, "python*").notes)
    assert not found(bin_, "mine", lines=True).notes, "that a line is run by a shell needs no remark"


def test_directories_of_the_project_are_shown_as_they_are(bin_: Path) -> None:
    box = found(bin_, "mine", project=str(bin_.parent))
    assert str(bin_) not in box.directories and any("a file of the project" in note for note in box.notes)


def test_git_comes_with_its_helpers_and_every_program_with_all_that_its_loader_finds() -> None:
    box = find_executables(ProgramRules((("git",),)), search_path="/usr/bin")
    core = subprocess.run(["git", "--exec-path"], capture_output=True, check=True).stdout.decode().strip()
    assert os.path.realpath(f"{core}/git-remote-http") in box.programs
    for program in box.programs:
        said = subprocess.run(["ldd", program], capture_output=True, check=False).stdout.decode()
        for line in said.splitlines():
            if " => /" in line:
                assert os.path.realpath(line.split(" => ")[1].split()[0]) in box.libraries, line


def test_denied_tools_are_hidden_under_all_names_on_the_way(bin_: Path) -> None:
    hidden, notes = denied_files(ProgramRules(denied=("alias",)), search_path=str(bin_))
    assert {str(bin_ / name) for name in ("alias", "hop", "mine")} == set(hidden) and not notes
    hidden, notes = denied_files(ProgramRules(denied=("applet",)), search_path=str(bin_))
    assert hidden == (str(bin_ / "applet"),) and "deny busybox too" in notes[0], "the others in that file stay"
