"""A holder ends when nobody has used it for its time, and not while somebody does."""

from __future__ import annotations

import errno
import socket
import threading
from pathlib import Path
from typing import cast

import pytest

from agent_sandbox.server import messages
from agent_sandbox.server.held_session import HeldSession
from agent_sandbox.server.holder import SessionHolder
from agent_sandbox.server.places import Place
from tests.patience import until

ACCEPT = socket.socket.accept


def test_a_holder_is_over_when_it_was_not_used_for_its_time(tmp_path: Path) -> None:
    now = [0.0]
    holder = SessionHolder(Place(str(tmp_path)), 60.0, clock=lambda: now[0])
    assert holder.over, "it holds nothing"
    holder._sessions["t1"] = cast("HeldSession", None)
    assert holder.over, "nothing has run in it, and whoever opened it has gone"
    holder._begun = True
    now[0] = 59.0
    assert not holder.over and holder.wait_seconds == 1.0
    ours, theirs = socket.socketpair()
    holder.accept(theirs)
    now[0] = 1000.0
    assert not holder.over and holder.wait_seconds is None, "somebody is connected"
    messages.send(ours, {"do": "nonsense", "session": "t2"})
    answer = messages.receive(ours)
    assert answer is not None and "the session t2 has ended" in answer["failed"]["message"]
    ours.close()
    assert until(lambda: not holder._connections)
    assert not holder.over, "it was used just now"
    now[0] = 1060.0
    assert holder.over


def test_a_holder_goes_on_where_no_descriptor_and_no_thread_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = SessionHolder(Place(str(tmp_path)), 600.0)
    holder._sessions["t1"], holder._begun = cast("HeldSession", None), True
    listener = holder._place.listen()
    listening = threading.Thread(target=holder.listen, args=(listener,), daemon=True)
    listening.start()
    begin, few = threading.Thread.start, [OSError(errno.EMFILE, "too many open files"), OSError(errno.ECONNABORTED, "gone")]

    def accept(self: socket.socket) -> tuple[socket.socket, object]:
        if few:
            raise few.pop()
        return ACCEPT(self)

    def no_start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(socket.socket, "accept", accept)
    monkeypatch.setattr(threading.Thread, "start", no_start)
    with holder._place.connect() as link:
        assert until(lambda: not (few and listening.is_alive())) and listening.is_alive()
        refused = messages.receive(link)
        assert refused is not None and "no room for another thread" in refused["failed"]["message"]
        assert messages.receive(link) is None and not few
    monkeypatch.setattr(threading.Thread, "start", begin)
    with holder._place.connect() as link:
        messages.send(link, {"do": "nonsense", "session": "t2"})
        answer = messages.receive(link)
        assert answer is not None and "t2 has ended" in answer["failed"]["message"], "the control arm: the next one is served"
    assert until(lambda: not holder.connections) and listening.is_alive()
    holder.end()
    listening.join()
    listener.close()


def test_a_holder_that_is_told_to_end_is_over(tmp_path: Path) -> None:
    holder = SessionHolder(Place(str(tmp_path)), 60.0)
    holder._sessions["t1"], holder._begun = cast("HeldSession", None), True
    assert not holder.over
    holder.end()
    assert holder.over
