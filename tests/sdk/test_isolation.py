"""Isolation backends run code and tell whether they can."""

from __future__ import annotations

import pytest

from agent_sandbox import IsolationBackend, IsolationConfig, PolicyError, ProcessIsolation, SandboxResult, SandboxStatus


def test_process_isolation_is_available_where_these_tests_run() -> None:
    assert ProcessIsolation().is_available()


def test_a_backend_gives_the_same_result_as_a_sandbox() -> None:
    backend: IsolationBackend = ProcessIsolation()
    result = backend.execute("raise ValueError('oops')")
    assert isinstance(result, SandboxResult)
    assert (result.status, result.error, result.exit_code) == (SandboxStatus.FAILED, "ValueError: oops", 1)


def test_the_limits_of_its_configuration_hold() -> None:
    config = IsolationConfig(timeout_seconds=0.3, max_output_bytes=10)
    assert ProcessIsolation().execute("while True: pass", "python", config).status is SandboxStatus.TIMEOUT
    assert ProcessIsolation().execute("print('x' * 100)", "python", config).stdout == "x" * 10


@pytest.mark.parametrize("disabled", [True, False])
def test_a_backend_has_no_route_of_its_own_with_or_without_a_network(disabled: bool) -> None:
    config = IsolationConfig(network_disabled=disabled)
    result = ProcessIsolation().execute("print(open('/proc/net/route').read().count('\\n'))", "python", config)
    assert result.stdout == "1\n", "the heading is there, and no route"


def test_settings_that_cannot_be_enforced_are_refused_when_they_are_made() -> None:
    with pytest.raises(PolicyError, match="timeout_seconds"):
        IsolationConfig(timeout_seconds=-1)


def test_a_backend_must_say_both_things() -> None:
    with pytest.raises(TypeError, match="abstract"):
        IsolationBackend()  # type: ignore[abstract]
