"""A sandbox from its making to its end: status, streaming, killing, closing, and use from many threads and processes."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agent_sandbox import Sandbox, SandboxError, SandboxResult, SandboxStatus, create_sandbox, shell
from agent_sandbox.runtime.base import ExitReason

ENDLESS = "print('up', flush=True)\nimport time\ntime.sleep(600)"


class Started:
    """Runs something endless in a thread; made when it has said that it is up."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._up = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._future = self._pool.submit(sandbox.execute, ENDLESS, on_output=lambda *_: self._up.set())
        assert self._up.wait()

    def result(self) -> SandboxResult:
        self._pool.shutdown()
        return self._future.result()


def test_status_goes_from_pending_over_running_to_how_it_ended(sandbox: Sandbox) -> None:
    seen = [sandbox.status]
    sandbox.execute("print(1)", on_output=lambda *_: seen.append(sandbox.status))
    seen.append(sandbox.status)
    sandbox.execute("1 / 0")
    seen.append(sandbox.status)
    assert seen == [SandboxStatus.PENDING, SandboxStatus.RUNNING, SandboxStatus.COMPLETED, SandboxStatus.FAILED]


def test_results_carry_the_sandbox_they_come_from(sandbox: Sandbox) -> None:
    assert sandbox.execute("print(1)").sandbox_id == sandbox.id != Sandbox().id


def test_output_streams_as_it_is_written() -> None:
    chunks: list[tuple[str, str]] = []
    code = "import sys\nprint('one')\nprint('two', file=sys.stderr)\ninput()\nprint('three')"
    result = Sandbox().execute(code, stdin="\n", on_output=lambda stream, text: chunks.append((stream, text)))
    assert "".join(text for stream, text in chunks if stream == "stdout") == result.stdout == "one\nthree\n"
    assert "".join(text for stream, text in chunks if stream == "stderr") == result.stderr == "two\n"


def test_output_arrives_before_the_end(sandbox: Sandbox) -> None:
    started = Started(sandbox)
    assert sandbox.status is SandboxStatus.RUNNING
    sandbox.kill()
    assert started.result().stdout == "up\n"


def test_a_character_that_comes_in_two_pieces_is_passed_on_whole(sandbox: Sandbox) -> None:
    told: list[str] = []
    result = sandbox.execute(
        "import os\nos.write(1, b'\\xc3')\nos.write(1, b'\\xa9\\xff\\xe2')", on_output=lambda _, text: told.append(text)
    )
    assert "".join(told) == result.stdout == "é\ufffd\ufffd"
    assert result.stdout_bytes == b"\xc3\xa9\xff\xe2"


def test_an_exception_of_the_callback_ends_the_run_and_is_raised(sandbox: Sandbox) -> None:
    def stop(stream: str, text: str) -> None:
        raise LookupError(text)

    with pytest.raises(LookupError, match="up"):
        sandbox.execute(ENDLESS, on_output=stop)
    assert sandbox.status is SandboxStatus.FAILED
    assert sandbox.execute("print(1)").success


def test_kill_ends_what_runs_and_the_sandbox_can_go_on(sandbox: Sandbox) -> None:
    started = Started(sandbox)
    sandbox.kill()
    result = started.result()
    assert result.status is SandboxStatus.FAILED
    assert result.exit is not None and result.exit.reason is ExitReason.KILLED
    assert result.error is not None and result.error.startswith("killed")
    assert sandbox.execute("print(1)").success


def test_close_ends_what_runs_and_takes_no_more() -> None:
    sandbox = Sandbox()
    started = Started(sandbox)
    sandbox.close()
    assert started.result().status is SandboxStatus.FAILED
    with pytest.raises(SandboxError, match="closed"):
        sandbox.execute("print(1)")
    sandbox.close()


def test_leaving_the_block_closes() -> None:
    with Sandbox() as sandbox:
        started = Started(sandbox)
    assert started.result().status is SandboxStatus.FAILED


def test_a_callback_may_close_its_own_sandbox() -> None:
    sandbox = Sandbox()
    result = sandbox.execute(ENDLESS, on_output=lambda *_: sandbox.close())
    assert result.exit is not None and result.exit.reason is ExitReason.KILLED


def test_what_a_run_left_in_the_background_ends_with_it() -> None:
    code = "import os, time\nif os.fork() == 0:\n    time.sleep(600)\nprint('parent is done')"
    result = Sandbox(allow_subprocess=True).execute(code)
    assert (result.status, result.stdout) == (SandboxStatus.COMPLETED, "parent is done\n")
    assert result.execution_time < 20


def test_one_sandbox_serves_fifty_threads(sandbox: Sandbox) -> None:
    with ThreadPoolExecutor(50) as pool:
        results = list(pool.map(lambda n: sandbox.execute(f"print({n})").stdout, range(50)))
    assert results == [f"{n}\n" for n in range(50)]
    assert sandbox.status is SandboxStatus.COMPLETED


def test_fifty_sandboxes_run_at_once() -> None:
    with ThreadPoolExecutor(50) as pool:
        results = list(
            pool.map(lambda n: create_sandbox(env_vars={"N": str(n)}).execute("import os; print(os.environ['N'])").stdout, range(50))
        )
    assert results == [f"{n}\n" for n in range(50)]


