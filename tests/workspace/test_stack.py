"""A stack of layers reads as the overlay of them looks: as root with trusted attributes, as an ordinary user with `userxattr`."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.workspace.edits import STEPS, Steps, apply, perform
from tests.workspace.overlays import in_namespace
from tests.workspace.stacks import TARGET, Stacked, picture

RANDOM = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)


@pytest.mark.slow
@RANDOM
@given(before=STEPS, layers=st.lists(STEPS, min_size=1, max_size=4))
def test_applying_the_changes_of_a_stack_to_the_machine_gives_what_the_guest_saw(before: Steps, layers: list[Steps]) -> None:
    def body() -> None:
        machine = Stacked(Path(place))
        perform(machine.data, before)
        for steps in layers:
            machine.run(partial(perform, steps=steps))
        seen = machine.look()
        with machine.stack() as stack:
            apply(machine.changes(), stack, machine.data, target=TARGET)
        assert picture(machine.data) == seen
        assert machine.kinds() == {}

    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        in_namespace(body)
