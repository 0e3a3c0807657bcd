"""Each program of the labelled set gets the runtime that it must get."""

from __future__ import annotations

import pytest

from agent_sandbox.policy.model import Guarantee
from agent_sandbox.runtime.router.model import Permits, Workload
from agent_sandbox.runtime.router.route import route
from tests.runtime.router.candidates import process_host, wasm_host
from tests.runtime.router.snippets import PROCESS, UNTOLD, WASM, labelled

ALL = frozenset(Guarantee)
HOSTS = (wasm_host(ALL), process_host(ALL - {Guarantee.DETERMINISTIC}))
SNIPPETS = labelled()


def test_the_set_is_large_enough_to_mean_something() -> None:
    assert len(SNIPPETS) >= 120
    assert len({name for name, *_ in SNIPPETS}) == len(SNIPPETS)


@pytest.mark.parametrize(("language", "source", "label"), [each[1:] for each in SNIPPETS], ids=[each[0] for each in SNIPPETS])
def test_a_program_gets_the_runtime_it_must_get(language: str, source: str, label: str) -> None:
    if label == UNTOLD:
        again = route(Workload(language, source), frozenset(), Permits(), HOSTS)
        once = route(Workload(language, source, repeatable=False), frozenset(), Permits(), HOSTS)
        assert (again.runtime, again.fall_forward, once.runtime) == (WASM, PROCESS, PROCESS), (again, once)
        return
    for repeatable in (True, False):
        chosen = route(Workload(language, source, repeatable=repeatable), frozenset(), Permits(), HOSTS)
        assert chosen.runtime == label, chosen
        assert chosen.fall_forward == (PROCESS if label == WASM and repeatable else None)
