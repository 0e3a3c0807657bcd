"""What some tools cannot do without: helpers they start, and modules they load. Data, and how its patterns are looked up.

Only what the files themselves do not say is here: loaders, libraries and the interpreters of scripts are read from them. Paths are relative
to the tool's prefix (/usr for /usr/bin/git), and `{name}` is the tool's own file name, such as python3.11.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from agent_sandbox.policy.programs import covers, is_pattern
from agent_sandbox.values import dataclass


@dataclass(frozen=True)
class Kit:
    """Belongs to every tool with one of these names."""

    of: tuple[str, ...]
    helpers: tuple[str, ...] = ()  # directories whose programs it starts
    modules: tuple[str, ...] = ()  # trees whose shared libraries it loads
    tools: tuple[str, ...] = ()  # other tools that it is nothing without


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
# Many tools in one file, told apart by the name they are called by: who may start one of them may start them all.
MULTI_CALL = frozenset({"busybox", "toybox", "coreutils", "sbase-box", "box"})


def kits_of(name: str) -> list[Kit]:
    """What belongs to a tool with this file name."""
    return [kit for kit in KITS if covers(kit.of, name)]


def found(prefix: str, pattern: str) -> Iterator[str]:
    """The directories that a pattern of a kit stands for, as they are on this machine."""
    places = [prefix]
    for part in pattern.split("/"):
        if is_pattern(part):
            places = [f"{place}/{name}" for place in places for name in _names(place) if covers((part,), name)]
        else:
            places = [os.path.normpath(f"{place}/{part}") for place in places]
    for place in places:
        if os.path.isdir(place):
            yield os.path.realpath(place)


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []
