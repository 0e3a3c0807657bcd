"""The whole suite, its parts side by side: each of them waits much of its time, for what it has started to end.

A part is a pytest of its own, or the checks. Each runs apart (`scripts.apart`), so that it can tell what it leaves from what others do. As
root each has mounts of its own, so that what one mounts is not in the way of the other's views of this machine; they are shared mounts, as
most machines have them, so that what leaks from a sandbox is seen. Where other users cannot enter this checkout, one copy is made for the
parts that need it. Compiling goes on beside the parts that can do without. What a part says is printed when it has ended, and at the end
every failure with its part, which can be run again alone.

Usage: python -m scripts.suite [PART...]   without any, all of them
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from scripts import apart, reachable

CHECKOUT = Path(__file__).resolve().parent.parent
ROOT = os.geteuid() == 0
AT_ONCE = min(len(os.sched_getaffinity(0)), 4) + 1  # more than there are processors for: all of them wait now and then
PYTEST = (sys.executable, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", "--durations=25", "--durations-min=2")
# As a user, claims that do not depend on who makes them (`once`) and slow ones are left to `make security` and `make torture`. Attacks on
# the heavier runtimes are left to `make security` as root, too.
MARKS_AS_A_USER = "not torture and not heavier and not slow and (not once or both or needs_user)"
UNPRIVILEGED = ("env", f"MARKS={MARKS_AS_A_USER}", "scripts/unprivileged.sh")
# What is run unprivileged as well, and in how many parts.
AS_A_USER = {"e2e": 2, "contract": 1, "security": 1}
NETWORK_AS_A_USER = ("tests/egress/test_confinement.py", "tests/engine/test_egress.py", "tests/engine/test_trust.py")
FAILURE = re.compile(r"(?:FAILED|ERROR) (?P<name>tests/\S+.*)")  # a line of pytest's summary
# The heading above the lines that name what tests left: of tests/conftest.py, and of scripts/unprivileged.sh.
LEFT = re.compile(r"=+ left behind by the tests =+|unprivileged: processes were left behind:")
LAST_LINES = 10  # of a part that failed and named no failure
# Folders without WebAssembly, which need not wait until it is compiled: a part each, and those that are over soon.
LONG_AND_PLAIN = ("workspace", "egress")
PLAIN = ("bench", "cli", "kernel", "ledger", "policy", "readers")
HOUSE = ("architecture", "fast", "scripts")  # these parse all sources, which takes long and much memory: once for all of them
LONG = {"e2e": 4, "security": 2, "contract": 1, "runtime": 1, "sdk": 1}  # and how many parts each of the others is


class Part(NamedTuple):
    """Something to run, and whether it has to wait until WebAssembly is compiled."""

    name: str
    command: tuple[str, ...]
    compiled: bool = False


PATIENCE_SECONDS = 30  # for a part that is asked to end, and clears away
COMPILE = Part("compile", (sys.executable, "-m", "scripts.compile_wasm"))


class Running(NamedTuple):
    """A part that has been started."""

    part: Part
    process: subprocess.Popen[bytes]
    said: Path
    began: float
    temporary: str  # the directory for its temporary files


def parts() -> Iterator[Part]:
    """All of them, what others wait for and what takes longest first: a long one that begins last has the machine to itself in the end.
    Folders that are not named above are the rest."""
    yield Part("check", ("make", "--no-print-directory", "checks"))
    yield from pieces("e2e", PYTEST, ("e2e",), LONG["e2e"])
    named = {*LONG_AND_PLAIN, *PLAIN, *HOUSE, *LONG, "__pycache__"}
    others = sorted(each.name for each in (CHECKOUT / "tests").iterdir() if each.is_dir() and each.name not in named)
    yield from pieces("rest", PYTEST, others, 2)
    for name, count in AS_A_USER.items() if ROOT else ():
        yield from pieces(f"user-{name}", UNPRIVILEGED, (name,), count)
    for name in LONG_AND_PLAIN:
        yield Part(name, (*PYTEST, f"tests/{name}"))
    for name, count in LONG.items():
        if name != "e2e":
            yield from pieces(name, PYTEST, (name,), count)
    yield Part("house", (*PYTEST, *(f"tests/{name}" for name in HOUSE)), compiled=True)
    yield Part("plain", (*PYTEST, *(f"tests/{name}" for name in PLAIN)))
    if ROOT:  # root skips the tests that need another user; here are those of the folders that are not run unprivileged anyway
        needing = [file for file in (CHECKOUT / "tests").rglob("test_*.py") if "mark.needs_user" in file.read_text()]
        files = sorted(
            str(file.relative_to(CHECKOUT)) for file in needing if file.relative_to(CHECKOUT / "tests").parts[0] not in AS_A_USER
        )
        yield Part("user-network", (*UNPRIVILEGED, *NETWORK_AS_A_USER), compiled=True)
        yield Part("user-only", ("env", "MARKS=needs_user and not torture", "scripts/unprivileged.sh", *files), compiled=True)


def pieces(name: str, command: tuple[str, ...], folders: Sequence[str], count: int) -> Iterator[Part]:
    """The files of folders of tests, in so many parts."""
    tests = CHECKOUT / "tests"
    files = sorted(str(file.relative_to(CHECKOUT)) for folder in folders for file in (tests / folder).rglob("test_*.py"))
    for piece in range(count):
        yield Part(f"{name}-{piece + 1}" if count > 1 else name, (*command, *files[piece::count]), compiled=True)


def start(part: Part, scratch: Path) -> Running:
    """Start it where its mounts are nobody else's, in a session of its own, with which it can be ended as a whole. Linux shares processors
    out by session, too: beside other work each part gets a share. It has a directory of its own for temporary files, with a short name:
    pytest clears away in the common one, and two that do so at once stumble over each other."""
    command, nothing = apart.command(part.command), subprocess.DEVNULL
    temporary = tempfile.mkdtemp(prefix="t", dir="/var/tmp")
    env = {**os.environ, "PYTEST_DEBUG_TEMPROOT": temporary}
    with open(scratch / part.name, "wb") as said:
        process = subprocess.Popen(
            command, cwd=CHECKOUT, env=env, stdin=nothing, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
    return Running(part, process, scratch / part.name, time.monotonic(), temporary)


def ended(running: list[Running]) -> tuple[Running, float]:
    """Wait until one of them has ended, and take it out; with the seconds of processor time that it took."""
    while True:
        one = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        assert one is not None
        _, status, usage = os.wait4(one.si_pid, 0)
        for each in running:
            if each.process.pid == one.si_pid:
                each.process.returncode = os.waitstatus_to_exitcode(status)
                running.remove(each)
                return each, usage.ru_utime + usage.ru_stime


def tell(done: Running, processor: float) -> None:
    """What it said, below a line with what it took."""
    print(f"\n── {done.part.name}: {time.monotonic() - done.began:.0f} s, {processor:.0f} s of processor time")
    print(done.said.read_text(errors="replace"), end="", flush=True)


def failures(said: str, status: int = 1) -> list[str]:
    """The tests that failed, by the summary that pytest has printed, and what they left behind.

    Without either, how the part ended and its last lines: a part never fails without a reason in the summary.
    """
    lines = said.splitlines()
    failed = [found["name"].rstrip() for line in lines if (found := FAILURE.match(line))]
    named = list(dict.fromkeys([*failed, *(f"left behind: {trace}" for trace in left_behind(lines))]))
    if named:
        return named
    how = f"exit code {status}"
    last = [line for line in lines if line.strip()][-LAST_LINES:]
    return [f"{how}, and the last lines are:", *(f"    {line}" for line in last)] if last else [f"{how}, and it said nothing"]


def left_behind(lines: Sequence[str]) -> Iterator[str]:
    """The lines below a heading that says so, up to an empty line or the next heading."""
    below = False
    for line in lines:
        if LEFT.fullmatch(line):
            below = True
        elif not line.strip() or line.startswith("=="):
            below = False
        elif below:
            yield line.strip()


def run(waiting: list[Part], scratch: Path) -> dict[str, list[str]]:
    """Run them, and return those that failed, each with the tests that did. Once the checks have, nothing more is run."""
    failed: dict[str, list[str]] = {}
    compiling, compiled = start(COMPILE, scratch), False
    running = [compiling]
    try:
        while waiting or running:
            ready = [part for part in waiting if compiled or not part.compiled]
            while ready and len([each for each in running if each is not compiling]) < AT_ONCE:
                waiting.remove(ready[0])
                running.append(start(ready.pop(0), scratch))
            done, processor = ended(running)
            tell(done, processor)
            if not done.process.returncode:  # of one that failed, somebody may want to look at them
                shutil.rmtree(done.temporary, ignore_errors=True)
            if done is compiling:
                compiled = True
                if ROOT:  # for the parts that run as another user; all of them wait for the compiler
                    os.environ[reachable.VARIABLE] = str(reachable.checkout(scratch))
            if done.process.returncode:
                failed[done.part.name] = failures(done.said.read_text(errors="replace"), done.process.returncode)
            if done.process.returncode and done.part.name == "check":
                break
    finally:
        for each in running:
            os.killpg(each.process.pid, signal.SIGINT)
        for each in running:
            try:
                each.process.wait(timeout=PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:  # a shell may miss a signal that comes just as it starts something
                os.killpg(each.process.pid, signal.SIGKILL)
                each.process.wait()
    return failed


def summary(failed: dict[str, list[str]]) -> Iterator[str]:
    """Name every failure, a line each, and the command that runs these parts again."""
    for part, tests in failed.items():
        yield from (f"FAILED in {part}: {test}" for test in tests)
    if failed:
        yield f'to run these parts again: make test PART="{" ".join(failed)}"'


def main(names: list[str]) -> int:
    """Run the parts of these names, or all. Returns 0 when every one was fine."""
    began = time.monotonic()
    chosen = [part for part in parts() if not names or part.name in names]
    if unknown := set(names) - {part.name for part in chosen}:
        print(f"suite: no such part: {', '.join(sorted(unknown))}; there are {', '.join(part.name for part in parts())}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # Not below /tmp: a sandbox has a /tmp of its own, and a copy of the checkout there would be invisible in it.
    with tempfile.TemporaryDirectory(prefix="agent-sandbox-suite.", dir="/var/tmp") as scratch:
        os.chmod(scratch, 0o755)
        reachable.compile_sources(CHECKOUT)
        failed = run(chosen, Path(scratch))
    print(f"\n── {time.monotonic() - began:.0f} s; " + (f"FAILED: {', '.join(failed)}" if failed else "all of it passed"))
    for line in summary(failed):
        print(line)
    if not ROOT:
        print(f"NOT TESTED: this ran as uid {os.geteuid()} only. What the sandbox promises to root needs: sudo make test")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
