"""The supervisor's handle of a guest inside the user-space kernel.

A guest is made in the two steps of every guest. `prepare` starts `runsc` as an outer program and waits until the agent inside says "ready"
on the payload socket. `begin` sends the guest's program over the same socket, so all that follows is as in `process`.
"""

from __future__ import annotations

import os

from agent_sandbox._fast.values import TYPE_CHECKING, replace
from agent_sandbox.errors import LaunchFailed
from agent_sandbox.runtime.base import Exit, ExitReason
from agent_sandbox.runtime.process.guest_handle import ProcessGuest

if TYPE_CHECKING:
    from agent_sandbox.runtime.process.pump import Sink

_SAID = 4096  # bytes of what runsc says about its failure
_KILLED = 128 + 9


class GvisorGuest(ProcessGuest):
    """A guest inside the user-space kernel. It is made with the launch of the outer program, and begun with that of the guest's."""

    def prepare(self, *, by_reference: bool = False) -> None:
        """Make the guest, and return when the user-space kernel runs and the agent inside waits for the program."""
        super().prepare(by_reference=by_reference)
        try:
            self._hand_over()
            why = self._answer.refusal()
        except TimeoutError:
            why = "it did not become ready in time"
        except OSError as error:
            why = error.strerror or str(error)
        if why is not None:
            self.settle()
            said = self._complaint()
            raise LaunchFailed(f"the user-space kernel could not start: {said or why}", hint="run: agent-sandbox doctor")

    def _complaint(self) -> str:
        """Return the last line that runsc has written to the standard error of the guest, before there was a guest."""
        if (fd := self._outputs.get("stderr")) is None:
            return ""
        os.set_blocking(fd, False)
        try:
            text = os.read(fd, _SAID).decode(errors="replace")
        except OSError:
            return ""
        return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")

    def _exit(self, sinks: dict[str, Sink]) -> Exit:
        """Return the end of the run. If the agent has not reported it, the user-space kernel has ended: killed, or out of memory.

        Short of memory, the machine's kernel may also kill the process that the program's code runs in, and the user-space kernel then
        reports some failure of the program. Without a cgroup, the user-space kernel ends when it is refused memory, which nobody reports:
        then what it held at most is compared with the limit.
        """
        end = super()._exit(sinks)
        said = self._messages.get("exit")
        if said is None or end.reason not in (ExitReason.EXITED, ExitReason.SIGNALLED):
            return end
        short = self._cgroup.usage().oom_kills > 0
        if said["reported"] and not (short and end.code):
            return end
        most = self.launch.limits.memory_bytes
        if "memory" not in self._cgroup.enforces and most is not None and end.usage.peak_memory_bytes >= most:
            short, end = True, replace(end, limits_hit=(*(hit for hit in end.limits_hit if hit != "memory"), "memory"))
        return replace(end, code=_KILLED, reason=ExitReason.OUT_OF_MEMORY if short else ExitReason.KILLED, signal=9)
