"""A guarantee that is asked for is given, or nothing runs and the refusal names it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.policy.model import Guarantee
from tests.security.harness import Box


@pytest.mark.parametrize("guarantee", [Guarantee.SEPARATE_KERNEL, Guarantee.DETERMINISTIC])
def test_a_guarantee_that_cannot_be_given_is_named_and_nothing_runs(box: Box, guarantee: Guarantee) -> None:
    policy = box.files(read=True).policy
    assert policy is not None
    asking = box.with_(policy=replace(policy, requires=policy.requires | {guarantee}))
    seen: list[bytes] = []
    with pytest.raises(RuntimeUnavailable, match=guarantee.value) as refusal:
        asking.run("echo", "ran", cwd="/tmp", on_output=lambda _, data: seen.append(data))
    assert refusal.value.missing == (guarantee.value,) and refusal.value.hint and not seen
    assert box.run("echo", "ran").stdout == b"ran\n", "the control arm: without it, it runs"
