"""`serve`: run the daemon of this user, describe it, or stop it."""

from __future__ import annotations

import os
import time

from agent_sandbox._fast.values import dataclass
from agent_sandbox.assembly import here
from agent_sandbox.cli.errand import PLACE
from agent_sandbox.cli.render.messages import Console, counted
from agent_sandbox.cli.results import VerbResult
from agent_sandbox.cli.serve_options import ServeOptions
from agent_sandbox.server import front
from agent_sandbox.server.daemon import HTTP_SOCKET, MOST, Counts, Daemon, state_of, stop


@dataclass(frozen=True)
class ServeResult(VerbResult):
    """The daemon of this user: whether it runs, and what it has done since it began.

    `handed_back` are command lines that their caller performed itself, because the daemon could not do exactly the same; `lost` are those
    whose caller was killed.
    """

    kind = "serve"

    running: bool
    pid: int | None
    began: float | None
    performed: int
    refused: int
    handed_back: int
    lost: int
    performing: int
    waiting: int
    ready: int

    def text(self, console: Console) -> None:
        if self.began is None:
            print("no daemon runs")
            return
        if not self.running:
            print(f"the daemon has ended, after {counted(self.performed, 'command line')}")
            return
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.began))
        print(f"the daemon runs since {since}, as process {self.pid}")
        print(f"{counted(self.performed, 'command line')} performed, {self.performing} under way, {self.waiting} waiting")
        print(f"{counted(self.ready, 'worker')} ready; {self.handed_back} handed back, {self.refused} refused, {self.lost} lost")


def serve(options: ServeOptions, console: Console) -> VerbResult:
    """Run the daemon until a signal ends it; with --status, describe the one that runs; with --stop, end it."""
    state = here().host.state
    if options.stop:
        stopped = state_of(state)
        return _result(None, stopped if stop(state) else None)
    if options.status:
        return _result(state_of(state))
    if options.http:
        front.available()
    doors = [front.tcp_door(options.listen, options.token_file)] if options.listen is not None else []
    daemon = Daemon(state, most=options.most or MOST, http=options.http, doors=doors, say=console.note)
    console.note("the daemon is ready; command lines of this user use it from now on. Ctrl-C or `agent-sandbox serve --stop` ends it")
    if options.http:
        console.note(f"HTTP: {os.path.join(state, PLACE, HTTP_SOCKET)}{f' and {options.listen}, with a token' if doors else ''}")
    daemon.serve()
    return _result(None, daemon.counts)


def _result(runs: Counts | None, ended: Counts | None = None) -> ServeResult:
    counts = runs or ended
    if counts is None:
        return ServeResult(False, None, None, 0, 0, 0, 0, 0, 0, 0)
    numbers = counts.performed, counts.refused, counts.handed_back, counts.lost, counts.performing, counts.waiting, counts.ready
    return ServeResult(runs is not None, counts.pid if runs else None, counts.began, *numbers)
