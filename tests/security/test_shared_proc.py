"""A sandbox without a /proc of its own, as in a default Podman container: it sees the processes around it, and that is all."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.containers import CANARY, NEIGHBOUR, made_container
from tests.security.conftest import Tell
from tests.security.harness import case


@case(340)
def test_the_processes_around_it_can_be_named_and_not_read_changed_or_ended(number: int, tell: Tell, reachable_checkout: Path) -> None:
    """A neighbour of the same user, in the same container: its environment, its files, its settings, its life."""
    with made_container(reachable_checkout) as container:
        line = NEIGHBOUR.format(canary=CANARY, program=" ".join(container.program))
        with container.start("sh", "-c", line) as running:
            out, err = running.communicate(timeout=300)
    bare, _, sandboxed = out.decode().partition("SANDBOXED\n")
    assert bare.splitlines() == [f"SECRET={CANARY}", "reached", "WRITTEN", "SAW sleep"], (bare, err)
    assert sandboxed.splitlines() == ["SAW sleep", "AFTERWARDS sleep 500"], (sandboxed, err)
    tell("its name is seen, and nothing of it is read, written or ended", control="without a sandbox the same lines read and write it")
