"""Resolve a command line to its project, sandbox, pending changes, policy, gate and session."""

from __future__ import annotations

import os

from agent_sandbox import policy_files
from agent_sandbox._fast.contexts import ExitStack, contextmanager
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, replace
from agent_sandbox.assembly import here
from agent_sandbox.cli.caller import CAPABILITY, in_a_child
from agent_sandbox.cli.options import CommandOptions, PolicyOptions
from agent_sandbox.cli.render.messages import Console, remark
from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.provisions import NO_PROVISIONS, Provisions
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.runtimes import AUTO, Runtimes
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
    from collections.abc import Callable, Iterator

    from agent_sandbox.cli.elevation import Lifted
    from agent_sandbox.engine.code_check import EarlyLook
    from agent_sandbox.engine.network_control import NetworkControl
    from agent_sandbox.engine.runtimes import Registry
    from agent_sandbox.policy.files.layers import Effective
    from agent_sandbox.policy.network import NetworkRules
    from agent_sandbox.policy.traffic_budgets import TrafficBudget
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
        return _alone(options, project)
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
        search, budgets = SearchRules(off=options.no_dlp), _budgets(options, asked)
        ceiling = with_network(ceiling, replace(asked, inbound=ceiling.network.inbound, search=search, budgets=budgets))
    if options.capable:
        ceiling = with_network(ceiling, ceiling.network.with_capable(options.capable))
    limits = policy_files.changed_limits(CLONED_LIMITS, _limits(options))
    return policy_files.under(
        layers,
        ceiling,
        limits,
        typed_network=typed,
        typed_ports=bool(options.publish),
        capable=options.capable,
        project=project.path,
    )


def ceiling_of(options: PolicyOptions, project: Project) -> Policy:
    """Return the preset of the command line, narrowed by the system's policy file alone. No other policy file can permit more."""
    return _effective(options, project, policy_files.layers_of(None)).policy


def _alone(options: PolicyOptions, project: Project) -> Policy:
    """Return the policy of a command where there is no policy file."""
    policy = _preset(options, project, _limits(options))
    return with_network(policy, policy.network.with_capable(options.capable)) if options.capable else policy


def _preset(options: PolicyOptions, project: Project, limits: Limits) -> Policy:
    masks = here().masks_for(project.path)
    for path in options.reveal:
        masks = reveal(masks, os.path.abspath(path))
    denied = [_pattern(path) for path in options.deny]
    programs = ProgramRules((options.allow,) if options.allow is not None else (), options.deny_commands)
    network = OFFLINE
    if options.network or options.allow_network:
        network = here().network(options.network, web=options.allow_network, project=project.path)
        network = replace(network, search=SearchRules(off=options.no_dlp), budgets=_budgets(options, network))
    if options.publish:
        network = replace(network, inbound=True)
    policy = cloned(masks=masks, denied=denied, network=network, limits=limits, system=options.system, programs=programs)
    if options.image:
        from agent_sandbox.policy.image_names import canonical_image  # few runs are in an image

        policy = replace(policy, image=canonical_image(options.image))
    return repeatable(policy) if options.deterministic else policy


def _budgets(options: PolicyOptions, network: NetworkRules) -> tuple[TrafficBudget, ...]:
    """Return the budgets of a network and of the options. Raises `PolicyError` for one that cannot be read."""
    if not options.budgets:
        return network.budgets
    from agent_sandbox.policy.traffic_budgets import read_budget  # few runs have a budget

    return (*network.budgets, *map(read_budget, options.budgets))


def _pattern(text: str) -> PathPattern:
    if not text.startswith(("/", "~", "**/")):
        text = f"{working_directory()}/{text.removeprefix('./')}"
    return parse(text, home=here().host.home)


def _limits(options: PolicyOptions) -> Limits:
    return replace(CLONED_LIMITS, **dict(options.limits)) if options.limits else CLONED_LIMITS  # type: ignore[arg-type]


def _governed(options: PolicyOptions, project: Project, console: Console) -> tuple[Policy, EarlyLook | None]:
    """Return the policy of a run, and the check of code before it runs, if any. Prints the warnings of the policy files."""
    layers = layers_for(options, project)
    if not layers.all:
        return _alone(options, project), None
    effective = _effective(options, project, layers)
    for warning in effective.warnings:
        console.note(warning)
    return effective.policy, policy_files.early_look(effective)


