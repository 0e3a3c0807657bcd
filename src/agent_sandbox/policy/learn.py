"""Learning: from what a run was seen to do, the smallest policy that would have allowed it. Pure; `engine.learn` looks and asks.

Smallest, by rules that are few enough to be said:

- What is in the project asks for the project. Elsewhere a file asks for itself; one that was made or removed, for its directory.
- More than three names in one directory ask for the directory (twenty for one right below `/`).
- Never proposed: `/`, a home, and what is above a home or above the project; a secret that the view hides; what a higher policy forbids.
- Caches that are written below what every view shows (`/usr/lib/…/__pycache__`) ask for nothing: programs do without.
- Amounts are what was used, times a factor, rounded up; never more than was there to use.

What is not proposed is said. What a program looked for and did not find asks for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

from agent_sandbox._fast.values import TYPE_CHECKING, Protocol, dataclass
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.hosts import canonical_host, is_local
from agent_sandbox.policy.limits import MIB, Limits
from agent_sandbox.policy.model import SCRATCH, FileRules
from agent_sandbox.policy.paths import Tree, matches
from agent_sandbox.policy.programs import interprets, is_open
from agent_sandbox.policy.proposal import Asked, Line, Proposal, pattern_of


@dataclass(frozen=True)
class Spent:
    """What the runs used at most; 0 where nothing counts it."""

    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    memory_bytes: int = 0
    processes: int = 0
    disk_bytes: int = 0


def amount_lines(spent: Spent, limits: Limits, left_out: list[str]) -> list[Line]:
    """Limits that leave room for what was used. What nothing counts here is left out."""
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


def _amount(key: str, used: float, unit: str, *, factor: int, least: int, most: float | None) -> list[Line]:
    """A power of two times the least that is ever proposed, so that the next run of the same does not propose another."""
    value = least
    while value < used * factor:
        value *= 2
    if most is not None and value >= most:  # what is above says so already
        return []
    return [Line(key, value, f"{used} {unit} were used; {factor} times that, rounded up, and at least {least}")]


def _mib(count: int) -> int:
    return -(-count // MIB)


def _in_mib(count: int | None) -> int | None:
    return None if count is None else count // MIB


if TYPE_CHECKING:
    pass

_NAMES = 53  # the port on which names are asked for: what was asked is seen as such
WITHOUT_EFFECT = "without effect until this version has a network for sandboxes"


def network_lines(seen: Iterable[Seen], left_out: list[str]) -> list[Line]:
    """Hosts and ports that were wanted. The sandbox's own loopback needs no setting."""
    hosts: dict[str, dict[str, None]] = {}
    ports: dict[int, dict[str, None]] = {}
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
        elif not is_local(name) and not (port == _NAMES and resolves):
            hosts.setdefault(name, {})[each.program] = None
            if port:
                ports.setdefault(port, {})[each.program] = None
    lines = []
    if hosts:
        lines.append(Line("network.outbound", True, WITHOUT_EFFECT))
        lines.append(Line("network.hosts", tuple(Asked(host, _by(programs)) for host, programs in sorted(hosts.items()))))
        left_out.append(f"the network itself: {', '.join(sorted(hosts))} is in the proposal, {WITHOUT_EFFECT}")
    if inbound:
        left_out.append(f"network.inbound: {_by(inbound)} waits for connections from outside, and there are none")
    if ports:
        numbers = ", ".join(f"{port} {_by(programs)}" for port, programs in sorted(ports.items()))
        lines.append(Line("network.ports", tuple(sorted(ports)), numbers))
    return lines


def _split(target: str) -> tuple[str, int]:
    host, _, port = target.rpartition(":")
    return host, int(port) if port.isdigit() and port.isascii() and 0 < int(port) < 65536 else 0


def _by(programs: Iterable[str]) -> str:
    return f"by {', '.join(sorted(program.rpartition('/')[2] or program for program in programs)[:3])}"


MOST_NAMED, MOST_NAMED_AT_THE_TOP = 3, 20
NAMED = ""  # the program of what no program was seen to read
NOWHERE: Mapping[str, str] = {}
FILE_KINDS = ("read", "write", "execute")


class Nature(Enum):
    """What a name was for the run."""

    FILE = "file"
    DIRECTORY = "directory"
    MADE = "made"  # or removed, by the run: its directory changed
    MISSING = "missing"


class Seen(Protocol):
    """Something that a program tried: see `runtime.observe.events`."""

    @property
    def kind(self) -> str: ...
    @property
    def target(self) -> str: ...
    @property
    def program(self) -> str: ...
    @property
    def allowed(self) -> bool: ...


