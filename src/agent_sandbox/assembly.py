"""Build the parts of the product for one host: ledger, gates, approvals, grants, runtimes and sessions.

Only this module builds them. Only `Host.here()`, the command line and the self-test read the environment; all other code takes paths as
arguments. Each call of `here()` reads the environment again, so that a test, or a process that changes its user, gets the current values.
"""

from __future__ import annotations

import os
import sys
import time

from agent_sandbox._fast.encoding import sha256
from agent_sandbox._fast.functions import lru_cache
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.engine.provisions import NO_PROVISIONS, Provisions
from agent_sandbox.engine.runtimes import Registry
from agent_sandbox.errors import PolicyError, RuntimeUnavailable, pip_install
from agent_sandbox.policy.paths import ancestors, contains, normalise
from agent_sandbox.policy.secrets import Mask, default_masks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from agent_sandbox.engine.approvals.approvers import Desk
    from agent_sandbox.engine.approvals.inbox import Inbox, Waiting
    from agent_sandbox.engine.approvals.second_factor import SecondFactor
    from agent_sandbox.engine.code_check import EarlyLook
    from agent_sandbox.engine.egress_program import EgressProgram
    from agent_sandbox.engine.elevations import Elevations
    from agent_sandbox.engine.gate import Approver, EntryWriter, Gate
    from agent_sandbox.engine.grants import Capabilities
    from agent_sandbox.engine.network_control import NetworkControl
    from agent_sandbox.engine.run import Session
    from agent_sandbox.engine.runtimes import Runtimes
    from agent_sandbox.errors import Busy
    from agent_sandbox.ledger.event import Facts
    from agent_sandbox.ledger.writer import Ledger
    from agent_sandbox.package_indexes import PackageIndex
    from agent_sandbox.policy.approval_rules import Word
    from agent_sandbox.policy.bound_secrets import Secret
    from agent_sandbox.policy.model import Policy
    from agent_sandbox.policy.network import NetworkRules
    from agent_sandbox.policy.tokens import Token
    from agent_sandbox.runtime.base import Runtime
    from agent_sandbox.runtime.container.runtime import ContainerRuntime
    from agent_sandbox.runtime.gvisor.runtime import GvisorRuntime
    from agent_sandbox.runtime.microvm.runtime import MicroVmRuntime
    from agent_sandbox.runtime.process.runtime import ProcessRuntime
    from agent_sandbox.runtime.process.zygote import Zygote
    from agent_sandbox.runtime.wasm.one_wall import OneWall
    from agent_sandbox.runtime.wasm.runtime import WasmRuntime
    from agent_sandbox.workspace.store import SandboxState

LEDGER, APPROVALS, CAPABILITIES, SEARCHES = "ledger.jsonl", "approvals", "capabilities", "searches"
SHARED_CACHE = "/var/cache/agent-sandbox"
ONE_WALL = "wasm-one-wall"  # used if the caller names it, or if the system has no other runtime
NOT_LINUX = "the confinement of a process is Linux's, and this is another system"
WARM = 24  # guests that may wait ready. Each takes at most 8 MB; all together, about as much as one browser tab
WARM_KERNELS = 2  # the same for gvisor, whose guests hold 40 MB each
_NOT_SEARCHED = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/boot", "/proc", "/sys", "/dev")
_HOMES = ("/root", "/var/", "/srv/", "/opt/")  # places of home directories besides /home


