"""Attacks by what is installed, by what is cached, and on what we ourselves execute and ship."""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import re
import shutil
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path

import pytest

from agent_sandbox.errors import LaunchFailed
from tests.patience import until
from tests.security.conftest import Tell
from tests.security.harness import ENVIRONMENT, Box, Listener, case, listening, outside, snapshot
from tests.security.packages import npm_package, reported, sdist

CHECKOUT = Path(__file__).resolve().parents[2]


def _pip(directory: Path) -> list[str]:
    quiet = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--root-user-action=ignore")
    return [sys.executable, "-m", "pip", "install", *quiet, "--target", "installed", str(sdist(directory))]


def _npm(directory: Path) -> list[str]:
    return ["npm", "install", "--offline", "--no-audit", "--no-fund", "--loglevel=error", str(npm_package(directory))]


def _needs(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")


@case(166)
@pytest.mark.parametrize("install", [_pip, _npm], ids=["pip", "npm"])
def test_an_install_script_reaches_nothing_real(number: int, install: Callable[[Path], list[str]], box: Box, tell: Tell) -> None:
    if install is _npm:
        _needs("npm")
    command = install(box.project)
    report = box.project / "report.json"
    abstract = f"attack-{os.getpid()}-{os.urandom(4).hex()}"
    (box.project / "package.json").write_text("{}")
    with listening(socket.AF_INET, ("127.0.0.1", 0)) as network, listening(socket.AF_UNIX, f"\0{abstract}") as named:
        targets = {"HOME": box.home, "PROJECT": box.project, "PORT": network.address[1], "ABSTRACT": abstract, "PID": os.getpid()}
        environment = {
            **ENVIRONMENT,
            "HOME": str(box.home),
            **{f"ATTACKED_{name}": str(value) for name, value in targets.items()},
            "ATTACKED_REPORT": str(report),
        }
        before = snapshot(box.project), snapshot(box.home)
        # Its report is one of its changes: it is read from inside.
        outcome = box.run("bash", "-c", '"$@" >/dev/null; cat "$ATTACKED_REPORT"', "bash", *command, env=environment)
        got = reported(outcome.stdout)
        assert (snapshot(box.project), snapshot(box.home)) == before and (network.accepted, named.accepted) == (0, 0)
        assert set(got) == {"plant .bashrc", "plant authorized_keys", "plant pre-commit", "plant app.py"}, "into its own layer"
        assert "CANARY" not in outcome.stdout.decode() + outcome.stderr.decode()
        changed = {change.path for change in outcome.changes}
        assert {str(box.home / ".bashrc"), str(box.project / ".git/hooks/pre-commit"), str(report)} <= changed, "and shown for what it is"
        control = _installed_for_real(command, environment, report, (network, named))
    assert "CANARY" in control["read .ssh/id_rsa"] and {"environment of the parent", "signal the supervisor", "plant pre-commit"} <= set(
        control
    )
    assert "planted" in (box.project / ".git/hooks/pre-commit").read_text()
    tell(f"{len(control) - len(got)} attacks refused, {len(got)} plants captured and listed", control=f"outside all {len(control)} succeed")


def _installed_for_real(
    command: list[str], environment: dict[str, str], report: Path, listeners: tuple[Listener, Listener]
) -> dict[str, str]:
    """The control arm, on the test's own home and project."""
    subprocess.run(command, cwd=report.parent, env=environment, check=True, capture_output=True)
    assert until(lambda: all(listener.accepted for listener in listeners))
    return reported(report.read_text())


POISON = """
import builtins, os, sys
for path in PATHS:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "a") as file:
        file.write("POISON")
builtins.poisoned = sys.modules["base64"] = "POISON"
"""

TASTE = """
import base64, builtins, json
tasted = ["module"] * (base64 == "POISON") + ["builtins"] * hasattr(builtins, "poisoned")
for path in PATHS:
    try:
        tasted += [path] * ("POISON" in open(path).read())
    except OSError:
        pass
print(json.dumps(tasted))
"""


@case(167)
def test_a_cache_that_one_run_poisons_is_clean_for_the_next(number: int, box: Box, tell: Tell) -> None:
    """On disk: what pip, npm and Python keep for later. In memory: what the next guest of the same zygote would find imported."""
    caches = [box.home / name for name in (".cache/pip/http/a", ".npm/_cacache/index", ".local/lib/python3/site-packages/evil.pth")]
    paths = [*caches, box.project / "src/__pycache__/app.pyc", Path("/var/tmp/poison-" + os.urandom(4).hex())]
    for path in caches:
        path.parent.mkdir(parents=True)
        path.write_text("clean")
    before = snapshot(box.project), snapshot(box.home)
    named = repr([str(path) for path in paths])
    poison, taste = POISON.replace("PATHS", named), TASTE.replace("PATHS", named)
    assert box.python(poison).exit.code == 0 and box.kept.python(poison).exit.code == 0
    assert box.probe(taste) == [] and (snapshot(box.project), snapshot(box.home)) == before
    assert len(box.kept.probe(taste)) == len(paths), "the sandbox that was kept has its own, and nobody else"
    assert len(outside(poison + taste)) == len(paths) + 2
    assert len(outside(taste)) == len(paths), "the control arm: without a sandbox the next process tastes them"
    paths[-1].unlink()
    tell("the next run finds clean bytes and a clean interpreter", control=f"outside the next process finds {len(paths)} of them poisoned")


def _executed(trace: Path) -> set[str]:
    """Every program that was started, by the path that the kernel was given."""
    return set(re.findall(r'execve(?:at)?\((?:\d+, )?"([^"]*)".*\) = 0$', trace.read_text(), re.MULTILINE))


RUNS = """
import sys
from agent_sandbox import Sandbox
with Sandbox(validate_code=False, allow_subprocess=True) as sandbox:
    assert sandbox.execute("print(6 * 7)").stdout == "42\\n"
    assert sandbox.run(["true"]).exit_code == 0
"""
COMMANDS = "from agent_sandbox.cli.main import main; assert main(['run', '--throw-away', '--', 'true']) == 0"


@pytest.mark.once
@case(169)
@pytest.mark.parametrize("source", [RUNS, COMMANDS], ids=["python", "command line"])
def test_no_engine_is_executed_so_none_can_be_too_old(number: int, source: str, box: Box, tell: Tell) -> None:
    """The process runtime talks to the kernel itself. Whatever it would execute would need a floor for its version, so nothing may join."""
    _needs("strace")
    trace = box.project.parent / "trace"
    tracing = ["strace", "-f", "-qq", "-e", "trace=execve,execveat", "-o", str(trace)]
    subprocess.run([*tracing, sys.executable, "-c", source], cwd=box.project, check=True, capture_output=True)
    executed = {"ourselves" if path == sys.executable or path.startswith("/proc/self/fd/") else path for path in _executed(trace)}
    assert executed <= {"ourselves", "/usr/local/bin/true", "/usr/bin/true", "/bin/true"} and len(executed) == 2, executed
    subprocess.run([*tracing, "unshare", "--user", "true"], check=True, capture_output=True)
    assert any(path.endswith("/unshare") for path in _executed(trace))
    tell("our interpreter, and the program asked for", control="a helper that is executed is in the trace")


FAKE = "#!/bin/sh\necho executed >> {proof}\n"


@case(170)
def test_a_helper_swapped_on_disk_is_not_executed(
    number: int, box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tell: Tell
) -> None:
    """Our one helper is the interpreter that runs us. A guest swaps it in its view; then the real one is swapped under a warm runtime."""
    interpreter, proof = tmp_path / "bin" / "python3", tmp_path / "proof"
    interpreter.parent.mkdir()
    shutil.copy(os.path.realpath(sys.executable), interpreter)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    digest = hashlib.sha256(interpreter.read_bytes()).digest()
    swap = f"rm {interpreter}; printf '%s' '{FAKE.format(proof=proof)}' >{interpreter}; chmod 755 {interpreter}; {interpreter}; cat {proof}"
    kept = box.kept
    for _ in range(2):
        with kept.fresh() as own:
            assert own.python("print(1)").stdout == b"1\n"
            assert own.shell(swap).stdout.startswith(b"executed\n"), "inside, it is what it was made"
    assert hashlib.sha256(interpreter.read_bytes()).digest() == digest and not proof.exists()
    with box.fresh() as warm:
        assert warm.python("print(1)").stdout == b"1\n"
        os.replace(_written(tmp_path / "fake", FAKE.format(proof=proof)), interpreter)
        assert warm.python("print(2)").stdout == b"2\n" and not proof.exists()
    with box.fresh() as cold, pytest.raises(LaunchFailed):
        cold.python("print(3)")
    assert proof.read_text() == "executed\n"
    tell("the real one is executed, once, and then forked", control="a runtime started after the swap does execute the fake")


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def _wheel(checkout: Path, into: Path) -> Path:
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(into)]
    subprocess.run(command, cwd=checkout, env=environment, check=True, capture_output=True)
    (made,) = into.glob("*.whl")
    return made


