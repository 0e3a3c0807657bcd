"""Classes for values: written like dataclasses, but almost free to load and to define.

Every command pays for its imports before it does anything. `dataclasses` imports `inspect` and ten more modules, then generates and
compiles six functions for each class. The classes here share six functions that look at the fields, and the fields of a class are computed
when it is first used. Type checkers see real dataclasses, and `dataclasses.fields`, `asdict` and `replace` work. One difference: `inspect`
shows another signature. Classes that users define themselves use the real `dataclasses`.

With `slots` a value takes less memory and is made as quickly as a real one: `__init__` is compiled when the first one is made. That is for
classes of which there may be a hundred thousand values.

`Enum` is here for the same reason: the real one takes a tenth of a millisecond for each class, and two for itself. It has plain members,
without mixed-in types, `auto` and flags.

Three more names are here because `typing` is slow to load too: `TYPE_CHECKING`, which type checkers recognise by name; `Protocol`, which
only type checkers need; and `assert_never`.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from dataclasses import dataclass, field, fields, is_dataclass, replace
    from enum import Enum
    from typing import Any, Never, Protocol, TypeGuard
else:
    Protocol = object

__all__ = ["TYPE_CHECKING", "Enum", "Protocol", "assert_never", "dataclass", "field", "fields", "is_dataclass", "is_member", "replace"]

_MISSING: Any = object()


def assert_never(value: Never, /) -> Never:
    """Mark unreachable code: type checkers prove it, and reaching it raises `AssertionError`."""
    raise AssertionError(f"not expected here: {value!r}")


def is_member(value: object) -> TypeGuard[Enum]:
    """Return whether this is a member of an enumeration, of ours or of the standard library's."""
    return hasattr(type(value), "__members__")


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

    def dataclass(cls: type | None = None, /, *, frozen: bool = False, slots: bool = False) -> Any:
        """Turn a class into a value class, as `dataclasses.dataclass` does."""
        return (lambda decorated: _share(decorated, frozen, slots)) if cls is None else _share(cls, frozen, slots)

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
        unchanged = {name: getattr(value, name) for name in value.__match_args__ if name not in changes}
        return type(value)(**unchanged, **changes)


def _share(cls: Any, frozen: bool, slots: bool = False) -> Any:
    own, declared = cls.__dict__, {}
    for name, annotation in cls.__annotations__.items():
        if name not in own:
            continue
        default = own[name]
        if default.__class__ is _Field:
            declared[name] = default
            default = default.default
        if default.__class__.__hash__ is None and "ClassVar" not in str(annotation):
            raise ValueError(f"mutable default for {name}: use default_factory")
    if slots:
        cls = _slotted(cls, frozen, declared)
        own = cls.__dict__
    for name, each in declared.items() if not slots else ():
        if each.default is _MISSING:
            delattr(cls, name)
        else:
            setattr(cls, name, each.default)
    for name, method in _FROZEN if frozen else _CHANGING:
        if name not in own:
            setattr(cls, name, method)
    lazy = _Lazy(cls, declared)
    cls.__value_shape__, cls.__value_fields__, cls.__dataclass_fields__ = lazy, _LazyFields(lazy), _RealFields()
    if "__match_args__" not in own:
        cls.__match_args__ = _LazyNames(lazy)  # type: ignore[misc]
    return cls


def _slotted(cls: Any, frozen: bool, declared: dict[str, _Field]) -> Any:
    """Return a copy of a class that has its fields as slots. A default would take the place of its slot, so it goes to `declared`."""
    body = {name: value for name, value in cls.__dict__.items() if name not in ("__dict__", "__weakref__")}
    names = [name for name, annotation in cls.__annotations__.items() if "ClassVar" not in str(annotation)]
    for name in names:
        default = body.pop(name, _MISSING)
        if default is not _MISSING and name not in declared:
            declared[name] = _Field(default, _MISSING, True, True, True, True)
    copy = type(cls)(cls.__name__, cls.__bases__, {**body, "__slots__": tuple(names)})
    copy.__qualname__ = cls.__qualname__

    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        if copy.__init__ is initialise:
            copy.__init__ = _compile_init(copy, frozen)
        copy.__init__(self, *args, **kwargs)

    copy.__init__ = initialise
    if frozen:  # to be copied and pickled: a slot cannot be set from outside
        copy.__getstate__, copy.__setstate__ = _get_state, _set_state
    return copy