def gate_for(policy: Policy, project: Project, sandbox: str, *, capabilities: tuple[str, ...] = (), prompt: bool = False) -> Gate:
    """Return the gate for a command, with an approver if the policy has approval rules.

    A throw-away sandbox uses the capabilities and questions of its project's sandbox.
    """
    if not policy.asks_somebody:
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
    if options.capabilities or CAPABILITY in os.environ:
        options = replace(options, policy=replace(options.policy, capable=opened_hosts(options, project, console)))
    (policy, early), lifted = _governed(options.policy, project, console), None
    if os.path.isdir(here().host.elevations):  # rarely there
        from agent_sandbox.cli import elevation

        lifted = elevation.lifted(policy, sandbox_id(project.path))
    # A throw-away clone is recorded under its project's sandbox, so that `log` can tell projects apart.
    name = sandbox.state.id if sandbox else f"{sandbox_id(project.path)}/{'simulation' if options.simulate else 'throw-away'}"
    gate = gate_for(lifted.policy if lifted else policy, project, name, capabilities=options.capabilities)
    if gate.policy.image and options.runtime is None:
        runtimes = runtimes.on(AUTO if options.explain else "container")  # the same choice; but only an explanation needs the others
    provisions = provisions_for(options, gate.policy, project)
    for note in provisions.notes:
        console.note(note)
    session = here().session(
        gate,
        runtimes,
        project=project.path,
        state=sandbox.state if sandbox else None,
        on_busy=on_busy if options.wait else None,
        beside=in_a_child,
        early=early,
        asked_ns=asked,
        provisions=provisions,
        control=_control(options, gate),
    )
    return Opening(session, sandbox, project, lifted)


def _control(options: CommandOptions, gate: Gate) -> NetworkControl | None:
    """Return the control of a run whose intent is declared. Raises `PolicyError` if it cannot be."""
    if options.intent is None:
        return None
    if not gate.policy.network.outbound:
        raise PolicyError("--intent is for a run with a network, and this one has none", hint="add --network HOST")
    if options.explain:  # nothing is run
        from agent_sandbox.policy.intents import known_intent  # few policies name intents

        known_intent(gate.policy.network, options.intent)
        return None
    control = here().network_control(gate.note)
    control.declare(gate.policy.network, options.intent, later=True)
    return control


def opened_hosts(options: CommandOptions, project: Project, console: Console) -> tuple[str, ...]:
    """Return the hosts that the capabilities of a run open. Each request to them is answered for by a capability, or refused."""
    from agent_sandbox.cli.approval_prompt import tokens_of  # few runs have a capability
    from agent_sandbox.policy.tokens import hosts_of, parse

    held = (*tokens_of(options.capabilities), *filter(None, map(parse, os.environ.get(CAPABILITY, "").split())))
    hosts: list[str] = []
    for token in held:
        if (named := hosts_of(token)) and not (opened := here().capabilities().opened(token, sandbox=sandbox_id(project.path))):
            console.note(f"a capability opens nothing of {', '.join(named)}: it was revoked, has expired, or is for another sandbox")
        elif named:
            hosts += opened
    return tuple(dict.fromkeys(hosts))


def provisions_for(options: CommandOptions, policy: Policy, project: Project) -> Provisions:
    """Return what the egress is given. Raises `PolicyError` for a secret that cannot be used, or that the run is also given itself."""
    if options.policy.budgets and not policy.network.outbound:
        raise PolicyError("--budget is for a run with a network, and this one has none", hint="add --network HOST")
    if not (options.secrets or policy.network.outbound):
        return NO_PROVISIONS
    from agent_sandbox.policy.bound_secrets import Secret  # few runs have a network

    secrets = tuple(map(Secret.read, options.secrets))
    handed = {name: value if equals else os.environ.get(name, "") for name, equals, value in (each.partition("=") for each in options.env)}
    if both := [each.name for each in secrets if each.name in handed]:
        raise PolicyError(f"--env {both[0]} would show the run the secret {both[0]}", hint="leave --env out: the run has a placeholder")
    packages = _opens_packages(options.policy, project)
    return here().provisions(policy, secrets, project=project.path, handed=handed.values(), packages=packages)


def _opens_packages(options: PolicyOptions, project: Project) -> bool:
    """Return whether a person has opened the package indexes of this machine: by an option, or in a document of theirs."""
    if options.network or options.allow_network:
        return "packages" in options.network
    layers = layers_for(options, project)
    return any("packages" in layer.get("network.presets", ()) for layer in (*layers.user, *layers.chosen))


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

    A promotion that another process is performing is left alone. A promotion that cannot be finished is reported. Expired plans and
    experiments are removed, and what killed holders of sessions left.
    """
    from agent_sandbox.engine.recover import interrupted

    sandbox = current(named)
    if os.path.isdir(os.path.join(sandbox.state.store.path, "plans")):
        from agent_sandbox.workspace.saved_plans import Plans

        Plans(sandbox.state.store).sweep()
    if os.path.isdir(os.path.join(sandbox.state.store.path, "experiments")):
        from agent_sandbox.workspace.experiment_store import ExperimentStore

        ExperimentStore(sandbox.state.store).sweep()
    if os.path.isdir(os.path.join(sandbox.state.store.path, "timelines")):
        from agent_sandbox.server.places import Places

        Places(sandbox.state.store).living()  # which removes what dead holders left
    if interrupted(sandbox.state):
        try:
            recover(Stored(sandbox.state), here().gate(policy_of(policy, sandbox.project), sandbox=sandbox.state.id))
        except Busy:
            pass
        except (SandboxError, OSError) as error:
            remark(f"a promotion was cut off and could not be finished: {error}")
    return sandbox
