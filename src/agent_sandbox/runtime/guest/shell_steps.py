"""A shell session with a timeline: each command is a step, with a checkpoint before it, and its state can be looked at."""

from __future__ import annotations

import hashlib
import os
import sys

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.runtime.guest import entry, look, steps
from agent_sandbox.runtime.guest.shell import PersistentShell, content_of, file_with
from agent_sandbox.runtime.guest.shell_state import PREFIX, ShellState, readable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from agent_sandbox.runtime.guest_rpc.client import Speaker


class SteppedShellTurns(steps.SteppedTurns):
    """Takes turns like `ShellTurns`, and asks the host before each command whether the state is to be kept."""

    def __init__(
        self, names: Mapping[str, Any], speaker: Speaker, spell: Callable[[Any], bytes], ended: Callable[[BaseException], int]
    ) -> None:
        super().__init__(names, speaker, spell, ended)
        self._shell = PersistentShell(sys.argv[1:])
        self._shell.run(b"")  # the first state says what bash has by itself, so that a later one can be compared with it
        self._first = self._shell.state

    def take(self) -> int:
        """Take turns until there are no more, then end the shell."""
        code = super().take()
        self._shell.end()
        return code

    def _turn(self, name: str, source: str, stdin: bytes) -> dict[str, Any]:
        if not source.startswith(PREFIX):
            return super()._turn(name, source, stdin)
        lines = look.lines_of(source.removeprefix(PREFIX)) or [""]
        try:
            self._keep_at({"step": [1, 0, len(lines), len(lines[-1].encode())]})
            done = self._shell.turn(source, stdin)
            self._keep_at({"step": [0, 0, 0, 0]})  # the end of the turn
        except steps._Woken:
            return {"code": 0, "value": None, "woken": True}
        return done

    def _look(self, question: str) -> dict[str, Any]:
        return answer(question, self._shell, self._first)


def answer(question: str, shell: PersistentShell, first: ShellState) -> dict[str, Any]:
    """Answer a question about the state of a shell, as `look.answer` does about that of an interpreter. The value is data, and bounded."""
    _, _, kind, words = question.split("\0", 3)
    if kind in ("variables", "digests"):
        shown = shell.state.described(first)[: look.MOST_NAMES]
        if kind == "digests":
            return {"digests": {name: hashlib.sha256(type_.encode() + text).hexdigest()[:32] for name, type_, text in shown}}
        return {"variables": [{"name": name, "type": type_, "bytes": len(text), "repr": _cut(text)} for name, type_, text in shown]}
    if kind == "frames":
        return {"frames": []}
    if kind == "value":
        return _output_of(words.encode(), shell)
    return look.answer(question, {}, None)


def _output_of(command: bytes, shell: PersistentShell) -> dict[str, Any]:
    """Run a command in the state, and return what it prints."""
    output, errors = file_with(b""), file_with(b"")
    try:
        code, remarks = shell.run(command, output=output, errors=errors)
        printed, complaint = content_of(output), readable(content_of(errors)[-look.LONGEST_REPR :]).strip()
    finally:
        os.close(output)
        os.close(errors)
    if code:
        return {"raised": f"exit code {code}: {complaint or '; '.join(remarks) or 'it printed no error'}"}
    return {"value": {"type": "output", "bytes": len(printed), "repr": _cut(printed)}}


def _cut(text: bytes) -> str:
    return readable(text[: look.LONGEST_REPR]) + ("…" if len(text) > look.LONGEST_REPR else "")


entry.session_turns = SteppedShellTurns