@dataclass(frozen=True)
class Host:
    """The user and the directories that everything is built for. None of the directories need exist."""

    home: str  # $HOME, or else the home of the account; `/` if there is neither
    state: str  # sandboxes, layers and the ledger
    cache: str  # files that can be made again
    keys: str  # key and anchor of the ledger: by default outside `state`, so that write access to one is not access to both
    config: str  # the user's own settings
    background: bool = True  # whether a background process may go on after the caller has its answer
    search_path: str = ""  # the caller's PATH: programs in it stay visible
    shared: str = SHARED_CACHE  # files that root has made for all users and that can be made again

    @classmethod
    def here(cls) -> Host:
        """Read the host from the environment.

        `$AGENT_SANDBOX_STATE` and `$AGENT_SANDBOX_KEYS` choose directories. Without them, the directories are `agent-sandbox` in the XDG
        directories. A relative XDG directory is ignored, as its specification asks. A chosen state directory holds its own keys, beside the
        ledger, unless the keys are chosen, too. Each state directory has keys of its own. If `$AGENT_SANDBOX_NO_BACKGROUND` is set, nothing
        is compiled in a background process. `$AGENT_SANDBOX_SHARED_CACHE` chooses another directory for what root compiles for all users.
        """
        home = os.environ.get("HOME", "")
        if not os.path.isabs(home) and not os.path.isabs(home := _account_home()):
            home = "/"
        home = os.path.normpath(home)
        chosen, keys = os.environ.get("AGENT_SANDBOX_STATE"), os.environ.get("AGENT_SANDBOX_KEYS")
        state = os.path.abspath(chosen) if chosen else _xdg("XDG_STATE_HOME", home, ".local/state")
        unchosen = os.path.join(state, f"{LEDGER}.keys") if chosen else _keys_of(state, home)
        return cls(
            home,
            state,
            _xdg("XDG_CACHE_HOME", home, ".cache"),
            os.path.abspath(keys) if keys else unchosen,
            _xdg("XDG_CONFIG_HOME", home, ".config"),
            not os.environ.get("AGENT_SANDBOX_NO_BACKGROUND"),
            os.environ.get("PATH", ""),
            os.path.abspath(os.environ.get("AGENT_SANDBOX_SHARED_CACHE") or SHARED_CACHE),
        )

    def unchosen(self) -> Host:
        """Return this host with the user's default state and key directories, even if environment variables choose others."""
        state = _xdg("XDG_STATE_HOME", self.home, ".local/state")
        keys = _keys_of(state, self.home)
        return Host(self.home, state, self.cache, keys, self.config, self.background, self.search_path, self.shared)

    def of_user(self, user: str) -> Host:
        """Return the host of another user, with that user's default directories. Raises `PolicyError` for an unknown user."""
        import pwd

        try:
            top = pwd.getpwnam(user).pw_dir
        except KeyError:
            raise PolicyError(f"there is no user {user!r}", hint="name one of this machine") from None
        state, keys = os.path.join(top, ".local/state/agent-sandbox"), os.path.join(top, ".local/share/agent-sandbox/keys")
        return Host(top, state, self.cache, keys, self.config, self.background, self.search_path, self.shared)

    @property
    def compiled(self) -> tuple[tuple[str, str], ...]:
        """Directories of compiled WebAssembly and of its digests. New files go to the first; the others are read, too.

        Root compiles for all users of the machine, everybody else for themselves.
        """
        own = os.path.join(self.cache, "wasm"), os.path.join(self.state, "wasm")
        shared = os.path.join(self.shared, "wasm", "cache"), os.path.join(self.shared, "wasm", "records")
        return (shared, own) if self.compiles_for_all else (own, shared)

    @property
    def compiles_for_all(self) -> bool:
        """Whether all users may use what this user compiles: only root's files can be trusted by everybody."""
        return hasattr(os, "geteuid") and os.geteuid() == 0

    @property
    def elevations(self) -> str:
        """The directory in which elevations (rules relaxed for a limited time) are stored. Usually it does not exist."""
        return os.path.join(self.state, APPROVALS, "elevations")

    @property
    def homes(self) -> tuple[str, ...]:
        """The home directories of this user: the one in `$HOME`, and the account's own if that differs."""
        return tuple(dict.fromkeys((self.home, *_homes({_account_home()}))))

    @property
    def homes_of_others(self) -> tuple[str, ...]:
        """The homes of other users. Empty unless this user is root, who can read them.

        The homes of service accounts, such as `/`, `/bin` or `/usr/sbin`, do not count. A home below `/home` counts even if it does not
        exist, because somebody may create it during a run.
        """
        import pwd  # not on every system

        if os.geteuid() != 0:
            return ()
        return tuple(sorted(_homes({account.pw_dir for account in pwd.getpwall()}) - {*self.homes}))