def _compile_init(cls: Any, frozen: bool) -> Any:
    """Compile the `__init__` of a class with slots, as `dataclasses` does."""
    known: dict[str, Any] = {"missing": _MISSING}
    words, lines = [], []
    for name, each in cls.__value_fields__.items():
        value = name
        if each.default is not _MISSING:
            known[f"default_{name}"] = each.default
            words += [f"{name}=default_{name}"] if each.init else []
            value = name if each.init else f"default_{name}"
        elif each.default_factory is not _MISSING:
            known[f"make_{name}"] = each.default_factory
            words += [f"{name}=missing"] if each.init else []
            value = f"make_{name}() if {name} is missing else {name}" if each.init else f"make_{name}()"
        elif each.init:
            words.append(name)
        else:
            continue  # `__post_init__` sets it
        known[f"set_{name}"] = getattr(cls, name).__set__
        lines.append(f" set_{name}(self, {value})" if frozen else f" self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        lines.append(" self.__post_init__()")
    exec(f"def __init__(self, {', '.join(words)}):\n" + "\n".join(lines or [" pass"]), known)
    return known["__init__"]


def _get_state(self: Any) -> list[Any]:
    return [getattr(self, name) for name in self.__value_fields__]


def _set_state(self: Any, state: list[Any]) -> None:
    for name, value in zip(self.__value_fields__, state, strict=True):
        object.__setattr__(self, name, value)


class _Shape:
    """The fields of a class, as `__init__` uses them. `names` are those that it takes, in order."""

    __slots__ = ("checks", "count", "defaults", "factories", "names", "needs", "taken")

    def __init__(self, all_fields: dict[str, _Field], checks: bool) -> None:
        self.count = len(all_fields)
        self.checks = checks  # whether there is a `__post_init__`; asked once, because looking for what is missing is slow
        self.names = tuple([name for name, each in all_fields.items() if each.init])
        self.taken = frozenset(self.names)
        self.defaults = {name: each.default for name, each in all_fields.items() if each.default is not _MISSING}
        self.factories = [(name, each.default_factory) for name, each in all_fields.items() if each.default_factory is not _MISSING]
        self.needs = self.taken - self.defaults.keys()


class _Lazy:
    """The shape of a class, computed on first access together with its fields: most classes of a program are never used in a run."""

    __slots__ = ("_cls", "_declared")

    def __init__(self, cls: Any, declared: dict[str, _Field]) -> None:
        self._cls = cls
        self._declared = declared

    def __get__(self, value: Any, cls: Any) -> _Shape:
        shape: _Shape = self.complete().__value_shape__
        return shape

    def complete(self) -> Any:
        """Compute the fields and the shape, and return the class. Two threads that do it at once compute the same."""
        cls, declared = self._cls, self._declared
        all_fields: dict[str, _Field] = {}
        for base in reversed(cls.__mro__[1:]):
            all_fields |= getattr(base, "__value_fields__", {})
        for name, annotation in cls.__annotations__.items():
            if "ClassVar" not in str(annotation):
                each = declared.get(name) or _Field(cls.__dict__.get(name, _MISSING), _MISSING, True, True, True, True)
                each.name = name
                all_fields[name] = each
        shape = _Shape(all_fields, hasattr(cls, "__post_init__"))
        if isinstance(cls.__dict__["__match_args__"], _LazyNames):
            cls.__match_args__ = shape.names  # type: ignore[misc]
        cls.__value_fields__, cls.__value_shape__ = all_fields, shape
        return cls


class _LazyFields:
    """The fields of a class by name, computed on first access."""

    __slots__ = ("_lazy",)

    def __init__(self, lazy: _Lazy) -> None:
        self._lazy = lazy

    def __get__(self, value: Any, cls: Any) -> Any:
        return self._lazy.complete().__value_fields__


class _LazyNames(_LazyFields):
    """The names that a class pattern matches by position, computed on first access."""

    __slots__ = ()

    def __get__(self, value: Any, cls: Any) -> Any:
        return self._lazy.complete().__match_args__


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
    shape, values = self.__value_shape__, self.__dict__
    names = shape.names
    values.update(shape.defaults)
    if args:
        if len(args) > len(names):
            raise TypeError(f"{type(self).__name__} takes {len(names)} values, not {len(args)}")
        if kwargs and (twice := kwargs.keys() & set(names[: len(args)])):
            raise TypeError(f"{type(self).__name__} got two values for {min(twice)!r}")
        values.update(zip(names, args, strict=False))
    if kwargs:
        if not kwargs.keys() <= shape.taken:
            raise TypeError(f"{type(self).__name__} has no {', '.join(sorted(kwargs.keys() - shape.taken))}")
        values.update(kwargs)
    if len(values) < shape.count:
        for name, make in shape.factories:
            if name not in values:
                values[name] = make()
        if missing := shape.needs.difference(values):
            raise TypeError(f"{type(self).__name__} needs a value for {min(missing)!r}")
    if shape.checks:
        self.__post_init__()


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


# The methods of a value class by name: of one that can be changed, which has no hash, and of one that cannot.
_CHANGING: tuple[tuple[str, Any], ...] = (("__init__", __init__), ("__repr__", __repr__), ("__eq__", __eq__), ("__hash__", None))
_FROZEN: tuple[tuple[str, Any], ...] = (
    *_CHANGING[:3],
    ("__hash__", __hash__),
    ("__setattr__", __setattr__),
    ("__delattr__", __delattr__),
)


if not TYPE_CHECKING:

    class _EnumType(type):
        """Makes the attributes of a class of enumerated values into its members."""

        def __new__(mcls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> Any:
            named = {key: value for key, value in body.items() if key[0] != "_" and not hasattr(value, "__get__")}
            cls = super().__new__(mcls, name, bases, body)
            cls.__members__, cls._of_value = {}, {}
            for key, value in named.items():
                member = cls._of_value.get(value)
                if member is None:
                    member = cls._of_value[value] = object.__new__(cls)
                    member.__dict__.update(_name_=key, _value_=value, name=key, value=value)
                cls.__members__[key] = member
                type.__setattr__(cls, key, member)
            return cls

        def __call__(cls, value: Any) -> Any:
            try:
                return cls._of_value[value] if value.__class__ is not cls else value
            except (KeyError, TypeError):
                raise ValueError(f"{value!r} is not a valid {cls.__qualname__}") from None

        def __getitem__(cls, name: str) -> Any:
            return cls.__members__[name]

        def __iter__(cls) -> Any:
            return iter(cls._of_value.values())

        def __len__(cls) -> int:
            return len(cls._of_value)

        def __contains__(cls, value: Any) -> bool:
            return value.__class__ is cls or value in cls._of_value

        def __setattr__(cls, name: str, value: Any) -> None:
            if name in cls.__dict__.get("__members__", ()):
                raise AttributeError(f"cannot reassign member {name!r}")
            type.__setattr__(cls, name, value)

    class Enum(metaclass=_EnumType):
        """A closed set of named values."""

        def __repr__(self) -> str:
            return f"<{type(self).__name__}.{self._name_}: {self._value_!r}>"

        def __str__(self) -> str:
            return f"{type(self).__name__}.{self._name_}"

        def __setattr__(self, name: str, value: Any) -> None:
            raise AttributeError(f"cannot set attribute {name!r} of a member")

        def __copy__(self) -> Any:
            return self

        def __deepcopy__(self, memo: Any) -> Any:
            return self

        def __reduce_ex__(self, protocol: Any) -> Any:
            return type(self), (self._value_,)
