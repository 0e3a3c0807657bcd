"""One session that is held: its turns, its timeline as data, and what can be asked about its states."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from agent_sandbox._calls import Run, TextListener
from agent_sandbox._fast.values import fields
from agent_sandbox.engine.timeline.tree import LOOK_SECONDS, Step
from agent_sandbox.errors import PolicyError, SandboxError
from agent_sandbox.policy.decide import Ask, Deny
from agent_sandbox.policy.paths import contains
from agent_sandbox.result import SandboxResult
from agent_sandbox.runtime.base import ExitReason
from agent_sandbox.server import messages
from agent_sandbox.server.messages import Message
from agent_sandbox.session import SandboxSession
from agent_sandbox.timelines import PastState, PastVariable

MOST_LISTED = 20_000  # steps of one timeline: the newest
MOST_COMPARED = 40  # steps of one timeline whose changed files are named
MOST_NAMED = 5  # files of one step
LONGEST_LOOK = 600.0  # seconds
GRACE_SECONDS = 5.0  # for a program to end by the interrupt that its time limit sends, before the limit ends the session
INTERRUPTED = 130  # the exit code of a program that an interrupt has ended


class Listener(TextListener):
    """Sends the output of a turn to the command that began it, byte for byte. If that has gone, output is dropped."""

    def __init__(self, link: socket.socket) -> None:
        super().__init__(lambda stream, text: None)
        self._link: socket.socket | None = link

    def __call__(self, stream: str, data: bytes) -> None:
        if self._link is None:
            return
        try:
            messages.send(self._link, {"output": stream, "data": messages.packed(data)})
        except OSError:
            self._link = None

    def finish(self) -> None:
        """Do nothing: no character is held back."""


class HeldTurn:
    """One turn of a held session. It is taken in one thread, and can be interrupted from another.

    After `seconds`, its time limit, it is to be interrupted: then the session goes on. If that does not help, the limit ends both.
    """

    def __init__(self, take: Callable[[Run], Message], seconds: float | None) -> None:
        self.seconds = seconds
        self._take = take
        self._run = Run()
        self._interrupts = 0
        self._timed_out = False
        self._told: Message | SandboxError | None = None

    def take(self) -> None:
        """Take the turn, and keep its result."""
        try:
            self._told = self._take(self._run)
        except SandboxError as error:
            self._told = error
        except Exception as error:
            self._told = SandboxError(f"the turn failed: {type(error).__name__}: {error}")

    def interrupt(self) -> None:
        """Interrupt the program as Ctrl-C does, which ends the turn. The second time, kill it, which ends the session."""
        self._interrupts += 1
        guest = self._run._guest
        if guest is None or self._interrupts > 1:
            self._run.cancel()
        else:
            guest.interrupt(signal.SIGINT)

    def time_out(self) -> None:
        """Interrupt the program, because its time is over. If it has not begun yet, leave that to the limit of the session."""
        if self._run._guest is not None:
            self._timed_out = True
            self.interrupt()

    def result(self) -> Message:
        """Return how the turn ended. Raises `SandboxError`."""
        if isinstance(self._told, SandboxError):
            raise self._told
        assert self._told is not None
        if self._timed_out and self._told["exit"] == INTERRUPTED:
            return {**self._told, "reason": ExitReason.TIMED_OUT.value, "limits_hit": [*self._told["limits_hit"], "wall"]}
        return self._told


class HeldSession:
    """A session, with the id by which commands name it."""

    def __init__(
        self, name: str, session: SandboxSession, project: str, script: str, since: float, parent: str = "", parent_step: int = 0
    ) -> None:
        self.id, self.session, self.project, self.name, self.since = name, session, project, script, since
        self._parent, self._parent_step = parent, parent_step

    def facts(self) -> Message:
        """Return what `timeline --all` shows of it."""
        failed = self.session.timeline.failed
        return {
            "id": self.id,
            "project": self.project,
            "script": self.name,
            "since": self.since,
            "parent": self._parent,
            "parent_step": self._parent_step,
            "steps": len(self.session.timeline),
            "present": self._tree.present,
            "failed": failed.number if failed is not None else None,
            "ended": self.session.ended,
            "busy": self._busy,
        }

    @property
    def _tree(self) -> Any:
        return self.session._recording().tree

    @property
    def _busy(self) -> bool:
        return bool(self.session._taking)

    def _check_idle(self) -> None:
        if self._busy:
            raise SandboxError(f"the session {self.id} is busy with another command", hint="wait until it has ended, or interrupt it")

    def turn(self, source: str, listener: Listener) -> HeldTurn:
        """Return a turn that runs this code."""
        seconds = self.session._sandbox._time_for(None)[0]
        hard = None if seconds is None else seconds + GRACE_SECONDS

        def take(run: Run) -> Message:
            self._check_idle()
            result = self.session._in_turn(run, lambda: self.session._result(source, run, b"", hard, listener))
            return self._told(result)

        return HeldTurn(take, seconds)

    def _told(self, result: SandboxResult) -> Message:
        turn = self.session._recording().turn
        mine = [step for step in self.session.timeline if step.turn == turn]
        failed = next((step for step in reversed(mine) if step.error), None) if not result.success else None
        end = result.exit
        return {
            "session": self.id,
            "exit": result.exit_code,
            "reason": end.reason.value if end is not None else "",
            "signal": end.signal if end is not None else None,
            "limits_hit": list(result.limits_hit),
            "error": result.error or "",
            "notes": list(result.notes),
            "seconds": round(result.execution_time, 6),
            "cpu_seconds": round(end.usage.cpu_seconds, 6) if end is not None else 0.0,
            "steps": len(mine),
            "failed": as_data(failed) if failed is not None else None,
            "ended": self.session.ended,
            "refused": _refusal(result),
        }

    def timeline(self) -> Message:
        """Return the steps, the present line, and the files that steps changed."""
        timeline = self.session.timeline
        return {
            **self.facts(),
            "step_list": [as_data(step) for step in timeline.steps[-MOST_LISTED:]],
            "line": [step.number for step in timeline.here],
            "files": {str(number): names for number, names in self._changed_files().items()},
        }

    def _changed_files(self) -> dict[int, list[str]]:
        """Return the files that statements changed, by step, for the newest ones whose states are kept.

        A state is the one before its step. So a statement changed what differs between its state and the state of the step after it.
        """
        if self.session.ended or self._busy:
            return {}
        after: dict[int, Step] = {}
        for step in self.session.timeline:
            after.setdefault(step.parent, step)
        steps = self._tree.steps
        pairs = [(old, new.number) for old, new in after.items() if old and new.files_changed and new.kept and steps[old].kept]
        found = {}
        for old, new in sorted(pairs)[-MOST_COMPARED:]:
            try:
                changed = self.session._in_turn(Run(), partial(self.session._recording().differences, old, new))
            except SandboxError:  # given up meanwhile
                continue
            names = [f"{path.removeprefix(self.project + '/')} {kind}" for path, kind in sorted(changed.items())]
            found[old] = [*names[:MOST_NAMED], *([f"{len(names) - MOST_NAMED} more"] if len(names) > MOST_NAMED else [])]
        return found

    def _number(self, step: object) -> int:
        """Return a step that somebody names: by its number, or as "error" the last one that raised; None is the present."""
        if step is None:
            step = self._tree.present
        if not self._tree.steps:
            why = f"{self.id} is a fork that has run nothing" if self._parent else f"{self.id} has run nothing"
            raise PolicyError(why, hint=f"run code in it: agent-sandbox run --in {self.id} FILE")
        if step == "error":
            failed = self.session.timeline.failed
            if failed is None:
                raise PolicyError(f"no step of {self.id} has raised an error", hint=f"see: agent-sandbox timeline {self.id}")
            return failed.number
        number = int(str(step))
        if number not in self._tree.steps:
            count = len(self._tree.steps)
            raise PolicyError(f"{self.id} has no step {number}: there are {count}", hint=f"see: agent-sandbox timeline {self.id}")
        return number

    def _check_alive(self) -> None:
        with suppress(SandboxError):  # the guest may have ended between two commands: then `ended` says why
            self.session._turns._check_that_it_goes_on()
        if self.session.ended:
            why = f"the session {self.id} has ended, and its states with it: {self.session.ended}"
            raise SandboxError(why, hint="begin another: agent-sandbox run --timeline FILE")

    def _check_kept(self, *numbers: int) -> None:
        """Raise `SandboxError` if the state before one of these steps is not kept. One of a fork is run to again instead."""
        for number in numbers:
            if number not in self._tree.states and not self._parent:
                hint = f"this may reach it by running code again: agent-sandbox rewind {self.id} {number}"
                raise SandboxError(f"the state before step {number} is not kept: {self._tree.steps[number].why}", hint=hint)

    def rewind(self, step: object) -> Message:
        """Return to the state before a step."""
        self._check_alive()
        self._check_idle()
        rewound = self.session.rewind(self._number(step))
        return {"session": self.id, "step": as_data(rewound.step), "ran_again": rewound.ran_again}

    def inspect(self, step: object, what: str, words: str, seconds: float) -> Message:
        """Look at the state before a step: "variables", an expression ("value"), or a file ("read") or directory ("list").

        Without a step, it is the present state, or after an error the state just before it. If the question raises there, the answer is
        what it `raised`.
        """
        self._check_alive()
        self._check_idle()
        if step is None and self._tree.present not in self._tree.states and what in ("read", "list"):
            return self._present_file(what, words)
        number = self._number(self._default() if step is None else step)
        self._check_kept(number)
        state = self.session.inspect(number)
        told: Message = {"session": self.id, "step": as_data(self._tree.steps[number])}
        frames = {"frames": self._frames(number)} if what == "variables" else {}
        return told | _asked(state, what, words, min(seconds or LOOK_SECONDS, LONGEST_LOOK)) | frames

    def _present_file(self, what: str, path: str) -> Message:
        """Read a file or list a directory of the present, whose state is not kept."""
        told: Message = {"session": self.id, "step": None}
        try:
            if what == "read":
                return {**told, "content": messages.packed(self.session.files.read_bytes(path))}
            return {**told, "names": [each.name for each in self.session.files.list(path)]}
        except (OSError, ValueError) as error:
            return {**told, "raised": f"{type(error).__name__}: {error}"}

    def changed(self) -> Message:
        """Return the files of the project that the session has changed up to now, each with "new", "changed" or "gone"."""
        self._check_alive()
        self._check_idle()
        self.session._recording().check_awake()
        found = self.session._changed_files()
        return {
            "session": self.id,
            "project": self.project,
            "files": {path: kind for path, kind in found.items() if contains(self.project, path)},
        }

    def present_file(self, path: str) -> Message:
        """Return the content of a file as it is now, whether it is a directory, or what reading it `raised`."""
        self._check_alive()
        self._check_idle()
        if self._tree.present not in self._tree.states:
            return self._present_file("read", path)
        return _asked(self.session.inspect(), "read", path, LOOK_SECONDS)

    def _default(self) -> int:
        """Return the step to look at if none is named."""
        tree = self._tree
        present = tree.steps.get(tree.present)
        if present is not None and not present.text and present.parent and tree.steps[present.parent].error:
            return int(present.parent)
        return int(tree.present)

    def _frames(self, number: int) -> list[Message]:
        """Return the frames of the error that a step's statement raised. They are in the state after it."""
        steps = self._tree.steps
        after = next((step for step in steps.values() if step.parent == number and not step.text), None)
        if not steps[number].error or after is None or not (after.kept or self._parent):
            return []
        frames = PastState(after, self.session.inspect(after.number)._look).frames
        return [
            {"function": each.function, "file": each.file, "line": each.line, "variables": [as_data(one) for one in each.variables]}
            for each in frames
        ]

    def diff(self, old: int, new: object) -> Message:
        """Compare the states before two steps."""
        self._check_alive()
        self._check_idle()
        if self._parent:
            hint = f"look at one after the other: agent-sandbox inspect {self.id} {old}"
            raise SandboxError(f"{self.id} is a fork, which keeps no two states to compare", hint=hint)
        first, second = self._number(old), self._number(self._default() if new is None else new)
        self._check_kept(first, second)
        found = self.session.timeline.diff(first, second)
        return {"session": self.id, "old": first, "new": second, "variables": found.variables, "files": found.files}

    def fork(self, step: object, count: int) -> tuple[int, tuple[SandboxSession, ...]]:
        """Fork the state before a step, by default the present one. Return the step, and the new sessions."""
        self._check_alive()
        self._check_idle()
        number = self._number(step)
        fork: Callable[[int, int], tuple[SandboxSession, ...]] | None = getattr(self.session, "fork", None)
        if fork is None:
            raise SandboxError("this version has no live forks", hint="rewind goes to another branch: agent-sandbox rewind STEP")
        return number, fork(number, count)


