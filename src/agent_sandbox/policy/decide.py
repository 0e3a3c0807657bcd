"""Decide whether an action is allowed.

Pure on purpose: a decision depends only on its arguments. So the same question always has the same answer, and no fact can change between
reading and deciding. `engine.gate` acts on the verdict. A verdict refuses early and explains; the runtime is the security boundary.
"""

from __future__ import annotations

from agent_sandbox._fast.values import TYPE_CHECKING, assert_never, dataclass, field
from agent_sandbox.policy.action import (
    FILE_READS,
    FILE_WRITES,
    LANGUAGES,
    Action,
    CallTool,
    Connect,
    OpenNetwork,
    Promote,
    RunCode,
    RunCommand,
    Undo,
    UseFile,
)
from agent_sandbox.policy.model import SCRATCH, Policy
from agent_sandbox.policy.paths import ancestors
from agent_sandbox.policy.programs import SHELLS, covers, reads_a_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_MOST_LISTED = 12  # programs listed in a remedy
LARGEST_SOURCE = 16 << 20  # bytes of source, which is copied in memory several times; an agent's code is far smaller


@dataclass(frozen=True)
class Reason:
    """The reason for a verdict: the rule that decided, an explanation, and the remedy."""

    rule: str
    why: str
    remedy: str = ""


@dataclass(frozen=True)
class Allow:
    """The action is allowed. An approval for the whole run holds `until` a time; 0 is this action alone."""

    because: Reason
    until: float = 0.0


@dataclass(frozen=True)
class Deny:
    """The action is denied.

    `missing` is the pattern of the capability that would allow it; empty if none would. `program` is the program that must be allowed
    first; empty if allowing a program would not help.
    """

    because: Reason
    missing: str = ""
    program: str = ""


@dataclass(frozen=True)
class Ask:
    """The action is allowed if an authorised person approves it.

    `suggest` is the pattern of the capability to ask for. `details` is context for the approver: source, arguments, a diff. `wanted`
    returns whether somebody still waits for the answer; without it, somebody does.
    """

    because: Reason
    suggest: str
    details: str = ""
    wanted: Callable[[], bool] | None = field(default=None, compare=False, repr=False)


Verdict = Allow | Deny | Ask
Grants = tuple[()]  # grants beyond the policy: none yet


def decide(policy: Policy, grants: Grants, action: Action, *, now: float) -> Verdict:
    """Return the verdict on an action: total, deterministic, and Deny unless a rule allows it.

    Deny takes precedence over Ask, and Ask over Allow.
    """
    verdict = _ruled(policy, action)
    if (
        isinstance(action, Connect)
        and isinstance(verdict, Allow)
        and (action.data or policy.network.declarable().asks_for(action.host, action.port))
    ):
        return _asked_network(policy, action)  # also for a host of a capability: `engine.questions` asks no person for it
    if isinstance(verdict, Deny) or not (policy.asks.asks or isinstance(action, OpenNetwork)):
        return verdict
    return _asked(policy, action) or verdict


def _asked(policy: Policy, action: Action) -> Ask | None:
    from shlex import join  # few policies ask

    from agent_sandbox.policy.approval_rules import question_about
    from agent_sandbox.policy.tokens import spellings_of

    if (question := question_about(policy.asks, action)) is None:
        return None
    rule, why = question
    words = spellings_of(action)[0]
    # As a pattern, a word ending in * would cover other words: an agent's input must not be suggested as a broader grant.
    pattern = "" if any(word.endswith("*") for word in words) else join(words)
    remedy = granting(pattern) if pattern else "answer when it asks: agent-sandbox approve"
    return Ask(Reason(f"approvals.{rule}", f"the policy {policy.name!r} requires approval: {why}", remedy), pattern)


def _asked_network(policy: Policy, action: Connect) -> Ask:
    if action.data:
        why = f"the policy {policy.name!r} asks before data leaves: {action.data}, to {action.target}"
        return Ask(Reason("dlp.ask", why, "answer when it asks: agent-sandbox approve"), "")
    pattern = f"network {action.target}"
    why = f"the policy {policy.name!r} asks before {action.target} is reached"
    return Ask(Reason("network.ask", why, granting(pattern)), pattern)


