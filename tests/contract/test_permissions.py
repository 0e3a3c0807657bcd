"""Each permission of the SDK holds in a run: what it leaves out is not there and cannot be done, and without it the same is possible."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import agentbox
from agent_sandbox import (
    AsyncSandbox,
    CodeExecutor,
    FilePermission,
    NetworkPermission,
    PermissionLevel,
    PermissionSet,
    PolicyError,
    ProcessPermission,
    Sandbox,
    SandboxConfig,
    create_sandbox,
)
from agent_sandbox.assembly import here

CANARIES = {"data/a.txt", "data/deep/b.txt", "data/secrets/key.pem", "data/.hidden", "data/.git/config", "config/a.json", "config/a.txt"}
READ, WRITE, FULL = PermissionLevel.READ, PermissionLevel.WRITE, PermissionLevel.FULL

LOOK = """
import json, os
top, found = TOP, {"read": [], "written": []}
for directory, _, names in os.walk(top):
    for name in names:
        path = os.path.join(directory, name)
        try:
            with open(path) as file:
                assert file.read() == "canary"
            found["read"].append(os.path.relpath(path, top))
            with open(path, "a") as file:
                file.write(" and more")
            found["written"].append(os.path.relpath(path, top))
        except OSError:
            pass
print(json.dumps({key: sorted(value) for key, value in found.items()}))
"""
START = """
import json, os, shutil, subprocess, sys
def tried(*argv):
    try:
        return subprocess.run(argv, capture_output=True, text=True, cwd="/tmp").returncode == 0
    except OSError:
        return False
def there(path):
    return path if os.path.exists(path) else "/usr" + path
copied = "/tmp/copied"
try:
    shutil.copy(there("/bin/rm"), copied)
    os.chmod(copied, 0o755)
except OSError:
    pass
print(json.dumps({
    "git": tried("git", "--version"),
    "python": tried("python3", "-c", "print(1)"),
    "ls": tried("ls", "/"),
    "rm": tried("rm", "-f", "/tmp/nothing"),
    "rm by its path": tried(there("/bin/rm"), "-f", "/tmp/nothing"),
    "rm as a copy": tried(copied, "-f", "/tmp/nothing"),
    "rm by its loader": any(tried(loader, there("/bin/rm"), "-f", "/tmp/nothing") for loader in LOADERS),
    "rm of a child": tried("python3", "-c", "import subprocess; subprocess.run(['rm', '-f', '/tmp/nothing'], check=True)"),
    "dd": tried("dd", "if=/dev/null", "of=/dev/null"),
    "mkfs": any(tried(name, "-V") for name in ("mkfs", "mkfs.ext4", "/sbin/mkfs", "/sbin/mkfs.ext4")),
    "a shell": tried("sh", "-c", "true") or tried("bash", "-c", "true"),
}))
"""
FORK = """
import os, time
made = 0
try:
    while made < 40:
        if os.fork() == 0:
            time.sleep(30)
        made += 1
except OSError:
    pass
