"""What is mounted on the machine comes and goes while a view of it is planned and built: a run sees what is there, and none fails of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from time import time
from typing import NamedTuple

import pytest

from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.retry import MOST_PLANS
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.runtimes import only
from agent_sandbox.engine.work import Command, Work
from agent_sandbox.errors import Overtaken
from agent_sandbox.kernel import namespaces
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.ledger.writer import Ledger
from agent_sandbox.policy.model import cloned
from agent_sandbox.policy.paths import Tree
from agent_sandbox.runtime.base import Launch
from agent_sandbox.runtime.process.guest_handle import ProcessGuest
from agent_sandbox.runtime.process.runtime import ProcessRuntime
from tests.kernel.children import in_child

ROOT = os.geteuid() == 0


def mounted(place: Path) -> None:
    sc.mount("test", str(place), "tmpfs", 0, "size=64k")


class Seen(NamedTuple):
    """What a shell in a clone of the machine said, line by line, then the notes or the failure; and how many plans it took."""

    lines: list[str]
    plans: int


def run(tmp_path: Path, script: str, *, meanwhile: Callable[[int], None], before: Callable[[], None] = lambda: None) -> Seen:
    """Run it; `meanwhile` happens between a plan, of which it is told the number, and the view that is built from it.

    All of it in a mount namespace of the test's own, in which nobody else mounts anything. Rootless, too, one may mount there.
    """

    def attempt() -> Seen:
        if not ROOT:
            namespaces.enter_own_user_namespace()
        sc.unshare(sc.CLONE_NEWNS)
        sc.mount("", "/", None, sc.MS_REC | sc.MS_PRIVATE)
        before()
        plans = count(1)

        class Late(ProcessRuntime):
            def launch(self, launch: Launch) -> ProcessGuest:
                meanwhile(next(plans))
                return super().launch(launch)

        runtime = Late()
        policy = cloned(masks=(), denied=[Tree(str(tmp_path / "shared" / "denied"))])
        session = Session(Gate(policy, Ledger(tmp_path / "ledger", clock=time), clock=time), only(runtime))
        try:
            outcome = session.run(Work(Command(("sh", "-c", script)), {"PATH": os.defpath}, cwd="/"))
            said = [*outcome.stdout.decode().splitlines(), *outcome.notes]
        except Overtaken as error:
            said = [error.message]
        finally:
            runtime.close()
        return Seen(said, next(plans) - 1)

    return in_child(attempt)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory with something to see and something to hide, and places to mount on."""
    directory = tmp_path / "shared"
    for name in ("denied", "place", "other"):
        (directory / name).mkdir(parents=True)
    (directory / "denied" / "secret").write_text("not for guests")
    (directory / "file").write_text("shown\n")
    return directory


def test_a_run_does_not_fail_of_what_is_mounted_after_it_was_planned(tmp_path: Path, shared: Path) -> None:
    def meanwhile(plan: int) -> None:
        if plan == 1:
            mounted(shared / "place")
            (shared / "place" / "inside").write_text("")

    seen = run(tmp_path, f"cd {shared}; cat file; ls place; cat denied/secret || echo hidden", meanwhile=meanwhile)
    # As root the new mount is left out, and what lies below it is shown. Rootless the kernel lets nobody see that, so it is planned again.
    assert seen == (Seen(["shown", "hidden"], 1) if ROOT else Seen(["shown", "inside", "hidden"], 2))


def test_a_run_does_without_what_has_gone_since_it_was_planned(tmp_path: Path, shared: Path) -> None:
    def before() -> None:  # rootless a directory with mounts in it is put together from its entries, one mount each
        mounted(shared / "place")
        mounted(shared / "other")
        (shared / "gone").write_text("")

    def meanwhile(plan: int) -> None:
        sc.umount2(str(shared / "place"), sc.MNT_DETACH)
        (shared / "place").rmdir()
        (shared / "gone").unlink()

    seen = run(tmp_path, f"cd {shared}; cat file; ls -I denied; cat denied/secret || echo hidden", meanwhile=meanwhile, before=before)
    assert seen == Seen(["shown", "file", "other", "hidden"], 1)


@pytest.mark.needs_user
def test_where_something_is_mounted_each_time_the_run_fails_and_says_so(tmp_path: Path, shared: Path) -> None:
    places = [shared / str(number) / "place" for number in range(MOST_PLANS + 1)]
    for place in places:
        place.mkdir(parents=True)
    seen = run(tmp_path, "echo ran", meanwhile=lambda plan: mounted(places[plan]))
    assert seen == Seen([f"the sandbox could not be built: something has been mounted below it meanwhile: {places[-1].parent}"], MOST_PLANS)
