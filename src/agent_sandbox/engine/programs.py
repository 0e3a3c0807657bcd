"""What a policy's rules about programs mean for one run: files that can be executed in the view, or names that it does not show."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import lru_cache

from agent_sandbox._fast.values import dataclass, replace
from agent_sandbox.engine import languages
from agent_sandbox.kernel.elf import CACHE
from agent_sandbox.policy.model import FileRules, Policy
from agent_sandbox.policy.programs import ProgramRules
from agent_sandbox.policy.secrets import Mask
from agent_sandbox.workspace.view.executables import Executables, denied_files, find_executables

LOOK_AGAIN_SECONDS = 60.0


@dataclass(frozen=True)
class Gating:
    """The rules about files with those about programs worked in, and what can be executed, if that is not whatever is there."""

    files: FileRules
    executables: Executables | None = None
    notes: tuple[str, ...] = ()


def gating_of(policy: Policy, *, search_path: str, interpreter: Sequence[str], python: bool, line: bool, project: str | None) -> Gating:
    """For a run that starts `interpreter`, if it is code, or with `python` has one that runs already, or is a `line` for a shell.

    Raises PolicyError where the rules name what cannot be told apart from something else.
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
    """What tells that programs or modules have been installed or removed: looking through all of them takes long. It does not see
    everything, so after a while they are looked through anyway; until then what is new does not start, and nothing else does instead."""
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
    return find_executables(rules, search_path=search_path, programs=programs, modules=modules, project=project)


@lru_cache(maxsize=8)
def _denied(rules: ProgramRules, search_path: str, signs: tuple[int, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return denied_files(rules, search_path=search_path)
