"""Virtual machines on the command line: how a policy leads to one, what is missing, and (in `make torture`) whole days of work."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.runtime.microvm import kernel_package, machine
from tests.e2e.program import Shell, words
from tests.patience import until


@pytest.fixture
def kernel() -> str:
    """A machine can be made here: QEMU and a kernel are installed."""
    if shutil.which(machine.PROGRAM) is None:
        pytest.skip(f"QEMU is not installed: {machine.HINT}")
    try:
        chosen = os.environ.get("AGENT_SANDBOX_KERNEL")
        return kernel_package.find([chosen] if chosen else [kernel_package.UNPACKED, "/"]).version
    except RuntimeUnavailable as error:
        pytest.skip(f"{error.message}: {error.hint}")


def test_without_a_kernel_the_package_is_named_and_nothing_is_downloaded(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    bare = Shell(shell.cwd, {**shell.env, "AGENT_SANDBOX_KERNEL": str(tmp_path / "empty"), "XDG_CACHE_HOME": str(tmp_path / "cache")})
    for line in (("run", "--runtime", "microvm", "--", "true"), ("setup", "microvm")):
        refused = bare(*line)
        assert refused.returncode == 125 and ("linux-image-amd64" in words(refused) or "qemu-system-x86" in words(refused))
    assert not (tmp_path / "cache" / "agent-sandbox" / "microvm").exists()


def test_setup_knows_the_name_of_one_runtime_and_no_other(shell: Shell) -> None:
    refused = shell("setup", "container")
    assert refused.returncode == 2 or refused.returncode == 125
    assert "'container'" in words(refused)


def test_a_policy_that_requires_a_kernel_of_its_own_leads_to_a_machine(shell: Shell, project: Path, kernel: str) -> None:
    plain = shell("run", "--explain", "--runtime", "auto", "--", "true")
    assert b"runtime: process:" in plain.stdout
    (project / "agent-sandbox.toml").write_text('requires = ["separate-kernel"]\n')
    strict = shell("run", "--explain", "--runtime", "auto", "--", "true")
    assert b"runtime: microvm:" in strict.stdout and b"passed over: process: does not give separate-kernel" in strict.stdout
    refused = shell("run", "--", "true")
    assert refused.returncode == 125 and "separate-kernel" in words(refused) and "microvm" in words(refused)
    network = shell("run", "--explain", "--runtime", "auto", "--network", "example.com", "--", "true")
    assert b"runtime: microvm:" in network.stdout


@pytest.mark.torture
def test_a_machine_does_the_work_of_a_whole_day(shell: Shell, project: Path, kernel: str) -> None:
    made = shell.json("setup", "microvm")
    assert made["kernel"] == kernel and made["emulated"] is True and Path(made["template"]).is_dir()
    script = "uname -r; cat; echo changed > greeting.txt; echo new > 'a b'; rm src/app.py; echo oops >&2; exit 9"
    ran = shell("run", "--runtime", "microvm", "--", "sh", "-c", script, stdin=b"input\n")
    assert (ran.returncode, ran.stdout) == (9, f"{kernel}\ninput\n".encode()) and "oops" in words(ran)
    assert (project / "greeting.txt").read_text() == "hello\n" and kernel != os.uname().release
    shown = shell("diff").stdout
    assert b"-hello\n+changed\n" in shown and b"a b" in shown and b"app.py" in shown
    again = shell("run", "--runtime", "process", "--", "cat", "greeting.txt", "a b")
    assert again.stdout == b"changed\nnew\n", "the next run in another runtime sees the same sandbox"
    assert shell("promote", "--yes").returncode == 0
    assert (project / "greeting.txt").read_text() == "changed\n" and not (project / "src" / "app.py").exists()
    code = shell("code", "--runtime", "microvm", "--language", "python", "-", stdin=b"import sys; print(sys.version_info[:2]); sys.exit(4)")
    assert code.returncode == 4
    assert shell("run", "--runtime", "microvm", "--", "nosuchprogram").returncode == 127
    assert shell("run", "--runtime", "microvm", "--timeout", "2", "--", "sleep", "600").returncode == 124
    assert shell("run", "--runtime", "microvm", "--memory", "64M", "--", "tail", "/dev/zero").returncode == 137
    assert shell("run", "--runtime", "microvm", "--", "sh", "-c", "kill -SEGV $$").returncode == 139


@pytest.mark.torture
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_whatever_ends_the_command_ends_its_machine(shell: Shell, kernel: str, number: int) -> None:
    shell("setup", "microvm")
    for _ in range(10):
        with shell.start("run", "--runtime", "microvm", "--", "sh", "-c", "echo up; sleep 1000") as command:
            assert command.stdout is not None and command.stdout.readline() == b"up\n"
            mine = _machines(command.pid)
            assert len(mine) == 1, "a machine must be there, or its end shows nothing"
            command.send_signal(number)
            command.wait()
        assert until(lambda mine=mine: not any(os.path.exists(f"/proc/{pid}") for pid in mine))  # type: ignore[misc]


def _machines(command: int) -> list[int]:
    """Return the QEMU processes whose ancestors include this process."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if b"qemu-system" not in Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")[0]:
                continue
            pid = int(name)
            while pid not in (0, 1, command):
                pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        found += [int(name)] if pid == command else []
    return found
