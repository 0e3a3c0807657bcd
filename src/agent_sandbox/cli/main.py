"""The program `agent-sandbox`: read the line, do the verb, and turn every failure into a sentence and an exit code.

Verbs are imported when they are asked for: `run` starts often and pays for nothing it does not use.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.cli.parser import Request, UsageError, parse
from agent_sandbox.cli.render.messages import complain
from agent_sandbox.errors import Conflicted, Denied, Drift, LaunchFailed, PolicyError, SandboxError

if TYPE_CHECKING:
    from typing import NoReturn

REALITY_MOVED_ON, USAGE, APPROVAL, COULD_NOT_START, DENIED = 1, 2, 3, 125, 126


def program() -> NoReturn:
    """The program: `main`, and out at once. Every block has ended, every stream is flushed; taking the interpreter apart adds nothing."""
    os._exit(main())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    line = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _do(line)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone, as in `… | head`. Point the stream elsewhere, or Python complains when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), 1)
        return 141
    except OSError as error:
        # Not expected here, and still no reason to show a traceback: standard output may be a full disk.
        complain(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", "")
        return COULD_NOT_START


def _do(line: list[str]) -> int:
    request = None
    try:
        request = parse(line)
        if request.has("--capability"):
            from agent_sandbox.cli.background import conceal  # before anything is forked

            conceal(request.values("--capability"))
        return _verb(request)
    except SandboxError as error:
        code = _code_of(error)
        message, hint = error.message, _hint(error)
        if request.has("--json") if request else "--json" in line:
            from agent_sandbox.cli.render.json import error_document

            error_document(error, code, hint)
        else:
            complain(message, hint)
        return code


def _verb(request: Request) -> int:
    if request.has("--help"):
        from agent_sandbox.cli.help import show_help

        return show_help(None if request.verb == "help" else request.verb)
    if sys.platform != "linux":
        from agent_sandbox.cli.non_linux import verb_elsewhere

        return verb_elsewhere(request)
    match request.verb:
        case "run":
            from agent_sandbox.cli.commands.run import run as do
        case "code":
            from agent_sandbox.cli.commands.code import code as do
        case "replay":
            from agent_sandbox.cli.commands.replay import replay as do
        case "sim" | "simulate":
            from agent_sandbox.cli.commands.run import sim as do
        case "carry-out":
            from agent_sandbox.cli.commands.carry_out import carry_out as do
        case "diff":
            from agent_sandbox.cli.commands.diff import diff as do
        case "status":
            from agent_sandbox.cli.commands.status import status as do
        case "promote" | "apply":
            from agent_sandbox.cli.commands.promote import promote as do
        case "undo":
            from agent_sandbox.cli.commands.promote import undo as do
        case "reset":
            from agent_sandbox.cli.commands.status import reset as do
        case "snapshot":
            from agent_sandbox.cli.commands.snapshots import snapshot as do
        case "rollback":
            from agent_sandbox.cli.commands.snapshots import rollback as do
        case "snapshots":
            from agent_sandbox.cli.commands.snapshots import snapshots as do
        case "log":
            from agent_sandbox.cli.commands.log import log as do
        case "approve":
            from agent_sandbox.cli.commands.approve import approve as do
        case "deny":
            from agent_sandbox.cli.commands.approve import deny as do
        case "grant":
            from agent_sandbox.cli.commands.grant import grant as do
        case "revoke":
            from agent_sandbox.cli.commands.grant import revoke as do
        case "capabilities":
            from agent_sandbox.cli.commands.grant import capabilities as do
        case "doctor":
            from agent_sandbox.cli.commands.doctor import doctor as do
        case "verify":
            from agent_sandbox.cli.commands.verify import verify as do
        case "policy":
            from agent_sandbox.cli.commands.policy import policy as do
        case "setup":
            from agent_sandbox.cli.commands.setup import setup as do
        case "completion":
            from agent_sandbox.cli.help import completion as do
        case _:
            from agent_sandbox.cli.help import help_or_version as do
    return do(request)


def _code_of(error: SandboxError) -> int:
    match error:
        case UsageError() | PolicyError():
            return USAGE
        case Drift() | Conflicted():
            return REALITY_MOVED_ON
        case Denied(verdict=verdict):
            return APPROVAL if verdict.because.rule in ("approval", "protected") else DENIED
        case _:
            return COULD_NOT_START


def _hint(error: SandboxError) -> str:
    if isinstance(error, LaunchFailed):  # what is unavailable by itself says best what to do; a launch knows only where it failed
        from agent_sandbox.cli.remedies import remedy_here

        if remedy := remedy_here():
            return f"{remedy}; more: agent-sandbox doctor"
    return error.hint
