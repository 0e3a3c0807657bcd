"""`serve`: run the daemon of this user, describe it, or stop it."""

from __future__ import annotations

import os
import time

from agent_sandbox._fast.values import dataclass
from agent_sandbox.assembly import here
from agent_sandbox.cli.caller import CAPABILITY
from agent_sandbox.cli.errand import PLACE
from agent_sandbox.cli.help import version
from agent_sandbox.cli.render.messages import Console, counted
from agent_sandbox.cli.results import VerbResult
from agent_sandbox.cli.serve_options import ServeOptions
from agent_sandbox.policy.secrets import default_masks
from agent_sandbox.server import front, units
from agent_sandbox.server.daemon import MOST, Daemon
from agent_sandbox.server.daemon_place import HTTP_SOCKET, Counts, state_of, stop
from agent_sandbox.server.event_log import EventLog, silent


@dataclass(frozen=True)
class ServeResult(VerbResult):
    """The daemon of this user: whether it runs, and what it has done since it began.

    `handed_back` are command lines that their caller performed itself, because the daemon could not do exactly the same; `lost` are those
    whose caller was killed. `held` are detached sandboxes, and processes with sessions, that it owns; `held_ended` those that have ended.
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
    held: int
    held_ended: int

    def text(self, console: Console) -> None:
        if self.began is None:
            print("no daemon runs")
            return
        if not self.running:
            print(f"the daemon has ended, after {counted(self.performed, 'command line')}")
            if self.held:
                print(f"{self.held} in the background ended with it: agent-sandbox ps --all")
            return
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.began))
        print(f"the daemon runs since {since}, as process {self.pid}")
        print(f"{counted(self.performed, 'command line')} performed, {self.performing} under way, {self.waiting} waiting")
        print(f"{counted(self.ready, 'worker')} ready; {self.handed_back} handed back, {self.refused} refused, {self.lost} lost")
        print(f"{self.held} in the background, {self.held_ended} ended: agent-sandbox ps")


@dataclass(frozen=True)
class UnitResult(VerbResult):
    """A unit of systemd that starts the daemon of this installation."""

    kind = "serve-unit"

    unit: str

    def text(self, console: Console) -> None:
        print(self.unit, end="")


def serve(options: ServeOptions, console: Console) -> VerbResult:
    """Run the daemon until a signal ends it; with --status, describe the one that runs; with --stop, end it; with --unit, print one."""
    if options.unit is not None:
        return UnitResult(units.unit(options.unit))
    state = here().host.state
    if options.stop:
        stopped = state_of(state)
        return _result(None, stopped if stop(state) else None)
    if options.status:
        return _result(state_of(state))
    if options.http:
        front.available()
    doors = [front.tcp_door(options.listen, options.token_file, _hidden(state))] if options.listen is not None else []
    os.environ.pop(CAPABILITY, None)  # its value is a permission of who started this, and not of everybody who asks over HTTP
    log = EventLog() if options.log == "json" else silent
    said = Console(quiet=True) if options.log == "json" else console
    most, keys = options.most or MOST, here().host.keys
    daemon = Daemon(state, keys=keys, most=most, http=options.http, doors=doors, say=said.note, log=log)
    said.note("the daemon is ready; command lines of this user use it from now on. Ctrl-C or `agent-sandbox serve --stop` ends it")
    if options.http:
        said.note(f"HTTP: {os.path.join(state, PLACE, HTTP_SOCKET)}{f' and {doors[0].address}, with a token' if doors else ''}")
    log("ready", http=options.http, port=doors[0].address if doors else None, version=version())
    units.notify("READY=1")
    daemon.serve()
    log("ended", performed=daemon.counts.performed)
    return _result(None, daemon.counts)


def _hidden(state: str) -> list[str]:
    """Return the paths that no sandbox shows: what is masked by default, and /run, of which each run has its own."""
    masks = default_masks(homes=here().host.homes, state_dirs=(os.path.realpath(state),), keys_dirs=(here().host.keys,))
    return ["/run", *(mask.path for mask in masks)]


def _result(runs: Counts | None, ended: Counts | None = None) -> ServeResult:
    counts = runs or ended
    if counts is None:
        return ServeResult(False, None, None, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    return ServeResult(
        runs is not None,
        counts.pid if runs else None,
        counts.began,
        counts.performed,
        counts.refused,
        counts.handed_back,
        counts.lost,
        counts.performing,
        counts.waiting,
        counts.ready,
        counts.held,
        counts.held_ended,
    )
