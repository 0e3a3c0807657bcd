"""The actions of the search for secrets and personal data, as far as policies decide on them.

A person may turn the search off or make it milder; another layer of a policy only makes it stricter. The user's own secrets, and what
cannot be looked through, are always refused.
"""

from __future__ import annotations

from agent_sandbox._fast.values import dataclass, replace
from agent_sandbox.errors import PolicyError

KINDS = ("secret", "personal")
ALERT, REDACT, ASK, BLOCK = ACTIONS = ("alert", "redact", "ask", "block")  # from the mildest to the strictest


@dataclass(frozen=True)
class SearchRules:
    """Actions for rules of the search, by their ids or by a kind.

    `actions` replace those of the tables of rules, and `floor` are the mildest that may be. `tables` are paths of the user's own tables.
    """

    off: bool = False
    actions: tuple[tuple[str, str], ...] = ()
    floor: tuple[tuple[str, str], ...] = ()
    tables: tuple[str, ...] = ()

    def action(self, rule: str, kind: str, own: str) -> str:
        """Return the action for a rule of a kind, whose table says `own`."""
        said = dict(self.actions)
        chosen = said.get(rule) or said.get(kind) or own
        return max([chosen, *(action for name, action in self.floor if name in (rule, kind))], key=ACTIONS.index)

    @property
    def asks(self) -> bool:
        """Whether a person may be asked about something that was found. A user's own table may say so as well."""
        return not self.off and (bool(self.tables) or any(action == ASK for _, action in (*self.actions, *self.floor)))

    def narrowed(self, other: SearchRules) -> SearchRules:
        """Return rules that are at least as strict as the floors of both. The other ones turn nothing off."""
        return replace(self, floor=tuple(dict.fromkeys((*self.floor, *other.floor)))) if other.floor else self

    def check_names(self, known: frozenset[str]) -> None:
        """Raise `PolicyError` if an action is for a rule that is not among the known ones."""
        for name, _ in (*self.actions, *self.floor):
            if name not in known and name not in KINDS:
                raise PolicyError(f"dlp: there is no rule {name!r}", hint=f"name a rule by its id, or a kind: {', '.join(KINDS)}")
