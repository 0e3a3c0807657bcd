"""Where sandboxes are made inside something else: a container as Podman makes it by default, and a sandbox of this program.

The refusals of such a container are made here with namespaces and a system-call filter, so that the tests need no Podman: parts of /proc
are covered, for which the kernel refuses a new /proc in a user namespace, and sethostname fails. One test uses a real container.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.containers import CANARY, NEIGHBOUR, Container, control, made_container
from tests.e2e.program import PROGRAM, Shell, words
from tests.patience import until


@pytest.fixture
def container(reachable_checkout: Path) -> Iterator[Container]:
    with made_container(reachable_checkout) as made:
        yield made


def test_there_a_new_proc_and_another_host_name_are_refused(container: Container) -> None:
    tries = "import os, socket; from agent_sandbox.kernel import probes; print(probes.own_proc().worked, probes.user_namespace().worked)"
    for place, expected in ((container, b"False True\n"), (control(container), b"True True\n")):
        with place.start(place.python, "-c", tries) as running:
            assert running.communicate()[0] == expected


def test_a_run_works_there_keeps_its_changes_and_says_what_is_weaker(container: Container) -> None:
    done = container("run", "echo works; echo kept > file")
    assert (done.returncode, done.stdout) == (0, b"works\n"), words(done)
    assert "/proc shows the processes around this sandbox" in words(done) and "the host name is that of the machine" in words(done)
    assert b"+kept" in container("diff").stdout and not (container.home / "project" / "file").exists()
    plain = control(container)("run", "--throw-away", "hostname; ls -d /proc/[0-9]* | wc -l")
    assert plain.stdout.startswith(b"sandbox\n") and "/proc" not in words(plain), "where nothing is refused, nothing is weaker"


def test_python_code_and_limits_work_there(container: Container) -> None:
    (container.home / "project" / "six.py").write_text("print(6 * 7)\n")
    assert container("code", "--throw-away", "six.py").stdout == b"42\n"
    grows = "python3 -c 'x = bytearray(600 << 20); x[::4096] = b\"x\" * len(x[::4096]); import time; time.sleep(60)'"
    assert container("run", "--throw-away", "--memory", "100M", grows).returncode != 0
    fine = container("run", "--throw-away", "--memory", "200M", "--processes", "20", "sleep 1; echo fine")
    assert fine.stdout == b"fine\n", "the processes around it are not counted as its own"


def test_with_a_proc_of_its_own_a_run_does_not_even_see_them(container: Container) -> None:
    with control(container).start("sh", "-c", NEIGHBOUR.format(canary=CANARY, program=" ".join(container.program))) as running:
        out, err = running.communicate(timeout=300)
    assert out.decode().partition("SANDBOXED\n")[2].splitlines() == ["SAW", "AFTERWARDS sleep 500"], (out, err)


def test_a_policy_that_requires_other_processes_to_be_invisible_is_refused_there(container: Container) -> None:
    (container.home / "project" / "agent-sandbox.toml").write_text('requires = ["processes-invisible"]\n')
    refused = container("run", "--throw-away", "echo ran")
    assert refused.returncode == 125 and refused.stdout == b"", words(refused)
    assert "requires that other processes are invisible" in words(refused)
    assert control(container)("run", "--throw-away", "echo ran").stdout == b"ran\n"


def test_the_guarantee_is_not_declared_there(container: Container) -> None:
    ask = "from agent_sandbox.assembly import here; s = here().process().probe(); print(s.available, sorted(g.value for g in s.guarantees))"
    for place, declared in ((container, False), (control(container), True)):
        with place.start(place.python, "-c", ask) as running:
            said = running.communicate()[0].decode()
        assert said.startswith("True ") and ("processes-invisible" in said) is declared, said


def test_the_doctor_names_what_is_weaker_there_and_blames_nothing_else(container: Container) -> None:
    done = container("doctor")
    said = done.stdout.decode()
    assert done.returncode == 0 and "Sandboxes work on this machine." in said, said
    assert "weaker  own /proc" in said and "unmask=ALL" in said and "seccomp profile" not in said


def test_inside_a_sandbox_of_this_program_the_true_cause_is_named(shell: Shell) -> None:
    program = " ".join(PROGRAM)
    inner = shell("run", "--throw-away", f"{program} run --throw-away -- echo ran; echo code $?; {program} doctor; echo code $?")
    said = inner.stdout.decode() + words(inner)
    assert "ran\n" not in inner.stdout.decode() and "code 125" in said and "code 1\n" in said, said
    assert "in a sandbox of this program" in said and "a sandbox of agent-sandbox, whose system-call filter refuses another" in said
    blamed = "\n".join(line for line in said.lower().splitlines() if "engines: " not in line)
    assert "docker" not in blamed and "seccomp profile" not in blamed
    outside = shell("doctor")
    assert b"in a sandbox of this program" not in outside.stdout


ENGINE = shutil.which("podman")
POD = """
mount -t tmpfs none /sys/fs/cgroup
exec podman --root "$1/root" --runroot "$1/run" run --rm --ulimit nofile=1024:1024 --ulimit nproc=4096:4096 --network none \\
    --cgroups=disabled --user 1000 --tmpfs /home:rw,mode=1777,exec -e HOME=/home -w /home --rootfs /:O sh -c "$2"
"""


def _removed(place: str) -> bool:
    shutil.rmtree(place, ignore_errors=True)
    return not os.path.exists(place)


@pytest.mark.skipif(ENGINE is None or os.geteuid() != 0, reason="needs podman, and root to start it with the machine as its image")
def test_in_a_default_podman_container_an_ordinary_user_can_run_sandboxes(reachable_checkout: Path) -> None:
    program = f"{reachable_checkout}/.venv/bin/python -m agent_sandbox"
    line = f"mkdir p && cd p && echo up && {program} run 'echo works > f' && {program} diff && {program} doctor"
    place = tempfile.mkdtemp(dir="/var/tmp", prefix="pod")  # podman takes short names only
    try:
        done = subprocess.run(["unshare", "-m", "sh", "-c", POD, "-", place, line], capture_output=True, check=False, timeout=600)
    finally:  # what clears away behind podman may still write there
        assert until(lambda: _removed(place))
    said = done.stdout.decode() + done.stderr.decode()
    if not done.stdout.startswith(b"up\n"):
        pytest.skip(f"podman starts no container here: {said[-300:]}")
    assert done.returncode == 0 and "+works" in said and "weaker  own /proc" in said and "in a container (podman)" in said, said
