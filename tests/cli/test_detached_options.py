"""The options of `run --detach`, `exec`, `logs` and `stop`."""

from __future__ import annotations

import pytest

from agent_sandbox.cli.detached_options import IDLE_SECONDS, LIFETIME_SECONDS, DetachOptions, ExecOptions, LogsOptions, StopOptions
from agent_sandbox.cli.errand import _detaches
from agent_sandbox.cli.parser import UsageError, parse
from agent_sandbox.errors import PolicyError


@pytest.mark.parametrize(
    "option", ["--explain", "--observe", "--deterministic", "--capability=x", "--simulate", "--diff", "--runtime=wasm"]
)
def test_options_that_a_sandbox_in_the_background_cannot_have_are_refused(option: str) -> None:
    with pytest.raises(UsageError, match="does not go with --detach"):
        DetachOptions.read(parse(["run", "--detach", option, "true"]))


def test_a_detached_sandbox_has_an_end() -> None:
    plain = DetachOptions.read(parse(["run", "--detach", "npm run dev"]))
    assert (plain.lifetime_seconds, plain.idle_seconds) == (LIFETIME_SECONDS, IDLE_SECONDS)
    assert not plain.run.wait and plain.run.command == ("bash", "-c", "npm run dev")
    chosen = DetachOptions.read(parse(["--json", "run", "-d", "--for", "2d", "--idle", "none", "--wait", "--", "sleep", "1"]))
    assert (chosen.lifetime_seconds, chosen.idle_seconds, chosen.run.wait) == (2 * 86400, None, True)
    assert chosen.run.policy.limits == plain.run.policy.limits == (), "a document is no reason to drop output"
    for wrong in ("none", "8d", "soon", "0"):
        with pytest.raises(PolicyError):
            DetachOptions.read(parse(["run", "--detach", "--for", wrong, "true"]))


def test_the_words_after_the_name_are_the_command() -> None:
    def command(*line: str) -> tuple[str, ...]:
        return ExecOptions.read(parse(["exec", *line])).command

    assert command("d1", "ls | wc") == ("bash", "-c", "ls | wc")
    assert command("d1", "--", "ls") == ("ls",)
    assert command("d1", "ls", "--", "-l") == ("ls", "--", "-l")
    read = ExecOptions.read(parse(["exec", "--timeout", "5", "-i", "d1", "--", "cat", "--timeout"]))
    assert (read.name, read.seconds, read.stdin, read.command) == ("d1", 5.0, True, ("cat", "--timeout"))
    for line in (["d1", "--timeout", "5", "--", "true"], ["d1", "--"]):
        with pytest.raises(UsageError):
            command(*line)


def test_logs_and_stop() -> None:
    assert LogsOptions.read(parse(["logs", "d1", "--limit", "5"])) == LogsOptions("d1", False, 5)
    with pytest.raises(UsageError):
        LogsOptions.read(parse(["--json", "logs", "-f", "d1"]))
    assert StopOptions.read(parse(["stop", "d1", "d2", "--timeout", "0"])) == StopOptions(("d1", "d2"), False, 0.0)
    for line in (["stop"], ["stop", "--all", "d1"]):
        with pytest.raises(UsageError):
            StopOptions.read(parse(line))


def test_at_a_terminal_the_daemon_is_asked_only_if_the_option_is_surely_ours() -> None:
    assert (
        _detaches(["run", "--detach", "x"], "run") and _detaches(["--detach", "run", "x"], "run") and _detaches(["run", "-d", "x"], "run")
    )
    assert not _detaches(["run", "docker", "--detach"], "run") and not _detaches(["run", "--", "x", "-d"], "run")
    assert not _detaches(["exec", "--detach"], "exec")
