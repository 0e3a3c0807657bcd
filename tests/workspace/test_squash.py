"""Squashed layers show the same tree as those they were made from."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_sandbox.workspace.squash import squash
from tests.workspace.edits import STEPS, Steps, perform
from tests.workspace.overlays import in_namespace
from tests.workspace.stacks import Stacked

RANDOM = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)


@pytest.mark.slow
@RANDOM
@given(before=STEPS, layers=st.lists(STEPS, min_size=1, max_size=4), link=st.booleans())
def test_a_squashed_stack_over_the_same_base_shows_the_same_tree(before: Steps, layers: list[Steps], link: bool) -> None:
    def body() -> None:
        machine = Stacked(Path(place))
        perform(machine.data, before)
        for steps in layers:
            machine.run(partial(perform, steps=steps))
        seen, kinds = machine.look(), machine.kinds()
        into = machine.fresh()
        with machine.stack() as stack:
            fd = os.open(into, os.O_RDONLY)
            squash(stack, fd, link=link, machine_root=str(machine.root))
            os.close(fd)
        machine.generations = [into]
        assert machine.look() == seen
        assert machine.kinds() == kinds

    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        in_namespace(body)
