"""From a request to what it is about: the project, its current sandbox, and the policy for a run in it."""

from __future__ import annotations

import os
from collections.abc import Callable

from agent_sandbox import policy_files
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, replace
from agent_sandbox.assembly import here
from agent_sandbox.cli.background import in_a_child
from agent_sandbox.cli.parser import Request
from agent_sandbox.cli.render import quantities
from agent_sandbox.cli.render.messages import remark
from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.runtimes import Runtimes
from agent_sandbox.errors import Busy, PolicyError
from agent_sandbox.kernel import mountinfo
from agent_sandbox.policy.limits import Limits
from agent_sandbox.policy.model import CLONED_LIMITS, Policy, cloned, repeatable
from agent_sandbox.policy.paths import PathPattern, parse
from agent_sandbox.policy.programs import ProgramRules
from agent_sandbox.policy.secrets import reveal
from agent_sandbox.workspace.project import Project, find_project
from agent_sandbox.workspace.store import SandboxState, Store, sandbox_id

if TYPE_CHECKING:
    from agent_sandbox.cli.elevation import Lifted
    from agent_sandbox.engine.code_check import EarlyLook
    from agent_sandbox.policy.files.layers import Effective

JSON_OUTPUT_BYTES = 16 << 20  # of each stream, when it is kept in memory for a document instead of being passed on


@dataclass(frozen=True)
class Current:
    """The project that a command is about, and its sandbox."""

    project: Project
    state: SandboxState
    leftovers: tuple[str, ...] = ()


def working_directory() -> str:
    """Where the caller stands. Raises `PolicyError` when that directory has been removed."""
    try:
        return os.getcwd()
    except OSError as error:
        raise PolicyError(f"the current directory cannot be found: {error.strerror}", hint="change into a directory that exists") from error


def project_of(request: Request, directory: str | None = None) -> Project:
    """The project that the request names, or that a directory belongs to: the current one, if no other is given."""
    named = request.value("--project")
    mounts = mountinfo.visible(mountinfo.read())
    place = named if named is not None else directory or working_directory()
    return find_project(place, home=here().host.home, explicit=named is not None, mounts=mounts)


def current(request: Request) -> Current:
    """The project and its current sandbox. Makes the store if there is none; raises a `WorkspaceError` when it cannot be used."""
    project = project_of(request)
    store = Store.open(here().host.state)
    return Current(project, store.sandbox_for(project.path), store.leftovers)


def policy_of(request: Request, project: Project) -> Policy:
    """What the policy files leave of the command line's preset, and what the options of the request change of it. Raises `PolicyError`."""
    layers = layers_for(request, project)
    if not layers.all:  # as nearly always: then nothing more is loaded
        return _preset(request, project, _limits(request))
    return _effective(request, project, layers).policy


def layers_for(request: Request, project: Project) -> policy_files.Layers:
    """The policy files, and what the request names to be held to as well."""
    found = policy_files.layers_of(project.path)
    return replace(found, below=(*found.below, *policy_files.chosen(request.values("--policy")))) if request.has("--policy") else found


def effective_of(request: Request, project: Project) -> Effective:
    """The same, with what is looked at before a run and what people should know."""
    return _effective(request, project, layers_for(request, project))


def _effective(request: Request, project: Project, layers: policy_files.Layers) -> Effective:
    ceiling = _preset(request, project, CLONED_LIMITS)
    return policy_files.under(layers, ceiling, policy_files.changed_limits(CLONED_LIMITS, _limits(request)))


def ceiling_of(request: Request, project: Project) -> Policy:
    """What the system's policy file alone leaves of the command line's preset: the most that any file below it can permit."""
    return _effective(request, project, policy_files.layers_of(None)).policy


def _preset(request: Request, project: Project, limits: Limits) -> Policy:
    """The command line's own, without the limits among the options."""
    masks = here().masks_for(project.path)
    for path in request.values("--reveal"):
        masks = reveal(masks, os.path.abspath(path))
    denied = [_pattern(path) for path in request.values("--deny")]
    policy = cloned(masks=masks, denied=denied, limits=limits, system=request.has("--system"), programs=_programs(request))
    return repeatable(policy) if request.has("--deterministic") else policy


