"""Rules of the house that import-linter cannot say. The floors themselves are its contract, in pyproject.toml."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator

import pytest

from tests.architecture.sources import INSIDE, SENT, TOP_FLOOR, Module, modules

# What would make a decision depend on more than the values it is given.
IMPURE = frozenset({"os", "subprocess", "socket", "time", "random", "secrets", "threading", "tempfile", "shutil"})
ASSEMBLY = "src/agent_sandbox/assembly.py"
ENVIRONMENT = frozenset({"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv", "get_exec_path", "expanduser", "expandvars"})


def environment_reads(module: Module) -> Iterator[str]:
    for name, statement in module.imports():
        if name.rpartition(".")[0] in ("os", "os.path", "posixpath") and name.rpartition(".")[2] in ENVIRONMENT:
            yield module.where(statement)
    for node in ast.walk(module.tree):  # whatever `os` is called there: no other module has these names
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT:
            yield module.where(node)


def imports_of(module: Module, package: str) -> Iterator[str]:
    for name, statement in module.imports():
        if name == package or name.startswith(f"{package}."):
            yield module.where(statement)


def test_only_the_kernel_folder_reaches_for_ctypes() -> None:
    ours = [module for module in modules() if not module.name.startswith(SENT)]
    users = [place for module in ours for place in imports_of(module, "ctypes")]
    outside = [place for module in ours if module.folder != "kernel" for place in imports_of(module, "ctypes")]
    assert users, "the rule watches nothing: no module imports ctypes"
    assert outside == []


def test_what_is_sent_into_sandboxes_is_never_imported_by_us() -> None:
    ours = [module for module in modules() if not module.name.startswith(SENT)]
    assert len(ours) < len(modules()), "the rule watches nothing: there is nothing that is sent"
    assert [place for module in ours for place in imports_of(module, "agent_sandbox.selftest.attempts")] == []


def test_only_the_top_floor_the_self_test_and_the_assembly_look_at_the_environment() -> None:
    below = [
        module for module in modules() if module.folder not in (TOP_FLOOR, "selftest", "server") and module.name not in (*INSIDE, ASSEMBLY)
    ]
    assert [place for module in below for place in environment_reads(module)] == []


@pytest.mark.parametrize(
    "line",
    [
        "import os\nos.environ['HOME']",
        "from os import getenv",
        "def f():\n    import os\n    os.getenv('HOME')",
        "import os as system\nsystem.environ['HOME']",
        "import os\nos.path.expanduser('~')",
        "from os.path import expandvars",
    ],
)
def test_a_look_at_the_environment_is_recognised(line: str) -> None:
    assert list(environment_reads(Module(modules()[0].path, line)))


BUILT_BY_THE_ASSEMBLY = {
    "Session": "agent_sandbox.engine.run",
    "Gate": "agent_sandbox.engine.gate",
    "Ledger": "agent_sandbox.ledger.writer",
    "Runtimes": "agent_sandbox.engine.runtimes",
    "only": "agent_sandbox.engine.runtimes",
}


def builders(module: Module) -> Iterator[str]:
    """Return where a module calls what the assembly alone may build. A class may copy itself in its own module."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            home = BUILT_BY_THE_ASSEMBLY.get(node.func.id)
            if home is not None and f"{home}.{node.func.id}" in dict(module.imports()):
                yield module.where(node)


def test_only_the_assembly_builds_sessions_gates_ledgers_and_runtimes() -> None:
    assert [place for module in modules() if module.name != ASSEMBLY for place in builders(module)] == []
    (assembly,) = [module for module in modules() if module.name == ASSEMBLY]
    assert len(list(builders(assembly))) >= len(BUILT_BY_THE_ASSEMBLY), "the rule watches nothing"


def test_policy_is_pure_and_imports_nothing_that_acts_or_varies() -> None:
    policy = [module for module in modules() if module.folder == "policy"]
    assert policy
    assert [place for module in policy for package in IMPURE for place in imports_of(module, package)] == []


def test_printing_is_for_surfaces() -> None:
    calls = [
        module.where(node)
        for module in modules()
        if module.folder not in (TOP_FLOOR, "selftest") and module.name not in INSIDE
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert calls == []


def test_resources_end_where_their_block_ends_and_never_in_a_finaliser() -> None:
    finalisers = [
        module.where(node)
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef) and node.name == "__del__"
    ]
    assert finalisers == []


def test_the_second_package_stands_on_the_first_and_never_the_other_way_round() -> None:
    inside = [module for module in modules() if "agentbox" not in module.path.parts]
    assert [place for module in inside for place in imports_of(module, "agentbox")] == []


@pytest.mark.parametrize("package", ["agent_sandbox", "agentbox"])
def test_every_public_name_is_there(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__all__
    assert sorted(set(module.__all__)) == sorted(module.__all__), "a name is listed twice"
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