def here() -> Assembly:
    """Return the `Assembly` for this host, which builds the parts of the product."""
    return Assembly(Host.here())


def check_system() -> None:
    """Raise `RuntimeUnavailable` on Windows, which lacks the file operations and locks that this package needs."""
    if sys.platform == "win32":
        hint = "use WSL2, where everything works"
        raise RuntimeUnavailable("there are no sandboxes on Windows itself in this version", missing=("posix",), hint=hint)


def check_network() -> None:
    """Raise `RuntimeUnavailable` if the packages of the extra `network` are not installed: no run could have a network."""
    from agent_sandbox.runtime import network_packages  # only runs with a network need it

    if missing := network_packages.missing(network_packages.NEEDED):
        hint = f"{pip_install(' '.join(missing))} (the extra `network`), or run without a network"
        raise RuntimeUnavailable(f"a network needs packages that are not installed: {', '.join(missing)}", missing=missing, hint=hint)


class Assembly:
    """Builds the parts of the product for one host. Each method returns one part."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def ledger(self) -> Ledger:
        """Return the ledger of this user. The file is made with its first entry."""
        from agent_sandbox.ledger.writer import Ledger

        return Ledger(os.path.join(self.host.state, LEDGER), clock=time.time, keys=self.host.keys)

    def gate(self, policy: Policy, *, sandbox: str = "", approver: Approver | None = None, ledger: EntryWriter | None = None) -> Gate:
        """Return the gate that judges the actions of a sandbox by this policy and records them in `ledger`, by default the user's."""
        from agent_sandbox.engine.gate import Gate

        return Gate(policy, ledger or self.ledger(), clock=time.time, approver=approver, sandbox=sandbox)

    def session(
        self,
        gate: Gate,
        runtimes: Runtimes,
        *,
        project: str | None = None,
        state: SandboxState | None = None,
        on_busy: Callable[[Busy], None] | None = None,
        beside: Callable[[Callable[[], None]], None] | None = None,
        early: EarlyLook | None = None,
        asked_ns: int | None = None,
        provisions: Provisions | None = None,
        control: NetworkControl | None = None,
    ) -> Session:
        """Return a session to run work in: on a stored sandbox if there is a `state`, else on throw-away layers. See `Session`.

        Raises `RuntimeUnavailable` if the policy allows a network and the extra `network` is not installed.
        """
        from agent_sandbox.engine.run import Session

        if gate.policy.network.outbound:
            check_network()
            provisions = provisions or self.provisions(gate.policy, project=project)
        return Session(
            gate,
            runtimes,
            project=project,
            state=state,
            on_busy=on_busy,
            beside=beside,
            early=early,
            asked_ns=asked_ns,
            provisions=provisions or NO_PROVISIONS,
            control=control,
        )

    def network_control(self, note: Callable[[str, Facts], None]) -> NetworkControl:
        """Return the control of the network of one sandbox, whose changes `note` records."""
        from agent_sandbox.engine.network_control import NetworkControl  # few runs have a network

        return NetworkControl(note)

    def provisions(
        self,
        policy: Policy,
        secrets: Sequence[Secret] = (),
        *,
        project: str | None = None,
        handed: Iterable[str] = (),
        packages: bool = False,
    ) -> Provisions:
        """Return what the egress of this policy's runs is given: secrets with their values, and values of the caller that must not leave.

        `handed` are values that the caller gives to the run itself. With `packages`, a person has opened the package indexes of this
        machine, and their credentials are among the secrets. Raises `PolicyError` for a secret that has no value, or whose host the policy
        does not allow, and for a table of rules that cannot be read.
        """
        if not policy.network.outbound and not secrets:
            return NO_PROVISIONS
        from agent_sandbox.network_provisions import provisions_of  # few runs have a network

        return provisions_of(self.host, os.environ, policy, secrets, project=project, handed=handed, packages=packages)

    def inbox(
        self,
        *,
        policy: Policy | None = None,
        of: str | None = None,
        on_wait: Callable[[Waiting], None] | None = None,
        pause: Callable[[], None] = lambda: time.sleep(0.1),
    ) -> Inbox:
        """Return the inbox of questions to this user, or to the user `of`. `policy` says whose answers count.

        Root may answer for another user; its answers are then in root's ledger. Raises `PolicyError` if that user has never had a question.
        """
        from agent_sandbox.engine.approvals import question  # most runs ask nobody
        from agent_sandbox.engine.approvals.inbox import Inbox
        from agent_sandbox.ledger import private_files

        asked = self.host if of is None else self.host.of_user(of)
        visiting = of is not None or (os.path.exists(asked.state) and os.stat(asked.state).st_uid != os.geteuid())
        try:
            seal = private_files.load_key(asked.keys, make=not visiting).derived(question.PURPOSE)
        except (FileNotFoundError, PermissionError) as error:
            if not visiting:
                raise
            why = f"no approval questions can be read in {asked.state!r}: {error.strerror}"
            raise PolicyError(why, hint="run it as root, with --of USER") from None
        approvers = policy.asks.approvers if policy is not None else None
        own = Assembly(self.host.unchosen()) if visiting else self
        factor = own.second_factor()
        return Inbox(
            os.path.join(asked.state, APPROVALS),
            seal,
            own.ledger(),
            clock=time.time,
            pause=pause,
            approvers=None if approvers is None else _uids(approvers),
            factor=factor.accepts if factor.enrolled else None,
            on_wait=on_wait,
            visiting=visiting,
        )

    def desk(self, policy: Policy, inbox: Inbox, *, sandbox: str, tokens: Sequence[Token]) -> Desk:
        """Return the approver of one run: it first tries the capability tokens, then asks a person through the inbox."""
        from agent_sandbox.engine.approvals.approvers import Desk

        counts, run = words_that_count(policy), os.urandom(8).hex()
        return Desk(inbox, self.capabilities(), policy, sandbox=sandbox, run=run, tokens=tokens, clock=time.time, counts=counts)

    def second_factor(self) -> SecondFactor:
        """Return the second factor (one-time codes of an authenticator) with which this user confirms approvals."""
        from agent_sandbox.engine.approvals.second_factor import SecondFactor

        keys, all_keys = self.host.keys, _all_keys(self.host.home)
        return SecondFactor(all_keys if contains(all_keys, keys) else keys, clock=time.time)  # the user's, whichever the ledger

    def elevations(self) -> Elevations:
        """Return the store of elevations: rules relaxed for a limited time in sandboxes of this user."""
        from agent_sandbox.engine import elevations
        from agent_sandbox.ledger import private_files

        def boot() -> str:
            with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
                return file.read().strip()

        seal = private_files.load_key(self.host.keys).derived(elevations.PURPOSE)
        since_boot = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)  # noqa: E731
        return elevations.Elevations(self.host.elevations, seal, self.ledger(), clock=time.time, since_boot=since_boot, boot=boot)

    def capabilities(self) -> Capabilities:
        """Return the store of capability tokens that this user has granted to sandboxes."""
        from agent_sandbox.engine import grants
        from agent_sandbox.ledger import private_files

        seal = private_files.load_key(self.host.keys).derived(grants.PURPOSE)
        return grants.Capabilities(os.path.join(self.host.state, CAPABILITIES), seal, self.ledger(), clock=time.time)

    def package_indexes(self, project: str | None) -> tuple[PackageIndex, ...]:
        """Return the package indexes that this machine and this user have configured, outside the project."""
        from agent_sandbox.package_indexes import configured  # few runs have a network

        return configured(self.host.home, config=os.path.dirname(self.host.config), project=project)

    def network(self, entries: Iterable[str], *, web: bool = False, project: str | None = None) -> NetworkRules:
        """Return the network that a list of hosts and presets opens, and every public host if `web`. Raises `PolicyError`."""
        from agent_sandbox.policy.network_presets import network_of  # few runs have a network

        return network_of(entries, web=web, indexes=lambda: [each.host for each in self.package_indexes(project)])

    def masks_for(self, project: str) -> tuple[Mask, ...]:
        """Return the masks of a project: the paths that its sandboxes hide. Searches the project and the user's homes for them."""
        return self.masks((project,), searched=(project,))

    def masks(self, projects: Iterable[str], *, searched: Iterable[str] | None) -> tuple[Mask, ...]:
        """Return the masks of several projects, of what is found in the `searched` ones, and of what is found in the user's homes.

        The whole machine and the programs of the system are never searched. With None, the disk is not looked at, and only listed names
        are masked.
        """
        host, others, projects = self.host, self.host.unchosen(), tuple(projects)
        listed = default_masks(
            homes=host.homes,
            homes_of_others=host.homes_of_others,
            projects=projects,
            state_dirs=map(os.path.realpath, (host.state, others.state, host.shared)),
            keys_dirs=map(os.path.realpath, (host.keys, _all_keys(host.home))),
        )
        if searched is None or sys.platform != "linux":  # elsewhere no runtime shows files, and the search needs Linux
            return listed
        return self._with_found(listed, projects, tuple(dict.fromkeys(filter(_is_searched, searched))))

    def _with_found(self, listed: tuple[Mask, ...], projects: tuple[str, ...], searched: tuple[str, ...]) -> tuple[Mask, ...]:
        from agent_sandbox.workspace.dot_files import hidden_in_home, program_places
        from agent_sandbox.workspace.secret_search import SearchMemory, hidden_in_project

        masks = {mask.path: mask for mask in listed}
        memory = SearchMemory(os.path.join(self.host.state, SEARCHES, "homes"))
        programs = program_places(self.host.search_path, sys.prefix, sys.base_prefix, *(path for path in sys.path if "/." in path))
        found = {
            mask.path: mask
            for home in self.host.homes
            for mask in hidden_in_home(home, memory, projects=projects, programs=programs, hidden=masks)
        }
        memory.save()
        for project in searched:
            if any(above in masks for above in ancestors(normalise(project))):
                continue  # hidden as a whole; if it is revealed, then with what it holds
            memory = SearchMemory(os.path.join(self.host.state, SEARCHES, sha256(os.fsencode(project)).hexdigest()[:32]))
            files = hidden_in_project(project, memory, skip={*masks, *found})
            memory.save()
            found |= {mask.path: mask for mask in files.masks if mask.remark or mask.path not in masks}
            masks = {path: mask for path, mask in masks.items() if path not in files.shown}
        masks |= found
        return tuple(masks[path] for path in sorted(masks))

    def runtimes(self, wish: str, registry: Registry | None = None, *, announce: Callable[[str], None] | None = None) -> Runtimes:
        """Return the runtimes to choose from. `wish` is the name of one runtime, or "auto" for the best one.

        Without a registry, all sandboxes of this process share one set of runtimes, and with it the results of earlier probes. Raises
        `RuntimeUnavailable` if the wished runtime needs Linux and this is another system.
        """
        if registry is not None:
            from agent_sandbox.engine.runtimes import Runtimes

            return Runtimes(wish, registry, background=self.host.background, announce=announce)
        if sys.platform != "linux":
            if wish == "process":
                raise _not_linux()
            wish = ONE_WALL
        return _runtimes(wish, self.host.compiled, self.host.compiles_for_all, self.host.background)

    def only(self, runtime: Runtime) -> Runtimes:
        """Return a `Runtimes` that always chooses this runtime."""
        from agent_sandbox.engine.runtimes import only

        return only(runtime)

    def process(self) -> ProcessRuntime:
        """Return the process runtime that this process shares. Raises `RuntimeUnavailable` outside Linux."""
        if sys.platform != "linux":
            raise _not_linux()
        return _process()

    def wasm(self, *, warm: int = WARM) -> WasmRuntime:
        """Return the wasm runtime that this process shares. `warm` is how many of its guests may wait ready."""
        return _wasm(self.host.compiled, self.host.compiles_for_all, warm)

    def container(self, guests: ProcessRuntime | None = None) -> ContainerRuntime:
        """Return a container runtime on the images of this user. `guests` makes its guests. Raises `RuntimeUnavailable` outside Linux."""
        from agent_sandbox.container_images import runtime_in  # few runs are in an image

        return runtime_in(self.host.state, guests or self.process())

    def microvm(self, *, warm: int = 1) -> MicroVmRuntime:
        """Return the runtime of virtual machines that this process shares. `warm` is how many may wait ready, each with some 60 MB."""
        from agent_sandbox.runtime.microvm.runtime import shared_runtime  # few runs need a kernel of their own

        return shared_runtime(self.host.cache, self.host.shared, os.environ.get("AGENT_SANDBOX_KERNEL", ""), warm)

    def one_wall(self) -> OneWall:
        """Return the runtime that isolates by the WebAssembly engine alone, without the kernel's confinement."""
        return _one_wall(self.host.compiled)

    def command_line_registry(
        self, forked: Zygote | None = None, egress: EgressProgram | None = None, *, threads: bool = False
    ) -> Registry:
        """Return the runtimes of the command line. Its process has one thread, so native programs can start from a fork of it.

        `forked` is a zygote that was forked earlier, and `egress` the egress program, if they exist. With `threads`, several run at once,
        and none is a fork of this process. The caller must close the registry.
        """
        from agent_sandbox.runtime.process.runtime import ProcessRuntime

        registry, process = Registry(), ProcessRuntime(single_threaded=not threads, forked=forked)
        registry.register("process", lambda: process)
        registry.get("process")  # so that closing the registry ends `forked`, used or not
        registry.register("wasm", lambda: self.wasm(warm=0))
        registry.register("container", lambda: self.container(process))
        registry.register("gvisor", lambda: _gvisor(single_threaded=not threads), light=False)
        registry.register("microvm", lambda: self.microvm(warm=0))
        if egress is not None:
            from agent_sandbox.engine.egress_zygote import EgressZygote  # few runs have a network

            registry.accompany(EgressZygote(egress))
        return registry


