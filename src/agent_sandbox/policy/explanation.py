"""Explain a policy in words, try it on a command, and find oddities in policy files: `policy explain`, `policy test`, `policy lint`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agent_sandbox._fast.values import dataclass, fields
from agent_sandbox.policy.action import RunCommand
from agent_sandbox.policy.decide import Verdict, decide, refused_program
from agent_sandbox.policy.files.document import Document
from agent_sandbox.policy.files.layers import Effective, written
from agent_sandbox.policy.files.settings import BY_KEY
from agent_sandbox.policy.hosts import covers as hosts_cover
from agent_sandbox.policy.hosts import is_private
from agent_sandbox.policy.intents import IntentReach
from agent_sandbox.policy.model import MIB, Policy
from agent_sandbox.policy.network import ANYBODY, WEB_PORTS, NetworkRules, Reach, is_address, leads, split_port
from agent_sandbox.policy.programs import covers, is_open
from agent_sandbox.policy.search_rules import SearchRules
from agent_sandbox.readers.shell.analyze import understand, understand_argv
from agent_sandbox.readers.shell.effects import Understanding
from agent_sandbox.readers.shell.tools.tables import TOOLS
from agent_sandbox.readers.shell.wrappers import BUILTINS

_LISTED = 12  # names in a sentence
_EVERY = 1 << 30


@dataclass(frozen=True)
class Tried:
    """The verdict of a policy on a command, and the analysis of the command."""

    verdict: Verdict
    understood: Understanding


@dataclass(frozen=True)
class Remark:
    """An oddity in a policy file: the key, the problem and the remedy."""

    key: str
    what: str
    remedy: str


def explain(found: Effective) -> tuple[str, ...]:
    """Describe the policy in sentences, most important first."""
    policy = found.policy
    return (
        f"policy {policy.name} ({policy.digest()[:12]})",
        *_of_files(policy),
        *_of_processes(policy),
        *_of_limits(policy),
        *_of_asking(policy),
        *_rest(found),
    )


def _of_files(policy: Policy) -> list[str]:
    if policy.image:
        return [
            f"files: those of the image {policy.image}; of the machine the project, or the paths that are named",
            *_of_machine(policy)[1:],
        ]
    return _of_machine(policy)


def _of_machine(policy: Policy) -> list[str]:
    files = policy.files
    if not (files.read or files.write):
        return ["files: none of the machine but the interpreter's own; /tmp is private and empty"]
    what = (
        "read and changed; changes are captured, never real"
        if files.read and files.write
        else "read"
        if files.read
        else "written, and are empty"
    )
    shown = ", ".join(map(written, files.allowed)) or "nothing"
    lines = [f"files: {shown} can be {what}"]
    lines += [f"files: not there: {', '.join(map(written, files.denied))}"] if files.denied else []
    lines += [f"files: secrets that are hidden: {len(files.masks)}"] if files.masks else []
    lines += ["files: names that begin with a dot are not shown"] if not files.allow_hidden else []
    return lines


def _of_processes(policy: Policy) -> list[str]:
    programs = policy.programs
    if not policy.processes:
        return ["processes: none can be started; threads can"]
    if not programs.restricts:
        return ["processes: every program of the view can be started"]
    named = [f"of {', '.join(group)}" for group in programs.groups]
    lines = [f"processes: only programs {' and '.join(named)} are there" if named else "processes: programs of the view can be started"]
    lines += [f"processes: not there: {', '.join(programs.denied)}"] if programs.denied else []
    lines += ["processes: no shell is there"] if not programs.shell else []
    lines += [f"processes: {program} runs what it is given: it can do whatever this sandbox permits" for program in programs.opens()]
    return lines


def _of_limits(policy: Policy) -> list[str]:
    units = {
        "memory_bytes": (MIB, "MiB of memory"),
        "disk_bytes": (MIB, "MiB on disk"),
        "wall_seconds": (1, "s"),
        "cpu_seconds": (1, "s of processor time"),
    }
    units |= {
        "processes": (1, "processes and threads"),
        "open_files": (1, "open files"),
        "output_bytes": (1, "bytes of each output"),
        "fuel": (1, "of fuel"),
    }
    given = [(field.name, getattr(policy.limits, field.name)) for field in fields(policy.limits) if field.name in units]
    words = [f"{value / units[name][0]:g} {units[name][1]}" for name, value in given if value is not None]
    return [f"limits: {', '.join(words)}"] if words else ["limits: none"]


def _of_asking(policy: Policy) -> list[str]:
    asks = policy.asks
    about = [*(f"{each!r}" for each in asks.commands), *(f"effects of the kind {each}" for each in asks.effects)]
    about += [f"the tool {each}" for each in asks.tools]
    about += ["every change of real files"] * asks.promotions + ["changes of protected kinds"] * asks.protected
    about += ["commands that cannot be analysed completely"] * bool(asks.opaque)
    lines = [f"approvals: required for {', '.join(about)}; isolation does not depend on this"]
    lines += [f"approvals: only those of {', '.join(asks.approvers) or 'nobody'} count"] if asks.approvers is not None else []
    lines += [f"approvals: an approval needs {' and '.join(asks.needs)}"] if asks.needs else []
    lifts = [f"approvals: a person may relax {', '.join(asks.elevate) or 'nothing'} for a time"] if asks.elevate is not None else []
    return [*(lines if about else ()), *lifts]


def _of_search(search: SearchRules) -> list[str]:
    if search.off:
        return ["network: what leaves is not searched for secrets and personal data"]
    said = [f"{action} {name}" for name, action in search.actions] + [f"at least {action} {name}" for name, action in search.floor]
    more = "".join((f"; {', '.join(said)}" if said else "", f"; with the rules of {_shortened(search.tables)}" if search.tables else ""))
    return [f"network: what leaves is searched for secrets and personal data{more}"]


def _of_network(network: NetworkRules, most: int = _LISTED) -> list[str]:
    if not network.outbound:
        return ["network: none"]
    lists = [_shortened(reach.hosts, most) for reach in network.reaches if reach.hosts is not None]
    what = f"{' and of '.join(lists)}" if lists else "every public host"
    ports = [", ".join(map(str, reach.ports or ())) for reach in network.reaches if reach.ports not in (None, WEB_PORTS)]
    where = f"the ports {' and of '.join(ports)}" if ports else "the ports 80 and 443"
    lines = [f"network: {what} can be reached through the egress, at {where}{', if it names no other' if lists else ''}"]
    lines += [f"network: not reached: {_shortened(network.denied, most)}"] if network.denied else []
    lines += [f"network: no more than: {_shortened(list(map(str, network.budgets)), most)}"] if network.budgets else []
    lines += _of_search(network.search)
    if network.intents:
        lines.append("network: by intent: only what the declared intent opens of this can be reached")
        lines += [line for intent in network.intents for line in _of_intent(intent)]
    for reach in network.reaches:
        rules = requests_in_words(reach)
        lines += [f"network: a person is asked for: {_shortened(reach.asked, most)}"] if reach.asked else []
        lines += [f"network: by a capability: {_shortened(reach.capable, most)}"] if reach.capable else []
        lines += [f"network: requests only as: {_shortened(rules, most)}"] if rules else []
        lines += [f"network: TLS passed on unread: {_shortened(reach.uninspected, most)}"] if reach.uninspected else []
        lines += [f"network: any bytes: {_shortened(reach.opaque, most)}"] if reach.opaque else []
        lines += [f"network: may lie on a private address: {_shortened(reach.private, most)}"] if reach.private else []
    return lines


def reachable(network: NetworkRules, *, doors: Sequence[int] = ()) -> tuple[str, ...]:
    """Describe what can be reached under network rules, for whoever decides on them. `doors` are the ports that runs have open already."""
    lines = [line for line in _of_network(network, most=_EVERY) if "network: what leaves is" not in line]
    entries = dict.fromkeys(split_port(each)[0] for reach in network.reaches for each in reach.hosts or ())
    addresses = [each for each in entries if is_address(each)]
    private = [each for each in entries if network.may_be_private(each) and not is_address(each)]
    lines += [f"network: {each} is a {'private' if is_private(each) else 'public'} address" for each in addresses]
    if not private:
        lines.append("network: names are reached at public addresses only")
    limited = [rule.host for reach in network.reaches for rule in reach.requests]
    if free := [each for each in entries if not hosts_cover(limited, each)]:
        lines.append(f"network: every request can be sent to {', '.join(free)}")
    if closed := [each for each in network.listened if doors and each not in doors]:
        lines.append(f"network: at port {', '.join(map(str, closed))} from the next run on, because the current ones have no door there")
    return tuple(dict.fromkeys(lines))


def _of_intent(intent: IntentReach) -> list[str]:
    lists = [_shortened(reach.hosts) for reach in intent.reaches if reach.hosts is not None]
    opens = f"opens {' and of '.join(lists)}" if all(reach.hosts != () for reach in intent.reaches) else "opens nothing"
    ports = [", ".join(map(str, reach.ports)) for reach in intent.reaches if reach.ports not in (None, WEB_PORTS) and reach.ports]
    where = f" at the ports {' and of '.join(ports)}" if ports else ""
    rules = [each for reach in intent.reaches for each in requests_in_words(reach)]
    what = f", for requests only as: {_shortened(rules)}" if rules else ""
    return [f"network: intent {intent.name!r} {opens}{where}{what}, {'always' if intent.always else f'for {intent.seconds:g} s'}"]


def requests_in_words(reach: Reach) -> list[str]:
    """Return the rules for requests of a reach, as they are written in a policy."""
    return [f"{','.join(each.methods) or '*'} {each.host}{' '.join(each.paths)}" for each in reach.requests]


def _shortened(names: Sequence[str], most: int = _LISTED) -> str:
    more = len(names) - most
    return f"{', '.join(names[:most]) or 'no host'}{f' and {more} more' if more > 0 else ''}"


def _rest(found: Effective) -> list[str]:
    lines = _of_network(found.policy.network)
    if found.validate or found.blocked:
        what = (*(("the default patterns",) if found.validate else ()), *found.blocked)
        lines.append(f"code: checked before it runs for {', '.join(what)}; an early warning; isolation does not depend on it")
    else:
        lines.append("code: not checked before it runs")
    return [*lines, f"requires: {', '.join(sorted(guarantee.value for guarantee in found.policy.requires))}"]


def try_command(policy: Policy, command: str | Sequence[str]) -> Tried:
    """Judge a command line, or a program with its arguments. Nothing is run."""
    if isinstance(command, str):
        understood = understand(command)
        verdict = refused_program(policy, understood.tools) or decide(policy, (), RunCommand(("bash", "-c", command)), now=0.0)
    else:
        understood = understand_argv(command)
        verdict = decide(policy, (), RunCommand.of(command), now=0.0)
    return Tried(verdict, understood)


def lint(layers: Iterable[Document], found: Effective | None = None) -> tuple[Remark, ...]:
    """Return the oddities in policy files: settings without effect, unknown tools, and settings that restrict less than they seem to."""
    remarks: list[Remark] = []
    for layer in layers:
        remarks += _contradictions(layer)
        remarks += _unreachable_intents(layer, found)
        remarks += _names(layer)
    if found is not None and found.policy.files.read and not found.policy.files.allowed:
        remarks.append(Remark("files.allowed", "the layers leave no file that may be read", "let them overlap"))
    if found is not None and any(not group for group in found.policy.programs.groups):
        remarks.append(
            Remark(
                "processes.commands",
                "the list is empty, so no program can be started but the shell that reads a command line",
                "write processes.allow = false if no command is to run at all",
            )
        )
    return tuple(remarks)


def _unreachable_intents(layer: Document, found: Effective | None) -> list[Remark]:
    """Return remarks about intents of a layer that open nothing."""
    if not layer.intents or found is None:
        return []
    network = found.policy.network
    if not network.outbound:
        return [Remark("intents", "have no effect: there is no network", "add network.outbound = true, or give --network")]
    known = {each.name: each for each in network.intents}
    remarks = []
    for each in layer.intents:
        if each.name not in known:
            what = f"{each.name!r} is left out: this file narrows intents, and names none"
            remarks.append(Remark("intents", what, "name it in your own policy file"))
        for entry in each.hosts or ():
            host, port = split_port(entry)
            if not host.startswith("*") and each.name in known and not leads(network.reaches, host, port, ANYBODY):
                what = f"{each.name!r} names {entry}, which the other rules do not allow"
                remarks.append(Remark("intents", what, "add it to network.hosts as well"))
    return remarks


def _contradictions(layer: Document) -> list[Remark]:
    remarks: list[Remark] = []
    if layer.get("files.read") is False and layer.get("files.write") is not True and layer.get("files.allowed"):
        remarks.append(Remark("files.allowed", "has no effect: files.read is false", "leave one of them out"))
    if layer.get("processes.allow") is False:
        without = ("processes.commands", "processes.shell", "processes.denied_commands")
        remarks += [Remark(key, "has no effect: processes.allow is false", "leave it out") for key in without if layer.get(key) is not None]
    asked = [key for key in _NETWORK if layer.get(key)]
    if asked and layer.get("network.outbound") is False:
        remarks += [Remark(key, "has no effect: network.outbound is false", "leave one of them out") for key in asked]
    elif asked and layer.get("network.outbound") is None and layer.get("extends") not in ("high", "medium"):
        what = "opens nothing by itself: it narrows a network that --network or --allow-network opens"
        remarks.append(Remark(asked[0], what, "add network.outbound = true, which opens one in your own policy file"))
    if layer.get("network.inbound"):
        remarks.append(Remark("network.inbound", "publishes no port: only the option --publish does", "leave it out"))
    if layer.get("network.localhost") is False:
        what = "has no effect: the programs of a sandbox always reach one another on a loopback of their own"
        remarks.append(Remark("network.localhost", what, "leave it out"))
    allowed, denied = layer.get("processes.commands", ()), layer.get("processes.denied_commands", ())
    remarks += [
        Remark("processes.commands", f"{name!r} is denied as well", "leave one of them out") for name in allowed if covers(denied, name)
    ]
    keys = [key for key, _ in layer.settings]
    return [*remarks, *(Remark(key, "is set to its default", "leave it out") for key in keys if _says_nothing(layer, key))]


def _says_nothing(layer: Document, key: str) -> bool:
    """Return whether a setting has no effect because it is true: a layer can only restrict, and true permits.

    The settings in `_TAKES_AWAY` are different: they restrict if they are true.
    """
    return layer.get(key) is True and key in BY_KEY and key not in _TAKES_AWAY


_NETWORK = (
    "network.hosts",
    "network.presets",
    "network.ask",
    "network.ports",
    "network.requests",
    "network.uninspected",
    "network.opaque",
    "network.private",
    "network.budgets",
)
_TAKES_AWAY = frozenset(
    {
        *("code.validate", "network.outbound", "network.inbound", "network.listed", "dlp.off"),
        *("approvals.promotions", "approvals.protected", "approvals.opaque"),
    }
)


def _names(layer: Document) -> list[Remark]:
    remarks: list[Remark] = []
    for name in layer.get("processes.commands", ()):
        if is_open(name):
            what = f"{name!r} runs what it is given, or starts other programs: it can do whatever the sandbox permits"
            remarks.append(Remark("processes.commands", what, "leave it out if only certain programs are meant"))
        elif name not in TOOLS and name not in BUILTINS and not any(character in name for character in "*?["):
            remarks.append(Remark("processes.commands", f"{name!r} is no tool that is known here", "check its spelling"))
    return remarks
