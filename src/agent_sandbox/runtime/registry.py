"""The registry of runtimes: names and factories. A runtime that is registered here is routed to, refused and explained like any other.

A factory is called when its runtime is first needed, once. Those that are not `automatic` are used only when they are named.
"""

from __future__ import annotations

from collections.abc import Callable

from agent_sandbox._fast.values import TYPE_CHECKING

if TYPE_CHECKING:
    from agent_sandbox.runtime.base import Runtime

AUTO = "auto"  # in place of a name: the router chooses


class Registry:
    """Runtimes by name. Safe to share between threads, without a lock: a fork could inherit it held."""

    def __init__(self) -> None:
        self._factories: dict[str, Callable[[], Runtime]] = {}
        self._automatic: dict[str, None] = {}  # a set that keeps its order
        self._made: dict[str, Runtime] = {}

    def register(self, name: str, make: Callable[[], Runtime], *, automatic: bool = True) -> None:
        """Add a runtime, or replace the one of this name."""
        self.unregister(name)
        self._factories[name] = make
        if automatic:
            self._automatic[name] = None

    def unregister(self, name: str) -> None:
        """Take a runtime away. It is not closed."""
        for table in (self._factories, self._made, self._automatic):
            table.pop(name, None)

    def get(self, name: str) -> Runtime:
        """Return the runtime of this name; the first call makes it. Raises KeyError for an unknown name."""
        return self._made.get(name) or self._made.setdefault(name, self._factories[name]())  # of two made at once, one is used

    @property
    def automatic(self) -> tuple[str, ...]:
        """The names that the router chooses from."""
        return tuple(self._automatic)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that a user may ask for: those of the runtimes, and `auto`."""
        return (*self._automatic, AUTO)

    def __contains__(self, name: str) -> bool:
        return name == AUTO or name in self._factories

    def close(self, *, leaving: bool = False) -> None:
        """Close the runtimes that have been made. They start anew with the next launch."""
        for runtime in [*self._made.values()]:
            runtime.close(leaving=leaving)
