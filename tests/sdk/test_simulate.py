"""`Sandbox.simulate`, and `Workspace.simulate` with `carry_out`."""

from __future__ import annotations

import os
import random
import shutil
import time
from hashlib import sha256
from pathlib import Path

import pytest

from agent_sandbox import Denied, PolicyError, Sandbox, SandboxError, Workspace, shell
from agent_sandbox.assembly import here
from agent_sandbox.engine.simulation.risk import Level
from agent_sandbox.workspace.originals.runs import TICK_NS
from tests.e2e.program import tree


@pytest.fixture
def settled(project: Path) -> Path:
    """A project whose files are older than the clock that dates them is coarse: see `workspace.originals`."""
    time.sleep(3 * TICK_NS / 1e9)
    return project


def test_a_sandbox_says_what_work_would_do() -> None:
    with Sandbox(allow_subprocess=True, allow_file_read=True, allow_file_write=True) as sandbox:
        plan = sandbox.simulate(shell("echo x > /etc/simulated; cat /etc/shadow; exit 3"), env_vars={"A_TOKEN": "x"})
        written = [("/etc/simulated", "added", Level.HIGH)] if os.geteuid() == 0 else []  # others may not, inside as outside
        assert [(file.path, file.change, file.risk.level) for file in plan.files] == written
        assert any(use.program.endswith("/cat") for use in plan.programs)
        assert {"/etc/shadow", "A_TOKEN"} <= {secret.name for secret in plan.secrets}
        assert plan.ended.code == 3 and plan.risk.level is Level.HIGH and len(plan.digest) == 64
        harmless = sandbox.simulate("print(1)")
        assert harmless.files == () and harmless.risk.level is Level.LOW
    assert not Path("/etc/simulated").exists()


def test_a_refusal_is_raised() -> None:
    with Sandbox() as sandbox, pytest.raises(Denied):
        sandbox.simulate(["ls"])


def test_a_workspace_carries_out_the_plan_it_showed_once(settled: Path) -> None:
    project = settled
    work = Workspace.over(project)
    plan = work.simulate(shell("echo two >> greeting.txt; touch .envrc"))
    assert {file.path for file in plan.files} == {str(project / "greeting.txt"), str(project / ".envrc")}
    assert (project / "greeting.txt").read_text() == "hello\n" and len(work.changes()) == 0
    with pytest.raises(Denied, match="environment"):
        work.carry_out(plan)
    assert work.carry_out(plan, approve="environment").promotion.number == 1
    assert (project / "greeting.txt").read_text() == "hello\ntwo\n"
    with pytest.raises(PolicyError, match="there is no plan"):
        work.carry_out(plan, approve="environment")
    work.undo()
    assert (project / "greeting.txt").read_text() == "hello\n"


def test_a_plan_rests_on_what_waited_in_the_sandbox(project: Path) -> None:
    work = Workspace.over(project)
    work.run(shell("echo waiting > waiting.txt; mkdir d; echo one > d/one"))
    plan = work.simulate(shell("cat waiting.txt d/one > both.txt; echo two > d/two"))
    assert {file.path for file in plan.files} == {str(project / name) for name in ("both.txt", "d", "d/two")} and plan.on_the_sandbox
    work.run(shell("echo more >> waiting.txt"))
    with pytest.raises(PolicyError, match="changes of the project's sandbox"):
        work.carry_out(plan)
    again = work.simulate(shell("cat waiting.txt d/one > both.txt; echo two > d/two"))
    work.carry_out(again)
    assert (project / "both.txt").read_text() == "waiting\nmore\none\n"
    assert sorted(path.name for path in (project / "d").iterdir()) == ["two"], "what only the sandbox has changed is no part of the plan"
    assert work.run(shell("cat waiting.txt d/one d/two")).stdout == "waiting\nmore\none\ntwo\n"


def test_a_plan_rests_on_what_was_read(settled: Path) -> None:
    work = Workspace.over(settled)
    plan = work.simulate(shell("wc -l < greeting.txt > count.txt; cat no-such-file || true"))
    assert str(settled / "greeting.txt") in {each.path for each in plan.read}
    (settled / "greeting.txt").write_text("hello\nagain\n")
    with pytest.raises(PolicyError, match="which the command read, has changed"):
        work.carry_out(plan)
    (settled / "greeting.txt").write_text("hello\n")
    (settled / "src" / "app.py").write_text("nobody read this\n")
    work.carry_out(plan)
    assert (settled / "count.txt").read_text() == "1\n"


@pytest.mark.parametrize("times", [5, pytest.param(500, marks=pytest.mark.torture)])
def test_whatever_byte_of_a_kept_plan_is_changed_it_is_exactly_the_plan_or_nothing(settled: Path, times: int) -> None:
    work, chance = Workspace.over(settled), random.Random(times)
    line = shell("echo two >> greeting.txt; mkdir new; echo x > new/x; chmod 0640 new/x; ln -s x new/link; rm src/app.py")
    before, refusals, tried = tree(settled), 0, 0
    while tried < times or not refusals:  # a changed byte may be of no account
        tried += 1
        assert tried <= times + 100, "nothing is ever refused"
        plan = work.simulate(line)
        (kept,) = (text.parent for text in Path(here().host.state, "plans").glob(f"*/plan-{plan.digest}"))
        files = [path for path in kept.rglob("*") if path.is_file() and not path.is_symlink() and path.stat().st_size]
        mutated = chance.choice(files)
        content = bytearray(mutated.read_bytes())
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        mutated.write_bytes(content)
        try:
            work.carry_out(plan)
        except SandboxError:
            refusals += 1
            assert tree(settled) == before, mutated
            shutil.rmtree(kept, ignore_errors=True)
        else:
            found = {path: effect.sha256 for path, effect in ((Path(each.path), each) for each in plan.files) if effect.type == "file"}
            assert all(sha256(path.read_bytes()).hexdigest() == digest for path, digest in found.items()), mutated
            work.undo()
            assert tree(settled) == before, mutated