def granting(pattern: str) -> str:
    """Return the `agent-sandbox grant` command that grants the actions of a pattern."""
    from shlex import quote

    return f"agent-sandbox grant {quote(pattern)} --for 10m"


def lifting(program: str) -> str:
    """Return the `agent-sandbox grant` command that allows a program for a time."""
    from shlex import quote

    return f"agent-sandbox grant --elevate --allow {quote(program)} --for 10m"


def _ruled(policy: Policy, action: Action) -> Allow | Deny:
    match action:
        case RunCode():
            return _place(policy, action) or refused_program(policy, action.programs) or _code(policy, action)
        case RunCommand():
            return _place(policy, action) or _command(policy, action)
        case Promote():
            return _promotion(policy, action)
        case Undo():
            return _writing(policy, action) or Allow(Reason("undo", f"the policy {policy.name!r} allows an undo"))
        case CallTool():
            return _tool(policy, action)
        case UseFile():
            return _file(policy, action)
        case OpenNetwork():
            return _opening(policy)
        case Connect():
            return _connection(policy, action)
        case _:
            assert_never(action)


def _opening(policy: Policy) -> Allow | Deny:
    """Return whether the network may be opened further at all. If so, somebody is always asked."""
    if not policy.network.outbound:
        return Deny(
            Reason("network", f"the policy {policy.name!r} allows no network", "open one before the run, with --network or network=")
        )
    if policy.asks.elevate is not None and "network" not in policy.asks.elevate:
        why = f"the policy {policy.name!r} does not let the network be opened further"
        return Deny(Reason("approvals.elevate", why, 'add "network" to approvals.elevate'))
    return Allow(Reason("network", f"the policy {policy.name!r} lets a person open the network further"))


def _tool(policy: Policy, action: CallTool) -> Allow | Deny:
    if action.tool not in policy.tools:
        why = f"the policy {policy.name!r} does not let the tool {action.tool!r} be called"
        return Deny(Reason("tool", why, "hand it over in tools, and do not deny it"))
    return Allow(Reason("tool", f"the policy {policy.name!r} lets the tool {action.tool!r} be called"))


def _file(policy: Policy, action: UseFile) -> Allow | Deny:
    """Refuse files that the sandbox hides or does not show, and changes that it may not make. What exists is for the view to say."""
    files, known = policy.files, (*FILE_READS, *FILE_WRITES)
    if action.operation not in known:
        return Deny(Reason("file", f"unknown operation on a file {action.operation!r}", f"use one of {', '.join(known)}"))
    if files.bars(action.path):
        return Deny(Reason("file", f"the policy {policy.name!r} hides {action.path!r}", "reveal it, or take it off the denied paths"))
    scratch = any(above in SCRATCH for above in ancestors(action.path))
    if not (scratch or files.reaches(action.path) or files.leads_to(action.path)):
        why = f"the policy {policy.name!r} does not show {action.path!r}"
        return Deny(Reason("file", why, f"allow the path, or use one in {SCRATCH[0]}"))
    if action.operation in FILE_WRITES and not (scratch or files.write):
        why = f"the policy {policy.name!r} allows no changes of files, so {action.path!r} cannot be changed"
        return Deny(Reason("file", why, f"set allow_file_write=True, or use a path in {SCRATCH[0]}"))
    return Allow(Reason("file", f"the policy {policy.name!r} lets files be used in its view"))


def _connection(policy: Policy, action: Connect) -> Allow | Deny:
    if why := policy.network.declarable().refusal(action.host, action.port):
        return Deny(Reason("network", why, "see: agent-sandbox policy explain"))
    return Allow(Reason("network", f"the policy {policy.name!r} lets {action.target} be reached"))


def _place(policy: Policy, action: RunCode | RunCommand) -> Deny | None:
    files = policy.files
    if action.cwd is None or action.cwd in SCRATCH or files.reaches(action.cwd) or files.leads_to(action.cwd):
        return None
    why = f"the policy {policy.name!r} does not show the working directory {action.cwd!r}"
    return Deny(Reason("cwd", why, "choose a directory inside what is allowed, or allow this one"))


