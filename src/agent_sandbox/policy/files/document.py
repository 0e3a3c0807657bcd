"""The policy document: TOML parsed into a checked value. Anything not understood is an error with key, value and remedy."""

from __future__ import annotations

from collections.abc import Mapping

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.files.settings import BY_KEY, INTENT_SETTINGS, INTENTS, SECTIONS, Setting, Shape

if TYPE_CHECKING:
    from typing import Any

    from agent_sandbox.policy.intents import NetworkIntent

LARGEST_FILE = 1 << 20  # characters
MOST_ITEMS = 1000  # items of one list; each is compared with every item of the layers above, and each hidden path costs every run
_MOST_DOTS = 256  # dots on one line, a bound on dotted keys; a list of versions on one line has a few dozen


def loads(text: str) -> dict[str, Any]:
    """Parse a TOML text. Raises `ValueError` with a message that quotes at most one character of the text."""
    import tomllib  # slow to load, and most runs read no policy file

    for number, line in enumerate(text.split("\n"), start=1):
        if line.count(".") > _MOST_DOTS:
            raise ValueError(f"more than {_MOST_DOTS} dots on one line (at line {number})")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("too many brackets within one another") from None


@dataclass(frozen=True)
class Document:
    """The settings of a policy file, by dotted key, the origin of the file, and its intents. A setting that is absent restricts nothing."""

    settings: tuple[tuple[str, Any], ...] = ()
    origin: str = "a policy"
    intents: tuple[NetworkIntent, ...] = ()

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a setting; the default if it is absent."""
        return next((value for name, value in self.settings if name == key), default)

    @property
    def name(self) -> str:
        """The value of the setting `name`, or else the name of the file."""
        name = self.get("name", self.origin.rpartition("/")[2])
        assert isinstance(name, str)
        return name


def parse_toml(text: str, *, origin: str) -> Document:
    """Parse `agent-sandbox.toml`, or a `pyproject.toml` with a table `tool.agent-sandbox`. Raises `PolicyError`."""
    if len(text) > LARGEST_FILE:
        raise PolicyError(f"{origin} has {len(text)} characters; at most {LARGEST_FILE} are read", hint="a policy is short")
    try:
        read = loads(text)
    except ValueError as error:
        raise PolicyError(f"{origin} is not TOML: {error}", hint="check the line that is named") from None
    if origin.endswith("pyproject.toml"):
        tool = read.get("tool")
        read = tool.get("agent-sandbox", {}) if isinstance(tool, dict) else {}
    return from_mapping(read, origin=origin)


def from_mapping(values: Mapping[str, Any], *, origin: str) -> Document:
    """Make a document from nested tables. Raises `PolicyError` for the first invalid setting."""
    if not isinstance(values, Mapping):
        raise PolicyError(f"{origin}: a policy is a table, not {_shown(values)}", hint="write settings under [files], [processes], …")
    settings: list[tuple[str, Any]] = []
    intents: tuple[NetworkIntent, ...] = ()
    for name, value in values.items():
        if name in (*SECTIONS, INTENTS) and not isinstance(value, Mapping):
            raise PolicyError(f"{origin}: {name} is a table, not {_shown(value)}", hint=f"write [{name}] on a line of its own")
        if name == INTENTS:
            intents = _intents(value, origin)
        elif name in SECTIONS:
            for key, inner in value.items():
                settings.append(_checked(f"{name}.{key}", inner, origin))
        else:
            settings.append(_checked(name, value, origin))
    return Document(tuple(settings), origin, intents)


def _intents(tables: Mapping[str, Any], origin: str) -> tuple[NetworkIntent, ...]:
    from agent_sandbox.policy.intents import from_table  # few policies name intents

    known = {setting.key: setting for setting in INTENT_SETTINGS}
    found: dict[str, NetworkIntent] = {}
    for name, table in tables.items():
        key = f"{INTENTS}.{_shown(name)}"
        if not isinstance(table, Mapping):
            hint = f'write [{INTENTS}."install packages"] on a line of its own'
            raise PolicyError(f"{origin}: {key} is a table, not {_shown(table)}", hint=hint)
        for unknown in table.keys() - known.keys():
            raise PolicyError(f"{origin}: {key} has no setting {_shown(unknown)}", hint=f"it takes {', '.join(known)}")
        checked = {each: _checked_as(f"{key}.{each}", known[each], value, origin)[1] for each, value in table.items()}
        try:
            intent = from_table(name, checked)
        except PolicyError as error:
            raise PolicyError(f"{origin}: {key}: {error.message}", hint=error.hint) from None
        if intent.name in found:
            raise PolicyError(f"{origin}: there are two intents {intent.name!r}", hint="their names differ in case or blanks alone")
        found[intent.name] = intent
    if len(found) > MOST_ITEMS:
        raise PolicyError(f"{origin}: there are {len(found)} intents; at most {MOST_ITEMS} are read", hint="name fewer")
    return tuple(found.values())


def _checked(key: str, value: Any, origin: str) -> tuple[str, Any]:
    setting = BY_KEY.get(key)
    if setting is None:
        raise PolicyError(f"{origin}: there is no setting {key!r}", hint=_nearest(key))
    return _checked_as(key, setting, value, origin)


def _checked_as(key: str, setting: Setting, value: Any, origin: str) -> tuple[str, Any]:
    if not _has_shape(setting, value):
        raise PolicyError(f"{origin}: {key} must be {_wanted(setting)}, not {_shown(value)}", hint=f"write {_written(setting)}")
    if isinstance(value, list) and len(value) > MOST_ITEMS:
        raise PolicyError(f"{origin}: {key} has {len(value)} items; at most {MOST_ITEMS} are read", hint="use patterns for what is alike")
    for item in value if isinstance(value, list) else (value,):
        try:
            if setting.check is not None:
                setting.check(item)
        except PolicyError as error:
            raise PolicyError(f"{origin}: {key}: {error.message}", hint=error.hint) from None
    return key, tuple(value) if isinstance(value, list) else value


def _has_shape(setting: Setting, value: Any) -> bool:
    match setting.shape:
        case Shape.BOOL:
            return isinstance(value, bool)
        case Shape.TEXT:
            return isinstance(value, str) and 0 < len(value) <= 80 and value.isprintable()
        case Shape.COUNT:
            return _is_count(value, setting.most)
        case Shape.NUMBER:
            return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= setting.most
        case Shape.TEXTS:
            return isinstance(value, list) and all(isinstance(item, str) for item in value)
        case _:
            return isinstance(value, list) and all(_is_count(item, setting.most) for item in value)


def _is_count(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most


def _wanted(setting: Setting) -> str:
    return (
        f"{setting.shape.value} up to {setting.most}" if setting.shape in (Shape.COUNT, Shape.NUMBER, Shape.COUNTS) else setting.shape.value
    )


def _written(setting: Setting) -> str:
    """Return an example of a setting, as it is written in a policy file."""
    section, dot, key = setting.key.rpartition(".")
    return f"{key} = {setting.example}" + (f" under [{section}]" if dot else "")


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python converts to text
        return "a number of thousands of digits"
    return text if len(text) <= 80 else text[:79] + "…"


def _nearest(key: str) -> str:
    from difflib import get_close_matches  # slow to load, and only needed for a mistake

    ends = {known.rpartition(".")[2]: known for known in BY_KEY}
    close = get_close_matches(key, [*BY_KEY, *SECTIONS, INTENTS], n=1) or [
        ends[end] for end in get_close_matches(key.rpartition(".")[2], ends, n=1)
    ]
    if close:
        return f"did you mean {close[0]}?"
    sections = ", ".join(f"[{each}]" for each in (*SECTIONS, INTENTS))
    return f"settings are {', '.join(each for each in BY_KEY if '.' not in each)}, and those of {sections}"
