"""The program `agent-sandbox`: parse the command line, perform the verb, print its result, turn failures into messages and exit codes.

The code of a verb is imported only when it is needed, because `run` must start fast.
"""

from __future__ import annotations

import errno
import os
import sys

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.cli import options
from agent_sandbox.cli.parser import Request, UsageError, parse
from agent_sandbox.cli.render.messages import PROGRAM, Console
from agent_sandbox.cli.results import ErrorFacts, ErrorResult, RefusalFacts, VerbResult
from agent_sandbox.errors import Conflicted, Denied, Drift, LaunchFailed, PolicyError, SandboxError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

_DEBUG = "AGENT_SANDBOX_DEBUG"
_LONGEST_FAULT = 1000  # characters of the text of an unexpected exception
_OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
STANDARD_OUTPUT, STANDARD_ERROR = "standard output", "standard error"  # in place of the name of a file
REALITY_MOVED_ON, USAGE, APPROVAL, COULD_NOT_START, DENIED = 1, 2, 3, 125, 126


def program() -> NoReturn:
    """Run `main` and exit at once. Skips the interpreter's own clean-up: everything is closed and flushed by then."""
    from agent_sandbox.cli.errand import open_closed_streams  # loaded already, where the program begins there

    open_closed_streams()
    os._exit(main())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    line = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(line)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has gone, as in `… | head`. Point the stream elsewhere, or Python complains when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), 1)
        return 141
    except Exception as error:  # the result cannot be printed: standard output may be a full disk
        if isinstance(error, OSError) and error.filename is None and error.errno in _OF_A_DISK:
            error.filename = STANDARD_OUTPUT
        fault_of(error).text(Console())
        return COULD_NOT_START


def _run(line: list[str]) -> int:
    """Perform a command line and print the result: as one JSON document with --json, else as text."""
    console = Console(shows="--json" not in line)
    try:
        request = parse(line)
        common = options.CommonOptions.read(request)
        console = Console(common.quiet, not common.json, common.everything, common.colour)
        if common.capabilities:
            from agent_sandbox.cli.caller import conceal  # before anything is forked

            conceal(common.capabilities)
        result = _help(request) if common.help else _result(request, console)
    except SandboxError as error:
        result = failure_of(error)
    except BrokenPipeError:
        raise
    except Exception as error:  # the last resort: a user never sees a traceback unasked
        result = fault_of(error)
    if console.shows or not result.kind:
        result.text(console)
    elif not result.streamed:
        from agent_sandbox.cli.render.json import print_document

        print_document(result)
    result.go_on()
    return result.code


