"""Languages: the interpreter of each, and the files it needs in a view that shows nothing else.

`needs` is the difference between a locked sandbox that can run `print(1)` and an empty room: the interpreter, its standard library and
packages, the shared libraries of the system. Not home directories, not configuration, not other programs.
"""

from __future__ import annotations

import os
import sys
import time
from functools import lru_cache

from agent_sandbox._fast.values import dataclass
from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.kernel.elf import loader_of
from agent_sandbox.runtime.base import Hosted, JavaScriptCode, PythonCode, Script
from agent_sandbox.workspace.view.plan import Needs

KNOWN_SECONDS = 5.0  # an interpreter that is installed or removed meanwhile is noticed after this
_LIBRARIES = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libx32", "/usr/local/lib", "/usr/share/zoneinfo")
_TOP_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_TOOLS = ("/usr", "/bin", "/sbin", "/etc/alternatives")  # what programs that start programs expect
_COPIED = ("/etc/ld.so.cache", "/etc/localtime")
_PASSWD = "root:x:0:0:root:/tmp:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
_GROUP = "root:x:0:\nnogroup:x:65534:\n"
_NSSWITCH = b"passwd: files\ngroup: files\nhosts: files dns\n"
_HOSTS = b"127.0.0.1 localhost sandbox\n::1 localhost\n"


@dataclass(frozen=True)
class NativeInterpreter:
    """A native interpreter: its command names, where its packages are, and the package to install if it is missing."""

    commands: tuple[str, ...]
    trees: tuple[str, ...]
    file: str
    package: str
    flags: tuple[str, ...] = ()


NATIVE = {
    "javascript": NativeInterpreter(("node", "nodejs"), ("/usr/share/nodejs", "/usr/local/share/nodejs"), "main.js", "nodejs"),
    "ruby": NativeInterpreter(("ruby",), ("/var/lib/gems", "/usr/share/rubygems-integration", "/usr/share/ruby"), "main.rb", "ruby"),
    "bash": NativeInterpreter(("bash",), (), "main.sh", "bash"),
}


@dataclass(frozen=True)
class PreparedCode:
    """A piece of code ready to run: the program, the files that it needs in the view, and those that it must execute."""

    program: PythonCode | Script
    needs: Needs
    executables: tuple[str, ...] = ()


def hosted(language: str, source: str, arguments: tuple[str, ...]) -> Hosted:
    """Return the program for a runtime that brings its own interpreter of the language."""
    return PythonCode(source, arguments) if language == "python" else JavaScriptCode(source, arguments)


def prepare(language: str, source: str, *, arguments: tuple[str, ...], search_path: str, processes: bool) -> PreparedCode:
    """Prepare code in a language, by its canonical name. Raises `RuntimeUnavailable` if there is no interpreter."""
    if language == "python":
        trees = (*_LIBRARIES, *_python_trees())
        binary = _real(sys.executable, _moment())
        return PreparedCode(PythonCode(source, arguments), _needs(trees, (binary,), processes))
    from shutil import which

    interpreter = NATIVE[language]
    command = next((path for name in interpreter.commands if (path := which(name, path=search_path))), None)
    if command is None:
        raise RuntimeUnavailable(
            f"{language} code needs {interpreter.commands[0]}, which is not in {search_path}",
            missing=(interpreter.commands[0],),
            hint=f"install it: apt-get install {interpreter.package}",
        )
    binary = os.path.realpath(command)
    trees = (*_LIBRARIES, *interpreter.trees, *_prefix_of(binary))
    program = Script((binary, *interpreter.flags), source, interpreter.file, arguments)
    return PreparedCode(program, _needs(trees, (binary,), processes), (binary, *loader_of(binary)))


def _python_trees() -> tuple[str, ...]:
    """Return the directories of the running interpreter and its packages."""
    packages = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    prefixes = [prefix for prefix in (sys.base_prefix, sys.prefix) if prefix != "/usr"]
    return (*prefixes, *packages)


def python_modules() -> tuple[str, ...]:
    """Return the directories of the running interpreter's modules, including the standard library."""
    return tuple(dict.fromkeys((os.path.dirname(os.__file__), *(path for path in sys.path if os.path.isabs(path) and os.path.isdir(path)))))


def _prefix_of(binary: str) -> tuple[str, ...]:
    """Return the installation directory of an interpreter outside the system: /opt/node for /opt/node/bin/node."""
    prefix = os.path.dirname(os.path.dirname(binary))
    return () if prefix in ("/usr", "/usr/local", "/") else (prefix,)


def _needs(trees: tuple[str, ...], binaries: tuple[str, ...], processes: bool) -> Needs:
    return _needs_at(trees, binaries, processes, _moment())


def _moment() -> int:
    """Return a number that changes every few seconds: the key under which look-ups on disk are cached."""
    return int(time.monotonic() / KNOWN_SECONDS)


@lru_cache(maxsize=4)
def _real(path: str, now: int) -> str:
    return os.path.realpath(path)


@lru_cache(maxsize=16)
def _needs_at(trees: tuple[str, ...], binaries: tuple[str, ...], processes: bool, now: int) -> Needs:
    links = tuple((f"/{name}", os.readlink(f"/{name}")) for name in _TOP_LINKS if os.path.islink(f"/{name}"))
    directories = tuple(
        f"/{name}" for name in _TOP_LINKS if name.startswith("lib") and os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}")
    )
    linked = {target for target, _ in links}
    shown = tuple(dict.fromkeys(tree for tree in (*trees, *directories) if tree not in linked))
    files = (*binaries, *(os.path.realpath(path) for binary in binaries for path in loader_of(binary)))
    return Needs(
        shown,
        tuple(tree for tree in _TOOLS if tree not in linked) if processes else (),
        tuple(dict.fromkeys(files)),
        links,
        (
            ("/etc/passwd", _account(_PASSWD, ":x:{uid}:{gid}:sandbox:/tmp:/bin/sh\n")),
            ("/etc/group", _account(_GROUP, ":x:{gid}:\n")),
            ("/etc/nsswitch.conf", _NSSWITCH),
            ("/etc/hosts", _HOSTS),
            *((path, content) for path in _COPIED if (content := _read(path)) is not None),
        ),
    )


def _account(base: str, line: str) -> bytes:
    """Return the account file of a locked view: root, nobody, and the user of a rootless guest."""
    uid, gid = os.getuid(), os.getgid()
    return (base + (("sandbox" + line).format(uid=uid, gid=gid) if uid else "")).encode()


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None


def tools() -> Needs:
    """Return what any command needs in a view of chosen trees: the programs of the system."""
    return _needs(_LIBRARIES, (), processes=True)
