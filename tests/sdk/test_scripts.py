"""Python code in a sandbox behaves as a script does."""

from __future__ import annotations

import sys

import pytest

from agent_sandbox import Sandbox, SandboxStatus


def test_a_traceback_shows_the_right_line_and_its_source(sandbox: Sandbox) -> None:
    result = sandbox.execute("def f():\n    return 1 / 0\n\nf()\n")
    assert "line 4, in <module>\n    f()\n" in result.stderr
    assert "line 2, in f\n    return 1 / 0\n" in result.stderr
    assert result.error == "ZeroDivisionError: division by zero"


def test_nothing_of_ours_is_in_a_traceback(sandbox: Sandbox) -> None:
    stderr = sandbox.execute("raise ValueError").stderr
    assert "agent_sandbox" not in stderr
    assert stderr.count("File ") == 1


def test_a_syntax_error_is_reported_with_its_line(sandbox: Sandbox) -> None:
    result = sandbox.execute("x = 1\ny = = 2\n")
    assert (result.exit_code, result.error) == (1, "SyntaxError: invalid syntax")
    assert "line 2\n    y = = 2" in result.stderr


@pytest.mark.parametrize(
    ("leaving", "code", "error"),
    [
        ("sys.exit()", 0, None),
        ("sys.exit(0)", 0, None),
        ("sys.exit(3)", 3, "exit code 3"),
        ("sys.exit('no luck')", 1, "no luck"),
        ("raise SystemExit", 0, None),
        ("os._exit(7)", 7, "exit code 7"),
        ("os.abort()", 134, "ended by signal SIGABRT"),
    ],
)
def test_a_script_ends_with_the_code_it_chooses(sandbox: Sandbox, leaving: str, code: int, error: str | None) -> None:
    result = sandbox.execute(f"import os, sys\n{leaving}")
    assert (result.exit_code, result.error) == (code, error)
    assert result.success == (code == 0)


def test_input_reads_what_is_given_and_then_meets_the_end(sandbox: Sandbox) -> None:
    result = sandbox.execute("print(input(), input())\ninput()", stdin="one\ntwö\n")
    assert result.stdout == "one twö\n"
    assert result.error == "EOFError: EOF when reading a line"


def test_a_large_input_arrives_whole(sandbox: Sandbox) -> None:
    result = sandbox.execute("import sys; print(len(sys.stdin.buffer.read()))", stdin=b"\xff" * 3_000_000)
    assert result.stdout == "3000000\n"


def test_input_that_nobody_reads_is_no_error(sandbox: Sandbox) -> None:
    assert sandbox.execute("print(1)", stdin=b"x" * 3_000_000).success


def test_a_script_is_the_main_module_and_has_its_arguments(sandbox: Sandbox) -> None:
    result = sandbox.execute("import sys\nif __name__ == '__main__':\n    print(sys.argv[1:])", args=["a b", "é"])
    assert result.stdout == "['a b', 'é']\n"


def test_threads_run_and_are_waited_for_although_processes_are_forbidden(sandbox: Sandbox) -> None:
    code = "import threading\nfor n in range(3): threading.Thread(target=print, args=(n,)).start()"
    assert sorted(sandbox.execute(code).stdout.split()) == ["0", "1", "2"]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing_works_where_processes_are_allowed(method: str) -> None:
    code = f"""
import multiprocessing
def square(n):
    return n * n
if __name__ == "__main__":
    with multiprocessing.get_context("{method}").Pool(2) as pool:
        print(pool.map(square, range(4)))
"""
    result = Sandbox(allow_subprocess=True).execute(code)
    assert result.stdout == "[0, 1, 4, 9]\n", result.stderr


def test_a_process_is_not_started_where_processes_are_forbidden(sandbox: Sandbox) -> None:
    code = "import os\nif os.fork() == 0: os._exit(0)\nprint('forked')"
    refused, allowed = sandbox.execute(code), Sandbox(allow_subprocess=True).execute(code)
    assert refused.error == "PermissionError: [Errno 1] Operation not permitted"
    assert allowed.stdout == "forked\n"


def test_exit_functions_and_finalisers_run(sandbox: Sandbox) -> None:
    code = """
import atexit
class Last:
    def __del__(self): print("finalised")
kept = Last()
atexit.register(print, "at exit")
print("body")
"""
    assert sandbox.execute(code).stdout == "body\nat exit\nfinalised\n"


def test_what_was_printed_without_an_end_of_line_is_not_lost(sandbox: Sandbox) -> None:
    assert sandbox.execute("print('a', end='')").stdout == "a"
    assert sandbox.execute("import sys\nsys.stdout.write('a')\nraise SystemExit(2)").stdout == "a"


def test_the_interpreter_is_the_callers_own(sandbox: Sandbox) -> None:
    assert sandbox.execute("import sys; print(sys.version)").stdout == sys.version + "\n"


def test_the_source_may_hold_any_text(sandbox: Sandbox) -> None:
    assert sandbox.execute("print('naïve 漢字 🙂')").stdout == "naïve 漢字 🙂\n"


def test_an_encoding_declaration_does_not_spoil_the_text(sandbox: Sandbox) -> None:
    assert sandbox.execute("# -*- coding: latin-1 -*-\nprint('é')").stdout == "é\n"


def test_a_script_can_look_at_its_own_source(sandbox: Sandbox) -> None:
    assert sandbox.execute("import inspect\ndef f(): pass\nprint(inspect.getsource(f))").stdout == "def f(): pass\n\n"


def test_a_script_can_pickle_its_own_classes(sandbox: Sandbox) -> None:
    code = "import pickle\nclass C: pass\nprint(type(pickle.loads(pickle.dumps(C()))) is C)"
    assert sandbox.execute(code).stdout == "True\n"


def test_code_that_closes_or_replaces_its_streams_ends_in_order(sandbox: Sandbox) -> None:
    assert sandbox.execute("import sys; sys.stdout.close()").status in (SandboxStatus.COMPLETED, SandboxStatus.FAILED)
    assert sandbox.execute("import sys; sys.stderr = None; print(1)").stdout == "1\n"


def test_signals_can_be_handled_by_the_main_thread(sandbox: Sandbox) -> None:
    code = "import signal, os\nsignal.signal(signal.SIGUSR1, lambda *_: print('got it'))\nos.kill(os.getpid(), signal.SIGUSR1)"
    assert sandbox.execute(code).stdout == "got it\n"


def test_an_interrupt_that_is_not_caught_ends_as_it_would_in_a_shell(sandbox: Sandbox) -> None:
    result = sandbox.execute("raise KeyboardInterrupt")
    assert (result.exit_code, result.error) == (130, "KeyboardInterrupt")


def test_asyncio_runs(sandbox: Sandbox) -> None:
    assert sandbox.execute("import asyncio\nasync def f(): return 5\nprint(asyncio.run(f()))").stdout == "5\n"


def test_deep_recursion_is_an_error_of_the_script(sandbox: Sandbox) -> None:
    result = sandbox.execute("def f(): f()\nf()")
    assert result.error == "RecursionError: maximum recursion depth exceeded"
