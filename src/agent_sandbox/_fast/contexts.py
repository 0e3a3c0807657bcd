"""Context managers without `contextlib`, which imports five more modules: `suppress`, `contextmanager`, `ExitStack` and `nullcontext`.

They do what those of the standard library do, and type checkers see the real ones. Not supported: asynchronous managers, managers used as
decorators, and groups of exceptions.
"""

from __future__ import annotations

from agent_sandbox._fast.values import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
    from types import TracebackType
    from typing import Any

    Leave = Callable[[type[BaseException] | None, BaseException | None, TracebackType | None], Any]

__all__ = ["AbstractContextManager", "ExitStack", "contextmanager", "nullcontext", "suppress"]

if not TYPE_CHECKING:
    AbstractContextManager = object  # only type checkers need it

    class suppress:
        """Ignore these exceptions in a block."""

        def __init__(self, *exceptions: type[BaseException]) -> None:
            self._exceptions = exceptions

        def __enter__(self) -> None:
            pass

        def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> bool:
            return kind is not None and issubclass(kind, self._exceptions)

    class nullcontext:
        """Do nothing around a block."""

        def __init__(self, result: Any = None) -> None:
            self._result = result

        def __enter__(self) -> Any:
            return self._result

        def __exit__(self, *details: object) -> None:
            pass

    def contextmanager(function: Callable[..., Generator[Any, None, None]]) -> Callable[..., Any]:
        """Make a function that yields once into a context manager."""

        def manager(*args: Any, **kwargs: Any) -> _Generated:
            return _Generated(function(*args, **kwargs))

        manager.__name__, manager.__qualname__, manager.__module__ = function.__name__, function.__qualname__, function.__module__
        manager.__doc__, manager.__wrapped__ = function.__doc__, function
        return manager

    class ExitStack:
        """Leaves, in reverse order, what it has entered, and calls its callbacks, whatever happens in the block and in each of them."""

        def __init__(self) -> None:
            self._leaves: list[Leave] = []

        def enter_context(self, manager: Any) -> Any:
            """Enter a context manager, and leave it at the end of the block. Return its result."""
            kind = type(manager)
            enter, leave = kind.__enter__, kind.__exit__
            result = enter(manager)
            self._leaves.append(lambda *details: leave(manager, *details))
            return result

        def callback(self, function: Callable[..., object], /, *args: Any, **kwargs: Any) -> Callable[..., object]:
            """Call a function at the end of the block."""

            def leave(*details: object) -> None:
                function(*args, **kwargs)

            self._leaves.append(leave)
            return function

        def pop_all(self) -> ExitStack:
            """Return a new stack with everything that is in this one, which is empty then."""
            other = type(self)()
            other._leaves, self._leaves = self._leaves, []
            return other

        def close(self) -> None:
            """Leave everything now."""
            self.__exit__(None, None, None)

        def __enter__(self) -> ExitStack:
            return self

        def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
            if not self._leaves:
                return False
            leave = self._leaves.pop()
            try:
                handled = leave(kind, error, trace)
            except BaseException as failure:
                if not self.__exit__(type(failure), failure, failure.__traceback__):
                    raise
                return kind is not None
            if handled and kind is not None:
                self.__exit__(None, None, None)
                return True
            return self.__exit__(kind, error, trace)


class _Generated:
    """The context manager of a function that yields once: enters with the first step, and leaves with the second."""

    __slots__ = ("_steps",)

    def __init__(self, steps: Generator[Any, None, None]) -> None:
        self._steps = steps

    def __enter__(self) -> Any:
        try:
            return next(self._steps)
        except StopIteration:
            raise RuntimeError("the generator of a context manager did not yield") from None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        try:
            if kind is None:
                next(self._steps)
            else:
                self._steps.throw(error or kind())
        except StopIteration as end:
            return end is not error and kind is not None
        except BaseException as raised:
            # The error of the block itself, which the generator has let pass. One that is a StopIteration comes wrapped.
            wrapped = isinstance(error, StopIteration) and isinstance(raised, RuntimeError) and raised.__cause__ is error
            if error is None or not (raised is error or wrapped):
                raise
            error.__traceback__ = trace
            return False
        self._steps.close()
        raise RuntimeError("the generator of a context manager yielded twice")
