"""The wheel, installed into a clean environment by a person who types the README word by word."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
BUILT_FROM = ("hatch_build.py", "pyproject.toml", "README.md", "LICENSE", "src", "bin")
BACKEND = ("hatchling", "packaging", "pathspec", "pluggy", "trove_classifiers")  # what builds it; the tests fetch nothing
# The digest of changes covers their paths, and the directory has another name each time.
DIGEST, SAMPLE = re.compile(r"\b[0-9a-f]{32}\b"), "3f9a12c07b5e4d6688f0c1a2b3d4e5f6"
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
END = "--- end of a command, exit code "


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout without anything that was made in it."""
    place = tmp_path_factory.mktemp("clone") / "checkout"
    place.mkdir()
    for name in BUILT_FROM:
        if (CHECKOUT / name).is_dir():
            shutil.copytree(CHECKOUT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(CHECKOUT / name, place / name)
    return place


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which pip builds with our own copy of the backend, and with nothing else of ours."""
    place = tmp_path_factory.mktemp("backend")
    for name in BACKEND:
        found = importlib.util.find_spec(name)
        assert found is not None and found.origin is not None, f"{name} is not installed: make setup"
        (place / name).symlink_to(Path(found.origin).parent)
    return {"PYTHONPATH": str(place), "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def commands(block: str) -> Iterator[tuple[str, str]]:
    """Each command of a block, and what it prints."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        typed, _, printed = part.partition("\n")
        yield typed, printed


def typed_in(home: Path, where: Path, lines: list[str], environment: dict[str, str]) -> list[tuple[str, int]]:
    """Type these lines into one shell. Returns what each printed, on both streams, and its exit code."""
    script = "".join(f"{line}\nprintf '\\n{END}%s\\n' $?\n" for line in lines)
    clean = {"HOME": str(home), "PATH": f"{Path(sys._base_executable).parent}:/usr/bin:/bin", "LANG": "C.UTF-8", "TMPDIR": str(home)}  # type: ignore[attr-defined]
    ran = subprocess.run(
        ["bash", "-c", script],
        cwd=where,
        env=clean | environment,
        stdin=subprocess.DEVNULL,
        stdout=-1,
        stderr=subprocess.STDOUT,
        check=False,
    )
    parts = re.split(rf"\n{END}(\d+)\n", ran.stdout.decode())
    return [(printed, int(code)) for printed, code in zip(parts[::2], parts[1::2], strict=False)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, copy: Path, backend: dict[str, str]) -> Path:
    """The home of somebody who has typed the first block of the README in a checkout."""
    home = tmp_path_factory.mktemp("ada")
    install, *_ = CONSOLE.findall((CHECKOUT / "README.md").read_text())
    lines = [typed for typed, _ in commands(install)]
    assert any(line.endswith("pip install .") for line in lines) and lines[-1] == "agent-sandbox doctor"
    # The last line starts the program: without the backend on its path, as its user has it.
    done = typed_in(home, copy, [*lines[:-1], "unset PYTHONPATH", lines[-1]], backend)
    assert [code for _, code in done] == [0] * (len(lines) + 1), done
    assert "Sandboxes work on this machine." in done[-1][0]
    assert sorted(path.name for path in copy.iterdir()) == sorted(BUILT_FROM), "nothing is left in the checkout"
    return home


def test_the_readme_does_what_it_says_word_by_word(home: Path) -> None:
    first, *blocks = CONSOLE.findall((CHECKOUT / "README.md").read_text())
    steps = [step for block in blocks for step in commands(block)]
    path = next(typed for typed, _ in commands(first) if typed.startswith("export PATH"))
    (_, *done) = typed_in(home, home, [path, *(typed for typed, _ in steps)], {})
    assert len(done) == len(steps) > 8
    for (typed, printed), (said, code) in zip(steps, done, strict=True):
        said = DIGEST.sub(SAMPLE, said).replace(str(home), "/home/ada")
        assert (typed, said.rstrip("\n")) == (typed, printed.rstrip("\n"))
        assert code == 0 or printed, f"{typed}: {code}"
    assert any(code == 126 for _, code in done), "the control arm: something was refused"


@pytest.mark.once
def test_the_readme_leaves_python_and_pip_as_they_were(home: Path) -> None:
    first, *_ = CONSOLE.findall((CHECKOUT / "README.md").read_text())
    path = next(typed for typed, _ in commands(first) if typed.startswith("export PATH"))
    looked = "command -v python3 pip3 agent-sandbox"
    before, _, after = (said for said, _ in typed_in(home, home, [looked, path, looked], {}))
    assert after.split() == [*before.split(), str(home / "agent-sandbox" / "bin" / "agent-sandbox")] and "python3" in before


@pytest.mark.once
def test_the_installed_package_is_the_wheel_and_nothing_of_the_checkout(home: Path) -> None:
    code = (
        "import agent_sandbox, agentbox, sys; print(agent_sandbox.__file__); print(agent_sandbox.Sandbox().execute('print(6 * 7)').stdout)"
    )
    program = home / "agent-sandbox" / "bin"
    (said, exit_code), *_ = typed_in(home, home, [f'{program}/python -c "{code}"'], {})
    assert exit_code == 0 and said.startswith(str(home / "agent-sandbox" / "lib")) and "\n42\n" in said, said
    for foreign in ("tests", "scripts", "bench"):
        (said, exit_code), *_ = typed_in(home, home, [f"{program}/python -c 'import {foreign}'"], {})
        assert exit_code == 1 and "ModuleNotFoundError" in said


@pytest.mark.once
def test_the_source_distribution_installs_too(home: Path, copy: Path, backend: dict[str, str], tmp_path: Path) -> None:
    python = home / "agent-sandbox" / "bin" / "python"
    build = f"{python} -m hatchling build --target sdist --directory {tmp_path}"
    done = typed_in(home, copy, [build, f"{python} -m pip wheel --no-deps --wheel-dir {tmp_path} {tmp_path}/*.tar.gz"], backend)
    assert [code for _, code in done] == [0, 0], done
    wheels = [*tmp_path.glob("*.whl")]
    assert typed_in(home, copy, [f"{python} -m pip wheel --no-deps --wheel-dir {tmp_path / 'again'} ."], backend)[0][1] == 0
    (direct,) = (tmp_path / "again").glob("*.whl")
    assert [wheel.read_bytes() for wheel in wheels] == [direct.read_bytes()], "the same bytes by either way"
    names = zipfile.ZipFile(direct).namelist()
    assert {"agent_sandbox/workspace/known_packages.txt", "entersandbox-0.1.0.data/scripts/agent-sandbox"} <= set(names)
    assert not [name for name in names if name.startswith(("tests", "scripts", "docs", "bench"))]
