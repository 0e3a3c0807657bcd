"""The boxes under attack: a sandbox as `agent-sandbox run` makes it, and one as `Sandbox()` does. Both use the whole engine."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Self

from agent_sandbox._calls import Run, code_of
from agent_sandbox._fast.values import replace
from agent_sandbox.assembly import here, registry
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.work import Command, Work
from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.policy.model import MIB, Guarantee, Policy, implied, with_network
from agent_sandbox.policy.network_presets import network_of
from agent_sandbox.policy.paths import Tree, ancestors
from agent_sandbox.policy.secrets import default_masks
from agent_sandbox.runtime.base import Completed, Terminal
from agent_sandbox.runtime.process.guest_handle import ProcessGuest
from agent_sandbox.runtime.process.probe import trial
from agent_sandbox.runtime.process.runtime import ProcessRuntime
from agent_sandbox.sandbox import Sandbox
from agent_sandbox.selftest.bench import SCRIPTS, DecoyBench
from agent_sandbox.selftest.boxes import PYTHON, Attempt, AttemptResult, patience, program, read_answer
from agent_sandbox.selftest.probe import WASM, WallAbsent
from agent_sandbox.workspace.store import SandboxState

# The names of the limits in `SandboxConfig`, and their units.
_SETTINGS = {
    "wall_seconds": ("timeout_seconds", 1),
    "cpu_seconds": ("max_cpu_seconds", 1),
    "memory_bytes": ("max_memory_mb", MIB),
    "processes": ("max_processes", 1),
    "open_files": ("max_open_files", 1),
    "output_bytes": ("max_output_bytes", 1),
    "disk_bytes": ("max_disk_mb", MIB),
}
_SUPERVISOR = """
import sys
from agent_sandbox import Sandbox
Sandbox(validate_code=False).execute(open(sys.argv[1]).read(), on_output=lambda stream, text: print(text, flush=True))
"""


class Cloned:
    """The sandbox that `agent-sandbox run` makes: its preset and the user's options, layers that are kept, and the bench's project.

    While this sandbox is used, our process must have a single thread, as the process of `agent-sandbox run` has.
    """

    name = "run"
    processes = True
    writes = True

    def __init__(self, bench: DecoyBench, policy: Policy, environment: Mapping[str, str], state: SandboxState) -> None:
        self.policy = _with_planted_secrets(policy, bench)
        self._bench = bench
        self._environment = environment
        self._state = state
        self._runtime = ProcessRuntime(single_threaded=True)
        self._sessions: dict[tuple[object, ...], Session] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runtime.close()

    def run(self, attempt: Attempt) -> AttemptResult:
        """Run an attempt as a command in the project."""
        guests: list[ProcessGuest] = []

        def look(stream: str, data: bytes) -> None:
            if attempt.watch is not None:
                attempt.watch()
                guests[0].kill()

        outcome = self._session(attempt).run(
            Work(
                Command(self._words(attempt)),
                self._environment,
                cwd=self._bench.project,
                terminal=Terminal(24, 80) if attempt.terminal else None,
                on_output=look if attempt.watch is not None else None,
                on_start=guests.append,
            )
        )
        errors = outcome.stderr or outcome.refused.encode()
        end = outcome.exit
        return read_answer(attempt, outcome.stdout, errors, ended=end.reason.value, limits_hit=end.limits_hit)

    def _words(self, attempt: Attempt) -> tuple[str, ...]:
        return (*PYTHON, f"{self._bench.project}/{SCRIPTS}/{attempt.module}.py", attempt.call())

    def _session(self, attempt: Attempt) -> Session:
        key = (attempt.throw_away, attempt.network, *sorted(attempt.limits.items()))
        if key not in self._sessions:
            self._sessions[key] = self._make_session(attempt)
        return self._sessions[key]

    def _make_session(self, attempt: Attempt) -> Session:
        own = self.policy.limits
        wall = min(own.wall_seconds or patience(), patience())
        limits = replace(own, **{"wall_seconds": wall, **attempt.limits})
        policy = replace(
            self.policy, limits=limits, requires=self.policy.requires | implied(self.policy.processes, limits, network=self.policy.network)
        )
        if attempt.network:
            policy = with_network(policy, network_of(attempt.network))
        state = None if attempt.throw_away else self._state
        # An attempt with a network runs in a fork of ours, in a world of its own. Its sandbox must start there, too.
        runtime = ProcessRuntime(single_threaded=True) if attempt.network else self._runtime
        return here().session(here().gate(policy), here().only(runtime), project=self._bench.project, state=state)

    def supervisor(self) -> tuple[str, ...]:
        """Return the command line of `agent-sandbox run` with a throw-away sandbox."""
        stay = Attempt("files", "nothing", watch=lambda: None)
        ours = (sys.executable, "-m", "agent_sandbox", "run", "--throw-away", "--project", self._bench.project)
        return (*ours, "--cwd", self._bench.project, "--", *self._words(stay))

    def recorded_as(self, attempt: Attempt) -> str:
        """Return the last argument of the command: the ledger records the arguments of a command as they are."""
        return attempt.call()


class Locked:
    """The sandbox that `Sandbox()` of the SDK makes, with these settings."""

    name = "sdk"
    processes = False
    writes = False

    def __init__(self, bench: DecoyBench, **settings: Any) -> None:
        self._bench = bench
        self._settings = settings
        self._sandboxes: dict[tuple[object, ...], Sandbox] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        here().process().close()

    def run(self, attempt: Attempt) -> AttemptResult:
        """Run an attempt as Python code."""
        run = Run()

        def look(stream: str, text: str) -> None:
            assert attempt.watch is not None
            attempt.watch()
            run.cancel()

        listening: dict[str, Any] = {"on_output": look} if attempt.watch is not None else {}
        result = self._sandbox(attempt)._perform(run, code_of(_source(attempt), "python"), **listening)
        ended = result.exit.reason.value if result.exit else result.error or ""
        return read_answer(attempt, result.stdout_bytes, result.stderr_bytes, ended=ended, limits_hit=result.limits_hit)

    def _sandbox(self, attempt: Attempt) -> Sandbox:
        settings: dict[str, Any] = {_SETTINGS[name][0]: value / _SETTINGS[name][1] for name, value in attempt.limits.items()}
        settings = {**self._settings, **{name: int(value) if value == int(value) else value for name, value in settings.items()}}
        if attempt.project:
            settings |= {"allow_file_read": True, "allowed_paths": (self._bench.project,)}
        if attempt.tools:
            settings |= {"allow_subprocess": True, "allowed_commands": attempt.tools, "allow_shell": False}
        key = tuple(sorted(settings.items()))
        if key not in self._sandboxes:
            # The isolation is under attack. The code check before it would refuse the attempts by their text.
            self._sandboxes[key] = self._stack.enter_context(Sandbox(validate_code=False, **settings))
        return self._sandboxes[key]

    def supervisor(self) -> tuple[str, ...]:
        """Return the command line of a Python program that runs code in a `Sandbox` of the SDK."""
        source = f"{self._bench.project}/supervised.py"
        with open(source, "w", encoding="utf-8") as file:
            file.write(_source(Attempt("files", "nothing", watch=lambda: None)))
        return (sys.executable, "-c", _SUPERVISOR, source)

    def recorded_as(self, attempt: Attempt) -> str:
        """Return the digest of the code: the ledger records code by its digest."""
        return hashlib.sha256(_source(attempt).encode()).hexdigest()


class OnRuntime(Locked):
    """The sandbox that `Sandbox(runtime=…)` makes or, with an image, `Sandbox(image=…)`. It is attacked as that of the SDK is."""

    def __init__(self, bench: DecoyBench, name: str, *, image: str = "", **settings: Any) -> None:
        self.name = name
        self._choice = ("image", image) if image else ("runtime", name)
        super().__init__(bench, **dict([self._choice]), **settings)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        registry().get(self.name).close()

    def run(self, attempt: Attempt) -> AttemptResult:
        """Run an attempt as Python code. Raises `WallAbsent` for one that needs a list of programs, which none of these runtimes has."""
        if attempt.tools:
            raise WallAbsent(f"lists of programs are refused by the runtime {self.name}")
        return super().run(attempt)

    def supervisor(self) -> tuple[str, ...]:
        """Return the command line of a Python program that runs code in such a `Sandbox`."""
        *words, source = super().supervisor()
        name, value = self._choice
        return (*words[:-1], _SUPERVISOR.replace("Sandbox(", f"Sandbox({name}={value!r}, "), source)


class Compiled:
    """Python inside WebAssembly, as the wasm runtime runs it. Attempts go to the runtime itself: policy and ledger are attacked elsewhere.

    Raises `WallAbsent` if the interpreter is not installed or not compiled.
    """

    name = WASM

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        here().wasm(warm=0).close()

    def run(self, attempt: Attempt, *, seed: int | None = None) -> AttemptResult:
        """Run an attempt behind both walls. With a seed, the run is deterministic."""
        counting = seed is not None or bool(attempt.limits)
        self.must_be_ready(counting=counting)
        launch = trial(_source(attempt))
        limits = replace(launch.limits, wall_seconds=patience(), **attempt.limits)
        requires = launch.requires | ({Guarantee.DETERMINISTIC} if seed is not None else frozenset())
        with here().wasm(warm=0).launch(replace(launch, limits=limits, requires=requires, deterministic=seed)) as guest:
            if attempt.watch is not None:
                return self._watched(attempt, guest)
            return _answer(attempt, guest.wait())

    def run_behind_engine(self, attempt: Attempt) -> AttemptResult:
        """Run an attempt behind the engine's wall alone."""
        self.must_be_ready()
        launch = trial(_source(attempt))
        alone = replace(launch, root=replace(launch.root, steps=()), limits=replace(launch.limits, wall_seconds=patience()))
        with here().one_wall().launch(alone) as guest:
            return _answer(attempt, guest.wait())

    def must_be_ready(self, *, counting: bool = False) -> None:
        """Raise `WallAbsent` if the interpreter, or the one that counts, cannot be used."""
        try:
            ready = here().wasm(warm=0).ready_to_count if counting else here().wasm(warm=0).ready
        except RuntimeUnavailable as error:
            raise WallAbsent(f"WebAssembly was not attacked: {error.message}", hint=error.hint) from error
        if not ready:
            raise WallAbsent("WebAssembly was not attacked: it has not been compiled; run: agent-sandbox setup")

    def _watched(self, attempt: Attempt, guest: ProcessGuest) -> AttemptResult:
        """Call `watch` while the guest runs. Its walls are there when `launch` returns, before its program starts."""
        assert attempt.watch is not None
        attempt.watch()
        guest.kill()
        guest.wait()
        return AttemptResult({"ran": "it was watched"})


def _answer(attempt: Attempt, ended: Completed) -> AttemptResult:
    end = ended.exit
    return read_answer(attempt, ended.stdout, ended.stderr, ended=end.reason.value, limits_hit=end.limits_hit)


def _source(attempt: Attempt) -> str:
    return f"{program(attempt.module)}\nmain(*{attempt.call()})\n"


def _with_planted_secrets(policy: Policy, bench: DecoyBench) -> Policy:
    """Return the user's policy, extended to hide the secrets of the bench as it hides the user's own."""
    planted = [mask for mask in default_masks(homes=[bench.home], projects=[bench.project]) if mask.path in _above(bench.secrets)]
    files = replace(policy.files, masks=(*policy.files.masks, *planted), denied=(*policy.files.denied, Tree(bench.denied)))
    return replace(policy, files=files)


def _above(paths: tuple[str, ...]) -> set[str]:
    return {above for path in paths for above in ancestors(path)}
