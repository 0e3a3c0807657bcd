"""The options of each verb as typed values, read once from the parsed line.

Only this module, `prune_options`, the grammar and the parser know how options are spelled. Each `read` raises `UsageError` for options
that do not go together, and `PolicyError` for values that cannot be understood. It imports little: `run` reads its options before it forks.
"""

from __future__ import annotations

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.cli.parser import Request, UsageError
from agent_sandbox.errors import PolicyError

if TYPE_CHECKING:
    from typing import Literal

    Form = Literal["unified", "side-by-side", "stat", "patch", "name-only", "json"]
    Side = Literal["ours", "theirs", "markers"]
    PolicyQuestion = Literal["explain", "lint", "schema", "test", "learn"]

JSON_OUTPUT_BYTES = 16 << 20  # of each stream, when it is kept in memory for a document instead of being passed on
COLOURS = ("auto", "always", "never")
_FORMS: tuple[Form, ...] = ("json", "stat", "side-by-side", "patch", "name-only")
_SIDES: tuple[Side, ...] = ("ours", "theirs", "markers")


@dataclass(frozen=True)
class CommonOptions:
    """Options that mean the same for every verb that has them."""

    json: bool
    quiet: bool
    help: bool
    everything: bool
    capabilities: tuple[str, ...]
    colour: str

    @classmethod
    def read(cls, request: Request) -> CommonOptions:
        everything, capabilities = request.has("--all"), request.values("--capability")
        colour = request.value("--color") or "auto"
        if colour not in COLOURS:
            raise UsageError(f"--color takes {', '.join(COLOURS)}, not {colour!r}", hint="auto: on a terminal")
        return cls(request.has("--json"), request.has("--quiet"), request.has("--help"), everything, capabilities, colour)


@dataclass(frozen=True)
class PolicyOptions:
    """Options that change the policy. `limits` are the changed limits, by their names in `policy.model.Limits`."""

    limits: tuple[tuple[str, float | None], ...] = ()
    allow: tuple[str, ...] | None = None  # programs; None for all
    deny_commands: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    reveal: tuple[str, ...] = ()
    files: tuple[str, ...] = ()  # more policies, by name or path
    system: bool = False
    deterministic: bool = False
    network: tuple[str, ...] = ()  # hosts and presets
    allow_network: bool = False  # every public host
    no_dlp: bool = False
    publish: tuple[str, ...] = ()  # ports, as they are written
    budgets: tuple[str, ...] = ()  # of the network
    image: str = ""
    capable: tuple[str, ...] = ()  # hosts that the capabilities of a run open: the last field, because no option sets it

    @classmethod
    def read(cls, request: Request) -> PolicyOptions:
        network = read_names(request, "--network")
        if request.has("--network") and not network:
            raise UsageError("--network names no host", hint="--network api.example.com, or --network packages")
        output = (("output_bytes", JSON_OUTPUT_BYTES),) if request.has("--json") else ()
        return cls(
            (*read_limits(request), *output),
            read_names(request, "--allow") if request.has("--allow") else None,
            read_names(request, "--deny-command"),
            request.values("--deny"),
            request.values("--reveal"),
            request.values("--policy"),
            request.has("--system"),
            request.has("--deterministic"),
            network,
            request.has("--allow-network"),
            request.has("--no-dlp"),
            read_names(request, "--publish"),
            request.values("--budget"),
            request.value("--image") or "",
        )


@dataclass(frozen=True)
class ShowOptions:
    """Options that select the changes to show, and their format."""

    form: Form = "unified"
    everything: bool = False
    only: tuple[str, ...] = ()
    pager: bool = False
    raw: bool = False

    @classmethod
    def read(cls, request: Request) -> ShowOptions:
        forms = [form for form in _FORMS if request.has(f"--{form}")]
        if len(forms) > 1:
            raise UsageError(f"--{forms[0]} and --{forms[1]} do not go together", hint="choose one")
        form = forms[0] if forms else "unified"
        if request.has("--raw") and form != "patch":
            raise UsageError("--raw goes with --patch", hint="see: agent-sandbox help diff")
        pager = not request.has("--no-pager") and form not in ("json", "patch")
        return cls(form, request.has("--all"), request.values("--only"), pager, request.has("--raw"))