def _result(request: Request, console: Console) -> VerbResult:
    """Perform the verb of a command line and return its result."""
    verb = request.verb
    match verb:
        case "help":
            return _help(request)
        case "completion":
            from agent_sandbox.cli.completion import completion

            return completion(request.words)
        case "version":
            from agent_sandbox.cli.help import VersionResult, version

            return VersionResult(version())
    if sys.platform != "linux":
        return _elsewhere(verb)
    match verb:
        case "run" | "code" if request.has("--timeline") or request.has("--in"):
            from agent_sandbox.cli.timeline_options import TimelineRunOptions, runs_a_command

            if runs_a_command(request):
                from agent_sandbox.cli.commands.run import run

                return run(options.CommandOptions.read(request), console)
            from agent_sandbox.cli.commands.timeline_run import run_with_timeline

            return run_with_timeline(TimelineRunOptions.read(request), console)
        case "run" if request.has("--detach"):
            from agent_sandbox.cli.commands.detach import detach
            from agent_sandbox.cli.detached_options import DetachOptions

            return detach(DetachOptions.read(request), console)
        case "exec" | "logs" | "stop" | "ps":
            return _detached(request)
        case "timeline" | "rewind" | "inspect" | "fork":
            return _timeline(request, console)
        case "run" | "sim" | "simulate":
            from agent_sandbox.cli.commands.run import run

            return run(options.CommandOptions.read(request), console)
        case "shell":
            from agent_sandbox.cli.commands.shell import shell

            return shell(options.CommandOptions.read(request), console)
        case "code":
            from agent_sandbox.cli.commands.code import code

            return code(options.CodeOptions.read(request), console)
        case "replay":
            from agent_sandbox.cli.commands.replay import replay

            return replay(options.ReplayOptions.read(request))
        case "carry-out":
            from agent_sandbox.cli.commands.sim import carry_out

            return carry_out(options.CarryOutOptions.read(request), console)
        case "try":
            from agent_sandbox.cli.commands.experiment import try_approaches
            from agent_sandbox.cli.experiment_options import TryOptions

            return try_approaches(TryOptions.read(request), console)
        case "shell-prefix" | "agent" | "connect" | "hook":
            from agent_sandbox.cli.commands.coding_agents import coding_agents

            return coding_agents(request, console)
        case "diff":
            from agent_sandbox.cli.commands.diff import diff

            return diff(options.CommandOptions.read(request), console)
        case "promote" | "apply":
            from agent_sandbox.cli.commands.promote import promote

            return promote(options.PromoteOptions.read(request), console)
        case "undo":
            from agent_sandbox.cli.commands.promote import undo

            return undo(options.PromoteOptions.read(request), console)
        case "status":
            from agent_sandbox.cli.commands.status import status

            return status(options.SandboxOptions.read(request))
        case "reset":
            from agent_sandbox.cli.commands.status import reset

            return reset(options.SandboxOptions.read(request), console)
        case "list":
            from agent_sandbox.cli.commands.sandboxes import list_sandboxes

            return list_sandboxes()
        case "prune":
            from agent_sandbox.cli.commands.sandboxes import prune
            from agent_sandbox.cli.prune_options import PruneOptions

            return prune(PruneOptions.read(request), console)
        case "snapshot":
            from agent_sandbox.cli.commands.snapshots import snapshot

            return snapshot(options.SandboxOptions.read(request))
        case "rollback":
            from agent_sandbox.cli.commands.snapshots import rollback

            return rollback(options.SandboxOptions.read(request))
        case "snapshots":
            from agent_sandbox.cli.commands.snapshots import snapshots

            return snapshots(options.SandboxOptions.read(request), console)
        case "checkpoints":
            from agent_sandbox.cli.commands.checkpoints import CheckpointOptions, checkpoints

            return checkpoints(CheckpointOptions.read(request), console)
        case "image":
            from agent_sandbox.cli.commands.image import ImageOptions, image

            return image(ImageOptions.read(request), console)
        case "log":
            return _log(request)
        case "approve" | "deny":
            from agent_sandbox.cli.commands.approve import approve
            from agent_sandbox.cli.permission_options import ApproveOptions

            return approve(ApproveOptions.read(request), console)
        case "grant":
            from agent_sandbox.cli.commands.grant import grant
            from agent_sandbox.cli.permission_options import GrantOptions

            return grant(GrantOptions.read(request))
        case "revoke":
            from agent_sandbox.cli.commands.grant import revoke
            from agent_sandbox.cli.permission_options import RevokeOptions

            return revoke(RevokeOptions.read(request))
        case "capabilities":
            from agent_sandbox.cli.commands.grant import capabilities

            return capabilities()
        case "serve":
            from agent_sandbox.cli.commands.serve import serve
            from agent_sandbox.cli.serve_options import ServeOptions

            return serve(ServeOptions.read(request), console)
        case "mcp":
            from agent_sandbox.cli.commands.mcp import serve_mcp

            return serve_mcp(request, console)
        case "doctor":
            from agent_sandbox.cli.commands.doctor import doctor

            return doctor()
        case "verify":
            from agent_sandbox.cli.commands.verify import verify

            return verify(options.VerifyOptions.read(request), console)
        case "policy":
            from agent_sandbox.cli.commands.policy import policy

            return policy(options.PolicyVerbOptions.read(request), console)
        case _:
            from agent_sandbox.cli.commands.setup import setup, setup_microvm

            return setup_microvm(request.words[0], console) if request.words else setup()


def _help(request: Request) -> VerbResult:
    """Return the help text for a request: for `help`, about the verb it names or about all; else about the request's own verb."""
    from agent_sandbox.cli.help import help_for

    return help_for(next(iter(request.words), None) if request.verb == "help" else request.verb)


def _timeline(request: Request, console: Console) -> VerbResult:
    from agent_sandbox.cli.commands.inspect import inspect
    from agent_sandbox.cli.commands.timeline import fork, rewind, timeline
    from agent_sandbox.cli.timeline_options import ForkOptions, InspectOptions, RewindOptions, TimelineOptions

    match request.verb:
        case "timeline":
            return timeline(TimelineOptions.read(request), console)
        case "rewind":
            return rewind(RewindOptions.read(request), console)
        case "inspect":
            return inspect(InspectOptions.read(request), console)
        case _:
            return fork(ForkOptions.read(request), console)


