"""New and changed dependencies in manifests and lock files, and how close their names are to well-known ones. Pure.

Each manifest is read into a table: the requirement of each package by name. New and changed entries count; removed entries, comments and
blanks do not. A manifest that cannot be parsed counts. In a lock file only the names of packages and the places that they come from count,
because versions change often. Programs (Gemfile, build.gradle) and YAML, for which there is no parser here, are compared line by line; a
line in an unknown form counts.

`package_names` compares new names with much-used ones and with those that the manifest has already.

A guest writes these texts, so no reader takes more than linear time: there is no regular expression that looks ahead without a limit.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase, translate

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.policy.files import document
from agent_sandbox.workspace.changes import Change
from agent_sandbox.workspace.escape import folded
from agent_sandbox.workspace.nodes import EntryType
from agent_sandbox.workspace.package_names import PackageNames

if TYPE_CHECKING:
    from typing import Any

Table = dict[str, str]  # the requirement of each package, by name
Reader = Callable[[str], Iterable[tuple[str, str]]]
UNREADABLE = "it cannot be read as a list of packages"
_LONGEST = 120  # characters of a requirement that are shown
_MOST_COMPARED = 5000  # names of one manifest
_LARGEST = 1 << 20  # bytes of a manifest
_LARGEST_LOCK = 8 << 20  # bytes of a lock file
_LARGEST_TOML = 2 << 20  # characters
_NAME = re.compile(r"\s*([A-Za-z0-9@][\w.@/-]*)")
_PLAIN = re.compile(r"[\w.@/-]{1,200}")


@dataclass(frozen=True)
class Dependency:
    """A new or changed dependency. `old` is empty for a new one; `resembles` is a remark on its name, or empty."""

    name: str
    old: str
    new: str
    resembles: str = ""

    def sentence(self) -> str:
        """Return the dependency in words, such as "reqeusts: new, ==2.0; one letter from requests"."""
        what = f"{_short(self.old)} becomes {_short(self.new)}" if self.old else f"new, {_short(self.new)}" if self.new else "new"
        return f"{_short(self.name)}: {what}" + (f"; {self.resembles}" if self.resembles else "")


class Manifests:
    """Describes changes of manifests. `texts` returns the content of a file before and after a change, `called` its other names."""

    def __init__(self, texts: Callable[[Change, int], tuple[bytes | None, bytes | None]], called: Callable[[str], Iterable[str]]) -> None:
        self._texts = texts
        self._called = called
        self._remarks: dict[str, tuple[str, ...]] = {}

    def remarks(self, change: Change) -> tuple[str, ...]:
        """Return a sentence for each dependency that a change of a manifest adds or changes. Return nothing for other files."""
        if change.path in self._remarks:
            return self._remarks[change.path]
        directory, _, name = change.path.rpartition("/")
        reader = reader_of(folded(name), directory)
        called = tuple(self._called(change.path)) if reader is None or reader is _package_json else ()
        if reader is None and called:
            reader = next((found for each in called if (found := reader_of(each, directory))), None)
        if reader is _package_json and not called and _is_installed(directory):
            reader = _installed_package
        if reader is None or change.after is None:
            return ()
        self._remarks[change.path] = tuple(self._read(change, reader))
        return self._remarks[change.path]

    def _read(self, change: Change, reader: Reader) -> Iterator[str]:
        if change.after is None:
            return
        if change.after.type is EntryType.SYMLINK:
            yield "a link to another file takes the place of this list of packages"
            return
        try:
            before, after = self._texts(change, _LARGEST_LOCK if reader in _LOCKS else _LARGEST)
            yield from (each.sentence() for each in compare(reader, before, after))
        except ValueError:
            yield UNREADABLE


def compare(reader: Reader, before: bytes | None, after: bytes | None) -> list[Dependency]:
    """Return the dependencies that `after` adds or changes. Raises ValueError if `after` cannot be parsed."""
    if before == after:
        return []
    new = _table(reader, after)
    try:
        old = _table(reader, before)
    except ValueError:  # then everything in the new text counts
        old = {}
    known = PackageNames(_INDEXES.get(reader, ""), tuple(old)[:_MOST_COMPARED])
    changed = [name for name, requirement in new.items() if old.get(name) != requirement]
    return [
        Dependency(name, old.get(name, ""), new[name], known.resemblance(name) if name not in old and at < _MOST_COMPARED else "")
        for at, name in enumerate(changed)
    ]


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
    """Return the normalised name of a Python package (PEP 503): in lower case, with single dashes as separators."""
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
        words = [word for word in _without_comment(line).split() if not word.startswith("--hash=")]
        if words:
            yield _requirement(" ".join(words))


def _without_comment(line: str) -> str:
    """Return a line without its comment, which begins with a # at the start of the line or after a blank."""
    if "#" not in line:
        return line
    at = line.find("#")
    while at > 0 and not line[at - 1].isspace():
        at = line.find("#", at + 1)
    return line if at < 0 else line[:at]