def _code(policy: Policy, action: RunCode) -> Allow | Deny:
    if action.language not in LANGUAGES:
        return Deny(Reason("language", f"unknown language {action.language!r}", f"use one of {', '.join(LANGUAGES)}"))
    if action.language == "bash" and policy.programs.denies("bash"):
        return Deny(Reason("programs", f"the policy {policy.name!r} does not allow the program 'bash'", _permitting(policy, "bash")))
    if not 0 < action.size <= LARGEST_SOURCE:
        why = "there is no code to run" if action.size == 0 else f"the code has {action.size} bytes; at most {LARGEST_SOURCE} are taken"
        return Deny(Reason("code-size", why, "put large data into a file and let the code read it" if action.size else "pass some code"))
    return Allow(Reason("code", f"the policy {policy.name!r} lets code run in its view"))


def _command(policy: Policy, action: RunCommand) -> Allow | Deny:
    if not policy.processes:
        why = f"the policy {policy.name!r} allows no processes, so {action.argv[0]!r} cannot be started"
        return Deny(Reason("processes", why, "allow processes, or run code instead"))
    if policy.programs.restricts and (refusal := refused_program(policy, _started(action.argv, policy.programs.shell))):
        return refusal
    return Allow(Reason("command", f"the policy {policy.name!r} lets commands run in its view"))


def refused_program(policy: Policy, programs: Iterable[str]) -> Deny | None:
    """Return the refusal of the first program that may not be started, with the remedy; None if all may."""
    for name in programs:
        if not policy.processes:
            why = f"the policy {policy.name!r} allows no processes, so {name!r} cannot be started"
            return Deny(Reason("processes", why, "allow processes, or run code instead"))
        if not policy.programs.permits(name):
            why = f"the policy {policy.name!r} does not allow the program {name!r}"
            own = name.rpartition("/")[2]
            return Deny(Reason("programs", why, _permitting(policy, name)), program=own if _is_plain(own) else "")
    return None


def _started(argv: tuple[str, ...], shell: bool) -> tuple[str, ...]:
    """Return the programs that a command starts, as far as its analysis shows.

    If `shell` is true, the shell that reads a command line is left out, and only the programs of that line are returned.
    """
    from agent_sandbox.readers.shell.analyze import understand, understand_argv  # only needed if programs are restricted

    if shell and reads_a_line(argv):
        return understand(argv[2], effects=False).tools
    return understand_argv(argv, effects=False).tools or argv[:1]


def _permitting(policy: Policy, program: str) -> str:
    name, rules = program.rpartition("/")[2], policy.programs
    if name in SHELLS and not rules.shell:
        return "allow a shell (allow_shell=True); it can run whatever the sandbox permits"
    if not _is_plain(name):
        return "start a program by a plain name, which can be allowed"
    if covers(rules.denied, name):
        return f"take {name} off the list of denied commands"
    listed = tuple(dict.fromkeys((*(each for group in rules.groups for each in group), name)))
    if len(listed) > _MOST_LISTED:
        return f"to allow it: add {name} to the commands that are allowed"
    return f"to allow it: --allow {','.join(listed)}"


def _is_plain(name: str) -> bool:
    """Return whether a program's name has no special characters, so that a person can safely copy it from a hint.

    The name comes from an agent. It must stand for itself in a shell, in a comma-separated list, and as a pattern, where `*` would allow
    everything.
    """
    return name.replace("-", "").replace(".", "").replace("_", "").replace("+", "").isalnum() and name.isascii() and name[0] != "-"


def _promotion(policy: Policy, action: Promote) -> Allow | Deny:
    if refusal := _writing(policy, action):
        return refusal
    if missing := sorted({*action.protected} - {*action.approved}):
        why = f"protected changes need approval: {', '.join(missing)}"
        return Deny(Reason("protected", why, f"review them, then add --approve {','.join(missing)}; or leave them out with --skip"))
    return Allow(Reason("promotion", f"the policy {policy.name!r} allows this promotion"))


def _writing(policy: Policy, action: Promote | Undo) -> Deny | None:
    """Return a refusal if the sandbox may not write, and so has nothing to promote, or does not show the tree; otherwise None."""
    if not policy.files.write:
        return Deny(Reason("promotion", f"the policy {policy.name!r} allows no changes of files", "use a sandbox that may write"))
    if not (policy.files.reaches(action.root) or action.root == "/"):
        why = f"{action.root!r} is outside what the policy {policy.name!r} shows"
        return Deny(Reason("promotion", why, "promote to a directory that the sandbox can see"))
    return None