def _detached(request: Request) -> VerbResult:
    from agent_sandbox.cli.commands.detached import execute_in, logs, ps, stop
    from agent_sandbox.cli.detached_options import ExecOptions, LogsOptions, StopOptions

    match request.verb:
        case "exec":
            return execute_in(ExecOptions.read(request))
        case "logs":
            return logs(LogsOptions.read(request))
        case "stop":
            return stop(StopOptions.read(request))
        case _:
            return ps(everything=request.has("--all"))


def _log(request: Request) -> VerbResult:
    from agent_sandbox.cli.commands.log import log, log_checkpoint, log_verify
    from agent_sandbox.cli.log_options import LogOptions, LogVerifyOptions

    match request.words:
        case ():
            return log(LogOptions.read(request))
        case ("verify", *_):
            return log_verify(LogVerifyOptions.read(request))
        case ("checkpoint",):
            return log_checkpoint()
        case _:
            raise UsageError(f"log has no {request.words[0]!r}", hint="agent-sandbox log, log verify [FILE] or log checkpoint")


def _elsewhere(verb: str) -> VerbResult:
    """Perform a verb on a system other than Linux. Raises `RuntimeUnavailable` for verbs that need Linux."""
    from agent_sandbox.cli.non_linux import doctor_elsewhere, refuse_elsewhere, setup_elsewhere

    match verb:
        case "doctor":
            return doctor_elsewhere()
        case "setup":
            return setup_elsewhere()
        case _:
            refuse_elsewhere(verb)


def failure_of(error: SandboxError) -> ErrorResult:
    """Return an exception as a result."""
    facts = ErrorFacts(type(error).__name__, error.message, _hint(error))
    if isinstance(error, Denied):
        from agent_sandbox.policy.decide import granting, lifting

        verdict, because = error.verdict, error.verdict.because
        grant = granting(verdict.missing) if verdict.missing else None
        elevate = lifting(verdict.program) if verdict.program else None
        refusal = RefusalFacts(because.rule, because.why, because.remedy, verdict.missing or None, grant, elevate)
        facts = ErrorFacts(facts.kind, facts.message, facts.hint, refusal)
    return ErrorResult(facts, _code_of(error))


def fault_of(error: Exception) -> ErrorResult:
    """Return an exception that nobody expected as a result, and print where it was raised if the user has asked for that."""
    if os.environ.get(_DEBUG):
        import traceback  # only for developers

        traceback.print_exception(error)
    hint = f"see where it happened: run the same with {_DEBUG}=1"
    if isinstance(error, OSError) and error.filename in (STANDARD_OUTPUT, STANDARD_ERROR):
        message = f"{error.filename} cannot be written: {error.strerror or error}"
        hint = "free space where it goes, or send it elsewhere"
    elif isinstance(error, OSError):
        message = f"the system refused: {error.strerror or error}{f': {_text(error.filename)!r}' if error.filename else ''}"
    else:
        message = f"this is a mistake in {PROGRAM} itself: {type(error).__name__}: {str(error)[:_LONGEST_FAULT]}"
    return ErrorResult(ErrorFacts(type(error).__name__, message, hint), COULD_NOT_START)


def _text(name: str | bytes) -> str:
    return os.fsencode(name).decode(errors="backslashreplace")


def _code_of(error: SandboxError) -> int:
    match error:
        case UsageError() | PolicyError():
            return USAGE
        case Drift() | Conflicted():
            return REALITY_MOVED_ON
        case Denied(verdict=verdict):
            return APPROVAL if verdict.because.rule in ("approval", "protected", "expect") else DENIED
        case _:
            return COULD_NOT_START


def _hint(error: SandboxError) -> str:
    if isinstance(error, LaunchFailed):  # a launch knows only where it failed; the machine may show why
        from agent_sandbox.cli.remedies import remedy_here

        if remedy := remedy_here():
            return f"{remedy}; more: agent-sandbox doctor"
    return _as_typed(error.hint)


def _as_typed(hint: str) -> str:
    """Return a hint with the option of the command line in place of the setting of `Sandbox`.

    >>> _as_typed('use runtime="process", or "auto"')
    'use --runtime process, or "auto"'
    """
    before, setting, rest = hint.partition('runtime="')
    name, _, after = rest.partition('"')
    return f"{before}--runtime {name}{after}" if setting else hint
