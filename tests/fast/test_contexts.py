"""Our context managers behave as the real ones do: each claim is tried on both."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from agent_sandbox._fast import contexts


@pytest.fixture(params=[contexts, contextlib], ids=["ours", "the real one"])
def module(request: pytest.FixtureRequest) -> Any:
    found = request.param
    assert isinstance(found, ModuleType)
    return found


def test_only_the_named_exceptions_are_suppressed(module: Any) -> None:
    with module.suppress(OSError, KeyError):
        raise FileNotFoundError
    with pytest.raises(ValueError), module.suppress(OSError):
        raise ValueError
    with pytest.raises(ValueError), module.suppress():
        raise ValueError


def test_a_null_context_gives_what_it_was_given(module: Any) -> None:
    with module.nullcontext(5) as five:
        assert five == 5


class Log:
    """A generator that says what happens to it, and a manager of each module that is made of it."""

    def __init__(self, module: Any, *, catch: type[BaseException] | None = None, instead: BaseException | None = None) -> None:
        self.said: list[str] = []

        @module.contextmanager  # type: ignore[untyped-decorator]
        def manager(name: str) -> Iterator[str]:
            """Manage."""
            self.said.append(f"enter {name}")
            try:
                yield name
            except BaseException as error:
                self.said.append(f"error {type(error).__name__}")
                if instead is not None:
                    raise instead from error
                if catch is None or not isinstance(error, catch):
                    raise
            finally:
                self.said.append(f"leave {name}")

        self.manager: Any = manager


def test_a_generator_is_entered_and_left(module: Any) -> None:
    log = Log(module)
    with log.manager("a") as name:
        log.said.append(f"in {name}")
    assert log.said == ["enter a", "in a", "leave a"]
    assert (log.manager.__name__, log.manager.__doc__) == ("manager", "Manage.")


@pytest.mark.parametrize("error", [ValueError("x"), StopIteration("x"), RuntimeError("x"), KeyboardInterrupt()])
def test_an_exception_reaches_the_generator_and_goes_on(module: Any, error: BaseException) -> None:
    log = Log(module)
    with pytest.raises(type(error)) as caught, log.manager("a"):
        raise error
    assert caught.value is error
    assert log.said == ["enter a", f"error {type(error).__name__}", "leave a"]


def test_a_generator_may_catch_an_exception_or_raise_another(module: Any) -> None:
    with Log(module, catch=ValueError).manager("a"):
        raise ValueError
    another = KeyError("other")
    with pytest.raises(KeyError) as caught, Log(module, instead=another).manager("a"):
        raise ValueError
    assert caught.value is another
    assert isinstance(another.__cause__, ValueError)


def test_a_generator_that_yields_twice_or_never_is_an_error(module: Any) -> None:
    @module.contextmanager  # type: ignore[untyped-decorator]
    def twice() -> Iterator[None]:
        yield
        yield

    @module.contextmanager  # type: ignore[untyped-decorator]
    def stubborn() -> Iterator[None]:
        try:
            yield
        except ValueError:
            yield

    @module.contextmanager  # type: ignore[untyped-decorator]
    def never() -> Iterator[None]:
        yield from ()

    with pytest.raises(RuntimeError), twice():
        pass
    with pytest.raises(RuntimeError), stubborn():
        raise ValueError
    with pytest.raises(RuntimeError), never():
        pass


def test_a_stack_leaves_in_reverse_whatever_happens(module: Any) -> None:
    log = Log(module)
    with module.ExitStack() as stack:
        assert stack.enter_context(log.manager("a")) == "a"
        assert stack.callback(log.said.append, "called") == log.said.append
        stack.enter_context(log.manager("b"))
    assert log.said == ["enter a", "enter b", "leave b", "called", "leave a"]


def test_a_stack_goes_on_after_an_exception_of_the_block_or_of_a_callback(module: Any) -> None:
    said: list[str] = []

    def fail() -> None:
        raise KeyError("callback")

    with pytest.raises(KeyError, match="callback") as caught, module.ExitStack() as stack:
        stack.callback(said.append, "first")
        stack.callback(fail)
        stack.callback(said.append, "last")
        raise ValueError("block")
    assert said == ["last", "first"]
    assert isinstance(caught.value.__context__, ValueError)
    with pytest.raises(KeyError, match="callback"), module.ExitStack() as stack:
        stack.callback(fail)


def test_what_is_caught_by_a_manager_in_a_stack_does_not_go_on(module: Any) -> None:
    outer, inner = Log(module), Log(module, catch=ValueError)

    def fail() -> None:
        raise ValueError("callback")

    with module.ExitStack() as stack:
        stack.enter_context(outer.manager("outer"))
        stack.enter_context(inner.manager("inner"))
        stack.callback(fail)
        raise KeyError
    assert inner.said == ["enter inner", "error ValueError", "leave inner"]
    assert outer.said == ["enter outer", "leave outer"]
    with module.ExitStack() as stack:  # the block itself ends well
        stack.enter_context(Log(module, catch=ValueError).manager("inner"))
        stack.callback(fail)


def test_a_stack_can_be_closed_early_and_moved(module: Any) -> None:
    said: list[str] = []
    with module.ExitStack() as stack:
        stack.callback(said.append, "a")
        moved = stack.pop_all()
    assert said == []
    moved.close()
    moved.close()
    assert said == ["a"]


def test_what_cannot_be_entered_is_not_left(module: Any) -> None:
    class Broken:
        def __enter__(self) -> None:
            raise ValueError

        def __exit__(self, *details: object) -> None:
            raise AssertionError("was never entered")

    with pytest.raises(ValueError), module.ExitStack() as stack:
        stack.enter_context(Broken())
