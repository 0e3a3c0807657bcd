"""Plan a launch: which program runs, what the guest sees, and within which limits. Values only; nothing is made or run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import lru_cache

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, replace
from agent_sandbox.engine import languages
from agent_sandbox.engine.work import Code
from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.kernel.elf import CACHE
from agent_sandbox.kernel.mount_plan import MountPlan
from agent_sandbox.policy.secrets import Mask
from agent_sandbox.runtime.base import Argv, Launch, PythonCode
from agent_sandbox.workspace.view.plan import Needs, plan_view

if TYPE_CHECKING:
    from agent_sandbox.engine.work import Work
    from agent_sandbox.kernel.mount_plan import Layers
    from agent_sandbox.policy.model import FileRules, Limits, Policy, ProgramRules
    from agent_sandbox.runtime.base import Hosted, Script, Traits
    from agent_sandbox.workspace.view.executables import Executables
    from agent_sandbox.workspace.view.plan import MachineFacts

SCRATCH = "/tmp"  # the directory of work without one of its own
LOOK_AGAIN_SECONDS = 60.0  # after which the programs of the machine are listed again
DISK_BYTES = 1 << 30  # of the tmpfs of a throw-away sandbox without a limit: a filesystem in memory must have some size


@dataclass(frozen=True)
class Gating:
    """The file rules with the program rules worked in, and the executable files; None if all files are."""

    files: FileRules
    executables: Executables | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _RecentPlan:
    """A plan made lately, and what it was made from."""

    needs: Needs
    gating: Gating | None
    plan: MountPlan
    until: float


class LaunchPlanner:
    """Plans launches under one policy. Safe to use from many threads."""

    def __init__(self, policy: Policy, project: str | None, look: Callable[[], MachineFacts]) -> None:
        self._policy = policy
        self._project = project
        self._look = look
        self._recent: dict[str, _RecentPlan] = {}  # by runtime; each is replaced whole, so threads may share it

    @property
    def disk_bytes(self) -> int:
        """The size of throw-away layers."""
        return self._policy.limits.disk_bytes or DISK_BYTES

    def forget(self) -> None:
        """Drop recent plans: the machine's mounts have changed."""
        self._recent.clear()

    def launch(self, work: Work, runtime: Traits, layers: Layers, limits: Limits) -> Launch:
        """Return the launch of a piece of work. Raises `RuntimeUnavailable` when it cannot run there, and what planning a view raises."""
        program, executables, plan = self._plan(work, runtime, layers)
        policy = self._policy
        return Launch(
            program=program,
            root=plan,
            cwd=work.cwd or SCRATCH,
            env=work.env,
            limits=limits,
            requires=policy.requires,
            stdin=work.stdin,
            processes=policy.processes,
            writable=policy.files.write,
            system=policy.system,
            terminal=work.terminal,
            executables=executables,
            preload=work.preload,
            on_output=work.on_output,
            collect=work.collect,
        )

    def _plan(self, work: Work, runtime: Traits, layers: Layers) -> tuple[Argv | Hosted | Script, tuple[str, ...], MountPlan]:
        """Return the program, the files that it must be able to execute, and the view."""
        policy, what = self._policy, work.what
        brought = isinstance(what, Code) and what.language in runtime.brings
        if not runtime.views and (policy.files.read or policy.files.write):
            why = f"the runtime {runtime.name!r} shows no files of the machine, and the policy grants some"
            raise RuntimeUnavailable(why, missing=("view",), hint="run it without file permissions, or on Linux")
        if not runtime.views and not brought:
            raise RuntimeUnavailable(
                f"the runtime {runtime.name!r} runs Python code only", missing=("native-programs",), hint="run it on Linux"
            )
        if isinstance(what, Code) and brought:
            view = self._view(runtime.name, Needs(), layers) if runtime.views else MountPlan(layers, ())
            return languages.hosted(what.language, what.source, what.arguments), (), view
        program: Argv | Hosted | Script
        if isinstance(what, Code):
            path = work.env.get("PATH", os.defpath)
            code = languages.prepare(what.language, what.source, arguments=what.arguments, search_path=path, processes=policy.processes)
            program, needs, executables = code.program, code.needs, code.executables
        else:
            program, needs, executables = Argv(what.argv), languages.tools(), ()
        return program, executables, self._view(runtime.name, needs, layers, self._gating(work, program, executables))

    def _gating(self, work: Work, program: Argv | Hosted | Script, executables: tuple[str, ...]) -> Gating | None:
        """Return which files of the machine can be executed; None if all can, or nothing is started."""
        if not (self._policy.processes and self._policy.programs.restricts):
            return None
        from agent_sandbox.policy.programs import reads_a_line  # few policies name programs

        return gating_of(
            self._policy,
            search_path=work.env.get("PATH", os.defpath),
            interpreter=executables,
            python=isinstance(program, PythonCode),
            line=isinstance(program, Argv) and reads_a_line(program.words),
            project=self._project,
        )

    def _view(self, runtime: str, needs: Needs, layers: Layers, gating: Gating | None = None) -> MountPlan:
        """Return the plan of the view. A view of interpreters only is planned once for several runs in a row."""
        files, recent = self._policy.files, self._recent.get(runtime)
        if recent is not None and recent.needs == needs and recent.gating == gating and time.monotonic() < recent.until:
            return recent.plan if recent.plan.layers == layers else replace(recent.plan, layers=layers)
        rules, code = (files, None) if gating is None else (gating.files, gating.executables)
        host, scratch = self._look(), self.disk_bytes
        plan = plan_view(rules, needs, layers, host=host, project=self._project, scratch_bytes=scratch, executables=code)
        if gating is not None and gating.notes:
            plan = replace(plan, notes=(*plan.notes, *gating.notes))
        if not (files.read or files.write):
            self._recent[runtime] = _RecentPlan(needs, gating, plan, time.monotonic() + languages.KNOWN_SECONDS)
        return plan