@dataclass(frozen=True)
class Place:
    """Where it happened. `given` is there under every policy, read-only; `starts` are the directories in which work began."""

    project: str
    home: str
    starts: tuple[str, ...]
    given: tuple[str, ...]
    rules: FileRules  # under which it happened
    limits: Limits


@dataclass(frozen=True)
class Programs:
    """The names that a list of programs has to have, and what asked for each; or why no list of names would do.

    `notes` are what is to be said of them: which interpreters come with them, above all.
    """

    names: tuple[Asked, ...] = ()
    unnameable: str = ""
    notes: tuple[str, ...] = ()


@dataclass
class _Use:
    programs: dict[str, None]
    wrote: bool = False


def learn(
    seen: Iterable[Seen],
    natures: Mapping[str, Nature],
    place: Place,
    programs: Programs,
    spent: Spent,
    leads: Mapping[str, str] = NOWHERE,
) -> Proposal:
    """The proposal. `natures` has every path that was seen or changed; one that is `MADE` need not have been seen.

    `leads` has names that lead to others, over links, which are shown with them: where the first is allowed by itself, the second need not.
    """
    seen = tuple(seen)
    uses, left_out = _uses(seen, natures, place)
    lines = [*_file_lines(uses, natures, place, leads, left_out), *_process_lines(programs, left_out)]
    lines += network_lines(seen, left_out)
    lines += amount_lines(spent, place.limits, left_out)
    return Proposal(tuple(lines), tuple(dict.fromkeys(left_out)), _remarks(programs), () if spent.processes else ("processes.max",))


def _uses(seen: Iterable[Seen], natures: Mapping[str, Nature], place: Place) -> tuple[dict[str, _Use], list[str]]:
    """The paths that a policy has to show beyond what is given, and what is to be said of others."""
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
    uses: Mapping[str, _Use], natures: Mapping[str, Nature], place: Place, leads: Mapping[str, str], left_out: list[str]
) -> list[Line]:
    wanted: dict[str, _Use] = {}
    hidden = False
    for path, use in uses.items():
        tree = _tree_for(path, natures, place)
        hidden = hidden or "/." in path[len(tree) :]
        if _is_too_much(tree, place):
            what = f"{path} ({_some(use.programs)})" if use.programs else path
            left_out.append(f"{what} would take {tree} as a whole, which is never proposed")
            continue
        kept = wanted.setdefault(tree, _Use({}))
        kept.programs.update(use.programs)
        kept.wrote = kept.wrote or use.wrote
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
        return [Line("files.read", False, "no file of the machine was used but those that programs come with")]
    if not hidden:
        left_out.append("files.allow_hidden = false, although nothing hidden was used: a view without it is a copy, made at every start")
    lines = [Line("files.allowed", tuple(items))]
    if not any(use.wrote for use in wanted.values()):
        lines.insert(0, Line("files.write", False, "nothing was written but scratch files"))
    return lines


def _tree_for(path: str, natures: Mapping[str, Nature], place: Place) -> str:
    if _covers(place.project, path):
        return place.project
    while natures.get(path) in (Nature.MADE, Nature.MISSING) and path != "/":
        path = _parent(path)
    return path


def _gathered(wanted: dict[str, _Use], place: Place, leads: Mapping[str, str]) -> dict[str, _Use]:
    """Several names in one directory as the directory; what lies in another that is wanted, as that."""
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


def _why_shown(tree: str, use: _Use, place: Place) -> str:
    what = "the project: " if tree == place.project else ""
    if not use.programs:
        return what + ("changed" if use.wrote else "it began here")
    if [*use.programs] == [NAMED]:
        return f"{what}named on the command line, and without it things end differently"
    return f"{what}{'read and written' if use.wrote else 'read'} by {_some(use.programs)}"


def _process_lines(programs: Programs, left_out: list[str]) -> list[Line]:
    lines: list[Line] = []
    if programs.unnameable:
        left_out.append(f"a list of programs: {programs.unnameable}")
    elif programs.names:
        lines.append(Line("processes.commands", programs.names))
    else:
        lines.append(Line("processes.commands", (), "no program was started but the shell that reads the line"))
    return lines


def _remarks(programs: Programs) -> tuple[str, ...]:
    """What people should know about a proposal before they take it. Of interpreters the notes speak."""
    starters = [asked.text for asked in programs.names if is_open(asked.text) and not interprets(asked.text)]
    return (*(f"{name} starts other programs, and does with them whatever the sandbox permits" for name in starters), *programs.notes)


def _is_given(path: str, place: Place) -> bool:
    return not _covers(place.project, path) and any(_covers(tree, path) for tree in place.given)


def _is_scratch(path: str, place: Place) -> bool:
    return not _covers(place.project, path) and any(_covers(tree, path) for tree in SCRATCH)


def _is_too_much(tree: str, place: Place) -> bool:
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
