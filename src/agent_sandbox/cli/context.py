"""Resolve a command line to its project, sandbox, pending changes, policy, gate and session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from agent_sandbox import policy_files
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, replace
from agent_sandbox.assembly import here
from agent_sandbox.cli.caller import in_a_child
from agent_sandbox.cli.options import CommandOptions, PolicyOptions
from agent_sandbox.cli.render.messages import Console, remark
from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.provisions import NO_PROVISIONS, Provisions
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.runtimes import Runtimes
from agent_sandbox.errors import Busy, PolicyError, SandboxError
from agent_sandbox.kernel import mountinfo
from agent_sandbox.policy.model import CLONED_LIMITS, OFFLINE, Limits, Policy, ProgramRules, cloned, repeatable, with_network
from agent_sandbox.policy.paths import PathPattern, parse
from agent_sandbox.policy.search_rules import SearchRules
from agent_sandbox.policy.secrets import reveal
from agent_sandbox.workspace.changes import Change, ChangeSet
from agent_sandbox.workspace.originals.runs import file_clock_ns
from agent_sandbox.workspace.project import Project, find_project
from agent_sandbox.workspace.store import SandboxState, Store, sandbox_id
from agent_sandbox.workspace.stored_sandbox import Stored

if TYPE_CHECKING:
    from agent_sandbox.cli.elevation import Lifted
    from agent_sandbox.engine.code_check import EarlyLook
    from agent_sandbox.engine.runtimes import Registry
    from agent_sandbox.policy.files.layers import Effective
    from agent_sandbox.runtime.base import Runtime


@contextmanager
def object_runtime() -> Iterator[Callable[[], Runtime]]:
    """Yield a function that returns the runtime in which git objects are read. It starts when it is used, and ends with the block."""
    with ExitStack() as ends:
        registries: list[Registry] = []

        def runtime() -> Runtime:
            if not registries:
                registries.append(here().command_line_registry())
                ends.callback(registries[0].close)
            return registries[0].get("process")

        yield runtime


@dataclass(frozen=True)
class ProjectSandbox:
    """The project that a command is about, and its sandbox."""

    project: Project
    state: SandboxState
    leftovers: tuple[str, ...] = ()


def working_directory() -> str:
    """Return the current directory. Raises `PolicyError` if it has been removed."""
    try:
        return os.getcwd()
    except OSError as error:
        raise PolicyError(f"the current directory cannot be found: {error.strerror}", hint="change into a directory that exists") from error


def project_of(named: str | None, directory: str | None = None, *, throw_away: bool = False) -> Project:
    """Return the project named by --project, or else the project that contains `directory`, by default the current directory.

    `throw_away` says that nothing of the run is kept. Then `/` and the home directory may stand in for a project.
    """
    mounts = mountinfo.visible(mountinfo.read())
    place = named if named is not None else directory or working_directory()
    return find_project(place, home=here().host.home, explicit=named is not None, throw_away=throw_away, mounts=mounts)


def current(named: str | None) -> ProjectSandbox:
    """Return the project and its sandbox. Creates the store if there is none. Raises `WorkspaceError` if the store cannot be used."""
    project = project_of(named)
    store = Store.open(here().host.state)
    return ProjectSandbox(project, store.sandbox_for(project.path), store.leftovers)


def policy_of(options: PolicyOptions, project: Project) -> Policy:
    """Return the policy of a command: the preset of the command line, narrowed by the policy files, changed by the options.

    Raises `PolicyError` for an invalid or impossible policy.
    """
    layers = layers_for(options, project)
    if not layers.all:  # the usual case: nothing more is loaded
        return _preset(options, project, _limits(options))
    return _effective(options, project, layers).policy


def layers_for(options: PolicyOptions, project: Project) -> policy_files.Layers:
    """Return the policy files in force for a project, including those that --policy names."""
    layers = policy_files.layers_of(project.path)
    return replace(layers, chosen=policy_files.chosen(options.files)) if options.files else layers


def effective_of(options: PolicyOptions, project: Project) -> Effective:
    """Return the policy of a command, with the warnings and the checks before a run that the policy files ask for."""
    return _effective(options, project, layers_for(options, project))


def _effective(options: PolicyOptions, project: Project, layers: policy_files.Layers) -> Effective:
    ceiling = _preset(options, project, CLONED_LIMITS)
    typed = ceiling.network.outbound
    if not typed:
        asked = policy_files.asked_network(layers, project.path)
        ceiling = with_network(ceiling, replace(asked, search=SearchRules(off=options.no_dlp)))
    limits = policy_files.changed_limits(CLONED_LIMITS, _limits(options))
    return policy_files.under(layers, ceiling, limits, typed_network=typed, project=project.path)


def ceiling_of(options: PolicyOptions, project: Project) -> Policy:
    """Return the preset of the command line, narrowed by the system's policy file alone. No other policy file can permit more."""
    return _effective(options, project, policy_files.layers_of(None)).policy


