"""Registries of runtimes for tests."""

from __future__ import annotations

from collections.abc import Callable

from agent_sandbox.engine.runtimes import Registry
from agent_sandbox.runtime.base import Runtime


def registry_of(**factories: Callable[[], Runtime]) -> Registry:
    """Return a registry of these runtimes, by name."""
    registry = Registry()
    for name, make in factories.items():
        registry.register(name, make)
    return registry
