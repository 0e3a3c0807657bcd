"""A checkout that any user of this machine can run: this one, or a copy where others may not enter it.

Root clones into root's home, which is closed to others. Then the tests that are run as another user need a copy. `make test` makes one for
all of its parts; whoever runs a test alone gets one for that.

Usage: python -m scripts.reachable DIRECTORY   prints its path; a copy is made in the directory, if one is needed
"""

from __future__ import annotations

import compileall
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
VARIABLE = "AGENT_SANDBOX_TESTS_CHECKOUT"  # in the environment of the parts of `make test`: the one that was made for all
STRANGER = 60_705  # an id that nobody has
COPIED = ("src", "bin", "tests", "scripts", "docs", "hatch_build.py", "pyproject.toml", "README.md", "LICENSE")
BESIDE = "shared"  # what tests read if it is there, beside the checkout
PROGRAMS = ("agent-sandbox", "agentbox", "agent-sandbox-shell")
BINARIES = ("uv",)  # programs of other packages that tests start, and that are no scripts


def checkout(directory: Path) -> Path:
    """The path of one. A copy is put into `directory`, which must be root's and open to all. Raises SystemExit when there is no way."""
    made = Path(os.environ.get(VARIABLE, CHECKOUT))
    if works(made):
        return made
    copy = directory / "checkout"
    copy_to(copy)
    if not works(copy):
        raise SystemExit(f"reachable: other users cannot run the copy of this checkout in {copy}; can they enter {directory}?")
    return copy


def works(place: Path) -> bool:
    """Whether a user who owns nothing can run tests there, and read what lies beside it."""
    if os.geteuid() != 0:
        return True
    command = [str(place / ".venv/bin/python"), "-c", "import agent_sandbox, pytest, os; os.listdir('tests'), os.listdir('src')"]
    beside = place.parent / BESIDE
    if beside.is_dir():
        command[-1] += f"; os.listdir({str(beside)!r})"
    try:
        done = subprocess.run(command, cwd=place, user=STRANGER, group=STRANGER, extra_groups=(), capture_output=True, check=False, env={})
    except OSError:
        return False
    return done.returncode == 0


def copy_to(copy: Path) -> None:
    """Copy what tests use, in the same relative places, with a virtual environment around an interpreter that anybody can execute."""
    copy.mkdir(parents=True)
    for name in COPIED:
        source = CHECKOUT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    if (CHECKOUT.parent / BESIDE).is_dir():
        shutil.copytree(CHECKOUT.parent / BESIDE, copy.parent / BESIDE)
        _open_to_all(copy.parent / BESIDE)
    _copy_environment(copy)
    compile_sources(copy)
    _open_to_all(copy)


def compile_sources(place: Path) -> None:
    """Write the bytecode of our modules. Without it, where Python may write none or is told not to, every program that a test starts
    compiles them anew, which takes longer than what it does. A place that we may not write to stays as it is."""
    for name in ("src", "scripts", "tests"):
        compileall.compile_dir(place / name, quiet=2)


def _copy_environment(copy: Path) -> None:
    """The packages are linked where they can be: there is more than a gigabyte of them, and nobody writes to them."""
    subprocess.run([_interpreter(), "-m", "venv", "--without-pip", copy / ".venv"], check=True)
    (old,) = (CHECKOUT / ".venv/lib").glob("python3*/site-packages")
    (new,) = (copy / ".venv/lib").glob("python3*/site-packages")
    shutil.copytree(old, new, dirs_exist_ok=True, copy_function=_linked, symlinks=True)
    # The editable install names its sources in a .pth file, and its interpreter in the first line of the programs.
    for name in new.glob("*entersandbox*.pth"):
        name.unlink()
        name.write_text(f"{copy / 'src'}\n")
    for program in PROGRAMS:
        body = (CHECKOUT / ".venv/bin" / program).read_text().partition("\n")[2]
        (copy / ".venv/bin" / program).write_text(f"#!{copy / '.venv/bin/python'}\n{body}")
        (copy / ".venv/bin" / program).chmod(0o755)
    for binary in BINARIES:
        if (CHECKOUT / ".venv/bin" / binary).exists():
            _linked(str(CHECKOUT / ".venv/bin" / binary), str(copy / ".venv/bin" / binary))


def _interpreter() -> str:
    for candidate in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        check = [candidate, "-c", "import sys, venv; sys.exit(sys.version_info < (3, 11))"]
        try:
            if subprocess.run(check, user=STRANGER, group=STRANGER, extra_groups=(), cwd="/", check=False, env={}).returncode == 0:
                return candidate
        except OSError:
            continue
    raise SystemExit("reachable: other users can execute no Python 3.11 or later; make .venv from /usr/bin/python3 (rm -rf .venv first)")


def _linked(source: str, target: str) -> None:
    """A link if everybody may read it, otherwise a copy: the mode of a link is that of the original."""
    try:
        if os.stat(source).st_mode & stat.S_IROTH:
            os.link(source, target)
            return
    except OSError:  # another filesystem
        pass
    shutil.copy2(source, target)


def _open_to_all(top: Path) -> None:
    for directory, _, files in os.walk(top):
        os.chmod(directory, 0o755)
        for name in files:
            path = os.path.join(directory, name)
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode) and not status.st_mode & stat.S_IROTH:
                os.chmod(path, stat.S_IMODE(status.st_mode) | (0o555 if status.st_mode & stat.S_IXUSR else 0o444))


if __name__ == "__main__":
    print(checkout(Path(sys.argv[1])))
