"""Probes on processes: processes of the machine are not seen or harmed, and the guest inherits nothing from its caller."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import suppress

from agent_sandbox.kernel.elf import loader_of
from agent_sandbox.selftest.bench import VARIABLE, DecoyBench, environment_address, named, status_of, until
from agent_sandbox.selftest.boxes import Attempt, Box, Found, NoAnswer
from agent_sandbox.selftest.probe import RUN, SDK, Probes, system_calls

SUBJECT = Probes("user namespaces", "namespaces", "own /proc", "seccomp", "Landlock")

NO_CAPABILITIES = dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), "0" * 16)
_SETUID = ("su", "passwd", "mount", "newgrp", "chsh", "gpasswd", "sudo", "pkexec", "fusermount3", "crontab")


@SUBJECT.probe(
    "start-processes",
    "Where processes are not allowed, none can be started.",
    "starts one by fork, by posix_spawn and by subprocess",
    boxes=(SDK,),
)
def start_processes(bench: DecoyBench, box: Box) -> Found:
    return box.run(Attempt("processes", "spawn"))


@SUBJECT.probe(
    "start-other-tools",
    "Where only some programs are allowed, no other can be started.",
    "starts one by its name and path, as a copy, through the loader and from memory",
    boxes=(SDK,),
)
def start_other_tools(bench: DecoyBench, box: Box) -> Found:
    tool = os.path.realpath("/usr/bin/basename")
    loader = next(iter(loader_of(tool)), tool)  # a program without a loader stands in for it: the same attempt once more
    mark = bench.mark()
    copy = f"/tmp/{mark}"
    try:
        ran = box.run(Attempt("processes", "start_tool", {"tool": tool, "loader": loader, "copy": copy, "mark": mark}, tools=("true",)))
    finally:
        with suppress(FileNotFoundError):  # the copy is there only without a sandbox
            os.unlink(copy)
    return ran


@SUBJECT.probe("see-processes", "No process of the machine is seen.", "looks in /proc for a process of ours by a word on its command line")
def see_processes(bench: DecoyBench, box: Box) -> Found:
    mark = bench.mark()
    with bench.bystander(mark):
        return box.run(Attempt("processes", "see", {"mark": mark}))


@SUBJECT.probe("harm-processes", "No process of the machine is harmed.", "slows down, stops and kills a process of ours, also by pidfd")
def harm_processes(bench: DecoyBench, box: Box) -> Found:
    with bench.bystander(bench.mark()) as process:
        before = os.getpriority(os.PRIO_PROCESS, process.pid)
        ran = box.run(Attempt("processes", "harm", {"pid": process.pid}))
        after = os.getpriority(os.PRIO_PROCESS, process.pid)
        reached = {} if after == before else {"priority": f"it went from {before} to {after}"}
        # A signal has arrived when its sender goes on; its effect on the receiver may take a moment longer.
        until(lambda: process.poll() is not None, 2.0 if "kill" in ran.reached else 0.0)
        if process.poll() == -signal.SIGKILL:
            reached["signal"] = "it was killed"
        elif status_of(process.pid)["State"].startswith("T"):
            reached["signal"] = "it was stopped"
    answers = {"priority": ran.refused.get("lower its priority", ""), "signal": ran.refused.get("kill", "")}
    return Found(reached, {way: answer for way, answer in answers.items() if way not in reached})


@SUBJECT.probe(
    "trace-processes",
    "No process of the machine is traced or read.",
    "traces a process of ours, reads its memory and its environment, takes a descriptor of it",
)
def trace_processes(bench: DecoyBench, box: Box) -> Found:
    with bench.bystander(bench.mark()) as process:
        numbers = system_calls("ptrace", "process_vm_readv", "pidfd_getfd")
        arguments = {"pid": process.pid, "address": environment_address(process.pid), "numbers": numbers}
        ran = box.run(Attempt("kernel", "meddle", arguments))
    proven = {way: "the token in it" if bench.token in seen else "it was let" for way, seen in ran.reached.items()}
    needs_proof = ("process_vm_readv", "/proc/PID/mem", "/proc/PID/environ")
    return Found({way: seen for way, seen in proven.items() if way not in needs_proof or seen != "it was let"}, ran.refused)


@SUBJECT.probe(
    "environment",
    "Variables of the caller's that hold secrets do not come along.",
    f"looks for {VARIABLE}, which verify has set, in its own environment and in that of every process it sees",
)
def environment(bench: DecoyBench, box: Box) -> Found:
    ran = box.run(Attempt("processes", "find_variable", {"name": VARIABLE}))
    return Found({way: "the token" for way, seen in ran.reached.items() if bench.token in seen}, ran.refused)


@SUBJECT.probe(
    "descriptors",
    "No open file of the caller's comes along.",
    "looks for open descriptors beyond the three; verify holds a secret open, and inheritable",
)
def descriptors(bench: DecoyBench, box: Box) -> Found:
    return box.run(Attempt("processes", "find_descriptors"))


@SUBJECT.probe(
    "setuid",
    "Programs that run as their owner give no rights.",
    "starts setuid programs of the machine (as root: a planted one of nobody's) and looks as whom they run",
    boxes=(RUN,),
    excuse="there is no setuid program here that would make you somebody else",
)
def setuid(bench: DecoyBench, box: Box) -> Found:
    programs = [path for name in _SETUID if (path := shutil.which(name)) and os.stat(path).st_mode & 0o4000]
    return box.run(Attempt("processes", "start_setuid", {"programs": [*programs, *bench.setuid]}))


@SUBJECT.probe(
    "powers",
    "Seen from the machine, it has no capability, cannot get any, and is behind a filter.",
    "stays while verify reads its capabilities (but for those that --system gives), no_new_privs, seccomp mode and user from outside",
)
def powers(bench: DecoyBench, box: Box) -> Found:
    mark = bench.mark()
    seen: list[dict[str, str]] = []
    box.run(Attempt("kernel", "take_name", {"name": mark}, watch=lambda: seen.extend(status_of(pid) for pid in named(mark))))
    if not seen:
        raise NoAnswer("it was not found among the processes of the machine")
    expected = {"NoNewPrivs": "1", "Seccomp": "2", **({} if bench.around.system and box.name == RUN else NO_CAPABILITIES)}
    reached = {name: status[name] for status in seen for name, value in expected.items() if status[name] != value}
    if os.geteuid() == 0 and any("0" in status["Uid"].split() for status in seen):
        reached["Uid"] = "the machine's root"
    return Found(reached, {name: value for name, value in expected.items() if name not in reached})