def _preset(options: PolicyOptions, project: Project, limits: Limits) -> Policy:
    masks = here().masks_for(project.path)
    for path in options.reveal:
        masks = reveal(masks, os.path.abspath(path))
    denied = [_pattern(path) for path in options.deny]
    programs = ProgramRules((options.allow,) if options.allow is not None else (), options.deny_commands)
    network = OFFLINE
    if options.network or options.allow_network:
        network = here().network(options.network, web=options.allow_network, project=project.path)
        network = replace(network, search=SearchRules(off=options.no_dlp))
    policy = cloned(masks=masks, denied=denied, network=network, limits=limits, system=options.system, programs=programs)
    return repeatable(policy) if options.deterministic else policy


def _pattern(text: str) -> PathPattern:
    if not text.startswith(("/", "~", "**/")):
        text = f"{working_directory()}/{text.removeprefix('./')}"
    return parse(text, home=here().host.home)


def _limits(options: PolicyOptions) -> Limits:
    return replace(CLONED_LIMITS, **dict(options.limits)) if options.limits else CLONED_LIMITS  # type: ignore[arg-type]


def _governed(options: PolicyOptions, project: Project, console: Console) -> tuple[Policy, EarlyLook | None]:
    """Return the policy of a run, and the check of code before it runs, if any. Prints the warnings of the policy files."""
    layers = layers_for(options, project)
    if "packages" in options.network or any("packages" in layer.get("network.presets", ()) for layer in layers.all):
        from agent_sandbox.package_indexes import credential_notes  # few runs have a network

        for note in credential_notes(here().package_indexes(project.path)):
            console.note(note)
    if not layers.all:
        return _preset(options, project, _limits(options)), None
    effective = _effective(options, project, layers)
    for warning in effective.warnings:
        console.note(warning)
    return effective.policy, policy_files.early_look(effective)


def gate_for(policy: Policy, project: Project, sandbox: str, *, capabilities: tuple[str, ...] = (), prompt: bool = False) -> Gate:
    """Return the gate for a command, with an approver if the policy has approval rules.

    A throw-away sandbox uses the capabilities and questions of its project's sandbox.
    """
    if not policy.asks.asks:
        if capabilities:
            from agent_sandbox.cli.approval_prompt import tokens_of  # an invalid token is refused here too

            tokens_of(capabilities)
            remark("the policy asks about nothing here: --capability was not needed, and not used")
        return here().gate(policy, sandbox=sandbox)
    from agent_sandbox.cli.approval_prompt import desk_for  # few policies ask

    desk = desk_for(capabilities, policy, sandbox=sandbox_id(project.path), prompt=prompt)
    return here().gate(policy, approver=desk, sandbox=sandbox)


@dataclass(frozen=True)
class Opening:
    """A session, its project, and its sandbox: None for a throw-away sandbox. `lifted` is the policy with elevations, if there are any."""

    session: Session
    sandbox: ProjectSandbox | None
    project: Project
    lifted: Lifted | None


def keeps_nothing(options: CommandOptions) -> bool:
    """Return whether nothing of a command can reach the project later. The plan of a simulation can, by `carry-out`."""
    return (options.throw_away or options.diff) and not options.simulate


