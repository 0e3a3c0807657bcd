"""Frozen dataclasses that cost almost nothing to define.

`dataclasses.dataclass` writes and compiles six functions for each class: near a millisecond, for a hundred classes, before a command does
anything. Frozen ones are all alike, so here they share six functions that look at the fields. Everything else of `dataclasses` works on
them, since they have the same `Field` objects; type checkers are told that it is the real one. What differs is the signature that `inspect`
shows, and a few microseconds for each object: so the classes users make themselves, and those made by the thousand, use the real one.
"""

from __future__ import annotations

import dataclasses
import inspect  # dataclasses has loaded it already
from dataclasses import MISSING, Field, FrozenInstanceError, asdict, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

__all__ = ["asdict", "dataclass", "field", "fields", "is_dataclass", "replace"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls: type | None = None, /, *, frozen: bool = False, slots: bool = False) -> Any:
        """The decorator. Only plain frozen classes are made the short way."""

        def decorate(made: type) -> type:
            return _share(made) if frozen and not slots else dataclasses.dataclass(frozen=frozen, slots=slots)(made)

        return decorate if cls is None else decorate(cls)


def _share(cls: Any) -> Any:
    found: dict[str, Field[Any]] = {}
    for base in reversed(cls.__mro__[1:]):
        found |= getattr(base, "__dataclass_fields__", {})
    for name, annotation in inspect.get_annotations(cls).items():
        if "ClassVar" not in str(annotation):
            found[name] = _field(cls, name, annotation)
    cls.__dataclass_fields__ = found
    taken = tuple(name for name, each in found.items() if each.init)
    shared = {"__match_args__": taken, **{method.__name__: method for method in _SHARED}}
    for name, attribute in shared.items():
        if name not in cls.__dict__:
            setattr(cls, name, attribute)
    return cls


def _field(cls: Any, name: str, annotation: Any) -> Field[Any]:
    given = cls.__dict__.get(name, MISSING)
    made: Any = given if isinstance(given, Field) else field(default=given)
    if made.default is not MISSING:
        if made.default.__class__.__hash__ is None:
            raise ValueError(f"mutable default for {name}: use default_factory")
        setattr(cls, name, made.default)
    elif given is not MISSING:
        delattr(cls, name)
    made.name, made.type, made._field_type = name, annotation, dataclasses._FIELD  # type: ignore[attr-defined]
    return made  # type: ignore[no-any-return]


def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
    taken = self.__match_args__
    if len(args) > len(taken):
        raise TypeError(f"{type(self).__name__} takes {len(taken)} values, not {len(args)}")
    values = self.__dict__
    values.update(zip(taken, args, strict=False))
    for name, each in self.__dataclass_fields__.items():
        if name in values:
            if name in kwargs:
                raise TypeError(f"{type(self).__name__} got two values for {name!r}")
        elif each.init and name in kwargs:
            values[name] = kwargs[name]
        elif each.default is not MISSING:
            values[name] = each.default
        elif each.default_factory is not MISSING:
            values[name] = each.default_factory()
        elif each.init:  # the others are for __post_init__ to set
            raise TypeError(f"{type(self).__name__} needs a value for {name!r}")
    if kwargs and (unknown := kwargs.keys() - set(taken)):
        raise TypeError(f"{type(self).__name__} has no {', '.join(sorted(unknown))}")
    if (check := getattr(self, "__post_init__", None)) is not None:
        check()


def __repr__(self: Any) -> str:
    shown = ", ".join(f"{name}={getattr(self, name)!r}" for name, each in self.__dataclass_fields__.items() if each.repr)
    return f"{type(self).__qualname__}({shown})"


def _compared(self: Any) -> tuple[Any, ...]:
    return tuple(getattr(self, name) for name, each in self.__dataclass_fields__.items() if each.compare)


def __eq__(self: Any, other: object) -> bool:
    return _compared(self) == _compared(other) if other.__class__ is self.__class__ else NotImplemented


def __hash__(self: Any) -> int:
    return hash(_compared(self))


def __setattr__(self: Any, name: str, value: Any) -> None:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def __delattr__(self: Any, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


_SHARED = (__init__, __repr__, __eq__, __hash__, __setattr__, __delattr__)