def registry() -> Registry:
    """Return the registry of runtimes that all sandboxes of this process share. A runtime registered in it can be selected by name."""
    host = Host.here()
    return _registry(host.compiled, host.compiles_for_all)


def _not_linux() -> RuntimeUnavailable:
    return RuntimeUnavailable(f"the runtime 'process' does not work here: {NOT_LINUX}", missing=("linux",), hint='use runtime="auto"')


@lru_cache(maxsize=8)
def _runtimes(wish: str, compiled: tuple[tuple[str, str], ...], public: bool, background: bool) -> Runtimes:
    from agent_sandbox.engine.runtimes import Runtimes

    return Runtimes(wish, _registry(compiled, public), background=background)


@lru_cache(maxsize=2)
def _registry(compiled: tuple[tuple[str, str], ...], public: bool) -> Registry:
    registry = Registry()
    registry.register("process", _process)
    registry.register("wasm", lambda: _wasm(compiled, public, WARM))
    registry.register("container", lambda: here().container())
    registry.register("gvisor", lambda: _gvisor(warm=WARM_KERNELS), light=False)
    registry.register("microvm", lambda: here().microvm())
    registry.register(ONE_WALL, lambda: _one_wall(compiled), automatic=False)
    return registry


@lru_cache(maxsize=1)
def _process() -> ProcessRuntime:
    """Return the process runtime that all sandboxes of this process share, because a zygote and waiting guests cost time and memory.

    The zygote starts with the first run and ends with this process. A forked child starts its own zygote."""
    from agent_sandbox.runtime.process.runtime import ProcessRuntime

    return ProcessRuntime(warm=WARM)