print(made)
"""


@pytest.fixture(scope="module", autouse=True)
def _no_zygote_is_left() -> Iterator[None]:
    yield
    here().process().close()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in CANARIES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("canary")
    return tmp_path


def told(permissions: PermissionSet, code: str) -> Any:
    result = CodeExecutor(permissions, validate=False).execute(code)
    assert result.success, (result.error, result.stderr)
    return json.loads(result.stdout)


def test_files_are_there_as_the_patterns_say(tree: Path) -> None:
    """The permission of the example, in a tree of our own."""
    look = LOOK.replace("TOP", repr(str(tree)))
    paths, denied = [f"{tree}/data/*", f"{tree}/config/*.json"], [f"{tree}/data/secrets/*"]
    found = told(PermissionSet([FilePermission(READ, paths, denied, allow_hidden=False)]), look)
    assert found == {"read": ["config/a.json", "data/a.txt", "data/deep/b.txt"], "written": []}
    hidden = told(PermissionSet([FilePermission(READ, paths, denied, allow_hidden=True)]), look)
    assert {*hidden["read"]} - {*found["read"]} == {"data/.hidden", "data/.git/config"}
    undenied = told(PermissionSet([FilePermission(READ, paths)]), look)
    assert {*undenied["read"]} - {*found["read"]} == {"data/secrets/key.pem"}
    assert {*told(PermissionSet([FilePermission(READ, [tree], allow_hidden=True)]), look)["read"]} == CANARIES, "the control arm"
    assert told(PermissionSet(), look)["read"] == told(PermissionSet([FilePermission()]), look)["read"] == []


def test_what_is_written_needs_its_level_and_is_never_real(tree: Path) -> None:
    look = LOOK.replace("TOP", repr(str(tree)))
    permissions = PermissionSet([FilePermission(WRITE, [f"{tree}/data"], [f"{tree}/data/secrets"])])
    with Sandbox(permissions=permissions) as sandbox:
        result = sandbox.execute(look)
    assert json.loads(result.stdout)["written"] == ["data/a.txt", "data/deep/b.txt"]
    assert {change.path for change in result.changes} == {f"{tree}/data/a.txt", f"{tree}/data/deep/b.txt"}
    assert {*told(PermissionSet([FilePermission(FULL, [f"{tree}/data"])]), look)["written"]} == {
        name for name in CANARIES if name.startswith("data")
    }
    assert all((tree / name).read_text() == "canary" for name in CANARIES)


def test_programs_are_there_as_the_lists_say() -> None:
    """The permission of the example, by every way there is to start a program."""
    start = START.replace("LOADERS", "('/lib64/ld-linux-x86-64.so.2', '/lib/ld-linux-aarch64.so.1')")
    every = told(PermissionSet([ProcessPermission(allow_subprocess=True, allow_shell=True)]), start)
    assert [name for name, started in every.items() if not started] in ([], ["mkfs"]), "the control arm; not every machine has mkfs"
    listed = ProcessPermission(True, allow_shell=False, allowed_commands=["python*", "pip", "git"], denied_commands=["rm", "dd", "mkfs*"])
    assert [name for name, started in told(PermissionSet([listed]), start).items() if started] == ["git", "python"]
    denied = told(PermissionSet([ProcessPermission(True, True, denied_commands=["rm", "dd", "mkfs*"])]), start)
    assert [name for name, started in denied.items() if started] == ["git", "python", "ls", "a shell"]
    without_shell = told(PermissionSet([ProcessPermission(True, allow_shell=False)]), start)
    assert [name for name in ("git", "ls", "rm", "a shell") if without_shell[name]] == ["git", "ls", "rm"]
    none = told(PermissionSet([ProcessPermission(allow_subprocess=False)]), start)
    assert not any(none.values())


def test_processes_are_counted() -> None:
    few = told(PermissionSet([ProcessPermission(True, True, max_processes=5)]), FORK)
    assert 1 <= few <= 5
    assert told(PermissionSet([ProcessPermission(True, True)]), FORK) == 40, "the control arm"


@pytest.mark.once
def test_a_sandbox_takes_permissions_in_one_place_only() -> None:
    permissions = PermissionSet([ProcessPermission(True, max_processes=5)])
    for own in ({"allow_file_read": True}, {"allow_subprocess": True}, {"allowed_paths": ["/x"]}, {"max_processes": 7}):
        with pytest.raises(PolicyError, match=f"permissions are given, and {next(iter(own))} as well"):
            Sandbox(SandboxConfig(**own), permissions=permissions)
    with Sandbox(SandboxConfig(max_memory_mb=512, max_processes=7), permissions=PermissionSet()) as sandbox:
        assert (sandbox.config.max_memory_mb, sandbox.config.max_processes, sandbox.config.allow_subprocess) == (512, 7, False)
    for make in (create_sandbox, agentbox.create_sandbox, agentbox.Sandbox, AsyncSandbox):
        assert make(permissions=permissions).config.max_processes == 5


def test_what_the_runtime_cannot_enforce_is_an_error() -> None:
    with pytest.raises(PolicyError, match="allow_subprocess=True is refused with runtime='wasm'"):
        Sandbox(permissions=PermissionSet([ProcessPermission(True)]), runtime="wasm")


def test_there_is_no_interface_but_the_sandboxs_own_loopback_whatever_is_permitted() -> None:
    permitted = PermissionSet([NetworkPermission(allow_outbound=True, allow_localhost=True)])
    found = told(permitted, "import json, socket; print(json.dumps([name for _, name in socket.if_nameindex()]))")
    assert found == ["lo"]
