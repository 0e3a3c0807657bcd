"""The check of names, on small made-up trees: each rule finds its case, and nothing in a tree without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import check_names

Check = Callable[[dict[str, str]], list[str]]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Write files into a checkout, those of the package without its path, and return the findings as "file:line rule name"."""

    def write_and_check(files: dict[str, str]) -> list[str]:
        for name, text in {"__init__.py": "", **files}.items():
            path = (
                tmp_path / name if name.startswith(("src/", "bin/", "bench/", "scripts/", "tests/", "docs/")) else _inside(tmp_path, name)
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return [
            f"{finding.path.relative_to(_inside(tmp_path, ''))}:{finding.line} {finding.rule} {finding.text.split()[1]}"
            for finding in check_names.check(tmp_path)
        ]

    return write_and_check


def _inside(root: Path, name: str) -> Path:
    return root / "src" / check_names.PACKAGE / name


def test_a_module_or_package_that_is_named_by_a_gerund_is_found(check: Check) -> None:
    found = check({"keeping.py": "", "talking/__init__.py": "", "talking/words.py": ""})
    assert found == ["keeping.py:1 gerund 'keeping'", "talking/__init__.py:1 gerund 'talking'"]


def test_nouns_are_allowed_even_if_they_end_like_gerunds(check: Check) -> None:
    assert check({"keeper.py": "", "testing.py": "", "engine/encoding.py": ""}) == []


def test_every_allowance_has_a_reason() -> None:
    assert all({**check_names.NOUNS, **check_names.SAME_NAME_ALLOWED}.values())


def test_every_allowance_is_needed() -> None:
    ours = check_names.load(check_names.CHECKOUT / "src").values()
    assert {finding.text.split()[1].strip("'") for finding in check_names.gerunds(ours, {})} >= check_names.NOUNS.keys()
    assert {finding.text.split()[1] for finding in check_names.same_names(ours, {})} >= check_names.SAME_NAME_ALLOWED.keys()


def test_public_classes_with_one_name_are_found_wherever_they_are(check: Check) -> None:
    protocol = "from typing import Protocol\nclass Names(Protocol): ...\n"
    found = check({"errors.py": "class Names: ...\n", "testing.py": protocol, "audit.py": "class Audit:\n    class Names: ...\n"})
    assert found == ["audit.py:2 twice Names", "errors.py:1 twice Names", "testing.py:2 twice Names"]


def test_private_classes_and_functions_may_share_a_name(check: Check) -> None:
    same = "class _Names: ...\ndef names(): ...\n"
    assert check({"errors.py": same + "class Names: ...\n", "testing.py": same}) == []


@pytest.mark.parametrize("kind", ["def spare(): ...", "class spare: ...", "async def spare(): ...", "if True:\n    def spare(): ..."])
def test_public_code_that_nothing_uses_is_found(check: Check, kind: str) -> None:
    (found,) = check({"engine.py": kind})
    assert found.startswith("engine.py:") and found.endswith(" unused spare")


@pytest.mark.parametrize(
    "files",
    [
        {"tests/test_engine.py": "from agent_sandbox.engine import spare\nspare()"},
        {"engine.py": "def spare(): return spare()"},
        {"engine.py": "def spare(): return _other()\ndef _other(): return spare()"},
        {"other.py": "from agent_sandbox.engine import spare"},
        {"other.py": "from agent_sandbox.engine import spare\nfor each in (): lambda spare: spare"},
        {"other.py": "def _f(spare): return spare"},
        {"other.py": "spare = 1\nprint(spare)"},
        {"other.py": "from agent_sandbox import elsewhere\nelsewhere.spare()", "elsewhere.py": ""},
        {"other.py": "print('spare')"},
        {"docs/design.md": "There is one to spare, and `spare` is a word."},
    ],
    ids=["tests", "itself", "a circle", "an import alone", "a parameter", "a local name", "a variable", "another module", "text", "prose"],
)
def test_what_is_no_use_is_not_taken_for_one(check: Check, files: dict[str, str]) -> None:
    assert check({"engine.py": "def spare(): ...", **files}) == ["engine.py:1 unused spare"]


@pytest.mark.parametrize(
    "files",
    [
        {"other.py": "from agent_sandbox.engine import spare\nspare()"},
        {"other.py": "from agent_sandbox.engine import spare as one\ntable = {'x': one}"},
        {"other.py": "from agent_sandbox import engine\nengine.spare()"},
        {"other.py": "import agent_sandbox.engine\nagent_sandbox.engine.spare.name"},
        {"other.py": "import agent_sandbox.engine as one\none.spare()"},
        {"other.py": "from .engine import spare\nspare()"},
        {"inner/__init__.py": "", "inner/other.py": "from ..engine import spare\nspare()"},
        {"errors.py": "def fail():\n    from agent_sandbox.engine import spare\n    spare()"},
        {"errors.py": "from agent_sandbox.engine import spare\nclass Error:\n    def fail(self, how: spare): ..."},
        {"errors.py": "def fail():\n    _first()\ndef _first():\n    from agent_sandbox.engine import spare\n    return spare()"},
        {"shown/__init__.py": "from agent_sandbox.engine import spare", "other.py": "from agent_sandbox.shown import spare\nspare()"},
        {"engine.py": "def spare(): ...\nif __name__ == '__main__':\n    spare()"},
        {"engine.py": "import registry\n@registry.add\ndef spare(): ..."},
        {"__init__.py": "from agent_sandbox.engine import spare\n__all__ = ['spare']"},
        {"src/agentbox/__init__.py": "from agent_sandbox.engine import spare\n__all__ = ['spare']"},
        {"bin/agent-sandbox": "#!python\nfrom agent_sandbox.engine import spare\nspare()"},
        {"bench/run.py": "from agent_sandbox.engine import spare\nspare()"},
        {"scripts/table.py": "from agent_sandbox.engine import spare\nspare()"},
        {"docs/use.md": "Use:\n\n```python\nfrom agent_sandbox.engine import spare\nspare()\n```\n"},
        {"docs/use.md": "Use `engine.spare()` for that."},
    ],
    ids=[
        *(
            "from",
            "renamed",
            "attribute",
            "dotted",
            "module renamed",
            "relative",
            "relative above",
            "in a function",
            "annotation",
            "through",
        ),
        *("re-exported", "program", "registered", "API", "second API", "bin", "bench", "scripts", "example", "document"),
    ],
)
def test_what_is_used_is_not_reported(check: Check, files: dict[str, str]) -> None:
    assert check({"engine.py": "def spare(): ...", **files}) == []


def test_public_modules_and_private_names_are_not_reported(check: Check) -> None:
    assert check({"sandbox.py": "def spare(): ...", "engine.py": "def _spare(): ..."}) == []


def test_what_only_unused_code_uses_is_unused(check: Check) -> None:
    found = check({"engine.py": "from agent_sandbox.other import spare\ndef first(): return spare()", "other.py": "def spare(): ..."})
    assert found == ["engine.py:2 unused first", "other.py:1 unused spare"]


def test_programs_that_are_started_by_the_name_of_their_module_are_used(check: Check) -> None:
    assert check({"engine.py": "def main(): ...", "other.py": "PROGRAM = 'agent_sandbox.engine'"}) == []
    assert check({"other.py": "PROGRAM = 'agent_sandbox.elsewhere'"}) == ["engine.py:1 unused main"]


def test_functions_that_are_sent_as_text_are_used_if_a_text_names_them(check: Check) -> None:
    sent = "def plant(): ...\ndef spare(): ..."
    assert check({"selftest/attempts/files.py": sent, "other.py": "ATTEMPT = ('files', 'plant')"}) == [
        "selftest/attempts/files.py:2 unused spare"
    ]


def test_the_program_prints_a_line_for_each_finding_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _inside(tmp_path, "").mkdir(parents=True)
    _inside(tmp_path, "__init__.py").touch()
    _inside(tmp_path, "engine.py").write_text("def used(): ...\nused()\n")
    assert check_names.main([str(tmp_path)]) == 0
    _inside(tmp_path, "keeping.py").touch()
    assert check_names.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == "src/agent_sandbox/keeping.py:1: gerund: module 'keeping' is named by a gerund; use a noun\n"