def _gvisor(*, single_threaded: bool = False, warm: int = 0) -> GvisorRuntime:
    from agent_sandbox.runtime.gvisor.runtime import GvisorRuntime  # few runs need a kernel in user space

    return GvisorRuntime(single_threaded=single_threaded, warm=warm)


@lru_cache(maxsize=2)
def _wasm(compiled: tuple[tuple[str, str], ...], public: bool, warm: int) -> WasmRuntime:
    from agent_sandbox.runtime.wasm.runtime import WasmRuntime  # loaded late: only users of the extra `wasm` need it

    written, *others = compiled
    return WasmRuntime(*written, others=tuple(others), public=public, warm=warm)


@lru_cache(maxsize=1)
def _one_wall(compiled: tuple[tuple[str, str], ...]) -> OneWall:
    from agent_sandbox.runtime.wasm.one_wall import OneWall

    written, *others = compiled
    return OneWall(*written, others=tuple(others))


def words_that_count(policy: Policy) -> Callable[[Word], bool] | None:
    """Return a function that tells whether an approval counts, by the person who gave it. None if everybody's approval counts."""
    asks = policy.asks
    if asks.approvers is None and not asks.needs:
        return None
    approvers = None if asks.approvers is None else _uids(asks.approvers)
    return lambda word: word.counts(asks.needs, approvers, asker=os.getuid())


