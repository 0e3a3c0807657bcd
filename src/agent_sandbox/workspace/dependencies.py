"""New and changed dependencies in manifests and lock files, and how close their names are to well-known ones. Pure.

Each manifest is read into a table: the requirement of each package by name. An entry that is new, or that differs, is a change that counts;
a removed one does not, nor does a comment or a blank. A manifest that cannot be parsed counts. In a lock file only the names and the places
that packages come from count: their versions change all day. Formats that are programs (Gemfile, build.gradle) are compared line by line.

Names are compared with a list of much-used packages (`known_packages.txt`) and with the names that the project depends on already. The
remark that a name resembles another may be wrong; no decision depends on it.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.policy.files import document
from agent_sandbox.workspace.changes import Change
from agent_sandbox.workspace.escape import components, folded
from agent_sandbox.workspace.nodes import EntryType

if TYPE_CHECKING:
    from typing import Any

Table = dict[str, str]  # the requirement of each package, by name
Reader = Callable[[str], Iterable[tuple[str, str]]]
UNREADABLE = "it cannot be read as a list of packages"
_LONGEST = 120  # characters of a requirement that are shown
_SHORTEST_ALIKE = 4  # letters: shorter names are close to each other by chance
_SHORTEST_TWO = 9  # letters of a name of which two may differ
_NAME = re.compile(r"\s*([A-Za-z0-9@][\w.@/-]*)")


@dataclass(frozen=True)
class Dependency:
    """A new or changed dependency. `old` is empty for a new one; `resembles` is a remark on its name, or empty."""

    name: str
    old: str
    new: str
    resembles: str = ""

    def sentence(self) -> str:
        """Return it in words, such as "reqeusts: new, ==2.0; one letter from requests"."""
        what = f"{_short(self.old)} becomes {_short(self.new)}" if self.old else f"new, {_short(self.new)}" if self.new else "new"
        return f"{self.name}: {what}" + (f"; {self.resembles}" if self.resembles else "")


class Manifests:
    """The changes that concern dependencies. `texts` returns a file's content before and after; `called` its other names."""

    def __init__(self, texts: Callable[[Change], tuple[bytes | None, bytes | None]], called: Callable[[str], Iterable[str]]) -> None:
        self._texts = texts
        self._called = called
        self._remarks: dict[str, tuple[str, ...]] = {}

    def remarks(self, change: Change) -> tuple[str, ...]:
        """Return a sentence for each new or changed dependency; empty if there is none."""
        if change.path not in self._remarks:
            self._remarks[change.path] = tuple(self._read(change))
        return self._remarks[change.path]

    def _read(self, change: Change) -> Iterator[str]:
        directory = components(posixpath.dirname(change.path))[-1]
        names = (folded(posixpath.basename(change.path)), *self._called(change.path))
        reader = next((found for name in names if (found := reader_of(name, directory))), None)
        if reader is None or change.after is None:
            return
        if change.after.type is EntryType.SYMLINK:
            yield "a link to another file takes the place of this list of packages"
            return
        try:
            before, after = self._texts(change)
            yield from (each.sentence() for each in compare(reader, before, after))
        except ValueError:
            yield UNREADABLE


def compare(reader: Reader, before: bytes | None, after: bytes | None) -> list[Dependency]:
    """Return the dependencies that a new text adds or changes. Raises ValueError for a text that cannot be parsed."""
    if before == after:
        return []
    new = _table(reader, after)
    try:
        old = _table(reader, before)
    except ValueError:  # then everything in the new text counts
        old = {}
    changed = [name for name, requirement in new.items() if old.get(name) != requirement]
    return [Dependency(name, old.get(name, ""), new[name], "" if name in old else resemblance(name, old)) for name in changed]


def _table(reader: Reader, text: bytes | None) -> Table:
    table: dict[str, set[str]] = {}
    if text is not None:
        try:
            for name, requirement in reader(text.decode("utf-8-sig")):
                table.setdefault(name, set()).add(requirement)
        except (AttributeError, TypeError, KeyError, RecursionError) as error:
            raise ValueError("it has another form") from error
    return {name: ", ".join(sorted(each for each in requirements if each)) for name, requirements in table.items()}


def _short(requirement: str) -> str:
    return requirement if len(requirement) <= _LONGEST else requirement[:_LONGEST] + "…"


# Python


