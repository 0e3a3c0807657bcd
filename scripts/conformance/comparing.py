"""What came out differently inside, and whose doing it is. Pure: outcomes in, differences out.

A test that passes natively and not inside has one of four explanations, each of which needs its proof:
- it skips itself, or is not made, where something is missing: it says what;
- it is a test of an older Python: it fails on a newer native one as well, or what changed is known and written here;
- it is the interpreter inside: it ends in the same way under its maker's own host, with none of ours around it;
- it is ours. There must be none of these.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from scripts.conformance.running import Outcome, Outcomes

CHANGED = "changed since"
ABSENT = Outcome("absent", "it is not made inside")

# What is known of failures that a newer interpreter of this machine cannot show to be ones of age. The first pattern in the message counts.
KNOWN: Mapping[str, str] = {
    r"cannot pickle '(itertools\.)?\w+' object|has no attribute '__setstate__'|state is not a dictionary": (
        f"{CHANGED}: iterators of itertools are no longer copied or pickled"
    ),
    r"No module named 'sre_|PatternError not raised by compile": f"{CHANGED}: what was deprecated in re is gone",
    r"re\.Match object; span=\(0, 0\), match=''> is not None": f"{CHANGED}: \\B matches the empty string",
    r"must be a unicode character|must be a string, not": f"{CHANGED}: the messages of csv say more",
    r"frozendict|'MISSING_TYPE object'|int\|None=None|'typing\.Any'": f"{CHANGED}: how dataclasses describe themselves",
    r"_strptime_datetime|_kernel_invcdfs": f"{CHANGED}: a private name",
    r"'wb\+' != 'rb\+'": f"{CHANGED}: the mode of a file says how it was opened",
    r"'ExecError'|'show_flag_values'": f"{CHANGED}: other public names",
    r"acos\(INF\)": f"{CHANGED}: the messages of math say more",
    r"scanstring\(\) argument 1 must be str": f"{CHANGED}: another message",
    r"unexpected keyword argument 'newarg'": f"{CHANGED}: map() and others refuse keywords in a subclass",
    r"ctypes is unavailable": "no native code inside, so no ctypes",
    r"too large to convert to C int": "C's long has 32 bits inside",
    r"No module named '_testcapi'": "CPython's own test modules are not inside",
}


class Difference(NamedTuple):
    """One test that passes natively and not inside. `elsewhere` is how it ends under the maker's host, `newer` on a newer native Python."""

    test: str
    inside: Outcome
    elsewhere: Outcome
    newer: Outcome | None

    @property
    def ours(self) -> bool:
        """Whether it ends otherwise with none of ours around it."""
        return self.inside.how != self.elsewhere.how

    @property
    def old(self) -> bool:
        """Whether a newer Python shows that the test is one of an older."""
        return self.inside.how in ("failed", "absent") and self.newer is not None and self.newer.how != "passed"

    @property
    def reason(self) -> str:
        """Why, as far as it is known."""
        if self.ours:
            return f"OURS: under its maker's host it has {self.elsewhere.how}"
        if self.inside.how == "absent" and ".test_decimal." in self.test:
            return "no _decimal, the implementation in C, inside: decimal is the one in Python"
        if self.inside.how in ("skipped", "absent"):
            return self.inside.why.strip()
        known = next((why for pattern, why in KNOWN.items() if re.search(pattern, self.inside.why, re.DOTALL)), None)
        return known or ("a test of an older Python" if self.old else "not explained; the same under its maker's host")


class Compared(NamedTuple):
    """One module: its tests natively, and those that came out differently inside."""

    module: str
    natively: Outcomes
    differences: tuple[Difference, ...]

    @property
    def passed(self) -> int:
        """Natively."""
        return sum(outcome.how == "passed" for outcome in self.natively.values())


def differing(natively: Outcomes, inside: Outcomes) -> list[str]:
    """The tests that pass natively, and not inside."""
    return [test for test, outcome in natively.items() if outcome.how == "passed" and inside.get(test, ABSENT).how != "passed"]


def compared(module: str, natively: Outcomes, inside: Outcomes, elsewhere: Outcomes, newer: Outcomes | None) -> Compared:
    """Put side by side what each of the four came to."""
    found = (
        Difference(test, inside.get(test, ABSENT), elsewhere.get(test, ABSENT), None if newer is None else newer.get(test, ABSENT))
        for test in differing(natively, inside)
    )
    return Compared(module, natively, tuple(found))
