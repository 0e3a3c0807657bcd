"""Compile the setup helper into the package while it is built, if there is a C compiler. Without one everything works, a little slower.

Run as a program, it compiles the helper in this checkout, for who has changed it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a program, without the build backend
    BuildHookInterface = object  # type: ignore[assignment, misc]

KERNEL = Path("src", "agent_sandbox", "kernel")
LIBRARY = KERNEL / "libsetup_helper.so"
FLAGS = [
    *("-std=gnu11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Wmissing-prototypes", "-fPIC", "-shared", "-fvisibility=hidden"),
    *("-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2", "-Wl,-z,relro,-z,now,-z,noexecstack"),
]


def compile_helper(root: Path, library: Path | None = None) -> str:
    """Compile the helper of the checkout in `root`, into that checkout or into another file. Return "", or why there is none."""
    library = root / LIBRARY if library is None else library
    made = Path(f"{library}.{os.getpid()}")
    sources = sorted((root / KERNEL / "helper").glob("*.[ch]"))
    digest = hashlib.sha256(b"".join(b"%b\0%b\0" % (path.name.encode(), path.read_bytes()) for path in sources)).hexdigest()
    names = [f"{path.relative_to(root)}" for path in sources if path.suffix == ".c"]
    command = [*(os.environ.get("CC") or "cc").split(), *FLAGS, f'-DSETUP_SOURCES="{digest}"', "-o", str(made), *names]
    try:
        if not sys.platform.startswith("linux"):
            raise OSError(f"it is for Linux, not for {sys.platform}")
        subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
        made.rename(library)  # at once: a keeper that starts meanwhile loads all of one or of the other
        return ""
    except FileNotFoundError:
        why = "there is no C compiler"
    except OSError as error:
        why = error.strerror or f"{error}"
    except subprocess.CalledProcessError as error:
        why = f"the C compiler failed: {error.stderr.strip()}"
    for left in (made, library):  # an older one is not from these sources
        with suppress(OSError):  # a checkout that cannot be written to
            left.unlink()
    return why


class SetupHelper(BuildHookInterface):  # type: ignore[type-arg]
    """The build hook. A package with the helper is for one kind of machine. Nothing is left in the checkout but for an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the helper, and add it to the package."""
        if self.target_name != "wheel":
            return
        self.scratch = tempfile.TemporaryDirectory()
        editable = version == "editable"
        library = None if editable else Path(self.scratch.name, LIBRARY.name)
        if why := compile_helper(Path(self.root), library):
            self.app.display_warning(f"the package is built without its compiled setup helper: {why}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        if library is not None:
            build_data["force_include"][str(library)] = str(LIBRARY.relative_to("src"))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled beside the checkout, and what loading this file has left in it."""
        if self.target_name == "wheel":
            self.scratch.cleanup()
        cached = Path(importlib.util.cache_from_source(__file__))
        with suppress(OSError):
            cached.unlink()
            cached.parent.rmdir()  # unless somebody else's files are there, too


if __name__ == "__main__":
    sys.exit(compile_helper(Path(__file__).resolve().parent) or None)
