"""What the documents say is checked: tests they link exist, links lead somewhere, commands can be typed, Python runs as written."""

from __future__ import annotations

import ast
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from agent_sandbox.cli import execute, main
from agent_sandbox.cli.grammar import VERBS
from agent_sandbox.cli.parser import UsageError, parse
from scripts import record_demo, write_reference
from tests import compiled
from tests.architecture.sources import ROOT

DOCUMENTS = tuple(sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]))
README, SPECIFICATION = ROOT / "README.md", ROOT / "SPECIFICATION.md"
RECORDS = tuple(sorted((ROOT / "docs" / "adr").glob("*.md")))

GUIDES = (README, ROOT / "docs" / "getting-started.md", *sorted((ROOT / "docs" / "guides").glob("*.md")))
WITH_PYTHON = tuple(document for document in DOCUMENTS if "```python" in document.read_text(encoding="utf-8"))

# In a text as pytest writes it, or as a link whose title is the test's name.
LINKED_TEST = re.compile(r"(tests/[\w/]+\.py)(?:::| \")(test_\w+)")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)(?: \"[^\"]*\")?\)")
SECONDS = re.compile(r"\b\d+\.\d s\b")  # how long something took says how busy the machine is
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"`[^`]+`")
SECTION = re.compile(r"^## (.+)\n\n\| no\. \| promise \| test \|\n\|---\|---\|---\|\n((?:\|.*\n)+)\n?((?:\[.*\n)*)", re.MULTILINE)
PROMISE = re.compile(r"^\| ([A-Z]+)(\d+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
USED_TEST = re.compile(r"\[[\w/]+\]\[([A-Z]+\d+\.\d+)\]")
DEFINED_TEST = re.compile(r"^\[([A-Z]+\d+\.\d+)\]: tests/[\w/]+\.py \"test_\w+\"$", re.MULTILINE)
# Written in pieces, so that this file is not found by the search for such places.
PLACE_OF_ONE_MACHINE = re.compile(r"(?<![\w.}/-])/(?:" + "work|" + r"root/\.|" + r"home/(?!ada\b)\w|tmp/\w)")


def name(document: Path) -> str:
    return str(document.relative_to(ROOT))


def text(document: Path) -> str:
    return document.read_text(encoding="utf-8")


def prose(document: Path) -> str:
    """Without code, in which brackets are no links."""
    return INLINE_CODE.sub("", FENCE.sub("", text(document)))


@cache
def functions_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@cache
def anchors_in(document: Path) -> frozenset[str]:
    """The fragment of each heading, as the usual viewers make it."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text(document)), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)


def command_lines() -> Iterator[tuple[str, str]]:
    """Every line with our program in a block of commands, less its prompt, and the document it stands in."""
    for document in DOCUMENTS:
        for kind, block in FENCE.findall(text(document)):
            lines = block.replace("\\\n", " ").splitlines() if kind == "console" else []
            yield from ((name(document), line.removeprefix("$ ")) for line in lines if line.startswith("$ ") and "agent-sandbox " in line)


def words_of(line: str) -> list[str]:
    """The words behind our program's name; what a person types before it (systemd-run …) is not ours to read."""
    words = shlex.split(line, comments=True)
    return words[words.index("agent-sandbox") + 1 :]


def test_the_documents_are_there() -> None:
    wanted = {
        "README.md",
        "SPECIFICATION.md",
        "THREATS.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "docs/design.md",
        "docs/install.md",
        "docs/index.md",
    }
    assert wanted <= {name(document) for document in DOCUMENTS}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_every_test_that_a_document_names_exists(document: Path) -> None:
    named = set(LINKED_TEST.findall(text(document)))
    assert len(re.findall(r"tests/\S+\.py\)?(?:::| \")", text(document))) == len(LINKED_TEST.findall(text(document)))
    missing = [f"{path}::{test}" for path, test in sorted(named) if not (ROOT / path).is_file() or test not in functions_in(path)]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_every_link_inside_the_project_leads_somewhere(document: Path) -> None:
    broken = []
    for link in LINK.findall(prose(document)):
        if re.match(r"\w+:", link):
            continue
        path, _, fragment = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or not target.is_relative_to(ROOT) or (fragment and fragment not in anchors_in(target)):
            broken.append(link)
    assert broken == []


def promises() -> list[tuple[str, int, str, str]]:
    """Letters, number, promise and tests of each row of the specification."""
    rows = [PROMISE.fullmatch(row) for _, table, _ in SECTION.findall(text(SPECIFICATION)) for row in table.splitlines()]
    assert None not in rows, "a row does not have the form | number | promise | tests |"
    return [(row[1], int(row[2]), row[3], row[4]) for row in rows if row]


def test_every_section_of_the_specification_is_a_table_of_promises() -> None:
    assert [title for title, _, _ in SECTION.findall(text(SPECIFICATION))] == re.findall(r"^## (.+)$", text(SPECIFICATION), re.MULTILINE)
    assert len(promises()) == len(re.findall(r"^\| \W*[A-Z]+\d+\b", text(SPECIFICATION), re.MULTILINE))


def test_every_promise_is_numbered_once_and_has_a_test_or_is_pending() -> None:
    numbers = [f"{letters}{number}" for letters, number, _, _ in promises()]
    assert len(numbers) > 200
    assert len(set(numbers)) == len(numbers)
    for letters, number, promise, tests in promises():
        assert USED_TEST.search(tests) or (tests == "–" and "*pending*:" in promise), f"{letters}{number}"


def test_the_promises_of_each_section_are_numbered_without_gaps() -> None:
    counted: dict[str, int] = {}
    for letters, number, _, _ in promises():
        counted[letters] = counted.get(letters, 0) + 1
        assert number == counted[letters], f"{letters}{number}"
    for title, table, _ in SECTION.findall(text(SPECIFICATION)):
        assert len({row[1] for row in PROMISE.finditer(table)}) == 1, title


def test_the_tests_of_each_promise_are_linked_once_and_in_its_section() -> None:
    for title, table, definitions in SECTION.findall(text(SPECIFICATION)):
        assert DEFINED_TEST.findall(definitions) == USED_TEST.findall(table), title
        assert len(DEFINED_TEST.findall(definitions)) == len(definitions.splitlines()), title
    for letters, number, _, tests in promises():
        assert USED_TEST.findall(tests) == [f"{letters}{number}.{count}" for count in range(1, tests.count("][") + 1)]


def test_every_command_line_in_the_documents_is_one_that_the_program_reads() -> None:
    unreadable = []
    for document, line in command_lines():
        try:
            parse(words_of(line))
        except UsageError as error:
            unreadable.append(f"{document}: {line}: {error}")
    assert len(list(command_lines())) > 5
    assert unreadable == []


def test_a_command_line_that_cannot_be_read_would_be_found() -> None:
    with pytest.raises(UsageError):
        parse(["no-such-verb"])


def test_every_verb_is_in_a_guide_and_every_verb_that_a_document_names_is_there() -> None:
    code = [
        part
        for guide in GUIDES
        for part in (*INLINE_CODE.findall(FENCE.sub("", text(guide))), *(it[1] for it in FENCE.findall(text(guide))))
    ]
    words = set(re.findall(r"[\w-]+", " ".join(code)))
    assert set(VERBS) <= words
    named = {verb for document in DOCUMENTS for verb in re.findall(r"`agent-sandbox ([a-z]+)", text(document))}
    assert named and named <= set(VERBS)


def test_the_exit_codes_of_the_reference_are_those_of_the_program() -> None:
    table = text(ROOT / "docs" / "reference" / "exit-codes.md")
    told = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    used = {
        main.REALITY_MOVED_ON,
        main.USAGE,
        main.APPROVAL,
        main.COULD_NOT_START,
        main.DENIED,
        execute.TIMED_OUT,
        execute.COULD_NOT_START,
        execute.NOT_EXECUTABLE,
    }
    assert told == used | {execute.NOT_FOUND, execute.OUT_OF_MEMORY}


def test_the_documents_have_examples_in_python() -> None:
    assert README in WITH_PYTHON
    assert sum(text(document).count("```python") for document in WITH_PYTHON) >= 8


@pytest.mark.parametrize("document", WITH_PYTHON, ids=name)
def test_the_python_of_the_documents_prints_what_it_says(document: Path, tmp_path: Path) -> None:
    examples = re.findall(r"^```python\n(.*?)^```\n.*?^```text\n(.*?)^```$", text(document), re.MULTILINE | re.DOTALL)
    assert len(examples) == text(document).count("```python")
    compiled.offer(tmp_path / "cache", tmp_path / "state")
    for code, printed in examples:
        environment = {**os.environ, "AGENT_SANDBOX_STATE": str(tmp_path / "state"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
        assert (SECONDS.sub("", ran.stdout), ran.stderr) == (SECONDS.sub("", printed), "")


def test_the_readme_is_short_and_shows_the_recording_first() -> None:
    assert len(text(README).encode()) < 12_000
    assert LINK.findall(text(README))[0] == name(record_demo.RECORDINGS[0].place)


@pytest.mark.skipif(
    str(ROOT).startswith(("/tmp/", "/var/tmp/")), reason="a checkout there: what changes beside a project is called scratch"
)
@pytest.mark.parametrize("recording", record_demo.RECORDINGS, ids=lambda recording: name(recording.place))
def test_the_recording_is_what_the_program_prints_and_names_no_machine(recording: record_demo.Recording) -> None:
    drawn = text(recording.place)
    assert record_demo.draw(recording.title, record_demo.record(recording)) == drawn
    assert not PLACE_OF_ONE_MACHINE.search(drawn) and str(ROOT) not in drawn and platform.node() not in drawn


@pytest.mark.parametrize(("page", "made"), [pytest.param(page, made, id=name(page)) for page, made in write_reference.pages().items()])
def test_a_page_that_is_made_from_the_code_is_up_to_date(page: Path, made: str) -> None:
    assert text(page) == made, "make reference"


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", text(ROOT / "mkdocs.yml")))
    pages = {str(page.relative_to(ROOT / "docs")) for page in DOCUMENTS if page.is_relative_to(ROOT / "docs") and page not in RECORDS}
    assert listed == pages | {"THREATS.md", "SPECIFICATION.md", "CHANGELOG.md", "CONTRIBUTING.md"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_no_document_speaks_of_one_machine(document: Path) -> None:
    assert [line for line in text(document).splitlines() if PLACE_OF_ONE_MACHINE.search(line)] == []


def test_a_place_on_one_machine_would_be_found() -> None:
    assert PLACE_OF_ONE_MACHINE.search("see /" + "work/main") and not PLACE_OF_ONE_MACHINE.search("`/tmp` and /home/ada/shop")


@pytest.mark.parametrize("record", RECORDS, ids=name)
def test_a_decision_says_why_what_and_what_was_given_up(record: Path) -> None:
    number, title = record.name[:4], text(record).splitlines()[0]
    assert title.startswith(f"# {int(number)}. ")
    assert re.findall(r"^## (.+)$", text(record), re.MULTILINE) == ["Context", "Decision", "What was given up"]


def test_decisions_are_numbered_without_gaps() -> None:
    assert [int(record.name[:4]) for record in RECORDS] == list(range(1, len(RECORDS) + 1))


def test_no_rule_on_programs_is_sold_as_a_wall() -> None:
    """Case 41 of the attack list: an allowed interpreter goes around a list of programs, and without one so do the loader and memory."""
    plainly = prose(ROOT / "THREATS.md").partition("## Not stopped, plainly")[2].partition("\n## ")[0]
    assert "an interpreter or a shell runs any code" in plainly
    assert "the dynamic loader goes around that" in plainly


def test_the_threats_begin_with_what_is_not_stopped() -> None:
    assert re.findall(r"^## (.+)$", text(ROOT / "THREATS.md"), re.MULTILINE)[0] == "Not stopped, plainly"
