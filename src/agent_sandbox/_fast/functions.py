"""Function tools without `functools`, which imports `collections` and more: `partial`, `cache`, `lru_cache` and `cached_property`.

Type checkers see those of the standard library. The caches are the interpreter's own; only `typed` and names in `cache_info` are missing.
"""

from __future__ import annotations

from agent_sandbox._fast.values import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from functools import cache, cached_property, lru_cache, partial
    from typing import Any
else:
    try:
        from _functools import _lru_cache_wrapper, partial
    except ImportError:  # an interpreter that has them in Python only
        from functools import _lru_cache_wrapper, partial

__all__ = ["cache", "cached_property", "lru_cache", "partial"]

if not TYPE_CHECKING:

    def lru_cache(maxsize: int | None = 128) -> Callable[[Callable[..., Any]], Any]:
        """Remember the last results of a function."""

        def remembering(function: Callable[..., Any]) -> Any:
            remembered = _lru_cache_wrapper(function, maxsize, False, lambda *counts: counts)
            for name in ("__module__", "__name__", "__qualname__", "__doc__"):
                setattr(remembered, name, getattr(function, name))
            remembered.__wrapped__ = function
            return remembered

        return remembering

    def cache(function: Callable[..., Any], /) -> Any:
        """Remember all results of a function."""
        return lru_cache(None)(function)

    class cached_property:
        """A property that is computed once for each value, and is an attribute in its `__dict__` from then on."""

        def __init__(self, function: Callable[[Any], Any]) -> None:
            self.func = function
            self.__doc__ = function.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self._name = name

        def __get__(self, value: Any, owner: type | None = None) -> Any:
            if value is None:
                return self
            computed = value.__dict__[self._name] = self.func(value)
            return computed
