"""`--image` and `image`, as their users see them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from agent_sandbox.container_images import list_images
from scripts.docker_engine import EngineMissing, docker_engine
from tests.e2e.program import Shell, words
from tests.images import SLIM, archive, entry, slim
from tests.patience import until


@pytest.fixture(scope="module")
def with_image() -> str:
    return slim()


def test_an_image_goes_to_a_container_and_explain_says_why(with_image: str, project: Path) -> None:
    shell = Shell(project)
    lines = shell("run", "--image", SLIM, "--explain", "--", "true").stdout.decode().splitlines()
    assert lines[0].startswith("runtime: container: ") and f"image {SLIM} on / [copy-on-write]" in lines
    assert {"wasm", "process"} <= {line.split(":")[1].strip() for line in lines if line.startswith("passed over")}
    (project / "agent-sandbox.toml").write_text(f'[container]\nimage = "{SLIM}"\n')
    assert shell("run", "--throw-away", "--explain", "--", "true").stdout.startswith(b"runtime: container: ")
    refused = shell("run", "--throw-away", "--image", "other:1", "--", "true")
    assert refused.returncode == 2 and "container.image" in words(refused)
    assert "the image 'python:3.11-slim' is named" in words(shell("run", "--runtime", "process", "--throw-away", "--", "true"))


def test_a_sandbox_keeps_the_state_of_an_image_and_promote_leaves_it_there(with_image: str, project: Path) -> None:
    shell = Shell(project)
    (project / "old").write_text("old\n")
    first = shell("run", "--image", SLIM, "--", "sh", "-c", "cat old; echo new > new; echo kept > /etc/kept; exit 5")
    assert (first.returncode, first.stdout) == (5, b"old\n"), words(first)
    assert shell("run", "--image", SLIM, "--", "cat", "/etc/kept", "new").stdout == b"kept\nnew\n"
    shown = shell("diff", "--no-pager").stdout.decode()
    assert "+++ b/new" in shown or "b/new" in shown
    assert "In the files of the image: 1 change" in shown and "/root/etc/kept" in shown and "Elsewhere on the machine" not in shown
    assert shell("promote", "--system", "--yes").returncode == 0
    assert (project / "new").read_text() == "new\n" and not Path("/etc/kept").exists() and not Path("/dev/image").exists()
    assert shell("run", "--image", SLIM, "--", "cat", "/etc/kept").stdout == b"kept\n", "promoting the project keeps it"
    planned = shell("sim", "--image", SLIM, "--no-pager", "--", "sh", "-c", "echo a > planned; echo b > /etc/planned")
    assert planned.returncode == 0 and b"planned" in planned.stdout, words(planned)
    assert shell("reset", "--yes").returncode == 0
    assert shell("run", "--image", SLIM, "--", "cat", "/etc/kept").returncode == 1


def test_images_are_listed_loaded_and_removed(with_image: str, project: Path, tmp_path: Path) -> None:
    shell = Shell(project)
    path = archive(tmp_path, [entry("a", "1", mode=0o4755)])
    loaded = shell("image", "load", path, "--name", "mine:1")
    assert loaded.returncode == 0 and "left out: 1 setuid and setgid bits" in words(loaded)
    names = [name for each in shell.json("image", "list")["images"] for name in each["names"]]
    assert {"mine:1", SLIM} <= set(names)
    assert shell("image", "remove", "mine:1").returncode == 3, "it asks, and there is nobody"
    assert shell("image", "remove", "mine:1", "--yes").returncode == 0
    missing = shell("run", "--throw-away", "--image", "mine:1", "--", "true")
    assert missing.returncode == 125 and "is not on this machine" in words(missing) and "image load" in words(missing)
    assert shell("image", "from-machine", "x:1", "--with", "no-such-package").returncode != 0
    for line in (["image", "what"], ["image", "add"], ["image", "list", "--pull"], ["image", "add", "-x"]):
        assert shell(*line).returncode in (2, 125), line


@pytest.mark.parametrize("kills", [3, pytest.param(500, marks=pytest.mark.torture)])
def test_whoever_kills_the_program_leaves_nothing_of_a_container(with_image: str, project: Path, kills: int) -> None:
    shell = Shell(project)
    for number in range(kills):
        mark = f"{project.parent.name}-{number}"
        inner = f"setsid sh -c 'sleep 1000; true' {mark} & echo up; sleep 1000; true"
        with shell.start("run", "--throw-away", "--image", SLIM, "--", "sh", "-c", inner, mark) as process:
            assert process.stdout is not None and process.stdout.readline() == b"up\n"
            assert running(mark), "the control arm: it runs"
            process.kill()
            process.wait()
        until(lambda mark=mark: not running(mark))  # type: ignore[misc]


def running(mark: str) -> list[str]:
    """The processes with this word on their command line, except the program itself."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words_of = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if mark.encode() in words_of and b"--image" not in words_of:
            found.append(name)
    return found


