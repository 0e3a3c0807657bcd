"""The daemon performs a request of the HTTP interface once, even if the client is slow."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.cli.errand import SOCKET, TAKEN
from agent_sandbox.kernel import wire
from agent_sandbox.server import errands


def test_a_request_that_was_performed_before_its_sender_goes_on_was_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = os.open(tmp_path, os.O_PATH)
    asked: list[Any] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{place}/{SOCKET}")
        os.close(place)
        listener.listen()

        class HeldUp(socket.socket):
            def sendmsg(self, *arguments: Any) -> int:
                sent = super().sendmsg(*arguments)
                with listener.accept()[0] as peer:
                    value, descriptors = wire.receive(peer)
                    wire.close_all(descriptors)
                    asked.append(value)
                    peer.send(TAKEN)
                return sent

        async def begun() -> None:
            started = await errands.Errand.start(tmp_path, ["status"], directory=str(tmp_path), environment={}, stdin=b"")
            started.close()

        monkeypatch.setattr(socket, "socket", HeldUp)
        asyncio.run(begun())
    assert [words for _, words, _, _ in asked] == [[b"status"]]
