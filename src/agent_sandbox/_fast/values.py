"""Classes for values: written like dataclasses, but almost free to load and to define.

Every command pays for its imports before it does anything. `dataclasses` imports `inspect` and ten more modules, then generates and
compiles six functions for each class. The classes here share six functions that look at the fields. Type checkers see real dataclasses, and
`dataclasses.fields`, `asdict` and `replace` work. Two differences: `inspect` shows another signature, and `slots` is not supported. Classes
that users define themselves use the real `dataclasses`.

Three more names are here because `typing` is slow to load too: `TYPE_CHECKING`, which type checkers recognise by name; `Protocol`, which
only type checkers need; and `assert_never`.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from dataclasses import dataclass, field, fields, is_dataclass, replace
    from typing import Any, Never, Protocol
else:
    Protocol = object

__all__ = ["TYPE_CHECKING", "Protocol", "assert_never", "dataclass", "field", "fields", "is_dataclass", "replace"]

_MISSING: Any = object()


def assert_never(value: Never, /) -> Never:
    """Mark unreachable code: type checkers prove it, and reaching it raises `AssertionError`."""
    raise AssertionError(f"not expected here: {value!r}")


class _Field:
    """The options of one field."""

    __slots__ = ("compare", "default", "default_factory", "hash", "init", "name", "repr")

    def __init__(self, default: Any, default_factory: Callable[[], Any], init: bool, repr: bool, compare: bool, hash: bool) -> None:
        self.name = ""
        self.default = default
        self.default_factory = default_factory
        self.init = init
        self.repr = repr
        self.compare = compare
        self.hash = hash


if not TYPE_CHECKING:

    def dataclass(cls: type | None = None, /, *, frozen: bool = False) -> Any:
        """Turn a class into a value class, as `dataclasses.dataclass` does."""
        return (lambda decorated: _share(decorated, frozen)) if cls is None else _share(cls, frozen)

    def field(
        *,
        default: Any = _MISSING,
        default_factory: Any = _MISSING,
        init: bool = True,
        repr: bool = True,
        compare: bool = True,
        hash: bool = True,
    ) -> Any:
        """Declare a field with options beyond a default."""
        return _Field(default, default_factory, init, repr, compare, compare and hash)

    def fields(value: Any) -> tuple[_Field, ...]:
        """Return the fields of a value or of its class, in order."""
        return tuple(value.__value_fields__.values())

    def is_dataclass(value: Any) -> bool:
        """Return whether this is a value class or an instance of one."""
        return hasattr(value, "__value_fields__")

    def replace(value: Any, /, **changes: Any) -> Any:
        """Return a copy with these fields changed. `__post_init__` checks the copy like a new value."""
        unchanged = {name: value.__dict__[name] for name in value.__match_args__ if name not in changes}
        return type(value)(**unchanged, **changes)


def _share(cls: Any, frozen: bool) -> Any:
    all_fields: dict[str, _Field] = {}
    for base in reversed(cls.__mro__[1:]):
        all_fields |= getattr(base, "__value_fields__", {})
    for name, annotation in cls.__annotations__.items():
        if "ClassVar" not in str(annotation):
            all_fields[name] = _own_field(cls, name)
    cls.__value_fields__ = all_fields
    cls.__value_defaults__ = {name: each.default for name, each in all_fields.items() if each.default is not _MISSING}
    cls.__value_factories__ = tuple(
        (name, each.default_factory) for name, each in all_fields.items() if each.default_factory is not _MISSING
    )
    cls.__value_needs__ = frozenset(name for name, each in all_fields.items() if each.init) - cls.__value_defaults__.keys()
    cls.__dataclass_fields__ = _RealFields()
    init_names = tuple(name for name, each in all_fields.items() if each.init)
    shared = {"__match_args__": init_names, "__hash__": None} | {
        method.__name__: method for method in (*_SHARED, *(_FROZEN if frozen else ()))
    }
    for name, attribute in shared.items():
        if name not in cls.__dict__:
            setattr(cls, name, attribute)
    return cls


def _own_field(cls: Any, name: str) -> _Field:
    attribute = cls.__dict__.get(name, _MISSING)
    own = attribute if isinstance(attribute, _Field) else _Field(attribute, _MISSING, True, True, True, True)
    if own.default is not _MISSING:
        if own.default.__class__.__hash__ is None:
            raise ValueError(f"mutable default for {name}: use default_factory")
        setattr(cls, name, own.default)
    elif attribute is not _MISSING:
        delattr(cls, name)
    own.name = name
    return own


class _RealFields:
    """Makes the `dataclasses.Field` objects of a class on first access, for printers, test tools and functions of `dataclasses`."""

    def __get__(self, value: Any, cls: Any) -> dict[str, Any]:
        import dataclasses

        real_fields = {}
        for name, each in cls.__value_fields__.items():
            kind = {"default": each.default} if each.default is not _MISSING else {}
            kind |= {"default_factory": each.default_factory} if each.default_factory is not _MISSING else {}
            real: Any = dataclasses.field(**kind, init=each.init, repr=each.repr, compare=each.compare, hash=each.hash)
            real.name, real.type, real._field_type = name, "", dataclasses._FIELD  # type: ignore[attr-defined]
            real_fields[name] = real
        cls.__dataclass_fields__ = real_fields
        return real_fields


def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
    names, values = self.__match_args__, self.__dict__
    values.update(self.__value_defaults__)
    if args:
        if len(args) > len(names):
            raise TypeError(f"{type(self).__name__} takes {len(names)} values, not {len(args)}")
        if kwargs and (twice := kwargs.keys() & set(names[: len(args)])):
            raise TypeError(f"{type(self).__name__} got two values for {min(twice)!r}")
        values.update(zip(names, args, strict=False))
    if kwargs:
        if unknown := kwargs.keys() - names:
            raise TypeError(f"{type(self).__name__} has no {', '.join(sorted(unknown))}")
        values.update(kwargs)
    for name, make in self.__value_factories__:
        if name not in values:
            values[name] = make()
    if missing := self.__value_needs__ - values.keys():
        raise TypeError(f"{type(self).__name__} needs a value for {min(missing)!r}")
    if (check := getattr(self, "__post_init__", None)) is not None:
        check()


def __repr__(self: Any) -> str:
    shown = ", ".join(f"{name}={getattr(self, name)!r}" for name, each in self.__value_fields__.items() if each.repr)
    return f"{type(self).__qualname__}({shown})"


def _compared(self: Any) -> tuple[Any, ...]:
    return tuple(getattr(self, name) for name, each in self.__value_fields__.items() if each.compare)


def __eq__(self: Any, other: object) -> bool:
    if self is other:
        return True
    return _compared(self) == _compared(other) if other.__class__ is self.__class__ else NotImplemented


def __hash__(self: Any) -> int:
    return hash(tuple(getattr(self, name) for name, each in self.__value_fields__.items() if each.hash))


def __setattr__(self: Any, name: str, value: Any) -> None:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def __delattr__(self: Any, name: str) -> None:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"cannot delete field {name!r}")


_SHARED = (__init__, __repr__, __eq__)
_FROZEN = (__hash__, __setattr__, __delattr__)
