"""`code FILE` with Python acts like `python FILE`: modules beside it, its path, its arguments, packages of the active environment."""

from __future__ import annotations

import subprocess
import sys
import venv
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.program import Shell, words

pytestmark = pytest.mark.once

MAIN = """
import sys
import helper
from inner import part
print(__name__, __file__, sys.argv, sys.path[0], helper.VALUE, part.VALUE, helper.__file__)
def fail():
    raise ValueError("on line 7")
if "fail" in sys.argv:
    fail()
"""


@pytest.fixture
def package(project: Path) -> Path:
    """A script with a module and a package beside it, in a directory of the project."""
    place = project / "pkg"
    (place / "inner").mkdir(parents=True)
    (place / "main.py").write_text(MAIN.lstrip("\n"))
    (place / "helper.py").write_text("VALUE = 'beside'\n")
    (place / "inner" / "__init__.py").write_text("")
    (place / "inner" / "part.py").write_text("VALUE = 'below'\n")
    return place


def _python(shell: Shell, *line: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-B", *line], cwd=shell.cwd, env=shell.environment, capture_output=True, check=False)


@pytest.mark.parametrize("how", ["from-above", "from-inside", "absolute", "link"])
def test_a_script_sees_what_python_would_show_it(shell: Shell, package: Path, how: str) -> None:
    place = shell.cwd if how != "from-inside" else package
    name = {"from-above": "pkg/main.py", "from-inside": "main.py", "absolute": str(package / "main.py"), "link": "link.py"}[how]
    if how == "link":
        (shell.cwd / "link.py").symlink_to("pkg/main.py")
    there = replace(shell, cwd=place)
    inside, outside = there("code", name, "--", "a", "b c"), _python(there, name, "a", "b c")
    assert outside.returncode == 0, outside.stderr
    assert inside.stdout == outside.stdout, words(inside)


def test_a_traceback_names_the_file_and_the_line(shell: Shell, package: Path) -> None:
    inside, outside = shell("code", "pkg/main.py", "--", "fail"), _python(shell, "pkg/main.py", "fail")
    assert inside.returncode == outside.returncode == 1
    assert f'File "{package}/main.py", line 6, in fail' in words(inside)
    ours = [line for line in inside.stderr.splitlines() if not line.startswith(b"agent-sandbox:")]
    assert ours == outside.stderr.splitlines()


@pytest.mark.both
def test_modules_beside_it_are_those_of_the_sandbox(shell: Shell, package: Path) -> None:
    assert shell("run", "echo \"VALUE = 'edited'\" > pkg/helper.py").returncode == 0
    assert b"edited" in shell("code", "pkg/main.py").stdout and b"edited" not in _python(shell, "pkg/main.py").stdout


def test_the_router_takes_a_runtime_that_knows_the_file(shell: Shell, package: Path) -> None:
    explained = shell("code", "--runtime", "auto", "--throw-away", "--explain", "pkg/main.py")
    assert b"runtime: process" in explained.stdout, words(explained)
    assert b"beside" in shell("code", "--runtime", "auto", "--throw-away", "pkg/main.py").stdout


@pytest.fixture
def environment(project: Path) -> Path:
    """A virtual environment with a package of its own."""
    venv.create(project / "env", with_pip=False, symlinks=True)
    (packages,) = (project / "env" / "lib").glob("python*/site-packages")
    (packages / "only_there.py").write_text("VALUE = 'from the environment'\n")
    (packages / "more.pth").write_text(f"{project / 'linked'}\n")
    (project / "linked").mkdir()
    (project / "linked" / "editable.py").write_text("VALUE = 'editable'\n")
    (project / "uses.py").write_text("import editable, only_there, sys\nprint(only_there.VALUE, editable.VALUE, sys.prefix)\n")
    return project / "env"


@pytest.mark.both
@pytest.mark.parametrize("how", ["VIRTUAL_ENV", "PATH"])
def test_packages_of_the_active_environment_can_be_imported(shell: Shell, environment: Path, how: str) -> None:
    path = shell.environment["PATH"]
    given = {"VIRTUAL_ENV": str(environment)} if how == "VIRTUAL_ENV" else {"VIRTUAL_ENV": "", "PATH": f"{environment}/bin:{path}"}
    done = replace(shell, env={**shell.env, **given})("code", "uses.py")
    assert done.stdout.decode() == f"from the environment editable {environment}\n", words(done)
    plain = replace(shell, env={**shell.env, "VIRTUAL_ENV": "", "PATH": "/usr/bin:/bin"})("code", "uses.py")
    assert plain.returncode == 1 and "No module named" in words(plain), "without it they are not there"


def test_an_environment_of_another_python_is_not_mixed_in_and_that_is_said(shell: Shell, environment: Path) -> None:
    settings = environment / "pyvenv.cfg"
    lines = [line if not line.startswith("version") else "version = 3.2.1" for line in settings.read_text().splitlines()]
    settings.write_text("\n".join(lines))
    done = replace(shell, env={**shell.env, "VIRTUAL_ENV": str(environment)})("code", "uses.py")
    assert done.returncode == 1 and "it is for Python 3.2" in words(done) and "run python uses.py" in words(done)


def test_code_from_standard_input_has_no_file(shell: Shell, package: Path) -> None:
    done = shell("code", "-", "-l", "python", stdin=b"import sys; print(sys.path[0])")
    assert done.stdout.decode().strip() == str(shell.cwd)
