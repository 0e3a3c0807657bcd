"""Classes for values: written like dataclasses, and costing almost nothing to load and to define.

Every command pays for what it loads before it does anything. `dataclasses` brings `inspect` and ten more modules along, and then writes and
compiles six functions for each class. Ours share six functions that look at the fields. To a type checker they are the real thing, and
`dataclasses.fields`, `asdict` and `replace` work on them. What differs is the signature that `inspect` shows, and that `slots` are not to
be had; the classes users make themselves use the real one.

Three more names are here because `typing`, too, is slow to load: `TYPE_CHECKING`, which type checkers know by its name, `Protocol`, which
only they need to understand, and `assert_never`.
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
    """Stands where no value can come: a type checker proves it, and should it be wrong, nothing goes on."""
    raise AssertionError(f"not expected here: {value!r}")


class _Field:
    """What is known of one field."""

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
        """The decorator."""
        return (lambda made: _share(made, frozen)) if cls is None else _share(cls, frozen)

    def field(
        *,
        default: Any = _MISSING,
        default_factory: Any = _MISSING,
        init: bool = True,
        repr: bool = True,
        compare: bool = True,
        hash: bool = True,
    ) -> Any:
        """A field that needs more said of it than a default."""
        return _Field(default, default_factory, init, repr, compare, compare and hash)

    def fields(value: Any) -> tuple[_Field, ...]:
        """The fields of a value or of its class, in their order."""
        return tuple(value.__value_fields__.values())

    def is_dataclass(value: Any) -> bool:
        """Whether it is one of these values, or their class."""
        return hasattr(value, "__value_fields__")

    def replace(value: Any, /, **changes: Any) -> Any:
        """The same value but for these fields; it is checked as a new one."""
        kept = {name: value.__dict__[name] for name in value.__match_args__ if name not in changes}
        return type(value)(**kept, **changes)


def _share(cls: Any, frozen: bool) -> Any:
    found: dict[str, _Field] = {}
    for base in reversed(cls.__mro__[1:]):
        found |= getattr(base, "__value_fields__", {})
    for name, annotation in cls.__annotations__.items():
        if "ClassVar" not in str(annotation):
            found[name] = _own_field(cls, name)
    cls.__value_fields__ = found
    cls.__value_defaults__ = {name: each.default for name, each in found.items() if each.default is not _MISSING}
    cls.__value_factories__ = tuple((name, each.default_factory) for name, each in found.items() if each.default_factory is not _MISSING)
    cls.__value_needs__ = frozenset(name for name, each in found.items() if each.init) - cls.__value_defaults__.keys()
    cls.__dataclass_fields__ = _RealFields()
    taken = tuple(name for name, each in found.items() if each.init)
    shared = {"__match_args__": taken, "__hash__": None} | {method.__name__: method for method in (*_SHARED, *(_FROZEN if frozen else ()))}
    for name, attribute in shared.items():
        if name not in cls.__dict__:
            setattr(cls, name, attribute)
    return cls


def _own_field(cls: Any, name: str) -> _Field:
    given = cls.__dict__.get(name, _MISSING)
    made = given if isinstance(given, _Field) else _Field(given, _MISSING, True, True, True, True)
    if made.default is not _MISSING:
        if made.default.__class__.__hash__ is None:
            raise ValueError(f"mutable default for {name}: use default_factory")
        setattr(cls, name, made.default)
    elif given is not _MISSING:
        delattr(cls, name)
    made.name = name
    return made


class _RealFields:
    """The fields as `dataclasses` has them, made when somebody asks: printers, test tools, and whoever calls its functions."""

    def __get__(self, value: Any, cls: Any) -> dict[str, Any]:
        import dataclasses

        made = {}
        for name, each in cls.__value_fields__.items():
            kind = {"default": each.default} if each.default is not _MISSING else {}
            kind |= {"default_factory": each.default_factory} if each.default_factory is not _MISSING else {}
            real: Any = dataclasses.field(**kind, init=each.init, repr=each.repr, compare=each.compare, hash=each.hash)
            real.name, real.type, real._field_type = name, "", dataclasses._FIELD  # type: ignore[attr-defined]
            made[name] = real
        cls.__dataclass_fields__ = made
        return made


def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
    taken, values = self.__match_args__, self.__dict__
    values.update(self.__value_defaults__)
    if args:
        if len(args) > len(taken):
            raise TypeError(f"{type(self).__name__} takes {len(taken)} values, not {len(args)}")
        if kwargs and (twice := kwargs.keys() & set(taken[: len(args)])):
            raise TypeError(f"{type(self).__name__} got two values for {min(twice)!r}")
        values.update(zip(taken, args, strict=False))
    if kwargs:
        if unknown := kwargs.keys() - taken:
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
