"""Find the files that allowed programs need: the programs, their loaders and interpreters, and their shared libraries.

The search is on the machine itself, by real path, before the guest exists: a file that a guest wrote is never in the result. If the search
misses a file, a program fails to start; nothing more becomes executable. `KITS` lists helpers that tools start or load without being linked
to them.
"""

from __future__ import annotations

import os

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.errors import PolicyError
from agent_sandbox.kernel import elf
from agent_sandbox.policy.model import ProgramRules
from agent_sandbox.policy.paths import contains
from agent_sandbox.policy.programs import LINE_SHELLS, covers, interprets, is_pattern

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Program directories of any machine, in addition to PATH.
STANDARD = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin", "/usr/games", "/usr/local/games", "/snap/bin")
MOST_REMARKED_ON = 20  # names in a list; a longer list is a preset, and not every machine has all of its programs
_SHIMS = "shims"  # scripts of version managers, which start other programs to find the real one
_FOR_PROGRAMS = ("bin", "sbin", "games", _SHIMS)
_DEFAULT_LIBRARIES = ("/lib64", "/usr/lib64", "/lib", "/usr/lib", "/usr/local/lib")
_NAME_SERVICE = b"libnss_"  # loaded by the C library; the names are only in /etc/nsswitch.conf
_LONGEST_CHAIN = 40  # links in a row, as in the kernel


@dataclass(frozen=True)
class Kit:
    """Additional files that a tool needs. `of` are the names of the tools, as patterns."""

    of: tuple[str, ...]
    helpers: tuple[str, ...] = ()  # directories of programs that it starts
    modules: tuple[str, ...] = ()  # trees of shared libraries that it loads
    tools: tuple[str, ...] = ()  # other tools that it cannot work without


KITS = (
    Kit(("git",), helpers=("lib/git-core", "libexec/git-core")),
    Kit(
        ("gcc*", "g++*", "cc", "c++", "cpp*", "*-gcc-*", "*-g++-*", "*-cpp-*"),
        helpers=("lib/gcc/*/*", "libexec/gcc/*/*"),
        tools=("as", "ld"),
    ),
    Kit(
        ("python[0-9]*", "pypy[0-9]*"),
        modules=("lib/{name}", "lib64/{name}", "lib/python3/dist-packages", "local/lib/{name}/dist-packages", "lib/*/{name}"),
    ),
    Kit(("perl*",), modules=("lib/*/perl", "lib/*/perl-base", "lib/*/perl5", "lib/perl5", "lib64/perl5", "local/lib/*/perl")),
    Kit(("ruby*",), modules=("lib/*/ruby", "lib/ruby", "lib64/ruby", "../var/lib/gems")),
    Kit(("cargo", "rustc", "rustup"), helpers=("../.rustup/toolchains/*/bin",)),
    Kit(("go",), helpers=("pkg/tool/*",)),
    Kit(("dpkg",), tools=("dpkg-deb", "dpkg-query", "dpkg-split")),
    Kit(("apt", "apt-get", "apt-cache"), helpers=("lib/apt/methods", "lib/apt/solvers"), tools=("dpkg",)),
    Kit(("java", "javac", "jar", "jshell"), modules=("lib",)),
    Kit(("iconv",), modules=("lib/*/gconv", "lib64/gconv", "lib/gconv")),
    Kit(("openssl",), modules=("lib/*/ossl-modules", "lib/*/engines-3", "lib64/ossl-modules", "lib64/engines-3")),
)
# Many tools in one file, which acts by the name under which it is started: allowing one tool allows them all.
MULTI_CALL = frozenset({"busybox", "toybox", "coreutils", "sbase-box", "box"})


def kits_of(name: str) -> list[Kit]:
    """Return the kits of a tool with this file name."""
    return [kit for kit in KITS if covers(kit.of, name)]


def found(prefix: str, pattern: str) -> Iterator[str]:
    """Yield the directories on this machine that match a pattern, which is relative to `prefix`. Yields real paths."""
    places = [prefix]
    for part in pattern.split("/"):
        if is_pattern(part):
            places = [f"{place}/{name}" for place in places for name in _names(place) if covers((part,), name)]
        else:
            places = [os.path.normpath(f"{place}/{part}") for place in places]
    for place in places:
        if os.path.isdir(place):
            yield os.path.realpath(place)


