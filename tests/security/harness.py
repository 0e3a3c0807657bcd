"""What the contract and the attack suites drive: a box for each runtime, canaries outside it, and the same probe run without a wall.

One small adapter per runtime (`Box`), so that one table of cases runs on all of them. A probe is Python source that prints one line of
JSON; `Box.probe` runs it inside, `outside` runs it on the bare machine, and what differs is the wall.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.runtimes import only
from agent_sandbox.engine.work import Code, Command, Outcome, Work
from agent_sandbox.ledger.writer import Ledger
from agent_sandbox.policy.model import CLONED_LIMITS, EVERYWHERE, FileRules, Limits, Policy, cloned, locked
from agent_sandbox.policy.paths import Tree
from agent_sandbox.policy.secrets import Mask, default_masks
from agent_sandbox.runtime.base import Guest, Runtime
from agent_sandbox.workspace.changes import ChangeSet
from agent_sandbox.workspace.layers.image import opened
from agent_sandbox.workspace.store import SandboxState, Store
from agent_sandbox.workspace.stored_sandbox import Stored, changes_of, stack_in
from tests.images import SLIM
from tests.security.cases import priority
from tests.security.runtimes import another

ROOT = os.geteuid() == 0
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
GENEROUS = replace(CLONED_LIMITS, wall_seconds=600.0, output_bytes=64 << 20, disk_bytes=1 << 30)


def case(*numbers: int, prio: str | None = None) -> pytest.MarkDecorator:
    """The numbers, in the list of attack cases, of what a test tries. They become its id, so that a table can be made of what ran."""
    listed = priority(*numbers)
    assert prio in (None, listed), f"case {numbers} is {listed} in cases.py, not {prio}"
    marks = [pytest.mark.p0] if listed == "P0" else []
    name = "+".join(str(number) for number in numbers)
    return pytest.mark.parametrize("number", [pytest.param(numbers[0], id=name, marks=marks)])


_READ = """
import json
read = []
for path in PATHS:
    try:
        with open(path, "rb") as file:
            read.append(file.read(4096).decode(errors="replace"))
    except OSError:
        pass
print(json.dumps(read))
"""


def reading(*paths: Path | str) -> str:
    """A probe that reads files by these names and says what it got."""
    return _READ.replace("PATHS", repr([str(path) for path in paths]))


@dataclass(frozen=True)
class Box:
    """A sandbox on the whole machine (or, with `locked`, on next to nothing of it), its project, and the home whose secrets are masked."""

    runtime: Runtime
    project: Path
    home: Path
    ledger: Ledger
    limits: Limits = GENEROUS
    policy: Policy | None = None
    state: SandboxState | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: ENVIRONMENT)

    def with_(self, **changes: Any) -> Box:
        """The same with other limits, rules or layers."""
        return replace(self, **changes)

    def files(self, **rules: Any) -> Box:
        """The same under the SDK's preset: only what the rules name."""
        return self.with_(policy=locked(limits=self.limits, processes=True, **rules))

    @property
    def unmasked(self) -> Box:
        """The same with nothing hidden: the control arm of every mask. The view is built as before, around names that nobody has."""
        masks = tuple(Mask(str(place / "nothing-is-called-this"), "control") for place in (self.home, self.project))
        return self.with_(policy=cloned(masks=masks, limits=self.limits))

    @contextmanager
    def fresh(self, **how: bool | int) -> Iterator[Box]:
        """The same with a runtime of its own, made with these settings, for the length of a block."""
        made = another(self.runtime, **how)
        try:
            yield self.with_(runtime=made)
        finally:
            made.close()

    @property
    def kept(self) -> Box:
        """The same with layers on disk, which outlive the run."""
        return self.with_(state=Store.open(str(self.project.parent / "state")).sandbox_for(str(self.project)))

    @contextmanager
    def layers(self) -> Iterator[Path]:
        """The layers of a kept one, for the length of a block: a directory on disk, or in the image that they are in."""
        assert self.state is not None
        generation = str(self.state.history().active)
        if not self.state.stacking:
            yield Path(self.state.layers, generation)
            return
        with opened(self.state.image) as (_, top):
            yield Path(f"/proc/{os.getpid()}/fd/{top}/{generation}")

    def read(self, layers: int) -> ChangeSet:
        """What the host's reader makes of layers, as they are now."""
        with stack_in(layers) as stack:
            return changes_of(stack, self._policy())

    def changes(self) -> dict[str, str]:
        """The same of its own kept layers: the kind of change by path."""
        assert self.state is not None
        return {change.path: change.kind.value for change in Stored(self.state).changes(self._policy())}

    @property
    def rules(self) -> FileRules:
        """What its policy says of files."""
        return self._policy().files

    def session(self) -> Session:
        """A session of the engine, as the surfaces make them."""
        return Session(Gate(self._policy(), self.ledger, clock=time.time), only(self.runtime), project=str(self.project), state=self.state)

    def run(self, *argv: str, **work: Any) -> Outcome:
        """Run a program."""
        return self._run(Command(argv), work)

    def shell(self, script: str, **work: Any) -> Outcome:
        """Run a line of bash."""
        return self.run("bash", "-c", script, **work)

    def python(self, source: str, **work: Any) -> Outcome:
        """Run Python code, in a fork of the zygote."""
        return self._run(Code("python", source), work)

    def javascript(self, source: str, **work: Any) -> Outcome:
        """Run JavaScript, by Node.js or by what the runtime brings."""
        return self._run(Code("javascript", source), work)

    def probe(self, source: str, **work: Any) -> Any:
        """Run a probe inside and return what it printed."""
        outcome = self.python(source, **work)
        assert outcome.exit.code == 0, (outcome.exit, outcome.stderr.decode(errors="replace")[-3000:], outcome.refused)
        return json.loads(outcome.stdout)

    def _policy(self) -> Policy:
        masks = default_masks(homes=[str(self.home)], projects=[str(self.project)], state_dirs=(str(self.project.parent / "state"),))
        policy = self.policy or cloned(masks=masks, limits=self.limits)
        if not self.runtime.traits.images:
            return policy
        # An image is the root. Of the machine it shows the directory that holds project, home and the canaries beside them.
        files = replace(policy.files, allowed=(Tree(str(self.project.parent)),)) if policy.files.allowed == EVERYWHERE else policy.files
        return replace(policy, image=SLIM, files=files)

    def _run(self, what: Code | Command, work: dict[str, Any]) -> Outcome:
        environment = work.pop("env", self.environment)
        if self.runtime.traits.images:  # an image brings no compiled modules, and those would be changes
            environment = {**environment, "PYTHONDONTWRITEBYTECODE": "1"}
        return self.session().run(Work(what, environment, cwd=work.pop("cwd", str(self.project)), **work))