def test_code_runs_with_the_interpreter_of_the_image(with_image: str, project: Path) -> None:
    shell = Shell(project)
    (project / "work.py").write_text("import sys; print(sys.executable, sys.argv[1:], open('data').read())")
    (project / "data").write_text("read")
    done = shell("code", "--throw-away", "--image", SLIM, "work.py", "--json", "--", "a")
    document = json.loads(done.stdout)
    assert document["runtime"] == "container" and document["stdout"] == "/usr/bin/python3 ['a'] read\n", words(done)


BUILT = """
FROM base
ENV WHERE=engine
RUN rm /etc/debian_version && echo layered > /etc/note
"""
SAID = "echo $WHERE; cat /etc/note; ls /etc/debian_version 2>/dev/null; python3 -c 'print(6 * 7)'"
CALLS_ENGINE = "import socket; socket.socket(socket.AF_UNIX).connect({path!r}); print('reached')"


def in_docker(cwd: Path, engine: dict[str, str], *line: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Type `docker` and these words, and wait for it."""
    return subprocess.run(["docker", *line], cwd=cwd, env={**os.environ, **engine}, input=stdin, capture_output=True, check=False)


@pytest.mark.torture
@pytest.mark.needs_root
def test_an_image_that_a_docker_engine_built_runs_here_as_it_does_there(with_image: str, project: Path) -> None:
    """The engine only hands it out: the run has our walls, and does not reach the engine."""
    base = next(each for each in list_images() if with_image in each.names)
    try:
        with docker_engine() as engine:
            docker, shell = partial(in_docker, project, engine), Shell(project, engine)
            (project / "Dockerfile").write_text(BUILT)
            packed = subprocess.run(["tar", "-C", base.root, "-c", "."], capture_output=True, check=True).stdout
            assert docker("import", "-", "base", stdin=packed).returncode == 0
            built = docker("build", "--network=none", "--tag=built:1", ".")
            assert built.returncode == 0, words(built)
            there = docker("run", "--rm", "--network=none", "built:1", "sh", "-c", SAID)
            assert there.stdout == b"engine\nlayered\n42\n", words(there)
            here = shell("run", "--image", "built:1", "--", "sh", "-c", SAID)
            assert here.stdout == there.stdout, words(here)
            ids = shell("run", "--image", "built:1", "--", "cat", "/proc/self/uid_map").stdout.split()
            assert ids[1:2] != [b"0"], "user 0 of a container of docker is user 0 of the machine; of ours it is not"
            call = CALLS_ENGINE.format(path=engine["DOCKER_HOST"].removeprefix("unix://"))
            assert subprocess.run([sys.executable, "-c", call], capture_output=True, check=True).stdout == b"reached\n", "the control arm"
            for options in (("--image", "built:1"), ()):
                refused = shell("run", "--throw-away", *options, "--", "python3", "-c", call)
                assert refused.returncode == 1 and b"reached" not in refused.stdout, words(refused)
            assert shell("image", "remove", "built:1", "--yes").returncode == 0
            absent = shell("run", "--image", "other:1", "--", "true")
            assert absent.returncode == 125 and "docker: Error: No such image: other:1" in words(absent), words(absent)
        ended = shell("run", "--image", "built:1", "--", "true")
        assert ended.returncode == 125 and "docker: Cannot connect to the Docker daemon" in words(ended), words(ended)
    except EngineMissing as error:
        pytest.skip(str(error))