HELPER = "agent_sandbox/kernel/"
OUR_HELPER = (f"{HELPER}libsetup_helper.so", *(f"{HELPER}helper/{path.name}" for path in (CHECKOUT / "src" / HELPER / "helper").iterdir()))
OUR_SCRIPTS = tuple(f"agent_sandbox/runtime/wasm/javascript/{name}.js" for name in ("console", "inspect", "start"))


def _problems(wheel: Path) -> list[str]:
    """What is wrong with a wheel: foreign files, dependencies, and contents that are not those that it lists."""
    with zipfile.ZipFile(wheel) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    (record,) = (name for name in contents if name.endswith(".dist-info/RECORD"))
    information = record.removesuffix("RECORD")
    scripts = f"{information.removesuffix('.dist-info/')}.data/scripts"
    commands = {f"{scripts}/{name}" for name in ("agent-sandbox", "agentbox", "agent-sandbox-shell")}
    problems = [name for name in contents if not name.startswith(("agent_sandbox/", "agentbox/", information)) and name not in commands]
    problems += [f"{name} is missing" for name in commands - contents.keys()]
    problems += [
        name
        for name in contents
        if not name.startswith(information)
        and name not in (*commands, *OUR_HELPER)
        and not name.endswith((".py", "py.typed", "workspace/known_packages.txt", "egress/dlp/rules.toml", *OUR_SCRIPTS))
    ]
    wanted = Parser().parsestr(contents[information + "METADATA"].decode()).get_all("Requires-Dist") or []
    problems += [f"needs {requirement}" for requirement in wanted if "extra ==" not in requirement]
    listed = {row[0]: row[1] for row in csv.reader(contents[record].decode().splitlines())}
    for name, content in contents.items():
        digest = "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        if name != record and listed.get(name) != digest:
            problems.append(f"{name} is not what RECORD says")
    return problems


@pytest.mark.once
@case(172)
def test_our_wheel_is_reproducible_and_holds_nothing_but_us(number: int, tmp_path: Path, tell: Tell) -> None:
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "src", "bin"):
        (shutil.copytree if (CHECKOUT / name).is_dir() else shutil.copy)(CHECKOUT / name, copy / name)
    wheel, again = _wheel(copy, tmp_path / "one"), _wheel(copy, tmp_path / "two")
    assert wheel.read_bytes() == again.read_bytes() and _problems(wheel) == []
    tampered = tmp_path / "tampered.whl"
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(tampered, "w") as other:
        for name in archive.namelist():
            other.writestr(name, archive.read(name) + (b"\nimport evil\n" if name == "agent_sandbox/errors.py" else b""))
        other.writestr("evil.py", "")
    (copy / "src/agent_sandbox/errors.py").write_text("# another\n")
    assert len(_problems(tampered)) == 3 and _wheel(copy, tmp_path / "three").read_bytes() != wheel.read_bytes()
    tell(
        "built twice: the same bytes; only our packages, no dependencies, RECORD agrees",
        control="a changed file and a foreign one are found",
    )
