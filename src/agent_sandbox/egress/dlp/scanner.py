"""The scanner: finds secrets and personal data in a stream of bytes, whatever the sizes of the pieces in which it arrives.

The stream is looked at in windows that lie at fixed places and overlap, so that the same bytes give the same findings however they are cut,
and memory is bounded. In each window, the rules are tried on the text, and on the texts that are hidden in it by encodings, to a bounded
depth. What cannot be looked through within the bounds is a finding too: it is held, never skipped.

A finding names the rule and the place. It holds a keyed digest, by which equal values can be told, and never the value.
"""

from __future__ import annotations

import hmac
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from agent_sandbox.egress.dlp.compression import CERTAIN, CODINGS, Allowance, Carver, Overfull, Undecodable
from agent_sandbox.egress.dlp.encodings import Hidden, hidden_in, signs_in, signs_of_each
from agent_sandbox.egress.dlp.own_secrets import OwnSecrets
from agent_sandbox.egress.dlp.rules import LONGEST, RuleMatcher, SearchRule

STEP = 128 << 10  # bytes between the beginnings of two windows
BEHIND, AHEAD = 256, 2 * LONGEST  # bytes of a window that belong to the windows before and after it as well
BLOCK = 64 << 10  # bytes of a compressed stream that are decompressed together
DEEPEST = 3  # layers of encoding that are undone
MOST_DECODED = 4 << 20  # bytes decoded out of one window

UNREADABLE = SearchRule("unreadable", "data that the search could not look through", "", action="block")


@dataclass(frozen=True, order=True)
class Finding:
    """Something in a stream that a rule describes: where, under which encodings, and the keyed digest of its value."""

    start: int
    end: int
    rule: str
    kind: str
    action: str
    layers: tuple[str, ...]
    digest: str


@dataclass(frozen=True)
class Search:
    """The rules and the secrets of the user that scanners look for. `key` makes the digests of findings useless to anybody else."""

    matcher: RuleMatcher
    own: OwnSecrets
    key: bytes

    @classmethod
    def of(cls, rules: Iterable[SearchRule], own: OwnSecrets, key: bytes) -> Search:
        """Return the search for these rules and secrets."""
        return cls(RuleMatcher(tuple(rules)), own, key)


class Scanner:
    """The search through one stream. Feed it pieces, then `finish` it.

    What is compressed in it, by its signs or by its `coding` (the value of Content-Encoding), is decompressed, and searched by a scanner of
    its own. The places of what that one finds are those in the decompressed data; `layers` then begins with "compressed".
    """

    def __init__(self, search: Search, coding: str = "", *, depth: int = 0, budget: Allowance | None = None) -> None:
        self._search = search
        self._held = bytearray()  # the bytes from `_begin` on
        self._begin = 0
        self._place = 0  # everything before it has been looked at
        self._seen: set[tuple[str, str]] = set()
        self._depth = depth
        self._inside = _Inside(search, coding, depth, budget)

    def feed(self, piece: bytes) -> list[Finding]:
        """Take the next bytes of the stream, and return what was found in the windows that are now complete."""
        found = self._fresh(self._inside.feed(piece))
        for low in range(0, len(piece), STEP):  # no more of it is held than a window needs, however long it is
            self._held += piece[low : low + STEP]
            while self._begin + len(self._held) >= self._place + STEP + AHEAD:
                found += self._look(self._place + STEP, self._place + STEP + AHEAD, last=False)
                self._place += STEP
                if (spent := self._place - BEHIND - self._begin) > 0:
                    del self._held[:spent]
                    self._begin += spent
        return found

    def finish(self) -> list[Finding]:
        """Return what was found in the rest of the stream."""
        found = self._fresh(self._inside.finish())
        end = self._begin + len(self._held)
        return found + self._look(end, end, last=True)

    @property
    def cleared(self) -> int:
        """The number of bytes of the stream in which nothing more can be found."""
        return min(max(0, self._place - LONGEST), self._inside.cleared)

    def _fresh(self, findings: Iterable[Finding]) -> list[Finding]:
        """Return the findings whose value was not found before, and remember them."""
        fresh = []
        for finding in findings:
            if (finding.rule, finding.digest) not in self._seen:
                self._seen.add((finding.rule, finding.digest))
                fresh.append(finding)
        return fresh

    def _look(self, until: int, end: int, *, last: bool) -> list[Finding]:
        """Search one window. Return what begins in it before `until`, and not in the window before it."""
        with memoryview(self._held) as held:
            text = bytes(held[: end - self._begin])
        found: list[Finding] = []
        for finding in _Window(self._search, text, deepest=DEEPEST - self._depth).findings():
            start, stop = finding.start + self._begin, finding.end + self._begin
            if self._place <= start < until or (last and start == until) or (finding.layers and stop > self._place and start < until):
                found.append(replace(finding, start=start, end=stop))
        return sorted(self._fresh(found))


