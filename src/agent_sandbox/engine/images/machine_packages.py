"""Make an image from the packages of this machine, for machines without a registry: the files that its package manager installed.

Only files of packages are copied, and a file of /etc only if it is as its package brought it: what somebody wrote on this machine does not
go into an image. No script of a package runs. The image is small: the named packages, what they depend on, and a shell with its tools.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import subprocess
import tarfile
from collections.abc import Iterable, Iterator

from agent_sandbox.engine.images.make import make_image, workplace
from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.policy.image_names import canonical_image
from agent_sandbox.runtime.container.images import ContainerImage, ImageStore

BASE = ("base-files", "bash", "coreutils", "dash", "findutils", "grep", "gzip", "libc-bin", "sed", "tar")
_QUERY = "${binary:Package}\t${db:Status-Status}\t${Provides}\t${Pre-Depends}, ${Depends}\t${Conffiles}\x01"
_LEFT_OUT = ("/usr/share/doc/", "/usr/share/man/", "/usr/share/locale/", "/usr/share/info/", "/usr/share/lintian/")
_TOP_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_DIRECTORIES = {"tmp": 0o1777, "run": 0o755, "proc": 0o555, "sys": 0o555, "dev": 0o755, "root": 0o700, "etc": 0o755, "var/tmp": 0o1777}
_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
_LINKS = {"usr/local/bin/python": "/usr/bin/python3"}
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def image_from_machine(store: ImageStore, name: str, packages: Iterable[str]) -> ContainerImage:
    """Make an image of this name from these packages and what they depend on.

    Raises `RuntimeUnavailable` on a machine whose packages dpkg does not manage, and for a package that is not installed.
    """
    canonical_image(name)
    known = _Packages.read()
    wanted = known.closure((*BASE, *packages), asked=tuple(packages))
    with workplace(store) as place:
        archive = os.path.join(place, "image.tar")
        layer = os.path.join(place, "layer.tar")
        with tarfile.open(layer, "w") as tar:
            _fill(tar, known, wanted)
        config = {
            "architecture": os.uname().machine,
            "os": "linux",
            "config": {"Env": [f"PATH={_PATH}", "LANG=C.UTF-8"]},
            "packages": sorted(wanted),
            "layer": _digest(layer),
        }
        with tarfile.open(archive, "w") as tar:
            _add_text(tar, "config.json", json.dumps(config))
            _add_text(tar, "manifest.json", json.dumps([{"Config": "config.json", "Layers": ["layer.tar"], "RepoTags": [name]}]))
            tar.add(layer, "layer.tar")
        return make_image(store, archive, names=(name,), source=f"this machine: {', '.join(packages)}")


class _Packages:
    """The installed packages: what each depends on, and the digests of its configuration files."""

    def __init__(self) -> None:
        self.depends: dict[str, list[list[str]]] = {}
        self.provides: dict[str, str] = {}
        self.configuration: dict[str, str] = {}  # path: digest as the package brought it
        self.full_names: dict[str, str] = {}

    @classmethod
    def read(cls) -> _Packages:
        try:
            listed = subprocess.run(
                ["dpkg-query", "-W", "-f", _QUERY], capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.CalledProcessError):
            why = "an image is made from the packages of this machine, and dpkg does not manage them here"
            raise RuntimeUnavailable(why, missing=("dpkg",), hint="agent-sandbox image add NAME, or image load FILE") from None
        known = cls()
        for entry in listed.stdout.split("\x01"):
            fields = entry.lstrip("\n").split("\t")
            if len(fields) != 5 or fields[1] != "installed":
                continue
            full, _, provides, depends, conffiles = fields
            package = full.partition(":")[0]
            known.full_names.setdefault(package, full)
            known.depends.setdefault(
                package, [[_bare(choice) for choice in each.split("|")] for each in depends.split(",") if each.strip()]
            )
            for each in filter(str.strip, provides.split(",")):
                known.provides.setdefault(_bare(each), package)
            for line in conffiles.splitlines():
                path, _, digest = line.strip().partition(" ")
                known.configuration[path] = digest.split(" ")[0]
        return known

    def closure(self, names: Iterable[str], *, asked: tuple[str, ...]) -> set[str]:
        """Return these packages and all that they depend on, as far as installed. Raises `RuntimeUnavailable` if an asked one is not."""
        found: set[str] = set()
        left = list(names)
        while left:
            name = left.pop()
            package = name if name in self.depends else self.provides.get(name, "")
            if not package:
                if name in asked:
                    why = f"the package {name!r} is not installed here"
                    raise RuntimeUnavailable(why, missing=(name,), hint=f"apt-get install {name}, or name another (--with)")
                continue
            if package in found:
                continue
            found.add(package)
            for choices in self.depends[package]:
                left += next(([each] for each in choices if each in self.depends or each in self.provides), [])
        return found

    def files(self, packages: Iterable[str]) -> Iterator[str]:
        names = [self.full_names[package] for package in packages]
        listed = subprocess.run(["dpkg-query", "-L", *names], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        yield from (line for line in listed.stdout.splitlines() if line.startswith("/"))


def _bare(text: str) -> str:
    return text.strip().partition(" ")[0].partition(":")[0]


def _fill(tar: tarfile.TarFile, known: _Packages, packages: set[str]) -> None:
    """Add the files of packages to a layer: each once, at its real place, directories first."""
    for name, to in ((name, os.readlink(f"/{name}")) for name in _TOP_LINKS if os.path.islink(f"/{name}")):
        _add_link(tar, name, to)
    for name, mode in _DIRECTORIES.items():
        entry = tarfile.TarInfo(name)
        entry.type, entry.mode = tarfile.DIRTYPE, mode
        tar.addfile(entry)
    for name, text in _FILES.items():
        _add_text(tar, name, text)
    places = {os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)) for path in known.files(sorted(packages))}
    for path in sorted(_with_alternatives(places)):
        if path.lstrip("/") not in _FILES and not path.startswith(_LEFT_OUT) and _as_brought(path, known):
            _add(tar, path)
    for name, to in _LINKS.items():
        if os.path.lexists(to):
            _add_link(tar, name, to)
    if os.path.exists("/etc/ld.so.cache"):
        _add(tar, "/etc/ld.so.cache")


def _with_alternatives(places: set[str]) -> Iterator[str]:
    """Yield the paths, and the links of the alternatives system that lead to one of them, such as /usr/bin/awk."""
    yield from places
    for directory in ("/etc/alternatives", "/usr/bin"):
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_symlink() and entry.path not in places and os.path.realpath(entry.path) in places:
                    yield entry.path


def _as_brought(path: str, known: _Packages) -> bool:
    """Return whether a file may be copied: one outside /etc, or one of /etc with the content that its package brought."""
    if not path.startswith("/etc/") or os.path.islink(path) or os.path.isdir(path):
        return True
    return path in known.configuration and _digest(path, "md5") == known.configuration[path]


def _add(tar: tarfile.TarFile, path: str) -> None:
    try:
        status = os.lstat(path)
        if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode) or stat.S_ISLNK(status.st_mode):
            entry = tar.gettarinfo(path, path.lstrip("/"))
            entry.uname = entry.gname = ""
            if entry.islnk():  # hard links lead to names that may not be here
                entry.type, entry.linkname, entry.size = tarfile.REGTYPE, "", status.st_size
            if entry.isreg():
                with open(path, "rb") as file:
                    tar.addfile(entry, file)
            else:
                tar.addfile(entry)
    except (FileNotFoundError, PermissionError):  # removed by hand, or not readable for this user: the image lacks it, too
        return


def _add_text(tar: tarfile.TarFile, name: str, text: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(text.encode()), 0o644
    tar.addfile(entry, io.BytesIO(text.encode()))


def _add_link(tar: tarfile.TarFile, name: str, to: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, to
    tar.addfile(entry)


def _digest(path: str, kind: str = "sha256") -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()
    except OSError:
        return ""
