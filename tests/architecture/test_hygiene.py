"""What a reader may expect of every file: small, introduced, finished, and true on any machine."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT, Module, modules

LONGEST_FILE = 600

# Written in pieces, so that this file does not find itself.
PLACES_OF_ONE_MACHINE = re.compile(
    r"(?<![\w.}/-])/(?:" + "work/|" + r"root/\.(?:pyenv|cache|local)" + "|tmp/" + "team|opt/(?:wheels|pypi))"
)
PACKAGE_HOSTS = re.compile(
    "registry." + r"npmjs|pypi\." + r"org/simple|(?:deb|archive|security)\." + r"(?:debian|ubuntu)\.|" + "--(?:extra-)?index" + "-url"
)
PUBLIC_HOSTS = "src/agent_sandbox/policy/network_presets.py"  # the network preset `packages` is a list of them
UNFINISHED = re.compile(r"\b(?:TO" + "DO|FIX" + "ME|XX" + r"X|HA" + r"CK)\b")


def texts() -> Iterator[tuple[str, str]]:
    """Every text file that belongs to the project, by its path in the checkout."""
    for name in project_files():
        try:
            yield name, (ROOT / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):  # not a text; or removed, and not yet committed as such
            continue


def project_files() -> list[str]:
    """What git has or would add. Without git (an unpacked archive), everything but what tools have made."""
    listing = subprocess.run(
        ["git", "-c", "safe.directory=*", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode == 0:
        return listing.stdout.rstrip("\0").split("\0")
    made = re.compile(r"(?:^|/)(?:\.[a-z_]+|__pycache__|build|dist)(?:/|$)")
    found = (os.path.relpath(Path(folder, name), ROOT) for folder, _, names in os.walk(ROOT) for name in names)
    return [name for name in found if not made.search(os.path.dirname(name))]


def findings(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{name}:{number}: {line.strip()}"
        for name, text in texts()
        for number, line in enumerate(text.splitlines(), start=1)
        if pattern.search(line)
    ]


def test_the_files_of_the_project_are_found() -> None:
    assert {"pyproject.toml", "Makefile", "src/agent_sandbox/errors.py"} <= {name for name, _ in texts()}


def test_no_file_mentions_a_place_on_one_machine() -> None:
    assert findings(PLACES_OF_ONE_MACHINE) == []


@pytest.mark.parametrize("text", ["see /" + "work/main", "'/root/" + ".pyenv/shims'", "`/" + "tmp/team/x`"])
def test_a_place_on_one_machine_is_recognised(text: str) -> None:
    assert PLACES_OF_ONE_MACHINE.search(text)


@pytest.mark.parametrize("text", ["upper/work/x", "{layer}/work/", "/root/.ssh/id_rsa"])
def test_a_path_that_any_machine_may_have_is_not_mistaken_for_one(text: str) -> None:
    assert not PLACES_OF_ONE_MACHINE.search(text)


def test_no_file_names_a_package_host_because_that_is_for_the_machine_to_configure() -> None:
    named = findings(PACKAGE_HOSTS)
    assert [each for each in named if not each.startswith(PUBLIC_HOSTS)] == []
    assert named, "the rule watches nothing: the preset names none"


def test_nothing_is_left_for_later() -> None:
    assert findings(UNFINISHED) == []


def test_every_source_file_is_short_enough_to_read_at_one_sitting() -> None:
    assert [f"{module.name}: {lines}" for module in modules() if (lines := len(module.text.splitlines())) > LONGEST_FILE] == []


def test_every_module_says_why_it_exists() -> None:
    assert [module.name for module in modules() if not ast.get_docstring(module.tree)] == []


def test_every_module_with_code_postpones_its_annotations() -> None:
    def postpones(module: Module) -> bool:
        return any(name == "__future__.annotations" for name, _ in module.imports())

    assert [module.name for module in modules() if len(module.tree.body) > 1 and not postpones(module)] == []
