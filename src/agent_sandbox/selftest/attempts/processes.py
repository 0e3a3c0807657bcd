"""Attempts to start, see, signal and outlive processes, and to find variables and descriptors of the caller."""

from __future__ import annotations

import os
import signal
import sys
import time

from agent_sandbox.selftest.attempts import Deeds, content, later, write_to


def spawn() -> Deeds:
    """Return the usual ways to start a process."""
    import subprocess  # here and below: an attempt pays only for what it uses

    program = [sys.executable, "-I", "-S", "-c", "pass"]
    return {
        "fork": lambda: _ended(_fork()),
        "posix_spawn": lambda: _ended(os.posix_spawn(program[0], program, {})),
        "subprocess": lambda: subprocess.run(program, check=True).returncode,
    }


def start_tool(tool: str, loader: str, copy: str, mark: str) -> Deeds:
    """Return ways to have a tool print a mark: by its name or path, and in ways that go around a list of allowed names."""
    import shutil

    return {
        "by name": later(_says, [os.path.basename(tool), mark], mark),
        "by path": later(_says, [tool, mark], mark),
        "through the loader": later(_says, [loader, tool, mark], mark),
        "as a copy": lambda: _says([shutil.copy(tool, copy), mark], mark),
        "as a copy, through the loader": lambda: _says([loader, shutil.copy(tool, copy), mark], mark),
        "from memory": lambda: _says([f"/proc/self/fd/{_in_memory(tool)}", mark], mark),
        "from memory, through the loader": lambda: _says([loader, f"/proc/self/fd/{_in_memory(tool)}", mark], mark),
    }


def _says(words: list[str], mark: str) -> str:
    import subprocess

    said = subprocess.run(words, close_fds=False, capture_output=True, text=True)
    if mark not in said.stdout:
        raise PermissionError(0, (said.stderr.strip() or "it said nothing").rpartition("\n")[2])
    return "it ran"


def _in_memory(path: str) -> int:
    fd = os.memfd_create("tool", 0)
    with open(path, "rb") as file:
        os.write(fd, file.read())
    return fd


def see(mark: str) -> Deeds:
    """Return a way to find a process of the machine by a word on its command line."""
    return {"in /proc": lambda: _with_word(mark)}


def harm(pid: int) -> Deeds:
    """Return ways to slow down, stop and end a process of the machine."""
    return {
        "lower its priority": lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),
        "stop": lambda: os.kill(pid, signal.SIGSTOP),
        "kill": lambda: os.kill(pid, signal.SIGKILL),
        "kill by pidfd": lambda: signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGKILL),
    }


def find_variable(name: str) -> Deeds:
    """Return ways to find a variable in the environment of this process, and of every process that it can see."""
    return {"os.environ": lambda: os.environ[name], "/proc/*/environ": lambda: _in_environments(name)}


def find_descriptors() -> Deeds:
    """Return ways to identify each descriptor that was inherited, besides the standard streams."""
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    return {f"descriptor {number}": later(os.readlink, f"/proc/self/fd/{number}") for number in numbers if number > 2 and _is_open(number)}


def stay_behind(mark: str, seconds: float) -> Deeds:
    """Return a way to leave a process in the background, in a session of its own."""
    return {"daemon": lambda: _daemon(mark, seconds)}


def start_setuid(programs: list[str]) -> Deeds:
    """Return ways to start programs with the rights of their owner. A way is refused if its program runs as the caller."""
    return {program: later(_runs_as_another, program) for program in programs}


def fork_many(number: int) -> Deeds:
    """Return a way to have this many processes at once."""
    return {"processes": lambda: _fork_many(number)}


def thread_many(number: int) -> Deeds:
    """Return a way to have this many threads at once."""
    return {"threads": lambda: _thread_many(number)}


def open_many(number: int) -> Deeds:
    """Return a way to have this many descriptors open at once."""
    return {"descriptors": lambda: len([os.open("/dev/null", os.O_RDONLY) for _ in range(number)])}


def take_memory(megabytes: int) -> Deeds:
    """Return a way to use this much memory: written, not only reserved."""
    return {"memory": lambda: f"{len(b'x' * (megabytes << 20)) >> 20} MiB"}


def go_on(seconds: float) -> Deeds:
    """Return a way to run for this long, while signals that ask the process to end are ignored."""
    return {"time": lambda: _deaf(seconds)}


def burn(seconds: float) -> Deeds:
    """Return a way to use this much processor time."""
    return {"processor time": lambda: _burn(seconds)}


def say_much(size: int) -> Deeds:
    """Return a way to print this many bytes."""
    return {"output": lambda: sys.stdout.write("x" * size + "\n")}


def _fork() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    return pid


def _ended(pid: int) -> str:
    os.waitpid(pid, 0)
    return "started"


def _with_word(mark: str) -> str:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = content(f"/proc/{pid}/cmdline").split("\0")
        except OSError:
            continue
        if mark in words:
            return f"seen as process {pid}"
    raise ProcessLookupError(3, "not there")


def _in_environments(name: str) -> str:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            variables = content(f"/proc/{pid}/environ").split("\0")
        except OSError:
            continue
        for variable in variables:
            if variable.startswith(f"{name}="):
                return variable
    raise KeyError("in none")


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:  # the descriptor of the listing itself, closed by now
        return False
    return True


def _daemon(mark: str, seconds: float) -> str:
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            nowhere = os.open("/dev/null", os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nowhere, stream)
            write_to("/proc/self/comm", mark)
            time.sleep(seconds)
        os._exit(0)
    return _ended(child)


def _runs_as_another(program: str) -> str:
    import subprocess

    with subprocess.Popen([program, "--help"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # an ended process keeps its ids until it is reaped
        status = content(f"/proc/{process.pid}/status")
        effective = int(status.partition("\nUid:")[2].split()[1])
    if effective == os.geteuid():
        raise PermissionError(1, "it runs as its caller")
    return f"it runs as user {effective}"


def _fork_many(number: int) -> str:
    reading, writing = os.pipe()
    started: list[int] = []
    try:
        for _ in range(number):
            pid = os.fork()
            if pid == 0:
                os.close(writing)
                os.read(reading, 1)  # until the other end is gone
                os._exit(0)
            started.append(pid)
    finally:
        os.close(writing)
        for pid in started:
            os.waitpid(pid, 0)
    return f"{number} at once"


def _thread_many(number: int) -> str:
    import threading

    held = threading.Event()
    try:
        for _ in range(number):
            threading.Thread(target=held.wait).start()
    finally:
        held.set()
    return f"{number} at once"


def _deaf(seconds: float) -> str:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM, signal.SIGXCPU):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(seconds)
    return f"{seconds} s"


def _burn(seconds: float) -> str:
    while time.process_time() < seconds:
        sum(range(1000))
    return f"{seconds} s"
