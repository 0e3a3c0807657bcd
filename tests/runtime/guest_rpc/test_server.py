"""The supervisor's end of a conversation, against whatever may come in whatever pieces."""

from __future__ import annotations

import socket

from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.kernel.wire import HELLO, TALK
from agent_sandbox.runtime.base import Nonsense, Talk
from agent_sandbox.runtime.guest_rpc.server import LARGEST, TURN, Conversation
from agent_sandbox.runtime.process.pump import Poller


class Line:
    """Both ends: the guest's is a socket, ours is pumped until nothing happens any more."""

    def __init__(self, *, turns: bool = False) -> None:
        self.heard: list[bytes] = []
        ours, self.theirs = socket.socketpair()
        self.theirs.setblocking(False)
        self._ours = ours
        self.conversation = Conversation(ours, Talk(self._hear, {"turns": turns, "tools": []}), lambda: None)
        self._poller = Poller()
        self.conversation.join(self._poller)

    def _hear(self, words: bytes) -> bytes:
        self.heard.append(words)
        if words == b"nonsense":
            raise Nonsense("it makes no sense")
        return b"re: " + words

    def say(self, data: bytes) -> None:
        self.theirs.sendall(data)
        while self._poller.wait(0):
            continue

    def answers(self) -> list[tuple[int, bytes]]:
        data = b""
        try:
            while part := self.theirs.recv(1 << 20):
                data += part
        except BlockingIOError:
            pass
        found = []
        while data:
            length, number = TALK.unpack_from(data)
            found.append((number, data[TALK.size : TALK.size + length]))
            data = data[TALK.size + length :]
        return found

    def close(self) -> None:
        self._ours.close()
        self.theirs.close()


def asked(words: bytes, number: int = 1) -> bytes:
    return TALK.pack(len(words), number) + words


def test_each_question_is_answered_under_its_number_in_whatever_pieces_it_comes() -> None:
    wire = HELLO + asked(b"one", 7) + asked(b"", 0) + asked(b"three", 2**64 - 1)
    for size in (1, 2, 5, 12, 13, len(wire)):
        line = Line()
        for start in range(0, len(wire), size):
            line.say(wire[start : start + size])
        assert line.answers() == [(7, b"re: one"), (0, b"re: "), (2**64 - 1, b"re: three")]
        line.close()


@settings(max_examples=60)
@given(st.lists(st.binary(max_size=40) | st.binary(max_size=20).map(asked), max_size=6), st.booleans())
def test_whatever_comes_is_heard_or_ends_it_and_raises_nothing(parts: list[bytes], begun: bool) -> None:
    line = Line()
    line.say(HELLO if begun else b"")
    for part in parts:
        if not line.conversation.broken:
            line.say(part)
    if not begun and not b"".join(parts).startswith(HELLO):
        assert line.heard == [], "before it has begun nothing is a question"
    line.close()


def test_what_is_no_question_is_the_last_thing_heard() -> None:
    for words, why in ((asked(b"nonsense"), "no sense"), (TALK.pack(LARGEST + 1, 1), "announced")):
        line = Line()
        line.say(HELLO + words + asked(b"more"))
        assert why in line.conversation.broken and line.conversation.lost and b"more" not in line.heard
        line.close()


def test_what_is_said_before_it_begins_is_why_it_could_not() -> None:
    line = Line()
    line.say(b"127 not found")
    assert (line.conversation.last_words(), line.heard) == (b"127 not found", [])
    line.close()
    begun = Line()
    begun.say(HELLO + b"127 not found")
    assert begun.conversation.last_words() == b"", "afterwards it is the program that speaks"
    begun.close()


def test_no_question_is_heard_before_the_answer_to_the_last_has_been_taken() -> None:
    line = Line()
    line.say(HELLO)
    line.theirs.setblocking(True)
    line.theirs.settimeout(0.2)
    large = b"x" * (1 << 20)
    sent = 0
    try:
        while sent < 64:
            line.theirs.sendall(asked(large))  # pumped only in between, as by a supervisor that has other things to do
            sent += 1
            line._poller.wait(0)
    except TimeoutError:
        pass
    assert len(line.heard) <= 2 and sent < 64
    line.close()


def test_turns_are_given_one_for_each_time_it_asks() -> None:
    line = Line(turns=True)
    talk = line.conversation
    talk.give(b"first")
    line.say(HELLO + asked(TURN + b"0}", 1))
    assert (line.answers(), talk.said) == ([(1, b"first")], None)
    line.say(asked(b"a tool", 2) + asked(TURN + b"1}", 3) + asked(b"early", 4))
    assert (line.answers(), talk.said, line.heard) == ([(2, b"re: a tool")], TURN + b"1}", [b"a tool"])
    talk.give(b"second")
    talk.join(line._poller)
    assert line.answers() == [(3, b"second"), (4, b"re: early")], "what came in between is heard with the next turn"
    line.close()


def test_who_hangs_up_in_the_middle_of_turns_is_lost_after_a_while_and_others_are_not() -> None:
    for turns in (True, False):
        line = Line(turns=turns)
        line.say(HELLO)
        line.theirs.shutdown(socket.SHUT_RDWR)
        while line._poller.wait(0):
            continue
        assert line.conversation.hung_up and not line.conversation.lost, "it may just be ending"
        line.conversation._hung_up_at -= 10
        assert bool(line.conversation.lost) is turns
        line.close()