def _asked(state: PastState, what: str, words: str, seconds: float) -> Message:
    """Ask a state. If the question raised there, the answer is what it `raised`."""
    raised: list[str] = []

    def look(kind: str, asked: str, _: float) -> dict[str, Any]:
        answer = state._look(kind, asked, seconds)
        if "raised" in answer:
            raised.append(str(answer["raised"]))
        return answer

    past = PastState(state.step, look)
    try:
        match what:
            case "variables":
                return {"variables": [as_data(each) for each in past.variables]}
            case "value":
                return {"value": as_data(past.evaluate(words))}
            case "read":
                return {"content": messages.packed(past.read(words))}
            case _:
                return {"names": list(past.list(words))}
    except SandboxError as error:
        if raised:
            return {"raised": raised[0]}
        hint = "nothing was changed; ask for one value with --eval, or give it more time: --timeout 60"
        raise SandboxError(error.message, hint=hint) from error


def _refusal(result: SandboxResult) -> str:
    """Return why nothing ran: "" if something did, "approval", "denied", or "invalid" for code that cannot be judged."""
    if result.exit is not None:
        return ""
    if not isinstance(result.verdict, Deny | Ask):
        return "invalid"
    return "approval" if result.verdict.because.rule == "approval" else "denied"


def as_data(value: Step | PastVariable) -> Message:
    """Return a step or a variable as data."""
    return {each.name: getattr(value, each.name) for each in fields(value)}