def session_for(options: CommandOptions, console: Console, runtimes: Runtimes, on_busy: Callable[[Busy], None]) -> Opening:
    """Return a session on the project's sandbox; with --diff, --simulate or --throw-away, on a throw-away sandbox."""
    asked = file_clock_ns()
    sandbox = None if options.throw_away or options.diff or options.simulate else current(options.project)
    project = sandbox.project if sandbox else project_of(options.project, throw_away=keeps_nothing(options))
    (policy, early), lifted = _governed(options.policy, project, console), None
    if os.path.isdir(here().host.elevations):  # rarely there
        from agent_sandbox.cli import elevation

        lifted = elevation.lifted(policy, sandbox_id(project.path))
    # A throw-away clone is recorded under its project's sandbox, so that `log` can tell projects apart.
    name = sandbox.state.id if sandbox else f"{sandbox_id(project.path)}/{'simulation' if options.simulate else 'throw-away'}"
    gate = gate_for(lifted.policy if lifted else policy, project, name, capabilities=options.capabilities)
    session = here().session(
        gate,
        runtimes,
        project=project.path,
        state=sandbox.state if sandbox else None,
        on_busy=on_busy if options.wait else None,
        beside=in_a_child,
        early=early,
        asked_ns=asked,
        provisions=_provisions(options, gate.policy, project),
    )
    return Opening(session, sandbox, project, lifted)


def _provisions(options: CommandOptions, policy: Policy, project: Project) -> Provisions:
    """Return what the egress is given. Raises `PolicyError` for a secret that cannot be used, or that the run is also given itself."""
    if not (options.secrets or policy.network.outbound):
        return NO_PROVISIONS
    from agent_sandbox.policy.bound_secrets import Secret  # few runs have a network

    secrets = tuple(map(Secret.read, options.secrets))
    handed = {name: value if equals else os.environ.get(name, "") for name, equals, value in (each.partition("=") for each in options.env)}
    if both := [each.name for each in secrets if each.name in handed]:
        raise PolicyError(f"--env {both[0]} would show the run the secret {both[0]}", hint="leave --env out: the run has a placeholder")
    return here().provisions(policy, secrets, project=project.path, handed=handed.values())


@dataclass(frozen=True)
class Pending:
    """The changes in a sandbox, or the reason why they cannot be listed."""

    changes: ChangeSet
    problem: str = ""


@dataclass(frozen=True)
class SortedChanges:
    """Changes, split into those of the project, those elsewhere on the machine, and those in caches (noise)."""

    project: tuple[Change, ...]
    elsewhere: tuple[Change, ...]
    noise: tuple[Change, ...]


def sort(changes: ChangeSet, project: str) -> SortedChanges:
    """Split changes into project, elsewhere and noise."""
    from agent_sandbox.workspace.changes import place_of

    places = [(place_of(change.path, project), change) for change in changes]
    return SortedChanges(*(tuple(change for place, change in places if place == name) for name in ("project", "elsewhere", "noise")))


def pending_in(sandbox: ProjectSandbox, policy: Policy) -> Pending:
    """Return the changes in the project's sandbox."""
    try:
        return Pending(Stored(sandbox.state).changes(policy))
    except SandboxError as error:
        return Pending(ChangeSet(), error.message)


def recover(stored: Stored, gate: Gate) -> None:
    """Finish or roll back an interrupted promotion, and print the outcome. Raises `Busy` while a run uses the sandbox."""
    from agent_sandbox.engine.recover import recovered

    for words in recovered(stored, gate):
        remark(words)


def current_and_whole(named: str | None, policy: PolicyOptions) -> ProjectSandbox:
    """Return the project and its sandbox, for a verb that does not promote. First finish or roll back an interrupted promotion.

    A promotion that another process is performing is left alone. A promotion that cannot be finished is reported. Expired plans are
    removed.
    """
    from agent_sandbox.engine.recover import interrupted

    sandbox = current(named)
    if os.path.isdir(os.path.join(sandbox.state.store.path, "plans")):
        from agent_sandbox.workspace.saved_plans import Plans

        Plans(sandbox.state.store).sweep()
    if interrupted(sandbox.state):
        try:
            recover(Stored(sandbox.state), here().gate(policy_of(policy, sandbox.project), sandbox=sandbox.state.id))
        except Busy:
            pass
        except (SandboxError, OSError) as error:
            remark(f"a promotion was cut off and could not be finished: {error}")
    return sandbox
