"""The table of passes, and every difference by name with its reason, as a document."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from scripts.conformance.comparing import CHANGED, Compared, Difference

_WHAT = """\
Written by `make conformance`. The tests are those of the running interpreter's standard library, unchanged. Each module runs natively, and
in a guest of the `wasm` runtime as users have it: two walls, a memory image, a view with the tests and a scratch directory. What differs is
run twice more: under the own host of the interpreter's maker, with none of ours around it, and on a newer native Python."""
_COLUMNS = """\
*Skip themselves*: the test looks for something that is not there inside, and says what. *Older*: it fails on the newer native Python as
well, or is about something that is known to have changed. *Interpreter*: the rest. *Ours*: it ends otherwise under the maker's host; the
command fails if there is one."""


class Versions(NamedTuple):
    """Of the interpreters that took part."""

    native: str
    inside: str
    newer: str | None


def document(versions: Versions, modules: Sequence[Compared]) -> str:
    """All of it, in Markdown."""
    return "\n".join((
        "# CPython's own tests, inside WebAssembly",
        "",
        _WHAT,
        "",
        f"- natively, and whose tests they are: CPython {versions.native}",
        f"- inside: CPython {versions.inside}, so tests of what has changed since fail there, and would natively",
        f"- a newer native Python to prove that: {versions.newer or 'none on the machine that wrote this'}",
        "- left out everywhere: tests that ask for minutes, gigabytes or the network",
        "",
        *_table(modules),
        "",
        _COLUMNS,
        "",
        "## Why tests skip themselves inside, or are not made",
        "",
        *_skipped(difference for module in modules for difference in module.differences),
        "",
        "## Every test that fails inside and passes natively",
        "",
        *_failed(modules),
        "",
    ))  # fmt: skip


def _table(modules: Sequence[Compared]) -> list[str]:
    rows = [(each.module.removeprefix("test_"), len(each.natively), each.passed, *_counts(each)) for each in modules]
    columns = zip(*(row[1:] for row in rows), strict=True)
    total = ("**all**", *(sum(column) for column in columns))
    titles = ("module", "tests", "passed natively", "passed inside", "skip themselves", "older", "interpreter", "crashed", "ours")
    lines = [titles, ("---", *("--:" for _ in titles[1:])), *rows, total]
    return [f"| {' | '.join(map(str, line))} |" for line in lines]


def _counts(each: Compared) -> tuple[int, ...]:
    kinds = Counter(map(_kind, each.differences))
    return (each.passed - len(each.differences), *(kinds[kind] for kind in ("skipped", "older", "interpreter", "crashed", "ours")))


def _kind(difference: Difference) -> str:
    if difference.ours:
        return "ours"
    if difference.inside.how == "crashed":
        return "crashed"
    if difference.inside.how in ("skipped", "absent"):
        return "skipped"
    return "older" if difference.old or difference.reason.startswith(CHANGED) else "interpreter"


def _skipped(differences: Iterable[Difference]) -> list[str]:
    reasons = Counter(each.reason for each in differences if _kind(each) == "skipped")
    return ["| tests | what they say |", "| --: | --- |", *(f"| {count} | {_plain(reason)} |" for reason, count in reasons.most_common())]


def _failed(modules: Iterable[Compared]) -> list[str]:
    lines = ["| test | why | what it says |", "| --- | --- | --- |"]
    for module in modules:
        for each in module.differences:
            if _kind(each) != "skipped":
                lines.append(f"| {each.test.removeprefix('test.')} | {_plain(each.reason)} | {_plain(each.inside.why, 120)} |")
    return lines


def _plain(text: str, longest: int = 200) -> str:
    """One line of a table's cell."""
    line = re.sub(r"0x[0-9a-f]+", "0x…", " ".join(text.split()))  # where something happened to lie
    for special in "\\|<>*_`":
        line = line.replace(special, f"\\{special}")
    return line if len(line) <= longest else line[: longest - 1] + "…"