def test_run_takes_code_a_command_or_a_shell_line() -> None:
    sandbox = Sandbox(allow_subprocess=True)
    assert sandbox.run("print('code')").stdout == "code\n"
    assert sandbox.run(["echo", "a  command"]).stdout == "a  command\n"
    assert sandbox.run(shell("echo one | tr a-z A-Z && false")).exit_code == 1
    assert sandbox.run(shell("echo one | tr a-z A-Z")).stdout == "ONE\n"


@pytest.mark.parametrize(
    ("language", "code", "error"),
    [
        ("javascript", "throw new TypeError('oops')", "TypeError: oops"),
        ("ruby", "raise 'oops'", "oops (RuntimeError)"),
        ("bash", "echo 'went wrong' >&2; exit 3", "went wrong"),
    ],
)
def test_the_error_of_other_languages_is_one_line_too(sandbox: Sandbox, language: str, code: str, error: str) -> None:
    result = sandbox.execute(code, language)
    assert result.error is not None and error in result.error and "\n" not in result.error


def test_a_message_of_several_lines_keeps_its_first(sandbox: Sandbox) -> None:
    assert sandbox.execute("raise ValueError('first\\nsecond')").error == "ValueError: first"


def test_the_error_of_a_chain_is_the_last_exception(sandbox: Sandbox) -> None:
    code = "try: 1 / 0\nexcept ZeroDivisionError as e: raise KeyError('k') from e"
    assert sandbox.execute(code).error == "KeyError: 'k'"


def test_a_forked_child_of_the_application_runs_sandboxes_of_its_own(tmp_path: Path) -> None:
    program = tmp_path / "application.py"
    program.write_text(
        "import os\n"
        "from agent_sandbox import Sandbox\n"
        "sandbox = Sandbox()\n"
        "print(sandbox.execute('print(1)').stdout.strip(), flush=True)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    print(sandbox.execute('print(2)').stdout.strip(), flush=True)\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "print(sandbox.execute('print(3)').stdout.strip(), flush=True)\n"
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("1\n2\n3\n", 0), done.stderr


def test_importing_the_package_loads_no_part_of_the_machinery() -> None:
    code = "import sys, agent_sandbox; print([m for m in sys.modules if m.startswith('agent_sandbox.')], 'asyncio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[] False\n"


def test_using_a_sandbox_does_not_import_asyncio() -> None:
    code = "import sys; from agent_sandbox import Sandbox; Sandbox(); print('asyncio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_the_values_of_environment_variables_are_not_shown_when_a_sandbox_is_printed() -> None:
    sandbox = Sandbox(env_vars={"API_KEY": "hush"})
    assert "hush" not in repr(sandbox) + repr(sandbox.config) + repr(sandbox.execute("print(1)"))


def test_a_session_that_is_dropped_ends_and_says_so(sandbox: Sandbox) -> None:
    sandbox.execute("print(1)")
    session = sandbox.session()
    assert session.run("import os\nos.getpid()").success
    guest = weakref.ref(session._turns._opened.guest)  # type: ignore[union-attr]
    with pytest.warns(ResourceWarning, match=f"unclosed <session {session.id} of sandbox {sandbox.id}>"):
        del session
        gc.collect()
    assert guest() is None, "and with it its process, sockets and cgroup, which the end of every test looks for"
    kept = sandbox.session()
    assert kept.run("1").value == 1
    kept.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del kept
        gc.collect()


FORKED = """
import os, threading
from agent_sandbox import Sandbox, SandboxError
sandbox, up, results = Sandbox(validate_code=False), threading.Event(), []
session = sandbox.session()
session.run("x = 1")
thread = threading.Thread(target=lambda: results.append(sandbox.execute(LONG, on_output=lambda *_: up.set())))
thread.start()
up.wait()
child = os.fork()
if child == 0:
    try:
        try:
            session.run("x")
        except SandboxError as error:
            print("child:", error.message, flush=True)
        assert sandbox.status.name != "RUNNING", sandbox.status
        sandbox.kill()
        session.close()
        sandbox.close()
        try:
            sandbox.execute("1")
        except SandboxError as error:
            print("child:", error.message, flush=True)
    finally:
        os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print("parent:", session.run("x").value, sandbox.status.name, flush=True)
sandbox.kill()
thread.join()
print("parent:", results[0].stdout.split(), results[0].exit.reason.value, flush=True)
sandbox.close()
"""


def test_a_forked_child_does_not_end_what_its_parent_runs(tmp_path: Path) -> None:
    program = tmp_path / "application.py"
    program.write_text(FORKED.replace("LONG", repr(ENDLESS)))
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "child: this session has ended: it belongs to another process, from which this one was forked",
        "child: this sandbox has been closed",
        "parent: 1 RUNNING",
        "parent: ['up'] killed",
    ], done.stderr


def test_everything_of_a_closed_sandbox_says_that_it_is_closed() -> None:
    sandbox = Sandbox()
    session = sandbox.session()
    files = sandbox.files
    sandbox.close()
    for call in (
        lambda: sandbox.execute("1"),
        lambda: sandbox.run("1"),
        lambda: sandbox.simulate("1"),
        lambda: sandbox.session(),
        lambda: session.run("1"),
        lambda: session.files.read("x"),
        lambda: files.read("/tmp/x"),
    ):
        with pytest.raises(SandboxError, match=r"this sandbox has been closed|this session has ended"):
            call()
    session.close()
    sandbox.close()
