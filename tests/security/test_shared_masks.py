"""Attacks on the mask layers that runs of one plan share: they are never stale, never writable, and a guest cannot reach them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.runtimes import only
from agent_sandbox.engine.work import Command, Work
from agent_sandbox.ledger.writer import Ledger
from agent_sandbox.policy.model import cloned
from agent_sandbox.policy.secrets import Mask
from agent_sandbox.runtime.process.mask_shelf import MaskShelf
from agent_sandbox.runtime.process.runtime import ProcessRuntime

ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin"}


class Runs:
    """Runs of one plan on one keeper, and the layers that they share."""

    def __init__(self, home: Path, runtime: ProcessRuntime, session: Session) -> None:
        self.home, self._runtime, self._session = home, runtime, session

    def say(self, line: str) -> str:
        return self._session.run(Work(Command(("sh", "-c", f"{{ {line}; }} 2>&1; true")), ENV, cwd="/")).stdout.decode()

    def share(self) -> None:
        """Make the layers: the second run is asked for them."""
        for _ in range(2):
            self.say("true")
        if self.descriptor is None:
            pytest.skip("this kernel takes no detached mount as a layer (Linux 6.15)")

    @property
    def descriptor(self) -> int | None:
        (zygote,) = self._runtime._zygotes.values()
        return next((kept.descriptor for kept in zygote.masks._kept.values() if kept.descriptor is not None), None)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    home = Path(os.path.realpath(tmp_path)) / "home"
    (home / "kept").mkdir(parents=True)
    (home / "key").write_text("CANARY")
    (home / "kept" / "file").write_text("CANARY")
    (home / "shown").write_text("shown")
    masks = [Mask(f"{home}/.many/{number}", "few are not shared") for number in range(20)]
    masks += [Mask(f"{home}/key", "a key"), Mask(f"{home}/later", "a key"), Mask(f"{home}/.config/gh", "a token")]
    policy = cloned(masks=(*masks, Mask(f"{home}/kept", "somebody's", stays=True)))
    runtime = ProcessRuntime()
    gate = Gate(policy, Ledger(tmp_path / "ledger", clock=lambda: 0.0), clock=lambda: 0.0)
    try:
        yield Runs(home, runtime, Session(gate, only(runtime), project=str(home)))
    finally:
        runtime.close()


@contextmanager
def _believing(monkeypatch: pytest.MonkeyPatch, *, looks: bool) -> Iterator[None]:
    """With `looks` as the product is; otherwise init is told of no findings, and so compares none: the control arm."""
    offer = MaskShelf.offer

    @contextmanager
    def without_findings(self: MaskShelf, plan: object) -> Iterator[object]:
        with offer(self, plan) as (request, given):  # type: ignore[arg-type]
            yield {number: {} for number in request} if isinstance(request, dict) else request, given

    with monkeypatch.context() as patch:
        if not looks:
            patch.setattr(MaskShelf, "offer", without_findings)
        yield


LOOKS = pytest.mark.parametrize("looks", [True, False], ids=["as it is", "the control arm: findings are not compared"])


def test_what_is_masked_stays_masked_and_the_rest_is_shown_in_every_run_that_shares_the_layers(runs: Runs) -> None:
    runs.share()
    before = runs.descriptor
    for _ in range(3):
        assert runs.say(f"cat {runs.home}/shown") == "shown", "the control arm"
        assert "CANARY" not in runs.say(f"cat {runs.home}/key {runs.home}/kept/file {runs.home}/later; ls {runs.home}/kept")
        (runs.home / "later").write_text("CANARY")
    assert runs.descriptor == before, "the runs did share them"


@LOOKS
def test_a_directory_that_appears_is_shown_without_its_secrets(runs: Runs, monkeypatch: pytest.MonkeyPatch, looks: bool) -> None:
    runs.share()
    (runs.home / ".config").mkdir()
    for name in ("gh", "harmless"):
        (runs.home / ".config" / name).write_text(f"CANARY {name}")
    with _believing(monkeypatch, looks=looks):
        said = runs.say(f"cat {runs.home}/.config/*")
    assert "CANARY gh" not in said
    assert ("CANARY harmless" in said) is looks


@LOOKS
def test_a_directory_that_is_closed_meanwhile_is_closed_in_the_view(runs: Runs, monkeypatch: pytest.MonkeyPatch, looks: bool) -> None:
    runs.home.chmod(0o755)
    runs.share()
    assert runs.say(f"stat -c %a {runs.home}").strip() == "755"
    runs.home.chmod(0o700)
    with _believing(monkeypatch, looks=looks):
        assert (runs.say(f"stat -c %a {runs.home}").strip() == "700") is looks


def test_a_guest_changes_its_own_clone_and_never_the_layers(runs: Runs) -> None:
    runs.share()
    before = _listing(runs)
    attack = "echo MINE > key; mkdir later; echo MINE > kept/new; chmod 777 .; cat key kept/new; rm -rf kept"
    look = "cat key kept/new later/* .config/*; ls kept"
    assert runs.say(f"cd {runs.home}; {attack}").count("MINE") == 2, "the control arm: in its own clone it may"
    assert _listing(runs) == before
    assert "MINE" not in runs.say(f"cd {runs.home}; {look}")


def test_the_layers_are_attached_nowhere_in_a_guest_and_no_descriptor_of_them_is_left(runs: Runs) -> None:
    runs.share()
    mounts = runs.say("cat /proc/self/mountinfo")
    assert " / / " in mounts, "the control arm: it lists its mounts"
    assert " masks " not in mounts
    streams = runs.say("ls /proc/self/fd").split()
    assert len(streams) == 4, "three, and the directory that is listed"
    assert "Permission denied" in runs.say("ls /proc/1/fd/")


def test_even_the_supervisor_cannot_write_to_the_layers_it_keeps(runs: Runs) -> None:
    runs.share()
    with pytest.raises(OSError) as caught:
        os.mkdir(f"/proc/self/fd/{runs.descriptor}/more")
    assert caught.value.errno in (errno.EROFS, errno.EACCES)


def _listing(runs: Runs) -> list[tuple[str, int, int]]:
    found = []
    for directory, names, files in os.walk(f"/proc/self/fd/{runs.descriptor}/"):
        for name in (*names, *files):
            status = os.lstat(f"{directory}/{name}")
            found.append((name, status.st_mode, status.st_uid))
    return sorted(found)
