"""A patch of a real project's tree, with the kind of change that tools make: carried over by git, compared by diff."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.e2e.program import Shell

PACKAGES = (
    *("asyncio", "collections", "concurrent", "ctypes", "email", "encodings", "html", "http", "importlib", "json", "lib2to3", "logging"),
    *("multiprocessing", "sqlite3", "unittest", "urllib", "xml"),
)
CHANGE = r"""
set -e
find . -name '*.py' -print0 | xargs -0 sed -i -e 's/\bself\b/this/g' -e 's/[ \t]*$//'
rm -r json && mkdir json && echo 'replaced = True' > json/__init__.py
mv html hypertext
rm -r logging && ln -s unittest logging
chmod +x urllib/request.py
printf '\0\1\2' | cat - email/mime/__init__.py > email/blob.bin
printf 'no newline' >> http/__init__.py
rm xml/__init__.py; mkdir xml/__init__.py; echo x > 'xml/__init__.py/a name "with" quotes'
"""


@pytest.mark.slow
def test_git_carries_over_what_tools_did_to_a_tree_of_hundreds_of_files(tmp_path: Path) -> None:
    project, copy, expected = tmp_path / "project", tmp_path / "copy", tmp_path / "expected"
    project.mkdir()
    for package in PACKAGES:
        source = Path(sysconfig.get_path("stdlib"), package)
        if source.is_dir():
            shutil.copytree(source, project / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(project, copy)
    (project / ".git").mkdir()
    shell = Shell(project, {"AGENT_SANDBOX_STATE": str(tmp_path / "state")})
    assert shell("run", CHANGE).returncode == 0
    packed = shell("run", "tar --exclude=./.git -c .").stdout
    expected.mkdir()
    subprocess.run(["tar", "-x", "--no-same-owner"], cwd=expected, input=packed, check=True)

    patch = shell("diff", "--patch", "--all")
    assert patch.returncode == 0, patch.stderr.decode()
    environment = {"PATH": os.environ["PATH"], "GIT_CEILING_DIRECTORIES": str(tmp_path), "GIT_CONFIG_GLOBAL": "/dev/null"}
    subprocess.run(["git", "apply", "--whitespace=nowarn"], cwd=copy, input=patch.stdout, env=environment, check=True)
    compared = subprocess.run(["diff", "-r", "--no-dereference", copy, expected], capture_output=True, check=False)
    assert (compared.returncode, compared.stdout) == (0, b"")
    assert sum(path.is_file() for path in copy.rglob("*")) > 300 and os.access(copy / "urllib/request.py", os.X_OK)
