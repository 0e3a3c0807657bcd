"""`--env-file`: variables for the program, one NAME=VALUE on a line, as `docker run --env-file` and dotenv know them.

The file is read on the machine, before the run: what the sandbox made of it does not count. A value is literal: nothing in it is expanded,
and no message repeats it. A name without a value is refused: a file of the project must not choose which of your variables are passed on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from agent_sandbox.assembly import here
from agent_sandbox.cli.caller import is_variable
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.paths import contains

LARGEST = 1 << 20  # bytes
_LINE = re.compile(r"""(?:export\s+)?(?P<name>[^\s=]+)\s*=\s*(?:"(?P<double>(?:[^"\\]|\\.)*)"|'(?P<single>[^']*)'|(?P<bare>[^"'].*)|)""")
_REST = re.compile(r"\s*(#.*)?")
_ESCAPED = re.compile(r"\\(.)")
_COMMENT = re.compile(r"(^|\s)#.*")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
# They make a program load code, or are ours. Whoever means that says so with --env.
_LOADING = ("LD_", "AGENT_SANDBOX_", "BASH_ENV", "GLIBC_TUNABLES")


def read_env_files(files: Iterable[str]) -> tuple[str, ...]:
    """Return the variables in these files, each as NAME=VALUE. Raises `PolicyError`, which names the file and the line, never the value."""
    return tuple(variable for file in files for variable in _variables(file))


def _variables(file: str) -> list[str]:
    variables: list[str] = []
    for number, line in enumerate(_text(file).split("\n"), 1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            try:
                variables.append(_variable(stripped))
            except ValueError as error:
                hint = 'write NAME=VALUE, NAME="VALUE" or # for a comment'
                raise PolicyError(f"--env-file {file}, line {number}: {error}", hint=hint) from None
    return variables


def _variable(line: str) -> str:
    """Read one line. Raises ValueError, with a message that has nothing of the value."""
    match = _LINE.match(line)
    if match is None:
        raise ValueError("it is not NAME=VALUE")
    if not _REST.fullmatch(line, match.end()):
        closed = match["double"] is not None or match["single"] is not None
        raise ValueError("something follows the closing quotation mark" if closed else "the closing quotation mark is missing")
    name = match["name"]
    if not is_variable(name):
        raise ValueError("the name is not of letters, digits and _, no digit first")  # not repeated: it may be a line of a key
    if name.startswith(_LOADING):
        raise ValueError(f"{name} is not taken from a file, because programs load code by it or it is a setting of this program")
    if match["double"] is not None:
        value = _ESCAPED.sub(lambda escape: _ESCAPES.get(escape[1], escape[1]), match["double"])
        return f"{name}={value}"
    if match["single"] is not None:
        return f"{name}={match['single']}"
    return f"{name}={_COMMENT.sub('', match['bare'] or '').strip()}"


def _text(file: str) -> str:
    try:
        with open(os.open(file, os.O_RDONLY | os.O_CLOEXEC), "rb") as opened:
            # The file that was opened, whichever names and links led there: what lies in the state directory was written by sandboxes.
            place = os.readlink(f"/proc/self/fd/{opened.fileno()}")
            if contains(os.path.realpath(here().host.state), place):
                raise PolicyError(f"--env-file {file} lies in the state directory, where sandboxes write", hint="copy it elsewhere")
            content = opened.read(LARGEST + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a file name"
        raise PolicyError(f"--env-file {file!r} cannot be read: {why}", hint="name a file with lines NAME=VALUE") from None
    if len(content) > LARGEST:
        raise PolicyError(f"--env-file {file} is larger than {LARGEST >> 20} MiB", hint="name a file with lines NAME=VALUE")
    if b"\0" in content:
        raise PolicyError(f"--env-file {file} holds a NUL character", hint="name a file with lines NAME=VALUE")
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise PolicyError(f"--env-file {file} is not UTF-8 text: {error.reason} at byte {error.start}", hint="save it as UTF-8") from None