class _Inside:
    """The compressed contents of a stream, searched as they arrive: all of it if `coding` says so, else what has signs of compression."""

    def __init__(self, search: Search, coding: str, depth: int, budget: Allowance | None) -> None:
        *rest, coding = [each.strip().lower().removeprefix("x-") for each in coding.split(",") if each.strip() != "identity"] or [""]
        self._search = search
        self._inner_coding, self._depth = ", ".join(rest), depth
        self._budget = budget or Allowance()
        self._held = bytearray()
        self._taken = self._given = self._pending = 0
        self._marks: deque[tuple[int, int]] = deque()  # how much had come out when how much had been taken in
        self._cleared = 0
        self._unreadable = depth == DEEPEST or (coding not in CODINGS and coding != "")
        self._carver = Carver(self._budget, "" if self._unreadable else coding)
        self._scanner: Scanner | None = None
        self._said = bool(coding) and self._unreadable

    def feed(self, piece: bytes) -> list[Finding]:
        """Take bytes. Blocks of fixed size are decompressed, so that the same bytes give the same findings however they are cut."""
        found: list[Finding] = []
        place = 0
        while len(self._held) + len(piece) - place >= BLOCK:
            until = place + BLOCK - len(self._held)
            found += self._take(bytes(self._held) + piece[place:until])
            self._held.clear()
            place = until
            if self._taken % STEP == 0 and not self._carver.is_open:
                found += self._end()
        self._held += piece[place:]
        return found

    def finish(self) -> list[Finding]:
        """Take the rest."""
        return self._take(bytes(self._held)) + self._end()

    @property
    def cleared(self) -> int:
        """The number of bytes taken of which all that came out is cleared."""
        reached = self._given if self._scanner is None else self._scanner.cleared + self._given - self._pending
        while self._marks and self._marks[0][0] <= reached:
            self._cleared = self._marks.popleft()[1]
        return self._cleared

    def _deeper(self) -> Scanner:
        return Scanner(self._search, self._inner_coding, depth=self._depth + 1, budget=self._budget)

    def _take(self, block: bytes) -> list[Finding]:
        self._taken += len(block)
        if not self._depth:
            self._budget.earn(len(block))
        found = [] if self._unreadable else self._open(block)
        if self._unreadable and (self._said or any(sign in block for sign in CERTAIN)):
            found.append(self._held_back())
        self._marks.append((self._given, self._taken))
        return found

    def _open(self, block: bytes) -> list[Finding]:
        found: list[Finding] = []
        try:
            for piece in self._carver.feed(block):
                if self._scanner is None:
                    self._scanner, self._pending = self._deeper(), 0
                self._given += len(piece)
                self._pending += len(piece)
                found += self._scanner.feed(piece)
        except (Overfull, Undecodable):  # more than is looked through, or not what it was declared to be
            self._unreadable = self._said = True
            return self._below(found) + self._end()
        return self._below(found)

    def _end(self) -> list[Finding]:
        """Search what has come out to its end, so that the bytes it came from are cleared."""
        scanner, self._scanner = self._scanner, None
        return [] if scanner is None else self._below(scanner.finish())

    def _held_back(self) -> Finding:
        return finding_of(self._search, UNREADABLE, 0, 0, ("compressed",), b"")

    def _below(self, findings: Iterable[Finding]) -> list[Finding]:
        return [replace(finding, layers=("compressed", *finding.layers)) for finding in findings]


@dataclass(frozen=True)
class _Window:
    """One window of a stream, and what is found in it at every depth."""

    search: Search
    text: bytes
    deepest: int

    def findings(self) -> Iterator[Finding]:
        texts = [Hidden(self.text, "", 0, len(self.text))]
        spent = 0
        layers: list[tuple[str, ...]] = [()]
        for depth in range(self.deepest + 1):
            joined = b"\n".join([text.text for text in texts]) if depth else self.text  # several texts are searched at once
            begins = list(accumulate((len(text.text) + 1 for text in texts), initial=0))
            yield from self._in_texts(joined, begins, texts, layers, depth)
            if depth == self.deepest:
                return
            signs = signs_of_each(signs_in(joined), begins)
            deeper, below = [], []
            for number, (text, above) in enumerate(zip(texts, layers, strict=True)):
                compressed = depth > 0 and text.of_bytes and not text.text.isascii()  # the stream's own is opened as it arrives
                if number not in signs and not compressed:
                    continue
                try:
                    for each in hidden_in(text.text, signs.get(number, {}), compressed=compressed):
                        spent += len(each.text)
                        if spent > MOST_DECODED:
                            raise Overfull
                        deeper.append(each if depth == 0 else Hidden(each.text, each.by, text.start, text.end, each.of_bytes))
                        below.append((*above, each.by))
                except Overfull:
                    yield finding_of(self.search, UNREADABLE, text.start, text.end, (*above, "compressed"), b"")
                    if spent > MOST_DECODED:
                        return
            texts, layers = deeper, below
            if not texts:
                return

    def _in_texts(
        self, joined: bytes, begins: list[int], texts: list[Hidden], layers: list[tuple[str, ...]], depth: int
    ) -> Iterator[Finding]:
        """Search joined texts. Each match is told its text by its place."""
        for start, end, rule, way in self._matches(joined, depth):
            number = bisect_right(begins, start) - 1
            text = texts[number]
            outer = (start, end) if depth == 0 else (text.start, text.end)
            yield finding_of(self.search, rule, *outer, (*layers[number], *way), joined[start:end])

    def _matches(self, text: bytes, depth: int) -> Iterator[tuple[int, int, SearchRule, tuple[str, ...]]]:
        for match in self.search.matcher.matches(text, turned=depth < 2):
            yield match.start, match.end, match.rule, (match.way,) if match.way else ()
        for start, end, rule in self.search.own.matches(text):
            yield start, end, rule, ()


def finding_of(search: Search, rule: SearchRule, start: int, end: int, layers: tuple[str, ...], value: bytes) -> Finding:
    """Return the finding that a rule describes a value."""
    digest = hmac.digest(search.key, rule.id.encode() + b"\0" + value, "sha256").hex()[:32]
    return Finding(start, end, rule.id, rule.kind, rule.action, layers, digest)