def canonical(name: str) -> str:
    """Return a Python package's name as its index spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _requirement(line: str) -> tuple[str, str]:
    """Split a requirement (PEP 508, or a line of pip's) into its name and the rest."""
    line = line.strip()
    found = _NAME.match(line)
    if line.startswith(("-", ".", "/")) or found is None or "://" in line.split("@")[0] or "/" in found[1]:
        word, _, rest = line.replace("=", " ", 1).partition(" ") if line.startswith("-") else (line, "", "")
        return f"{word} {rest.strip()}".strip(), ""  # an option, a path or an address is a source of its own
    return canonical(found[1].split("@")[0]), " ".join(line[len(found[0].split("@")[0]) :].split())


def _requirements_txt(text: str) -> Iterator[tuple[str, str]]:
    for line in text.replace("\\\n", " ").replace("\\\r\n", " ").splitlines():
        line = re.sub(r"(^|\s)#.*", "", line).strip()
        line = re.sub(r"\s--hash=\S+", "", line)
        if line:
            yield _requirement(line)


def _listed(values: Any) -> Iterator[tuple[str, str]]:
    for value in values or ():
        if isinstance(value, dict):  # {include-group = "…"}
            continue
        yield _requirement(str(value))


def _mapped(values: Mapping[str, Any] | None, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the entries of a table of requirements. An entry may itself be a table or a list."""
    for name, value in (values or {}).items():
        yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def _sources(values: Any) -> Iterator[tuple[str, str]]:
    if values:
        yield "package sources", json.dumps(values, sort_keys=True, default=str)


def _pyproject(text: str) -> Iterator[tuple[str, str]]:
    values = document.loads(text)
    project, tool = values.get("project", {}), values.get("tool", {})
    poetry, uv, pdm = tool.get("poetry", {}), tool.get("uv", {}), tool.get("pdm", {})
    yield from _listed(project.get("dependencies"))
    yield from _listed(values.get("build-system", {}).get("requires"))
    groups = (project.get("optional-dependencies"), values.get("dependency-groups"), pdm.get("dev-dependencies"))
    for group in groups:
        for listed in (group or {}).values():
            yield from _listed(listed)
    for name in ("dev-dependencies", "constraint-dependencies", "override-dependencies", "build-constraint-dependencies"):
        yield from _listed(uv.get(name))
    for table in (
        poetry.get("dependencies"),
        poetry.get("dev-dependencies"),
        *(g.get("dependencies") for g in poetry.get("group", {}).values()),
    ):
        yield from ((canonical(name), value) for name, value in _mapped(table) if name.lower() != "python")
    for environment in tool.get("hatch", {}).get("envs", {}).values():
        yield from _listed(environment.get("dependencies"))
        yield from _listed(environment.get("extra-dependencies"))
    for sources in (
        poetry.get("source"),
        uv.get("sources"),
        uv.get("index"),
        uv.get("index-url"),
        uv.get("extra-index-url"),
        pdm.get("source"),
    ):
        yield from _sources(sources)


def _setup_cfg(text: str) -> Iterator[tuple[str, str]]:
    from configparser import ConfigParser, Error  # slow to load, and few promotions have such a file

    parser = ConfigParser(interpolation=None, strict=False, allow_no_value=True)
    try:
        parser.read_string(text)
    except Error as error:
        raise ValueError("it is no INI file") from error
    lists = [parser.get("options", name, fallback="") or "" for name in ("install_requires", "setup_requires", "tests_require")]
    if parser.has_section("options.extras_require"):
        lists += [value or "" for _, value in parser.items("options.extras_require")]
    if parser.has_section("options"):
        lists.append(parser.get("options", "dependency_links", fallback="") or "")
    for listed in lists:
        yield from _requirements_txt(listed.replace(";", " ;"))


def _pipfile(text: str) -> Iterator[tuple[str, str]]:
    for section, values in document.loads(text).items():
        if section == "source":
            yield from _sources(values)
        elif section not in ("requires", "scripts", "pipenv"):
            yield from ((canonical(name), value) for name, value in _mapped(values))


def _conda(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        line = re.sub(r"(^|\s)#.*", "", line)
        found = re.match(r"\s*-\s+(?:pip:\s*)?[\"']?([^\"'\s].*?)[\"']?\s*$", line)
        if found and found[1] != "pip:":
            name, separator, rest = found[1].partition("=")
            yield (canonical(name), f"={rest}") if separator and re.fullmatch(r"[\w.-]+", name) else _requirement(found[1])


# JavaScript and others with manifests that are data


_NPM = ("dependencies", "devDependencies", "peerDependencies", "optionalDependencies", "overrides", "resolutions", "catalog")


def _package_json(text: str) -> Iterator[tuple[str, str]]:
    manifest = json.loads(text)
    for table in (*(manifest.get(name) for name in _NPM), manifest.get("pnpm", {}).get("overrides")):
        yield from _mapped(table)
    for name in ("bundledDependencies", "bundleDependencies"):
        for bundled in manifest.get(name) or () if isinstance(manifest.get(name), list) else ():
            yield str(bundled), "bundled"


def _deno(text: str) -> Iterator[tuple[str, str]]:
    manifest = json.loads(re.sub(r"(?m)^\s*//.*$", "", text))
    yield from _mapped(manifest.get("imports"))
    for scope in (manifest.get("scopes") or {}).values():
        yield from _mapped(scope)


def _composer(text: str) -> Iterator[tuple[str, str]]:
    manifest = json.loads(text)
    yield from _mapped(manifest.get("require"))
    yield from _mapped(manifest.get("require-dev"))
    yield from _sources(manifest.get("repositories"))


_CARGO = ("dependencies", "dev-dependencies", "build-dependencies", "dev_dependencies", "build_dependencies")


def _cargo(text: str) -> Iterator[tuple[str, str]]:
    manifest = document.loads(text)
    for owner in (manifest, manifest.get("workspace", {}), *manifest.get("target", {}).values()):
        for name in _CARGO:
            yield from _mapped(owner.get(name))
    for source, table in manifest.get("patch", {}).items():
        yield from _mapped(table, f"{source} ")
    yield from _mapped(manifest.get("replace"))


def _versions_toml(text: str) -> Iterator[tuple[str, str]]:
    manifest = document.loads(text)
    yield from _mapped(manifest.get("libraries"))
    yield from _mapped(manifest.get("plugins"), "plugin ")


def _go_mod(text: str) -> Iterator[tuple[str, str]]:
    block = ""
    for line in text.splitlines():
        words = line.split("//")[0].split()
        if not words:
            continue
        if block and words[0] == ")":
            block = ""
        elif words[-1] == "(":
            block = words[0]
        else:
            verb, rest = (block, words) if block else (words[0], words[1:])
            if verb == "require" and rest:
                yield rest[0], " ".join(rest[1:])
            elif verb in ("replace", "tool", "toolchain", "use") and rest:
                yield f"{verb} {rest[0]}", " ".join(rest[1:])


def _xml(*elements: str) -> Reader:
    """Return a reader of XML elements with coordinates, by their text. XML of a guest is not given to a parser that expands entities."""
    block = re.compile(rf"<({'|'.join(elements)})\b([^>]*?)(?:/>|>(.*?)</\1>)", re.DOTALL | re.IGNORECASE)

    def read(text: str) -> Iterator[tuple[str, str]]:
        text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
        if "<!ENTITY" in text:
            raise ValueError("it has entities")
        for found in block.finditer(text):
            inner = dict(re.findall(r"<(\w+)>\s*([^<]*?)\s*</\1>", found[3] or ""))
            attributes = {key.lower(): value for key, value in re.findall(r'([\w.]+)\s*=\s*"([^"]*)"', found[2])}
            name = (
                attributes.get("include") or attributes.get("id") or ":".join(filter(None, (inner.get("groupId"), inner.get("artifactId"))))
            )
            rest = attributes.get("version") or inner.get("version") or inner.get("Version") or inner.get("url") or ""
            yield (name, rest) if name else (f"{found[1]} {rest}".strip(), "")

    return read


def _lines(comment: str, *kept: str) -> Reader:
    """Return a reader of programs: each line that is no comment counts, or each line with one of the words in `kept`."""

    def read(text: str) -> Iterator[tuple[str, str]]:
        for line in text.splitlines():
            plain = " ".join(line.split())
            if plain and not plain.startswith(comment) and (not kept or any(word in plain for word in kept)):
                named = re.search(r"(?:gem|add_\w*dependency)\W+([\w.@/-]+)", plain) or re.search(r"[\"':]([\w.@/-]+:?[\w.@/-]*)", plain)
                yield (named[1], plain) if named else (plain, "")

    return read


def _pubspec(text: str) -> Iterator[tuple[str, str]]:
    section = ""
    for line in text.splitlines():
        line = re.sub(r"(^|\s)#.*", "", line).rstrip()
        if line and not line.startswith(" "):
            section = line.rstrip(":")
        elif "dependenc" in section and (found := re.match(r"\s+([\w-]+)\s*:\s*(.*)", line)):
            yield found[1], found[2]


# Lock files: names, and where packages come from


def _place(address: object) -> str:
    """Return the host of an address, or the address itself if it has none. Paths change with every version."""
    text = str(address or "")
    found = re.match(r"(?:[\w+]+:)?//([^/?#]+)", text.removeprefix("registry+").removeprefix("sparse+"))
    return f"from {found[1]}" if found and not text.startswith("git") else text.partition("#")[0].partition("?rev=")[0]


def _npm_lock(text: str) -> Iterator[tuple[str, str]]:
    lock = json.loads(text)
    for path, entry in (lock.get("packages") or {}).items():
        if path and not entry.get("link"):
            name = entry.get("name") or path.rpartition("node_modules/")[2]
            yield name, _place(entry.get("resolved")) + (" with an install script" if entry.get("hasInstallScript") else "")
    todo = [lock.get("dependencies") or {}] if not lock.get("packages") else []
    while todo:
        for name, entry in todo.pop().items():
            yield name, _place(entry.get("resolved"))
            todo.append(entry.get("dependencies") or {})


def _toml_lock(text: str) -> Iterator[tuple[str, str]]:
    for package in document.loads(text).get("package", ()):
        source = package.get("source")
        place = (
            source.get("url") or source.get("registry") or source.get("git") or source.get("path") or ""
            if isinstance(source, dict)
            else source
        )
        yield package["name"], _place(place)


def _pipfile_lock(text: str) -> Iterator[tuple[str, str]]:
    lock = json.loads(text)
    for section, values in lock.items():
        if section == "_meta":
            yield from _sources((values or {}).get("sources"))
        else:
            for name, entry in values.items():
                yield canonical(name), " ".join(filter(None, (str(entry.get(key) or "") for key in ("index", "git", "path", "file"))))


def _composer_lock(text: str) -> Iterator[tuple[str, str]]:
    lock = json.loads(text)
    for package in (*(lock.get("packages") or ()), *(lock.get("packages-dev") or ())):
        yield package["name"], _place((package.get("dist") or {}).get("url"))


_YARN_SOURCE = re.compile(r"\s+\"?(?:resolved\"?:?\s+\"?|resolution\"?:\s+\"?@?[^@\"]+@(?!npm:|workspace:))([^\"\s]+)")


def _yarn_lock(text: str) -> Iterator[tuple[str, str]]:
    name = ""
    for line in text.splitlines():
        if line and not line[0].isspace() and not line.startswith("#"):
            name = re.sub(r"^\"?(@?[^@\"]+)@.*", r"\1", line.rstrip(":"))
            yield name, ""
        elif name and (found := _YARN_SOURCE.match(line)):
            yield name, _place(found[1])


def _pnpm_lock(text: str) -> Iterator[tuple[str, str]]:
    name = ""
    for line in text.splitlines():
        if found := re.match(r"  [\"']?/?(@?[^@\s\"'(:]+)[@/][^\s]*:\s*$", line):
            name = found[1]
            yield name, ""
        elif name and (found := re.search(r"(?:tarball|repo):\s*([^,}\s]+)", line)):
            yield name, _place(found[1])


def _gem_lock(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        if found := re.match(r"    ([\w.-]+) \(", line):
            yield found[1], ""
        elif found := re.match(r"  remote: (\S+)", line):
            yield f"source {found[1]}", ""


def _go_sum(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        if words := line.split():
            yield words[0], ""


def _bun_lock(text: str) -> Iterator[tuple[str, str]]:
    for found in re.finditer(r"^\s+\"([^\"]+)\": \[\"([^\"]*)\"(?:, \"([^\"]*)\")?", text, re.MULTILINE):
        yield found[1], _place(found[3])


def _flake_lock(text: str) -> Iterator[tuple[str, str]]:
    for name, node in json.loads(text)["nodes"].items():
        locked = node.get("locked") or {}
        yield name, " ".join(str(locked[key]) for key in ("type", "owner", "repo", "url", "path") if key in locked)


def _opaque(text: str) -> Iterator[tuple[str, str]]:
    raise ValueError("it is no text")


_GRADLE = _lines("//", "'", '"')
_READERS: dict[str, Reader] = {
    "pyproject.toml": _pyproject,
    "setup.cfg": _setup_cfg,
    "pipfile": _pipfile,
    "package.json": _package_json,
    "deno.json": _deno,
    "deno.jsonc": _deno,
    "composer.json": _composer,
    "cargo.toml": _cargo,
    "libs.versions.toml": _versions_toml,
    "go.mod": _go_mod,
    "go.work": _go_mod,
    "gemfile": _lines("#"),
    "gems.rb": _lines("#"),
    "mix.exs": _lines("#", "{:", "git:", "path:"),
    "package.swift": _lines("//", ".package("),
    "pubspec.yaml": _pubspec,
    "pom.xml": _xml("dependency", "plugin", "extension", "parent", "repository", "pluginRepository"),
    "packages.config": _xml("package"),
    "directory.packages.props": _xml("PackageVersion", "PackageReference", "GlobalPackageReference"),
    "build.gradle": _GRADLE,
    "build.gradle.kts": _GRADLE,
    "conanfile.txt": _lines("#", "/"),
    **dict.fromkeys(("package-lock.json", "npm-shrinkwrap.json"), _npm_lock),
    **dict.fromkeys(("cargo.lock", "poetry.lock", "uv.lock", "pdm.lock"), _toml_lock),
    "pipfile.lock": _pipfile_lock,
    "composer.lock": _composer_lock,
    "yarn.lock": _yarn_lock,
    "pnpm-lock.yaml": _pnpm_lock,
    **dict.fromkeys(("gemfile.lock", "gems.locked"), _gem_lock),
    "go.sum": _go_sum,
    "bun.lock": _bun_lock,
    "bun.lockb": _opaque,
    "flake.lock": _flake_lock,
}
_PATTERNS: tuple[tuple[str, Reader], ...] = (
    *((pattern, _requirements_txt) for pattern in ("*requirements*.txt", "*requirements*.in", "*constraints*.txt", "*constraints*.in")),
    ("environment*.yml", _conda),
    ("environment*.yaml", _conda),
    ("*.gemspec", _lines("#", "dependency")),
    *((pattern, _xml("PackageReference", "PackageVersion")) for pattern in ("*.csproj", "*.fsproj", "*.vbproj")),
)


def reader_of(name: str, directory: str = "") -> Reader | None:
    """Return the reader of a manifest by its folded name; None if the file is no manifest. `directory` is the name of its directory."""
    if found := _READERS.get(name):
        return found
    if directory in ("requirements", "constraints") and name.endswith((".txt", ".in")):
        return _requirements_txt
    return next((reader for pattern, reader in _PATTERNS if fnmatchcase(name, pattern)), None)


# Names that resemble others


@cache
def known_names() -> frozenset[str]:
    """Return the names of much-used packages, as their indexes spell them."""
    path = os.path.join(os.path.dirname(__file__), "known_packages.txt")
    with open(path, encoding="utf-8") as file:
        return frozenset(name for line in file if not line.startswith("#") for name in line.split())


# Letters that look alike, as one of them.
_LOOKS = str.maketrans("01358$асеорхуѕіјһԁԛԝοανρτκ", "olesbsaceopxysijhdqwoavptk")


def _skeleton(name: str) -> str:
    """Return one spelling for all names that look alike: without separators, and with one letter for each group of similar ones."""
    plain = unicodedata.normalize("NFKC", name).casefold().translate(_LOOKS)
    plain = "".join(character for character in unicodedata.normalize("NFKD", plain) if not unicodedata.combining(character))
    return re.sub(r"[-_.]", "", plain).replace("rn", "m").replace("vv", "w")


def resemblance(name: str, used: Iterable[str] = ()) -> str:
    """Return a remark if a name is close to a well-known one or to one that is in use already, else "".

    >>> resemblance("reqeusts"), resemblance("requests"), resemblance("left-padding-x")
    ('one letter from requests', '', '')
    """
    known = known_names()
    others = known | {each for each in used if re.fullmatch(r"[\w.@/-]+", each)}
    if name in others or len(name) > 100:
        return ""
    skeleton = _skeleton(name)
    best: tuple[int, str, str] = (3, "", "")
    for other in others:
        if abs(len(other) - len(name)) > 3:
            continue
        like = _skeleton(other)
        if like == skeleton:
            best = min(best, (0, other, f"looks like {other}"))
        elif len(other) >= _SHORTEST_ALIKE and abs(len(like) - len(skeleton)) <= 2:
            far = distance(skeleton, like, 2 if len(other) >= _SHORTEST_TWO else 1)
            if far is not None:
                best = min(best, (far, other, f"{'one letter' if far == 1 else 'two letters'} from {other}"))
    return best[2] or _dressed(name, known)


_ADDITIONS = re.compile(r"^(?:python|py|node|js|lib)[-_.]?|[-_.]?(?:python|py|js|node|lib|[0-9]{1,2})$")


def _dressed(name: str, known: frozenset[str]) -> str:
    """Return a remark if a name is a well-known one with an addition that says nothing."""
    for found in _ADDITIONS.finditer(name.lower()):
        core = name.lower()[: found.start()] + name.lower()[found.end() :]
        if core in known and len(core) >= _SHORTEST_ALIKE:
            return f"{core} with an addition"
    return ""


def distance(one: str, other: str, most: int) -> int | None:
    """Return the number of letters to change, add, leave out or swap; None if it is more than `most`.

    >>> distance("reqeusts", "requests", 2), distance("flask", "django", 2)
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
