"""Which program runs a language, and what of the machine it needs."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from agent_sandbox.engine.plan_launch import NATIVE, prepare, tools
from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.kernel.elf import loader_of
from agent_sandbox.runtime.base import PythonCode, Script

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
