"""Find package names that resemble others: typing errors, swapped letters, other separators, letters that look alike.

`known_packages.txt` lists much-used names of PyPI and npm. A remark of this module may be wrong; no decision depends on it. Pure, except
that it reads this list.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable
from functools import cache

_SHORTEST_ALIKE = 4  # letters: shorter names are close to each other by chance
_SHORTEST_TWO = 9  # letters of a name of which two may differ
_LONGEST_NAME = 60  # letters of a name that is compared
_PLAIN = re.compile(r"[\w.@/-]{1,200}")


@cache
def known_names(index: str) -> frozenset[str]:
    """Return the names of much-used packages of `index` ("PyPI" or "npm"), in the spelling of that index."""
    names: set[str] = set()
    listed = ""
    with open(os.path.join(os.path.dirname(__file__), "known_packages.txt"), encoding="utf-8") as file:
        for line in file:
            if line.startswith("# "):
                listed = line[2:].strip()
            elif listed == index:
                names.update(line.split())
    return frozenset(names)


# Letters that look alike, as one of them.
_LOOKS = str.maketrans("01358$асеорхуѕіјһԁԛԝοανρτκ", "olesbsaceopxysijhdqwoavptk")


def _skeleton(name: str) -> str:
    """Return one spelling for all names that look alike: without separators, and with one letter for each group of similar ones."""
    plain = unicodedata.normalize("NFKC", name).casefold().translate(_LOOKS)
    plain = "".join(character for character in unicodedata.normalize("NFKD", plain) if not unicodedata.combining(character))
    return re.sub(r"[-_.]", "", plain).replace("rn", "m").replace("vv", "w")


class PackageNames:
    """The names that new names are compared with: the well-known ones of an index, and the names in `used`.

    A table of all names with a letter or two left out finds the few names that may be close.

    >>> PackageNames("PyPI").resemblance("reqeusts"), PackageNames("npm").resemblance("vue"), PackageNames("", ["our"]).resemblance("0ur")
    ('one letter from requests', '', 'looks like our')
    """

    def __init__(self, index: str, used: Iterable[str] = ()) -> None:
        self._known = known_names(index)
        self._close = _index_of_known(index)
        self._used = frozenset(name for name in used if len(name) <= _LONGEST_NAME and _PLAIN.fullmatch(name))
        self._index = _indexed(self._used)

    def resemblance(self, name: str) -> str:
        """Return a remark if a name is close to a well-known or used name, else ""."""
        if name in self._known or name in self._used or len(name) > _LONGEST_NAME:
            return ""
        skeleton = _skeleton(name)
        best: tuple[int, str, str] = (3, "", "")
        for shortened in _shortened(skeleton):
            for other in (*self._close.get(shortened, ()), *self._index.get(shortened, ())):
                far = _distance(skeleton, _skeleton(other), 2 if len(other) >= _SHORTEST_TWO else 1)
                if far == 0 or (far is not None and len(other) >= _SHORTEST_ALIKE):
                    best = min(best, (far, other, (f"looks like {other}", f"one letter from {other}", f"two letters from {other}")[far]))
        return best[2] or _dressed(name, self._known)


@cache
def _index_of_known(index: str) -> dict[str, list[str]]:
    return _indexed(known_names(index))


def _indexed(names: Iterable[str]) -> dict[str, list[str]]:
    index: dict[str, list[str]] = {}
    for name in names:
        for shortened in _shortened(_skeleton(name)):
            index.setdefault(shortened, []).append(name)
    return index


def _shortened(name: str) -> set[str]:
    """Return a name, and all spellings of it with one letter left out; for a long name, also those with two.

    Two names that are close have one of these spellings in common.
    """
    once = {name[:at] + name[at + 1 :] for at in range(len(name))}
    twice = {each[:at] + each[at + 1 :] for each in once for at in range(len(each))} if len(name) >= _SHORTEST_TWO - 2 else set()
    return {name} | once | twice


_ADDITIONS = re.compile(r"^(?:python|py|node|js|lib)[-_.]?|[-_.]?(?:python|py|js|node|lib|[0-9]{1,2})$")


def _dressed(name: str, known: frozenset[str]) -> str:
    """Return a remark if a name is a well-known one with an addition that means nothing, such as "python-"; else ""."""
    for found in _ADDITIONS.finditer(name.lower()):
        core = name.lower()[: found.start()] + name.lower()[found.end() :]
        if core in known and len(core) >= _SHORTEST_ALIKE:
            return f"{core} with an addition"
    return ""


def _distance(one: str, other: str, most: int) -> int | None:
    """Return how many letters to change, add, leave out or swap to turn one name into the other; None if more than `most`.

    >>> _distance("reqeusts", "requests", 2), _distance("flask", "django", 2)
    (1, None)
    """
    before: list[int] = []
    row = list(range(len(other) + 1))
    for at, letter in enumerate(one, start=1):
        last, before = before, row
        row = [at]
        for place, another in enumerate(other, start=1):
            cost = min(before[place] + 1, row[place - 1] + 1, before[place - 1] + (letter != another))
            if at > 1 and place > 1 and letter == other[place - 2] and one[at - 2] == another:
                cost = min(cost, last[place - 2] + 1)
            row.append(cost)
        if min(row) > most:
            return None
    return row[-1] if row[-1] <= most else None