def _listed(values: Any) -> Iterator[tuple[str, str]]:
    for value in values or ():
        if isinstance(value, dict):  # {include-group = "…"}
            continue
        yield _requirement(str(value))


def _mapped(values: Mapping[str, Any] | None, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the name and the requirement of each entry of a table. A requirement that is a table or a list becomes JSON."""
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


_HEADINGS = ("channels:", "dependencies:", "dev_dependencies:", "dependency_overrides:", "- pip:", "---")


def _yaml(*data: str) -> Reader:
    """Return a reader of a YAML list of packages. Every line counts, except those that begin with a key in `data`."""

    def read(text: str) -> Iterator[tuple[str, str]]:
        for line in text.splitlines():
            plain = _without_comment(line).strip()
            if not plain or plain.startswith(data) or plain in _HEADINGS:
                continue
            item = plain.removeprefix("- ").strip().strip("\"'")
            name, separator, rest = item.partition(":") if ":" in item and "://" not in item else item.partition("=")
            if separator and _PLAIN.fullmatch(name):
                yield canonical(name), (separator + rest).removeprefix(":").strip()
            else:
                yield _requirement(item)

    return read


# JavaScript and others with manifests that are data


_NPM = ("dependencies", "devDependencies", "peerDependencies", "optionalDependencies", "overrides", "resolutions", "catalog")


def _package_json(text: str) -> Iterator[tuple[str, str]]:
    manifest = json.loads(text)
    for table in (*(manifest.get(name) for name in _NPM), manifest.get("pnpm", {}).get("overrides")):
        yield from _mapped(table)
    for name in ("bundledDependencies", "bundleDependencies"):
        for bundled in manifest.get(name) or () if isinstance(manifest.get(name), list) else ():
            yield str(bundled), "bundled"


def _is_installed(directory: str) -> bool:
    """Return whether a directory is that of an installed package of npm, whose manifest nobody installs from."""
    _, found, package = f"/{directory}".rpartition("/node_modules/")
    return bool(found) and package.count("/") == package.startswith("@")


def _installed_package(text: str) -> Iterator[tuple[str, str]]:
    """Yield the package itself: what it was built with is not installed, and what it needs has a directory of its own."""
    manifest = json.loads(text)
    yield str(manifest["name"]), str(manifest["version"])


def _deno(text: str) -> Iterator[tuple[str, str]]:
    manifest = json.loads("\n".join(line for line in text.splitlines() if not line.lstrip().startswith("//")))
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
            elif verb not in ("module", "go", "exclude", "retract", "godebug", "ignore"):
                yield " ".join((verb, *rest[:1])), " ".join(rest[1:])


_TAG = re.compile(r"<(/?)([\w.:-]+)([^<>]*)>([^<]*)")
_ATTRIBUTE = re.compile(r'([\w.:]+)\s{0,9}=\s{0,9}"([^"]*)"')


def _xml(*elements: str) -> Reader:
    """Return a reader of XML elements that name packages. It scans tags itself: an XML parser would expand the entities of a guest."""
    wanted = {element.lower() for element in elements}

    def read(text: str) -> Iterator[tuple[str, str]]:
        if "<!ENTITY" in text or "<![CDATA[" in text:
            raise ValueError("it is not written as these files are")
        if text.strip() and not _TAG.search(text):
            raise ValueError("it is no XML")
        inside, values = "", dict[str, str]()
        for found in _TAG.finditer(_without_xml_comments(text)):
            closes, tag, attributes, content = bool(found[1]), found[2].lower(), found[3], found[4].strip()
            if not closes and tag in wanted:
                yield from _coordinates(inside, values)
                inside, values = tag, {key.lower(): value for key, value in _ATTRIBUTE.findall(attributes)}
                if attributes.rstrip().endswith("/"):
                    yield from _coordinates(inside, values)
                    inside = ""
            elif closes and tag == inside:
                yield from _coordinates(inside, values)
                inside = ""
            elif inside and not closes:
                values.setdefault(tag, content)
        yield from _coordinates(inside, values)

    return read


def _coordinates(element: str, values: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    if element:
        name = values.get("include") or values.get("id") or ":".join(filter(None, (values.get("groupid"), values.get("artifactid"))))
        rest = " ".join(filter(None, (values.get("version"), values.get("url"), values.get("systempath"))))
        yield (name, rest) if name else (f"{element} {rest}".strip(), "")


def _without_xml_comments(text: str) -> str:
    pieces = []
    while text:
        piece, found, rest = text.partition("<!--")
        pieces.append(piece)
        text = rest.partition("-->")[2] if found else ""
    return "".join(pieces)


def _lines(comment: str, *kept: str) -> Reader:
    """Return a reader of programs: it yields every line that is no comment; with `kept`, only lines with one of these words."""

    def read(text: str) -> Iterator[tuple[str, str]]:
        for line in text.splitlines():
            plain = " ".join(line.split())
            if plain and not plain.startswith(comment) and (not kept or any(word in plain for word in kept)):
                named = re.search(r"[\"':]([\w.@/-]+)", plain)
                yield (named[1], plain) if named else (plain, "")

    return read


def _setup_py(text: str) -> Iterator[tuple[str, str]]:
    """Yield the requirements in the calls of a setup.py. For a computed list, yield its source text."""
    import ast  # slow to load, and few promotions have such a file

    if len(text) > _LARGEST_TOML:
        raise ValueError("it is too large")
    try:
        tree = ast.parse(text)
    except (SyntaxError, MemoryError) as error:
        raise ValueError("it is no Python") from error
    lists = ("install_requires", "setup_requires", "tests_require", "extras_require", "dependency_links")
    for call in ast.walk(tree):
        for keyword in call.keywords if isinstance(call, ast.Call) else ():
            if keyword.arg not in lists:
                continue
            try:
                value = ast.literal_eval(keyword.value)
            except ValueError:
                yield f"{keyword.arg} {ast.unparse(keyword.value)}", ""
                continue
            for listed in value.values() if isinstance(value, dict) else (value,):
                yield from _listed([listed] if isinstance(listed, str) else listed)


# Lock files: names, and where packages come from


def _place(address: object) -> str:
    """Return the host of an address, because paths change with every version. Addresses of git, or without a host, stay whole."""
    text = str(address or "")
    found = re.match(r"(?:[\w+]+:)?//([^/?#]+)", text.removeprefix("registry+").removeprefix("sparse+"))
    return f"from {found[1]}" if found and not text.startswith("git") else text.partition("#")[0].partition("?rev=")[0]


def _npm_lock(text: str) -> Iterator[tuple[str, str]]:
    lock = json.loads(text)
    for path, entry in (lock.get("packages") or {}).items():
        if path and not entry.get("link"):
            name = entry.get("name") or path.rpartition("node_modules/")[2]
            yield name, _place(entry.get("resolved")) + (" with an install script" if entry.get("hasInstallScript") else "")
    todo = [lock.get("dependencies") or {}]  # what older versions of npm read
    while todo:
        for name, entry in todo.pop().items():
            yield name, _place(entry.get("resolved"))
            todo.append(entry.get("dependencies") or {})


def _toml_lock(text: str) -> Iterator[tuple[str, str]]:
    if len(text) > _LARGEST_TOML:
        raise ValueError("it is too large")
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


_KEY = re.compile(r"[\w@/'\"][^\s]*:(\s|$)|-{3}$")


def _pnpm_lock(text: str) -> Iterator[tuple[str, str]]:
    name = ""
    for line in text.splitlines():
        plain = line.strip()
        if len(line) - len(line.lstrip()) > 2:
            if name and (found := re.search(r"(?:tarball|repo):\s{0,9}([^,}\s]+)", plain)):
                yield name, _place(found[1])
        elif "{" in plain or (plain and not _KEY.match(plain)):
            yield plain, ""
        elif line.startswith("  ") and plain.endswith(":"):
            key = plain.rstrip(":").strip("\"'").lstrip("/")
            at = key.find("@", 1)
            name = key[:at] if at > 0 else key
            yield name, ""


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
    for found in re.finditer(r"^[ \t]{1,40}\"([^\"\n]+)\": \[\"([^\"]*)\"(?:, \"([^\"]*)\")?", text, re.MULTILINE):
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
    "setup.py": _setup_py,
    "setup.cfg": _setup_cfg,
    "pipfile": _pipfile,
    "package.json": _package_json,
    **dict.fromkeys(("deno.json", "deno.jsonc"), _deno),
    "composer.json": _composer,
    "cargo.toml": _cargo,
    "libs.versions.toml": _versions_toml,
    **dict.fromkeys(("go.mod", "go.work"), _go_mod),
    **dict.fromkeys(("gemfile", "gems.rb", "podfile"), _lines("#")),
    "mix.exs": _lines("#", "{:", "git:", "path:"),
    "package.swift": _lines("//", ".package("),
    "pubspec.yaml": _yaml("name:", "version:", "description:", "homepage:", "repository:"),
    "requirements.yml": _yaml("---"),
    "pom.xml": _xml("dependency", "plugin", "extension", "parent", "repository", "pluginRepository"),
    "packages.config": _xml("package"),
    "directory.packages.props": _xml("PackageVersion", "PackageReference", "GlobalPackageReference"),
    **dict.fromkeys(("build.gradle", "build.gradle.kts"), _GRADLE),
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
_CONDA = _yaml("name:", "prefix:")
_PATTERNS: tuple[tuple[str, Reader], ...] = (
    *((f"*{word}*{end}", _requirements_txt) for word in ("requirements", "constraints", "reqs", "deps") for end in (".txt", ".in")),
    ("environment*.yml", _CONDA),
    ("environment*.yaml", _CONDA),
    ("*.gemspec", _lines("#", "dependency")),
    *((pattern, _xml("PackageReference", "PackageVersion")) for pattern in ("*.csproj", "*.fsproj", "*.vbproj")),
)
_ENDS = (".txt", ".in", ".yml", ".yaml", ".gemspec", "proj")
_ANY_PATTERN = re.compile("|".join(translate(pattern) for pattern, _ in _PATTERNS))


_LOCKS = frozenset(
    (_npm_lock, _toml_lock, _pipfile_lock, _composer_lock, _yarn_lock, _pnpm_lock, _gem_lock, _go_sum, _bun_lock, _flake_lock, _opaque)
)
_INDEXES: dict[Reader, str] = {
    **dict.fromkeys((_requirements_txt, _pyproject, _setup_cfg, _setup_py, _pipfile, _pipfile_lock, _CONDA), "PyPI"),
    **dict.fromkeys((_package_json, _installed_package, _npm_lock, _yarn_lock, _pnpm_lock, _bun_lock), "npm"),
}


def reader_of(name: str, directory: str = "") -> Reader | None:
    """Return the reader for a manifest or lock file of this folded name in this directory; None for another file."""
    if found := _READERS.get(name):
        return found
    if not name.endswith(_ENDS):  # there may be a hundred thousand names
        return None
    if name.endswith((".txt", ".in")) and folded(posixpath.basename(directory)) in ("requirements", "constraints", "reqs"):
        return _requirements_txt
    if _ANY_PATTERN.match(name) is None:
        return None
    return next(reader for pattern, reader in _PATTERNS if fnmatchcase(name, pattern))