def _programs(request: Request) -> ProgramRules:
    """Without --allow all programs are there."""
    return ProgramRules((names_in(request, "--allow"),) if request.has("--allow") else (), names_in(request, "--deny-command"))


def names_in(request: Request, option: str) -> tuple[str, ...]:
    """The names in an option that takes several: with commas, with blanks, or given more than once."""
    return tuple(name for value in request.values(option) for name in value.replace(",", " ").split())


def _pattern(text: str) -> PathPattern:
    if not text.startswith(("/", "~", "**/")):
        text = f"{working_directory()}/{text.removeprefix('./')}"
    return parse(text, home=here().host.home)


def _limits(request: Request) -> Limits:
    limits = CLONED_LIMITS
    if (text := request.value("--timeout")) is not None:
        limits = replace(limits, wall_seconds=quantities.seconds("--timeout", text))
    if (text := request.value("--memory")) is not None:
        limits = replace(limits, memory_bytes=quantities.size("--memory", text))
    if (text := request.value("--disk")) is not None:
        limits = replace(limits, disk_bytes=quantities.size("--disk", text))
    if (text := request.value("--processes")) is not None:
        limits = replace(limits, processes=quantities.count("--processes", text))
    if (text := request.value("--fuel")) is not None:
        limits = replace(limits, fuel=quantities.count("--fuel", text))
    return replace(limits, output_bytes=JSON_OUTPUT_BYTES) if request.has("--json") else limits


def _governed(request: Request, project: Project) -> tuple[Policy, EarlyLook | None]:
    """What holds for a run, and what code is looked at for; both from one look at the files. What they ask for and do not get is said."""
    layers = layers_for(request, project)
    if not layers.all:
        return _preset(request, project, _limits(request)), None
    found = _effective(request, project, layers)
    for warning in found.warnings if not request.has("--quiet") else ():
        remark(warning)
    return found.policy, policy_files.early_look(found)


def gate_for(request: Request, policy: Policy, project: Project, sandbox: str, *, prompt: bool = False) -> Gate:
    """The door for a command, with who is asked where the policy asks. What is thrown away is the project's for capabilities and people."""
    if not policy.asks.asks:
        return here().gate(policy, sandbox=sandbox)
    from agent_sandbox.cli.approval_prompt import desk_for  # few policies ask

    desk = desk_for(request, policy, sandbox=sandbox_id(project.path), prompt=prompt)
    return here().gate(policy, approver=desk, sandbox=sandbox)


@dataclass(frozen=True)
class Opening:
    """A session to run something in, and what it is about. Without `found`, on a throw-away sandbox; `lifted` is an elevation, if any."""

    session: Session
    found: Current | None
    project: Project
    lifted: Lifted | None


def session_for(request: Request, runtimes: Runtimes, on_busy: Callable[[Busy], None]) -> Opening:
    """A session on the project's current sandbox, or on a throw-away one, in which case there is no `Current`: so for a diff or a plan."""
    found = None if any(map(request.has, ("--throw-away", "--diff", "--simulate"))) else current(request)
    project = found.project if found else project_of(request)
    (policy, early), lifted = _governed(request, project), None
    if os.path.isdir(here().host.elevations):  # as a rule it is not
        from agent_sandbox.cli import elevation

        lifted = elevation.lifted(policy, sandbox_id(project.path))
    named = found.state.id if found else "simulation" if request.has("--simulate") else ""
    gate = gate_for(request, lifted.policy if lifted else policy, project, named)
    session = here().session(
        gate,
        runtimes,
        project=project.path,
        state=found.state if found else None,
        on_busy=None if request.has("--no-wait") else on_busy,
        beside=in_a_child,
        early=early,
    )
    return Opening(session, found, project, lifted)
