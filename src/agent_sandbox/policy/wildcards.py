"""Wildcards: one path component into tokens, and tokens against a text, in time proportional to both.

Not `re`: names come from guests, and a pattern such as `*a*a*a*b` would make a backtracking matcher work for minutes on a name made for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

from agent_sandbox.values import dataclass


class Wild(Enum):
    """Tokens that stand for more than one text."""

    ANY = "*"  # any characters, also none, also slashes
    ONE = "?"  # one character that is no slash
    MAYBE_DIRECTORIES = "/**"  # nothing at all, or a slash; in the second case the ANY behind it takes the rest


@dataclass(frozen=True)
class OneOf:
    """One character within any of the ranges, or, negated, in none. Never a slash."""

    ranges: tuple[tuple[str, str], ...]
    negated: bool

    def takes(self, character: str) -> bool:
        """Whether it stands for this character."""
        inside = any(low <= character <= high for low, high in self.ranges)
        return character != "/" and inside != self.negated


Token = str | Wild | OneOf  # a str is one literal character


def scan(component: str) -> list[Token]:
    """The tokens of one path component. Raises `ValueError(reason, remedy)` for what cannot be understood."""
    tokens: list[Token] = []
    position = 0
    while position < len(component):
        character = component[position]
        position += 1
        if character == "*":
            if not tokens or tokens[-1] is not Wild.ANY:
                tokens.append(Wild.ANY)
        elif character == "?":
            tokens.append(Wild.ONE)
        elif character == "[":
            token, position = _bracket(component, position)
            tokens.append(token)
        elif character == "\\":
            raise ValueError(
                "holds a backslash, which some programs read as an escape and others as a character", "write [\\] for a backslash"
            )
        else:
            tokens.append(character)
    return tokens


def literal(tokens: Sequence[Token]) -> str | None:
    """The text, when the tokens hold no wildcard; else None."""
    return "".join(token for token in tokens if isinstance(token, str)) if all(isinstance(token, str) for token in tokens) else None


def spans(tokens: Sequence[Token], text: str) -> bool:
    """Whether the tokens match the text, or a directory above it: a prefix that ends before a slash."""
    states = _reached({0}, tokens)
    for character in text:
        if character == "/" and len(tokens) in states:
            return True
        states = _reached(_stepped(states, tokens, character), tokens)
        if not states:
            return False
    return len(tokens) in states


def _stepped(states: Iterable[int], tokens: Sequence[Token], character: str) -> set[int]:
    after = set()
    for state in states:
        token = tokens[state] if state < len(tokens) else None
        if token is Wild.ANY:
            after.add(state)
        elif token is Wild.MAYBE_DIRECTORIES:
            if character == "/":
                after.add(state + 1)
        elif token == character or (token is Wild.ONE and character != "/") or (isinstance(token, OneOf) and token.takes(character)):
            after.add(state + 1)
    return after


def _reached(states: set[int], tokens: Sequence[Token]) -> set[int]:
    """With the states that follow without a character: past an ANY, or past a MAYBE_DIRECTORIES and its ANY."""
    waiting = list(states)
    while waiting:
        state = waiting.pop()
        token = tokens[state] if state < len(tokens) else None
        onward = state + 1 if token is Wild.ANY else state + 2 if token is Wild.MAYBE_DIRECTORIES else state
        if onward not in states:
            states.add(onward)
            waiting.append(onward)
    return states


def _bracket(component: str, start: int) -> tuple[Token, int]:
    """The token of `[…]`, and where it ends. `start` is behind the opening bracket."""
    negated = component[start : start + 1] == "!"
    first = start + negated
    end = component.find("]", first + 1)  # a ] in first place is itself a member
    if end < 0:
        raise ValueError("holds a '[' that is not closed", "write [[] for a bracket")
    members = component[first:end]
    if len(members) == 1 and not negated:
        return members, end + 1
    if members.startswith("^"):
        raise ValueError("holds [^…], which shells and fnmatch read differently", "write [!…] for all but these")
    ranges = []
    while members:
        if len(members) >= 3 and members[1] == "-":
            low, high, members = members[0], members[2], members[3:]
        else:
            low, high, members = members[0], members[0], members[1:]
        if low > high:
            raise ValueError(f"holds the empty range {low}-{high}", f"write {high}-{low}")
        ranges.append((low, high))
    return OneOf(tuple(ranges), negated), end + 1
