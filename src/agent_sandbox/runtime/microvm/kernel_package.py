"""The kernel that a machine boots: the distribution's package, installed or only unpacked. Nothing is downloaded here.

A place holds `boot/vmlinuz-VERSION` and `lib/modules/VERSION`, as the package does. Debian's ordinary kernel has what is needed as
modules; its cloud kernel has no 9p.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator

from agent_sandbox._fast.functions import lru_cache
from agent_sandbox._fast.values import dataclass
from agent_sandbox.errors import RuntimeUnavailable

UNPACKED = "/usr/local/lib/agent-sandbox/kernel"  # where `make setup` unpacks the package
WANTED = ("virtio_mmio", "virtio_console", "9pnet_virtio", "9p")  # the devices of the machine, and the file system of the view
HINT = "install the package linux-image-amd64; or unpack it (apt-get download, dpkg -x) and name the directory in AGENT_SANDBOX_KERNEL"
_LIST = "modules.order"
_ENDINGS = (".ko", ".ko.xz")
_NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True)
class Kernel:
    """A bootable kernel: its image, and the modules to load, each after those it depends on."""

    version: str
    image: str
    modules: tuple[str, ...]

    @property
    def identity(self) -> str:
        """A string that changes when the kernel's image is replaced."""
        facts = os.stat(self.image)
        return f"{self.version} {facts.st_size} {facts.st_mtime_ns}"


def find(places: Iterable[str]) -> Kernel:
    """Return the newest usable kernel of the first place that has one. Raises `RuntimeUnavailable`, with the reasons."""
    reasons: list[str] = []
    for place in places:
        for version in _versions(place):
            try:
                return _kernel(place, version)
            except (OSError, LookupError) as error:
                reasons.append(f"{version}: {error}")
    why = "; ".join(reasons) or "there is no kernel image to boot"
    raise RuntimeUnavailable(f"no kernel for a virtual machine: {why}", missing=("kernel",), hint=HINT)


def is_there(places: Iterable[str]) -> bool:
    """Return whether there is a kernel image at all, without looking at its modules."""
    return any(_versions(place) for place in places)


def _versions(place: str) -> list[str]:
    try:
        names = os.listdir(os.path.join(place, "boot"))
    except OSError:
        return []
    found = [name.removeprefix("vmlinuz-") for name in names if name.startswith("vmlinuz-")]
    return sorted(found, key=lambda version: [int(number) for number in _NUMBERS.findall(version)], reverse=True)


def _kernel(place: str, version: str) -> Kernel:
    image = os.path.join(place, "boot", f"vmlinuz-{version}")
    with open(image, "rb"):
        pass
    for library in ("lib", "usr/lib"):
        modules = os.path.join(place, library, "modules", version)
        if os.path.isdir(modules):
            return Kernel(version, image, _modules(modules, os.stat(os.path.join(modules, _LIST)).st_mtime_ns))
    raise LookupError("its modules are not installed")


@lru_cache(maxsize=4)
def _modules(directory: str, changed: int) -> tuple[str, ...]:
    """Return the modules to load. `changed` is when their list was written: reading thousands of lines takes longer than a short run."""
    return tuple(_in_order(_index(directory)))


def _index(directory: str) -> dict[str, str]:
    """Return the modules that the package lists, by name. A compressed module is listed under its plain name."""
    paths: dict[str, str] = {}
    with open(os.path.join(directory, _LIST)) as names:
        for line in names:
            stem = os.path.join(directory, line.strip().partition(".ko")[0])
            paths[os.path.basename(stem).replace("-", "_")] = stem
    return paths


def _in_order(paths: dict[str, str]) -> Iterator[str]:
    done: set[str] = set()

    def add(name: str) -> Iterator[str]:
        if name in done:
            return
        done.add(name)
        if name not in paths:
            raise LookupError(f"it has no module {name}")
        path = next((path for ending in _ENDINGS if os.path.isfile(path := paths[name] + ending)), None)
        if path is None:
            raise LookupError(f"its module {name} is compressed in a way that is not known here")
        content = read_module(path)
        for each in re.findall(rb"\0depends=([^\0]*)\0", content):
            for other in filter(None, each.decode().split(",")):
                yield from add(other.replace("-", "_"))
        yield path

    for name in WANTED:
        yield from add(name)


def read_module(path: str) -> bytes:
    """Return the content of a module, decompressed."""
    with open(path, "rb") as file:
        content = file.read()
    if not path.endswith(".xz"):
        return content
    import lzma  # Debian 12 does not compress its modules

    return lzma.decompress(content)
