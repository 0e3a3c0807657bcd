"""Learning: derive the smallest policy that would have allowed an observed run. Pure; `engine.learn` observes and asks.

The rules for smallest are few enough to state:

- For a path in the project, the project is proposed. Elsewhere the file itself is proposed; if it was made or removed, its directory.
- For more than three names in one directory, the directory is proposed (more than twenty if it is right below `/`).
- Never proposed: `/`, a home, and directories above a home or above the project; a secret that the view hides; anything that a higher
  policy forbids.
- Nothing is proposed for caches written below the files that every view shows (`/usr/lib/…/__pycache__`): programs do without.
- A limit is the usage, times a factor, rounded up; never more than the limit of the run.
- A host may be sent the methods and paths that it was sent. A path ends with `*` where a part of it looks like an identifier, and where
  more than five paths of one directory were asked for with one method.

Everything left out is reported. Nothing is proposed for files that a program looked for and did not find.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

from agent_sandbox._fast.values import Protocol, dataclass
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.hosts import bracketed, canonical_host, is_local
from agent_sandbox.policy.model import MIB, SCRATCH, FileRules, Limits
from agent_sandbox.policy.network import WEB_PORTS, canonical_entry, split_port
from agent_sandbox.policy.paths import Tree, matches
from agent_sandbox.policy.programs import interprets, is_open
from agent_sandbox.policy.proposal import Asked, Proposal, ProposedSetting, pattern_of

OPENED = "opens the network in your own policy file; in a project's file it only narrows"
MOST_NAMED, MOST_NAMED_AT_THE_TOP = 3, 20  # names in one directory; for more names the directory is proposed
NAMED = ""  # instead of a program, for a file that the command names and no program was seen to read
NOWHERE: Mapping[str, str] = {}
MOST_PATHS = 5  # paths of one directory that a host was asked for with one method; for more the directory is proposed
_FEWEST_DIGITS = 8  # of an identifier in hexadecimal
FILE_KINDS = ("read", "write", "execute")
_DNS_PORT = 53  # the DNS port; lookups are observed as such


@dataclass(frozen=True)
class Spent:
    """The highest usage of each resource in the observed runs; 0 if it was not counted."""

    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    memory_bytes: int = 0
    processes: int = 0
    disk_bytes: int = 0


def amount_lines(spent: Spent, limits: Limits, left_out: list[str]) -> list[ProposedSetting]:
    """Propose limits that leave room for the usage. If processes were not counted, says so in `left_out`."""
    if not spent.processes:
        left_out.append("processes.max: nothing counts them here")
    wall, cpu = round(spent.wall_seconds, 1), round(spent.cpu_seconds, 1)
    memory, disk = _mib(spent.memory_bytes), _mib(spent.disk_bytes)
    counted = _amount("processes.max", spent.processes, "at once", factor=4, least=32, most=limits.processes)
    return [
        *(counted if spent.processes else ()),
        *_amount("limits.timeout_seconds", wall, "s", factor=10, least=60, most=limits.wall_seconds),
        *_amount("limits.cpu_seconds", cpu, "s", factor=10, least=60, most=limits.cpu_seconds),
        *_amount("limits.memory_mb", memory, "MiB", factor=4, least=256, most=_in_mib(limits.memory_bytes)),
        *_amount("limits.disk_mb", disk, "MiB left at the end", factor=4, least=256, most=_in_mib(limits.disk_bytes)),
    ]


def _amount(key: str, used: float, unit: str, *, factor: int, least: int, most: float | None) -> list[ProposedSetting]:
    """Propose a limit of `used` times `factor`, rounded up to a power of two times `least`, so that similar runs give the same limit.

    Empty if the limit of the run, `most`, is not higher than that.
    """
    value = least
    while value < used * factor:
        value *= 2
    if most is not None and value >= most:  # the policy above sets this limit already
        return []
    return [ProposedSetting(key, value, f"{used} {unit} were used; {factor} times that, rounded up, and at least {least}")]


def _mib(count: int) -> int:
    return -(-count // MIB)


def _in_mib(count: int | None) -> int | None:
    return None if count is None else count // MIB


def network_lines(seen: Iterable[ObservedAttempt], left_out: list[str]) -> list[ProposedSetting]:
    """Propose the hosts that programs tried to reach, with the ports beyond the web's. The sandbox's own loopback needs no setting."""
    hosts: dict[str, dict[str, None]] = {}  # with a port if that is neither 80 nor 443
    inbound: dict[str, None] = {}
    seen = [each for each in seen if each.kind in ("connect", "resolve", "listen")]
    resolves = any(each.kind == "resolve" for each in seen)
    for each in seen:
        host, port = (each.target, 0) if each.kind == "resolve" else _split(each.target)
        try:
            name = canonical_host(host)
        except PolicyError:
            left_out.append(f"the host {each.target!r}, which {each.program} asked for: that is no name of a host")
            continue
        if each.kind == "listen":
            if not is_local(name) or name in ("0.0.0.0", "::"):
                inbound[each.program] = None
        elif not is_local(name) and not (port == _DNS_PORT and resolves):
            beyond = port and port not in WEB_PORTS
            hosts.setdefault(canonical_entry(f"{bracketed(name)}:{port}") if beyond else name, {})[each.program] = None
    named = {host for host, port in map(split_port, hosts) if port}
    resolved = {each.target for each in seen if each.kind == "resolve"}
    reached = {_split(each.target)[0] for each in seen if each.kind == "connect" and _split(each.target)[1] in WEB_PORTS}
    for host in named & resolved - reached:  # looked up only for a connection to its other port
        hosts.pop(host, None)
    lines = []
    if hosts:
        lines.append(ProposedSetting("network.outbound", True, OPENED))
        lines.append(ProposedSetting("network.hosts", tuple(Asked(host, _by(programs)) for host, programs in sorted(hosts.items()))))
        left_out.append(f"the network itself, if this is a project's file: run with --network {','.join(sorted(hosts))}")
    if inbound:
        left_out.append(f"network.inbound: {_by(inbound)} waits for connections from outside; --publish PORT lets those of this machine in")
    return lines


def request_lines(made: Iterable[ObservedRequest], untold: int, left_out: list[str]) -> list[ProposedSetting]:
    """Propose the requests that hosts were sent, by method and path. Of a host of which not all can be written, none are proposed."""
    paths: dict[tuple[str, str], set[str]] = {}
    unclear: dict[str, str] = {}
    for each in made:
        if not each.path:
            unclear[each.name] = "a path was too long, or held data that was found"
        elif not (each.method.isalpha() and each.method.isupper()):
            unclear[each.name] = f"the method {each.method!r} cannot be written"
        else:
            paths.setdefault((each.name, each.method), set()).add(_generalised(each.path))
    if untold:
        left_out.append(f"network.requests: {untold:,} more requests were made than are listed")
        return []
    left_out += [f"network.requests of {name}: {why}" for name, why in unclear.items()]
    methods: dict[tuple[str, str], list[str]] = {}
    for (name, method), seen in sorted(paths.items()):
        for path in sorted(_gathered_paths(seen)) if name not in unclear else ():
            methods.setdefault((name, path), []).append(method)
    asked = [Asked(f"{','.join(used)} {bracketed(name)}{path}", _why_sent(path)) for (name, path), used in methods.items()]
    return [ProposedSetting("network.requests", tuple(asked))] if asked else []


def _why_sent(path: str) -> str:
    return "sent; * stands for what varies" if path.endswith("*") else "sent"


def _generalised(path: str) -> str:
    """Return a path up to its first part that looks like an identifier, and `*` instead of the rest; a whole path if none does."""
    parts = path.split("/")
    for place, part in enumerate(parts):
        if "*" in part or _is_identifier(part):
            return f"{'/'.join(parts[:place])}/*"
    return path


def _is_identifier(part: str) -> bool:
    """Return whether a part of a path is a number, or hexadecimal digits of some length, with or without hyphens."""
    plain = part.replace("-", "")
    return plain.isdigit() or (len(plain) >= _FEWEST_DIGITS and not plain.lower().strip("0123456789abcdef") and not plain.isalpha())


def _gathered_paths(paths: set[str]) -> set[str]:
    """Return patterns for paths: many in one directory become the directory, and one inside another's pattern is left out."""
    while True:
        inside: dict[str, list[str]] = {}
        for path in paths:
            inside.setdefault(path.removesuffix("*").rstrip("/").rpartition("/")[0] + "/", []).append(path)
        full = [parent for parent, names in inside.items() if len(names) > MOST_PATHS and f"{parent}*" not in paths]
        if not full:
            break
        for parent in full:
            paths = paths.difference(inside[parent]) | {f"{parent}*"}
    patterns = [path[:-1] for path in paths if path.endswith("*")]
    return {path for path in paths if not any(path.startswith(each) and path != f"{each}*" for each in patterns)}


