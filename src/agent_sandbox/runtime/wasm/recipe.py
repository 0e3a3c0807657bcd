"""What is compiled and imaged, and how, without the engine that does it."""

from __future__ import annotations

import hashlib

from agent_sandbox.kernel.wire import SCRIPT
from agent_sandbox.runtime import crossing, script, talking
from agent_sandbox.runtime.wasm.javascript import adapting
from agent_sandbox.values import TYPE_CHECKING

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

OURS = "_agent_sandbox"  # what `script` is called inside, until the program starts; `crossing` and `talking` are attributes of it
_MADE = "in a deterministic run\0"
_PREPARE = """
import gc, sys
for name in {modules!r}:
    __import__(name)
ours = type(sys)({ours!r})
for name, source in {sources!r}.items():
    part = ours if name == "script" else type(sys)(name)
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
    for module in (script, crossing, talking):
        with open(str(module.__file__), encoding="utf-8") as file:
            sources[module.__name__.rpartition(".")[2]] = file.read()
    return _PREPARE.format(modules=IMAGES.get(image, ("sys",)), ours=OURS, sources=sources, path=SCRIPT)


def stored_as(image: str) -> str:
    """The name of an image's file, which changes with what is in it and how it was made."""
    return f"{image}-{_hashed(_MADE + preparation(image))}"


def javascript_stored_as(digest: str, *, counting: bool) -> str:
    """The name of the file of the compiled interpreter of JavaScript. `digest` is that of its module before it is adapted."""
    return f"{'counting-' if counting else ''}javascript-{_hashed(digest, adapting.NAME, *adapting.EXPORTED)}"


def _hashed(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
