"""Probes on code inside WebAssembly: the engine's wall alone, the kernel's wall around the engine, fuel and determinism."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from agent_sandbox.selftest.bench import VARIABLE, DecoyBench, descendants, listening, status_of
from agent_sandbox.selftest.boxes import Attempt, AttemptResult, Bare, Found, NoAnswer
from agent_sandbox.selftest.probe import WASM, Probes
from agent_sandbox.selftest.probes.processes import NO_CAPABILITIES
from agent_sandbox.selftest.sandboxed import Compiled

SUBJECT = Probes("wasm", "seccomp", "namespaces")

_FUEL, _STEPS = 50_000_000, 2_000_000  # each step takes hundreds of instructions: the fuel is spent in a fraction of a second
_NAMESPACES = ("mnt", "pid", "net", "ipc", "uts", "user", "cgroup")


@SUBJECT.probe(
    "wasm-engine",
    "The WebAssembly engine alone lets code reach nothing of the machine.",
    "without the kernel's wall: reads planted secrets, writes, links, connects, starts a process, loads native code, reads the environment",
    boxes=(WASM,),
)
def engine(bench: DecoyBench, box: Bare | Compiled) -> Found:
    name, directory = bench.mark(), bench.project
    with listening(socket.SOCK_STREAM, tcp=(socket.AF_INET, ("127.0.0.1", 0))) as listeners:
        arguments = {"paths": bench.secrets[:2], "directory": directory, "name": name, "port": listeners["tcp"].target[1][1]}
        attempt = Attempt("wasm", "leave", {**arguments, "variable": VARIABLE})
        try:
            ran: AttemptResult = box.run(attempt) if isinstance(box, Bare) else box.run_behind_engine(attempt)
            heard = listeners["tcp"].heard()
            made = [each for each in (name, f"{name}.link") if os.path.lexists(f"{directory}/{each}")]
        finally:
            for each in (name, f"{name}.link"):
                with suppress(OSError):
                    os.unlink(f"{directory}/{each}")
    # What the guest says of itself counts for reading only, and there only with the token. The rest is seen from outside.
    shown = ("native code", "process", "host processes", "list")
    reached = {way: "the token" for way, seen in ran.reached.items() if bench.token in seen}
    reached |= {way: seen for way, seen in ran.reached.items() if way in shown}
    reached |= {"connect": "we heard it"} if heard else {}
    reached |= {"write": f"{', '.join(made)} is there"} if made else {}
    return Found(reached, {way: why for way, why in ran.refused.items() if way not in reached})


@SUBJECT.probe(
    "wasm-kernel",
    "Around the WebAssembly engine there is the kernel's wall.",
    "stays while verify reads the engine's capabilities, no_new_privs, seccomp mode, user and namespaces from outside",
    boxes=(WASM,),
)
def kernel(bench: DecoyBench, box: Bare | Compiled) -> Found:
    seen: list[tuple[dict[str, str], dict[str, str]]] = []

    def watch() -> None:
        for pid in descendants(os.getpid()):
            with suppress(OSError):
                # Init is number 1 of its own processes, and the zygote has only one number.
                if status_of(pid)["NSpid"].split()[1:] not in ([], ["1"]):
                    seen.append((status_of(pid), _namespaces(pid)))

    if isinstance(box, Bare):
        seen = [(status_of(os.getpid()), _namespaces(os.getpid()))]
    else:
        box.run(Attempt("files", "nothing", watch=watch))
    if not seen:
        raise NoAnswer("the engine was not found among the processes of the machine")
    ours = _namespaces(os.getpid())
    expected = {"NoNewPrivs": "1", "Seccomp": "2", **NO_CAPABILITIES}
    reached = {name: status[name] for status, _ in seen for name, value in expected.items() if status[name] != value}
    reached |= {kind: "that of verify" for _, theirs in seen for kind, name in theirs.items() if name == ours[kind]}
    if os.geteuid() == 0 and any("0" in status["Uid"].split() for status, _ in seen):
        reached["Uid"] = "the machine's root"
    return Found(reached, {name: "as it must be" for name in (*expected, *ours) if name not in reached})


def _namespaces(pid: int) -> dict[str, str]:
    return {kind: os.readlink(f"/proc/{pid}/ns/{kind}") for kind in _NAMESPACES if Path(f"/proc/{pid}/ns/{kind}").exists()}


@SUBJECT.probe(
    "wasm-fuel",
    "Code that has used up its fuel is ended.",
    f"goes on for {_STEPS:,} steps of a loop with a fuel of {_FUEL:,} instructions",
    boxes=(WASM,),
    own_control=True,
)
def fuel(bench: DecoyBench, box: Compiled) -> Found:
    if not box.run(Attempt("files", "nothing", limits={"fuel": 100 * _FUEL})).reached:
        raise NoAnswer("with enough fuel nothing runs either")
    ran = box.run(Attempt("wasm", "go_on", {"steps": _STEPS}, limits={"fuel": _FUEL}, may_end=True))
    ended = "fuel" in ran.limits_hit
    return Found({} if ended else {"fuel": ran.reached.get("fuel", f"it ended with: {ran.ended}")}, {"fuel": ran.ended} if ended else {})


@SUBJECT.probe(
    "wasm-deterministic",
    "A deterministic run is the same every time.",
    "prints the time and random numbers in two runs with one seed, and compares; then in one with another seed",
    boxes=(WASM,),
    own_control=True,
)
def deterministic(bench: DecoyBench, box: Compiled) -> Found:
    first, second, other = (box.run(Attempt("wasm", "show_chance"), seed=seed).reached for seed in (7, 7, 8))
    if first == other or not first:
        raise NoAnswer("another seed does not change anything either")
    return Found({} if first == second else {"values": "they differ"}, {"values": "the same"} if first == second else {})