def _split(target: str) -> tuple[str, int]:
    host, _, port = target.rpartition(":")
    return host, int(port) if port.isdigit() and port.isascii() and 0 < int(port) < 65536 else 0


def _by(programs: Iterable[str]) -> str:
    return f"by {', '.join(sorted(program.rpartition('/')[2] or program for program in programs)[:3])}"


class Nature(Enum):
    """Kinds of path that a run used."""

    FILE = "file"
    DIRECTORY = "directory"
    MADE = "made"  # the run created or removed it, so its directory changed
    MISSING = "missing"


class ObservedAttempt(Protocol):
    """One attempt of a program to use a file or the network, as `runtime.observe` reports it."""

    @property
    def kind(self) -> str: ...
    @property
    def target(self) -> str: ...
    @property
    def program(self) -> str: ...
    @property
    def allowed(self) -> bool: ...


class ObservedRequest(Protocol):
    """One request over HTTP, as the egress reports it: with the path without its query, empty if it cannot be told."""

    @property
    def method(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def path(self) -> str: ...


@dataclass(frozen=True)
class RunContext:
    """The surroundings of the run. `given` are paths that every policy shows read-only; `starts` are the working directories."""

    project: str
    home: str
    starts: tuple[str, ...]
    given: tuple[str, ...]
    rules: FileRules  # the rules of the run
    limits: Limits


@dataclass(frozen=True)
class Programs:
    """The programs that a policy must allow, each with its reason. `unnameable` is the reason if no list of names is enough.

    `notes` are remarks for people, above all about interpreters that come with these programs.
    """

    names: tuple[Asked, ...] = ()
    unnameable: str = ""
    notes: tuple[str, ...] = ()


@dataclass
class _Use:
    programs: dict[str, None]
    wrote: bool = False


def learn(
    seen: Iterable[ObservedAttempt],
    natures: Mapping[str, Nature],
    place: RunContext,
    programs: Programs,
    spent: Spent,
    leads: Mapping[str, str] = NOWHERE,
    requests: Iterable[ObservedRequest] = (),
    untold: int = 0,
) -> Proposal:
    """Return the smallest policy that would have allowed the observed run, as a proposal.

    `natures` has the kind of every path that was seen or changed. `leads` maps links to their targets. A view shows the target of an
    allowed link, so the target need not be allowed itself. `requests` are those over HTTP, and `untold` is how many more there were.
    """
    seen = tuple(seen)
    uses, left_out = _uses(seen, natures, place)
    lines = [*_file_lines(uses, natures, place, leads, left_out), *_process_lines(programs, left_out)]
    lines += network_lines(seen, left_out)
    lines += request_lines(requests, untold, left_out)
    lines += amount_lines(spent, place.limits, left_out)
    return Proposal(tuple(lines), tuple(dict.fromkeys(left_out)), _remarks(programs), () if spent.processes else ("processes.max",))


def _uses(seen: Iterable[ObservedAttempt], natures: Mapping[str, Nature], place: RunContext) -> tuple[dict[str, _Use], list[str]]:
    """Return the paths that a policy must show beyond those that every policy shows, and remarks on paths left out."""
    uses: dict[str, _Use] = {}
    left_out: list[str] = []
    for each in seen:
        nature = natures.get(each.target, Nature.MISSING)
        writes = each.kind == "write"
        if each.kind not in FILE_KINDS or (_is_given(each.target, place) and nature is not Nature.MADE):
            continue
        if nature is Nature.MISSING and not (writes and natures.get(_parent(each.target)) in (Nature.DIRECTORY, Nature.MADE)):
            continue
        name = _name(each.program)
        if not each.allowed:
            left_out.append(_forbidden(each.target, name, place.rules))
            continue
        use = uses.setdefault(each.target, _Use({}))
        use.programs[name] = None
        use.wrote = use.wrote or writes
    for path, nature in natures.items():
        if nature is Nature.MADE and not _is_scratch(path, place):
            uses.setdefault(path, _Use({})).wrote = True
    return uses, left_out


def _forbidden(path: str, program: str, rules: FileRules) -> str:
    why = next((mask.why for mask in rules.masks if _covers(mask.path, path)), "")
    if why:
        return f"{path}, which {program} tried, stays hidden ({why}); a person can show it for one run: --reveal"
    return f"{path}, which {program} tried, is not to be had under the policies above"


def _file_lines(
    uses: Mapping[str, _Use], natures: Mapping[str, Nature], place: RunContext, leads: Mapping[str, str], left_out: list[str]
) -> list[ProposedSetting]:
    wanted: dict[str, _Use] = {}
    hidden = False
    for path, use in uses.items():
        tree = _tree_for(path, natures, place)
        hidden = hidden or "/." in path[len(tree) :]
        if _is_too_much(tree, place):
            what = f"{path} ({_some(use.programs)})" if use.programs else path
            left_out.append(f"{what} would take {tree} as a whole, which is never proposed")
            continue
        merged = wanted.setdefault(tree, _Use({}))
        merged.programs.update(use.programs)
        merged.wrote = merged.wrote or use.wrote
    for start in place.starts:
        tree = place.project if _covers(place.project, start) else start
        if _is_too_much(tree, place):
            left_out.append(f"{start}, where it began, would take {tree} as a whole, which is never proposed")
        elif not _is_scratch(start, place) and not _is_given(start, place):
            wanted.setdefault(tree, _Use({}))
    items = []
    for tree, use in _gathered(wanted, place, leads).items():
        text = pattern_of(tree, place.home)
        if text is None:
            left_out.append(f"{tree} cannot be written as a pattern of a policy")
            continue
        items.append(Asked(text, _why_shown(tree, use, place)))
    if not items:
        return [ProposedSetting("files.read", False, "no file of the machine was used but those that programs come with")]
    if not hidden:
        left_out.append("files.allow_hidden = false, although nothing hidden was used: a view without it is a copy, made at every start")
    lines = [ProposedSetting("files.allowed", tuple(items))]
    if not any(use.wrote for use in wanted.values()):
        lines.insert(0, ProposedSetting("files.write", False, "nothing was written but scratch files"))
    return lines


def _tree_for(path: str, natures: Mapping[str, Nature], place: RunContext) -> str:
    if _covers(place.project, path):
        return place.project
    while natures.get(path) in (Nature.MADE, Nature.MISSING) and path != "/":
        path = _parent(path)
    return path


def _gathered(wanted: dict[str, _Use], place: RunContext, leads: Mapping[str, str]) -> dict[str, _Use]:
    """Merge paths: many names in one directory into the directory, and a path inside another wanted path into that path.

    The target of a wanted link is merged into the link.
    """
    trees = dict(wanted)
    while True:
        inside: dict[str, list[str]] = {}
        for tree in trees:
            if tree != place.project:
                inside.setdefault(_parent(tree), []).append(tree)
        full = [parent for parent, names in inside.items() if len(names) > _most_named(parent) and not _is_too_much(parent, place)]
        if not full:
            break
        for parent in full:
            for name in inside[parent]:
                _join(trees, parent, trees.pop(name))
    for tree in sorted(trees, key=len, reverse=True):
        outer = next((other for other in trees if other != tree and _covers(other, tree)), None)
        if outer is not None:
            _join(trees, outer, trees.pop(tree))
    for name, other in leads.items():
        if name in trees and other in trees:
            _join(trees, name, trees.pop(other))
    return dict(sorted(trees.items(), key=lambda item: (item[0] != place.project, item[0])))


def _join(trees: dict[str, _Use], tree: str, use: _Use) -> None:
    into = trees.setdefault(tree, _Use({}))
    into.programs.update(use.programs)
    into.wrote = into.wrote or use.wrote


def _most_named(directory: str) -> int:
    return MOST_NAMED_AT_THE_TOP if directory.count("/") == 1 else MOST_NAMED


def _why_shown(tree: str, use: _Use, place: RunContext) -> str:
    what = "the project: " if tree == place.project else ""
    if not use.programs:
        return what + ("changed" if use.wrote else "it began here")
    if [*use.programs] == [NAMED]:
        return f"{what}named on the command line, and without it things end differently"
    return f"{what}{'read and written' if use.wrote else 'read'} by {_some(use.programs)}"


def _process_lines(programs: Programs, left_out: list[str]) -> list[ProposedSetting]:
    lines: list[ProposedSetting] = []
    if programs.unnameable:
        left_out.append(f"a list of programs: {programs.unnameable}")
    elif programs.names:
        lines.append(ProposedSetting("processes.commands", programs.names))
    else:
        lines.append(ProposedSetting("processes.commands", (), "no program was started but the shell that reads the line"))
    return lines


def _remarks(programs: Programs) -> tuple[str, ...]:
    """Return warnings for people who may adopt a proposal: about programs that start other programs, and the notes."""
    starters = [asked.text for asked in programs.names if is_open(asked.text) and not interprets(asked.text)]
    return (*(f"{name} starts other programs, and does with them whatever the sandbox permits" for name in starters), *programs.notes)


def _is_given(path: str, place: RunContext) -> bool:
    return not _covers(place.project, path) and any(_covers(tree, path) for tree in place.given)


def _is_scratch(path: str, place: RunContext) -> bool:
    return not _covers(place.project, path) and any(_covers(tree, path) for tree in SCRATCH)


def _is_too_much(tree: str, place: RunContext) -> bool:
    return tree == "/" or _covers(tree, place.home) or (tree != place.project and _covers(tree, place.project))


def _some(programs: Iterable[str]) -> str:
    names = sorted(name for name in programs if name != NAMED)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _name(program: str) -> str:
    return program.rpartition("/")[2] or program


def _parent(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def _covers(directory: str, path: str) -> bool:
    return matches(Tree(directory), path)