def outside(source: str, *, namespace: tuple[str, ...] = (), cwd: Path | None = None) -> Any:
    """The control arm: the same probe without a sandbox, or with `namespace` (flags of unshare(1)) in one that is thrown away."""
    wrapper = ["unshare", *namespace] if namespace else []
    ran = subprocess.run([*wrapper, sys.executable, "-c", source], capture_output=True, cwd=cwd, check=False)
    assert ran.returncode == 0, (ran.returncode, ran.stderr.decode(errors="replace")[-3000:])
    return json.loads(ran.stdout)


@contextmanager
def meanwhile(box: Box, source: str) -> Iterator[list[Outcome]]:
    """While the block lasts, a guest that has printed something and may be waiting for its input to end. Then it is given a second to end,
    and killed. What came of it is in the list afterwards, or sooner if it ended by itself."""
    reading, writing = os.pipe()
    started = threading.Event()
    guests: list[Guest] = []
    ended: list[Outcome] = []

    def run() -> None:
        try:
            ended.append(box.python(source, stdin=reading, on_start=guests.append, on_output=lambda *_: started.set()))
        finally:
            started.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert started.wait() and not ended, ended
        yield ended
    finally:
        os.close(writing)
        thread.join(1)
        for guest in guests:
            guest.kill()
        thread.join()
        os.close(reading)


@dataclass
class Listener:
    """A unix or TCP listener on the real machine that counts who comes."""

    address: Any
    accepted: int = 0


@contextmanager
def listening(family: int, address: Any) -> Iterator[Listener]:
    """Listen while the block lasts."""
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.bind(address)
        server.listen(16)
        listener = Listener(server.getsockname())
        thread = threading.Thread(target=_accept, args=(server, listener))
        thread.start()
        try:
            yield listener
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def _accept(server: socket.socket, listener: Listener) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        listener.accepted += 1
        connection.close()


def knows(process: int | str = "self") -> dict[str, str]:
    """What a process is, as the machine's own /proc says."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def snapshot(root: Path) -> dict[str, tuple[Any, ...]]:
    """Every entry below a real directory: kind, owner, content or link target. Two are equal when nothing has happened."""
    found: dict[str, tuple[Any, ...]] = {}
    for directory, names, files in os.walk(root):
        for name in (*names, *files):
            path = Path(directory, name)
            status = path.lstat()
            small = path.is_file() and status.st_size < 1 << 30  # the image of a sandbox is sparse, and not small
            content: Any = os.readlink(path) if path.is_symlink() else path.read_bytes() if small else None
            attributes = tuple(sorted(os.listxattr(path, follow_symlinks=False)))
            found[str(path)] = (status.st_mode, status.st_uid, status.st_gid, status.st_ino, status.st_nlink, attributes, content)
    return found
