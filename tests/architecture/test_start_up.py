"""What a run loads before it can do anything: this, more than anything we compute, is the time that a command line takes to start.

Nothing here is timed. A module that gets in again is named.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.ledger.encoding import is_suspicious
from tests.architecture.sources import SENT, Module, modules

# Each costs from half a millisecond to ten, on its own or by what it brings along.
SLOW = frozenset(
    {
        *(
            "argparse",
            "asyncio",
            "array",  # which brings `collections`
            "ast",
            "collections",
            "contextlib",
            "dataclasses",
            "difflib",
            "enum",
            "functools",
            "hashlib",
            "_hashlib",
            "importlib.metadata",
            "inspect",
            "json",
            "logging",
        ),
        *(
            "multiprocessing",
            "pathlib",
            "pickle",
            "platform",
            "random",
            "re",
            "selectors",
            "shutil",
            "signal",
            "socket",
            "subprocess",
            "tempfile",
            "threading",
            "typing",
        ),
        *("unittest", "urllib.parse", "uuid", "weakref"),
    }
)
UNUSED_BY_A_LOOK = frozenset({"ast", "dataclasses", "inspect", "random", "secrets", "selectors", "shutil", "subprocess", "tempfile"})
# What only a fork of the program needs: it loads that itself, while the program goes on.
OF_THE_KEEPER = frozenset(
    {"ctypes", "agent_sandbox.kernel.guest_setup", "agent_sandbox.kernel.mount_steps", "agent_sandbox.kernel.seccomp"}
)
RUN = "from agent_sandbox.cli.main import main; main(['run', '--', 'true'])"


def loaded_by(code: str, *, cwd: Path | str = "/", **env: str) -> frozenset[str]:
    """The modules that a fresh interpreter has after this code, without those it starts with."""
    program = f"import sys; before = set(sys.modules); {code}; print(*set(sys.modules) - before)"
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=True
    )
    return frozenset(done.stdout.split())


@pytest.fixture(scope="module")
def loaded_by_a_run(tmp_path_factory: pytest.TempPathFactory) -> frozenset[str]:
    project = tmp_path_factory.mktemp("project")
    state = {"AGENT_SANDBOX_STATE": str(tmp_path_factory.mktemp("state"))}
    loaded_by(RUN, cwd=project, **state)  # the first one makes the store, and may take its time
    # On a busy machine one may have to wait for what the last does beside it, and says so: what each of them loads is what a run needs.
    loaded = frozenset.intersection(*(loaded_by(RUN, cwd=project, **state) for _ in range(3)))
    # A path that looks like a secret is looked at more closely, and who is called `monkey` has such a path.
    return loaded - {"re"} if is_suspicious(str(project)) else loaded


def test_a_run_loads_nothing_that_is_slow_to_load(loaded_by_a_run: frozenset[str]) -> None:
    assert "agent_sandbox.engine.run" in loaded_by_a_run, "this was no run"
    assert sorted(loaded_by_a_run & SLOW) == []
    assert [name for name in loaded_by_a_run if name.startswith("agent_sandbox.server")] == [], "few runs are held"


@pytest.mark.parametrize("verb", ["diff", "status", "promote"])
def test_a_look_at_the_changes_loads_nothing_that_it_does_not_use(tmp_path: Path, verb: str) -> None:
    state = {"AGENT_SANDBOX_STATE": str(tmp_path / "state")}
    project = tmp_path / "project"
    project.mkdir()
    loaded_by("from agent_sandbox.cli.main import main; main(['run', 'touch', 'made'])", cwd=project, **state)
    yes = ", '--yes'" if verb == "promote" else ""
    loaded = loaded_by(f"from agent_sandbox.cli.main import main; main(['{verb}'{yes}])", cwd=project, **state)
    assert "agent_sandbox.workspace.layers.readback" in loaded, "it has looked"
    assert sorted(loaded & UNUSED_BY_A_LOOK) == []


def test_a_run_leaves_to_its_keeper_what_only_the_keeper_needs(loaded_by_a_run: frozenset[str]) -> None:
    assert sorted(loaded_by_a_run & OF_THE_KEEPER) == []


def test_the_keeper_loads_nothing_slow_either() -> None:
    loaded = loaded_by("import agent_sandbox.kernel.keeper, agent_sandbox.runtime.guest.native")
    assert loaded >= OF_THE_KEEPER
    assert sorted(loaded & SLOW) == []


def test_the_keeper_is_forked_before_the_rest_is_loaded() -> None:
    loaded = loaded_by("import agent_sandbox.cli.main, agent_sandbox.cli.commands.run")
    floors = tuple(f"agent_sandbox.{floor}." for floor in ("engine", "workspace", "ledger", "policy"))
    assert sorted(name for name in loaded if name.startswith(floors)) == []


def test_a_slow_module_is_recognised() -> None:
    assert loaded_by("import dataclasses") & SLOW


EXECUTE = "from agent_sandbox import Sandbox; Sandbox().execute('print(1)')"
KEEPER = "import agent_sandbox.kernel.keeper, agent_sandbox.runtime.guest.entry, agent_sandbox.runtime.guest.native"


def unexplained(module: Module) -> Iterator[str]:
    """Return the imports inside functions that give no reason: beside them, above them, or above the imports right before them."""
    lines = module.text.splitlines()
    for function in ast.walk(module.tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Import | ast.ImportFrom):
                at = node.lineno - 1
                while "#" not in lines[at] and (not lines[at].strip() or lines[at].lstrip().startswith(("import ", "from "))):
                    at -= 1
                if "#" not in lines[at]:
                    yield module.where(node)


def test_an_import_inside_a_function_is_of_the_start_up_path_or_gives_its_reason(loaded_by_a_run: frozenset[str], tmp_path: Path) -> None:
    started = loaded_by_a_run | loaded_by(EXECUTE, AGENT_SANDBOX_STATE=str(tmp_path)) | loaded_by(KEEPER)
    files = {f"src/{name.replace('.', '/')}{end}" for name in started for end in (".py", "/__init__.py")}
    others = [module for module in modules() if module.name not in files and not module.name.startswith(SENT)]
    assert len(others) > 100, "this was no look at them"
    assert [place for module in others for place in unexplained(module)] == []


def test_an_import_without_a_reason_is_recognised() -> None:
    def of(text: str) -> list[str]:
        return list(unexplained(Module(modules()[0].path, text)))

    assert of("def f():\n    import re\n") and of("# no reason\ndef f():\n    import re\n")
    assert not of("def f():\n    import re  # slow\n    from json import loads\n\n    import os\n")
