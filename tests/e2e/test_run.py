"""`run` as its user sees it: streams, exit codes, limits, environment, signals."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.program import PROGRAM, Shell, processes_with, words

# Blocked and waited for: a handler would miss a signal that comes between saying "ready" and going to sleep.
AWAITING = "import signal, sys; awaited = [{number:d}]; signal.pthread_sigmask(signal.SIG_BLOCK, awaited); print('ready', flush=True)"


def test_the_readme_flow_leaves_the_real_file_alone_and_forgets_on_request(shell: Shell, project: Path) -> None:
    real = project / "greeting.txt"
    assert shell("run", "echo 'new content' > greeting.txt").returncode == 0
    assert shell("run", "cat greeting.txt").stdout == b"new content\n"
    assert real.read_text() == "hello\n"
    shown = shell("diff").stdout.decode()
    assert "diff --git a/greeting.txt b/greeting.txt\n" in shown
    assert "-hello\n+new content\n" in shown
    forgotten = shell("reset", "--yes")
    assert forgotten.returncode == 0
    assert "forgot 1 change" in words(forgotten)
    assert shell("diff").stdout == b""
    assert shell("run", "cat greeting.txt").stdout == b"hello\n"


@pytest.mark.once
def test_every_byte_of_output_passes_through_and_the_streams_stay_apart(shell: Shell) -> None:
    done = shell("run", "for i in $(seq 0 255); do printf \"\\\\x$(printf %x $i)\"; done; printf 'e\\0\\377' >&2")
    assert done.stdout == bytes(range(256))
    assert done.stderr == b"e\0\xff"


@pytest.mark.once
def test_a_megabyte_of_piped_input_arrives_complete(shell: Shell) -> None:
    data = os.urandom(1 << 20)
    done = shell("run", "--", "cat", stdin=data)
    assert done.stdout == data


def test_the_streams_can_be_opened_by_name_inside(shell: Shell) -> None:
    done = shell("run", "cat /dev/stdin; echo out > /dev/stdout; echo err > /dev/stderr", stdin=b"in\n")
    assert (done.stdout, done.stderr) == (b"in\nout\n", b"err\n")


@pytest.mark.once
def test_a_file_as_standard_input_arrives_complete(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "input").write_bytes(b"x" * 300_000)
    with open(tmp_path / "input", "rb") as file:
        done = subprocess.run([*PROGRAM, "run", "wc -c"], cwd=shell.cwd, env=shell.environment, stdin=file, capture_output=True, check=True)
    assert done.stdout.strip() == b"300000"


@pytest.mark.once
@pytest.mark.parametrize(
    ("line", "code"),
    [
        (["true"], 0),
        (["exit 3"], 3),
        (["kill -TERM $$"], 143),
        (["--", "no-such-program"], 127),
        (["--", "/etc/passwd"], 126),
        (["--timeout", "0.2", "sleep 30"], 124),
    ],
)
def test_it_exits_as_a_shell_would(shell: Shell, line: list[str], code: int) -> None:
    assert shell("run", *line).returncode == code


@pytest.mark.once
def test_a_program_that_is_not_there_is_named_as_a_shell_names_it(shell: Shell) -> None:
    assert words(shell("run", "--", "no-such-program")) == "agent-sandbox: no-such-program: command not found\n"


def test_a_program_that_uses_too_much_memory_is_ended_with_137_and_the_limit_is_named(shell: Shell) -> None:
    done = shell("run", "--memory", "64M", "--", "python3", "-c", "x = bytearray(1 << 30); print(len(x))")
    assert b"1073741824" not in done.stdout
    assert done.returncode in (137, 1), words(done)  # a limit on data makes the allocation itself fail, where there is no control group
    document = shell.json("run", "--memory", "2G", "--", "python3", "-c", "print(len(bytearray(100 << 20)))")
    assert (document["exit"], document["stdout"]) == (0, "104857600\n")


@pytest.mark.once
def test_words_after_the_command_belong_to_the_command(shell: Shell) -> None:
    assert shell("run", "--", "echo", "--json", "--", "-x").stdout == b"--json -- -x\n"
    assert shell("run", "echo", "--json").stdout == b"--json\n"


@pytest.mark.once
def test_flags_may_stand_before_and_after_the_verb(shell: Shell) -> None:
    for line in (["--json", "run", "true"], ["run", "--json", "true"]):
        assert b'"schema": "agent-sandbox/run/1"' in shell(*line).stdout


@pytest.mark.once
def test_the_json_document_tells_the_whole_story(shell: Shell) -> None:
    document = shell.json("run", "echo out; echo err >&2; echo x > new.txt; printf '\\377'; exit 4")
    assert document["exit"] == 4
    assert document["reason"] == "exited"
    assert document["stdout_base64"] == "b3V0Cv8="
    assert document["stderr"] == "err\n"
    assert document["limits_hit"] == []
    assert document["changes"]["in_project"] == 1
    assert document["changes"]["by_kind"] == {"added": 1}
    assert document["usage"]["wall_seconds"] > 0


def test_a_throw_away_run_keeps_nothing_and_does_not_see_the_kept_sandbox(shell: Shell) -> None:
    shell("run", "echo kept > kept.txt")
    done = shell("run", "--throw-away", "ls; echo gone > gone.txt")
    assert b"kept.txt" not in done.stdout
    assert b"gone.txt" not in shell("run", "ls").stdout
    assert b"kept.txt" in shell("run", "ls").stdout


def test_background_children_end_with_the_run(shell: Shell) -> None:
    marker = f"86399.{os.getpid()}"
    done = shell("run", f"sleep {marker} & setsid sleep {marker} & sleep 0.01; pgrep -f 'sleep {marker}' | wc -l; echo done")
    assert done.stdout.endswith(b"done\n")
    assert processes_with(marker) == []


def test_only_named_variables_reach_the_program(shell: Shell) -> None:
    secretive = Shell(shell.cwd, {**shell.env, "AWS_SECRET_ACCESS_KEY": "canary", "LC_TIME": "C", "COLOUR": "red"})
    seen = secretive("run", "--env", "COLOUR", "--env", "SHAPE=round=ish", "env").stdout.decode().splitlines()
    assert {"COLOUR=red", "SHAPE=round=ish", "LC_TIME=C"} <= set(seen)
    assert not any("canary" in line for line in seen)


def test_it_starts_where_the_caller_stands_or_where_it_is_told(shell: Shell, project: Path) -> None:
    assert shell("run", "pwd").stdout.decode().strip() == str(project)
    assert Shell(project / "src", shell.env)("run", "pwd").stdout.decode().strip() == str(project / "src")
    shell("run", "mkdir only-inside")
    assert shell("run", "--cwd", "only-inside", "pwd").stdout.decode().strip() == str(project / "only-inside")


def test_a_denied_path_is_not_there_and_a_secret_is_only_when_it_is_revealed(shell: Shell, project: Path) -> None:
    (project / ".env").write_text("TOKEN=canary\n")
    assert shell("run", "cat .env").returncode == 1
    assert shell("run", "--reveal", ".env", "cat .env").stdout == b"TOKEN=canary\n"
    assert shell("run", "cat src/app.py").returncode == 0
    assert shell("run", "--deny", "src", "cat src/app.py").returncode == 1


@pytest.mark.once
def test_explain_prints_the_plan_and_runs_nothing(shell: Shell, project: Path) -> None:
    done = shell("run", "--explain", "touch ran")
    assert done.returncode == 0
    assert b"own /proc, /proc/sys read-only" in done.stdout
    assert shell("diff").stdout == b""


@pytest.mark.once
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 42), (signal.SIGTERM, 43), (signal.SIGHUP, 44)])
def test_a_signal_reaches_the_program_which_may_answer_it(shell: Shell, number: signal.Signals, code: int) -> None:
    with shell.start("run", "--", "python3", "-c", f"{AWAITING.format(number=number)}\nsignal.sigwait(awaited); sys.exit({code})") as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"ready\n"
        run.send_signal(number)
        assert run.wait() == code


@pytest.mark.once
def test_a_second_signal_ends_a_program_that_ignores_them(shell: Shell) -> None:
    marker = f"marker-{os.getpid()}"
    ignoring = "while True: signal.sigwait(awaited); print('heard', flush=True)"
    with shell.start("run", "--", "python3", "-c", f"{AWAITING.format(number=15)}\n{ignoring}", marker) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"ready\n"
        run.send_signal(signal.SIGTERM)
        assert run.stdout.readline() == b"heard\n"
        run.send_signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM
    assert processes_with(marker) == []


@pytest.mark.once
def test_nobody_reading_our_output_ends_the_run_quietly(shell: Shell) -> None:
    with shell.start("run", "yes") as run:
        assert run.stdout is not None and run.stderr is not None
        assert run.stdout.read(2) == b"y\n"
        run.stdout.close()
        assert run.wait() == 141
        assert run.stderr.read() == b""


def test_two_runs_at_once_go_one_after_the_other_and_say_so(shell: Shell) -> None:
    with shell.start("run", "echo holding; read line; echo first >> order.txt", stdin=subprocess.PIPE) as first:
        assert first.stdin is not None and first.stdout is not None
        assert first.stdout.readline() == b"holding\n"
        refused = shell("run", "--no-wait", "true")
        assert refused.returncode == 125
        assert f"in use by process {first.pid}" in words(refused)
        assert f"process {first.pid}" in shell("status").stdout.decode()
        with shell.start("run", "echo second >> order.txt") as second:
            assert second.stderr is not None
            assert b"waiting for it" in second.stderr.readline()
            first.stdin.write(b"go on\n")
            first.stdin.close()
            assert (first.wait(), second.wait()) == (0, 0)
    assert shell("run", "cat order.txt").stdout == b"first\nsecond\n"


def test_shared_directories_of_others_can_be_written_to_in_the_clone(shell: Shell) -> None:
    name = f"/var/tmp/from-a-clone-{os.urandom(8).hex()}"
    assert shell("run", f"mkdir {name} && echo made > {name}/file && cat {name}/file").stdout == b"made\n"
    assert not os.path.exists(name)


@pytest.mark.parametrize("elsewhere", [{}, {"XDG_STATE_HOME": "here", "XDG_DATA_HOME": "here"}])
def test_the_default_places_of_state_and_keys_are_hidden_also_when_others_are_in_use(
    shell: Shell, tmp_path: Path, elsewhere: dict[str, str]
) -> None:
    home = tmp_path / "home"
    places = (".local/share/agent-sandbox/keys/key", ".local/state/agent-sandbox/ledger.jsonl", ".local/share/fonts/key")
    for place in places:
        (home / place).parent.mkdir(parents=True, exist_ok=True)
        (home / place).write_text("CANARY")
    chosen = {name: str(tmp_path / value) for name, value in elsewhere.items()}
    for value in chosen.values():
        (Path(value) / "agent-sandbox").mkdir(parents=True, exist_ok=True)
        (Path(value) / "agent-sandbox/ledger.jsonl").write_text("CANARY")
    inside = Shell(shell.cwd, {**shell.env, **chosen, "HOME": str(home)})
    for place in (*places[:2], *(f"{value}/agent-sandbox/ledger.jsonl" for value in chosen.values())):
        assert b"CANARY" not in inside("run", f"cat {home / place}").stdout
    assert inside("run", f"cat {home / places[2]}").stdout == b"CANARY", "what is not ours is there"