@dataclass(frozen=True)
class Executables:
    """The files that may be executed, by real path: `programs` are started, `libraries` only mapped into memory.

    `directories` are the PATH directories that show only these files; `links` are the links in them that lead to these files.
    """

    programs: tuple[str, ...]
    libraries: tuple[str, ...]
    directories: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()


def find_executables(
    rules: ProgramRules, *, search_path: str, programs: Sequence[str] = (), modules: Sequence[str] = (), project: str | None = None
) -> Executables:
    """Return the files of the programs that the rules allow.

    `programs` and the shared libraries below `modules` are included whatever the rules say: the run itself needs them. A PATH directory
    that is part of the project, or that is not named like a directory of programs, is shown unchanged: its files can be read, but only
    allowed files can be executed.
    """
    search = _Search(rules, search_path, project)
    for shell in LINE_SHELLS if rules.lines else ():
        search.take_named(shell)
    search.interpreters.clear()  # the shell of a command line needs no note; a shell that is named does
    # An allowed program is in every group, so search only the group that is quickest to search.
    named = min(rules.groups, key=lambda group: sum(map(is_pattern, group)), default=())
    search.brief = len(named) > MOST_REMARKED_ON
    for pattern in named:
        search.take_named(pattern)
    for program in programs:
        search.take_program(os.path.realpath(program))
    for tree in modules:
        search.take_modules(os.path.realpath(tree))
    hidden = [place for place in search.directories if os.path.basename(place) in _FOR_PROGRAMS]
    if project is not None:
        hidden = [place for place in hidden if not (contains(project, place) or contains(place, project))]
    links = [(path, to) for path, to in search.links.items() if os.path.dirname(path) in hidden]
    if search.interpreters:
        search.notes.append(
            f"{', '.join(search.interpreters)}: runs what it is given, and that can do whatever the sandbox lets it do itself"
        )
    return Executables(tuple(search.programs), tuple(search.libraries), tuple(hidden), tuple(links), tuple(search.notes))


