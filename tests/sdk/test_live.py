"""Live sandboxes of the SDK: what they refuse, what they pass, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from pathlib import Path

import pytest

from agent_sandbox import Denied, PolicyError, Sandbox, SandboxConfig, SandboxError, SandboxStatus, Workspace, shell
from agent_sandbox._fast.values import replace
from agent_sandbox.adapters.environment import SandboxEnvironment
from agent_sandbox.engine import live_commands
from agent_sandbox.engine.turns import Turn, Turned
from agent_sandbox.policy.decide import Allow
from tests.patience import until


def test_input_output_and_environment_pass_unchanged() -> None:
    with Sandbox(
        allow_subprocess=True, validate_code=False, max_output_bytes=None, max_memory_mb=1024, env_vars={"ONE": "1"}
    ).live() as live:
        data = bytes(range(256)) * 40_000
        assert live.run(["cat"], stdin=data).stdout_bytes == data, "more than one turn carries, either way"
        assert live.run(["cat"]).stdout == "", "without input, its end comes at once"
        both = live.run(shell("echo $ONE$TWO; echo three >&2; pwd"), env_vars={"TWO": "2"})
        assert (both.stdout, both.stderr) == ("12\n/tmp\n", "three\n"), both
        long = f"x={'a' * 200_000}; echo ${{#x}}"
        assert live.run(shell(long)).stdout == "200000\n", "a line that is too long for one argument"
        assert live.run("import sys; print(sys.argv[1:])", timeout=30).stdout == "[]\n"
        pieces: list[tuple[str, str]] = []
        live.run(shell("echo a; echo b >&2"), on_output=lambda stream, text: pieces.append((stream, text)))
        assert sorted(pieces) == [("stderr", "b\n"), ("stdout", "a\n")]


def test_output_beyond_the_limit_is_cut_and_the_result_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_commands, "PATIENCE_BYTES", 1 << 20)
    with Sandbox(allow_subprocess=True, max_output_bytes=1000).live() as live:
        much = live.run(shell("head -c 100000 /dev/zero"))
        assert len(much.stdout_bytes) == 1000 and much.truncated and much.exit_code == 0
        assert not live.run(["echo", "a"]).truncated
        endless = live.run(["yes"])
        assert "too much output" in (endless.error or "") and len(endless.stdout_bytes) == 1000


def test_a_live_sandbox_ends_with_the_lifetime_of_its_sandbox_also_between_commands() -> None:
    with Sandbox(allow_subprocess=True, lifetime_seconds=3).live() as live:
        live.run(shell("sleep 1000 &"))
        with pytest.raises(SandboxError):  # between two commands, or in one
            while True:
                live.run(["sleep", "0.3"])
        opened = live._commands.turns._opened
        assert opened is None or until(lambda: not opened.guest.waiting), "what ran in the background is ended, too"
        with pytest.raises(SandboxError, match="outlived"):
            live.run(["true"])


def test_a_live_sandbox_is_native() -> None:
    with Sandbox(runtime="auto", allow_subprocess=True).live() as live:
        assert live.run(["echo", "a"]).stdout == "a\n"
    with pytest.raises(PolicyError, match="no processes"):
        Sandbox(runtime="wasm").live()


def test_a_live_sandbox_is_held_to_the_policy_and_each_command_is_recorded(project: Path) -> None:
    secret = project / "secret.txt"
    secret.write_text("canary")
    config = SandboxConfig(
        allow_file_read=True,
        allow_subprocess=True,
        allowed_paths=[project],
        denied_paths=[secret],
        denied_commands=["rm"],
        working_dir=project,
    )
    sandbox = Sandbox(config)
    with sandbox.live() as live:
        assert live.run(["cat", "greeting.txt"]).stdout == "hello\n", "the control: what is allowed can be read"
        assert "canary" not in live.run(["cat", "secret.txt"]).stdout
        with pytest.raises(Denied):
            live.files.read("secret.txt")
        refused = live.run(["rm", "greeting.txt"])
        assert refused.exit_code is None and refused.status is SandboxStatus.FAILED and "rm" in (refused.error or "")
        written = live.run(shell("echo x > greeting.txt"))
        assert not written.success, "nothing can be written that the policy does not allow"
    assert (project / "greeting.txt").read_text() == "hello\n"
    assert sandbox.audit is not None
    recorded = {entry.target: entry.allowed for entry in sandbox.audit.get_entries()}
    assert recorded["cat greeting.txt"] and not recorded["rm greeting.txt"], "each command is recorded, and each refusal"


def test_code_is_checked_first_where_that_is_asked_for() -> None:
    with Sandbox(allow_subprocess=True).live() as live:
        refused = live.run("open('/etc/passwd').read()")
        assert refused.exit_code is None and "open(" in (refused.error or "")


def test_nonsense_is_refused_before_anything_runs() -> None:
    with Sandbox(allow_subprocess=True).live() as live:
        for work in (b"ls", 7, [1], None):
            with pytest.raises(TypeError):
                live.run(work)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            live.run(["true"], timeout="soon")  # type: ignore[arg-type]
        assert live.run([]).exit_code is None and live.run(["a\0b"]).exit_code is None
        hidden = live.run(["pwd"], cwd="/etc")
        assert hidden.exit_code is None and "does not show" in (hidden.error or "")
        with pytest.raises(PolicyError):
            live.files.read("../etc/passwd")
        assert live.run(["echo", "fine"]).stdout == "fine\n"


def test_an_answer_that_no_server_of_ours_gives_is_not_believed() -> None:
    with pytest.raises(SandboxError, match="no valid answer"):
        live_commands._exit_of(70_000, None)
    with Sandbox(allow_subprocess=True).live() as live:
        live.run(["true"])
        forged = live._commands.turns
        taken = forged.take
        forged.take = lambda turn, allow, operation: replace(taken(turn, allow, operation), value={"stdout": 7})  # type: ignore[method-assign]
        with pytest.raises(SandboxError, match="no valid answer"):
            live.run(["true"])
        forged.take = taken  # type: ignore[method-assign]
        assert live.run(["true"]).success, "the control"


def test_a_server_that_was_stopped_does_not_hold_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_commands, "LATE_SECONDS", 1.0)
    with Sandbox(allow_subprocess=True).live() as live:
        with pytest.raises(SandboxError, match="timed-out"):
            live.run(shell("kill -STOP $PPID; sleep 1000"), timeout=0.2)
        assert live.ended, "the sandbox is over, and the caller is told so"


def test_no_turn_of_a_command_may_last_much_longer_than_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_commands, "LATE_SECONDS", 1.0)
    with Sandbox(allow_subprocess=True).live() as live:
        live.run(["true"])
        walls: list[float | None] = []
        taken = live._commands.turns.take

        def take(turn: Turn, allow: Allow, operation: str) -> Turned:
            walls.append(turn.wall)
            return taken(turn, allow, operation)

        live._commands.turns.take = take  # type: ignore[method-assign]
        assert live.run(["cat"], stdin="given", timeout=20).stdout == "given"
        assert len(walls) >= 3, "it is fed, started and waited for"
        assert all(wall is not None and wall <= 21 for wall in walls), "also those before the program runs, which may stop the server"
        del walls[:]
        live.run(["true"])
        assert max(wall or 0 for wall in walls) > 21, "the control: the default limit gives more"


def test_closing_ends_commands_and_the_sandbox_closes_what_is_live() -> None:
    with Sandbox(allow_subprocess=True) as sandbox:
        live = sandbox.live()
        started, ended = threading.Event(), threading.Event()

        def run() -> None:
            with contextlib.suppress(SandboxError):
                live.run(shell("echo there; sleep 1000"), on_output=lambda stream, text: started.set())
            ended.set()

        threading.Thread(target=run).start()
        assert started.wait(60)
    assert ended.wait(60) and live.ended
    with pytest.raises(SandboxError, match="closed"):
        live.run(["true"])
    live.close()


def test_a_live_sandbox_that_is_dropped_ends_with_a_warning() -> None:
    live = Sandbox(allow_subprocess=True).live()
    live.run(["true"])
    with pytest.warns(ResourceWarning, match="unclosed <live sandbox"):
        del live
        gc.collect()


def test_cancelling_a_task_kills_its_command_alone(project: Path) -> None:
    async def main() -> tuple[bool, str]:
        with SandboxEnvironment(project) as environment:
            files = await environment.files_async()
            task = asyncio.create_task(environment.run_async(shell("echo $$ > /tmp/pid; exec sleep 1000")))
            while not await files.exists("/tmp/pid") or not await files.read("/tmp/pid"):
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gone = await environment.run_async(shell("kill -0 $(cat /tmp/pid)"))
            return gone.success, (await environment.run_async(["cat", "greeting.txt"])).stdout

    assert asyncio.run(main()) == (False, "hello\n")


def test_an_environment_of_an_adapter_makes_nothing_before_its_first_use_and_leaves_no_directory(project: Path) -> None:
    environment = SandboxEnvironment()
    assert not environment.started and not environment.alive
    place = Path(environment.working_dir)
    assert place.is_dir() and not any(place.iterdir())
    environment.run(shell("echo x > made.txt"))
    assert not any(place.iterdir()), "the real directory stays empty"
    environment.close()
    environment.close()
    assert not place.exists()
    with pytest.raises(SandboxError, match="closed"):
        environment.run(["true"])
    with SandboxEnvironment(project) as kept:
        kept.run(shell("echo x > made.txt"))
    assert "made.txt" in kept.workspace.diff() and not (project / "made.txt").exists()
    Workspace.over(project).reset()
