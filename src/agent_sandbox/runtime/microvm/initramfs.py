"""The first file system of a machine: this machine's interpreter with the modules that the agent needs, and the kernel's modules.

Which files that are is found out by a trial: an interpreter on this machine imports what the agent and the programs need, and lists the
files that it opened or mapped. They get the same names inside, so that the interpreter finds its library in the view later, too.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys

from agent_sandbox._fast.values import dataclass
from agent_sandbox.errors import PolicyError, RuntimeUnavailable
from agent_sandbox.runtime.microvm import archive
from agent_sandbox.runtime.microvm.archive import ArchiveEntry
from agent_sandbox.runtime.microvm.kernel_package import Kernel, read_module
from agent_sandbox.runtime.microvm.libraries import names_of as libraries_of
from agent_sandbox.runtime.process.zygote import ONE_THREAD, packages

AGENT = "agent_sandbox.runtime.microvm.agent"
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/", **ONE_THREAD}
# What most programs in Python need and find loaded, as in the zygote of the process runtime.
_COMMON = ("contextlib", "functools", "signal", "socket", "json", "re", "random", "traceback")
_ROOT = os.path.abspath(__file__).removesuffix("/agent_sandbox/runtime/microvm/initramfs.py")
_SECONDS = 120.0
# It prints one line of JSON: the files, the directories that are searched, and the module that cannot be imported.
_TRIAL = """
import sys
root, agent, packages, *names = sys.argv[1:]
path = [*sys.path, *(each for each in packages.split(":") if each and each not in sys.path)]
opened, failed = [], ""
sys.addaudithook(lambda event, words: opened.append(words[0]) if event == "open" and isinstance(words[0], str) else None)
sys.path.insert(0, root)
import importlib, json, os
importlib.import_module(agent)
sys.path[:] = path
for name in names:
    try:
        importlib.import_module(name)
    except BaseException as error:
        failed = f"{name}: {error}"
        break
compile("", "", "exec")
files = {os.path.abspath(name) for name in opened if os.path.isfile(name)}
for module in list(sys.modules.values()):
    for name in (getattr(module, "__file__", None), getattr(module, "__cached__", None)):
        if name and os.path.isfile(name):
            files.add(os.path.abspath(name))
with open("/proc/self/maps") as maps:
    for line in maps:
        words = line.split(None, 5)
        if len(words) == 6 and os.path.isfile(words[5].strip()):
            files.add(words[5].strip())
files.update(name for name in (os.path.join(sys.prefix, "pyvenv.cfg"),) if os.path.isfile(name))
print(json.dumps({"files": sorted(f for f in files if not f.startswith("/proc/")), "path": path, "failed": failed}))
"""


@dataclass(frozen=True)
class InterpreterFiles:
    """The files of this machine that an interpreter inside needs, and the directories in which it looks for modules."""

    files: tuple[str, ...]
    path: tuple[str, ...]


def collect(preload: tuple[str, ...]) -> InterpreterFiles:
    """Find out what the agent and these modules need. Raises PolicyError for a module that cannot be imported here."""
    argv = [sys.executable, "-P", "-c", _TRIAL, _ROOT, AGENT, packages(), *_COMMON, *preload]
    done = subprocess.run(argv, env=_ENVIRONMENT, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, check=False, cwd="/")
    if done.returncode != 0:
        why = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise RuntimeUnavailable(f"the interpreter of a virtual machine cannot be collected: {why}", missing=("interpreter",))
    found = json.loads(done.stdout.decode().strip().rpartition("\n")[2])
    if found["failed"]:
        hint = "install the module for this interpreter, or leave it out of preload"
        raise PolicyError(f"cannot preload {found['failed']}", hint=hint)
    return InterpreterFiles(tuple(found["files"]), tuple(each for each in found["path"] if each))


def build(kernel: Kernel, contents: InterpreterFiles, preload: tuple[str, ...]) -> bytes:
    """Return the archive from which a machine boots. Its first program is a script of the interpreter."""
    libraries = libraries_of([file for file in contents.files if ".so" in file], os.path.realpath(sys.executable))
    entries = {entry.name: entry for entry in archive.tree_entries([sys.executable, *contents.files, *libraries, *_top_links()])}
    for directory in filter(os.path.isdir, contents.path):
        entries.update((entry.name, entry) for entry in archive.tree_entries([directory]) if entry.name not in entries)
    modules = [f"/m/{number:02}.ko" for number in range(len(kernel.modules))]
    ours = [ArchiveEntry("init", stat.S_IFREG | 0o755, _first_program(contents, preload).encode()), ArchiveEntry("m", stat.S_IFDIR | 0o755)]
    ours += [ArchiveEntry(name[1:], stat.S_IFREG | 0o644, read_module(path)) for name, path in zip(modules, kernel.modules, strict=True)]
    ours.append(ArchiveEntry("modules", stat.S_IFREG | 0o644, "\n".join(modules).encode()))
    entries.update((entry.name, entry) for entry in ours)
    return archive.pack([*entries.values()])


def _top_links() -> list[str]:
    """Return the links at the top of the machine through which libraries are found, such as /lib64."""
    return [f"/{name}" for name in ("lib", "lib64") if os.path.islink(f"/{name}")]


def _first_program(contents: InterpreterFiles, preload: tuple[str, ...]) -> str:
    path = os.pathsep.join(contents.path)
    return f"""#!{sys.executable} -P
import os, sys
sys.dont_write_bytecode = True
os.environ.clear()
os.environ.update({_ENVIRONMENT!r})
sys.argv[1:] = {[path, *_COMMON, *preload]!r}
sys.path.insert(0, {_ROOT!r})
from {AGENT} import main
main()
"""
