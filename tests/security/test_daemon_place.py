"""Attacks of other users on the place of a daemon: listening in its stead, connecting to it, and leading its user elsewhere."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent_sandbox.cli import errand
from agent_sandbox.kernel import wire
from tests.e2e.program import Shell, words
from tests.e2e.test_daemon import counts, serving
from tests.patience import until
from tests.security.conftest import Tell
from tests.security.harness import case

CANARY = "canary-of-the-environment"
NOBODY = 65534
QUICK = ("run", "--throw-away", "echo 1")


@pytest.fixture
def shell(project: Path, tmp_path: Path) -> Shell:
    """Somebody standing in a project, with a state directory of their own and a secret in their environment."""
    return Shell(project, {"AGENT_SANDBOX_STATE": str(tmp_path / "state"), "SECRET": CANARY})


def place_of(shell: Shell) -> Path:
    return Path(shell.env["AGENT_SANDBOX_STATE"], errand.PLACE)


@contextmanager
def acting_as(uid: int) -> Iterator[None]:
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def listening(shell: Shell, uid: int) -> Iterator[socket.socket]:
    """A socket where the daemon's is expected, on which a user listens."""
    place_of(shell).mkdir(parents=True, mode=0o700, exist_ok=True)
    path = place_of(shell) / errand.SOCKET
    with socket.socket(socket.AF_UNIX) as listener:
        directory = os.open(path.parent, os.O_PATH)
        listener.bind(f"/proc/self/fd/{directory}/{path.name}")
        os.close(directory)
        with acting_as(uid):
            listener.listen()
        listener.settimeout(120)
        yield listener
    path.unlink()


def heard_from(shell: Shell, uid: int) -> bytes:
    """What a caller of the daemon tells whoever listens. The caller performs its command line itself after that."""
    with listening(shell, uid) as listener, shell.start(*QUICK) as caller:
        link, _ = listener.accept()
        with link:
            link.settimeout(120)
            heard = link.recv(1 << 20)
        output, said = caller.communicate()
        assert output == b"1\n", said
    return heard


@case(95)
@pytest.mark.needs_root
def test_a_listener_of_another_user_gets_nothing_of_the_caller(number: int, shell: Shell, tell: Tell) -> None:
    assert heard_from(shell, NOBODY) == b""
    assert CANARY.encode() in heard_from(shell, 0), "the control arm: one of the same user would get the environment"
    tell("nothing was sent", control="a listener of the same user gets the environment")


def is_performed(shell: Shell, link: socket.socket, out: int) -> bool:
    """Ask on a connection for a command line, and wait until it has ended, or the connection has."""
    link.settimeout(120)
    here = os.open(shell.cwd, os.O_PATH)
    line = [os.fsencode(word) for word in QUICK]
    variables = [(os.fsencode(name), os.fsencode(value)) for name, value in shell.environment.items()]
    try:
        wire.send(link, (errand.stamp(), line, variables, 0o022), (out, out, out, here))
        return link.recv(1) == errand.TAKEN and link.recv(1) == errand.ENDED
    except ConnectionError:
        return False
    finally:
        os.close(here)


@case(95)
@pytest.mark.needs_root
def test_a_process_of_another_user_is_not_served_even_if_it_gets_to_the_socket(
    number: int, shell: Shell, tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first wall, the permissions of the place, is torn down."""
    with serving(shell):
        performed = []
        monkeypatch.chdir(place_of(shell))
        place_of(shell).chmod(0o711)
        (place_of(shell) / errand.SOCKET).chmod(0o666)
        for uid in (NOBODY, 0):
            with (shell.cwd / f"out-{uid}").open("wb") as out, socket.socket(socket.AF_UNIX) as link:
                with acting_as(uid):
                    link.connect(errand.SOCKET)
                performed.append(is_performed(shell, link, out.fileno()))
        assert performed == [False, True], "the second is the control arm"
        assert (shell.cwd / f"out-{NOBODY}").read_bytes() == b""
        assert counts(shell)["performed"] == 1
    tell("the connection of another user was closed", control="the same request of the same user is performed")


@case(44)
@pytest.mark.needs_root
def test_a_place_of_another_user_names_nobody_to_be_signalled(number: int, shell: Shell, tell: Tell) -> None:
    place_of(shell).mkdir(parents=True, mode=0o700)
    with subprocess.Popen(["sleep", "1000"]) as victim, (place_of(shell) / "lock").open("w") as lock:
        try:
            lock.write(f"{victim.pid}\n")
            lock.flush()
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.chown(place_of(shell), NOBODY, NOBODY)
            stopped = shell("serve", "--stop")
            assert stopped.returncode == 125 and "not a directory of yours alone" in words(stopped)
            assert victim.poll() is None
            os.chown(place_of(shell), 0, 0)
            with shell.start("serve", "--stop") as believed:
                assert until(lambda: victim.poll() is not None), "the control arm: the lock of one's own place is believed"
                fcntl.flock(lock, fcntl.LOCK_UN)
                believed.communicate()
        finally:
            victim.kill()
    tell("refused, nobody was signalled", control="the same lock in a place of one's own is believed")


@case(151)
@pytest.mark.once
def test_a_place_that_is_a_link_is_not_used(number: int, shell: Shell, tmp_path: Path, tell: Tell) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    place_of(shell).parent.mkdir(mode=0o700)
    place_of(shell).symlink_to(tmp_path / "elsewhere")
    for options in ((), ("--stop",)):
        refused = shell("serve", *options)
        assert refused.returncode == 125 and "not a directory of yours alone" in words(refused)
    assert list((tmp_path / "elsewhere").iterdir()) == []
    place_of(shell).unlink()
    with serving(shell):
        assert shell(*QUICK).stdout == b"1\n", "the control arm"
    tell("refused, nothing was written there", control="without the link a daemon serves")
