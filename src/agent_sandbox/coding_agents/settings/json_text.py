"""Change single members and elements of a JSON text, and leave every other letter as it is.

Comments and trailing commas are kept where the program that owns the file accepts them. Every change is a new text; the caller compares
what it means with what it should mean.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

_UNIT = "  "  # the indentation where a file has none yet
_BLANKS = " \t\r\n"


class BadText(ValueError):
    """The text is not JSON, or a member is not what it should be."""


@dataclass
class JsonNode:
    """A value in the text, and the places of its children: `start` is that of the name, for a member of an object."""

    start: int
    end: int
    value: Any
    name: str = ""
    at: int = 0  # where the value itself begins
    children: list[JsonNode] = field(default_factory=list)


class _Reader:
    def __init__(self, text: str, comments: bool) -> None:
        self.text, self.comments = text, comments

    def fail(self, place: int, problem: str) -> BadText:
        return BadText(f"line {self.text.count(chr(10), 0, place) + 1}: {problem}")

    def skip(self, place: int) -> int:
        """Return the next place that is neither blank nor in a comment."""
        text = self.text
        while place < len(text):
            if text[place] in _BLANKS:
                place += 1
            elif text.startswith(("//", "/*"), place):
                if not self.comments:
                    raise self.fail(place, "it has comments, which this program does not read")
                end = text.find("\n", place) if text[place + 1] == "/" else text.find("*/", place + 2)
                if end < 0 and text[place + 1] == "*":
                    raise self.fail(place, "a comment has no end")
                place = len(text) if end < 0 else end + (0 if text[place + 1] == "/" else 2)
            else:
                break
        return place

    def value(self, place: int, depth: int = 0) -> JsonNode:
        """Read the value that begins here."""
        if depth > 200:
            raise self.fail(place, "it is nested too deeply")
        letter = self.text[place : place + 1]
        if letter == "{":
            node = self.container(place, "}", depth)
            members: dict[str, Any] = {}
            for child in node.children:
                if child.name in members:
                    raise self.fail(child.start, f"{child.name!r} is there twice")
                members[child.name] = child.value
            node.value = members
            return node
        if letter == "[":
            node = self.container(place, "]", depth)
            node.value = [child.value for child in node.children]
            return node
        try:
            found, end = json.JSONDecoder().raw_decode(self.text, place)
        except (ValueError, RecursionError):
            raise self.fail(place, "this is not JSON") from None
        return JsonNode(place, end, found, at=place)

    def container(self, place: int, closing: str, depth: int) -> JsonNode:
        node = JsonNode(place, place, None, at=place)
        here = self.skip(place + 1)
        while self.text[here : here + 1] != closing:
            child = self.member(here, depth) if closing == "}" else self.value(here, depth + 1)
            node.children.append(child)
            here = self.skip(child.end)
            if self.text[here : here + 1] == ",":
                comma, here = here, self.skip(here + 1)
                if self.text[here : here + 1] == closing and not self.comments:
                    raise self.fail(comma, "a comma has nothing after it")
            elif self.text[here : here + 1] != closing:
                raise self.fail(here, f"a comma or {closing!r} is missing")
        node.end = here + 1
        return node

    def member(self, place: int, depth: int) -> JsonNode:
        if self.text[place : place + 1] != '"':
            raise self.fail(place, "a name in quotes is missing")
        name = self.value(place, depth + 1)
        colon = self.skip(name.end)
        if self.text[colon : colon + 1] != ":":
            raise self.fail(colon, "a colon is missing")
        child = self.value(self.skip(colon + 1), depth + 1)
        child.start, child.name = place, name.value
        return child


def read(text: str, *, comments: bool = False) -> JsonNode:
    """Read a text. An empty one is an empty object. Raises `BadText`."""
    if not text.strip(_BLANKS + "\ufeff"):
        raise BadText("it is empty")
    reader = _Reader(text, comments)
    node = reader.value(reader.skip(0))
    rest = reader.skip(node.end)
    if rest != len(text):
        raise reader.fail(rest, "there is more after its end")
    return node


def with_member(text: str, path: tuple[str, ...], value: Any, *, comments: bool = False) -> str:
    """Return the text with this value at this path of names. Raises `BadText` if something else than an object is on the way."""
    node, rest = _walk(read(text, comments=comments), path)
    if not rest:
        return text[: node.at] + _rendered(value, text, node) + text[node.end :]
    if not isinstance(node.value, dict):
        raise BadText(f"{'.'.join(path[: len(path) - len(rest)]) or 'the document'} is not an object")
    for name in reversed(rest[1:]):
        value = {name: value}
    return _inserted(text, node, value, name=rest[0], comments=comments)


def with_element(text: str, path: tuple[str, ...], value: Any, *, comments: bool = False) -> str:
    """Return the text with one more element at the end of the list at this path, which is made if there is none. Raises `BadText`."""
    node, rest = _walk(read(text, comments=comments), path)
    if rest:
        return with_member(text, path, [value], comments=comments)
    if not isinstance(node.value, list):
        raise BadText(f"{'.'.join(path)} is not a list")
    return _inserted(text, node, value, comments=comments)


def without(text: str, path: tuple[str, ...], index: int | None = None, *, comments: bool = False) -> str:
    """Return the text without the member at this path, or without this element of the list there. Raises `BadText` if it is not there."""
    node, rest = _walk(read(text, comments=comments), path if index is not None else path[:-1])
    if rest:
        raise BadText(f"{'.'.join(path)} is not there")
    where = index if index is not None else next((n for n, child in enumerate(node.children) if child.name == path[-1]), None)
    if where is None or where >= len(node.children):
        raise BadText(f"{'.'.join(path)} is not there")
    child, others = node.children[where], len(node.children) - 1
    if not others:
        return text[: node.at + 1] + text[node.end - 1 :]
    if where < others:
        return text[: child.start] + text[node.children[where + 1].start :]
    return text[: node.children[where - 1].end] + text[child.end :]


def _walk(node: JsonNode, path: tuple[str, ...]) -> tuple[JsonNode, tuple[str, ...]]:
    """Return the deepest value on a path that is there, and the rest of the path."""
    for number, name in enumerate(path):
        child = next((each for each in node.children if each.name == name), None) if isinstance(node.value, dict) else None
        if child is None:
            return node, path[number:]
        node = child
    return node, ()


def _inserted(text: str, node: JsonNode, value: Any, *, name: str | None = None, comments: bool) -> str:
    """Return the text with a child at the end of an object or a list."""
    front = f"{json.dumps(name, ensure_ascii=False)}: " if name is not None else ""
    close = node.end - 1
    if not node.children:
        outer = _indentation(text, node.start)
        inner = outer + _unit(text)
        return f"{text[: node.at + 1]}\n{inner}{front}{_dumped(value, text, inner)}\n{outer}{text[close:]}"
    last = node.children[-1]
    tail = text[last.end : close]
    if "\n" not in tail and "\n" not in text[node.at : node.children[0].start]:  # all on one line
        return f"{text[: last.end]}, {front}{json.dumps(value, ensure_ascii=False)}{text[last.end :]}"
    inner = _indentation(text, node.children[0].start)
    there = text[_Reader(text, comments).skip(last.end)] == ","
    line = last.end + (tail.index("\n") if "\n" in tail else 0)
    end = "" if "\n" in tail else f"\n{_indentation(text, node.start)}"
    child = f"\n{inner}{front}{_dumped(value, text, inner)}"
    return f"{text[: last.end]}{'' if there else ','}{text[last.end : line]}{child}{end}{text[line:]}"


def _rendered(value: Any, text: str, node: JsonNode) -> str:
    return _dumped(value, text, _indentation(text, node.start))


def _dumped(value: Any, text: str, indentation: str) -> str:
    return json.dumps(value, indent=_unit(text), ensure_ascii=False).replace("\n", f"\n{indentation}")


def _indentation(text: str, place: int) -> str:
    """Return the blanks at the beginning of the line of a place."""
    line = text[text.rfind("\n", 0, place) + 1 : place]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _unit(text: str) -> str:
    """Return one step of the text's own indentation: that of its first indented line."""
    for line in text.splitlines():
        if blanks := line[: len(line) - len(line.lstrip(" \t"))]:
            return blanks
    return _UNIT
