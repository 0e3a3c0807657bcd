"""What the filter leaves alone: ordinary programs do their ordinary work under it, and fewer permissions take away what they say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agent_sandbox.kernel import seccomp, syscall_rules, syscalls
from tests.kernel.children import in_child

pytestmark = pytest.mark.skipif(syscalls.MACHINE not in syscall_rules.MACHINES, reason=f"no system call table for {syscalls.MACHINE}")

PYTHON = """
import asyncio, multiprocessing, socket, subprocess, sys, tempfile, threading
thread = threading.Thread(target=lambda: None); thread.start(); thread.join()
socket.getaddrinfo("localhost", 80); socket.socketpair()
with tempfile.TemporaryFile() as file: file.write(b"x")
with multiprocessing.get_context("fork").Pool(2) as pool: assert pool.map(abs, [-1]) == [1]
async def main(): await (await asyncio.create_subprocess_exec("true")).wait()
asyncio.run(main())
print(subprocess.check_output(["echo", "done"], text=True), end="")
"""
NODE = """
const {Worker} = require("worker_threads");
new Worker("require('child_process').execFileSync('true')", {eval: true}).on("exit", () =>
  require("fs").promises.writeFile("out", "x").then(() => console.log("done")));
"""
GIT = """
git init -q . && git -c user.name=a -c user.email=a@example.org commit -q --allow-empty -m first
git gc -q && git clone -q . copy && echo done
"""
PROGRAMS = {
    "python": (sys.executable, "-c", PYTHON),
    "bash": (
        "bash",
        "-c",
        "mkfifo p; (echo do > p &); read x < p; cat <(echo ${x}ne) | tee out; mv out other; cp -a other copy; rm -r copy",
    ),
    "git": ("git", None, GIT),
    "node": ("node", "-e", NODE),
    "ruby": ("ruby", "-e", "Thread.new { }.join; Process.wait(fork { exit 0 }); puts `echo done`"),
    "gcc": (
        "gcc",
        None,
        "echo 'int main(void){return 0;}' > a.c && printf 'a: a.c\\n\\tgcc -o a a.c\\n' > Makefile && make -s && ./a && echo done",
    ),
    "dpkg": ("dpkg", None, "dpkg --print-architecture && dpkg -s dpkg | grep -q installed && echo done"),
    "apt": ("apt-cache", None, "apt-cache show dpkg > out && echo done"),
    # Some builds of these two confine themselves by a filter of their own, which they do not get.
    "man": ("man", None, "printf '.TH A 1\\n.SH NAME\\na' > a.1 && man -P cat ./a.1 > out && grep -q NAME out && echo done"),
    "file": ("file", None, "file /bin/sh > out && echo done"),
    "npm": ("npm", None, "npm init -y > out && npm pack --silent && echo done"),
    "pip": (sys.executable, None, f"{sys.executable} -m venv --without-pip v && {sys.executable} -m pip --version && echo done"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_works_under_the_filter(name: str, tmp_path: Path) -> None:
    program, option, script = PROGRAMS[name]
    if not shutil.which(program):
        pytest.skip(f"{program} is not installed")
    argv = [program, option, script] if option else ["bash", "-ec", script]
    environment = {**os.environ, "HOME": str(tmp_path), "npm_config_update_notifier": "false"}

    def run() -> tuple[int, str, str]:
        seccomp.install(seccomp.compile_filter(processes=True))
        done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout.splitlines()[-1] if done.stdout else "", done.stderr

    code, last, errors = in_child(run)
    assert (code, last) == (0, "done"), errors


def attempts() -> dict[str, str]:
    """What this process can still do: a thread, a child, another program."""
    done: dict[str, str] = {}
    thread = threading.Thread(target=lambda: done.update(thread="yes"))
    thread.start()
    thread.join()
    try:
        if (child := os.fork()) == 0:
            try:
                os.execv("/bin/true", ["true"])
            except PermissionError:
                os._exit(42)
        done["fork"] = "yes"
        done["exec"] = "refused" if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42 else "yes"
    except PermissionError:
        done["fork"] = "refused"
        try:
            os.execv("/nonexistent", ["nonexistent"])
        except PermissionError:
            done["exec"] = "refused"
        except FileNotFoundError:
            done["exec"] = "yes"
    return done


@pytest.mark.parametrize("processes", [True, False], ids=["processes", "no-processes"])
@pytest.mark.parametrize("execute", [True, False], ids=["execute", "no-execute"])
def test_processes_and_programs_can_be_forbidden_while_threads_go_on(processes: bool, execute: bool) -> None:
    def act() -> dict[str, str]:
        seccomp.install(seccomp.compile_filter(processes=processes, execute=execute))
        return attempts()

    permitted = {True: "yes", False: "refused"}
    assert in_child(act) == {"thread": "yes", "fork": permitted[processes], "exec": permitted[execute]}
    assert in_child(attempts) == {"thread": "yes", "fork": "yes", "exec": "yes"}


def test_without_processes_a_subprocess_is_a_permission_error() -> None:
    def act() -> str:
        seccomp.install(seccomp.compile_filter(processes=False))
        try:
            return subprocess.check_output(["true"], text=True)
        except PermissionError:
            return "refused"

    assert in_child(act) == "refused"