@dataclass(frozen=True)
class CommandOptions:
    """Options of `run`, `shell`, `code`, `sim` and `diff`. With `collect`, the output is kept for the result instead of being printed."""

    command: tuple[str, ...] = ()
    words: tuple[str, ...] = ()  # of `diff`, which may be paths; empty after `--`
    project: str | None = None
    policy: PolicyOptions = PolicyOptions()
    cwd: str | None = None
    env: tuple[str, ...] = ()
    env_files: tuple[str, ...] = ()
    runtime: str | None = None
    throw_away: bool = False
    wait: bool = True
    explain: bool = False
    observe: bool = False
    watch_reads: bool = False
    seed: int = 0
    record: str | None = None
    capabilities: tuple[str, ...] = ()
    collect: bool = False
    simulate: bool = False
    diff: bool = False
    show: ShowOptions = ShowOptions()
    secrets: tuple[str, ...] = ()  # as they are written
    intent: str | None = None
    record_network: str | None = None
    record_bodies: bool = False
    replay_network: str | None = None
    send: bool = False
    step: bool = False  # whether the run is a step of the sandbox's timeline

    @classmethod
    def read(cls, request: Request) -> CommandOptions:
        policy = PolicyOptions.read(request)
        if request.has("--record-bodies") and not request.has("--record-network"):
            raise UsageError("--record-bodies goes with --record-network", hint="add --record-network FILE")
        if request.has("--record-network") and request.has("--replay-network"):
            raise UsageError("--record-network and --replay-network do not go together", hint="give one of them")
        for option in ("--seed", "--record"):
            if request.has(option) and not policy.deterministic:
                raise UsageError(f"{option} is for deterministic runs", hint="add --deterministic")
        if request.has("--record") and not request.has("--throw-away"):
            raise UsageError("--record goes with --throw-away: a record does not hold what is in the sandbox", hint="add --throw-away")
        simulate = request.verb in ("sim", "simulate") or request.has("--simulate")
        if request.has("--send") and not simulate:
            raise UsageError("--send is for simulations: a run sends what its policy allows", hint="leave it out")
        diff = request.has("--diff") or (request.verb == "diff" and bool(request.words))
        for option in ("--diff", "--watch-reads", "--record", "--publish") if simulate else ():
            if request.has(option):
                raise UsageError(f"{option} does not go with a simulation", hint="its plan shows the changes, and nothing else is kept")
        if policy.publish and (diff or policy.deterministic):
            raise UsageError(f"--publish does not go with {'--diff' if diff else '--deterministic'}", hint="leave one of them out")
        if request.has("--publish") and not policy.publish:
            raise UsageError("--publish names no port", hint="--publish 8000, or --publish 8000:3000 for port 3000 of the sandbox")
        return cls(
            _command(request),
            request.words if request.verb == "diff" and not request.separated else (),
            request.value("--project"),
            policy,
            request.value("--cwd"),
            request.values("--env"),
            request.values("--env-file"),
            request.value("--runtime"),
            request.has("--throw-away") or (request.verb == "diff" and diff),
            not request.has("--no-wait"),
            request.has("--explain"),
            request.has("--observe"),
            request.has("--watch-reads"),
            _seed(request.value("--seed")),
            request.value("--record"),
            request.values("--capability"),
            request.has("--json"),
            simulate,
            diff,
            ShowOptions.read(request) if simulate or diff or request.verb == "diff" else ShowOptions(),
            request.values("--secret"),
            request.value("--intent"),
            request.value("--record-network"),
            request.has("--record-bodies"),
            request.value("--replay-network"),
            request.has("--send"),
            request.has("--timeline"),
        )

    @property
    def isolation(self) -> str:
        """The runtime to use. By default "process"; "auto" for a deterministic run or a fuel limit, which only WebAssembly supports."""
        return self.runtime or ("auto" if self.policy.deterministic or self._has_fuel else "process")

    @property
    def terminal(self) -> bool:
        """Whether the program may have a terminal. Programs inside WebAssembly or a virtual machine have none."""
        return not (self.policy.deterministic or self._has_fuel or self.runtime in ("wasm", "microvm"))

    @property
    def _has_fuel(self) -> bool:
        return any(name == "fuel" for name, _ in self.policy.limits)


@dataclass(frozen=True)
class CodeOptions:
    """Options of `code`."""

    run: CommandOptions
    file: str
    arguments: tuple[str, ...]
    language: str | None

    @classmethod
    def read(cls, request: Request) -> CodeOptions:
        file, *arguments = request.words
        if arguments and not request.separated:
            raise UsageError(f"too many arguments: {arguments[0]!r}", hint="arguments for the code follow --")
        return cls(CommandOptions.read(request), file, tuple(arguments), request.value("--language"))


@dataclass(frozen=True)
class ReplayOptions:
    """Options of `replay`."""

    record: str
    project: str | None
    env: tuple[str, ...]
    cwd: str | None
    limits: tuple[tuple[str, float | None], ...]

    @classmethod
    def read(cls, request: Request) -> ReplayOptions:
        return cls(request.words[0], request.value("--project"), request.values("--env"), request.value("--cwd"), read_limits(request))


