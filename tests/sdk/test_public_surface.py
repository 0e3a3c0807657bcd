"""The public names of the package. The tests list them all, so that nobody adds or removes a name by accident."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import agent_sandbox
import agentbox
from agent_sandbox import options
from agent_sandbox.config import SandboxConfig

SOURCE = Path(agent_sandbox.__file__).parent
MODULES = ("aio", "checkpoints", "files", "live", "sandbox", "session", "tasks", "timelines", "workspaces")

SURFACE = {
    "AsyncLiveSandbox": "changes close ended files id kill run working_dir",
    "AsyncFiles": "exists list mkdir read read_bytes remove stat write",
    "AsyncPastState": "evaluate frames list read variables",
    "AsyncSandbox": "audit close config execute files grant id intent kill live propose_network replay resume revoke run session simulate "
    "status",
    "AsyncSession": "changes checkpoint close diff ended files fork id inspect kill rewind run timeline",
    "AsyncWorkspace": "carry_out changes close diff drift execute files forget id intent kill live over project promote "
    "propose_network reset rollback run simulate snapshot snapshots undo",
    "CodeExecutor": "execute validate_code",
    "Coordinator": "cancel close run",
    "FileEntry": "is_directory name target",
    "IsolationBackend": "execute is_available",
    "LiveSandbox": "changes close ended files kill run",
    "PermissionSet": "add grants network over policy settings warnings",
    "ProcessIsolation": "execute is_available",
    "PastState": "evaluate frames list read variables",
    "Replay": None,
    "LiveExperiment": "attempt close keep run",
    "Sandbox": "close execute files grant id intent kill live propose_network replay resume revoke run session simulate status",
    "SandboxFiles": "exists list mkdir read read_bytes remove stat write",
    "SandboxResult": None,
    "SandboxSession": "changes checkpoint close ended files fork id inspect kill rewind run timeline",
    "SessionCheckpoint": "delete export id",
    "Timeline": "diff failed here steps",
    "Workspace": "carry_out changes close diff drift execute files forget id intent kill live over promote "
    "propose_network reset rollback run simulate snapshot snapshots undo",
    "WorkspaceDiff": None,
}


def public(made: type) -> set[str]:
    return {name for name in vars(made) if not name.startswith("_")}


@pytest.mark.parametrize("name", [name for name, members in SURFACE.items() if members is not None])
def test_a_class_has_these_public_members(name: str) -> None:
    wanted = {*(SURFACE[name] or "").split()}
    assert public(getattr(agent_sandbox, name)) == wanted - ({"id"} if name == "Sandbox" else set())


def test_instances_have_no_public_attributes_beside_those_that_are_documented(tmp_path: Path) -> None:
    def attributes(made: object) -> set[str]:
        return {name for name in vars(made) if not name.startswith("_")}

    with agent_sandbox.Sandbox() as sandbox, sandbox.session() as session:
        assert attributes(sandbox) == {"audit", "config", "id"}
        assert attributes(session) == attributes(sandbox.files) == set()
        assert attributes(sandbox.live()) == {"id", "working_dir"}
    assert attributes(agent_sandbox.Workspace.over(tmp_path)) == {"project"}


def test_the_settings_have_no_public_methods_that_only_the_package_needs() -> None:
    own = public(SandboxConfig) - {each.name for each in fields(SandboxConfig)}
    assert own == {"cwd", "limits", "policy", "warnings"}


def test_every_name_of_the_package_is_there_and_from_its_own_module() -> None:
    assert sorted(agent_sandbox.__all__) == sorted(agent_sandbox._HOME_OF) and len({*agent_sandbox.__all__}) == len(agent_sandbox.__all__)
    for name in agent_sandbox.__all__:
        made = getattr(agent_sandbox, name)
        assert made.__name__ == name and made.__doc__, name
    for name in agentbox.__all__:
        assert getattr(agentbox, name).__doc__
    assert {*agentbox.__all__} <= {*agent_sandbox.__all__}
    with pytest.raises(AttributeError, match="no attribute 'Sandbocks'"):
        _ = agent_sandbox.Sandbocks  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", MODULES)
def test_a_module_says_what_is_public_in_it(module: str) -> None:
    made = importlib.import_module(f"agent_sandbox.{module}")
    tree = ast.parse((SOURCE / f"{module}.py").read_text(encoding="utf-8"))
    kinds = (ast.ClassDef, ast.FunctionDef)
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")}
    assert all(hasattr(made, name) for name in made.__all__)
    assert {*made.__all__} & classes and {*made.__all__} <= {*agent_sandbox.__all__} | {"Shell"}
    assert all(ast.get_docstring(node) for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_"))


def test_the_types_of_the_settings_are_those_of_the_configuration() -> None:
    names = vars(importlib.import_module("agent_sandbox.audit")) | vars(importlib.import_module("agent_sandbox.policy.code.patterns"))
    names |= vars(importlib.import_module("agent_sandbox.policy.network"))
    names |= vars(importlib.import_module("agent_sandbox.policy.bound_secrets"))
    names |= vars(importlib.import_module("agent_sandbox.policy.intents"))
    typed = get_type_hints(options.SandboxSettings, localns=names)
    configured = {
        name: hint for name, hint in get_type_hints(SandboxConfig).items() if name in {each.name for each in fields(SandboxConfig)}
    }
    assert typed == configured


def test_every_function_of_the_interface_names_its_arguments() -> None:
    """No `**options: Any`: neither an editor nor a type checker could help."""
    untyped = []
    for name in agent_sandbox.__all__:
        made = getattr(agent_sandbox, name)
        for member in (made, *vars(made).values()) if inspect.isclass(made) else (made,):
            if inspect.isfunction(member) and member.__qualname__ != "__init__":  # that one is made by `_fast.values.dataclass`
                kinds = inspect.signature(member).parameters.values()
                untyped += [member.__qualname__ for each in kinds if each.kind is each.VAR_KEYWORD and "Unpack" not in str(each.annotation)]
    assert untyped == []


def examples() -> Iterator[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    for module in (*MODULES, "_calls"):
        yield from (test for test in finder.find(importlib.import_module(f"agent_sandbox.{module}")) if test.examples)


@pytest.mark.parametrize("example", tuple(examples()), ids=lambda example: example.name)
def test_the_examples_of_the_docstrings_do_what_they_say(example: doctest.DocTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_SANDBOX_STATE", str(tmp_path / "state"))
    project = tmp_path / "project"
    project.mkdir()
    (project / "notes.txt").write_text("one\n")
    given: dict[str, Any] = {name: getattr(agent_sandbox, name) for name in agent_sandbox.__all__}
    example.globs = {**given, "project": project, "asyncio": importlib.import_module("asyncio")}
    said = io.StringIO()
    failed = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.write).failed
    assert not failed, said.getvalue()
    agent_sandbox.Workspace.over(project).reset()


def test_the_classes_that_people_start_with_have_examples() -> None:
    told = {example.name.partition("agent_sandbox.")[2] for example in examples()}
    starts = {"sandbox.Sandbox", "session.SandboxSession", "workspaces.Workspace", "aio.AsyncSandbox", "aio.AsyncWorkspace"}
    starts |= {"live.LiveSandbox", "tasks.Coordinator"}
    assert (
        starts <= told and {"sandbox.Sandbox.files", "session.SandboxSession.files", "workspaces.Workspace.files", "_calls.shell"} <= told
    )
    assert all("SKIP" not in one.source for example in examples() for one in example.examples)


RIGHT = """
import asyncio
from pathlib import Path
from typing import assert_type