def gating_of(policy: Policy, *, search_path: str, interpreter: Sequence[str], python: bool, line: bool, project: str | None) -> Gating:
    """Return what the program rules mean for one run.

    `interpreter` is the program that code starts; with `python` the interpreter runs already; a `line` is read by a shell.

    Raises `PolicyError` for rules that name programs which cannot be told apart.
    """
    if not policy.programs.groups:
        hidden, notes = _denied(policy.programs, search_path, _signs(search_path, ()))
        masks = (*policy.files.masks, *(Mask(path, "a denied tool") for path in hidden))
        return Gating(replace(policy.files, masks=masks), None, notes)
    modules = languages.python_modules() if python else ()
    rules = replace(policy.programs, lines=True) if line else policy.programs
    signs = _signs(search_path, modules)
    return Gating(policy.files, _executables(rules, search_path, tuple(interpreter[:1]), modules, project, signs))


def _signs(search_path: str, modules: Sequence[str]) -> tuple[int, ...]:
    """Return signs that programs or modules were installed or removed, as listing all of them is slow.

    Some changes leave no sign, so the key also changes with time. Until then a new program does not start, and no other one instead."""
    return (int(time.monotonic() / LOOK_AGAIN_SECONDS), *(_changed(path) for path in (*search_path.split(os.pathsep), *modules, CACHE)))


def _changed(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=8)
def _executables(
    rules: ProgramRules, search_path: str, programs: tuple[str, ...], modules: tuple[str, ...], project: str | None, signs: tuple[int, ...]
) -> Executables:
    from agent_sandbox.workspace.view.executables import find_executables

    return find_executables(rules, search_path=search_path, programs=programs, modules=modules, project=project)


@lru_cache(maxsize=8)
def _denied(rules: ProgramRules, search_path: str, signs: tuple[int, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    from agent_sandbox.workspace.view.executables import denied_files

    return denied_files(rules, search_path=search_path)