@dataclass(frozen=True)
class SandboxOptions:
    """Options of `status`, `reset` and the snapshot verbs. `names` are names of snapshots."""

    project: str | None = None
    policy: PolicyOptions = PolicyOptions()
    yes: bool = False
    names: tuple[str, ...] = ()

    @classmethod
    def read(cls, request: Request) -> SandboxOptions:
        names = (*request.words, *request.values("--forget"))
        return cls(request.value("--project"), PolicyOptions.read(request), request.has("--yes"), names)


@dataclass(frozen=True)
class PromoteOptions:
    """Options of `promote` and `undo`."""

    project: str | None = None
    policy: PolicyOptions = PolicyOptions()
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    yes: bool = False
    drift: Literal["refuse", "merge", "force"] = "refuse"
    resolve: Side | None = None
    approved: frozenset[str] = frozenset()
    caches: bool = False
    dry_run: bool = False
    capabilities: tuple[str, ...] = ()
    expect: str | None = None

    @classmethod
    def read(cls, request: Request) -> PromoteOptions:
        if request.has("--merge") and request.has("--force"):
            raise UsageError("--merge and --force do not go together", hint="--merge keeps both sides, --force the sandbox's side")
        answer = request.value("--resolve")
        resolve = next((side for side in _SIDES if side == answer), None)
        if answer is not None and (resolve is None or not request.has("--merge")):
            hint = "ours is the sandbox, theirs is reality"
            raise UsageError("--resolve takes ours, theirs or markers, and goes with --merge", hint=hint)
        return cls(
            request.value("--project"),
            PolicyOptions.read(request),
            request.values("--only"),
            request.values("--skip"),
            request.has("--yes"),
            "merge" if request.has("--merge") else "force" if request.has("--force") else "refuse",
            resolve,
            _approved(request),
            request.has("--caches"),
            request.has("--dry-run"),
            request.values("--capability"),
            request.value("--expect"),
        )


@dataclass(frozen=True)
class CarryOutOptions:
    """Options of `carry-out`. Without a digest it lists the plans."""

    digest: str | None = None
    project: str | None = None
    yes: bool = False
    approved: frozenset[str] = frozenset()
    system: bool = False
    caches: bool = False
    files_only: bool = False
    capabilities: tuple[str, ...] = ()
    show: ShowOptions = ShowOptions()
    env: tuple[str, ...] = ()
    env_files: tuple[str, ...] = ()

    @classmethod
    def read(cls, request: Request) -> CarryOutOptions:
        return cls(
            request.words[0] if request.words else None,
            request.value("--project"),
            request.has("--yes"),
            _approved(request),
            request.has("--system"),
            request.has("--caches"),
            request.has("--files-only"),
            request.values("--capability"),
            ShowOptions.read(request),
            request.values("--env"),
            request.values("--env-file"),
        )


@dataclass(frozen=True)
class PolicyVerbOptions:
    """Options of `policy`: the subcommand, the commands it is about, and for `learn` how these run."""

    question: PolicyQuestion
    commands: tuple[tuple[str, ...], ...] = ()
    run: CommandOptions = CommandOptions()
    add: bool = False

    @classmethod
    def read(cls, request: Request) -> PolicyVerbOptions:
        what, *rest = request.words
        if what != "learn" or not rest:
            wrong = next((option for option in ("--add", "--cwd", "--env", "--env-file", "--timeout") if request.has(option)), None)
            if wrong is not None:
                raise UsageError(f"{wrong} goes with policy learn", hint="see: agent-sandbox help policy")
        run = CommandOptions.read(request)
        match what:
            case "explain" | "lint" | "schema" if not rest:
                return cls(what, (), run)
            case "test" if len(rest) == 1:
                return cls("test", (("bash", "-c", rest[0]),), run)
            case "learn" if rest:
                commands = (tuple(rest),) if request.separated else tuple(("bash", "-c", line) for line in rest)
                return cls("learn", commands, run, request.has("--add"))
            case _:
                raise UsageError(
                    f"policy takes explain, lint, schema, test COMMAND or learn COMMAND…, not {' '.join(request.words)!r}",
                    hint="see: agent-sandbox help policy",
                )


