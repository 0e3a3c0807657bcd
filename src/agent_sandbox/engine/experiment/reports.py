"""Read how many tests passed and failed from what a test runner printed: pytest, unittest, Jest, `go test`, TAP and JUnit XML.

The output is the guest's: an attempt can print whatever it likes, so the numbers are claims, and nothing but the order of attempts whose
check passed depends on them. Reading is bounded: only the end of long output is read, numbers have at most nine digits, every pattern is
matched against one line, and XML with a document type is refused, because it could define entities.
"""

from __future__ import annotations

import re

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_BYTES = 1 << 20  # of the output that is read, from its end
MOST_XML_BYTES = 8 << 20
_LONGEST_LINE = 2000  # characters that are matched
_DEEPEST = 64  # nested elements
_COLOURS = re.compile(r"\x1b\[[0-9;]{0,20}[A-Za-z]")
_PYTEST = re.compile(r"(?:=+ )?((?:\d{1,9} [a-z]+(?:, )?)+) in \d[\d.]{0,12}s(?: \([\d:]{1,20}\))?(?: =+)?")
_COUNT = re.compile(r"(\d{1,9}) ([a-z]+)")
_UNITTEST_RAN = re.compile(r"Ran (\d{1,9}) tests? in \d[\d.]{0,12}s")
_UNITTEST_END = re.compile(r"(OK|FAILED)(?: \(([a-z =,\d]{1,200})\))?")
_EQUALS = re.compile(r"([a-z ]{1,30})=(\d{1,9})")
_JEST = re.compile(r"Tests:\s{1,20}((?:\d{1,9} [a-z]+(?:, )?)+)")
_GO_TEST = re.compile(r"\s{0,200}--- (PASS|FAIL|SKIP): \S")
_GO_PACKAGE = re.compile(r"(ok|FAIL)\s{1,8}\S{1,500}\s{1,8}(?:\d|\(cached\)|\[)")
_GO_JSON = re.compile(r'\{"Time":".{0,100}?"Action":"(pass|fail|skip)".{0,500}?"Test":"')
_TAP_PLAN = re.compile(r"1\.\.(\d{1,9})(?:\s|$)")
_TAP = re.compile(r"(not )?ok\b(?:\s{1,8}\d{1,9})?(.{0,500})")
_DIRECTIVE = re.compile(r"#\s{0,8}(skip|todo)", re.IGNORECASE)


@dataclass(frozen=True)
class TestCounts:
    """The tests that a program claims to have run. Errors count as failed. `form` is the runner or format that was recognised."""

    __test__ = False  # no test of pytest

    passed: int
    failed: int
    skipped: int
    form: str


def read_counts(output: bytes) -> TestCounts | None:
    """Return the counts in the output of a test runner; None if none is recognised. The last report counts, as it sums up those before."""
    if (start := output[-MOST_XML_BYTES:].lstrip()[:200]).startswith((b"<?xml", b"<testsuite")) and b"<" in start:
        return read_junit(output)
    text = _COLOURS.sub("", output[-MOST_BYTES:].decode("utf-8", "replace"))
    lines = [line.strip("\r")[:_LONGEST_LINE] for line in text.split("\n")]
    for read in _READERS:
        if (counts := read(lines)) is not None:
            return counts
    return None


def _pytest(lines: list[str]) -> TestCounts | None:
    for line in reversed(lines):
        if (found := _PYTEST.fullmatch(line.strip())) is not None:
            counts = _named(found[1])
            if counts.keys() & {"passed", "failed", "error", "errors", "skipped", "xfailed", "xpassed", "deselected"}:
                failed = counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
                passed = counts.get("passed", 0) + counts.get("xpassed", 0)
                return TestCounts(passed, failed, counts.get("skipped", 0) + counts.get("xfailed", 0), "pytest")
    return None


def _unittest(lines: list[str]) -> TestCounts | None:
    ran = None
    for line in reversed(lines):
        if ran is None and (found := _UNITTEST_END.fullmatch(line.strip())) is not None:
            ran = found
        elif ran is not None and (total := _UNITTEST_RAN.fullmatch(line.strip())) is not None:
            counts = {name.strip(): int(number) for name, number in _EQUALS.findall(ran[2] or "")}
            failed = counts.get("failures", 0) + counts.get("errors", 0) + counts.get("unexpected successes", 0)
            skipped = counts.get("skipped", 0) + counts.get("expected failures", 0)
            return TestCounts(max(0, int(total[1]) - failed - skipped), failed, skipped, "unittest")
    return None


def _jest(lines: list[str]) -> TestCounts | None:
    for line in reversed(lines):
        if (found := _JEST.fullmatch(line.strip())) is not None:
            counts = _named(found[1])
            return TestCounts(counts.get("passed", 0), counts.get("failed", 0), counts.get("skipped", 0) + counts.get("todo", 0), "jest")
    return None


def _go(lines: list[str]) -> TestCounts | None:
    ends = [found[1].lower() for line in lines if (found := _GO_JSON.match(line) or _GO_TEST.match(line)) is not None]
    if ends:
        return TestCounts(ends.count("pass"), ends.count("fail"), ends.count("skip"), "go test")
    packages = [found[1] for line in lines if (found := _GO_PACKAGE.match(line)) is not None]
    return TestCounts(packages.count("ok"), packages.count("FAIL"), 0, "go test, by package") if packages else None


def _tap(lines: list[str]) -> TestCounts | None:
    if not any(_TAP_PLAN.match(line) or line.startswith("TAP version ") for line in lines):
        return None
    passed = failed = skipped = 0
    for line in lines:
        if (found := _TAP.fullmatch(line)) is not None:
            directive = _DIRECTIVE.search(found[2])
            if directive is not None:
                skipped += 1
            elif found[1]:
                failed += 1
            else:
                passed += 1
    planned = next((int(found[1]) for line in lines if (found := _TAP_PLAN.match(line)) is not None), 0)
    missing = max(0, planned - passed - failed - skipped)  # planned and never reported: the program died
    return TestCounts(passed, failed + missing, skipped, "TAP")


_READERS: tuple[Callable[[list[str]], TestCounts | None], ...] = (_pytest, _unittest, _jest, _go, _tap)


def _named(text: str) -> dict[str, int]:
    return {name: int(number) for number, name in _COUNT.findall(text)}


class _Refused(Exception):
    """The document is one that is not read."""


def read_junit(document: bytes) -> TestCounts | None:
    """Return the counts of a JUnit XML document, from its test cases; None if it is none, is too large, or could define entities."""
    from xml.parsers import expat  # few checks write XML

    document = document.strip()
    if len(document) > MOST_XML_BYTES:
        return None
    cases: list[str] = []
    path: list[str] = []

    def begin(name: str, attributes: object) -> None:
        if len(path) >= _DEEPEST or (not path and name not in ("testsuites", "testsuite")):
            raise _Refused
        if name == "testcase":
            cases.append("passed")
        elif path and path[-1] == "testcase" and name in ("failure", "error", "skipped") and cases[-1] != "failed":
            cases[-1] = "skipped" if name == "skipped" else "failed"
        path.append(name)

    def refuse(*_: object) -> None:
        raise _Refused

    parser = expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler = begin, lambda name: path.pop()
    parser.StartDoctypeDeclHandler = parser.EntityDeclHandler = refuse
    try:
        parser.Parse(document, True)
    except (expat.ExpatError, _Refused, ValueError):
        return None
    return TestCounts(cases.count("passed"), cases.count("failed"), cases.count("skipped"), "JUnit XML")