def denied_files(rules: ProgramRules, *, search_path: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the paths to hide for rules that deny only some programs, and notes for the user."""
    hidden: dict[str, None] = {}
    notes: list[str] = []
    for directory in _directories(search_path):
        for name in _names(directory):
            if not rules.denies(name):
                continue
            *links, real = _chain(f"{directory}/{name}")
            hidden.update(dict.fromkeys(links))
            if os.path.basename(real) in MULTI_CALL and not rules.denies(os.path.basename(real)):
                hidden[f"{directory}/{name}"] = None
                notes.append(
                    f"{name} is denied, but it is part of {real}, which can still be asked for it: deny {os.path.basename(real)} too"
                )
            else:
                hidden[real] = None
    return tuple(hidden), tuple(notes)


class _Search:
    """Collects the files of allowed programs, each once, in the order of discovery."""

    def __init__(self, rules: ProgramRules, search_path: str, project: str | None) -> None:
        self.rules = rules
        self.project = project
        self.directories = _directories(search_path)
        self.programs: dict[str, None] = {}
        self.libraries: dict[str, None] = {}
        self.links: dict[str, str] = {}
        self.notes: list[str] = []
        self.brief = False  # omit the notes on single names
        self.interpreters: dict[str, None] = {}
        self._seen: set[tuple[str, tuple[str, ...], int]] = set()
        self._real_directories: dict[str, str] = {}
        self._cache = elf.cached_libraries(_content(elf.CACHE))
        self._name_services = [os.fsdecode(name) for name in self._cache if name.startswith(_NAME_SERVICE)]

    def take_named(self, pattern: str, *, implied: bool = False) -> None:
        """Take every permitted file in PATH that matches the pattern. With `implied`, a file is permitted unless the rules deny it."""
        several = is_pattern(pattern)
        any_found = False
        for directory in self.directories:
            names = [name for name in _names(directory) if covers((pattern,), name)] if several else [pattern]
            for name in names:
                path = f"{directory}/{name}"
                if (
                    (not self.rules.denies(name) if implied else self.rules.permits(name))
                    and os.access(path, os.X_OK)
                    and os.path.isfile(path)
                ):
                    any_found = self._take(path, several=several) or any_found
        if not (any_found or several or self.brief or pattern in LINE_SHELLS) and self.rules.permits(pattern):
            self.notes.append(f"{pattern} is allowed, but there is no such program here")

    def _take(self, path: str, *, several: bool) -> bool:
        """Take the program at a path in PATH, with the links to it. Returns False if it is denied or could not start.

        Raises `PolicyError` if the program is part of a larger one that is not allowed, such as busybox.
        """
        *links, real = _chain(path)
        name, own = os.path.basename(path), os.path.basename(real)
        if denied := self.rules.denies(*map(os.path.basename, (*links, real))):
            self.notes.append(f"{name} is not there: it is the same file as {denied}, which is denied")
            return False
        if own in MULTI_CALL and not self.rules.permits(own):
            if several:
                return False
            raise PolicyError(f"{name} is a part of {real}: allowing it allows everything in that", hint=f"allow {own} by its name")
        if os.path.basename(os.path.dirname(real)) == _SHIMS or not self.take_program(real, quiet=several or self.brief):
            return False
        if self.project is not None and contains(self.project, real):
            self.notes.append(f"{name} is a file of the project, and is executed as it is there now: {real}")
        for link in links:
            self.links[link] = os.readlink(link)
            self._take_virtual_environment(link)
        return True

    def take_program(self, real: str, *, quiet: bool = False) -> bool:
        """Take one program with all files that it needs to run. Returns False, without the program, if its interpreter is not allowed."""
        if interprets(os.path.basename(real)):
            self.interpreters[os.path.basename(real)] = None
        if real in self.programs:
            return True
        binary = elf.read(real)
        if binary is None and (words := elf.interpreter_of(real)) and not self._take_interpreter(real, words, quiet=quiet):
            return False
        self.programs[real] = None
        if binary is not None:
            if binary.loader:
                self.programs[os.path.realpath(binary.loader)] = None
            self._take_libraries(binary, os.path.dirname(os.path.realpath(binary.loader or real)), ())
        self._take_kit(real)
        return True

    def _take_interpreter(self, script: str, words: Sequence[str], *, quiet: bool) -> bool:
        """Take the interpreter in a script's first line, and `env` if the line names it. Returns False if one is missing or not allowed."""
        needed = [words[0]]
        if os.path.basename(words[0]) == "env":
            named = next((word for word in words[1:] if not word.startswith("-") and "=" not in word), "")
            needed.append(next((path for place in self.directories if os.access(path := f"{place}/{named}", os.X_OK)), "") if named else "")
        for program in needed:
            if obstacle := self._obstacle(program):
                if not quiet:
                    what = os.path.basename(program) or "a program that is not there"
                    self.notes.append(f"{os.path.basename(script)} is not there: it is a script of {what}, {obstacle}")
                return False
        for program in needed:
            *links, real = _chain(program)
            self.links.update({link: os.readlink(link) for link in links})
            if program is needed[-1] and real not in self.programs and not quiet:
                self.notes.append(f"{os.path.basename(script)} is a script of {os.path.basename(program)}, which is therefore allowed, too")
            if not self.take_program(real, quiet=quiet):
                return False
        return True

    def _obstacle(self, program: str) -> str:
        """Return the reason why a program that a script needs cannot be taken; empty if it can be taken."""
        if not program:
            return "which is not allowed"
        *links, real = _chain(program)
        own = os.path.basename(real)
        if self.rules.denies(os.path.basename(program), *map(os.path.basename, (*links, real))):
            return "which is not allowed"
        if own in MULTI_CALL and not self.rules.permits(own):
            return f"which is a part of {real}: allow {own} by its name"
        return ""

    def _take_kit(self, real: str) -> None:
        prefix, name = os.path.dirname(os.path.dirname(real)), os.path.basename(real)
        for kit in kits_of(name):
            for pattern in kit.helpers:
                for place in found(prefix, pattern):
                    self._take_helpers(place)
            for pattern in kit.modules:
                for place in found(prefix, pattern.replace("{name}", name)):
                    self.take_modules(place)
            for tool in kit.tools:
                self.take_named(tool, implied=True)

    def _take_helpers(self, directory: str) -> None:
        """Take the programs in a directory of helpers. A script is taken only if the rules permit its interpreter."""
        for name in _names(directory):
            path = f"{directory}/{name}"
            if os.path.islink(path) or not os.path.isfile(path):
                continue
            if ".so" in name:
                self._take_library(path)
            elif os.access(path, os.X_OK) and not self.rules.denies(name):
                words = elf.interpreter_of(path)
                if not words or self.rules.permits(os.path.basename(words[-1] if words[0].endswith("/env") else words[0])):
                    self.take_program(os.path.realpath(path), quiet=True)

    def _take_virtual_environment(self, link: str) -> None:
        """If the link belongs to a virtual environment, take the environment's shared libraries, which the linked interpreter loads."""
        place = os.path.dirname(os.path.dirname(link))
        if os.path.isfile(f"{place}/pyvenv.cfg"):
            self.take_modules(f"{place}/lib")

    def take_modules(self, tree: str) -> None:
        """Take every shared library below a directory, with the libraries that it needs. Programs are left out, whatever their name."""
        pending = [tree]
        while pending:
            try:
                entries = list(os.scandir(pending.pop()))
            except OSError:
                continue
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                elif (entry.name.endswith((".so", ".node")) or ".so." in entry.name) and entry.is_file(follow_symlinks=False):
                    self._take_library(entry.path)

    def _take_library(self, path: str) -> None:
        if path not in self.libraries and (library := elf.read(path)) is not None and not library.program:
            self.libraries[path] = None
            self._take_libraries(library, os.path.dirname(path), ())

    def _take_libraries(self, of: elf.Object, beside: str, inherited: tuple[str, ...]) -> None:
        """Take the libraries that an object is linked with, recursively. Every file that the loader might choose is taken.

        `inherited` are search directories of the objects that load this one; `beside` is a directory to search last.
        """
        search = (*of.search, *inherited)
        for name in (*of.needed, *(self._name_services if of.loader else ())):
            if (name, search, of.machine) in self._seen:
                continue
            self._seen.add((name, search, of.machine))
            for path in self._places(name, search, beside):
                real = self._real(path)
                if real not in self.libraries and (library := elf.read(real)) is not None and library.machine == of.machine:
                    self.libraries[real] = None
                    self._take_libraries(library, beside, search if of.inherited else inherited)

    def _places(self, name: str, search: Sequence[str], beside: str) -> Iterator[str]:
        if "/" in name:
            yield name
            return
        for directory in search:
            if os.path.exists(f"{directory}/{name}"):
                yield f"{directory}/{name}"
        known = [os.fsdecode(path) for path in self._cache.get(os.fsencode(name), ())]
        yield from known
        if not known:
            yield from (f"{directory}/{name}" for directory in (beside, *_DEFAULT_LIBRARIES) if os.path.exists(f"{directory}/{name}"))

    def _real(self, path: str) -> str:
        """Return the real path of a library. Real directories are cached: hundreds of libraries lie in a few directories."""
        for _ in range(_LONGEST_CHAIN):
            directory, name = os.path.split(path)
            if directory not in self._real_directories:
                self._real_directories[directory] = os.path.realpath(directory)
            path = f"{self._real_directories[directory]}/{name}"
            try:
                path = os.path.join(os.path.dirname(path), os.readlink(path))
            except OSError:  # not a link, or missing
                return path
        return os.path.realpath(path)


def _directories(search_path: str) -> list[str]:
    """Return the real directories of PATH and the standard ones. Relative ones are left out: a guest may have written their files."""
    named = [path for path in search_path.split(os.pathsep) if path.startswith("/")]
    real = dict.fromkeys(os.path.realpath(path) for path in (*named, *STANDARD))
    return [path for path in real if path != "/" and os.path.isdir(path)]


def _chain(path: str) -> list[str]:
    """Return the links that lead from a path to the real file, in order, and the real file last. The parent of each is a real path."""
    chain: list[str] = []
    for _ in range(_LONGEST_CHAIN):
        path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        chain.append(path)
        if not os.path.islink(path):
            return chain
        path = os.path.join(os.path.dirname(path), os.readlink(path))
    return [os.path.realpath(path)]


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _content(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
