"""Code means the same on every runtime that runs it: the claims of the contract, and files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agent_sandbox.engine import plan_launch
from agent_sandbox.engine.work import Code, Work
from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.policy.model import MIB, Guarantee
from agent_sandbox.policy.paths import parse
from agent_sandbox.runtime.base import Hosted, JavaScriptCode, Script
from agent_sandbox.runtime.process.runtime import ProcessRuntime
from agent_sandbox.runtime.wasm.runtime import WasmRuntime
from agent_sandbox.testing import CODE_CLAIMS, JAVASCRIPT_CLAIMS, Bench, Claim
from tests import compiled
from tests.security.harness import ENVIRONMENT, GENEROUS, Box, snapshot


@pytest.fixture(scope="module", params=["process", "wasm"])
def code_runtime(request: pytest.FixtureRequest) -> Iterator[ProcessRuntime | WasmRuntime]:
    made = ProcessRuntime() if request.param == "process" else compiled.runtime()
    yield made
    made.close()


@pytest.fixture
def coder(code_runtime: ProcessRuntime | WasmRuntime, box: Box) -> Box:
    """A box on each runtime that runs Python code."""
    return box.with_(runtime=code_runtime)


@pytest.mark.parametrize("claim", CODE_CLAIMS, ids=lambda claim: claim.__name__)
def test_code_keeps_the_contract(claim: Claim, coder: Box) -> None:
    claim(Bench(coder.runtime, coder.session().explain(Work(Code("python", ""), ENVIRONMENT))))


@pytest.mark.once
@pytest.mark.parametrize("claim", JAVASCRIPT_CLAIMS, ids=lambda claim: claim.__name__)
def test_javascript_keeps_the_contract(claim: Claim, coder: Box) -> None:
    view = coder.session().explain(Work(Code("javascript", ""), ENVIRONMENT))
    claim(Bench(coder.runtime, view, script=JavaScriptCode if "javascript" in coder.runtime.traits.brings else _for_node))


def _for_node(source: str) -> Hosted | Script:
    try:
        return plan_launch.prepare("javascript", source, arguments=(), search_path=ENVIRONMENT["PATH"], processes=True).program
    except RuntimeUnavailable as error:
        pytest.skip(error.message)


def test_what_code_writes_is_in_the_change_set_and_not_on_the_machine(coder: Box) -> None:
    before = snapshot(coder.project)
    outcome = coder.python("""
import os
open("new.txt", "w").write("new")
with open("greeting.txt", "a") as file: file.write("more")
os.remove("src/app.py")
os.makedirs("a/b")
os.rename("new.txt", "a/moved.txt")
os.symlink("greeting.txt", "link")
print(open("link").read(), sorted(os.listdir(".")))
""")
    assert outcome.stdout.decode() == "hello\nmore ['.git', 'a', 'greeting.txt', 'link', 'src']\n", outcome.stderr
    assert {change.path.removeprefix(f"{coder.project}/"): change.kind.value for change in outcome.changes} == {
        "a": "added", "a/b": "added", "a/moved.txt": "added", "greeting.txt": "modified", "link": "added", "src/app.py": "deleted"
    }  # fmt: skip
    assert snapshot(coder.project) == before


def test_code_sees_what_is_allowed_and_not_what_is_denied(coder: Box) -> None:
    (coder.project / "secret").mkdir()
    (coder.project / "secret" / "key").write_text("CANARY")
    allowed, denied = (parse(str(path), home="/") for path in (coder.project, coder.project / "secret"))
    chosen = coder.files(read=True, write=True, allowed=(allowed,), denied=(denied,))
    outcome = chosen.python(f"""
import os
print(open("greeting.txt").read(), sorted(os.listdir(".")))
for path in ("secret/key", "{coder.home}/.ssh/id_rsa", "/etc/shadow", "{coder.project}/../home/.ssh/id_rsa"):
    try:
        print("read", path, open(path).read())
    except OSError:
        pass
""")
    assert outcome.stdout.decode() == "hello\n ['greeting.txt', 'src']\n", outcome.stderr
    read_only = coder.files(read=True, allowed=(allowed,)).python("open('/tmp/x', 'w'); open('new.txt', 'w')")
    assert b"new.txt" in read_only.stderr and read_only.exit.code == 1, read_only
    assert not list(read_only.changes)


def test_masked_files_of_a_clone_are_not_there(coder: Box) -> None:
    outcome = coder.python(f"import os; print(sorted(os.listdir({str(coder.home)!r}))); open({str(coder.home / '.ssh' / 'id_rsa')!r})")
    assert outcome.stdout == b"[]\n" and outcome.exit.code == 1, outcome


def test_a_full_disk_is_said(coder: Box) -> None:
    small = coder.with_(limits=replace(GENEROUS, disk_bytes=8 * MIB))
    outcome = small.python("open('/tmp/big', 'wb').write(bytes(20_000_000))")
    assert outcome.exit.code == 1 and b"OSError" in outcome.stderr and "disk" in outcome.exit.limits_hit, outcome


def test_a_directory_that_is_not_there_is_said_and_nothing_runs(coder: Box) -> None:
    outcome = coder.python("print('ran')", cwd=str(coder.project / "nowhere"))
    assert (outcome.exit.code, outcome.stdout) == (125, b"") and "No such file" in outcome.refused


def test_kept_layers_are_found_again(coder: Box, tmp_path: Path) -> None:
    kept = coder.kept
    assert kept.python("open('kept.txt', 'w').write('1')").exit.code == 0
    assert kept.python("print(open('kept.txt').read())").stdout.strip() == b"1"
    assert kept.changes() == {f"{kept.project}/kept.txt": "added"}


def test_a_guarantee_that_cannot_be_given_is_named_and_nothing_runs(coder: Box) -> None:
    policy = coder.files(read=True).policy
    assert policy is not None
    with pytest.raises(RuntimeUnavailable, match=Guarantee.SEPARATE_KERNEL.value):
        coder.with_(policy=replace(policy, requires=policy.requires | {Guarantee.SEPARATE_KERNEL})).python("pass", cwd="/tmp")