@dataclass(frozen=True)
class VerifyOptions:
    """Options of `verify`. `runtime` is one that is attacked beside `process`; empty for none."""

    project: str | None = None
    policy: PolicyOptions = PolicyOptions()
    env: tuple[str, ...] = ()
    runtime: str = ""

    @classmethod
    def read(cls, request: Request) -> VerifyOptions:
        name = request.value("--runtime") or "process"
        if name == "container" and not request.has("--image"):
            raise UsageError("verify --runtime container needs an image", hint="add --image NAME")
        if name == "wasm":
            raise UsageError("verify needs no --runtime wasm", hint="leave out --runtime: wasm is always attacked where it is compiled")
        if name not in ("process", "container", "gvisor", "microvm"):
            raise UsageError(f"verify cannot test --runtime {name}", hint="use process, container, gvisor or microvm")
        runtime = "" if name in ("process", "container") else name  # an image says so itself
        return cls(request.value("--project"), PolicyOptions.read(request), request.values("--env"), runtime)


def _command(request: Request) -> tuple[str, ...]:
    """Return the arguments as a command. A single argument is a command line for bash."""
    if request.verb in ("code", "policy", "shell", "try"):
        return ()
    return request.words if request.separated or len(request.words) != 1 else ("bash", "-c", request.words[0])


def read_names(request: Request, option: str) -> tuple[str, ...]:
    """Return the names in an option that takes several, separated by commas or blanks, or in repeated options."""
    return tuple(name for value in request.values(option) for name in value.replace(",", " ").split())


def _approved(request: Request) -> frozenset[str]:
    return frozenset(name.strip() for value in request.values("--approve") for name in value.split(","))


def _seed(text: str | None) -> int:
    text = "0" if text is None else text
    if not (text.isascii() and text.isdigit()) or len(text) > 20 or int(text) >= 1 << 64:
        raise UsageError(f"--seed takes a whole number from 0 to 2**64 - 1, not {text!r}", hint="for example --seed 7")
    return int(text)


_SIZES = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_TIMES = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_NONE = "none"


def read_size(option: str, text: str) -> int | None:
    """Read a number of bytes: `512M`, `2GiB` or `1000`; None for `none`. Raises `PolicyError` for any other text."""
    lowered = text.strip().lower()
    if lowered == _NONE:
        return None
    body = lowered.removesuffix("ib") if lowered.endswith("ib") else lowered
    body = body.removesuffix("b") if body[-2:-1] in ("k", "m", "g", "t") else body
    return int(_scaled(option, text, body, _SIZES, "a size such as 512M, 2G or none"))


def read_seconds(option: str, text: str) -> float | None:
    """Read a duration in seconds: `30`, `1.5`, `5m`, `1h` or `2d`; None for `none`. Raises `PolicyError` for any other text."""
    lowered = text.strip().lower()
    return None if lowered == _NONE else _scaled(option, text, lowered, _TIMES, "a time such as 30, 5m, 1h, 2d or none")


def read_period(option: str, text: str) -> float:
    """Read a duration that must have an end, in seconds. Raises `PolicyError` for any other text, also for `none`."""
    return _scaled(option, text, text.strip().lower(), _TIMES, "a time such as 10m, 90, 1h or 2d")


def read_count(option: str, text: str) -> int | None:
    """Read a whole number; None for `none`. Raises `PolicyError` for any other text."""
    lowered = text.strip().lower()
    if lowered == _NONE:
        return None
    if not (lowered.isascii() and lowered.isdigit()) or len(lowered) > 18 or int(lowered) == 0:
        raise PolicyError(f"{option} takes a whole number above 0, not {text!r}", hint=f"for example {option} 64, or {option} none")
    return int(lowered)


def _scaled(option: str, text: str, body: str, units: dict[str, int], example: str) -> float:
    number, unit = (body[:-1], body[-1]) if body and body[-1].isalpha() else (body, "")
    try:
        value = float(number) if number.isascii() and number.strip("-+.0123456789") == "" else None
    except ValueError:
        value = None
    if value is None or unit not in units:
        raise PolicyError(f"{option} takes {example}, not {text!r}", hint=f"write {option} {example.split(' such as ')[1].split(',')[0]}")
    if not 0 < value * units[unit] <= 1 << 60 or (units is _SIZES and value * units[unit] < 1):
        raise PolicyError(f"{option} must be above 0 and within reason, not {text!r}", hint=f"{option} takes {example}")
    return value * units[unit]


_LIMITS = (
    ("--timeout", "wall_seconds", read_seconds),
    ("--memory", "memory_bytes", read_size),
    ("--disk", "disk_bytes", read_size),
    ("--processes", "processes", read_count),
    ("--fuel", "fuel", read_count),
)


def read_limits(request: Request) -> tuple[tuple[str, float | None], ...]:
    limits = ((option, name, read, request.value(option)) for option, name, read in _LIMITS)
    return tuple((name, read(option, text)) for option, name, read, text in limits if text is not None)
