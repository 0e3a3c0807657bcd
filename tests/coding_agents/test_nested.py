"""By what a hook knows that it is in a sandbox already."""

from __future__ import annotations

from agent_sandbox.coding_agents import nested
from agent_sandbox.coding_agents.nested import is_inside, looks_inside
from agent_sandbox.kernel import guest_setup
from agent_sandbox.kernel.ids import FIRST_ID

FILTERED = "Name:\tsh\nNoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t1\n"


def test_outside_of_a_sandbox_this_is_not_one() -> None:
    assert not is_inside()


def test_the_name_is_that_of_every_guest() -> None:
    assert nested.HOSTNAME == guest_setup.HOSTNAME


def test_a_sandbox_is_known_by_its_id_map_and_its_filters() -> None:
    roots, users = f"         0 {FIRST_ID}      65536\n", "      1000       1000          1\n"
    assert looks_inside(roots, FILTERED, "any") and looks_inside(users, FILTERED, "sandbox")
    assert not looks_inside(users, FILTERED, "any"), "a sandbox of another program"
    assert not looks_inside("         0          0 4294967295\n", FILTERED, "sandbox"), "a machine of that name"
    assert not looks_inside("         0     100000      65536\n", FILTERED, "sandbox"), "a container of that name"
    for status in ("", FILTERED.replace("Seccomp:\t2", "Seccomp:\t0"), FILTERED.replace("NoNewPrivs:\t1", "NoNewPrivs:\t0")):
        assert not looks_inside(roots, status, "sandbox") and not looks_inside(users, status, "sandbox")
    assert not looks_inside("", FILTERED, "sandbox")
