"""Consent: requests and connections that wait until the supervisor says whether they may leave.

While one waits, nothing of it is resolved, dialled or sent. How many wait, and how long, is bounded. An answer for the run is remembered
here for as long as it holds; every other answer is for one request or connection. The rules of the moment are asked before and after.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from agent_sandbox.egress.addresses import dialled
from agent_sandbox.egress.rules import FlowRefused, Origin
from agent_sandbox.policy.network import NetworkRules, is_address

MOST_HELD = 64  # requests and connections that wait at once
HELD_SECONDS = 330.0  # a little longer than a person has to answer
WATCH_SECONDS = 1.0  # between two looks at whether a connection may go on
_LOOK_SECONDS = 0.5  # between two looks at whether a client still waits
_LONGEST_PATH = 200
_MOST_KNOWN = 4096

Ask = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class ClientGone(ConnectionResetError):
    """A client did not wait for the answer."""


class Consent:
    """The hosts and findings of one run that need somebody's yes. `ask` puts a question to the supervisor and returns the answer."""

    def __init__(self, ask: Ask | None, rules: Callable[[], NetworkRules], seconds: float = HELD_SECONDS) -> None:
        self._ask, self._rules, self._seconds = ask, rules, seconds
        self._granted: dict[tuple[str, int, str], float] = {}  # until when, by the clock of the event loop
        self._held = 0
        self._judged = rules()
        self._free: set[tuple[str, int]] = set()  # hosts that may be reached by the rules `_judged`, without a question

    async def host(
        self,
        name: str,
        port: int,
        alive: Callable[[], bool],
        *,
        method: str = "",
        target: bytes = b"",
        under: Callable[[NetworkRules], NetworkRules] = lambda rules: rules,
    ) -> Callable[[], Awaitable[str]] | None:
        """Wait until a host may be reached. Raises `FlowRefused`, and OSError if the client has gone.

        `under` makes of the rules in force those of this request, which may declare its own intent.

        Return a function that says whether it still may, if the answer can be taken back: its result is why not.
        """
        in_force = self._rules()
        rules = under(in_force)
        if in_force is not self._judged:
            self._judged, self._free = in_force, set()
        if rules is in_force and (name, port) in self._free:
            return None
        if not rules.objection(name, port):
            if rules is in_force and len(self._free) < _MOST_KNOWN:
                self._free.add((name, port))
            return None
        if why := rules.refusal(name, port):
            raise FlowRefused(403, why)
        if is_address(name):  # nobody is asked for an address that would not be dialled
            private = rules.may_be_private(name, port)
            addresses, why = dialled((name,), named=(name,) if private else (), private=private)
            if not addresses:
                raise FlowRefused(403, f"{name} cannot be reached: {why}")
        about = {"host": name, "port": port, "method": method[:20], "path": _path(target), "data": ""}
        watched = await self._agreed(about, alive)
        if why := under(self._rules()).refusal(name, port):  # the rules may have changed meanwhile
            raise FlowRefused(403, why)

        async def still() -> str:
            try:
                await self._agreed(about, lambda: True, again=True)
            except FlowRefused as error:
                return str(error)
            return ""

        return still if watched else None

    async def data(self, origin: Origin, method: str, target: bytes, finding: str, alive: Callable[[], bool]) -> None:
        """Wait until something that was found may leave. `finding` names the rule and the place. Raises `FlowRefused` and OSError."""
        about = {"host": origin.name, "port": origin.port, "method": method[:20], "path": _path(target), "data": finding[:200]}
        await self._agreed(about, alive)

    async def watch(self, still: Callable[[], Awaitable[str]], end: Callable[[str], None]) -> None:
        """Look again and again whether a connection may go on, and call `end` with the reason once it may not."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if why := await still():
                end(why)
                return

    async def _agreed(self, about: dict[str, Any], alive: Callable[[], bool], *, again: bool = False) -> bool:
        """Return whether an answer that allows this may be taken back. Raises `FlowRefused` for any other, and OSError."""
        key = (about["host"], about["port"], about["data"].partition(" ")[0])
        loop = asyncio.get_running_loop()
        if loop.time() < self._granted.get(key, 0.0):
            return True
        self._granted.pop(key, None)
        if self._ask is None:
            raise FlowRefused(403, f"the policy asks before this leaves for {about['host']}, and nobody can be asked")
        if self._held >= MOST_HELD and not again:
            raise FlowRefused(429, f"{self._held} requests wait for an answer already")
        self._held += not again
        try:
            answer = await self._answer({**about, "again": again}, alive)
        finally:
            self._held -= not again
        if answer["allowed"] is not True:
            raise FlowRefused(403, str(answer["why"]))
        if answer["seconds"] > 0:
            self._granted[key] = loop.time() + float(answer["seconds"])
        return bool(answer["watched"])

    async def _answer(self, question: dict[str, Any], alive: Callable[[], bool]) -> dict[str, Any]:
        """Return the answer to a question. Raises `ClientGone` once it has, and `FlowRefused` if none comes."""
        assert self._ask is not None
        loop = asyncio.get_running_loop()
        until = loop.time() + self._seconds
        asking = asyncio.ensure_future(self._ask(question))
        try:
            while not asking.done():
                await asyncio.wait((asking,), timeout=_LOOK_SECONDS)
                if not alive():
                    raise ClientGone("the client has gone while it waited for an answer")
                if loop.time() >= until and not asking.done():
                    raise FlowRefused(403, "nobody answered in time")
            return asking.result()
        finally:
            asking.cancel()


def _path(target: bytes) -> str:
    """Return the path of a target, without its query, which may hold what nobody should read."""
    path, mark, _ = target.decode("ascii", "replace").partition("?")
    return path[:_LONGEST_PATH] + ("…" if len(path) > _LONGEST_PATH else "") + ("?…" if mark else "")
