"""The contract that every runtime keeps, as claims that any test suite can put to any runtime.

    @pytest.mark.parametrize("claim", CLAIMS)
    def test_my_runtime_keeps_the_contract(claim):
        claim(Bench(MyRuntime(), my_plan))

A claim is a function that takes a `Bench` and raises `AssertionError` where the runtime falls short. The claims here are those that need
nothing but a runtime and a view with `/bin/sh` in it. They do not show that a runtime is safe, only that it is one: attacks are a suite
of their own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from agent_sandbox.kernel.mounts import MountPlan
from agent_sandbox.policy.guarantees import Guarantee
from agent_sandbox.policy.limits import Limits
from agent_sandbox.runtime.base import Argv, Completed, Launch, Reason, Runtime
from agent_sandbox.values import dataclass, field, replace

ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
LATENESS = 1.0  # seconds that a run may outlive its deadline


@dataclass(frozen=True)
class Bench:
    """A runtime and the view to try it in. `launch` holds what a claim does not set itself."""

    runtime: Runtime
    root: MountPlan
    launch: Launch = field(init=False)

    def __post_init__(self) -> None:
        nothing = Launch(Argv(("true",)), self.root, "/", ENVIRONMENT, Limits(), frozenset({Guarantee.FILES_CONFINED}))
        object.__setattr__(self, "launch", nothing)

    def run(self, *words: str, stdin: bytes = b"", limits: Limits | None = None) -> Completed:
        """Run a program to its end."""
        process = self.runtime.launch(replace(self.launch, program=Argv(words), stdin=stdin, limits=limits or Limits()))
        try:
            return process.wait()
        finally:
            process.close()

    def shell(self, script: str, *, stdin: bytes = b"", limits: Limits | None = None) -> Completed:
        """Run a line of shell to its end."""
        return self.run("/bin/sh", "-c", script, stdin=stdin, limits=limits)


def an_exit_code_is_the_programs_own(bench: Bench) -> None:
    """Every code from 0 to 255 passes through; a failing program is no failure of the runtime's."""
    for code in (0, 1, 2, 42, 124, 125, 126, 127, 255):
        ended = bench.shell(f"exit {code}").exit
        assert (ended.code, ended.reason, ended.signal, ended.limits_hit) == (code, Reason.EXITED, None, ()), ended


def a_signal_is_reported_as_a_shell_does(bench: Bench) -> None:
    """128 plus its number, with the number beside it."""
    for number in (1, 9, 11, 15):
        ended = bench.shell(f"kill -{number} $$").exit
        assert (ended.code, ended.reason, ended.signal) == (128 + number, Reason.SIGNALLED, number), ended


def streams_are_exact_and_apart(bench: Bench) -> None:
    """Bytes arrive as they were written, each on its own stream; input ends where it ends."""
    every_byte = bytes(range(256)) * 16
    ran = bench.shell("cat; echo oops >&2", stdin=every_byte)
    assert ran.stdout == every_byte
    assert ran.stderr == b"oops\n"


def the_environment_is_complete_and_nothing_else(bench: Bench) -> None:
    """What was given is there; what was not is not."""
    variables = set(bench.run("/usr/bin/env").stdout.decode().splitlines())
    assert variables == {f"{name}={value}" for name, value in ENVIRONMENT.items()}


def what_cannot_be_found_ends_with_127_and_what_cannot_be_executed_with_126(bench: Bench) -> None:
    """As in a shell, and not as an exception: the program was asked for, and this is how that went."""
    assert bench.run("no-such-program").exit.code == 127
    assert bench.run("/no/such/program").exit.code == 127
    assert bench.run("/etc/passwd").exit.code == 126


def a_run_ends_at_its_deadline(bench: Bench) -> None:
    """Also when its program refuses to."""
    for script in ("sleep 60", "trap '' TERM HUP INT; while :; do :; done", "kill -STOP $$"):
        began = time.monotonic()
        ended = bench.shell(script, limits=Limits(wall_seconds=0.3)).exit
        assert ended.reason is Reason.TIMED_OUT and "wall" in ended.limits_hit, ended
        assert time.monotonic() - began < 0.3 + LATENESS + 1, "the launch itself may take a moment more"


def output_beyond_its_limit_is_cut_and_said_to_be(bench: Bench) -> None:
    """The rest of the run goes on."""
    ran = bench.shell("head -c 5000 /dev/zero; echo done >&2", limits=Limits(output_bytes=1000))
    assert len(ran.stdout) == 1000 and ran.stderr == b"done\n"
    assert ran.exit.code == 0 and "output" in ran.exit.limits_hit


def a_run_can_be_killed_from_another_thread(bench: Bench) -> None:
    """And killing it again, or closing it twice, is harmless."""
    process = bench.runtime.launch(replace(bench.launch, program=Argv(("sleep", "60"))))
    killer = threading.Thread(target=process.kill)
    try:
        killer.start()
        assert process.wait().exit.reason is Reason.KILLED
    finally:
        killer.join()
        process.kill()
        process.close()
        process.close()


def nothing_outlives_its_run(bench: Bench) -> None:
    """A child in the background keeps the stream open; that does not keep the run alive, nor the child."""
    began = time.monotonic()
    assert bench.shell("sleep 60 & exit 3").exit.code == 3
    assert time.monotonic() - began < 10


Claim = Callable[[Bench], None]
CLAIMS: tuple[Claim, ...] = (
    an_exit_code_is_the_programs_own,
    a_signal_is_reported_as_a_shell_does,
    streams_are_exact_and_apart,
    the_environment_is_complete_and_nothing_else,
    what_cannot_be_found_ends_with_127_and_what_cannot_be_executed_with_126,
    a_run_ends_at_its_deadline,
    output_beyond_its_limit_is_cut_and_said_to_be,
    a_run_can_be_killed_from_another_thread,
    nothing_outlives_its_run,
)