def _uids(names: Iterable[str]) -> frozenset[int]:
    """Return the ids of the users with these names. Unknown names are left out."""
    import pwd

    ids: set[int] = set()
    for name in names:
        try:
            ids.add(pwd.getpwnam(name).pw_uid)
        except KeyError:
            continue
    return frozenset(ids)


def _is_searched(directory: str) -> bool:
    return directory != "/" and os.path.isdir(directory) and not any(contains(tree, directory) for tree in _NOT_SEARCHED)


def _xdg(variable: str, home: str, default: str) -> str:
    base = os.environ.get(variable, "")
    return os.path.join(base if os.path.isabs(base) else os.path.join(home, default), "agent-sandbox")


def _all_keys(home: str) -> str:
    """Return the directory in which the keys of every state directory of this user lie, unless the environment chooses another."""
    return os.path.join(_xdg("XDG_DATA_HOME", home, ".local/share"), "keys")


def _keys_of(state: str, home: str) -> str:
    """Return the directory of the keys of the ledger in `state`: one anchor cannot name the last entry of two ledgers.

    A ledger that was begun when all of them shared one directory keeps to it.
    """
    shared = _all_keys(home)
    if state == os.path.join(home, ".local/state/agent-sandbox"):
        return shared
    own = os.path.join(shared, sha256(os.fsencode(state)).hexdigest()[:32])
    begun_earlier = not os.path.exists(own) and os.path.exists(os.path.join(state, LEDGER)) and os.path.exists(shared)
    return shared if begun_earlier else own


def _homes(candidates: set[str]) -> set[str]:
    paths = {os.path.normpath(path) for path in candidates if path.startswith("/")}
    return {path for path in paths if path.startswith("/home/") or (path.startswith(_HOMES) and os.path.isdir(path))}


def _account_home() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:  # a container may run as a number without an account
        return ""