import agentbox
from agent_sandbox import (
    AsyncSandbox, AsyncWorkspace, FileEntry, RunOptions, Sandbox, SandboxConfig, SandboxResult, SandboxSettings,
    Workspace, create_sandbox, shell,
)

settings: SandboxSettings = {"timeout_seconds": 5, "allowed_paths": [Path("/data"), "/srv"]}
Sandbox(allow_file_read=True, max_memory_mb=64, tools={"double": lambda n: 2 * n})
with Sandbox(name="mine", **settings) as sandbox:
    assert_type(sandbox.execute("print(1)", timeout=1.5, args=["a"]), SandboxResult)
    options: RunOptions = {"stdin": b"x"}
    sandbox.run(shell("true"), **options)
    sandbox.run(["true"], on_output=lambda stream, text: print(stream.upper(), text))
    with sandbox.session(tools=[len]) as session:
        assert_type(session.files.read("x"), str)
        assert_type(session.files.list(), tuple[FileEntry, ...])
create_sandbox(5, allow_network=False, capabilities=["cap"])
agentbox.Sandbox(runtime="wasm")
with Workspace.over(Path("."), config=SandboxConfig(allow_file_write=True)) as work:
    work.run("1", cwd="src", watch_reads=True, timeout=3)
    work.files.write(Path("x"), b"1")


async def main() -> None:
    async with AsyncSandbox(allow_subprocess=True) as box, AsyncWorkspace.over(".") as project:
        assert_type(await box.run("1", seed=7), SandboxResult)
        assert_type(await project.files.read_bytes("x"), bytes)
        await project.promote(drift="merge")


asyncio.run(main())
"""

WRONG = {
    "Sandbox(allow_file_raed=True)": "allow_file_raed",
    "Sandbox(timeout_seconds='5')": "timeout_seconds",
    "Sandbox('python')": "SandboxConfig",
    "Sandbox().execute('1', timout=3)": "timout",
    "Sandbox().execute(b'1')": "bytes",
    "Sandbox().run(7)": "int",
    "Sandbox().session(stdin='x')": "stdin",
    "Sandbox().files.write('x', 7)": "int",
    "Sandbox().perform": "perform",
    "create_sandbox(timeout_seconds=3)": "timeout_seconds",
    "create_sandbox(3, colour='red')": "colour",
    "AsyncSandbox(allow_file_raed=True)": "allow_file_raed",
    "Workspace.over('.', allow_network=True)": "allow_network",
    "Workspace.over('.').run('1', seed=3)": "seed",
    "AsyncWorkspace.over('.').run('1', seed=3)": "seed",
    "Workspace.over('.').promote(drift='perhaps')": "drift",
    "PermissionSet().settings(max_memory=3)": "max_memory",
    "agentbox.Sandbox(allow_file_raed=True)": "allow_file_raed",
}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_type_checker_passes_right_programs_and_finds_each_wrong_argument(tmp_path: Path) -> None:
    (tmp_path / "right.py").write_text(RIGHT)
    head = "import agentbox\nfrom agent_sandbox import *\n"
    (tmp_path / "wrong.py").write_text(head + "".join(f"{line}\n" for line in WRONG))
    environment = {**os.environ, "MYPYPATH": str(SOURCE.parent)}
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--cache-dir",
        str(tmp_path / "cache"),
        "--no-error-summary",
        "--hide-error-context",
    ]
    done = subprocess.run(
        [*command, "--config-file=", "right.py", "wrong.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    found = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert [line for line in found if not line.startswith("wrong.py:")] == [], done.stdout + done.stderr
    for number, (line, word) in enumerate(WRONG.items(), start=head.count("\n") + 1):
        said = [each for each in found if each.startswith(f"wrong.py:{number}: ")]
        assert said and any(word in each for each in said), (line, said)
