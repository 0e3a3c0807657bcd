"""What a policy's rules about tools mean for one run: a toolbox for the view, or names that it does not show."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from agent_sandbox.engine import languages
from agent_sandbox.policy.model import FileRules, Policy
from agent_sandbox.policy.secrets import Mask
from agent_sandbox.policy.tools import ToolRules
from agent_sandbox.values import dataclass, replace
from agent_sandbox.workspace.toolbox import Toolbox, denied_files, find_tools


@dataclass(frozen=True)
class Gating:
    """The rules about files with those about tools worked in, and what of tools the rules about files cannot say."""

    files: FileRules
    toolbox: Toolbox | None = None
    notes: tuple[str, ...] = ()


def gating(policy: Policy, *, search_path: str, interpreter: Sequence[str], python: bool, project: str | None) -> Gating:
    """For a run that starts `interpreter`, if it is code, or with `python` has one that runs already.

    Raises PolicyError where the rules name what cannot be told apart from something else.
    """
    moment = languages.moment()
    if not policy.tools.groups:
        hidden, notes = _denied(policy.tools, search_path, moment)
        masks = (*policy.files.masks, *(Mask(path, "a denied tool") for path in hidden))
        return Gating(replace(policy.files, masks=masks), None, notes)
    modules = languages.python_modules() if python else ()
    return Gating(policy.files, _toolbox(policy.tools, search_path, tuple(interpreter[:1]), modules, project, moment))


@lru_cache(maxsize=8)
def _toolbox(
    rules: ToolRules, search_path: str, programs: tuple[str, ...], modules: tuple[str, ...], project: str | None, moment: int
) -> Toolbox:
    return find_tools(rules, search_path=search_path, programs=programs, modules=modules, project=project)


@lru_cache(maxsize=8)
def _denied(rules: ToolRules, search_path: str, moment: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return denied_files(rules, search_path=search_path)
