"""Open files and other descriptors of a recorded program: a state keeps each as it was, or names it as lost."""

from __future__ import annotations

import pytest

from agent_sandbox import Sandbox, SandboxSession
from agent_sandbox.timelines import Step
from tests.contract.test_timeline import Open, opened

__all__ = ["opened"]


def step_of(session: SandboxSession, text: str) -> Step:
    return next(step for step in session.timeline if step.text == text)


def test_an_open_directory_shows_the_files_of_its_state(opened: Open) -> None:
    """A descriptor that led to the view of then would show the future, and write to what other states have."""
    session = opened()
    session.run("import os\nplace = os.open('.', os.O_RDONLY)\na = 1\nopen('late', 'w').close()\nb = 2")
    assert session.rewind(step_of(session, "a = 1")).step.kept
    session.run("os.close(os.open('new', os.O_CREAT | os.O_WRONLY, dir_fd=place))")
    assert session.run("os.listdir(place), os.listdir('.')").value == [["new"], ["new"]]
    assert session.inspect(step_of(session, "b = 2")).list(".") == ("late",)


def test_a_directory_that_was_read_in_part_is_not_in_a_state(opened: Open) -> None:
    session = opened()
    session.run(
        "import os\nfor n in range(3): open(f'f{n}', 'w').close()\nwalk = os.scandir('.'); _ = next(walk)\na = 1\nwalk.close()\nb = 2"
    )
    assert "in part" in step_of(session, "a = 1").why
    assert step_of(session, "b = 2").kept


def test_a_descriptor_that_is_only_a_path_is_no_hindrance(opened: Open) -> None:
    session = opened()
    assert session.run("import os\nopen('f', 'w').write('1')\nplace = os.open('f', os.O_PATH)\na = 1\nopen('g', 'w').close()").success
    assert session.rewind(step_of(session, "a = 1")).step.kept
    assert session.run("os.path.samestat(os.fstat(place), os.stat('f'))").value is True


def test_copies_of_a_descriptor_still_share_their_place(opened: Open) -> None:
    """While steps are recorded, and after a return. Two files that only look alike do not."""
    session = opened()
    session.run(
        "import os\nopen('f', 'w').write('abcdef')\none = os.open('f', os.O_RDWR); two = os.dup(one); other = os.open('f', os.O_RDWR)"
    )
    read = "os.read(one, 2), os.read(two, 2), os.read(other, 1)"
    session.run("open('g', 'w').close()\na = 1")
    assert session.run(read).value == [b"ab", b"cd", b"a"]
    session.rewind(step_of(session, "a = 1"))
    assert session.run(read).value == [b"ab", b"cd", b"a"]


def test_output_that_the_program_sends_to_a_file_goes_to_the_file_of_its_state(opened: Open) -> None:
    session = opened()
    session.run("import os\nfile = open('log', 'w'); _ = os.dup2(file.fileno(), 1)\nprint('one')\na = 1\nprint('two')")
    session.rewind(step_of(session, "a = 1"))
    assert session.run("print('three'); open('log').read()").value == "one\nthree\n"
    with session.fork(step_of(session, "a = 1"))[0] as fork:
        assert fork.run("print('four'); open('log').read()").value == "one\nfour\n"


@pytest.mark.parametrize(
    ("begin", "why"),
    [
        ("import os; block = os.memfd_create('x'); os.write(block, b'1')", "memfd"),
        (
            "import ctypes; libc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p; libc.mmap(None, 4096, 3, 0x21, -1, 0)",
            "copies share",
        ),
    ],
)
def test_a_state_with_other_memory_that_copies_share_is_not_kept(opened: Open, begin: str, why: str) -> None:
    session = opened()
    session.run(f"{begin}\na = 1")
    assert not step_of(session, "a = 1").kept and why in step_of(session, "a = 1").why


@pytest.mark.parametrize(
    ("begin", "lost"),
    [
        ("import os; events = os.eventfd(3)", "1 event descriptor"),
        ("import select; events = select.epoll()", "1 event descriptor"),
        ("import signal; _ = signal.signal(signal.SIGALRM, signal.SIG_IGN); signal.alarm(60)", "1 timer"),
        ("import os; os.mkfifo('p'); ends = os.open('p', os.O_RDWR)", "1 pipe"),
    ],
)
def test_what_else_a_state_cannot_hold_is_said(opened: Open, begin: str, lost: str) -> None:
    session = opened()
    assert session.run(f"{begin}\na = 1").success
    assert step_of(session, "a = 1").lost == (lost,)


def test_what_a_child_writes_is_not_lost_to_the_program(opened: Open) -> None:
    """Its file would belong to frozen layers, while the program's paths lead to a copy."""
    session = opened(allow_subprocess=True)
    begin = (
        "import subprocess; file = open('log', 'w'); child = subprocess.Popen(['sh', '-c', 'read go; echo late'], stdin=-1, stdout=file)"
    )
    session.run(f"{begin}\nopen('x', 'w').close()\na = 1\nchild.stdin.write(b'go\\n'); child.stdin.close(); _ = child.wait()\nb = 2")
    assert "open for writing" in step_of(session, "a = 1").why
    assert session.run("open('log').read()").value == "late\n"
    assert step_of(session, "b = 2").kept, "once it has ended, states are kept again"


def test_a_database_of_sqlite_can_be_written_while_steps_are_recorded(opened: Open) -> None:
    session = opened()
    begin = "import sqlite3\nbase = sqlite3.connect('d.db')\n_ = base.execute('create table t (a)'); base.commit()"
    more = "\n".join(f"_ = base.execute('insert into t values ({number})'); base.commit()\na = {number}" for number in range(3))
    done = session.run(f"{begin}\n{more}\nbase.close()\nb = 1")
    assert done.success, done.stderr
    assert "SQLite" in step_of(session, "a = 1").why
    assert step_of(session, "b = 1").kept, "once it is closed, states are kept again"
    again = session.rewind(step_of(session, "a = 1"))
    assert again.ran_again and session.run("base.execute('select a from t').fetchall()").value == [[0], [1]]
    with Sandbox(validate_code=False, runtime="process").session() as plain:
        assert plain.run(f"{begin}\n{more}\nbase.close()").success, "the control: without a timeline"
