"""Our modules are loaded from the same files, and under the same conditions, as the interpreter itself would load them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import agent_sandbox
from agent_sandbox._fast import finder

PACKAGE = Path(agent_sandbox.__file__).parent
QUICKLY = "from agent_sandbox._fast.finder import load_quickly; load_quickly(); "
FACTS = (
    "import sys, agent_sandbox.cli.main, agent_sandbox.kernel.wire; "
    "print([(name, module.__file__, module.__cached__, module.__package__, getattr(module, '__path__', None), module.__spec__.origin, "
    "module.__spec__.has_location, module.__doc__) for name, module in sorted(sys.modules.items()) "
    "if name.startswith('agent_sandbox') and not name.endswith('_fast.finder')])"
)


def said(code: str, top: Path, *flags: str) -> str:
    """Run code in a fresh interpreter that has our package from this directory, and return its output."""
    program = f"import sys; sys.path.insert(0, {str(top)!r}); {code}"
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([sys.executable, "-I", *flags, "-c", program], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package, without compiled files, as a directory for `sys.path`."""
    shutil.copytree(PACKAGE, tmp_path / "agent_sandbox", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_a_module_is_the_same_however_it_is_loaded(copy: Path) -> None:
    for _ in ("compiled now", "compiled before"):
        quick, plain = said(QUICKLY + FACTS, copy), said(FACTS, copy)
        assert "agent_sandbox.kernel.wire" in quick
        assert quick == plain


def test_our_modules_come_from_the_quick_loader_and_others_do_not(copy: Path) -> None:
    show = (
        "import agent_sandbox.kernel.wire as ours, json as theirs; print(type(ours.__loader__).__name__, type(theirs.__loader__).__name__)"
    )
    assert said(QUICKLY + show, copy) == "_Loader SourceFileLoader"
    assert said(show, copy) == "SourceFileLoader SourceFileLoader"


def test_a_source_that_has_changed_is_compiled_again(copy: Path) -> None:
    source, show = copy / "agent_sandbox/kernel/ids.py", QUICKLY + "from agent_sandbox.kernel import ids; print(ids.CANARY)"
    text = source.read_text()
    source.write_text(text + "\nCANARY = 1\n")
    assert [said(show, copy) for _ in range(2)] == ["1", "1"]
    compiled = next((source.parent / "__pycache__").glob("ids.*.pyc"))
    before = compiled.read_bytes()
    source.write_text(text + "\nCANARY = 2\n")  # of the same size, so that only its time differs
    os.utime(source, (1_000_000_000, 1_000_000_000))
    assert said(show, copy) == "2"
    assert compiled.read_bytes() != before


def test_a_package_that_was_moved_names_its_files_where_they_are(copy: Path) -> None:
    show = "from agent_sandbox.kernel import ids; print(ids.write_maps.__code__.co_filename)"
    assert said(QUICKLY + show, copy) == str(copy / "agent_sandbox/kernel/ids.py")
    moved = copy / "elsewhere"
    moved.mkdir()
    (copy / "agent_sandbox").rename(moved / "agent_sandbox")
    assert said(QUICKLY + show, moved) == said(show, moved) == str(moved / "agent_sandbox/kernel/ids.py")


def test_a_compiled_file_of_another_version_or_of_half_its_length_is_not_used(copy: Path) -> None:
    source, show = copy / "agent_sandbox/kernel/ids.py", QUICKLY + "from agent_sandbox.kernel import ids; print(ids.__name__)"
    said(show, copy)
    compiled = next((source.parent / "__pycache__").glob("ids.*.pyc"))
    whole = compiled.read_bytes()
    for spoilt in (b"\0\0\0\0" + whole[4:], whole[:12], b""):
        compiled.write_bytes(spoilt)
        assert said(show, copy) == "agent_sandbox.kernel.ids"
        assert compiled.read_bytes() == whole


@pytest.mark.parametrize("flags", [("-O",), ("-X", "pycache_prefix=/nowhere")], ids=["optimised", "compiled files elsewhere"])
def test_where_compiled_files_have_other_names_the_interpreter_loads(copy: Path, flags: tuple[str, ...]) -> None:
    show = "import agent_sandbox.kernel.wire as ours; print(type(ours.__loader__).__name__)"
    assert said(QUICKLY + show, copy, *flags) == "SourceFileLoader"


def test_a_module_that_is_missing_is_missed_by_name(copy: Path) -> None:
    show = "\ntry:\n    import agent_sandbox.kernel.nothing\nexcept ModuleNotFoundError as error:\n    print(error)"
    assert said(QUICKLY + show, copy) == said(show, copy) == "No module named 'agent_sandbox.kernel.nothing'"


def test_other_packages_are_none_of_its_business() -> None:
    assert finder.Finder.find_spec("json.decoder", ["/usr/lib/python3"]) is None
    assert finder.Finder.find_spec("agent_sandbox_more", None) is None
    assert finder.Finder.find_spec("agent_sandbox.kernel", list(agent_sandbox.__path__)) is not None
