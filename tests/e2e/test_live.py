"""A live sandbox as programs use it, as root and as a user: one machine for all commands, on stored layers and on throw-away ones."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from agent_sandbox import Busy, SandboxError, Workspace, shell
from tests.patience import until

WAIT_FOR = "while [ ! -s {} ]; do sleep 0.05; done; cat {}"


@pytest.mark.parametrize("kept", [True, False])
def test_commands_share_one_machine_and_nothing_real_changes(project: Path, kept: bool) -> None:
    with Workspace.over(project) as workspace:
        with workspace.live(kept=kept) as live:
            began = live.run(shell("mkfifo /tmp/door; (cat < /tmp/door > /tmp/late; echo more >> greeting.txt) & echo early > /tmp/early"))
            assert began.success and began.exit_code == 0, "the command has ended, and what it left in the background goes on"
            live.files.write("new.txt", "made outside of any command\n")
            assert live.run(["cat", "new.txt", "/tmp/early"]).stdout == "made outside of any command\nearly\n"
            assert live.run(shell(f"echo through > /tmp/door; {WAIT_FOR.format('/tmp/late', '/tmp/late')}")).stdout == "through\n"
            assert live.run(["sh", "-c", "exit 7"]).exit_code == 7 and live.run(["no-such-program"]).exit_code == 127
            live.run(shell("while [ $(grep -c . greeting.txt) -lt 2 ]; do sleep 0.05; done"))
            if kept:
                with pytest.raises(Busy):
                    workspace.promote()
        with pytest.raises(SandboxError, match="closed"):
            live.run(["true"])
        assert (project / "greeting.txt").read_text() == "hello\n" and not (project / "new.txt").exists()
        changed = {os.path.basename(change.path) for change in (workspace.changes() if kept else live.changes)}
        assert {"greeting.txt", "new.txt"} <= changed
        if kept:
            assert workspace.promote() is not None
            assert (project / "greeting.txt").read_text() == "hello\nmore\n" and (project / "new.txt").exists()
        else:
            assert not workspace.changes()


def test_commands_run_at_once_and_one_that_is_cut_off_disturbs_no_other(project: Path) -> None:
    with Workspace.over(project) as workspace, workspace.live(kept=False) as live:
        found: list[str] = []
        waiting = threading.Thread(target=lambda: found.append(live.run(shell(WAIT_FOR.format("/tmp/sign", "/tmp/sign"))).stdout))
        waiting.start()
        late = live.run(shell("sleep 1000 & echo $! > /tmp/child; sleep 1000"), timeout=0.3)
        assert late.exit_code == 124 and late.limits_hit == ("wall",)
        dead = shell("kill -0 $(cat /tmp/child) && grep -v zombie /proc/$(cat /tmp/child)/status | grep -q State")
        assert not live.run(dead).success, "the processes of a command that is cut off are killed, too"
        assert live.run(shell("echo sign > /tmp/sign")).success
        waiting.join(60)
        assert found == ["sign\n"]


def test_a_program_that_kills_the_server_inside_ends_the_sandbox_and_nothing_else(project: Path) -> None:
    with Workspace.over(project) as workspace:
        with workspace.live() as live:
            live.run(shell("echo kept > new.txt"))
            with pytest.raises(SandboxError, match="ended"):
                live.run(shell("kill -KILL $PPID; sleep 1000"))
            assert live.ended
            with pytest.raises(SandboxError, match="ended"):
                live.run(["true"])
        assert "new.txt" in str(workspace.changes()), "what was written before is there, for review"
        with workspace.live() as again:
            assert again.run(["cat", "new.txt"]).stdout == "kept\n"


@pytest.mark.torture
@pytest.mark.needs_root
def test_a_program_in_the_background_has_room_while_nothing_is_asked(project: Path) -> None:
    """Stored layers of root are in an image that begins small: it grows although no command runs."""
    with Workspace.over(project) as workspace, workspace.live() as live:
        live.run(shell("(head -c 600000000 /dev/zero > large; echo $? > code) > /dev/null 2>&1 &"))
        image = workspace._kept.state.image
        assert until(lambda: os.stat(image).st_size > 600_000_000)
        assert live.run(shell(WAIT_FOR.format("code", "code"))).stdout == "0\n"
        assert live.files.stat("large").size == 600_000_000
