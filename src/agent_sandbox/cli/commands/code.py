"""`code`: run a source file in the project's sandbox. The file is read outside the sandbox, and its text is sent in.

Python code runs as `python FILE` would: modules beside the file can be imported, and the packages of the active virtual environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from agent_sandbox.cli.execute import perform
from agent_sandbox.cli.options import CodeOptions
from agent_sandbox.cli.parser import UsageError
from agent_sandbox.cli.render.messages import Console
from agent_sandbox.cli.results import VerbResult
from agent_sandbox.engine.work import Code
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.action import LANGUAGES, canonical_language
from agent_sandbox.policy.decide import LARGEST_SOURCE
from agent_sandbox.runtime.base import ScriptFile

_EXTENSIONS = {
    ".py": "python",
    ".js": "javascript",
    ".cjs": "javascript",
    ".mjs": "javascript",
    ".rb": "ruby",
    ".sh": "bash",
    ".bash": "bash",
}

_PROGRAMS = (("python", "python"), ("node", "javascript"), ("ruby", "ruby"), ("bash", "bash"), ("sh", "bash"))

STANDARD_INPUT = "-"
_VERSION = tuple(map(str, sys.version_info[:2]))


def code(options: CodeOptions, console: Console) -> VerbResult:
    """Run a source file."""
    source = read_source(options.file)
    language = language_of(options.language, options.file, source)
    stdin = b"" if options.file == STANDARD_INPUT else 0
    file = script_file(options.file, console) if language == "python" else None
    return perform(options.run, Code(language, source, options.arguments, file), console, stdin=stdin)


def script_file(name: str, console: Console) -> ScriptFile | None:
    """Return what an interpreter knows of the file that it runs; None for standard input and pipes, which have no place."""
    if name == STANDARD_INPUT or not os.path.isfile(name):
        return None
    environment, version = active_environment(os.environ)
    if environment and version != _VERSION:
        here, there = ".".join(_VERSION), ".".join(version) or "of an unknown version"
        console.note(
            f"packages of {environment} are not used: it is for Python {there}, and code runs on Python {here} (use: run python {name})"
        )
        environment = ""
    own = os.path.realpath(environment) == os.path.realpath(sys.prefix)
    path = os.path.abspath(name)
    return ScriptFile(name, path, os.path.dirname(os.path.realpath(path)), "" if own else environment)


def active_environment(variables: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """Return the active virtual environment and its version of Python; empty without one.

    It is the one that VIRTUAL_ENV names or, without that, the one whose `python` is the first in PATH.
    """
    prefix = variables.get("VIRTUAL_ENV", "")
    if not prefix:
        for directory in variables.get("PATH", os.defpath).split(os.pathsep):
            if any(os.access(os.path.join(directory, name), os.X_OK) for name in ("python", "python3")):
                prefix = os.path.dirname(os.path.abspath(directory))
                break
    try:
        with open(os.path.join(prefix, "pyvenv.cfg"), encoding="utf-8", errors="replace") as file:
            settings = dict(line.partition("=")[::2] for line in file.read(1 << 16).splitlines())
    except OSError:
        return "", ()
    known = {name.strip(): value.strip() for name, value in settings.items()}
    return os.path.abspath(prefix), tuple((known.get("version") or known.get("version_info") or "").split(".")[:2])


def read_source(file: str) -> str:
    """Return the text of a file, or of standard input. Raises `PolicyError` if it cannot be read."""
    try:
        if file == STANDARD_INPUT:
            content = sys.stdin.buffer.read(LARGEST_SOURCE + 1)
        else:
            # A pipe is welcome (process substitution), a directory is not.
            with open(os.open(file, os.O_RDONLY | os.O_CLOEXEC), "rb") as opened:
                content = opened.read(LARGEST_SOURCE + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a file name"
        raise PolicyError(f"{file!r} cannot be read: {why}", hint="name a file of code, or - for standard input") from error
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        if len(content) > LARGEST_SOURCE:  # cut inside a character: it is too large, which the policy refuses
            return content.decode(errors="replace")
        raise PolicyError(f"{file!r} is not UTF-8 text: {error.reason} at byte {error.start}", hint="save it as UTF-8") from error


def language_of(named: str | None, file: str, source: str) -> str:
    """Return the language named by the user, by the file's extension, or by its first line. Raises `UsageError` if none is known."""
    if named is not None:
        language = canonical_language(named)
        if language not in LANGUAGES:
            raise UsageError(f"unknown language {named!r}", hint=f"use one of {', '.join(LANGUAGES)}")
        return language
    guessed = _EXTENSIONS.get(os.path.splitext(file)[1].lower()) or _from_first_line(source)
    if guessed is None:
        raise UsageError(f"the language of {file!r} is unknown", hint=f"add --language {'|'.join(LANGUAGES)}")
    return guessed


def _from_first_line(source: str) -> str | None:
    """Return the language that a first line such as `#!/usr/bin/env python3` names; None if it names none."""
    first = source.partition("\n")[0]
    if not first.startswith("#!"):
        return None
    names = [os.path.basename(word) for word in first[2:].split()]
    programs = [name for name in names if name != "env" and not name.startswith("-")]
    return next((language for name in programs[:1] for start, language in _PROGRAMS if name.startswith(start)), None)
