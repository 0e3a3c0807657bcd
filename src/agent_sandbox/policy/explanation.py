"""Explain a policy in words, try it on a command, and find oddities in policy files: `policy explain`, `policy test`, `policy lint`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agent_sandbox._fast.values import dataclass, fields
from agent_sandbox.policy.action import RunCommand
from agent_sandbox.policy.decide import Verdict, decide, refused_program
from agent_sandbox.policy.files.document import Document
from agent_sandbox.policy.files.layers import Effective, written
from agent_sandbox.policy.files.settings import BY_KEY
from agent_sandbox.policy.model import MIB, Policy
from agent_sandbox.policy.network import WEB_PORTS, NetworkRules
from agent_sandbox.policy.programs import covers, is_open
from agent_sandbox.policy.search_rules import SearchRules
from agent_sandbox.readers.shell.analyze import understand, understand_argv
from agent_sandbox.readers.shell.effects import Understanding
from agent_sandbox.readers.shell.tools.tables import TOOLS
from agent_sandbox.readers.shell.wrappers import BUILTINS

_LISTED = 12  # names in a sentence


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


def _of_network(network: NetworkRules) -> list[str]:
    if not network.outbound:
        return ["network: none"]
    lists = [_shortened(reach.hosts) for reach in network.reaches if reach.hosts is not None]
    what = f"{' and of '.join(lists)}" if lists else "every public host"
    ports = [", ".join(map(str, reach.ports or ())) for reach in network.reaches if reach.ports not in (None, WEB_PORTS)]
    where = f"the ports {' and of '.join(ports)}" if ports else "the ports 80 and 443"
    lines = [f"network: {what} can be reached through the egress, at {where}{', if it names no other' if lists else ''}"]
    lines += [f"network: not reached: {_shortened(network.denied)}"] if network.denied else []
    lines += _of_search(network.search)
    for reach in network.reaches:
        rules = [f"{','.join(each.methods) or '*'} {each.host}{' '.join(each.paths)}" for each in reach.requests]
        lines += [f"network: requests only as: {_shortened(rules)}"] if rules else []
        lines += [f"network: TLS passed on unread: {_shortened(reach.uninspected)}"] if reach.uninspected else []
        lines += [f"network: any bytes: {_shortened(reach.opaque)}"] if reach.opaque else []
        lines += [f"network: may lie on a private address: {_shortened(reach.private)}"] if reach.private else []
    return lines


def _shortened(names: Sequence[str]) -> str:
    more = len(names) - _LISTED
    return f"{', '.join(names[:_LISTED]) or 'no list'}{f' and {more} more' if more > 0 else ''}"


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
        remarks.append(Remark("network.inbound", "has no effect: a sandbox accepts no connections from outside", "leave it out"))
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
    "network.ports",
    "network.requests",
    "network.uninspected",
    "network.opaque",
    "network.private",
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
