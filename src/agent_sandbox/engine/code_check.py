"""Check code before it runs. If the code uses more than the sandbox permits, refuse it through the gate.

The check is an early warning in words. It is never the wall: a program can hide its deeds from a reader of text, but the sandbox itself
still holds it. The check comes before every run and turn, so that every refusal is in the ledger.
"""

from __future__ import annotations

from collections.abc import Mapping

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.work import Code, Command
from agent_sandbox.policy.action import LANGUAGES, Action
from agent_sandbox.policy.decide import LARGEST_SOURCE, Reason
from agent_sandbox.policy.programs import reads_a_line

if TYPE_CHECKING:
    from agent_sandbox.policy.code.patterns import Rule, Validation
    from agent_sandbox.policy.model import Policy

MOST_TOLD = 3  # issues in a message; the first ones are enough to see what is meant


@dataclass(frozen=True)
class Words:
    """Hints for a user, in the terms of one interface: how to permit a pattern, change the list of patterns, or turn the check off."""

    permissions: Mapping[str, str]
    the_list: str
    all_of_it: str


IN_A_PROGRAM = Words(
    {
        "files": "allow_file_read=True or allow_file_write=True",
        "processes": "allow_subprocess=True",
        "shell": "allow_shell=True",
        "network": 'allow_network=True or network=["api.example.com"]',
    },
    "blocked_patterns without it",
    "validate_code=False, which turns off this early warning, never the sandbox",
)
IN_A_FILE = Words(
    {
        "files": "files.read or files.write in the policy files",
        "processes": "processes.allow in the policy files",
        "shell": "processes.shell in the policy files",
        "network": "--network HOST or --allow-network",
    },
    "a policy file without it in code.blocked, or without code.validate",
    "policy files without [code], which is an early warning, never the sandbox",
)


@dataclass(frozen=True)
class EarlyLook:
    """The early check of code, and its rules. `rules`, if given, replace the default rules; `more` are rules that no permission lifts."""

    rules: tuple[Rule | str, ...] | None = None
    more: tuple[str, ...] = ()
    words: Words = IN_A_PROGRAM

    def check(self, gate: Gate, what: Code | Command, action: Action, policy: Policy) -> None:
        """Record a refusal and raise `Denied` for code with issues under this policy. Code that cannot run at all is left to the gate."""
        if (reason := self.against(policy, what)) is not None:
            gate.refuse(action, reason)

    def against(self, policy: Policy, what: Code | Command) -> Reason | None:
        """Return the reason why the code may not run under this policy; None if it has no issues."""
        validation = self.issues(policy, what)
        return None if validation is None or validation.valid else self._reason(validation, _barred(policy, what))

    def issues(self, policy: Policy, what: Code | Command) -> Validation | None:
        """Return the issues of the code under this policy. None for a command without code, and for code that cannot run at all."""
        if isinstance(what, Command):
            if not reads_a_line(what.argv):
                return None
            what = Code("bash", what.argv[2])
        if what.language not in LANGUAGES or not 0 < len(what.source) <= LARGEST_SOURCE:
            return None
        from agent_sandbox.policy.code.patterns import CodeGrant, granted
        from agent_sandbox.policy.code.validate import validate  # slow to load, and most runs of the command line are not checked

        # Code that names a host beyond the policy's is warned of as if there were no network.
        grants = granted(policy) - ({CodeGrant.NETWORK} if _barred(policy, what) else frozenset())
        return validate(what.source, what.language, grants=grants, rules=self.rules, more=self.more)

    def _reason(self, validation: Validation, barred: tuple[str, ...]) -> Reason:
        told = "; ".join(f"line {issue.line}: {issue.tried or issue.pattern} {issue.reason}" for issue in validation.issues[:MOST_TOLD])
        rest = len(validation.issues) - MOST_TOLD
        told += f"; and {rest} more" if rest > 0 else ""
        told += f"; the policy does not allow {', '.join(barred[:MOST_TOLD])}" if barred else ""
        why = f"the code uses something that is not permitted: {told}"
        return Reason("code", why, f"change the code, or permit it: {'; '.join(self._lifting(validation))}; or {self.words.all_of_it}")

    def _lifting(self, validation: Validation) -> list[str]:
        ways: dict[str, list[str]] = {}
        for issue in validation.issues[:MOST_TOLD]:
            grants = [self.words.permissions[each.value] for each in sorted(issue.granted_by, key=lambda grant: grant.value)]
            ways.setdefault(" and ".join(grants) or self.words.the_list, []).append((grants and issue.tried) or issue.pattern)
        return [f"{', '.join(patterns)} by {way}" for way, patterns in ways.items()]


def _barred(policy: Policy, what: Code | Command) -> tuple[str, ...]:
    """Return the hosts that the code names and that the policy's network does not reach; empty without a network."""
    if not policy.network.outbound:
        return ()
    from agent_sandbox.policy.code.validate import barred_hosts  # as above

    return barred_hosts(what.source if isinstance(what, Code) else what.argv[-1], policy.network.widest())
